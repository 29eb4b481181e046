"""The gate between computing and installing: no weight changes while a hold is open."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from mx_rl.errors import HoldTimeout


class Holds:
    """Holds are taken by threads and nest; ``shut`` lets no new thread in and waits for the others to come out."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._open: Counter[int] = Counter()
        self._shut_by: int | None = None

    @property
    def count(self) -> int:
        return len(self._open)

    def enter(self, *, timeout: float) -> None:
        me = threading.get_ident()
        with self._change:
            if not self._open[me] and self._shut_by not in (None, me):
                done = self._change.wait_for(lambda: self._shut_by is None, timeout)
                if not done:
                    if not self._open[me]:
                        del self._open[me]
                    raise HoldTimeout(
                        f"an install took longer than {timeout} s; the hold was not opened", holds=self.count
                    )
            self._open[me] += 1

    def leave(self) -> None:
        me = threading.get_ident()
        with self._change:
            self._open[me] -= 1
            if not self._open[me]:
                del self._open[me]
            self._change.notify_all()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The caller's own hold does not count inside: it is at a safe point, and others' installs need not wait for it."""
        me = threading.get_ident()
        with self._change:
            count = self._open.pop(me, 0)
            self._change.notify_all()
        try:
            yield
        finally:
            with self._change:
                if count:
                    # An install has a deadline of its own; opened under it, the hold would see weights change.
                    self._change.wait_for(lambda: self._shut_by in (None, me))
                    self._open[me] += count

    @contextmanager
    def shut(self, *, deadline: float) -> Iterator[None]:
        """Close the gate for an install. The caller's own hold counts as its safe point and is not waited for.

        Raises HoldTimeout with how many are open; the gate is open again then.
        """
        me = threading.get_ident()
        with self._change:
            if not self._change.wait_for(lambda: self._shut_by is None, max(deadline - time.monotonic(), 0)):
                raise HoldTimeout("another install is waiting for the same holds", holds=self.count)
            self._shut_by = me
            try:
                left = max(deadline - time.monotonic(), 0)
                if not self._change.wait_for(
                    lambda: not any(count and who != me for who, count in self._open.items()), left
                ):
                    others = sum(1 for who, count in self._open.items() if count and who != me)
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
