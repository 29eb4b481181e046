"""mx-rl in an actor: a publisher, a whole replica, or one of several ranks of a replica."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

import mx_rl
from benchmarks.model import check


class Publishing:
    def __init__(self, weights: dict[str, Tensor], policy: str) -> None:
        self.pub = mx_rl.Publisher(policy, weights, registry="ray")

    def publish(self) -> tuple[int, float, dict[str, float]]:
        """(version, seconds for which the trainer stood still, stages)."""
        begun = time.perf_counter()
        version = self.pub.publish(timeout=60)
        return version.number, time.perf_counter() - begun, dict(version.seconds)

    def close(self) -> None:
        self.pub.close()


class Rollout:
    """``ranks`` > 1: this rank holds one part of dimension 0 of every tensor, in memory of its own."""

    def __init__(self, weights: dict[str, Tensor], policy: str, replica: str, rank: int, ranks: int) -> None:
        self.first, self.last = rank == 0, rank == ranks - 1
        self.local, tensors = weights, dict[str, Any](weights)
        if ranks > 1:
            self.local = {name: torch.empty_like(_part(tensor, rank, ranks)) for name, tensor in weights.items()}
            tensors = {
                name: mx_rl.Shard(part, shape=tuple(weights[name].shape), offset=_offset(part, rank))
                for name, part in self.local.items()
            }
        self.sub = mx_rl.Subscriber(policy, tensors, registry="ray", replica=replica, rank=rank, world_size=ranks)

    def sync(self, version: int) -> tuple[float, dict[str, float], str, str]:
        """(seconds, stages, lane, source)."""
        begun = time.perf_counter()
        report = self.sub.sync(at_least=version, timeout=60)
        return time.perf_counter() - begun, dict(report.seconds), report.lane, report.source

    def check(self, mark: int) -> None:
        check(self.local, mark, first=self.first, last=self.last)

    def close(self) -> None:
        self.sub.close()


def _part(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    return tensor.chunk(ranks, dim=0)[rank]


def _offset(part: Tensor, rank: int) -> tuple[int, ...]:
    return (rank * part.shape[0], *[0] * (part.dim() - 1))
