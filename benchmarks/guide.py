"""The loop of docs/guide.md before and after mx-rl, on a model of real size (``--only guide`` for this alone).

What is timed, in the driver: from "the step is done" to "all rollouts run the new weights"; and in the actors, how long the
trainer and each rollout cannot work meanwhile.
"""

from __future__ import annotations

import logging
import random
import time
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


class Actor:
    """A trainer or rollout of the user's. ``stood`` is how long its own methods took, which is what stops its work."""

    def __init__(self, shapes: Shapes, trainer: bool) -> None:
        torch.set_num_threads(1)  # one core a process, as where every core has a rank
        self.tensors = random_weights(shapes) if trainer else empty_weights(shapes)

    def weights(self) -> dict[str, Tensor]:
        return self.tensors

    def put(self, as_numpy: bool) -> tuple[list[Any], float]:
        begun = time.perf_counter()
        held: dict[str, Any] = dict(self.tensors)
        if as_numpy:
            held = {name: tensor.view(torch.uint8).numpy() for name, tensor in self.tensors.items()}
        return [ray.put(held)], time.perf_counter() - begun

    def load(self, given: list[Any]) -> float:
        begun = time.perf_counter()
        for name, found in ray.get(given[0], timeout=WAIT_S).items():
            self.tensors[name].copy_(
                found if isinstance(found, Tensor) else torch.from_numpy(found).view(torch.bfloat16)
            )
        return time.perf_counter() - begun

    def stamp(self, mark: int) -> None:
        stamp(self.tensors, mark)

    def check(self, mark: int) -> None:
        check(self.tensors, mark)


class Before:
    """As in examples/loop/before.py. The trainer puts, which saves one copy through the driver."""

    def __init__(self, trainer: Any, rollouts: list[Any], as_numpy: bool) -> None:
        kind = "numpy views" if as_numpy else "a state dict, as most loops do"
        self.title = f"before: Ray's object store, {kind}"
        self.trainer, self.rollouts, self.as_numpy = trainer, rollouts, as_numpy

    def ship(self) -> tuple[float, float]:
        given, trainer = ray.get(self.trainer.put.remote(self.as_numpy), timeout=WAIT_S)
        loads = ray.get([rollout.load.remote(given) for rollout in self.rollouts], timeout=WAIT_S)
        return trainer, max(loads)


class After:
    """As in examples/loop/after.py."""

    title = "after: mx-rl"

    def __init__(self, group: TrainerGroup, fleet: RolloutFleet) -> None:
        self.group, self.fleet = group, fleet

    def ship(self) -> tuple[float, float]:
        begun = time.perf_counter()
        version = self.group.publish()
        trainer = time.perf_counter() - begun  # with Ray's call: seen from outside, the trainer is back
        report = self.fleet.sync(at_least=version, timeout=WAIT_S)
        if not report.ok:
            raise RuntimeError(f"not all rollouts run {version.number}: {report}")
        # A wrapped actor that runs one call at a time is in its sync for all of it; a hold would end before the install.
        return trainer, max(one.seconds["total"] for one in report.reports.values())


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
    print(
        "| 2 rollouts | step done to all run it, ms (least..most) | trainer stands still, ms | rollout stands still, ms |"
    )
    print("| --- | ---: | ---: | ---: |")
    print(f"| memcpy in one process (the floor) | {spread(floor)} | - | - |")
    for title, ways in found.items():
        totals, trainer, rollout = ([one[part] for one in ways] for part in range(3))
        print(f"| {title} | {spread(totals)} | {milliseconds(trainer)} | {milliseconds(rollout)} |")


def _run(shapes: Shapes, rounds: int) -> dict[str, list[tuple[float, float, float]]]:
    kind = ray.remote(num_cpus=1)(Actor)
    trainer, *rollouts = [kind.remote(shapes, first) for first in (True, False, False)]
    with (
        TrainerGroup.from_actors([trainer], policy="guide", build="weights") as group,
        RolloutFleet.from_actors(rollouts, policy="guide", build="weights") as fleet,
    ):
        ways = [Before(trainer, rollouts, False), Before(trainer, rollouts, True), After(group, fleet)]
        found: dict[str, list[tuple[float, float, float]]] = {way.title: [] for way in ways}
        mark = 0
        for number in range(-WARM_ROUNDS, rounds):
            for way in random.sample(ways, len(ways)):  # what one leaves in the caches hits another each time
                mark = mark % 250 + 1
                ray.get(trainer.stamp.remote(mark), timeout=WAIT_S)
                begun = time.perf_counter()
                stood = way.ship()
                total = time.perf_counter() - begun
                ray.get([rollout.check.remote(mark) for rollout in rollouts], timeout=WAIT_S)
                if number >= 0:
                    found[way.title].append((total, *stood))
    return found
