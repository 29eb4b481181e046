"""How long a call waits: for its first byte, without a byte, on the whole; and whether it was told to stop."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from mx_rl.errors import InvalidArgument

_SLICE_S = 0.1
"""How soon a wait on a condition sees that it was told to stop."""
_NAP_S = (0.00005, 0.001)
_POLL_S = 10.0
_STOPPABLE_POLL_S = 1.0
"""How long the registry may hold the answer to a call that can be told to stop: its polls cannot be broken off."""


class Cancelled(BaseException):
    """A call was cancelled before its point of no return. It never leaves the package: twins raise asyncio's own."""


class Patience:
    """One call's. ``timeout`` seconds until the first byte has moved; every byte grants them anew, so that whatever makes
    progress goes on. ``stall_s``: a source that moves nothing for so long is left. ``deadline``: seconds for the whole.

    ``stoppable`` calls wait in slices, so that ``stop`` ends them within a second.
    """

    def __init__(
        self, timeout: float, *, stall_s: float = 5.0, deadline: float | None = None, stoppable: bool = False
    ) -> None:
        for name, value in (("timeout", timeout), ("stall_timeout", stall_s), ("deadline", deadline)):
            if value is not None and not value >= 0:
                raise InvalidArgument(f"{name}={value!r}: seconds, at least 0")
        self.timeout = timeout
        self.stall_s = stall_s
        self.stoppable = stoppable
        self.begun = time.monotonic()
        self.preparing = False
        """Nothing was begun that others wait for: a call that needs the same lock may stop this one."""
        self._end = self.begun + deadline if deadline is not None else math.inf
        self._renewed = self.begun
        self._lock = threading.Lock()
        self._reason: BaseException | None = None
        self._committed = False
        self._told = threading.Event()

    # ---- time

    @property
    def until(self) -> float:
        """On the monotonic clock."""
        return min(self._renewed + self.timeout, self._end)

    @property
    def left(self) -> float:
        return max(self.until - time.monotonic(), 0.0)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until

    def moved(self) -> None:
        """A byte has arrived: the time-out begins anew."""
        self.preparing = False
        self._renewed = time.monotonic()

    def follow(self, other: Patience) -> None:
        """What this call waits for makes progress as the other one does."""
        self._renewed = max(self._renewed, other._renewed)

    def extended(self, seconds: float) -> Patience:
        """For what may not be given up any more: at least so many seconds, and deaf to ``stop``."""
        return Patience(max(self.left, seconds), stall_s=self.stall_s)

    # ---- stopping

    def stop(self, reason: BaseException) -> bool:
        """Let the call raise ``reason`` at its next check. False: it is past its point of no return and will finish what it
        is about; should it have to begin anew, it raises ``reason`` then."""
        with self._lock:
            self._reason = self._reason or reason
            if self._committed:
                return False
            self._told.set()
            return True

    def check(self) -> None:
        if self._reason is not None and not self._committed:
            raise self._reason

    def commit(self) -> None:
        """The point of no return. Raises where the call was told to stop before."""
        with self._lock:
            self.check()
            self._committed = True

    def reopen(self) -> None:
        """What was committed came to nothing, and the call begins anew: it can be told to stop again."""
        with self._lock:
            self._committed = False
            if self._reason is not None:
                self._told.set()

    # ---- waiting

    def poll(self, longest: float = _POLL_S) -> float:
        """How long the registry may hold the next answer."""
        return min(self.left, _STOPPABLE_POLL_S if self.stoppable else longest)

    def nap(self, seconds: float) -> None:
        """Sleep, at most to the end; raises as ``check`` does."""
        self._told.wait(min(seconds, self.left))
        self.check()

    def wait_for(self, change: threading.Condition, done: Callable[[], bool]) -> bool:
        """Wait on a condition that the caller holds; False when the time is over. Raises as ``check`` does."""
        while not done():
            self.check()
            left = self.left
            if left <= 0:
                return False
            change.wait(min(left, _SLICE_S))
        return True


class Naps:
    """Between two looks at what moves bytes: short while something moves, longer while nothing does."""

    def __init__(self) -> None:
        self._next = _NAP_S[0]

    def rest(self) -> None:
        time.sleep(self._next)
        self._next = min(self._next * 2, _NAP_S[1])

    def over(self) -> None:
        """Something moved."""
        self._next = _NAP_S[0]
