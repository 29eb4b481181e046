"""Loop: where a user's methods run. Coroutines go to one event loop, in an async actor of the user's to the actor's own."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import ray

from mx_rl.errors import Closed
from mx_rl.holds import acting_for, owner

log = logging.getLogger("mx_rl.ray")

_END: Any = object()
_END_S = 2.0
"""What coroutines get to end in once they were cancelled."""


class Loop:
    """``run`` from any thread but the loop's; ``stop`` once, at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._calls: set[Future[Any]] = set()
        self._stopped = False

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, awaited where it is awaitable.

        In an async actor all of it runs on the actor's loop: its methods count on never running beside one another,
        and what they made there (locks, tasks, an engine) belongs to that loop.
        """

        who = owner()  # of the hold around this call: a sync in the coroutine is that call's safe point

        async def whole() -> Any:
            with acting_for(who):
                result = function(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result

        actors = _actors_loop()
        if actors is not None:
            return asyncio.run_coroutine_threadsafe(whole(), actors).result()
        result = function(*args, **kwargs)
        if not inspect.isawaitable(result):
            return result
        if self._stopped and inspect.iscoroutine(result):
            result.close()

        async def outcome() -> Any:
            with acting_for(who):
                return await result

        return self._await(outcome())

    def drawn(self, items: Any) -> Any:
        """``items``, an iterable or async iterable, for a thread beside the loop: each step runs where ``run`` runs."""
        if isinstance(items, AsyncIterable):
            from mx_rl.feed import on_loop  # torch: not in a driver

            with self._lock:
                return on_loop(items, _actors_loop() or self._opened())
        return self._steps(items) if isinstance(items, Iterable) and _actors_loop() is not None else items

    def stop(self) -> None:
        """Cancel what runs on the loop of our own and end it, within a few seconds; who waits for a call gets Closed."""
        with self._lock:
            self._stopped = True
            if self._own is None or self._thread is None:
                return
            if self._thread.is_alive():
                self._own.call_soon_threadsafe(self._own.stop)
        self._thread.join(3 * _END_S)

    def _steps(self, items: Iterable[Any]) -> Iterator[Any]:
        pairs = self.run(iter, items)
        while True:
            pair = self.run(next, pairs, _END)
            if pair is _END:
                return
            yield pair
            del pair  # the next one is made in its room

    def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            with self._lock:
                call = asyncio.run_coroutine_threadsafe(work, self._opened())
                self._calls.add(call)
        except Closed:
            work.close()
            raise
        try:
            return call.result()
        except CancelledError as exc:
            if self._stopped:
                raise Closed("closed while a coroutine of the actor's ran: it was cancelled") from exc
            raise
        finally:
            with self._lock:
                self._calls.discard(call)

    def _opened(self) -> asyncio.AbstractEventLoop:
        if self._stopped:
            raise Closed("closed: no coroutine runs here any more")
        if self._own is None:
            self._own = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._serve, args=(self._own,), name="mx-rl-user-loop", daemon=True)
            self._thread.start()
        return self._own

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            try:
                loop.run_until_complete(_end_all())
            finally:
                with self._lock:
                    stranded = list(self._calls)
                for call in stranded:  # of a coroutine that does not let itself be cancelled
                    call.cancel()
                loop.close()


async def _end_all() -> None:
    """Cancel every task of the running loop, then close the async generators."""
    loop = asyncio.get_running_loop()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left and (deaf := (await asyncio.wait(left, timeout=_END_S))[1]):
        log.warning(
            "%d coroutines of the actor's did not end when they were cancelled: %s", len(deaf), str(list(deaf)[:3])
        )
    await asyncio.wait([loop.create_task(loop.shutdown_asyncgens())], timeout=_END_S)


def _actors_loop() -> asyncio.AbstractEventLoop | None:
    """The loop on which Ray runs the methods of an async actor, or None in any other process.

    Ray has no public way to it; in a release that moves these names coroutines run on a loop of our own.
    """
    internals: Any = ray
    try:
        core = internals._private.worker.global_worker.core_worker
        if not core.current_actor_is_asyncio():
            return None
        loop = core.get_event_loop(internals._raylet.PythonFunctionDescriptor("", "", ""), "")[0]
    except (AttributeError, TypeError):
        return None
    return loop if isinstance(loop, asyncio.AbstractEventLoop) else None
