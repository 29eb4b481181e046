"""What a process holds: compared before and after, to see that nothing is left behind."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

import psutil

from tests.support.actors import RolloutRank, TrainerRank


@dataclass(frozen=True)
class Footprint:
    fds: int
    threads: int  # of the operating system: UCX's and torch's too
    python_threads: tuple[str, ...]
    rss: int
    registered: int
    maps: int


def footprint(registered: int = 0) -> Footprint:
    process = psutil.Process()
    return Footprint(
        fds=process.num_fds(),
        threads=process.num_threads(),
        python_threads=tuple(sorted(thread.name for thread in threading.enumerate())),
        rss=process.memory_info().rss,
        registered=registered,
        maps=len(process.memory_maps(grouped=False)),
    )


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


class MeasuredTrainer(TrainerRank):
    def footprint(self) -> Footprint:
        return footprint(self.pub.registered_bytes)

    def publish_some(self, count: int, first: int) -> int:
        """Publish ``count`` versions, all elements of each one value, and wait until one replica runs each."""
        for value in range(first, first + count):
            self.fill(float(value))
            version = self.pub.publish()
            assert self.pub.wait(version, replicas=1, timeout=60).installed
        return version.number


class MeasuredRollout(RolloutRank):
    def footprint(self) -> Footprint:
        return footprint(self.sub.registered_bytes)

    def sync_some(self, count: int) -> int:
        wanted = (self.sub.version or 0) + 1
        for number in range(wanted, wanted + count):
            self.sub.sync(at_least=number, timeout=60)
        return self.sub.version or 0


class OpenAndClose:
    """Opens and closes publishers and subscribers in one process."""

    def __init__(self, path: str) -> None:
        self._path = path

    def cycle(self, count: int, transport: str) -> Footprint:
        import torch

        from mx_rl import Options, Publisher, Subscriber
        from tests.support.socket_registry import SocketRegistry

        for turn in range(count):
            registry = SocketRegistry(self._path)
            named: dict[str, Any] = {"registry": registry, "options": Options(transport=transport)}
            source, target = {"w": torch.full((4096,), float(turn))}, {"w": torch.zeros(4096)}
            with Publisher(f"cycle-{transport}", source, **named) as pub:
                with Subscriber(f"cycle-{transport}", target, **named) as sub:
                    sub.sync(at_least=pub.publish().number, timeout=60)
            assert target["w"].eq(float(turn)).all()
            registry.close()
        return footprint()
