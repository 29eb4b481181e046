"""One timeout shared by the steps of a call, on this process's monotonic clock."""

from __future__ import annotations

import time

from mx_rl.errors import InvalidArgument


class Deadline:
    """``timeout`` seconds from now."""

    def __init__(self, timeout: float) -> None:
        if not isinstance(timeout, (int, float)) or not 0 <= timeout < 1e9:
            raise InvalidArgument(f"timeout={timeout!r}: a finite number of seconds, at least 0")
        self.timeout = timeout
        self._end = time.monotonic() + timeout

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end
