"""Awaitable twins of blocking calls: the same code, on a thread of its own, for the task that awaits it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from mx_rl.holds import acting_for, owner

T = TypeVar("T")


async def run(
    call: Callable[[], T], *, stop: Callable[[], object] | None = None, drop: Callable[[T], object] | None = None
) -> T:
    """Await ``call()``, which counts as the awaiting task's own: its holds are that task's.

    When the task is cancelled: without ``stop`` the call is left to itself, and its outcome dropped. Else ``stop()`` tells
    the call to end, and its end is awaited: CancelledError where it was given up, its result where it was too late to; with
    ``drop`` CancelledError then too, and ``drop`` takes back what the result stands for.
    """
    who = owner()
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            with acting_for(who):
                result = call()
        except BaseException as exc:  # noqa: BLE001 - it belongs to whoever awaits
            done.set_exception(exc)
        else:
            done.set_result(result)

    # A thread a call: a pool's few threads may all be waiting for what only the next one brings.
    threading.Thread(target=contextvars.copy_context().run, args=(work,), name="mx-rl-await", daemon=True).start()
    waiting = asyncio.wrap_future(done)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        if stop is None:
            waiting.add_done_callback(_retrieve)
            raise
        stop()
        await _until_done(waiting)
        if waiting.exception() is not None:
            raise
        if drop is not None:
            drop(waiting.result())
            raise
        uncancel = getattr(asyncio.current_task(), "uncancel", None)  # from Python 3.11 on
        if uncancel is not None:
            uncancel()  # the request came too late, and is answered so
        return waiting.result()


async def _until_done(waiting: asyncio.Future[T]) -> None:
    """However often the task is cancelled meanwhile: the call ends soon, and what it did must be known."""
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError:
            continue


def _retrieve(waiting: asyncio.Future[T]) -> None:
    if not waiting.cancelled():
        waiting.exception()
