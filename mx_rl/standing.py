"""One rollout rank: what it runs and tells the registry of it, the lock of its calls, and the hooks around a change."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mx_rl.config import Options
from mx_rl.endpoint import Member, check_open
from mx_rl.errors import Busy, MxRLError, Paused
from mx_rl.holds import Holds
from mx_rl.membership import Membership
from mx_rl.patience import Patience
from mx_rl.prefetch import Prefetch
from mx_rl.ranks import Ranks
from mx_rl.records import Ack, Source, VersionRecord
from mx_rl.reports import SyncReport
from mx_rl.staged import Staged
from mx_rl.staging import Cargo, Staging
from mx_rl.streaming import Streams
from mx_rl.tensors import Tensors

log = logging.getLogger("mx_rl")

_SLICE_S = 0.1


class Standing:
    """The foot of the Subscriber. ``_taint`` says why live weights may be mixed, ``_void`` that they are lost as a whole."""

    _member: Member

    def __init__(
        self,
        policy: str,
        tensors: Tensors | None,
        rank: int,
        world_size: int,
        options: Options,
        before_install: Callable[[int | None, int], None] | None,
        after_install: Callable[[int | None, int | None], None] | None,
    ) -> None:
        self.policy = policy
        self.rank = rank
        self.world_size = world_size
        self.options = options
        self.replica = ""
        self.incarnation = ""
        self._before_install = before_install
        self._after_install = after_install
        self._record: VersionRecord | None = None
        self._taint: str | None = None
        self._void = False
        self._held: tuple[Source, ...] = ()
        self._acks = itertools.count(1)
        self._tensors = tensors
        self._busy = threading.RLock()
        self._current: Patience | None = None  # of the call that has the lock
        self._ahead: Patience | None = None  # of a prefetch, which waits for other ranks without the lock
        self._holds = Holds()
        self._closed = False
        self._paused = False
        self._open_stage: Staged | None = None
        self._prefetch: Prefetch | None = None
        self._staging: Staging | None = None
        self._ranks: Ranks | None = None
        self._membership: Membership | None = None
        self._streams: Streams | None = None

    @property
    def version(self) -> int | None:
        """Number of the version that the live weights are, or None before the first."""
        return self._record.number if self._record is not None else None

    @property
    def _parts(self) -> tuple[Staging, Ranks, Membership]:
        check_open(self._closed, f"Subscriber({self.policy!r})")
        assert self._staging is not None
        assert self._ranks is not None
        assert self._membership is not None
        return self._staging, self._ranks, self._membership

    # ---- one call at a time

    def _patience(
        self,
        timeout: float,
        stall_timeout: float | None = None,
        deadline: float | None = None,
        *,
        stoppable: bool = False,
    ) -> Patience:
        stall_s = self.options.stall_s if stall_timeout is None else stall_timeout
        return Patience(timeout, stall_s=stall_s, deadline=deadline, stoppable=stoppable)

    @contextmanager
    def _exclusive(self, patience: Patience, *, ahead: bool = False) -> Iterator[None]:
        """One sync, stage, install or prefetch at a time; the caller's own hold is suspended. A prefetch that moves bytes is
        waited for as long as it makes progress, one that does not yet gives way. Busy at the end."""
        if self._streams is not None:
            self._streams.leave_own()
        with self._holds.suspended(patience):
            while not self._busy.acquire(timeout=min(patience.left, _SLICE_S)):
                patience.check()
                current = self._current
                if current is not None and current.preparing:
                    current.stop(Busy("a call needs the stage"))
                elif current is not None:
                    patience.follow(current)
                if patience.over:
                    raise Busy(
                        f"another sync or install of policy {self.policy!r} is under way in this process: try again"
                    )
            outer, self._current = self._current, patience
            try:
                check_open(self._closed, f"Subscriber({self.policy!r})")
                if self._paused:
                    raise self._paused_error()
                with self._member.bounded(lambda: patience.until):
                    yield
            finally:
                self._current = outer
                self._busy.release()
                if outer is None and not ahead:
                    self._poke()  # the stage may be empty now, and what is installed another version

    @contextmanager
    def _between_calls(self, timeout: float) -> Iterator[None]:
        """Nothing is staged or installed while the body runs, paused or not. Busy where a call does not end in time."""
        with self._holds.suspended(Patience(timeout)):
            if not self._busy.acquire(timeout=timeout):
                raise Busy(
                    f"an install of policy {self.policy!r} took longer than {timeout} s to end: wait before you sleep"
                )
            try:
                yield
            finally:
                self._busy.release()

    def _withdraw(self, staging: Staging) -> None:
        """Peers read live weights no more: nobody is to be sent here for them."""
        if staging.live is not None and self._held and self._record is not None and self._taint is None:
            self._held = ()
            self._acknowledge("installed", self._record.number)

    def _interrupt(self, reason: BaseException) -> None:
        """What waits now raises ``reason``, unless it is past its point of no return."""
        for patience in (self._current, self._ahead):
            if patience is not None:
                patience.stop(reason)

    def _paused_error(self) -> Paused:
        return Paused(
            f"replica {self.replica!r} rank {self.rank} of policy {self.policy!r} is paused: call resume() when its engine is "
            "awake, then sync"
        )

    def _poke(self) -> None:
        if self._prefetch is not None:
            self._prefetch.poke()

    # ---- hooks

    def _call_before(self, previous: int | None, version: int, patience: Patience) -> None:
        nap = 0.01
        while self._before_install is not None:
            try:
                self._before_install(previous, version)
                return
            except Busy:
                if nap > patience.left:
                    raise
                patience.nap(nap)
                nap = min(nap * 2, 0.5)

    def _call_after(self, previous: int | None, version: int | None) -> None:
        if self._after_install is not None:
            self._after_install(previous, version)

    # ---- what the registry hears

    def _acknowledgement(self, state: str, number: int, reason: str = "") -> Ack:
        seq = next(self._acks)  # before the state is read: what is told under a higher count is never older
        return Ack(
            policy=self.policy,
            replica=self.replica,
            incarnation=self.incarnation,
            record=self._record,
            state=state,
            number=number,
            reason=reason[:4096],
            held=() if state == "tainted" else self._held,
            seq=seq,
        )

    def _acknowledge(self, state: str, number: int, reason: str = "") -> None:
        """Rank 0 tells the registry. One that is away does not undo an install: it is told with a later beat."""
        if self.rank != 0:
            return
        try:
            self._member.ask(self._acknowledgement(state, number, reason), timeout=10.0)
        except MxRLError as exc:
            log.warning("policy %s replica %s: %s could not be told: %s", self.policy, self.replica, state, exc)
            self._member.repeat_later()
        except BaseException:
            self._member.repeat_later()
            raise

    # ---- what the caller hears

    def _report(self, cargo: Cargo, previous: int | None, seconds: dict[str, float]) -> SyncReport:
        haul = cargo.haul
        return SyncReport(
            version=cargo.record.number,
            previous=previous,
            step=cargo.record.step,
            kind=cargo.record.kind,
            source=haul.served_by.most_common(1)[0][0] if haul.served_by else "",
            served_by=dict(haul.served_by),
            wire_bytes=cargo.plan.wire_bytes,
            model_bytes=cargo.plan.model_bytes,
            seconds=seconds,
            lane=",".join(sorted(haul.lanes)),
            retries=haul.retries,
            refused=dict(haul.refused),
            unproved=cargo.unproved,
        )
