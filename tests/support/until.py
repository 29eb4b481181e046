"""Wait on a condition with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], *, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)
