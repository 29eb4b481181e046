"""A Ray of this test session, and looks at what groups and fleets leave in it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import state
from ray.util.placement_group import placement_group_table

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def workers_find_the_tree() -> Iterator[None]:
    """Ray's workers import the package and the tests from this checkout."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{before}" if before else str(ROOT)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextmanager
def local_ray(*, num_cpus: int = 16) -> Iterator[None]:
    with workers_find_the_tree():
        # A cluster that runs on this machine already is another's.
        ray.init(
            address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
        )
        try:
            yield
        finally:
            ray.shutdown()


def eventually(condition: Callable[[], Any], *, timeout: float = 20.0, what: str = "the condition") -> Any:
    """The first true value of ``condition``, or an assertion that it never came true."""
    end = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"{what} did not come true in {timeout} s; last value {value!r}"
        time.sleep(0.02)


def living_actors() -> list[str]:
    """Class names of our actors that are not dead. The registry's actor, which outlives groups by design, is not ours."""
    hosts = ("TrainerHost", "RolloutHost")
    rows = state.actors().values()
    return [row["ActorClassName"] for row in rows if row["State"] != "DEAD" and row["ActorClassName"] in hosts]


def living_placement_groups() -> list[str]:
    return [row["name"] for row in placement_group_table().values() if row["state"] != "REMOVED"]


def left_behind() -> dict[str, Any]:
    """Actors and placement groups of ours that live, and resources that are not free: empty when all is given back."""
    free = ray.available_resources()
    taken = {
        name: amount - free.get(name, 0.0)
        for name, amount in ray.cluster_resources().items()
        if not name.startswith("node:") and amount != free.get(name, 0.0)  # the registry's actor sits on the head node
    }
    found = {"actors": living_actors(), "groups": living_placement_groups(), "taken": taken}
    return {name: value for name, value in found.items() if value}


def nothing_left() -> None:
    """Wait until all is given back."""
    end = time.monotonic() + 30
    while left := left_behind():
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.05)


def process_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
