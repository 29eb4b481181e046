"""Calls into libraries that have no deadline of their own, with one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Outcome(Generic[T]):
    def __init__(self) -> None:
        self.value: list[T] = []
        self.error: BaseException | None = None


def within(timeout: float, call: Callable[[], T], *, what: str) -> T:
    """Run ``call`` on a thread of its own; its result, or what it raised. TimeoutError after ``timeout`` seconds: the
    thread then goes on, and a process that wants to end leaves by ``os._exit``."""
    outcome: _Outcome[T] = _Outcome()

    def run() -> None:
        try:
            outcome.value.append(call())
        except BaseException as exc:  # noqa: BLE001 - raised again by the caller below
            outcome.error = exc

    thread = threading.Thread(target=run, name="mx-rl-deadline", daemon=True)
    thread.start()
    thread.join(timeout)
    if outcome.error is not None:
        raise outcome.error
    if not outcome.value:
        raise TimeoutError(f"{what}: no answer within {timeout:g} s")
    return outcome.value[0]
