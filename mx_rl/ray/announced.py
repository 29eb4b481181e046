"""Announced: versions as the registry tells the driver of them, so that actors of the user's are not kept waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mx_rl.ray.deadline import Deadline
from mx_rl.records import AwaitInstalled, Beat
from mx_rl.registry import Registry, open_registry

_SLICE_S = 0.5
_ANSWER_S = 10.0


class Announced:
    """One policy's newest READY version. A sync of a wrapped actor takes its turn among its user's calls: one that only
    waits would hold all of them up."""

    def __init__(self, policy: str, registry: str | None) -> None:
        self._policy = policy
        self._url = registry
        self._lock = threading.Lock()
        self._door: Registry | None = None

    def newest(self) -> int | None:
        """Number of the newest READY version, or None. Raises RegistryLost."""
        answer = self._opened().call(Beat(policy=self._policy, incarnations=()), timeout=_ANSWER_S)
        return answer.floor or None

    def wait(self, number: int, deadline: Deadline, *, check: Callable[[], None]) -> bool:
        """Until a version of at least ``number`` is READY; whether one is, at the deadline. ``check`` raises when it
        is to end. Raises RegistryLost."""
        while True:
            check()
            part = min(_SLICE_S, deadline.left)
            command = AwaitInstalled(policy=self._policy, number=number, replicas=0, wait=part)
            ready = self._opened().call(command, timeout=part + _ANSWER_S).floor >= number
            if ready or deadline.over:
                return ready

    def close(self) -> None:
        with self._lock:
            door, self._door = self._door, None
        if door is not None:
            door.close()

    def _opened(self) -> Registry:
        with self._lock:
            if self._door is None:
                self._door = open_registry(self._url)
            return self._door
