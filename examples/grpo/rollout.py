"""The rollout's rank: answers prompts with the version that mx-rl installed last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from examples.grpo.digests import digests
from examples.grpo.model import make_model, make_tokens
from examples.grpo.settings import Settings
from examples.grpo.task import Prompt
from mx_rl.ray import Rollout


@dataclass(frozen=True, kw_only=True)
class Request:
    prompts: tuple[Prompt, ...]
    seed: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """The completions of one prompt: [samples][tokens], padded behind the end token."""

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
        self.model: Any = make_model(self.settings, dtype=torch.bfloat16, weights=False).eval()
        return self.model

    def generate(self, request: Request) -> list[Group]:
        """A group of sampled completions for each prompt."""
        version = self.version
        assert version is not None, "the fleet sends work to replicas that hold a version"
        torch.manual_seed(request.seed)
        samples, length = self.settings.num_samples, self.settings.num_tokens
        tokens, logprobs = self._complete(
            request.prompts,
            do_sample=True,
            temperature=self.settings.temperature,
            top_k=0,  # transformers would sample from the likeliest 50
            num_return_sequences=samples,
        )
        missing = length - tokens.shape[1]  # all samples may have ended early
        tokens = pad(tokens, (0, missing), value=self.tokens.end).unflatten(0, (-1, samples))
        logprobs = pad(logprobs, (0, missing)).unflatten(0, (-1, samples))
        return [
            Group(
                prompt=prompt,
                tokens=rows.tolist(),
                logprobs=chances.tolist(),
                texts=[self.tokens.decode(row) for row in rows.tolist()],
                replica=self.replica,
                version=version,
            )
            for prompt, rows, chances in zip(request.prompts, tokens, logprobs, strict=True)
        ]

    def answer(self, prompts: Sequence[Prompt]) -> list[str]:
        """The likeliest completion of each prompt."""
        tokens, _ = self._complete(prompts, do_sample=False)
        return [self.tokens.decode(row) for row in tokens.tolist()]

    def digests(self) -> dict[str, str]:
        return digests(self.model.state_dict(), torch.bfloat16)

    @torch.no_grad()
    def _complete(self, prompts: Sequence[Prompt], **how: Any) -> tuple[Tensor, Tensor]:
        """Completion tokens and their log-probabilities, [prompts x samples, tokens]."""
        ids = self.tokens.encode([prompt.text for prompt in prompts])
        made = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.settings.num_tokens,
            eos_token_id=self.tokens.end,
            pad_token_id=self.tokens.end,
            return_dict_in_generate=True,
            output_scores=True,
            **how,
        )
        chances = self.model.compute_transition_scores(made.sequences, made.scores, normalize_logits=True)
        return made.sequences[:, ids.shape[1] :], chances
