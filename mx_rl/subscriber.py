"""The rollout rank's end.

sync:  resolve (which version, from whom) -> plan (cached) -> move (transport) -> verify -> install -> acknowledge
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TypeVar

from mx_rl.borrow import Borrowing, Loan
from mx_rl.config import Options
from mx_rl.endpoint import Endpoint, Member, check_open, check_policy, close_at_exit, unique_name
from mx_rl.errors import (
    Busy,
    CorruptRecord,
    IncompleteVersion,
    InvalidArgument,
    MxRLError,
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
from mx_rl.ranks import Ranks
from mx_rl.records import (
    Ack,
    AnyResult,
    Installed,
    Nothing,
    Resolve,
    Round,
    Source,
    Stage,
    Target,
    VersionRecord,
    Vote,
)
from mx_rl.registry import Registry
from mx_rl.reports import SyncReport
from mx_rl.staging import Cargo, Staging
from mx_rl.streaming import Given, Pour, Streams
from mx_rl.target import Number, check_arguments, not_ready, number_of
from mx_rl.tensors import Shard, Tensors, all_meta, resolve, shards

log = logging.getLogger("mx_rl")

T = TypeVar("T")

_POLL_S = 10.0
_TRANSIENT = (VersionGone, PeerLost, RegistryLost, VersionAborted)


class Staged:
    """A version that waits in the stage. ``install()`` switches to it, ``discard()`` gives it up; either ends the
    round."""

    def __init__(self, subscriber: Subscriber, told: Round, cargo: Cargo) -> None:
        self.version = cargo.record.number
        self.round = told.round
        self.cargo = cargo
        self.over = False
        self._subscriber = subscriber

    def install(self, *, timeout: float = 60.0) -> SyncReport:
        """Switch to this version, all ranks of the replica or none. Waits for open holds and the other ranks' votes.

        After ``timeout`` the old version runs on (HoldTimeout, IncompleteVersion). Tainted where live weights may be
        mixed.
        """
        return self._subscriber._install(self, time.monotonic() + timeout)

    def discard(self) -> None:
        """Give the version up on all ranks. Idempotent."""
        self._subscriber._discard(self, "discarded")


class Subscriber:
    """Installs versions of ``policy`` into this rank's ``tensors`` (a mapping, a module, or a callable).

    The ranks of one ``replica`` (named where ``world_size`` > 1) switch versions together or not at all; each calls
    ``sync``, and rank 0's call fixes the target. ``sources``: whom to read from, in this order. ``strict``: names that
    the publisher has and no rank of the replica takes are an error. ``allow_missing``: patterns of names that the
    publisher
    may lack. ``verify`` is for digests, which this release has none of: windows are confirmed whatever it says.
    ``serve``: "stage" lets peers read the version installed last from the stage, "off" does not.
    ``before_install(old, new)`` and ``after_install(old, new)`` get version numbers and run with holds shut; after a
    round that was called off ``after_install(old, old)`` is called, so that what was stopped is started again; ``old`` is
    None before the first version.

    For ``stream`` alone ``tensors`` may be on the meta device, or None: every tensor of the publisher, whole.

    The destination's dtype must be the wire's. Raises InvalidArgument, TensorUnavailable; SeatTaken where another
    living process has this (replica, rank).
    """

    def __init__(
        self,
        policy: str,
        tensors: Tensors | None,
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
        check_arguments(replica, rank, world_size, sources, stage, serve, prefetch)
        self.policy = policy
        self.rank = rank
        self.world_size = world_size
        self.options = options or Options()
        self._tensors = tensors
        self._before_install = before_install
        self._after_install = after_install
        self._busy = threading.RLock()
        self._holds = Holds()
        self._closed = False
        self._record: VersionRecord | None = None
        self._taint: str | None = None
        self._held: tuple[Source, ...] = ()
        self._open_stage: Staged | None = None
        self._installer = Installer()
        self._staging: Staging | None = None
        self._ranks: Ranks | None = None
        self._membership: Membership | None = None
        self._streams: Streams | None = None
        only_streams = tensors is None or all_meta(tensors)
        layout = self._layout(streaming=only_streams)
        self.incarnation = unique_name(f"{policy}-r{rank}")
        self.replica = replica or self.incarnation
        self._endpoint = Endpoint.acquire(registry, self.options)
        self._member = Member(self._endpoint, policy, self.incarnation, self._reassert)
        try:
            self._staging = Staging(
                self._member,
                rank,
                layout,
                roomy=not only_streams,
                sources=sources,
                serve=serve == "stage",
                strict=strict,
                allow_missing=allow_missing,
            )
            self._streams = Streams(
                Borrowing(self._member, self._staging, rank),
                only=only_streams,
                all_names=tensors is None,
                patience_s=self.options.stall_s if world_size == 1 else 0.0,
            )
            self._ranks = Ranks(self._endpoint, policy, self.replica, rank, world_size)
            self._membership = Membership(
                self._member, self._staging, self._ranks, self.replica, named=replica is not None
            )
        except BaseException:
            self.close()
            raise
        close_at_exit(self)

    # ---- what users call

    def sync(self, at_least: Number = None, exactly: Number = None, *, timeout: float = 60.0) -> SyncReport:
        """Install the newest READY version (``at_least`` n, or ``exactly`` n) and return a SyncReport.

        Waits for the first version ever, or for ``at_least``; returns at once with kind "none" where nothing newer is
        there. A read that raced or whose source died is retried on what is newest then. After ``timeout`` seconds the
        old
        version runs on: NotReady (who has not committed), IncompleteVersion (which rank of the replica is missing),
        PeerLost, VersionGone, HoldTimeout. Also LayoutMismatch and its kinds, before a byte moves; StaleVersion;
        Tainted where live weights may be mixed, which the next sync heals.
        """
        deadline = time.monotonic() + timeout

        least, exact = number_of(at_least), number_of(exactly)

        def attempt() -> SyncReport:
            staged = self._stage(least, exact, deadline)
            return staged if isinstance(staged, SyncReport) else self._install(staged, deadline)

        return self._persist(attempt, exact, deadline)

    def stage(self, at_least: Number = None, exactly: Number = None, *, timeout: float = 60.0) -> Staged | None:
        """Bring the newest version into the stage without installing it; None where nothing newer is there.

        Errors as for ``sync``. One version at a time: a staged one is discarded by the next ``stage``.
        """
        deadline = time.monotonic() + timeout
        least, exact = number_of(at_least), number_of(exactly)
        staged = self._persist(lambda: self._stage(least, exact, deadline), exact, deadline)
        return None if isinstance(staged, SyncReport) else staged

    def stream(
        self, at_least: Number = None, *, timeout: float = 60.0, copy: bool = False
    ) -> Iterator[tuple[str, Given]]:
        """Yield (name, tensor) of the newest READY version, for engines that load by name; ``last_report`` tells of it.

        Names are this subscriber's, in natural order, or all of the publisher's where it was made with None; a name with
        several boxes gives a tuple. Nothing is yielded before the version is whole and all ranks of the replica agreed to
        install it, and nothing at all where nothing newer is there. A tensor is valid until the next is drawn, and is not to
        be written to; ``copy=True`` gives tensors of the caller's own. Holds are shut while the loop runs. The version counts
        as installed when the loop has ended on every rank; one that is left early leaves the replica tainted, and the next
        ``stream`` or ``sync`` gives everything again.

        The first draw waits and raises as ``sync`` does; ``timeout`` does not count the loop's own time. The hooks run on the
        stream's own thread.
        """
        check_open(self._closed, f"Subscriber({self.policy!r})")
        assert self._streams is not None
        least = number_of(at_least)
        return self._streams.draw(
            lambda: self.sync(least, timeout=timeout),
            lambda: self._exclusive(time.monotonic() + timeout),
            copy=copy,
        )

    @property
    def last_report(self) -> SyncReport | None:
        """What the last ``stream`` whose loop ended did."""
        return self._streams.last_report if self._streams is not None else None

    @contextmanager
    def hold(self, *, timeout: float = 60.0) -> Iterator[int | None]:
        """No install while the body runs; gives the version that it computes with. HoldTimeout where an install takes
        longer than ``timeout``. A ``sync`` inside the body counts as this thread's safe point."""
        self._holds.enter(timeout=timeout)
        try:
            yield self.version
        finally:
            self._holds.leave()

    @property
    def version(self) -> int | None:
        """Number of the version that the live weights are, or None before the first."""
        return self._record.number if self._record is not None else None

    @property
    def ready(self) -> bool:
        """A whole version is installed: whoever routes work may send it here."""
        return self._record is not None and self._taint is None and not self._closed

    def latest(self) -> int | None:
        """Number of the newest READY version, or None. Raises RegistryLost."""
        check_open(self._closed, f"Subscriber({self.policy!r})")
        self._member.beat_now()
        return self._member.floor or None

    @property
    def registered_bytes(self) -> int:
        """Registered host memory of this rank: stages, their headers and page padding."""
        return sum(part.registered_bytes for part in (self._staging, self._streams) if part is not None)

    def close(self) -> None:
        """Leave, and give everything back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._streams is not None:
            self._streams.leave()
        idle = self._busy.acquire(timeout=self.options.stall_s)  # a sync in another thread sees that it is over
        with ExitStack() as steps:  # the last is run first; each is run whatever became of those before
            if idle:
                steps.callback(self._busy.release)
            steps.callback(self._endpoint.release)
            if self._staging is not None:
                steps.callback(self._staging.close)
            if self._streams is not None:
                steps.callback(self._streams.close)
            if self._ranks is not None:
                steps.callback(self._ranks.close)
            steps.callback(self._member.leave)

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

    # ---- stage

    def _layout(self, *, streaming: bool) -> RankLayout | None:
        """Of the tensors as they are now; None for the publisher's names. A stream needs no memory behind them."""
        if self._tensors is None and streaming:
            return None
        found = shards(self._tensors) if streaming and self._tensors is not None else self._resolve_live()
        return RankLayout.of({name: box if isinstance(box, tuple) else (box,) for name, box in found.items()})

    def _persist(self, attempt: Callable[[], T], exactly: int | None, deadline: float) -> T:
        """Try again what may go well next time, until the deadline. An exact version that is gone does not come
        back."""
        nap = 0.01
        with self._exclusive(deadline):
            while True:
                try:
                    return attempt()
                except _TRANSIENT as exc:
                    if time.monotonic() >= deadline or (exactly is not None and isinstance(exc, VersionGone)):
                        raise
                    log.warning("policy %s replica %s: trying again: %s", self.policy, self.replica, exc)
                    time.sleep(max(min(nap, deadline - time.monotonic()), 0))
                    nap = min(nap * 2, 1.0)

    def _stage(self, at_least: int | None, exactly: int | None, deadline: float) -> Staged | SyncReport:
        staging, ranks, membership = self._parts
        if self._open_stage is not None:
            self._discard(self._open_stage, "another stage began")
        begun = time.monotonic()
        membership.follow(self._layout(streaming=self._streams is not None and self._streams.giving))
        if membership.meet(deadline):
            self._taint = self._taint or "a rank of the replica was replaced, or runs another version"
        told = self._fix_target(at_least, exactly, deadline) if self.rank == 0 else ranks.next_round(deadline)
        resolved = time.monotonic() - begun
        if told.record is None:
            return self._nothing_newer(told, resolved)
        self._held = ()
        try:
            streams = self._streams
            load = streams.load if streams is not None and streams.only else staging.load
            cargo = load(told, membership.seats, deadline)
        except BaseException as exc:
            self._refuse_round(told.round, told.record.number, exc)
            raise
        cargo.seconds = {"resolve": resolved, **cargo.seconds}
        self._open_stage = Staged(self, told, cargo)
        return self._open_stage

    def _fix_target(self, at_least: int | None, exactly: int | None, deadline: float) -> Round:
        """Rank 0: which version, from whom. Waits for one that satisfies the call."""
        staging, ranks, _ = self._parts
        record = self._record
        mine = record.number if record is not None else None
        running = record.identity if record is not None else None
        whole = mine is not None and self._taint is None
        content = whole and (mine or 0) >= (at_least or 0) and exactly in (None, mine)
        while True:
            left = deadline - time.monotonic()
            found: AnyResult = self._member.ask(
                Resolve(
                    policy=self.policy,
                    replica=self.replica,
                    incarnation=self.incarnation,
                    installed=record.identity if record is not None else None,
                    at_least=at_least,
                    exactly=exactly,
                    force=self._taint is not None,
                    dead=tuple(staging.dead),
                    lost=staging.lost,
                    read_s=staging.read_s,
                    wait=0.0 if content else max(min(left, _POLL_S), 0.0),
                )
            )
            staging.dead.clear()
            if isinstance(found, Target):
                return self._offer(found, whole, exactly)
            if not isinstance(found, Nothing):
                raise CorruptRecord(f"the registry answered Resolve with {type(found).__name__}: releases differ")
            if content:
                return ranks.open_round(lambda number: Round(round=number, record=None, installed=running))
            if time.monotonic() >= deadline:
                raise not_ready(self.policy, found, at_least, exactly)

    def _offer(self, found: Target, whole: bool, exactly: int | None) -> Round:
        _, ranks, _ = self._parts
        offered, mine = found.record.number, self.version
        if whole and mine is not None and offered < mine and exactly is None:
            raise StaleVersion(
                f"policy {self.policy!r}: version {offered} was offered and {mine} is installed: it never goes down",
                installed=mine,
                offered=offered,
            )
        return ranks.open_round(
            lambda number: Round(
                round=number, record=found.record, trainer=found.trainer, holders=found.holders, full=not whole
            )
        )

    def _nothing_newer(self, told: Round, resolved: float) -> SyncReport:
        _, ranks, _ = self._parts
        record = self._record
        if record is None or record.identity != told.installed:
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

    @contextmanager
    def _exclusive(self, deadline: float) -> Iterator[None]:
        """One sync, stage or install at a time; the caller's own hold is suspended. Busy where the other takes longer."""
        if self._streams is not None:
            self._streams.leave_own()
        with self._holds.suspended():
            if not self._busy.acquire(timeout=max(deadline - time.monotonic(), 0)):
                raise Busy(f"another sync or install of policy {self.policy!r} is under way in this process: try again")
            try:
                yield
            finally:
                self._busy.release()

    def _install(self, staged: Staged, deadline: float) -> SyncReport:
        with self._exclusive(deadline):
            check_open(self._closed, f"Subscriber({self.policy!r})")
            if staged.over:
                raise VersionAborted(
                    f"version {staged.version} is staged no more", version=staged.version, reason="discarded"
                )
            begun = time.monotonic()
            previous = self.version
            try:
                with self._holds.shut(deadline=deadline):
                    shut = time.monotonic()
                    self._switch(staged, previous, deadline)
                    done = time.monotonic()
            except BaseException as exc:
                if not staged.over:
                    self._end(staged)
                    self._refuse_round(staged.round, staged.version, exc)
                raise
            self._acknowledge("installed", staged.version)
            acked = time.monotonic()
            seconds = staged.cargo.seconds | {"install": done - shut, "pause": done - shut, "ack": acked - done}
            seconds["total"] = sum(staged.cargo.seconds.values()) + acked - begun
            return self._report(staged.cargo, previous, seconds)

    def _switch(self, staged: Staged, previous: int | None, deadline: float) -> None:
        """Holds are shut and drained: prepare, vote, decide, write. After the vote nothing waits but for the others."""
        cargo = staged.cargo
        work = self._work(cargo)
        self._call_before(previous, staged.version, deadline)
        try:
            commit, reason = self._decide(staged, deadline)
        except BaseException as exc:
            self._abandon(staged, exc)
            self._call_after(previous, previous)
            raise
        self._end(staged)
        if not commit:
            self._call_after(previous, previous)
            self._raise_called_off(staged.version, reason)
        if isinstance(work, Pour):
            self._taint = self._taint or "the loop over a stream is not at its end"
        fault = self._write(work, cargo.record, previous)
        # The loops of other ranks may take as long as this one's did.
        loop_s = sum(work.spent_s) if isinstance(work, Pour) else 0.0
        self._conclude(staged, fault, max(deadline, time.monotonic() + self.options.lease_s + loop_s))

    def _work(self, cargo: Cargo) -> Work:
        """Everything that can be refused is refused here."""
        _, ranks, _ = self._parts
        streams = self._streams
        if streams is None or not streams.giving:
            return self._installer.prepare(cargo.plan, cargo.landing.block, self._resolve_live())
        if not isinstance(cargo, Loan):  # a lender's layout is ours, and it looks itself
            self._installer.check_aliases(cargo.plan, cargo.landing.block)
        return streams.work(cargo, lambda: ranks.stages)

    def _resolve_live(self) -> dict[str, tuple[Shard, ...]]:
        if self._tensors is None:
            raise InvalidArgument(f"Subscriber({self.policy!r}, None) has nothing to install into: use stream()")
        return resolve(self._tensors)

    def _abandon(self, staged: Staged, exc: BaseException) -> None:
        """Interrupted between vote and decision: called off where that is still possible, else this rank is tainted."""
        _, ranks, _ = self._parts
        self._end(staged)
        if self.rank == 0:
            self._refuse_round(staged.round, staged.version, exc)
        if self.rank or ranks.committed:
            self._taint = self._taint or f"interrupted after the vote: {type(exc).__name__}"

    def _decide(self, staged: Staged, deadline: float) -> tuple[bool, str]:
        _, ranks, _ = self._parts
        cargo = staged.cargo
        stage = Stage(layout=cargo.plan.target_hash, source=cargo.source) if cargo.source is not None else None
        vote = Vote(round=staged.round, rank=self.rank, agree=True, stage=stage)
        if self.rank == 0:
            decision = ranks.collect_votes(vote, deadline)
            return decision.commit, decision.reason
        found = ranks.vote(vote, deadline + self.options.stall_s)
        if found is None:
            self._taint = "rank 0 did not tell its decision"
            raise Tainted(
                f"rank {self.rank} of replica {self.replica!r} voted for version {staged.version} and could not learn "
                "the decision; sync again to heal",
                reason=self._taint,
            )
        return found.commit, found.reason

    def _write(self, work: Work, record: VersionRecord, previous: int | None) -> BaseException | None:
        try:
            work.run()
            self._record = record
            self._call_after(previous, record.number)
        except BaseException as exc:  # noqa: BLE001 - the others must learn of it before it is raised
            return exc
        return None

    def _conclude(self, staged: Staged, fault: BaseException | None, deadline: float) -> None:
        """All ranks have installed, or the replica is tainted on all of them."""
        _, ranks, _ = self._parts
        reason = "" if fault is None else f"{type(fault).__name__}: {fault}"[:1024]
        self._taint = self._taint or "interrupted before all ranks had answered"
        mine = Installed(
            round=staged.round, rank=self.rank, agree=fault is None, reason=reason, source=staged.cargo.source
        )
        told = ranks.collect_installs(mine, deadline) if self.rank == 0 else ranks.report_install(mine, deadline)
        if told is not None and told.agree and fault is None:
            self._taint = None
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
        if not isinstance(exc, _TRANSIENT):
            self._acknowledge("failed", version, reason)

    def _discard(self, staged: Staged, reason: str) -> None:
        with self._exclusive(time.monotonic() + self.options.lease_s):
            if not staged.over:
                self._end(staged)
                text = VersionAborted(reason, version=staged.version, reason=reason)
                self._refuse_round(staged.round, staged.version, text)

    def _end(self, staged: Staged) -> None:
        staged.over = True
        if self._open_stage is staged:
            self._open_stage = None

    # ---- hooks and reports

    def _call_before(self, previous: int | None, version: int, deadline: float) -> None:
        nap = 0.01
        while self._before_install is not None:
            try:
                self._before_install(previous, version)
                return
            except Busy:
                if time.monotonic() + nap > deadline:
                    raise
                time.sleep(nap)
                nap = min(nap * 2, 0.5)

    def _call_after(self, previous: int | None, version: int | None) -> None:
        if self._after_install is not None:
            self._after_install(previous, version)

    def _acknowledgement(self, state: str, number: int, reason: str = "") -> Ack:
        return Ack(
            policy=self.policy,
            replica=self.replica,
            incarnation=self.incarnation,
            record=self._record,
            state=state,
            number=number,
            reason=reason[:4096],
            held=self._held if state == "installed" else (),
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
        )
