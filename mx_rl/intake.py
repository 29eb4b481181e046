"""The first half of a sync: a round fixes the version, and its bytes come into the stage; on call, or ahead of it.

take what is staged, or: meet the ranks -> resolve (rank 0) or hear the round -> load
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from mx_rl.errors import CorruptRecord, IncompleteVersion, InvalidArgument, StaleVersion, VersionGone
from mx_rl.patience import Patience
from mx_rl.prefetch import Prefetched
from mx_rl.records import AnyResult, Nothing, Resolve, Round, Target, VersionRecord
from mx_rl.reports import SyncReport
from mx_rl.staged import Staged
from mx_rl.switch import TRANSIENT, Switch
from mx_rl.target import not_ready

log = logging.getLogger("mx_rl")

T = TypeVar("T")

_AHEAD_S = 60.0
"""How long a prefetch waits without a byte before it begins anew."""


class Intake(Switch, Prefetched):
    """Brings versions into the stage."""

    # ---- calls

    def _persist(self, attempt: Callable[[], T], exactly: int | None, patience: Patience) -> T:
        """Try again what may go well next time, until the end. An exact version that is gone does not come back."""
        nap = 0.01
        with self._exclusive(patience):
            while True:
                try:
                    return attempt()
                except TRANSIENT as exc:
                    if patience.over or (exactly is not None and isinstance(exc, VersionGone)):
                        raise
                    log.warning("policy %s replica %s: trying again: %s", self.policy, self.replica, exc)
                    patience.reopen()
                    patience.nap(nap)
                    nap = min(nap * 2, 1.0)

    def _sync(self, least: int | None, exact: int | None, patience: Patience) -> SyncReport:
        def attempt() -> SyncReport:
            found = self._find_stage(least, exact, patience)
            if found is not None:
                waited = time.monotonic() - patience.begun
                return found if isinstance(found, SyncReport) else self._install(found, patience, waited=waited)
            staged = self._stage(least, exact, patience)
            return staged if isinstance(staged, SyncReport) else self._install(staged, patience)

        return self._persist(attempt, exact, patience)

    def _stage_within(self, least: int | None, exact: int | None, patience: Patience) -> Staged | None:
        staging, _, _ = self._parts
        if staging.stage.direct:
            raise InvalidArgument('stage() with stage="none": its bytes go straight into live weights, so call sync()')

        def attempt() -> Staged | SyncReport:
            open_stage = self._open_stage
            found = self._find_stage(least, exact, patience) if open_stage is not None and open_stage.ahead else None
            if isinstance(found, Staged):
                found.ahead = False
            return found or self._stage(least, exact, patience)

        staged = self._persist(attempt, exact, patience)
        return None if isinstance(staged, SyncReport) else staged

    # ---- stage

    def _find_stage(self, least: int | None, exact: int | None, patience: Patience) -> Staged | SyncReport | None:
        """The version that waits in the stage, where this call may take it; of another rank than 0 also the answer that
        rank 0's call has found nothing newer."""
        _, ranks, _ = self._parts
        staged = self._open_stage
        if staged is None:
            return None
        self._meet(patience)
        if self.rank:
            told = ranks.take_nothing()
            if told is not None:
                return self._nothing_newer(told, 0.0)
            usable = not ranks.superseded(staged.round)
        else:
            usable = exact in (None, staged.version) and staged.version >= (least or 0)
            usable = usable and (staged.full or self._taint is None)
        layout = self._layout()
        if not usable or (layout.hash if layout is not None else "") != staged.cargo.layout:
            self._discard(staged, "a call needs another version")
            return None
        if self.rank == 0:
            ranks.call_for(staged.round)
        return staged

    def _stage(self, at_least: int | None, exactly: int | None, patience: Patience) -> Staged | SyncReport:
        _, ranks, membership = self._parts
        if self._open_stage is not None:
            self._discard(self._open_stage, "another stage began")
        begun = time.monotonic()
        membership.follow(self._layout())
        self._meet(patience)
        told = self._fix_target(at_least, exactly, patience) if self.rank == 0 else ranks.next_round(patience)
        resolved = time.monotonic() - begun
        if told.record is None:
            return self._nothing_newer(told, resolved)
        return self._load(told, told.record, resolved, patience)

    def _meet(self, patience: Patience) -> None:
        _, _, membership = self._parts
        if membership.meet(patience):
            self._taint = self._taint or "a rank of the replica was replaced, or runs another version"

    def _load(self, told: Round, record: VersionRecord, resolved: float, patience: Patience) -> Staged:
        staging, ranks, membership = self._parts
        if not staging.serves_on:
            self._held = ()
        patience.preparing = False
        try:
            streams = self._streams
            load = streams.load if streams is not None and streams.only else staging.load
            cargo = load(told, membership.seats, patience, lambda windows: ranks.tell_progress(told.round, windows))
            patience.check()
        except BaseException as exc:
            self._refuse_round(told.round, record.number, exc)
            raise
        moved = 0 if staging.stage.direct else len(cargo.plan.window_bounds)
        ranks.tell_progress(told.round, moved, whole=True)
        cargo.seconds = {"resolve": resolved, **cargo.seconds}
        self._open_stage = Staged(self, told, cargo)
        return self._open_stage

    # ---- prefetch

    def _idle(self) -> bool:
        return self._paused or self._closed or self._open_stage is not None

    def _await_news(self, patience: Patience) -> bool:
        """One long poll that takes neither the lock nor a lease; another rank than 0 waits for a round with a version."""
        _, ranks, membership = self._parts
        if not membership.met:
            with self._exclusive(self._patience(_AHEAD_S, stoppable=True), ahead=True):
                self._meet(Patience(0.0))
        if self.rank:
            return ranks.await_offer(patience)
        if self._taint is not None:
            return True
        found: AnyResult = self._member.ask(self._resolve(None, None, patience.poll(), lease=False))
        return isinstance(found, Target)

    def _stage_ahead(self) -> bool:
        """Stage what was announced, under the lock. User code is not called: tensors are resolved by calls only."""
        _, ranks, _ = self._parts
        patience = self._ahead = self._patience(_AHEAD_S, stoppable=True)
        patience.preparing = True
        with self._exclusive(patience, ahead=True):
            if self._idle():
                return False
            begun = time.monotonic()
            self._meet(Patience(0.0))
            told = self._fix_ahead(patience) if self.rank == 0 else ranks.take_part()
            if told is None or told.record is None:
                return False
            staged = self._load(told, told.record, time.monotonic() - begun, patience)
            staged.ahead = True
        if self.rank == 0 and ranks.await_parts(staged.round, patience):
            self._tell_staged(staged)
        return True

    def _tell_staged(self, staged: Staged) -> None:
        """Ends the lease: whoever publishes need not wait for a replica that has read all and installs later."""
        with self._exclusive(self._patience(_AHEAD_S, stoppable=True), ahead=True):
            if staged.over:
                return
            # Counted under the lock: an install that is told before this one arrives is counted after it, and stands.
            told = self._acknowledgement("staged", staged.version)
        self._member.ask(told, timeout=10.0)

    def _fix_ahead(self, patience: Patience) -> Round | None:
        found: AnyResult = self._member.ask(self._resolve(None, None, 0.0))
        patience.check()
        return self._offer(found, None, ahead=True) if isinstance(found, Target) else None

    # ---- rank 0: which version, from whom

    def _resolve(self, at_least: int | None, exactly: int | None, wait: float, *, lease: bool = True) -> Resolve:
        staging, _, _ = self._parts
        dead = staging.take_dead() if lease else ()
        return Resolve(
            policy=self.policy,
            replica=self.replica,
            incarnation=self.incarnation,
            installed=self._record.identity if self._record is not None else None,
            at_least=at_least,
            exactly=exactly,
            force=self._taint is not None,
            dead=dead,
            lost=staging.lost,
            read_s=staging.read_s,
            lease=lease,
            wait=wait,
        )

    @property
    def _whole(self) -> bool:
        return self._record is not None and self._taint is None

    def _fix_target(self, at_least: int | None, exactly: int | None, patience: Patience) -> Round:
        """Waits for a version that satisfies the call."""
        _, ranks, _ = self._parts
        mine = self.version
        running = self._record.identity if self._record is not None else None
        content = self._whole and (mine or 0) >= (at_least or 0) and exactly in (None, mine)
        while True:
            wait = 0.0 if content else patience.poll()
            found: AnyResult = self._member.ask(self._resolve(at_least, exactly, wait))
            patience.check()
            if isinstance(found, Target):
                return self._offer(found, exactly)
            if not isinstance(found, Nothing):
                raise CorruptRecord(f"the registry answered Resolve with {type(found).__name__}: releases differ")
            if content:
                return ranks.open_round(lambda number: Round(round=number, record=None, installed=running))
            if patience.over:
                raise not_ready(self.policy, found, at_least, exactly)

    def _offer(self, found: Target, exactly: int | None, *, ahead: bool = False) -> Round:
        _, ranks, _ = self._parts
        offered, mine, whole = found.record.number, self.version, self._whole
        if whole and mine is not None and offered < mine and exactly is None:
            raise StaleVersion(
                f"policy {self.policy!r}: version {offered} was offered and {mine} is installed: it never goes down",
                installed=mine,
                offered=offered,
            )
        return ranks.open_round(
            lambda number: Round(
                round=number,
                record=found.record,
                trainer=found.trainer,
                holders=found.holders,
                full=not whole,
                ahead=ahead,
            )
        )

    def _nothing_newer(self, told: Round, resolved: float) -> SyncReport:
        _, ranks, _ = self._parts
        record = self._record
        if record is None or record.identity != told.installed or self._void:
            ranks.complain()
            raise IncompleteVersion(
                f"rank {self.rank} of replica {self.replica!r} runs version {self.version}, rank 0 runs "
                f"{told.installed[2] if told.installed else None}: sync again, and all ranks take it in full",
                version=self.version,
                missing=[self.rank],
            )
        self._taint = None  # rank 0 is whole: the decision that this rank could not learn was to leave all as it was
        return SyncReport(
            version=record.number,
            previous=record.number,
            step=record.step,
            kind="none",
            source="",
            seconds={"resolve": resolved, "pause": 0.0, "total": resolved},
        )
