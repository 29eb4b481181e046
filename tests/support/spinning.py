"""Rollouts on Ray that always compute: every element of version n is the step it was published with."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from mx_rl import Subscriber
from mx_rl.ray import Rollout
from tests.support.until import until

if TYPE_CHECKING:
    import torch

SIZE = 4096


def look(weight: torch.Tensor) -> set[float]:
    return set(weight.unique().tolist())


class Spinner(Rollout):
    """Of a fleet: each call is a hold, which the fleet takes."""

    def build(self) -> dict[str, torch.Tensor]:
        import torch

        self.weight = torch.full((SIZE,), -1.0)
        return {"weight": self.weight}

    def generate(self, item: int) -> tuple[int | None, list[float]]:
        before, seen = self.version, look(self.weight)
        for _ in range(5):
            seen |= look(self.weight)
        return before, sorted(seen)

    async def generate_async(self, item: int) -> tuple[int | None, list[float]]:
        before, seen = self.version, look(self.weight)
        for _ in range(5):
            await asyncio.sleep(0)
            seen |= look(self.weight)
        return before, sorted(seen)

    def generate_until_staged(self, number: int) -> list[float]:
        """A long call, in which the next version arrives."""
        seen = look(self.weight)
        until(lambda: self.subscriber.staged == number, timeout=30)
        return sorted(seen | look(self.weight))

    async def sync_inside(self, number: int) -> int:
        return (await self.subscriber.async_sync(at_least=number, timeout=20)).version

    def held_in_a_call(self) -> int:
        return self.subscriber._holds.count

    def sleep_now(self) -> None:
        self.subscriber.pause()

    def wake(self) -> None:
        self.subscriber.resume()


class _Own:
    """An actor of the user's own, with a Subscriber in it; max_concurrency calls run at a time."""

    def __init__(self, policy: str, prefetch: bool) -> None:
        import torch

        self.weight = torch.full((SIZE,), -1.0)
        self.sub = Subscriber(policy, {"weight": self.weight}, registry="ray", prefetch=prefetch)
        self.faults: list[Any] = []
        self.outputs = 0
        self.ended = threading.Event()

    def note(self, version: int | None, seen: set[float], last: int) -> int:
        self.outputs += 1
        if len(seen) != 1 or (version or 0) < last:
            self.faults.append((version, sorted(seen)))
        return version or 0

    def found(self) -> dict[str, Any]:
        return {"faults": self.faults[:5], "outputs": self.outputs, "version": self.sub.version}


class ThreadedActor(_Own):
    def generate(self) -> None:
        last = 0
        while not self.ended.is_set():
            with self.sub.hold() as version:
                last = self.note(version, look(self.weight), last)

    def follow(self, versions: int) -> list[int]:
        try:
            return [self.sub.sync(at_least=(self.sub.version or 0) + 1, timeout=30).version for _ in range(versions)]
        finally:
            self.ended.set()

    def outcome(self) -> dict[str, Any]:
        return self.found()

    def close(self) -> None:
        self.sub.close()


class AsyncActor(_Own):
    async def generate(self) -> None:
        last = 0
        while not self.ended.is_set():
            async with self.sub.async_hold() as version:
                seen = look(self.weight)
                await asyncio.sleep(0)
                last = self.note(version, seen | look(self.weight), last)

    async def follow(self, versions: int) -> list[int]:
        try:
            found = []
            for _ in range(versions):
                report = await self.sub.async_sync(at_least=(self.sub.version or 0) + 1, timeout=30)
                found.append(report.version)
            return found
        finally:
            self.ended.set()

    async def outcome(self) -> dict[str, Any]:
        return self.found()

    async def close(self) -> None:
        await asyncio.to_thread(self.sub.close)
