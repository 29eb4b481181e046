"""Group-relative policy optimisation: the advantages and the loss (arXiv 2402.03300, without the KL term)."""

from __future__ import annotations

from torch import Tensor


def advantages(rewards: Tensor) -> Tensor:
    """float32 [groups, samples] to the same: how much better a sample is than its group, in standard deviations.

    A group whose samples are all equally good teaches nothing: zeros.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + 1e-4)


def completed(tokens: Tensor, end: int) -> Tensor:
    """float32 of ``tokens``' shape [..., tokens]: 1 up to and including the first ``end``, then 0."""
    ends = (tokens == end).long()
    return (ends.cumsum(-1) - ends == 0).float()


def policy_loss(
    logits: Tensor, tokens: Tensor, sampled: Tensor, advantage: Tensor, mask: Tensor, clip: float
) -> Tensor:
    """Advantage times log-probability, over all tokens, padding included in their number: a token weighs the same in a
    short completion and in a long one.

    Each token is weighted by how much likelier it is now than when it was sampled, at most ``clip``: that corrects for
    staleness and for the rollout's arithmetic in bfloat16. The weight is bounded and no gradient is cut off, other than
    in PPO (arXiv 2506.13585).

    Args:
        logits: float32 [groups, samples, tokens, vocabulary], divided by the sampling temperature.
        tokens: int64 [groups, samples, tokens].
        sampled: float32 like tokens: the log-probabilities with which the rollout drew them.
        advantage: float32 [groups, samples].
        mask: float32 like tokens.
    """
    chosen = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    weight = ((chosen - sampled) * mask).exp().clamp(max=clip).detach()
    return -(weight * advantage[..., None] * chosen * mask).sum() / mask.numel()
