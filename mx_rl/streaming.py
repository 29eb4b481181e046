"""A version handed over name by name: a sync on a thread of its own whose install is the loop that draws it."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from mx_rl.borrow import Borrowing, Loan
from mx_rl.errors import MxRLError, VersionAborted
from mx_rl.install import Work
from mx_rl.parcels import Parcel, make_parcels
from mx_rl.plan import Plan
from mx_rl.records import Stage
from mx_rl.reports import SyncReport
from mx_rl.staging import Cargo

log = logging.getLogger("mx_rl")

Given: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"
"""One tensor, or the boxes of a name that has several."""


class LoopBroken(Exception):
    """The loop over a stream was left before its end."""


class Handover:
    """Two threads in turn: one gives an item when the other has asked for it, which it does when done with the last."""

    def __init__(self) -> None:
        self.broken = False
        self._change = threading.Condition()
        self._asked = 0
        self._given = 0
        self._item: Any = None
        self._over = False

    def draw(self) -> Any:
        """Ask for an item and wait for it: its giver's deadlines are this wait's. None at the end."""
        with self._change:
            self._item = None
            self._asked += 1
            self._change.notify_all()
            self._change.wait_for(lambda: self._over or self._given == self._asked)
            return self._item

    def await_draw(self) -> None:
        """Until the next item is asked for, as long as the loop takes. Raises LoopBroken."""
        with self._change:
            self._change.wait_for(lambda: self.broken or self._asked > self._given)
            if self.broken:
                raise LoopBroken("the loop over the stream was left before its end")

    def give(self, item: Any) -> None:
        with self._change:
            self._item = item
            self._given = self._asked
            self._change.notify_all()

    def end(self) -> None:
        with self._change:
            self._over = True
            self._change.notify_all()

    def leave(self) -> None:
        with self._change:
            self.broken = True
            self._item = None
            self._change.notify_all()


@dataclass(frozen=True)
class Pour(Work):
    """An install that writes nothing: each tensor goes to whoever draws. ``spent_s`` is filled by ``run``."""

    give: Callable[[], None] = lambda: None
    spent_s: list[float] = field(default_factory=list)

    def run(self) -> None:
        begun = time.monotonic()
        try:
            self.give()
        finally:
            self.spent_s.append(time.monotonic() - begun)


class Pourer:
    """What a subscriber keeps between streams: the parcels of its plan, and the buffer for those in several parts."""

    def __init__(self, borrowing: Borrowing) -> None:
        self.borrowing = borrowing
        self._plan: Plan | None = None
        self._parcels: list[Parcel] = []
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def pour(
        self, cargo: Cargo, stages: Callable[[], tuple[Stage | None, ...]], aliases: bool, copy: bool, hand: Handover
    ) -> None:
        """Give every parcel, and return when the last was done with. Raises LoopBroken; what a lender fails with."""
        lender = self.borrowing.settle(cargo, stages()) if isinstance(cargo, Loan) else None
        if lender is None and self._plan is not cargo.plan:
            self._plan, self._parcels = cargo.plan, make_parcels(cargo.plan, aliases=aliases)
        parcels = self._parcels if lender is None else lender.parcels
        room = max((parcel.scratch_nbytes for parcel in parcels), default=0)
        if room > len(self._scratch):
            self._scratch = torch.empty(room, dtype=torch.uint8)
        for index, parcel in enumerate(parcels):
            hand.await_draw()
            if lender is not None:
                lender.move(index)
            found = parcel.give(cargo.landing.block if lender is None else lender.block, self._scratch)
            for name in parcel.names:
                hand.await_draw()  # at once for the first: it was asked for above
                hand.give((name, _clone(found) if copy else found))
            del found
        hand.await_draw()


class Drawing:
    """One call of ``stream``: ``sync`` runs on a thread and gives, whoever draws gets."""

    def __init__(self, sync: Callable[[], SyncReport], hand: Handover, patience_s: float) -> None:
        self.report: SyncReport | None = None
        self._sync = sync
        self._hand = hand
        self._patience_s = patience_s
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="mx-rl-stream", daemon=True)

    def _run(self) -> None:
        try:
            self.report = self._sync()
        except BaseException as exc:  # noqa: BLE001 - it belongs to whoever draws
            self._error = exc
        finally:
            self._hand.end()

    @property
    def mine(self) -> bool:
        """The calling thread is the one that gives."""
        return self._thread is threading.current_thread()

    def items(self) -> Iterator[tuple[str, Given]]:
        self._thread.start()
        try:
            while True:
                item = self._hand.draw()
                if item is None:
                    break
                yield item
                del item
            self._thread.join()
            if self._hand.broken:
                raise VersionAborted(
                    "this stream was broken off by another call of the same thread or by close()",
                    version=None,
                    reason="broken off",
                )
            if self._error is not None:
                raise self._error
        finally:
            self.leave()

    def leave(self) -> None:
        """Break the loop off, where it is not over. The replica is tainted then, which the next stream or sync heals."""
        if not self._thread.is_alive():
            return
        self._hand.leave()
        self._thread.join(self._patience_s)
        if isinstance(self._error, MxRLError):
            log.warning("a stream was left before its end: %s", self._error)


def _clone(found: Given) -> Given:
    return tuple(one.clone() for one in found) if isinstance(found, tuple) else found.clone()
