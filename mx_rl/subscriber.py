"""The rollout rank's end.

sync:  resolve (which version, from whom) -> plan (cached) -> move (transport) -> verify -> install -> acknowledge
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from types import TracebackType

from mx_rl.borrow import Borrowing
from mx_rl.config import Options
from mx_rl.endpoint import Endpoint, Member, check_open, check_policy, close_at_exit, unique_name
from mx_rl.errors import Closed, InvalidArgument
from mx_rl.holds import owner
from mx_rl.intake import Intake
from mx_rl.membership import Membership
from mx_rl.patience import Cancelled, Patience
from mx_rl.prefetch import Prefetch
from mx_rl.ranks import Ranks
from mx_rl.registry import Registry
from mx_rl.reports import MemoryReport, SyncReport
from mx_rl.staged import Staged
from mx_rl.staging import Staging
from mx_rl.streaming import Given, Streams
from mx_rl.target import Number, check_arguments, check_modes, number_of
from mx_rl.tensors import Tensors
from mx_rl.twins import run


class Subscriber(Intake):
    """Installs versions of ``policy`` into this rank's ``tensors`` (a mapping, a module, or a callable).

    The ranks of one ``replica`` (named where ``world_size`` > 1) switch versions together or not at all; each calls
    ``sync``, and rank 0's call fixes the target. ``sources``: whom to read from, in this order. ``strict``: names that
    the publisher has and no rank of the replica takes are an error. ``allow_missing``: patterns of names that the
    publisher may lack. ``verify``: what arrived is proved by sums that the publisher made, before it is installed; without
    it windows are still confirmed against their source's header.
    ``prefetch``: a thread stages each version as soon as it is announced, so that ``sync`` is the install alone; a version
    that waits is not overtaken by a newer one unless a call asks for it.
    ``stage``: where a version waits for its install, "device" or "host" (in this release both are host memory), or
    "none": it is moved straight into the live weights once all ranks have voted, and what fails then leaves the replica
    tainted until the next ``sync``. ``serve``: what peers read between installs, the "stage" with the version installed
    last, the "live" weights, or "off". ``swap=True``: installs point the module's tensors at the memory just filled rather
    than copy; only for modules whose storage may move (docs/memory.md).
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
        swap: bool = False,
        before_install: Callable[[int | None, int], None] | None = None,
        after_install: Callable[[int | None, int | None], None] | None = None,
        options: Options | None = None,
    ) -> None:
        check_policy(policy)
        check_arguments(replica, rank, world_size, sources)
        check_modes(stage, serve, swap, prefetch)
        super().__init__(policy, tensors, rank, world_size, options or Options(), before_install, after_install)
        self.incarnation = unique_name(f"{policy}-r{rank}")
        self.replica = replica or self.incarnation
        self._endpoint = Endpoint.acquire(registry, self.options)
        self._member = Member(self._endpoint, policy, self.incarnation, self._reassert)
        self._leaving: ExitStack | None = None
        try:
            self._staging = Staging(
                self._member,
                rank,
                tensors,
                sources=sources,
                stage=stage,
                serve=serve,
                swap=swap,
                strict=strict,
                allow_missing=allow_missing,
                verify=verify,
            )
            self._streams = Streams(
                Borrowing(self._member, self._staging, rank),
                only=self._staging.only_streams,
                all_names=tensors is None,
                alone=world_size == 1,
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

    def stream(
        self, at_least: Number = None, *, timeout: float = 60.0, copy: bool = False
    ) -> Generator[tuple[str, Given], None, None]:
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
        return self._stream(number_of(at_least), lambda: self._patience(timeout, stoppable=True), copy)

    def _stream(
        self, least: int | None, patience_of: Callable[[], Patience], copy: bool
    ) -> Generator[tuple[str, Given], None, None]:
        staging, _, _ = self._parts
        if not staging.streams:
            raise InvalidArgument(
                'stream() takes tensors out of a stage: give stage="device" or "host", serve="stage" or "off", and no swap'
            )
        assert self._streams is not None
        return self._streams.draw(
            patience_of, self._exclusive, lambda patience: self._sync(least, None, patience), copy=copy
        )

    async def async_stream(
        self, at_least: Number = None, *, timeout: float = 60.0, copy: bool = False
    ) -> AsyncIterator[tuple[str, Given]]:
        """``stream`` for a task: other tasks run on while it waits. Cancelled, it is a loop that was left."""
        patience, who = self._patience(timeout, stoppable=True), owner()
        items = self._stream(number_of(at_least), lambda: patience, copy)
        streams = self._streams
        assert streams is not None

        def stop() -> None:  # on the event loop: nothing is waited for
            patience.stop(Cancelled())
            streams.tell(who)

        def drop(item: object) -> None:
            """Nobody draws the next one: the loop over the stream is left, and with it this item."""

        try:
            while (item := await run(lambda: next(items, None), stop=stop, drop=drop)) is not None:
                yield item
                del item
        finally:
            await run(items.close)

    @property
    def last_report(self) -> SyncReport | None:
        """What the last ``stream`` whose loop ended did."""
        return self._streams.last_report if self._streams is not None else None

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
            who = await run(
                lambda: self._holds.enter(patience), stop=lambda: patience.stop(Cancelled()), drop=self._holds.leave
            )
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
        with self._between_calls(timeout):
            staging, _, _ = self._parts
            staging.close_reading()
            self._withdraw(staging)

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
        kept = self._paused and weights_kept and self._record is not None and self._taint is None
        self._paused = False
        if kept and self.world_size == 1:  # the other ranks' memory may have been given up: their next install tells
            staging, _, _ = self._parts
            source = staging.reopen()
            if source is not None and self._record is not None:
                self._held = (source,)
                self._acknowledge("installed", self._record.number)
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
        return sum(part.registered_bytes for part in (self._staging, self._streams) if part is not None)

    @property
    def memory(self) -> MemoryReport:
        """What this rank's weights and stages take now, and what an install swaps and copies."""
        return self._staging.memory if self._staging is not None else MemoryReport()

    def release_live(self, *, timeout: float = 60.0) -> None:
        """Call before the engine frees or moves the storage of the live weights (offload, sleep), paused or not: peers stop
        reading it and it is de-registered. The next install registers the weights anew, where they lie then. With
        ``serve="stage"`` there is nothing to release.

        Busy where an install takes longer than ``timeout`` seconds to end; PeerLost where bytes of a move that was given up
        may still come in.
        """
        with self._between_calls(timeout):
            staging, _, _ = self._parts
            staging.release_live()
            self._withdraw(staging)

    def close(self) -> None:
        """Leave, and give everything back. Idempotent; one that was interrupted is gone on with by the next."""
        self._closed = True
        if self._leaving is None:
            self._leaving = self._steps()
        self._leaving.close()

    def _steps(self) -> ExitStack:
        """What a close does. The last is run first; each is run whatever became of those before, a Ctrl-C too."""
        steps = ExitStack()
        steps.callback(self._forget)
        steps.callback(self._endpoint.release)
        if self._staging is not None:
            steps.callback(self._staging.close)
        if self._streams is not None:
            steps.callback(self._streams.close)
        if self._ranks is not None:
            steps.callback(self._ranks.close)
        if self._prefetch is not None:
            steps.callback(self._prefetch.join, self.options.stall_s)
        steps.callback(self._member.leave)  # answers a poll for news, too
        steps.callback(self._await_idle)
        if self._prefetch is not None:
            steps.callback(self._prefetch.stop)
        if self._streams is not None:
            steps.callback(self._streams.leave)
        steps.callback(self._interrupt, Closed(f"Subscriber({self.policy!r}) was closed"))
        return steps

    def _await_idle(self) -> None:
        """A sync in another thread sees that it is over; one that comes now finds this closed."""
        if self._busy.acquire(timeout=self.options.stall_s):
            self._busy.release()

    def _forget(self) -> None:
        """The arenas go now, also where the caller keeps this object; a sync in another thread keeps its own to its end."""
        self._staging = self._membership = self._open_stage = None

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
