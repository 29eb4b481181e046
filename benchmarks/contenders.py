"""The contenders: how each is set up over the same processes, and one round of each."""

from __future__ import annotations

import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from benchmarks.floor import Memory
from benchmarks.ours import Publishing, Rollout
from benchmarks.peers import Broadcast, File, ObjectStore
from benchmarks.process import everywhere

WAIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """``give``: seconds for which the trainer stood still. ``take``: seconds of the slowest reader. ``total``: from the
    driver's call of the trainer to the last reader's answer, Ray's two calls included. ``stages``: finer, where known."""

    give: float
    take: float
    total: float
    stages: dict[str, float] = field(default_factory=dict)
    note: str = ""


class Contender(ABC):
    """``setup`` once, then ``run`` in each round; the mark must have arrived at every reader afterwards."""

    name: str
    title: str
    readers = 2

    def __init__(self, trainer: Any, rollouts: Sequence[Any]) -> None:
        self.trainer = trainer
        self.rollouts = list(rollouts)[: self.readers]

    @abstractmethod
    def setup(self) -> None: ...

    @abstractmethod
    def run(self) -> Round: ...

    def round(self, mark: int) -> Round:
        ray.get(self.trainer.stamp.remote(mark), timeout=WAIT_S)
        found = self.run()
        self.verify(mark)
        return found

    def verify(self, mark: int) -> None:
        everywhere(self.rollouts, "check", mark)


class Memcpy(Contender):
    name, title, readers = "memcpy", "memcpy in one process (the floor)", 1

    def setup(self) -> None:
        hello = ray.get(self.trainer.add.remote("memory", Memory, 1), timeout=WAIT_S)
        ray.get(self.rollouts[0].add.remote("memory", Memory, 2, hello), timeout=WAIT_S)

    def run(self) -> Round:
        return self._time("copy")

    def _time(self, method: str) -> Round:
        taken = ray.get(self.rollouts[0].call.remote("memory", method), timeout=WAIT_S)
        return Round(give=0.0, take=taken, total=taken)

    def verify(self, mark: int) -> None:
        """These move bytes that are nobody's weights."""


class RawNixl(Memcpy):
    name, title = "nixl", "one raw NIXL read of one arena"

    def setup(self) -> None:
        """The blocks of Memcpy, which always runs."""

    def run(self) -> Round:
        return self._time("read")


class Ours(Contender):
    """The readers of one policy; those that are not called in a round do nothing in it."""

    key = "whole"
    ranks = 1

    @property
    def policy(self) -> str:
        return "bench"

    def setup(self) -> None:
        publisher = f"publisher-{self.policy}"
        ray.get(self.trainer.add_once.remote(publisher, Publishing, self.policy), timeout=WAIT_S)
        rows = [("split", rank) if self.ranks > 1 else (f"whole-{rank}", 0) for rank in range(self.readers)]
        adding = [
            rollout.add_once.remote(self.key, Rollout, self.policy, replica, rank, self.ranks)
            for rollout, (replica, rank) in zip(self.rollouts, rows, strict=True)
        ]
        ray.get(adding, timeout=WAIT_S)

    def run(self) -> Round:
        begun = time.perf_counter()
        number, give, before = ray.get(self.trainer.call.remote(f"publisher-{self.policy}", "publish"), timeout=WAIT_S)
        found = everywhere(self.rollouts, "call", self.key, "sync", number)
        total = time.perf_counter() - begun
        stages = {f"publish.{name}": value for name, value in before.items()}
        for name in found[0][1]:
            stages[f"sync.{name}"] = max(one[1][name] for one in found)
        lanes = "+".join(sorted({one[2] for one in found}))
        return Round(give=give, take=max(one[0] for one in found), total=total, stages=stages, note=lanes)

    def verify(self, mark: int) -> None:
        everywhere(self.rollouts, "call", self.key, "check", mark)


class OneReader(Ours):
    name, title, readers = "mx-rl-1", "**mx-rl**, one reader", 1


class TwoReaders(Ours):
    name, title = "mx-rl-2", "**mx-rl**, two readers"


class TensorParallel(Ours):
    name, title, key, ranks = "mx-rl-tp2", "**mx-rl**, one replica of two ranks, half each", "split", 2


class OverTcp(Ours):
    name, title, readers = "mx-rl-tcp", "**mx-rl**, one reader over TCP", 1

    @property
    def policy(self) -> str:
        return "bench-tcp"


class RayStore(Contender):
    name, title = "ray", "Ray object store, two readers"

    def setup(self) -> None:
        everywhere([self.trainer, *self.rollouts], "add", "ray", ObjectStore)

    def run(self) -> Round:
        begun = time.perf_counter()
        given, give = ray.get(self.trainer.call.remote("ray", "give"), timeout=WAIT_S)
        found = everywhere(self.rollouts, "call", "ray", "take", given)
        return Round(give=give, take=max(found), total=time.perf_counter() - begun)


class Gloo(Contender):
    name, title = "gloo", "gloo broadcast, two readers"

    def setup(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            where = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        all_ranks = [self.trainer, *self.rollouts]
        adding = [one.add.remote("gloo", Broadcast, rank, len(all_ranks), where) for rank, one in enumerate(all_ranks)]
        ray.get(adding, timeout=WAIT_S)
        everywhere(all_ranks, "call", "gloo", "join")

    def run(self) -> Round:
        begun = time.perf_counter()
        found = everywhere([self.trainer, *self.rollouts], "call", "gloo", "broadcast")
        return Round(give=found[0], take=max(found[1:]), total=time.perf_counter() - begun)


class Safetensors(Contender):
    name, title = "safetensors", "safetensors through /dev/shm, two readers"

    def setup(self) -> None:
        path = f"/dev/shm/mx-rl-bench-{secrets.token_hex(6)}.safetensors"
        everywhere([self.trainer, *self.rollouts], "add", "safetensors", File, path)

    def run(self) -> Round:
        begun = time.perf_counter()
        give = ray.get(self.trainer.call.remote("safetensors", "save"), timeout=WAIT_S)
        found = everywhere(self.rollouts, "call", "safetensors", "load")
        return Round(give=give, take=max(found), total=time.perf_counter() - begun)


CONTENDERS: tuple[type[Contender], ...] = (
    Memcpy,
    RawNixl,
    OneReader,
    TwoReaders,
    TensorParallel,
    OverTcp,
    RayStore,
    Gloo,
    Safetensors,
)
