"""Loop: where a user's methods run. Coroutines go to one event loop, in an async actor of the user's to the actor's own."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

import ray

from mx_rl.holds import acting_for, owner


class Loop:
    """``run`` from any thread but the loop's; ``stop`` once, at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: asyncio.AbstractEventLoop | None = None

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, awaited where it is awaitable.

        In an async actor all of it runs on the actor's loop: its methods count on never running beside one another,
        and what they made there (locks, tasks, an engine) belongs to that loop.
        """

        who = owner()  # of the hold around this call: a sync in the coroutine is that call's safe point

        async def on_loop() -> Any:
            with acting_for(who):
                result = function(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result

        actors = _actors_loop()
        if actors is not None:
            return asyncio.run_coroutine_threadsafe(on_loop(), actors).result()
        result = function(*args, **kwargs)
        if not inspect.isawaitable(result):
            return result

        async def outcome() -> Any:
            with acting_for(who):
                return await result

        return asyncio.run_coroutine_threadsafe(outcome(), self._opened()).result()

    def stop(self) -> None:
        with self._lock:
            if self._own is not None:
                self._own.call_soon_threadsafe(self._own.stop)

    def _opened(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._own is None:
                self._own = asyncio.new_event_loop()
                threading.Thread(target=self._own.run_forever, name="mx-rl-user-loop", daemon=True).start()
            return self._own


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
