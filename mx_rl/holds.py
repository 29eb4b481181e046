"""The gate between computing and installing: no weight changes while a hold is open."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

from mx_rl.errors import HoldTimeout
from mx_rl.patience import Patience

Owner: TypeAlias = "asyncio.Task[object] | int"
"""An asyncio task, or a thread's ident where none runs."""

_REOPEN_S = 5.0

_acting: ContextVar[tuple[Owner, Owner] | None] = ContextVar("mx_rl_acting", default=None)
"""(who runs, for whom). Tasks inherit their parent's context: what was not said of this very task is not meant for it."""


def _here() -> Owner:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        task = None
    return task if task is not None else threading.get_ident()


def owner() -> Owner:
    """Whose holds and installs these are: the running task or thread, or the one that it acts for."""
    me = _here()
    acting = _acting.get()
    return acting[1] if acting is not None and acting[0] == me else me


@contextmanager
def acting_for(who: Owner) -> Iterator[None]:
    """The body is part of what ``who`` does, on this task or thread."""
    token = _acting.set((_here(), who))
    try:
        yield
    finally:
        _acting.reset(token)


class Holds:
    """Holds belong to a task or thread and nest; ``shut`` lets no new owner in and waits for the others to come out."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._open: Counter[Owner] = Counter()
        self._shut_by: Owner | None = None

    @property
    def count(self) -> int:
        """How many owners hold."""
        return len(self._open)

    def enter(self, patience: Patience) -> Owner:
        """Open a hold; give what this returns to ``leave``, which another task may call. HoldTimeout at the end."""
        me = owner()
        with self._change:
            if me not in self._open and not patience.wait_for(self._change, lambda: self._shut_by in (None, me)):
                raise HoldTimeout(
                    f"an install took longer than {patience.timeout} s; the hold was not opened", holds=self.count
                )
            self._open[me] += 1
        return me

    def try_enter(self) -> Owner | None:
        """``enter`` where it need not wait, else None."""
        me = owner()
        with self._change:
            if me not in self._open and self._shut_by not in (None, me):
                return None
            self._open[me] += 1
        return me

    def leave(self, who: Owner) -> None:
        with self._change:
            self._open[who] -= 1
            if self._open[who] <= 0:
                del self._open[who]
            self._change.notify_all()

    @contextmanager
    def suspended(self, patience: Patience) -> Iterator[None]:
        """The caller's own hold does not count inside: it is at a safe point, and others' installs need not wait for it.

        It is open again afterwards, whatever happened. An install that runs then is waited for; HoldTimeout where that takes
        longer than what is left of ``patience``, and than five seconds: weights may change under the hold then.
        """
        me = owner()
        with self._change:
            count = self._open.pop(me, 0)
            self._change.notify_all()
        try:
            yield
        finally:
            with self._change:
                if count:
                    try:
                        self._reopen(me, patience.extended(_REOPEN_S))
                    finally:
                        self._open[me] += count

    def _reopen(self, me: Owner, patience: Patience) -> None:
        # Opened under an install, the hold would see weights change.
        if not patience.wait_for(self._change, lambda: self._shut_by in (None, me)):
            raise HoldTimeout(
                "an install that began inside this hold did not end in time: the hold is open again and weights may change "
                "under it, so leave it and enter anew",
                holds=self.count,
            )

    @contextmanager
    def shut(self, patience: Patience) -> Iterator[None]:
        """Close the gate for an install. The caller's own hold counts as its safe point and is not waited for.

        Raises HoldTimeout with how many are open; the gate is open again then.
        """
        me = owner()
        with self._change:
            if not patience.wait_for(self._change, lambda: self._shut_by is None):
                raise HoldTimeout("another install is waiting for the same holds", holds=self.count)
            self._shut_by = me
            try:
                if not patience.wait_for(self._change, lambda: not self._others(me)):
                    others = self._others(me)
                    raise HoldTimeout(
                        f"{others} hold(s) stayed open: end them between steps, or call sync() inside one", holds=others
                    )
            except BaseException:
                self._shut_by = None
                self._change.notify_all()
                raise
        try:
            yield
        finally:
            with self._change:
                self._shut_by = None
                self._change.notify_all()

    def _others(self, me: Owner) -> int:
        return sum(1 for who in self._open if who != me)
