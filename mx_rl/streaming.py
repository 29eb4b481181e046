"""A version handed over name by name: a sync on a thread of its own whose install is the loop that draws it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from mx_rl.borrow import Borrowing, Loan
from mx_rl.errors import Closed, MxRLError, VersionAborted
from mx_rl.holds import Owner, acting_for, owner
from mx_rl.install import Work
from mx_rl.parcels import Parcel, make_parcels
from mx_rl.patience import Cancelled, Patience
from mx_rl.plan import Plan
from mx_rl.records import ReplicaSeats, Round, Stage
from mx_rl.reports import SyncReport
from mx_rl.staging import Cargo

log = logging.getLogger("mx_rl")

Given: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"
"""One tensor, or the boxes of a name that has several."""


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


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


class Pour(Work):
    """An install that writes nothing: each tensor goes to whoever draws. ``spent_s``: how long ``run`` took."""

    def __init__(self, pour: Callable[[], None]) -> None:
        self.spent_s = 0.0
        self._pour = pour

    def run(self) -> None:
        begun = time.monotonic()
        try:
            self._pour()
        finally:
            self.spent_s = time.monotonic() - begun


class Drawing:
    """One call of ``stream``: ``sync`` runs on a thread and gives, whoever draws gets."""

    def __init__(self, sync: Callable[[], SyncReport], hand: Handover, patience: Patience, *, alone: bool) -> None:
        self.report: SyncReport | None = None
        self._sync = sync
        self._hand = hand
        self._patience = patience
        self._alone = alone
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mx-rl-stream", daemon=True)

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

    def items(self) -> Generator[tuple[str, Given], None, None]:
        try:
            self._thread.start()
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

    def tell(self) -> bool:
        """That the loop is left; whoever gives ends by itself. Whether it was heard before the vote."""
        stopped = self._patience.stop(Cancelled())
        self._hand.leave()
        return stopped

    def leave(self) -> None:
        """Break the loop off, where it is not over, and wait for its end: before the vote the old version runs on, later
        the replica is tainted, which the next stream or sync heals."""
        if not self._thread.is_alive():
            return
        stopped = self.tell()
        if stopped or self._alone:  # else the other ranks must end their loops first
            self._thread.join(self._patience.stall_s)
        if isinstance(self._error, MxRLError):
            log.warning("a stream was left before its end: %s", self._error)


class Streams:
    """A subscriber's. ``only``: there is no memory to install into, so that whatever it brings here is for a stream."""

    def __init__(self, borrowing: Borrowing, *, only: bool, all_names: bool, alone: bool) -> None:
        self.only = only
        self.last_report: SyncReport | None = None
        self._loans: Borrowing | None = borrowing
        self._all_names = all_names
        self._alone = alone
        self._drawings: dict[Owner, Drawing] = {}  # those that are open, by who drew first
        self._pouring: tuple[Handover, bool] | None = (
            None  # of the stream that has the subscriber's lock; whether it copies
        )
        self._plan: Plan | None = None
        self._parcels: list[Parcel] = []
        self._scratch = _NOTHING

    @property
    def registered_bytes(self) -> int:
        return self._loans.registered_bytes if self._loans is not None else 0

    @property
    def giving(self) -> bool:
        """Who holds the subscriber's lock does so for a stream."""
        return self._pouring is not None

    def draw(
        self,
        patience_of: Callable[[], Patience],
        lock: Callable[[Patience], AbstractContextManager[None]],
        sync: Callable[[Patience], SyncReport],
        *,
        copy: bool,
    ) -> Generator[tuple[str, Given], None, None]:
        """The loop: ``sync`` runs under ``lock`` on a thread of its own, with a Pour for its install."""
        hand, patience, who = Handover(), patience_of(), owner()

        def run() -> SyncReport:
            with acting_for(who), lock(patience):
                self._pouring = hand, copy
                try:
                    return sync(patience)
                finally:
                    self._pouring = None

        drawing = Drawing(run, hand, patience, alone=self._alone)
        self.leave_own()
        self._drawings[who] = drawing
        try:
            yield from drawing.items()
        finally:
            if self._drawings.get(who) is drawing:
                del self._drawings[who]
        self.last_report = drawing.report

    def leave_own(self) -> None:
        """A loop of this very task or thread that was left and forgotten must not be waited for by its next call."""
        who = owner()
        drawing = self._drawings.get(who)
        if drawing is not None and not drawing.mine:
            self._drawings.pop(who, None)
            drawing.leave()

    def leave(self) -> None:
        """Break the open loops off; one of them gives at most, others wait for it."""
        while self._drawings:
            self._drawings.popitem()[1].leave()

    def tell(self, who: Owner) -> None:
        """That the loop which ``who`` began is left. Does not wait."""
        drawing = self._drawings.get(who)
        if drawing is not None:
            drawing.tell()

    def load(self, told: Round, seats: ReplicaSeats | None, *rest: Any) -> Cargo:
        """As ``Staging.load``, for a subscriber that only streams."""
        return self._borrowing.load(told, seats, *rest)

    @property
    def _borrowing(self) -> Borrowing:
        if self._loans is None:
            raise Closed("the subscriber was closed while it streamed")
        return self._loans

    def work(
        self,
        cargo: Cargo,
        stages: Callable[[], tuple[Stage | None, ...]],
        patience: Patience,
        given: Callable[[int], None],
    ) -> Pour:
        """The install of a stream. ``stages`` is asked when all ranks have voted; ``given`` is told how many items were done
        with."""
        assert self._pouring is not None
        hand, copy = self._pouring
        return Pour(lambda: self._pour(cargo, stages, patience, given, hand, copy))

    def _pour(
        self,
        cargo: Cargo,
        stages: Callable[[], tuple[Stage | None, ...]],
        patience: Patience,
        given: Callable[[int], None],
        hand: Handover,
        copy: bool,
    ) -> None:
        """Give every parcel, and return when the last was done with. Raises LoopBroken, and what a lender fails with."""
        lender = self._borrowing.settle(cargo, stages()) if isinstance(cargo, Loan) else None
        if lender is None and self._plan is not cargo.plan:
            self._plan, self._parcels = cargo.plan, make_parcels(cargo.plan, aliases=self._all_names)
        parcels = self._parcels if lender is None else lender.parcels
        room = max((parcel.scratch_nbytes for parcel in parcels), default=0)
        if room > len(self._scratch):
            self._scratch = torch.empty(room, dtype=torch.uint8, device="cpu")
        done = 0
        for index, parcel in enumerate(parcels):
            hand.await_draw()
            if lender is not None:
                lender.move(index)
            found = parcel.give(cargo.landing.block if lender is None else lender.block, self._scratch)
            for name in parcel.names:
                hand.await_draw()  # at once for the first: it was asked for above
                patience.moved()  # the loop takes as long as its engine does
                given(done)  # those who wait for the end of this loop grant it time
                done += 1
                hand.give((name, _clone(found) if copy else found))
            del found
        hand.await_draw()
        patience.moved()

    def close(self) -> None:
        """What holds memory is let go; ``last_report`` stays."""
        if self._loans is not None:
            self._loans.close()
        self._loans = self._plan = None
        self._drawings.clear()
        self._parcels, self._scratch = [], _NOTHING


def _clone(found: Given) -> Given:
    return tuple(one.clone() for one in found) if isinstance(found, tuple) else found.clone()
