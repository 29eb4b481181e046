"""Publishers and subscribers of one process, over the memory transport and a registry of their own."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from mx_rl import Publisher, Subscriber
from mx_rl.config import Options
from mx_rl.registry.memory import MemoryRegistry

FAST = Options(transport="memory", window_bytes=4096, grace_s=0.2, stall_s=0.3)
STEADY = dataclasses.replace(FAST, stall_s=10.0)
"""For tests of who served what: a busy machine must not turn a source into one that stalls."""


def publisher(registry: MemoryRegistry, tensors: Any, **named: Any) -> Publisher:
    return Publisher("p", tensors, registry=registry, **({"options": FAST} | named))


def subscriber(registry: MemoryRegistry, tensors: Any, **named: Any) -> Subscriber:
    return Subscriber("p", tensors, registry=registry, **({"options": FAST} | named))


steady_publisher = partial(publisher, options=STEADY)
steady_subscriber = partial(subscriber, options=STEADY)


def together(*calls: Callable[[], Any], timeout: float = 30.0) -> list[Any]:
    """Run calls at once, one thread each, as the ranks of a world would; results in order, or what they raised."""
    futures: list[Future[Any]] = [Future() for _ in calls]

    def run(call: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(call())
        except BaseException as exc:
            future.set_exception(exc)

    for call, future in zip(calls, futures, strict=True):
        threading.Thread(target=run, args=(call, future), daemon=True).start()
    outcomes: list[Any] = []
    for future in futures:
        exc = future.exception(timeout)
        outcomes.append(future.result() if exc is None else exc)
    return outcomes
