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
    groups, length = prompts.shape
    _, samples, tokens = completions.shape
    ids = torch.cat([prompts, completions.flatten(1)], 1)
    positions = torch.cat([torch.arange(length), (length + torch.arange(tokens)).repeat(samples)])
    logits = model(
        input_ids=ids,
        attention_mask=_mask(length, samples, tokens).expand(groups, 1, -1, -1),
        position_ids=positions.expand(groups, -1),
        logits_to_keep=torch.arange(length - 1, ids.shape[1]),
        use_cache=False,
    ).logits
    # The prompt's last position predicts every sample's first token; a sample's last position predicts nothing.
    first = logits[:, None, :1].expand(-1, samples, -1, -1)
    rest = logits[:, 1:].unflatten(1, (samples, tokens))[:, :, :-1]
    return torch.cat([first, rest], 2)


def _mask(length: int, samples: int, tokens: int) -> Tensor:
    """float32 [1, n, n], 0 where a position may look: back, at the prompt or at its own sample; else minus infinity."""
    owner = torch.cat([torch.full((length,), -1), torch.arange(samples).repeat_interleave(tokens)])
    place = torch.arange(len(owner))
    sees = (place[None] <= place[:, None]) & ((owner[None] == -1) | (owner[None] == owner[:, None]))
    return torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[None]
