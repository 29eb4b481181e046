"""A prompt and all its completions as one sequence: the prompt is computed once a group, not once a sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def completion_logits(model: nn.Module, prompts: Tensor, completions: Tensor) -> Tensor:
    """What the model predicts for each completion token, given its prompt and the tokens before it.

    Args:
        model: a causal language model of transformers.
        prompts: int64 [groups, prompt length].
        completions: int64 [groups, samples, tokens].

    Returns logits [groups, samples, tokens, vocabulary], equal to those of the unpacked sequences.
    """
    length = prompts.shape[1]
    _, samples, tokens = completions.shape
    logits = _logits(model, prompts, completions, torch.arange(length - 1, length + samples * tokens))
    # The prompt's last position predicts every sample's first token; a sample's last position predicts nothing.
    first = logits[:, None, :1].expand(-1, samples, -1, -1)
    rest = logits[:, 1:].reshape(-1, samples, tokens, logits.shape[-1])[:, :, :-1]
    return torch.cat([first, rest], 2)


def next_logits(model: nn.Module, prompts: Tensor, completions: Tensor) -> Tensor:
    """What the model predicts behind each completion, which may have 0 tokens: [groups, samples, vocabulary].

    All tokens so far are computed again. For completions of a few tokens that is less work than a cache that holds the
    prompt once a sample.
    """
    _, samples, tokens = completions.shape
    return _logits(model, prompts, completions, prompts.shape[1] - 1 + tokens * torch.arange(1, samples + 1))


def _logits(model: nn.Module, prompts: Tensor, completions: Tensor, keep: Tensor) -> Tensor:
    """Logits at the places ``keep`` of the packed sequences: [groups, places, vocabulary]."""
    length = prompts.shape[1]
    groups, samples, tokens = completions.shape
    positions = torch.cat([torch.arange(length), (length + torch.arange(tokens)).repeat(samples)])
    logits: Tensor = model(
        input_ids=torch.cat([prompts, completions.flatten(1)], 1),
        attention_mask=_mask(length, samples, tokens).expand(groups, 1, -1, -1),
        position_ids=positions.expand(groups, -1),
        logits_to_keep=keep,
        use_cache=False,
    ).logits
    return logits


def _mask(length: int, samples: int, tokens: int) -> Tensor:
    """float32 [1, n, n], 0 where a position may look: back, at the prompt or at its own sample; else minus infinity."""
    owner = torch.cat([torch.full((length,), -1), torch.arange(samples).repeat_interleave(tokens)])
    place = torch.arange(len(owner))
    sees = (place[None] <= place[:, None]) & ((owner[None] == -1) | (owner[None] == owner[:, None]))
    return torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[None]
