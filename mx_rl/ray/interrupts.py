"""Ctrl-C in the middle of a call: what must be done whole is done whole, and nobody waits long for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

END_S = 5.0
"""How long actors get to close what they opened before they are killed."""
HURRY_S = 0.3
"""The same, where a person waits for the prompt."""


def patience() -> float:
    """Seconds for cleaning up after what is being handled: few after a Ctrl-C."""
    failure = sys.exc_info()[1]
    return END_S if failure is None or isinstance(failure, Exception) else HURRY_S


def uninterrupted(work: Callable[[], None]) -> None:
    """Run ``work``, which must be short, on a thread of its own, where no KeyboardInterrupt reaches it; what it raises
    is raised here."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that asked
            failures.append(error)

    thread = threading.Thread(target=run, name="mx-rl-send", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
