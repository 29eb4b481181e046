"""A registry inside this process, for one-process loops and for tests without a cluster."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from mx_rl.errors import RegistryLost
from mx_rl.records import Answer, AnyCommand
from mx_rl.registry.base import Registry
from mx_rl.registry.state import State, apply

TICK_S = 0.25


class MemoryRegistry(Registry):
    """Threads of this process share it; no other process sees it.

    ``MemoryRegistry()`` is a fresh one; ``MemoryRegistry.shared(name)`` is one a name and process ("memory://name").
    ``clock`` returns seconds and may stand still: waits are measured on the monotonic clock.
    """

    _shared: ClassVar[dict[str, MemoryRegistry]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        *,
        lease_s: float = 30.0,
        grace_max_s: float = 60.0,
        clock: Callable[[], float] = time.time,
        url: str = "memory",
    ) -> None:
        self.url = url
        self._clock = clock
        self._state = State(secrets.randbits(63), lease_s=lease_s, grace_max_s=grace_max_s)
        self._changed = threading.Condition()

    @classmethod
    def shared(cls, name: str = "") -> MemoryRegistry:
        """The same registry for every caller of this process; closing it does nothing."""
        with cls._shared_lock:
            found = cls._shared.get(name)
            if found is None:
                found = cls._shared[name] = cls(url=f"memory://{name}" if name else "memory")
            return found

    def call(self, command: AnyCommand, *, timeout: float) -> Answer:
        """See Registry.call. Waits at most ``timeout``, also where ``command.wait`` is longer."""
        deadline = time.monotonic() + min(max(command.wait, 0.0), max(timeout, 0.0))
        again = False
        with self._changed:
            while True:
                final = time.monotonic() >= deadline
                before = self._state.changes(command.policy)
                answer = apply(self._state, command, self._clock(), final=final, again=again)
                if self._state.changes(command.policy) != before:
                    self._changed.notify_all()
                if answer is not None:
                    return answer
                if final:
                    raise RegistryLost(f"{self.url}: {type(command).__name__} got no answer at the end of its wait")
                again = True
                self._changed.wait(min(TICK_S, max(deadline - time.monotonic(), 0.0)))

    def forget(self, policy: str, *, timeout: float = 10.0) -> bool:
        """Remove a policy and its floor: its next version is 1. False (and nothing done) while members live."""
        if not self._changed.acquire(timeout=timeout):
            raise RegistryLost(f"{self.url}: busy for {timeout} s")
        try:
            return self._state.forget(policy, self._clock())
        finally:
            self._changed.release()

    def close(self) -> None:
        """Nothing to give back: the registry lives while something refers to it."""
