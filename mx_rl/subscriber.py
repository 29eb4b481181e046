"""The rollout rank's end.

sync:  resolve (which version, from whom) -> plan (cached) -> move (transport) -> verify -> install -> acknowledge
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from types import TracebackType

from mx_rl.config import Options
from mx_rl.endpoint import Endpoint, Member, check_open, check_policy, close_at_exit, unique_name
from mx_rl.errors import Busy, Closed
from mx_rl.install import Installer
from mx_rl.intake import Intake
from mx_rl.layout import RankLayout
from mx_rl.membership import Membership
from mx_rl.patience import Cancelled
from mx_rl.prefetch import Prefetch
from mx_rl.ranks import Ranks
from mx_rl.registry import Registry
from mx_rl.reports import SyncReport
from mx_rl.staged import Staged
from mx_rl.staging import Staging
from mx_rl.target import Number, check_arguments, number_of
from mx_rl.tensors import Tensors, resolve
from mx_rl.twins import run


class Subscriber(Intake):
    """Installs versions of ``policy`` into this rank's ``tensors`` (a mapping, a module, or a callable).

    The ranks of one ``replica`` (named where ``world_size`` > 1) switch versions together or not at all; each calls
    ``sync``, and rank 0's call fixes the target. ``sources``: whom to read from, in this order. ``strict``: names that
    the publisher has and no rank of the replica takes are an error. ``allow_missing``: patterns of names that the
    publisher may lack. ``verify`` is for digests, which this release has none of: windows are confirmed whatever it says.
    ``prefetch``: a thread stages each version as soon as it is announced, so that ``sync`` is the install alone; a version
    that waits is not overtaken by a newer one unless a call asks for it. ``serve``: "stage" lets peers read the version
    installed last from the stage, "off" does not.
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
        super().__init__(policy, tensors, rank, world_size, options or Options(), before_install, after_install)
        self._installer = Installer()
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
            if self._prefetch is not None:
                steps.callback(self._prefetch.join, self.options.stall_s)
            steps.callback(self._member.leave)  # answers a poll for news, too

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
    def _reassert(self) -> None:
        membership = self._membership
        if self._closed or membership is None:
            return
        membership.reassert()
        if self.rank == 0 and self._record is not None:
            self._member.ask(self._acknowledgement("tainted" if self._taint else "installed", self._record.number))
