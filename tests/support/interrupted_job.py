"""A driver that gets SIGINT in the middle of every blocking call of groups and fleets. One line of JSON a case.

It runs as a process of its own: ``python -m tests.support.interrupted_job ADDRESS FOLDER``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from mx_rl.ray import Rollout, RolloutFleet, Trainer, TrainerGroup
from tests.support.local_ray import eventually, left_behind

PAUSE_S = 20.0  # of what is slow: longer than any limit below
OUR_THREADS = ("mx-rl-slot", "mx-rl-send")
FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()


class SlowTrainer(Trainer):
    """Its methods say by a file that they run. kwargs: ``folder``, ``slow`` names what takes long."""

    def build(self) -> Any:
        import torch

        self.weight = torch.zeros(64)
        self.linger("build")
        return {"weight": self.weight}

    def linger(self, where: str) -> None:
        if where in self.slow:
            Path(self.folder, f"in-{where}").touch()
            time.sleep(PAUSE_S)

    def train(self, seconds: float = 0.0) -> int:
        Path(self.folder, "in-train").touch()
        time.sleep(seconds)
        return self.rank

    def close(self) -> None:
        self.linger("close")


class SlowRollout(Rollout):
    build = SlowTrainer.build
    linger = SlowTrainer.linger
    close = SlowTrainer.close

    def act(self, item: Any, seconds: float = 0.0) -> Any:
        Path(self.folder, "in-act").touch()
        time.sleep(seconds)
        return item


class Own:
    """An actor of the user's."""

    def __init__(self, folder: str) -> None:
        self.folder, self.slow = folder, ""

    build = SlowTrainer.build
    linger = SlowTrainer.linger

    def be_slow(self, slow: str) -> int:
        self.slow = slow
        return os.getpid()


def interrupted(call: Callable[[], Any], *, sign: str = "", after_s: float = 0.3) -> dict[str, Any]:
    """Run ``call``; SIGINT comes ``after_s`` seconds after the file ``sign`` is there (or the call began)."""
    struck: list[float] = []
    done = threading.Event()

    def strike() -> None:
        end = time.monotonic() + 60
        while sign and not (FOLDER / sign).exists() and not done.is_set():
            assert time.monotonic() < end, f"{sign} did not come"
            time.sleep(0.02)
        if not done.wait(after_s):
            struck.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    raised = "nothing"
    try:
        call()
    except KeyboardInterrupt:
        raised = "KeyboardInterrupt"
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    ended = time.monotonic()
    done.set()
    thread.join()
    for sign_file in FOLDER.glob("in-*"):
        sign_file.unlink()
    return {"raised": raised, "took": round(ended - struck[0], 2) if struck else None}


