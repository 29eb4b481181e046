"""The trainer rank's end.

publish:  resolve tensors -> snapshot (into a ring slot) -> commit (registry) -> wake -> retire what nobody holds
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

from mx_rl.addresses import memory_of
from mx_rl.claim import Claimant, name_ranks
from mx_rl.commits import Commits
from mx_rl.config import Options
from mx_rl.endpoint import Endpoint, Member, check_open, check_policy, close_at_exit, seat_key, unique_name
from mx_rl.errors import IncompleteVersion, InvalidArgument, RegistryLost
from mx_rl.feed import Feed, Pairs, Stream, drawing, on_loop
from mx_rl.in_place import InPlace, Mutations
from mx_rl.layout import RankLayout
from mx_rl.partners import Known, Snapshot
from mx_rl.records import AwaitFree, AwaitInstalled, Commit, Free, Installs, Seat, Source, encode
from mx_rl.registry import Registry
from mx_rl.reports import MemoryReport, Receipt, Version
from mx_rl.ring import Ring, Slot, Slots
from mx_rl.seat import find_seat
from mx_rl.tensors import Shard, Tensors, only_declared, resolve, shards
from mx_rl.twins import run

log = logging.getLogger("mx_rl")

MAX_METADATA_BYTES = 64 << 10


class Publisher:
    """Publishes versions of ``policy`` from this rank's ``tensors`` (a mapping, a module, or a callable).

    For ``publish(stream=)`` alone ``tensors`` are meta tensors of the full shapes, or None: then the first stream tells.

    ``rank``, ``world_size`` and ``world`` are read from torch.distributed or torchrun where there is one; else a single
    rank is a world of its own. ``slots`` versions are kept in registered memory (two or more); with 0 the live tensors are
    published in place, without a copy or a cast, and ``mutating`` goes around every change of them. ``wire_dtype`` is a
    dtype or ``{pattern: dtype}``. ``start_after=n`` makes the first version of this world larger than n. Of boxes that
    several ranks hold two keep a copy each, which must be equal (ReplicaMismatch).

    Live at once; ``close`` is idempotent. Raises InvalidArgument, TensorUnavailable, LayoutMismatch; SeatTaken where
    another living process has this seat.
    """

    def __init__(
        self,
        policy: str,
        tensors: Tensors | None,
        *,
        registry: Registry | str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        world: str | None = None,
        slots: int = 2,
        wire_dtype: Any = None,
        device: str | None = None,
        start_after: int | None = None,
        options: Options | None = None,
    ) -> None:
        check_policy(policy)
        if slots < 0 or slots == 1:
            raise InvalidArgument(
                f"slots={slots}: at least 2, so that the newest READY version is never overwritten, or 0 to publish the live "
                "tensors in place"
            )
        if slots == 0 and wire_dtype is not None:
            raise InvalidArgument(
                "wire_dtype with slots=0: live tensors are published as they are; give slots=2 to cast"
            )
        if device not in (None, "cpu"):
            raise InvalidArgument(f"device={device!r}: this release keeps the ring in host memory (None or 'cpu')")
        self.policy = policy
        self.seat = find_seat(rank, world_size, world)
        self.options = options or Options()
        self._tensors = tensors
        self._wire_dtype = wire_dtype
        self._slots = slots
        self._publishing = threading.Lock()
        self._closed = False
        self._leaving: ExitStack | None = None
        self._k = 0
        self._counted = 0  # the epoch that k counts in
        self._uncounted: list[str] = []  # calls that raised before the epoch was open
        self._retired: list[Slots] = []
        self._ring: Slots | None = None
        self._mutations: Mutations | None = None
        given = None if tensors is None else shards(tensors)
        self._feed = Feed(given, self.seat, wire_dtype)
        found = resolve(given) if given is not None and self._feed.layout is None else {}
        # A world that knows no names yet has a ring of nothing: a seat's holder must answer on the data plane.
        layout = self._feed.layout or RankLayout.of(found, wire_dtype=wire_dtype)
        self._only_streams = only_declared(given)
        if slots == 0 and self._only_streams:
            raise InvalidArgument("slots=0 publishes live tensors in place, and a stream has none: give slots=2")
        self.incarnation = unique_name(f"{policy}-t{self.seat.rank}")
        self._endpoint = Endpoint.acquire(registry, self.options)
        self._member = Member(self._endpoint, policy, self.incarnation, self._reassert)
        self._claimant = Claimant(self._member, self.seat, start_after or 0)
        self._commits = Commits(self._member, self._claimant, self.seat.rank)
        try:
            self._ring = self._open_ring(layout, found)
            if slots == 0:
                self._mutations = Mutations(self._shut_out)
            self._claimant.claim(wait=0.0)
        except BaseException:
            self.close(timeout=1.0)
            raise
        close_at_exit(self)

    # ---- what users call

    def publish(
        self,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        stream: Stream | None = None,
        timeout: float = 30.0,
    ) -> Version:
        """Snapshot the tensors as the next version; on return the caller may change them again.

        The commit follows on a thread of its own; what fails there is raised by the next ``publish`` or ``wait``. The
        call
        counts even when it raises: that version is aborted for all ranks, and the n-th call of every rank stays one
        version. Never waits for readers beyond ``Options.grace_s`` (``grace_max_s`` for one that lost two running).

        ``stream``: an iterable or async iterable of (name, full tensor) instead of the tensors. Every rank draws it to the
        end, also after an error of ours, and copies its 1/world_size of each tensor before it draws the next; no reference
        is kept. Each pass gives the names, shapes and dtypes of the first, in any order: else LayoutMismatch and its kinds,
        or NameCollision. What the iterable raises is raised as it is. ``timeout`` does not count the iterable's own time.

        After ``timeout`` seconds: IncompleteVersion, naming the ranks that have not claimed or not committed. Also
        raises TensorUnavailable, LayoutMismatch, InvalidArgument (metadata over 64 KiB), Fenced, RegistryLost.
        """
        begun = time.monotonic()
        deadline = begun + timeout
        with drawing(stream) as pairs, self._publishing, self._member.bounded(lambda: deadline):
            check_open(self._closed, f"Publisher({self.policy!r})")
            epoch = self._count_call(deadline)
            key = (epoch.epoch, self._k)
            try:
                self._commits.raise_failure()
                if self._mutations is not None:
                    self._mutations.check()
                extra = _metadata_bytes(metadata)
                known: Known | None = None
                checked: dict[int, int] = {}
                ring: Slots
                if pairs is not None:
                    ring, slot, source, resolved, taken = self._take_in(pairs, deadline)
                    holds = layout = ring.layout
                    slot.key = key
                else:
                    tensors = self._resolve()
                    holds = RankLayout.of(tensors, wire_dtype=self._wire_dtype)
                    if self._slots:  # live tensors are published whole: a copy less would save nothing
                        layout, known = self._commits.partners.share_of(holds, epoch.epoch)
                    else:
                        layout = holds
                    ring = self._ring_for(layout, tensors)
                    resolved = time.monotonic()
                    slot = self._take_slot(ring, deadline)
                    taken = time.monotonic()
                    source = ring.snapshot(slot, tensors)
                    slot.key = key
                    if self._mutations is not None:
                        self._mutations.published(tensors)
                    checked = self._commits.partners.check(known, self._k, tensors)
                # What lies in live tensors when the commit is made may be the next version.
                proof = b"" if self._slots else ring.seal(slot, source.generation)[1]
            except BaseException as exc:
                self._commits.submit(self._commit(epoch, error=f"{type(exc).__name__}: {exc}"), epoch.base + self._k)
                raise
            copied = time.monotonic()
            number = epoch.base + self._k
            commit = self._commit(epoch, step=step, ring=ring, holds=holds, source=source, metadata=extra, proof=proof)
            shot = None
            if self._slots:
                seal = partial(ring.seal, slot, source.generation)
                shot = Snapshot(holds=holds, layout=layout, seal=seal, known=known, checked=checked)
            self._commits.submit(commit, number, shot)
            return Version(
                number=number,
                epoch=epoch.epoch,
                step=step,
                kind="full",
                wire_bytes=ring.layout.nbytes,
                metadata=dict(metadata or {}),
                seconds={"resolve": resolved - begun, "slot": taken - resolved, "snapshot": copied - taken},
            )

    def mutating(self) -> AbstractContextManager[None]:
        """With ``slots=0``: around every change of the published tensors (a step of a torch optimizer over one of them is
        noticed by itself). Readers of the version published last are waited for, ``Options.grace_s`` at most, then shut
        out before the body runs: a read that raced raises VersionGone there. Otherwise it does nothing."""
        return self._mutations.mutating() if self._mutations is not None else nullcontext()

    def wait(self, version: Version | int, *, replicas: int | None = None, timeout: float = 60.0) -> Receipt:
        """Wait until replicas run ``version`` or a newer one: None for the members at READY, 0 for READY only, n for
        any n.

        Returns, never raises, on expiry. Raises VersionAborted, StepMismatch or ReplicaMismatch for a version that was
        given up, and what its commit on this rank failed with.
        """
        check_open(self._closed, f"Publisher({self.policy!r})")
        deadline = time.monotonic() + timeout
        number = version.number if isinstance(version, Version) else version
        key = self._commits.key_of(number)
        with self._member.bounded(lambda: deadline):
            if key is not None:
                outcome = self._commits.settle(key, deadline)
                if outcome.state == "aborted":
                    self._commits.raise_failure()
                    raise self._commits.aborted(key, outcome)
                number = outcome.number or number
            left = max(deadline - time.monotonic(), 0)
            done = self._member.ask(
                AwaitInstalled(policy=self.policy, number=number, replicas=replicas, wait=left), Installs
            )
        return Receipt(
            version=done.number,
            ready=done.ready,
            installed=done.installed,
            failed=dict(done.failed),
            missing=done.missing,
        )

    async def async_publish(
        self,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        stream: Stream | None = None,
        timeout: float = 30.0,
    ) -> Version:
        """``publish`` on a thread of its own; an async ``stream`` is driven by the caller's loop. A publish counts on all
        ranks once it is begun: cancelled, it is finished all the same, within its ``timeout``, and the version is returned
        as if nothing had been cancelled."""
        pairs = on_loop(stream, asyncio.get_running_loop()) if stream is not None else None
        return await run(lambda: self.publish(step, metadata, stream=pairs, timeout=timeout), stop=lambda: False)

    async def async_wait(
        self, version: Version | int, *, replicas: int | None = None, timeout: float = 60.0
    ) -> Receipt:
        """``wait`` on a thread of its own. Cancelled, it ends at once; nothing depends on it."""
        return await run(lambda: self.wait(version, replicas=replicas, timeout=timeout))

    async def async_latest(self) -> int | None:
        """``latest`` on a thread of its own."""
        return await run(lambda: self.latest)

    @property
    def latest(self) -> int | None:
        """Number of the newest READY version, or None. Raises RegistryLost."""
        check_open(self._closed, f"Publisher({self.policy!r})")
        self._member.beat_now()
        return self._member.floor or None

    @property
    def registered_bytes(self) -> int:
        """Registered host memory of this rank: slots, their headers and page padding."""
        return sum(ring.served.arena.total_bytes for ring in (*self._retired, self._ring) if ring is not None)

    @property
    def memory(self) -> MemoryReport:
        """What this rank's weights and slots take now; rings of former layouts that are still read count too."""
        rings = [ring for ring in (*self._retired, self._ring) if ring is not None]
        slots = sum(self._slots * ring.layout.nbytes for ring in rings)
        weights = memory_of(self._tensors) if rings and self._tensors is not None and not self._only_streams else []
        return MemoryReport(
            slots_bytes=slots,
            live_bytes=sum(nbytes for _, nbytes in weights),
            headers_bytes=self.registered_bytes - slots,
        )

    def close(self, *, timeout: float = 30.0) -> None:
        """Finish what was begun, then serve on for at most the grace while leases are open, and leave. Idempotent; one that
        was interrupted is gone on with by the next."""
        self._closed = True
        if self._leaving is None:
            self._leaving = self._steps(time.monotonic() + timeout)
        self._leaving.close()

    def _steps(self, deadline: float) -> ExitStack:
        """What a close does. The last is run first; each is run whatever became of those before, a Ctrl-C too."""
        rings = [ring for ring in (*self._retired, self._ring) if ring is not None]
        steps = ExitStack()
        steps.callback(self._forget)
        steps.callback(self._endpoint.release)
        for ring in rings:
            steps.callback(ring.close)
        steps.callback(self._member.leave)
        steps.callback(self._linger, rings)
        steps.callback(self._commits.close, deadline)
        if self._mutations is not None:
            steps.callback(self._mutations.close)
        return steps

    def _forget(self) -> None:
        """The arenas go now, also where the caller keeps this object."""
        self._ring, self._retired = None, []

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Publisher({self.policy!r}, rank={self.seat.rank}/{self.seat.world_size}, world={self.seat.world!r})"

    # ---- the epoch

    def _count_call(self, deadline: float) -> Seat:
        """Make this call the k-th of the open epoch, which is claimed (again) where this rank has none."""
        epoch = self._claimant.open_epoch
        if epoch is None:
            try:
                epoch = self._claimant.wait_open(deadline)
            except BaseException as exc:  # Ctrl-C too: the other ranks have counted this call
                self._uncounted.append(f"{type(exc).__name__}: {exc}")
                raise
        if epoch.epoch != self._counted:
            self._k = self._commits.count_on(self._counted, self._k)
            self._counted = epoch.epoch
            for text in self._uncounted:
                self._k += 1
                self._commits.submit(self._commit(epoch, error=text), epoch.base + self._k)
            self._uncounted.clear()
        self._k += 1
        return epoch

    def _commit(
        self,
        epoch: Seat,
        *,
        step: int | None = None,
        ring: Slots | None = None,
        holds: RankLayout | None = None,
        source: Source | None = None,
        metadata: bytes | None = None,
        proof: bytes = b"",
        error: str | None = None,
    ) -> Commit:
        return Commit(
            policy=self.policy,
            epoch=epoch.epoch,
            nonce=epoch.nonce,
            k=self._k,
            rank=self.seat.rank,
            incarnation=self.incarnation,
            step=step,
            layout=ring.layout.hash if ring else "",
            holds=holds.hash if ring and holds and holds.hash != ring.layout.hash else "",
            source=source,
            window_bytes=self.options.window_bytes,
            wire_bytes=ring.layout.nbytes if ring else 0,
            metadata=metadata if self.seat.rank == 0 else None,
            proof=proof,
            error=error[:4096] if error else None,
        )

    def _reassert(self) -> None:
        """Say again what this rank holds, to a registry that has forgotten."""
        if self._ring is None or self._closed:
            return
        self._announce(self._ring)
        if self._commits.world is not None:
            self._member.put(*self._commits.world)
        self._claimant.reassert(self._commits.held, self._k)

    # ---- slots

    def _open_ring(
        self, layout: RankLayout, tensors: Mapping[str, tuple[Shard, ...]], *, replaces: Slots | None = None
    ) -> Slots:
        role = f"{self.policy}-pub{self.seat.rank}"
        ring: Slots = (
            Ring(self._endpoint, role, layout, self._slots)
            if self._slots
            else InPlace(self._endpoint, role, layout, tensors)
        )
        gone = replaces is not None and not self._slots
        self._announce(ring, replaces=replaces if gone else None)
        return ring

    def _announce(self, ring: Slots, *, replaces: Slots | None = None) -> None:
        record = encode(ring.served.record)
        gone = [replaces.served.name, *(key for key, _ in replaces.tables)] if replaces is not None else []
        self._member.put(ring.layout.hash, ring.layout.encode(), replaces=gone)
        for key, table in ring.tables:
            self._member.put(key, table)
        self._member.put(ring.served.name, record)
        self._member.put(seat_key(self.incarnation), record)

    def _resolve(self) -> dict[str, tuple[Shard, ...]]:
        if self._tensors is None:
            raise InvalidArgument(f"Publisher({self.policy!r}, None) has no tensors: give publish(stream=...)")
        return resolve(self._tensors)

    def _take_in(self, pairs: Pairs, deadline: float) -> tuple[Ring, Slot, Source, float, float]:
        """Resolve and snapshot of a stream. What can wait is done before the first draw, where the layout is known."""
        if not self._slots:
            raise InvalidArgument("publish(stream=) with slots=0: there is no memory to copy it into; give slots=2")
        feed = self._feed
        if feed.layout is None and self._tensors is not None:
            feed.declare(shards(self._tensors))
        begun = time.monotonic()
        copies = feed.learn(pairs) if feed.layout is None else None
        assert feed.layout is not None
        deadline += time.monotonic() - begun  # the iterable's own time does not count
        with self._member.bounded(lambda: deadline):
            ring = self._ring_for(feed.layout, {})
            resolved = time.monotonic()
            slot = self._take_slot(ring, deadline)
        taken = time.monotonic()
        assert isinstance(ring, Ring)
        filling = ring.begin(slot)
        if copies is None:
            feed.fill(pairs, filling.put)
        else:
            for name in list(copies):
                filling.put(name, copies.pop(name))
        return ring, slot, filling.finish(), resolved, taken

    def _ring_for(self, layout: RankLayout, tensors: Mapping[str, tuple[Shard, ...]]) -> Slots:
        """The ring of what is snapshotted. Another layout gets another ring; the old slots live on until their readers
        are done."""
        assert self._ring is not None
        if not self._ring.fits(layout, tensors):
            old, self._ring = self._ring, self._open_ring(layout, tensors, replaces=self._ring)
            if self._slots:
                self._retired.append(old)
            else:
                old.close()  # nothing is there any more to be read
        return self._ring

    def _take_slot(self, ring: Slots, deadline: float) -> Slot:
        """A slot that holds neither the newest READY version nor one that may still become it. Waits for this rank's
        own world, never for readers beyond the grace."""
        if not self._slots:
            return ring.slots[
                0
            ]  # of live tensors there is one version at a time: readers were told when the last one ended
        while True:
            free = [slot for slot in ring.slots if slot.key is None or self._commits.is_past(slot.key)]
            if free:
                break
            self._settle_oldest(ring, deadline)
        slot = min(free, key=lambda slot: slot.key or (0, 0))
        self._wait_for_readers(ring, slot)
        self._retire_rings(ring)
        return slot

    def _settle_oldest(self, ring: Slots, deadline: float) -> None:
        key = min(slot.key for slot in ring.slots if slot.key is not None and slot.key != self._commits.newest)
        outcome = self._commits.settle(key, deadline)
        if outcome.state == "staging":
            raise IncompleteVersion(
                f"the previous version of policy {self.policy!r} is not complete: rank(s) "
                f"{name_ranks(outcome.missing)} of {self.seat.world_size} have not committed it; no slot is free until "
                "they do or it is aborted",
                version=outcome.number or None,
                missing=list(outcome.missing),
            )

    def _wait_for_readers(self, ring: Slots, slot: Slot) -> None:
        """At most the grace, unless a reader that lost two versions running was given more."""
        commits = self._commits
        outcome = commits.outcome(slot.key) if slot.key is not None else None
        newest = commits.outcome(commits.newest) if commits.newest is not None else None
        if outcome is None or outcome.state != "ready" or newest is None or outcome.number not in newest.leased:
            return
        begun = time.monotonic()
        wait = self.options.grace_s
        while True:
            free = self._member.ask(AwaitFree(policy=self.policy, source=ring.source(slot), wait=wait), Free)
            if not free.leased_by:
                return
            if free.held_for_s <= 0 or time.monotonic() - begun > self.options.grace_max_s:
                log.info("policy %s: version %d loses its slot under %s", self.policy, outcome.number, free.leased_by)
                return
            wait = free.held_for_s

    def _retire_rings(self, ring: Slots) -> None:
        """Close the rings of former layouts once a version of this one is READY."""
        if self._retired and any(slot.key is not None and slot.key == self._commits.newest for slot in ring.slots):
            self._linger(self._retired)
            for old in self._retired:
                old.close()
            self._retired = []

    def _shut_out(self) -> None:
        """The live tensors are about to change."""
        if isinstance(self._ring, InPlace):
            self._linger([self._ring])
            self._ring.shut_out()

    def _linger(self, rings: list[Slots]) -> None:
        """Wait for the readers of these slots, the grace at most."""
        deadline = time.monotonic() + self.options.grace_s
        for ring in rings:
            for slot in ring.slots:
                left = deadline - time.monotonic()
                if slot.key is None or left <= 0:
                    continue
                command = AwaitFree(policy=self.policy, source=ring.source(slot), closing=True, wait=left)
                try:
                    self._member.ask(command, Free, timeout=left + 1.0)
                except RegistryLost as exc:
                    log.warning("policy %s: closing without asking who still reads: %s", self.policy, exc)
                    return


def _metadata_bytes(metadata: Mapping[str, Any] | None) -> bytes:
    try:
        data = json.dumps(dict(metadata or {})).encode()
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(f"metadata must be JSON (numbers, strings, lists, mappings): {exc}") from exc
    if len(data) > MAX_METADATA_BYTES:
        raise InvalidArgument(
            f"metadata of {len(data)} bytes: at most {MAX_METADATA_BYTES}; store large things elsewhere"
        )
    return data
