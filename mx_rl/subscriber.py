"""The rollout rank's end.

sync:  resolve (which version, from whom) -> plan (cached) -> move (transport) -> verify -> install -> acknowledge
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from types import TracebackType
from typing import TypeVar

from mx_rl.config import Options
from mx_rl.endpoint import Endpoint, Member, check_open, check_policy, close_at_exit, unique_name
from mx_rl.errors import (
    Busy,
    Closed,
    CorruptRecord,
    IncompleteVersion,
    MxRLError,
    Paused,
    PeerLost,
    RegistryLost,
    StaleIncarnation,
    StaleVersion,
    Tainted,
    VersionAborted,
    VersionGone,
)
from mx_rl.holds import Holds
from mx_rl.install import Installer, Work
from mx_rl.layout import RankLayout
from mx_rl.membership import Membership
from mx_rl.patience import Cancelled, Patience
from mx_rl.prefetch import Prefetch, Prefetched
from mx_rl.ranks import Ranks
from mx_rl.records import AnyResult, Decision, Installed, Nothing, Resolve, Round, Target, VersionRecord, Vote
from mx_rl.registry import Registry
from mx_rl.reports import SyncReport
from mx_rl.staged import Staged
from mx_rl.staging import Staging
from mx_rl.standing import Standing
from mx_rl.target import Number, check_arguments, not_ready, number_of
from mx_rl.tensors import Tensors, resolve
from mx_rl.twins import run

log = logging.getLogger("mx_rl")

T = TypeVar("T")

_SLICE_S = 0.1
_AHEAD_S = 60.0
"""How long a prefetch waits without a byte before it begins anew."""

_TRANSIENT = (VersionGone, PeerLost, RegistryLost, VersionAborted)


class Subscriber(Standing, Prefetched):
    """Installs versions of ``policy`` into this rank's ``tensors`` (a mapping, a module, or a callable).

    The ranks of one ``replica`` (named where ``world_size`` > 1) switch versions together or not at all; each calls
    ``sync``, and rank 0's call fixes the target. ``sources``: whom to read from, in this order. ``strict``: names that
    the publisher has and no rank of the replica takes are an error. ``allow_missing``: patterns of names that the
    publisher
    may lack. ``verify`` is for digests, which this release has none of: windows are confirmed whatever it says.
    ``prefetch``: a thread stages each version as soon as it is announced, so that ``sync`` is the install alone; a version
    that waits is not overtaken by a newer one unless a call asks for it. ``serve``: "stage" lets peers read the version installed last from the stage, "off" does not.
    ``before_install(old, new)`` and ``after_install(old, new)`` get version numbers and run with holds shut; after a
    round that was called off ``after_install(old, old)`` is called, so that what was stopped is started again; ``old`` is
    None before the first version.

    The destination's dtype must be the wire's. Raises InvalidArgument, TensorUnavailable; SeatTaken where another
    living process has this (replica, rank).
    """

    def __init__(
        self,
        policy: str,
        tensors: Tensors,
        *,
        registry: Registry | str | None = None,
        replica: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        sources: Sequence[str] = ("peer", "trainer"),
        strict: bool = True,
        allow_missing: Sequence[str] = (),
        verify: bool = True,
        prefetch: bool = False,
        stage: str = "device",
        serve: str = "stage",
        before_install: Callable[[int | None, int], None] | None = None,
        after_install: Callable[[int | None, int | None], None] | None = None,
        options: Options | None = None,
    ) -> None:
        check_policy(policy)
        check_arguments(replica, rank, world_size, sources, stage, serve)
        super().__init__(policy, rank, before_install, after_install)
        self.world_size = world_size
        self.options = options or Options()
        self._tensors = tensors
        self._busy = threading.RLock()
        self._current: Patience | None = None  # of the call that has the lock
        self._holds = Holds()
        self._closed = False
        self._paused = False
        self._open_stage: Staged | None = None
        self._prefetch: Prefetch | None = None
        self._installer = Installer()
        self._staging: Staging | None = None
        self._ranks: Ranks | None = None
        self._membership: Membership | None = None
        layout = RankLayout.of(resolve(tensors))
        self.incarnation = unique_name(f"{policy}-r{rank}")
        self.replica = replica or self.incarnation
        self._endpoint = Endpoint.acquire(registry, self.options)
        self._member = Member(self._endpoint, policy, self.incarnation, self._reassert)
        try:
            self._staging = Staging(
                self._member,
                rank,
                layout,
                sources=sources,
                serve=serve == "stage",
                strict=strict,
                allow_missing=allow_missing,
            )
            self._ranks = Ranks(self._endpoint, policy, self.replica, rank, world_size)
            self._membership = Membership(
                self._member, self._staging, self._ranks, self.replica, named=replica is not None
            )
            if prefetch:
                self._prefetch = Prefetch(f"policy {policy} replica {self.replica} rank {rank}", self)
        except BaseException:
            self.close()
            raise
        close_at_exit(self)

    # ---- what users call

    def sync(
        self,
        at_least: Number = None,
        exactly: Number = None,
        *,
        timeout: float = 60.0,
        stall_timeout: float | None = None,
        deadline: float | None = None,
    ) -> SyncReport:
        """Install the newest READY version (``at_least`` n, or ``exactly`` n) and return a SyncReport. A version that waits
        in the stage and satisfies the call is installed, whatever is newer.

        Waits for the first version ever, or for ``at_least``; returns at once with kind "none" where nothing newer is
        there. A read that raced or whose source died is retried on what is newest then. After ``timeout`` seconds without
        a byte the old version runs on; every byte grants them anew, so that a large model on a slow network arrives.
        A source that moves nothing for ``stall_timeout`` seconds (``Options.stall_s``) is left for another; ``deadline``
        seconds are the end of the whole. Then: NotReady (who has not committed), IncompleteVersion (which rank of the
        replica is missing), PeerLost, VersionGone, HoldTimeout. Also LayoutMismatch and its kinds, before a byte moves;
        StaleVersion; Paused; Tainted where live weights may be mixed, which the next sync heals.
        """
        return self._sync(number_of(at_least), number_of(exactly), self._patience(timeout, stall_timeout, deadline))

    async def async_sync(
        self,
        at_least: Number = None,
        exactly: Number = None,
        *,
        timeout: float = 60.0,
        stall_timeout: float | None = None,
        deadline: float | None = None,
    ) -> SyncReport:
        """``sync`` on a thread of its own. Await it directly: inside a hold of this task it counts as its safe point.

        Cancelled, it ends within about a second and the old version runs on. A cancel that comes when this rank has voted
        for the version is too late: the install finishes, and its report is returned as if nothing had been cancelled.
        """
        least, exact = number_of(at_least), number_of(exactly)
        patience = self._patience(timeout, stall_timeout, deadline, stoppable=True)
        return await run(lambda: self._sync(least, exact, patience), stop=lambda: patience.stop(Cancelled()))

    def stage(
        self,
        at_least: Number = None,
        exactly: Number = None,
        *,
        timeout: float = 60.0,
        stall_timeout: float | None = None,
        deadline: float | None = None,
    ) -> Staged | None:
        """Bring the newest version into the stage without installing it; None where nothing newer is there.

        Times and errors as for ``sync``. One version at a time: a staged one is discarded by the next ``stage``, but for one
        that was prefetched.
        """
        return self._stage_within(
            number_of(at_least), number_of(exactly), self._patience(timeout, stall_timeout, deadline)
        )

    async def async_stage(
        self,
        at_least: Number = None,
        exactly: Number = None,
        *,
        timeout: float = 60.0,
        stall_timeout: float | None = None,
        deadline: float | None = None,
    ) -> Staged | None:
        """``stage`` on a thread of its own. Cancelled, it leaves nothing in the stage; once the version is complete there it
        is returned."""
        least, exact = number_of(at_least), number_of(exactly)
        patience = self._patience(timeout, stall_timeout, deadline, stoppable=True)
        return await run(lambda: self._stage_within(least, exact, patience), stop=lambda: patience.stop(Cancelled()))

    @contextmanager
    def hold(self, *, timeout: float = 60.0) -> Iterator[int | None]:
        """No install while the body runs; gives the version that it computes with. HoldTimeout where an install takes
        longer than ``timeout``. A ``sync`` inside the body counts as the safe point of whoever holds: the asyncio task
        that runs, else the thread."""
        who = self._holds.enter(self._patience(timeout))
        try:
            yield self.version
        finally:
            self._holds.leave(who)

    @asynccontextmanager
    async def async_hold(self, *, timeout: float = 60.0) -> AsyncIterator[int | None]:
        """``hold`` for a task: other tasks run on while it waits for an install to end."""
        patience = self._patience(timeout, stoppable=True)
        who = self._holds.try_enter()
        if who is None:
            who = await run(lambda: self._holds.enter(patience), stop=lambda: patience.stop(Cancelled()))
        try:
            yield self.version
        finally:
            self._holds.leave(who)

    @property
    def staged(self) -> int | None:
        """Number of the version that waits complete in the stage, or None."""
        staged = self._open_stage
        return staged.version if staged is not None else None

    def pause(self, *, timeout: float = 60.0) -> None:
        """The engine goes to sleep: from here to ``resume`` nothing is written, neither by prefetch, and ``ready`` is False.
        New versions are noted (``latest``); sync, stage and install raise Paused, those that wait now too.

        An install under way ends first; Busy where it takes longer than ``timeout`` seconds, and paused it is then all
        the same. Every rank of a replica is paused by itself. Idempotent.
        """
        check_open(self._closed, f"Subscriber({self.policy!r})")
        self._paused = True
        self._interrupt(self._paused_error())
        with self._holds.suspended():
            if not self._busy.acquire(timeout=timeout):
                raise Busy(
                    f"an install of policy {self.policy!r} took longer than {timeout} s to end: wait before you sleep"
                )
            self._busy.release()

    async def async_pause(self, *, timeout: float = 60.0) -> None:
        """``pause`` on a thread of its own. Cancelled, the subscriber is paused all the same."""
        await run(lambda: self.pause(timeout=timeout))

    def resume(self, *, weights_kept: bool = True) -> None:
        """End a pause. ``weights_kept=False``: the engine has dropped its weights, so that the next sync installs a version
        in full, the one that ran before if there is none newer; ``ready`` is False until then. Idempotent."""
        check_open(self._closed, f"Subscriber({self.policy!r})")
        if self._paused and not weights_kept and self._record is not None:
            self._taint = "the weights were not kept over a pause"
            self._void = True
            if self._open_stage is not None:
                self._discard(self._open_stage, "the weights were not kept over a pause")
        self._paused = False
        self._poke()

    @property
    def ready(self) -> bool:
        """A whole version is installed: whoever routes work may send it here."""
        return self._record is not None and self._taint is None and not self._closed and not self._paused

    def latest(self) -> int | None:
        """Number of the newest READY version, or None. Raises RegistryLost."""
        check_open(self._closed, f"Subscriber({self.policy!r})")
        self._member.beat_now()
        return self._member.floor or None

    async def async_latest(self) -> int | None:
        """``latest`` on a thread of its own."""
        return await run(self.latest)

    @property
    def registered_bytes(self) -> int:
        """Registered host memory of this rank: stages, their headers and page padding."""
        return self._staging.registered_bytes if self._staging is not None else 0

    def close(self) -> None:
        """Leave, and give everything back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._interrupt(Closed(f"Subscriber({self.policy!r}) was closed"))
        if self._prefetch is not None:
            self._prefetch.stop()
        idle = self._busy.acquire(timeout=self.options.stall_s)  # a sync in another thread sees that it is over
        with ExitStack() as steps:  # the last is run first; each is run whatever became of those before
            if idle:
                steps.callback(self._busy.release)
            steps.callback(self._endpoint.release)
            if self._staging is not None:
                steps.callback(self._staging.close)
            if self._ranks is not None:
                steps.callback(self._ranks.close)
            steps.callback(self._member.leave)
            if self._prefetch is not None:
                steps.callback(self._prefetch.join, self.options.stall_s)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        seat = f"replica={self.replica!r}, rank={self.rank}/{self.world_size}"
        return f"Subscriber({self.policy!r}, {seat}, version={self.version})"

    # ---- the replica

    @property
    def _parts(self) -> tuple[Staging, Ranks, Membership]:
        check_open(self._closed, f"Subscriber({self.policy!r})")
        assert self._staging is not None
        assert self._ranks is not None
        assert self._membership is not None
        return self._staging, self._ranks, self._membership

    def _reassert(self) -> None:
        membership = self._membership
        if self._closed or membership is None:
            return
        membership.reassert()
        if self.rank == 0 and self._record is not None:
            self._member.ask(self._acknowledgement("tainted" if self._taint else "installed", self._record.number))

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
    def _exclusive(self, patience: Patience) -> Iterator[None]:
        """One sync, stage, install or prefetch at a time; the caller's own hold is suspended. A prefetch that moves bytes is
        waited for as long as it makes progress, one that does not yet gives way. Busy at the end."""
        with self._holds.suspended():
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
                yield
            finally:
                self._current = outer
                self._busy.release()

    def _interrupt(self, reason: BaseException) -> None:
        current = self._current
        if current is not None:
            current.stop(reason)

    def _paused_error(self) -> Paused:
        return Paused(
            f"replica {self.replica!r} rank {self.rank} of policy {self.policy!r} is paused: call resume() when its engine is "
            "awake, then sync"
        )

    def _persist(self, attempt: Callable[[], T], exactly: int | None, patience: Patience) -> T:
        """Try again what may go well next time, until the end. An exact version that is gone does not come back."""
        nap = 0.01
        with self._exclusive(patience):
            while True:
                try:
                    return attempt()
                except _TRANSIENT as exc:
                    if patience.over or (exactly is not None and isinstance(exc, VersionGone)):
                        raise
                    log.warning("policy %s replica %s: trying again: %s", self.policy, self.replica, exc)
                    patience.nap(nap)
                    nap = min(nap * 2, 1.0)

    def _sync(self, least: int | None, exact: int | None, patience: Patience) -> SyncReport:
        def attempt() -> SyncReport:
            found = self._find_stage(least, exact)
            if found is not None:
                waited = time.monotonic() - patience.begun
                return found if isinstance(found, SyncReport) else self._install(found, patience, waited=waited)
            staged = self._stage(least, exact, patience)
            return staged if isinstance(staged, SyncReport) else self._install(staged, patience)

        return self._persist(attempt, exact, patience)

    def _stage_within(self, least: int | None, exact: int | None, patience: Patience) -> Staged | None:
        def attempt() -> Staged | SyncReport:
            open_stage = self._open_stage
            found = self._find_stage(least, exact) if open_stage is not None and open_stage.ahead else None
            if isinstance(found, Staged):
                found.ahead = False
            return found or self._stage(least, exact, patience)

        staged = self._persist(attempt, exact, patience)
        return None if isinstance(staged, SyncReport) else staged

    # ---- stage

    def _find_stage(self, least: int | None, exact: int | None) -> Staged | SyncReport | None:
        """The version that waits in the stage, where this call may take it; of another rank than 0 also the answer that
        rank 0's call has found nothing newer."""
        _, ranks, _ = self._parts
        if self.rank:
            told = ranks.take_nothing()
            if told is not None:
                return self._nothing_newer(told, 0.0)
        staged = self._open_stage
        if staged is None:
            return None
        if self.rank:
            usable = not ranks.superseded(staged.round)
        else:
            usable = exact in (None, staged.version) and staged.version >= (least or 0)
        if not usable or RankLayout.of(resolve(self._tensors)).hash != staged.cargo.layout:
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
        membership.follow(RankLayout.of(resolve(self._tensors)))
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
        self._held = ()
        patience.preparing = False
        try:
            cargo = staging.load(
                told, membership.seats, patience, lambda windows: ranks.tell_progress(told.round, windows)
            )
            patience.check()
        except BaseException as exc:
            self._refuse_round(told.round, record.number, exc)
            raise
        ranks.tell_progress(told.round, len(cargo.plan.window_bounds), whole=True)
        cargo.seconds = {"resolve": resolved, **cargo.seconds}
        self._open_stage = Staged(self, told, cargo)
        return self._open_stage

    # ---- prefetch

    def _poke(self) -> None:
        if self._prefetch is not None:
            self._prefetch.poke()

    def _idle(self) -> bool:
        return self._paused or self._closed or self._open_stage is not None

    def _await_news(self, patience: Patience) -> bool:
        """One long poll that takes neither the lock nor a lease; another rank than 0 waits for a round with a version."""
        _, ranks, _ = self._parts
        if self.rank:
            return ranks.await_offer(patience)
        if self._taint is not None:
            return True
        found: AnyResult = self._member.ask(self._resolve(None, None, patience.poll(), lease=False))
        return isinstance(found, Target)

    def _stage_ahead(self) -> bool:
        """Stage what was announced, under the lock. User code is not called: tensors are resolved by calls only."""
        _, ranks, _ = self._parts
        patience = self._patience(_AHEAD_S, stoppable=True)
        patience.preparing = True
        with self._exclusive(patience):
            if self._idle():
                return False
            begun = time.monotonic()
            self._meet(Patience(0.0) if self.rank == 0 else patience)
            told = self._fix_ahead(patience) if self.rank == 0 else ranks.take_part()
            if told is None or told.record is None:
                return False
            staged = self._load(told, told.record, time.monotonic() - begun, patience)
            staged.ahead = True
        if self.rank == 0 and ranks.await_parts(staged.round, patience):
            self._acknowledge("staged", staged.version)  # ends the lease: whoever publishes need not wait for us
        return True

    def _fix_ahead(self, patience: Patience) -> Round | None:
        found: AnyResult = self._member.ask(self._resolve(None, None, 0.0), until=patience.until)
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
            patience.check()
            wait = 0.0 if content else patience.poll()
            found: AnyResult = self._member.ask(self._resolve(at_least, exactly, wait), until=patience.until)
            if isinstance(found, Target):
                patience.check()
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

    # ---- install

    def _install(self, staged: Staged, patience: Patience, *, waited: float | None = None) -> SyncReport:
        """``waited``: the version was staged before this call, which waited so long for it."""
        with self._exclusive(patience):
            if staged.over:
                raise VersionAborted(
                    f"version {staged.version} is staged no more", version=staged.version, reason="discarded"
                )
            begun = time.monotonic()
            previous = self.version
            try:
                self._gather(staged, patience)
                met = time.monotonic()
                with self._holds.shut(patience):
                    shut = time.monotonic()
                    self._switch(staged, previous, patience)
                    done = time.monotonic()
            except BaseException as exc:
                if not staged.over:
                    self._end(staged)
                    self._refuse_round(staged.round, staged.version, exc)
                raise
            self._acknowledge("installed", staged.version)
            acked = time.monotonic()
            before = staged.cargo.seconds
            if waited is not None:
                before = {"ahead": sum(before.values()), "wait": waited}
            seconds = before | {
                "ranks": met - begun,
                "install": done - shut,
                "pause": done - shut,
                "ack": acked - done,
            }
            seconds["total"] = acked - begun + (sum(before.values()) if waited is None else waited)
            return self._report(staged.cargo, previous, seconds)

    def _gather(self, staged: Staged, patience: Patience) -> None:
        """Every rank has staged its part and was asked to install it: only now do holds shut anywhere."""
        _, ranks, _ = self._parts
        if self.world_size == 1:
            return
        decision = ranks.meet(patience) if self.rank == 0 else ranks.ready(staged.round, patience)
        if decision is not None:
            self._end(staged)
            self._raise_called_off(staged.version, decision.reason)

    def _switch(self, staged: Staged, previous: int | None, patience: Patience) -> None:
        """Holds are shut and drained: prepare, vote, decide, write. After the vote nothing waits but for the others."""
        cargo = staged.cargo
        work = self._installer.prepare(cargo.plan, cargo.landing.block, resolve(self._tensors))
        self._call_before(previous, staged.version, patience)
        try:
            patience.commit()
            decision = self._decide(staged, patience)
        except BaseException as exc:
            self._abandon(staged, exc)
            self._call_after(previous, previous)
            raise
        self._end(staged)
        if not decision.commit:
            self._call_after(previous, previous)
            self._raise_called_off(staged.version, decision.reason)
        fault = self._write(work, cargo.record, previous)
        self._conclude(staged, fault, patience.extended(self.options.lease_s))

    def _abandon(self, staged: Staged, exc: BaseException) -> None:
        """Interrupted between vote and decision: called off where that is still possible, else this rank is tainted."""
        _, ranks, _ = self._parts
        self._end(staged)
        if self.rank == 0:
            self._refuse_round(staged.round, staged.version, exc)
        if self.rank or ranks.committed:
            self._taint = self._taint or f"interrupted after the vote: {type(exc).__name__}"

    def _decide(self, staged: Staged, patience: Patience) -> Decision:
        _, ranks, _ = self._parts
        vote = Vote(round=staged.round, rank=self.rank, agree=True)
        if self.rank == 0:
            return ranks.collect_votes(vote, patience)
        found = ranks.vote(vote, patience.extended(patience.left + self.options.stall_s))
        if found is None:
            self._taint = "rank 0 did not tell its decision"
            raise Tainted(
                f"rank {self.rank} of replica {self.replica!r} voted for version {staged.version} and could not learn "
                "the decision; sync again to heal",
                reason=self._taint,
            )
        return found

    def _write(self, work: Work, record: VersionRecord, previous: int | None) -> BaseException | None:
        try:
            work.run()
            self._record = record
            self._call_after(previous, record.number)
        except BaseException as exc:  # noqa: BLE001 - the others must learn of it before it is raised
            return exc
        return None

    def _conclude(self, staged: Staged, fault: BaseException | None, patience: Patience) -> None:
        """All ranks have installed, or the replica is tainted on all of them."""
        _, ranks, _ = self._parts
        reason = "" if fault is None else f"{type(fault).__name__}: {fault}"[:1024]
        self._taint = self._taint or "interrupted before all ranks had answered"
        mine = Installed(
            round=staged.round, rank=self.rank, agree=fault is None, reason=reason, source=staged.cargo.source
        )
        told = ranks.collect_installs(mine, patience) if self.rank == 0 else ranks.report_install(mine, patience)
        if told is not None and told.agree and fault is None:
            self._taint, self._void = None, False
            self._held = ranks.stage_sources() if self.rank == 0 else ()
            return
        self._taint = reason or (told.reason if told is not None else "rank 0 did not say how the round ended")
        self._acknowledge("tainted", staged.version, self._taint)
        if fault is not None and not isinstance(fault, Exception):
            raise fault  # Ctrl-C and exit are not ours to rename
        raise Tainted(
            f"version {staged.version} of {self.policy!r} may be mixed on replica {self.replica!r}: {self._taint}; "
            "sync again to heal",
            reason=self._taint,
        ) from fault

    def _raise_called_off(self, version: int, reason: str) -> None:
        """A round that may go well next time is VersionAborted, which ``sync`` tries again; anything else is final."""
        text = f"version {version} was not installed on replica {self.replica!r}: {reason}"
        kinds: tuple[type[MxRLError], ...] = (*_TRANSIENT, StaleIncarnation)
        transient = [kind.__name__ for kind in kinds]
        if self.rank == 0 and not any(name in reason for name in transient):
            self._acknowledge("failed", version, reason)
            raise IncompleteVersion(text, version=version, missing=[])
        raise VersionAborted(text, version=version, reason=reason)

    def _refuse_round(self, number: int, version: int, exc: BaseException) -> None:
        """This rank cannot install: the round ends with nothing changed anywhere."""
        _, ranks, _ = self._parts
        reason = f"{type(exc).__name__}: {exc}"[:1024]
        if self.rank:
            ranks.refuse(Vote(round=number, rank=self.rank, agree=False, reason=reason))
            return
        ranks.call_off(reason)
        if not isinstance(exc, (*_TRANSIENT, Cancelled, Busy, Closed)):  # told to stop is not failed
            self._acknowledge("failed", version, reason)

    def _discard(self, staged: Staged, reason: str) -> None:
        if not self._busy.acquire(timeout=self.options.lease_s):
            raise Busy(f"another sync or install of policy {self.policy!r} is under way in this process: try again")
        try:
            if not staged.over:
                self._end(staged)
                text = VersionAborted(reason, version=staged.version, reason=reason)
                self._refuse_round(staged.round, staged.version, text)
        finally:
            self._busy.release()

    def _end(self, staged: Staged) -> None:
        staged.over = True
        if self._open_stage is staged:
            self._open_stage = None
        self._poke()