class Cases:
    """Each method is a case; it returns what ``interrupted`` told and asserts that the objects work on."""

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.given = {"folder": str(FOLDER), "slow": ""}
        self.group = TrainerGroup(SlowTrainer, policy="p", world_size=2, num_cpus=0, kwargs=self.given)
        self.fleet = RolloutFleet(SlowRollout, policy="p", replicas=2, num_cpus=0, kwargs=self.given)
        self.own = ray.remote(num_cpus=0)(Own).remote(str(FOLDER))
        self.works()

    def works(self) -> None:
        assert self.group.call("train", timeout=30) == [0, 1]
        version = self.group.publish(timeout=30)
        report = self.fleet.sync(at_least=version, timeout=30)
        assert report.ok, report
        assert self.fleet.map("act", range(4), timeout=30) == [0, 1, 2, 3]
        assert len(self.group.wait(version, timeout=30).installed) >= len(report.installed)

    def slow(self, where: str) -> dict[str, Any]:
        return {"kwargs": {**self.given, "slow": where}, "num_cpus": 0}

    def group_constructor(self) -> dict[str, Any]:
        return interrupted(lambda: TrainerGroup(SlowTrainer, policy="q", **self.slow("build")), sign="in-build")

    def group_constructor_without_room(self) -> dict[str, Any]:
        return interrupted(lambda: TrainerGroup(SlowTrainer, policy="q", kwargs=self.given, num_cpus=64))

    def fleet_constructor(self) -> dict[str, Any]:
        make: Any = lambda: RolloutFleet(SlowRollout, policy="q", replicas=2, **self.slow("build"))  # noqa: E731
        return interrupted(make, sign="in-build")

    def group_from_actors(self) -> dict[str, Any]:
        ray.get(self.own.be_slow.remote("build"), timeout=30)
        told = interrupted(lambda: TrainerGroup.from_actors([self.own], policy="q"), sign="in-build")
        self._own_is_free_again(TrainerGroup)
        return told

    def fleet_from_actors(self) -> dict[str, Any]:
        ray.get(self.own.be_slow.remote("build"), timeout=30)
        told = interrupted(lambda: RolloutFleet.from_actors([self.own], policy="q"), sign="in-build")
        self._own_is_free_again(RolloutFleet)
        return told

    def _own_is_free_again(self, kind: Any) -> None:
        ray.get(self.own.be_slow.remote(""), timeout=PAUSE_S + 30)
        kind.from_actors([self.own], policy="q", timeout=30).close()

    def call(self) -> dict[str, Any]:
        told = interrupted(lambda: self.group.call("train", 3.0), sign="in-train")
        self.works()
        return told

    def publish(self) -> dict[str, Any]:
        """While it queues behind a call."""
        refs = self.group.call("train", 3.0, wait=False)
        told = interrupted(lambda: self.group.publish(timeout=30), sign="in-train")
        ray.get(refs, timeout=30)
        self.works()
        return told

    def wait(self) -> dict[str, Any]:
        told = interrupted(lambda: self.group.wait(self.group.publish(), replicas=99, timeout=60))
        self.works()
        return told

    def sync(self) -> dict[str, Any]:
        far = (self.group.latest or 0) + 50
        told = interrupted(lambda: self.fleet.sync(at_least=far, timeout=8))
        self.works()
        return told

    def sync_of_wrapped_actors(self) -> dict[str, Any]:
        with RolloutFleet.from_actors([self.own], policy="p") as fleet:
            told = interrupted(lambda: fleet.sync(at_least=(self.group.latest or 0) + 50, timeout=60))
            assert ray.get(self.own.be_slow.remote(""), timeout=5), "the actor is its user's again"
            assert fleet.sync(at_least=self.group.publish(), timeout=20).ok
        return told

    def fleet_call(self) -> dict[str, Any]:
        told = interrupted(lambda: self.fleet.call("act", 1, 3.0), sign="in-act")
        self.works()
        return told

    def map(self) -> dict[str, Any]:
        told = interrupted(lambda: self.fleet.map("act", range(9), kwargs={"seconds": 2.0}), sign="in-act")
        self.works()
        return told

    def stream(self) -> dict[str, Any]:
        def drain() -> None:
            for _ in self.fleet.stream("act", iter(int, 1), kwargs={"seconds": 0.2}):
                pass

        told = interrupted(drain, sign="in-act", after_s=1.0)
        self.works()
        return told

    def scale_up(self) -> dict[str, Any]:
        self.given["slow"] = "build"
        recipe: Any = self.fleet._recipe
        recipe.kwargs["slow"] = "build"
        told = interrupted(lambda: self.fleet.scale(4), sign="in-build")
        recipe.kwargs["slow"] = self.given["slow"] = ""
        assert len(self.fleet.status()["replicas"]) == 2
        self.works()
        return told

    def scale_down(self) -> dict[str, Any]:
        self.fleet.scale(3)
        refs = threading.Thread(target=lambda: self.fleet.map("act", range(3), kwargs={"seconds": 4.0}))
        refs.start()
        told = interrupted(lambda: self.fleet.scale(2), sign="in-act")
        refs.join()
        assert self.fleet.status()["size"] == 2
        self.works()
        return told

    def restart(self) -> dict[str, Any]:
        self.group._kwargs["slow"] = "build"
        told = interrupted(self.group.restart, sign="in-build")
        self.group._kwargs["slow"] = ""
        self.group.restart()
        self.works()
        return told

    def group_close(self) -> dict[str, Any]:
        group = TrainerGroup(SlowTrainer, policy="q", **self.slow("close"))
        return interrupted(group.close, sign="in-close")

    def fleet_close(self) -> dict[str, Any]:
        fleet = RolloutFleet(SlowRollout, policy="q", **self.slow("close"))
        return interrupted(fleet.close, sign="in-close")

    def close(self) -> None:
        self.fleet.close()
        self.group.close()
        ray.kill(self.own)


def main() -> None:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    before = set(threading.enumerate())
    cases = Cases()
    for name in sys.argv[3:]:
        tell(name, **getattr(cases, name)())
    cases.close()

    def threads() -> list[str]:
        return [each.name for each in threading.enumerate() if each not in before and each.name in OUR_THREADS]

    eventually(lambda: not left_behind() and not threads(), timeout=40, what="an end with nothing left")
    tell("end", left=left_behind(), threads=threads())


def tell(case: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"case": case, **facts}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
