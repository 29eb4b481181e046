"""The ordeal at half time: a rollout is killed in the middle of its work, another one joins, training goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from examples.grpo.rollout import Group
from mx_rl.ray import RolloutFleet

POLL_S = 0.01


@dataclass(kw_only=True)
class Ordeal:
    """What was done, and the seconds from the kill (and the request for one more) until each new rollout had answered
    prompts with the trainer's current version."""

    victim: str = ""
    pid: int = 0
    replacement: str = ""
    replacement_s: float | None = None
    newcomer: str = ""
    newcomer_s: float | None = None

    @property
    def survived(self) -> bool:
        return self.replacement_s is not None and self.newcomer_s is not None


class Faults:
    """Strikes from threads of its own, beside a training loop that shows it what the rollouts made."""

    def __init__(self, fleet: RolloutFleet, *, timeout: float) -> None:
        self.ordeal = Ordeal()
        self._fleet = fleet
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="faults")
        self._tasks: list[Future[None]] = []
        self._before: set[str] = set()
        self._killed = 0.0

    def start(self) -> None:
        """The next replica that works is killed."""
        self._tasks.append(self._threads.submit(self._strike))

    @property
    def trouble(self) -> str:
        """What went wrong while striking or growing, or nothing."""
        errors = [task.exception() for task in self._tasks if task.done()]
        return "; ".join(f"{type(error).__name__}: {error}" for error in errors if error is not None)

    def note(self, groups: Sequence[Group], current: int) -> bool:
        """Look at what the rollouts made with the trainer at version ``current``. True once, when all are back."""
        if not self._killed or self.ordeal.survived:
            return False
        now = time.monotonic()
        rows = self._fleet.status()["replicas"]
        for name in {group.replica for group in groups if group.version >= current} - self._before:
            if name not in rows:
                continue
            if rows[name]["restarts"] and self.ordeal.replacement_s is None:
                self.ordeal.replacement, self.ordeal.replacement_s = name, now - self._killed
            elif not rows[name]["restarts"] and self.ordeal.newcomer_s is None:
                self.ordeal.newcomer, self.ordeal.newcomer_s = name, now - self._killed
        return self.ordeal.survived

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _strike(self) -> None:
        until = time.monotonic() + self._timeout
        while True:
            rows = self._fleet.status()["replicas"]
            busy = [name for name, row in rows.items() if row["ready"] and row["calls"]]
            if busy:
                break
            if time.monotonic() > until:
                raise TimeoutError(f"no rollout was at work within {self._timeout:g} s: {rows}")
            time.sleep(POLL_S)
        self.ordeal.victim, self.ordeal.pid = busy[0], rows[busy[0]]["pids"][0]
        self._before = set(rows)
        os.kill(self.ordeal.pid, signal.SIGKILL)
        self._killed = time.monotonic()
        self._fleet.scale(len(rows) + 1, timeout=self._timeout)
