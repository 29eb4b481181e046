"""A trainer rank and a rollout rank for child processes (tests.support.procs.Child)."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from mx_rl import Options, Publisher, Shard, Subscriber
from tests.support.socket_registry import SocketRegistry


def options(**changes: Any) -> Options:
    return Options(**({"transport": "nixl", "window_bytes": 1 << 20, "stall_s": 1.0} | changes))


class TrainerRank:
    """Holds rows ``[first, last)`` of every global tensor (all with ``whole``); ``fill`` sets all elements to one value."""

    def __init__(
        self,
        path: str,
        shapes: dict[str, tuple[int, ...]],
        rank: int = 0,
        world_size: int = 1,
        world: str = "w",
        whole: bool = False,
        **named: Any,
    ) -> None:
        self.tensors: dict[str, Any] = {}
        for name, shape in shapes.items():
            rows = shape[0] // world_size if shape and not whole else 0
            first = rank * rows
            last = shape[0] if shape and (whole or rank == world_size - 1) else first + rows
            local = torch.zeros((last - first, *shape[1:]))
            self.tensors[name] = Shard(local, shape=shape, offset=(first, *[0] * (len(shape) - 1)))
        seat = {"rank": rank, "world_size": world_size, "world": world}
        opts = options(**named.pop("options", {}))
        self.pub = Publisher("p", self.tensors, registry=SocketRegistry(path), options=opts, **seat, **named)
        self.published = 0
        self.failed: BaseException | None = None
        self._stop = threading.Event()

    def fill(self, value: float) -> None:
        with self.pub.mutating():
            for shard in self.tensors.values():
                shard.tensor.fill_(value)

    def publish(self, value: float | None = None, step: int | None = None, timeout: float = 30.0) -> int:
        if value is not None:
            self.fill(value)
        return self.pub.publish(step=step, timeout=timeout).number

    def mutate_and_publish(self, value: float) -> int:
        """As users of ``slots=0`` do."""
        with self.pub.mutating():
            self.fill(value)
        return self.publish()

    def wait(self, number: int, replicas: int | None = 0, timeout: float = 30.0) -> Any:
        return self.pub.wait(number, replicas=replicas, timeout=timeout)

    def publish_ready(self, value: float | None = None, step: int | None = None) -> int:
        number = self.publish(value, step)
        assert self.pub.wait(number, replicas=0, timeout=30).ready
        return number

    def publish_many(self, count: int) -> int:
        """Publish ``count`` versions, version n with all elements n; every rank of a world does as many."""
        for _ in range(count):
            epoch = self.pub._claimant.wait_open(time.monotonic() + 30)
            self.publish(float((epoch.base + self.pub._k + 1) % 65536))
        return self.pub.latest or 0

    def start_publishing(self, pause_s: float = 0.0) -> None:
        """Change all weights and publish, as fast as can be, on a thread: version n has all elements n."""

        def run() -> None:
            try:
                while not self._stop.is_set():
                    epoch = self.pub._claimant.wait_open(time.monotonic() + 30)
                    self.fill(float((epoch.base + self.pub._k + 1) % 65536))
                    self.pub.publish()
                    self.published += 1
                    self._stop.wait(pause_s)
            except BaseException as exc:
                self.failed = exc

        self._stop.clear()
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def stop_publishing(self) -> int:
        self._stop.set()
        self._thread.join(60)
        if self.failed is not None:
            raise self.failed
        return self.published

    def latest(self) -> int | None:
        return self.pub.latest

    def set_element(self, name: str, value: float) -> None:
        self.tensors[name].tensor.view(-1)[0] = value

    def slot_bytes(self) -> int:
        return self.pub._ring.layout.nbytes

    def close(self) -> None:
        self.pub.close()


class RolloutRank:
    """Holds every tensor whole, or its part of dimension ``dim`` where it is one of several ranks."""

    def __init__(
        self,
        path: str,
        shapes: dict[str, tuple[int, ...]],
        replica: str | None = None,
        rank: int = 0,
        ranks: int = 1,
        **named: Any,
    ) -> None:
        self.tensors: dict[str, Any] = {}
        for name, shape in shapes.items():
            columns = shape[-1] // ranks
            local = torch.full((*shape[:-1], columns), -1.0)
            self.tensors[name] = Shard(local, shape=shape, offset=(*[0] * (len(shape) - 1), rank * columns))
        opts = options(**named.pop("options", {}))
        self.sub = Subscriber(
            "p",
            self.tensors,
            registry=SocketRegistry(path),
            replica=replica,
            rank=rank,
            world_size=ranks,
            options=opts,
            **named,
        )
        self.replica = self.sub.replica

    def name(self) -> str:
        return self.replica

    def values(self) -> set[float]:
        """Distinct values in the live weights: one, or the version is torn."""
        found: set[float] = set()
        for shard in self.tensors.values():
            found.update(shard.tensor.unique().tolist())
        return found

    def sync(self, at_least: int | None = None, timeout: float = 60.0) -> Any:
        return self.sub.sync(at_least=at_least, timeout=timeout)

    def sync_for(self, seconds: float) -> dict[str, Any]:
        """Sync in a loop; every installed version must be uniform, equal its number, and newer than the last."""
        end = time.monotonic() + seconds
        installed, torn, fell, retries, last = 0, 0, 0, 0, 0
        while time.monotonic() < end:
            report = self.sub.sync(timeout=30)
            retries += report.retries
            if report.kind == "none":
                continue
            installed += 1
            fell += report.version <= last
            last = report.version
            torn += self.values() != {float(report.version % 65536)}
        return {"installed": installed, "torn": torn, "fell": fell, "retries": retries, "last": last}

    def sync_many(self, count: int) -> dict[str, Any]:
        """``sync_for``, by number of calls: the ranks of a replica must call equally often."""
        torn, fell, last, kinds = 0, 0, 0, []
        for _ in range(count):
            report = self.sub.sync(timeout=30)
            kinds.append(report.kind)
            if report.kind != "none":
                fell += report.version <= last
                last = report.version
                torn += self.values() != {float(report.version % 65536)}
        return {"installed": kinds.count("full"), "torn": torn, "fell": fell, "last": last}

    def version(self) -> int | None:
        return self.sub.version

    def ready(self) -> bool:
        return self.sub.ready

    def stage(self, timeout: float = 30.0) -> int | None:
        self.staged = self.sub.stage(timeout=timeout)
        return None if self.staged is None else self.staged.version

    def install(self, timeout: float = 30.0) -> Any:
        return self.staged.install(timeout=timeout)

    def close(self) -> None:
        self.sub.close()
