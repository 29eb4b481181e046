"""The one kind of process that all contenders run in: a Ray actor with weights and a part for each contender."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from benchmarks.model import Shapes, check, empty_weights, random_weights, stamp


class Process:
    """``weights``: what a trainer changes, or where a rollout's weights live; shared by the parts."""

    def __init__(self, shapes: Shapes, trainer: bool) -> None:
        import torch

        torch.set_num_threads(1)  # one core a process, as where every core has a rank
        self.weights: dict[str, Tensor] = random_weights(shapes) if trainer else empty_weights(shapes)
        self._parts: dict[str, Any] = {}

    def add(self, key: str, part: type, *args: Any) -> Any:
        """Make a part; what its ``hello`` returns goes to the other side's parts."""
        self._parts[key] = part(self.weights, *args)
        hello = getattr(self._parts[key], "hello", None)
        return hello() if hello else None

    def add_once(self, key: str, part: type, *args: Any) -> None:
        """For parts that several contenders share."""
        if key not in self._parts:
            self.add(key, part, *args)

    def call(self, key: str, method: str, *args: Any) -> Any:
        return getattr(self._parts[key], method)(*args)

    def stamp(self, mark: int) -> None:
        stamp(self.weights, mark)

    def check(self, mark: int) -> None:
        check(self.weights, mark)

    def close(self) -> None:
        for part in self._parts.values():
            close = getattr(part, "close", None)
            if close:
                close()


def everywhere(processes: Sequence[Any], method: str, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call a method of every process at the same time."""
    import ray

    found: list[Any] = ray.get([getattr(process, method).remote(*args) for process in processes], timeout=timeout)
    return found
