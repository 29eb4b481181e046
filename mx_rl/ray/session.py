"""The Ray that a group or fleet belongs to: its threads must not touch another one, nor bring one up."""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import Any

import ray

log = logging.getLogger("mx_rl.ray")


def _never_starting(function: Any) -> Any:
    return getattr(function, "__wrapped__", function)


# Ray's own wrap these so that they start a cluster where there is none. A thread of ours that waits while the user
# calls ray.shutdown() would do that.
get = _never_starting(ray.get)
wait = _never_starting(ray.wait)
kill = _never_starting(ray.kill)


class Session:
    """The connection of this process to Ray at the time it was made.

    After ``ray.shutdown()`` calls of actors would start a cluster of their own, and after another ``ray.init()`` they
    would reach a cluster that has never seen our actors.
    """

    def __init__(self) -> None:
        self._token = self._now()

    def alive(self) -> bool:
        return ray.is_initialized() and self._now() == self._token

    @staticmethod
    def _now() -> tuple[str, str]:
        context = ray.get_runtime_context()
        return str(context.gcs_address), str(context.get_job_id())


_open: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(thing: Any) -> None:
    """``thing.close()`` at interpreter exit, before Ray leaves: a script that forgets to close leaves nothing behind."""
    _open.add(thing)


@atexit.register
def _close_all() -> None:
    for thing in list(_open):
        try:
            thing.close()
        except Exception:
            log.exception("closing %r at exit", thing)
