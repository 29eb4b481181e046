"""The trainer and rollout that the Ray tests run: one tensor whose every element is the step.

Torch is imported where it is used, since actors that are meant to fail should do so quickly.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mx_rl.errors import NotReady
from mx_rl.ray import Rollout, Trainer

if TYPE_CHECKING:
    import torch

SIZE = 4096


class CannotBeRebuilt(Exception):
    """Its constructor takes other arguments than it hands to Exception."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


class Fill(Trainer):
    """No ``__init__``: kwargs become attributes."""

    start = 0.0

    def build(self) -> dict[str, torch.Tensor]:
        import torch

        self.weight = torch.full((SIZE,), self.start)
        return {"weight": self.weight}

    def train(self, value: float) -> float:
        self.weight.fill_(value)
        return value

    def where(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "rank": self.rank,
            "local_rank": self.local_rank,
            "world_size": self.world_size,
            "device": self.device,
            "node_id": __import__("ray").get_runtime_context().get_node_id(),
            "env": {
                name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
            },
        }

    def divide(self, by_rank: int) -> int:
        if self.rank == by_rank:
            raise ZeroDivisionError(f"rank {self.rank} divides")
        return self.rank

    def cannot_be_rebuilt(self) -> None:
        raise CannotBeRebuilt(7, "out of luck")

    def not_ready(self) -> None:
        raise NotReady("nothing yet", latest=3, missing=[1])

    def sleep(self, seconds: float, rank: int) -> int:
        if self.rank == rank:
            time.sleep(seconds)
        return self.rank

    def named(self, method: str, rank: int) -> tuple[str, int]:
        return method, rank

    async def later(self, value: int) -> int:
        import asyncio

        await asyncio.sleep(0.01)
        return value + self.rank

    def die(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)


class GlooFill(Fill):
    """Its ranks meet in ``build``."""

    def build(self) -> dict[str, torch.Tensor]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return super().build()

    def sum_of_ranks(self) -> float:
        import torch

        total = torch.tensor([float(self.rank + 1)])
        torch.distributed.all_reduce(total)
        return total.item()


class TakesArguments(Fill):
    def __init__(self, start: float, *, note: str = "") -> None:
        self.start = start
        self.note = f"{note} rank {self.rank}"

    def told(self) -> tuple[float, str]:
        return self.start, self.note


class BrokenBuild(Fill):
    def build(self) -> dict[str, torch.Tensor]:
        if self.rank == self.broken_rank:
            if self.how == "raise":
                raise LookupError("no such checkpoint")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().build()


class Echo(Rollout):
    """Says what it was given, with what, and where."""

    def build(self) -> dict[str, torch.Tensor]:
        marker = getattr(self, "marker", None)
        if marker is not None and Path(marker).exists():
            raise LookupError(f"{marker} forbids it")
        import torch

        self.weight = torch.full((SIZE,), -1.0)
        self.running = threading.Event()
        return {"weight": self.weight}

    def echo(self, item: Any, seconds: float = 0.0) -> dict[str, Any]:
        first = self.weight.unique().tolist()
        time.sleep(seconds)
        return {
            "item": item,
            "replica": self.replica,
            "version": self.version,
            "weight": first,
            "same": first == self.weight.unique().tolist(),
            "pid": os.getpid(),
        }

    def weigh(self) -> list[float]:
        return self.weight.unique().tolist()

    def refuse(self, item: Any) -> None:
        raise KeyError(item)

    def die(self, item: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def veto_installs(self, names: list[str]) -> None:
        self.vetoed = self.replica in names

    def before_install(self, old: int | None, new: int) -> None:
        if getattr(self, "vetoed", False):
            raise PermissionError("the engine will not stop")


class GlooEcho(Echo):
    def build(self) -> dict[str, torch.Tensor]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return super().build()

    def meet(self, seconds: float) -> tuple[list[float], list[float]]:
        """The weights before and after a meeting of the ranks, which they leave at different times."""
        before = self.weight.unique().tolist()
        self.sum_of_ranks()
        time.sleep(seconds * self.rank)
        return before, self.weight.unique().tolist()

    def sum_of_ranks(self) -> float:
        import torch

        total = torch.tensor([float(self.rank + 1)])
        torch.distributed.all_reduce(total)
        return total.item()


class Export(Trainer):
    """Gives full tensors one by one, every element the step, and keeps no model."""

    value = 0.0

    def build(self) -> None:
        return None

    def train(self, value: float) -> None:
        self.value = value

    def export(self) -> Any:
        import torch

        if self.value < 0:
            raise ArithmeticError("nothing to export")
        return ((f"layers.{index}", torch.full((64 + index, 8), self.value + index)) for index in range(10))


class LoadByName(Rollout):
    """An engine that takes (name, tensor) pairs."""

    def build(self) -> None:
        self.weights: dict[str, Any] = {}
        self.loads = 0
        return

    def load_weights(self, pairs: Any) -> None:
        self.weights = {name: tensor.clone() for name, tensor in pairs}
        self.loads += 1

    def values(self, _: Any = None) -> tuple[list[float], int]:
        """The distinct values less their index: one, or the version is torn; and how often weights were loaded."""
        found = {(tensor - int(name.split(".")[1])).unique().item() for name, tensor in self.weights.items()}
        assert len(self.weights) in (0, 10)
        return sorted(found), self.loads
