"""The rollout's rank: answers prompts with the version that mx-rl installed last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from examples.grpo.digests import digests
from examples.grpo.model import make_model, make_tokens
from examples.grpo.packing import next_logits
from examples.grpo.settings import Settings
from examples.grpo.task import Prompt
from mx_rl.ray import Rollout


@dataclass(frozen=True, kw_only=True)
class Request:
    prompts: tuple[Prompt, ...]
    seed: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """The completions of one prompt: [samples][tokens]; what stands behind an end token counts for nothing."""

    prompt: Prompt
    tokens: list[list[int]]
    logprobs: list[list[float]]
    texts: list[str]
    replica: str
    version: int


class GrpoRollout(Rollout):
    def __init__(self, *, settings: Settings) -> None:
        self.settings = settings

    def build(self) -> nn.Module:
        torch.set_num_threads(self.settings.rollout_threads)
        self.tokens = make_tokens(self.settings)
        self.model = make_model(self.settings, dtype=torch.bfloat16, weights=False).eval()
        return self.model

    def generate(self, request: Request) -> list[Group]:
        """A group of sampled completions for each prompt."""
        version = self.version
        assert version is not None, "the fleet sends work to replicas that hold a version"
        torch.manual_seed(request.seed)
        tokens, logprobs = self._complete(request.prompts, self.settings.num_samples, self.settings.temperature)
        return [
            Group(
                prompt=prompt,
                tokens=rows,
                logprobs=chances,
                texts=[self.tokens.decode(row) for row in rows],
                replica=self.replica,
                version=version,
            )
            for prompt, rows, chances in zip(request.prompts, tokens.tolist(), logprobs.tolist(), strict=True)
        ]

    def answer(self, prompts: Sequence[Prompt]) -> list[str]:
        """The likeliest completion of each prompt, token by token."""
        tokens, _ = self._complete(prompts, samples=1, temperature=0.0)
        return [self.tokens.decode(row) for (row,) in tokens.tolist()]

    def digests(self) -> dict[str, str]:
        return digests(self.model.state_dict(), torch.bfloat16)

    @torch.no_grad()
    def _complete(self, prompts: Sequence[Prompt], samples: int, temperature: float) -> tuple[Tensor, Tensor]:
        """Completion tokens and the log-probabilities they were drawn with, [prompts, samples, tokens] both.

        What is drawn behind an end token is padding.
        """
        ids = self.tokens.encode([prompt.text for prompt in prompts])
        tokens = torch.empty(len(prompts), samples, 0, dtype=torch.int64)
        logprobs = torch.empty(len(prompts), samples, 0)
        for _ in range(self.settings.num_tokens):
            logits = next_logits(self.model, ids, tokens).float()
            chances = (logits / (temperature or 1.0)).log_softmax(-1)
            drawn = draw(chances) if temperature else chances.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, drawn], -1)
            logprobs = torch.cat([logprobs, chances.gather(-1, drawn)], -1)
        return tokens, logprobs


def draw(logprobs: Tensor) -> Tensor:
    """One index of the last dimension [..., 1], each as likely as it says. multinomial does it too, but draws a random
    number for every word of the vocabulary, a fifth of the time that a step of generation takes."""
    upto = logprobs.exp().cumsum(-1)
    point = torch.rand(*logprobs.shape[:-1], 1) * upto[..., -1:]  # the last sum is 1 only up to rounding
    return torch.searchsorted(upto, point).clamp(max=logprobs.shape[-1] - 1)
