"""The loop of docs/guide.md before and after mx-rl, on a model of real size (``--only guide`` for this alone).

Timed in the driver: from "the step is done" to "all rollouts run the new weights"; until the trainer is free to go on; and
how long the rollouts are kept from work.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import Tensor

from benchmarks.figures import milliseconds, spread
from benchmarks.floor import copy_floor
from benchmarks.model import Shapes, check, empty_weights, random_weights, stamp, total_bytes
from mx_rl.ray import RolloutFleet, TrainerGroup

WAIT_S = 120.0
WARM_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """Seconds. ``pause``: the part of ``rollout`` in which weights change; None where it cannot be told apart."""

    total: float
    trainer: float
    rollout: float
    pause: float | None = None


class Actor:
    """A trainer or rollout of the user's."""

    def __init__(self, shapes: Shapes, trainer: bool) -> None:
        torch.set_num_threads(1)  # one core a process, as where every core has a rank
        self.tensors = random_weights(shapes) if trainer else empty_weights(shapes)

    def weights(self) -> dict[str, Tensor]:
        return self.tensors

    def load(self, weights: dict[str, Tensor]) -> None:
        for name, found in weights.items():
            self.tensors[name].copy_(found)

    def put(self) -> list[Any]:
        return [ray.put({name: tensor.view(torch.uint8).numpy() for name, tensor in self.tensors.items()})]

    def take(self, bits: dict[str, Any]) -> None:
        for name, tensor in self.tensors.items():
            tensor.view(torch.uint8).numpy()[...] = bits[name]

    def stamp(self, mark: int) -> None:
        stamp(self.tensors, mark)

    def check(self, mark: int) -> None:
        check(self.tensors, mark)


class Before:
    """As in examples/loop/before.py: a state dict, through the driver."""

    title = "before: `ray.put(state_dict)`"

    def __init__(self, trainer: Any, rollouts: list[Any]) -> None:
        self.trainer, self.rollouts = trainer, rollouts

    def ship(self) -> Shipped:
        begun = time.perf_counter()
        asked = self.trainer.weights.remote()
        ray.wait([asked], timeout=WAIT_S, fetch_local=False)
        free = time.perf_counter()
        weights = ray.put(ray.get(asked, timeout=WAIT_S))
        sent = time.perf_counter()
        ray.get([rollout.load.remote(weights) for rollout in self.rollouts], timeout=WAIT_S)
        end = time.perf_counter()
        return Shipped(total=end - begun, trainer=free - begun, rollout=end - sent)


class BeforeAtItsBest(Before):
    """Put by the trainer itself, as numpy views, which Ray stores out of band and hands out without a copy."""

    title = "before, at its best: the trainer puts numpy views"

    def ship(self) -> Shipped:
        begun = time.perf_counter()
        given = ray.get(self.trainer.put.remote(), timeout=WAIT_S)
        free = time.perf_counter()
        ray.get([rollout.take.remote(given[0]) for rollout in self.rollouts], timeout=WAIT_S)
        end = time.perf_counter()
        return Shipped(total=end - begun, trainer=free - begun, rollout=end - free)


class After:
    """As in examples/loop/after.py."""

    title = "after: mx-rl"

    def __init__(self, group: TrainerGroup, fleet: RolloutFleet) -> None:
        self.group, self.fleet = group, fleet

    def ship(self) -> Shipped:
        begun = time.perf_counter()
        version = self.group.publish()
        free = time.perf_counter()
        report = self.fleet.sync(at_least=version, timeout=WAIT_S)
        end = time.perf_counter()
        if not report.ok:
            raise RuntimeError(f"not all rollouts run {version.number}: {report}")
        pause = max(one.seconds["pause"] for one in report.reports.values())
        return Shipped(total=end - begun, trainer=free - begun, rollout=end - free, pause=pause)


def measure(shapes: Shapes, rounds: int) -> None:
    """Run the three ways round by round on a Ray of their own, and print a table of Markdown."""
    size = total_bytes(shapes)
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=max(6 * size, 256 << 20),
    )
    try:
        found = _run(shapes, rounds)
    finally:
        ray.shutdown()
    floor = [copy_floor(size) for _ in range(rounds)]
    heads = [
        "2 rollouts",
        "step done to all run it, ms (least..most)",
        "trainer waits",
        "rollouts wait",
        "weights change",
    ]
    print(f"| {' | '.join(heads)} |")
    print("| --- |" + " ---: |" * 4)
    print(f"| memcpy in one process (the floor) | {spread(floor)} | - | - | - |")
    for title, rows in found.items():
        pauses = [one.pause for one in rows if one.pause is not None]
        cells = [
            spread([one.total for one in rows]),
            milliseconds([one.trainer for one in rows]),
            milliseconds([one.rollout for one in rows]),
            milliseconds(pauses) if pauses else "-",
        ]
        print(f"| {title} | {' | '.join(cells)} |")


def _run(shapes: Shapes, rounds: int) -> dict[str, list[Shipped]]:
    kind = ray.remote(num_cpus=1)(Actor)
    trainer, *rollouts = [kind.remote(shapes, first) for first in (True, False, False)]
    with (
        TrainerGroup.from_actors([trainer], policy="guide", build="weights") as group,
        RolloutFleet.from_actors(rollouts, policy="guide", build="weights") as fleet,
    ):
        ways = [Before(trainer, rollouts), BeforeAtItsBest(trainer, rollouts), After(group, fleet)]
        found: dict[str, list[Shipped]] = {way.title: [] for way in ways}
        mark = 0
        for number in range(-WARM_ROUNDS, rounds):
            for way in random.sample(ways, len(ways)):  # what one leaves in the caches hits another each time
                mark = mark % 250 + 1
                ray.get(trainer.stamp.remote(mark), timeout=WAIT_S)
                shipped = way.ship()
                ray.get([rollout.check.remote(mark) for rollout in rollouts], timeout=WAIT_S)
                if number >= 0:
                    found[way.title].append(shipped)
    return found
