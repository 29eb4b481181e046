"""One stage a host: a rank that only streams reads another rank's stage, parcel by parcel, into a buffer of the largest."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from mx_rl.columns import Ints, ints
from mx_rl.endpoint import Endpoint, Member, seat_key
from mx_rl.errors import IncompleteVersion, InvalidArgument, PeerLost
from mx_rl.fetch import Haul
from mx_rl.landing import Landing
from mx_rl.parcels import Parcel, make_parcels
from mx_rl.patience import Naps
from mx_rl.plan import Plan
from mx_rl.records import EndpointRecord, ReplicaSeats, Round, Source, Stage, decode
from mx_rl.staging import Cargo, Staging
from mx_rl.transport.base import Route, Windows
from mx_rl.transport.place import here, same_host


@dataclass
class Loan(Cargo):
    """A version that another rank of the replica holds: ``source`` is known when all ranks have voted."""

    lender: int = 0
    lent: Source | None = None

    @property
    def source(self) -> Source | None:
        return self.lent


class Borrowing:
    """Brings versions to a rank that only streams: from the stage of the lowest rank on this host that has the same layout
    and serves, else into a stage of its own. ``parcels`` are those of the version that was loaded last."""

    def __init__(self, member: Member, staging: Staging, rank: int) -> None:
        self._member = member
        self._staging = staging
        self._rank = rank
        self._hosts: dict[str, tuple[bool, bool]] = {}  # incarnation -> (same host, serves)
        self._buffer: Buffer | None = None

    @property
    def registered_bytes(self) -> int:
        return self._buffer.registered_bytes if self._buffer is not None else 0

    def load(self, told: Round, seats: ReplicaSeats | None, *rest: Any) -> Cargo:
        """As ``Staging.load``; a loan moves nothing yet."""
        lender = self._lender(seats) if seats is not None else None
        if lender is None:
            return self._staging.load(told, seats, *rest)
        assert told.record is not None
        begun = time.monotonic()
        staging, record = self._staging, told.record
        plan = staging.plan(record, seats)
        buffer = self._buffer_for(plan)
        cargo = Loan(record, plan, buffer.landing, Haul(), staging.layout_name, lender=lender)
        cargo.seconds = {"plan": time.monotonic() - begun}
        return cargo

    def _lender(self, seats: ReplicaSeats) -> int | None:
        for rank in range(self._rank):
            if seats.layouts[rank] == seats.layouts[self._rank] and self._lends(seats, rank):
                return rank
        return None

    def _lends(self, seats: ReplicaSeats, rank: int) -> bool:
        """A seat's record is that of its stage, or of the agent that takes its messages where it serves no stage."""
        incarnation = seats.agents[rank]
        known = self._hosts.get(incarnation)
        if known is None:
            data = self._member.blobs([seat_key(incarnation)]).get(seat_key(incarnation))
            if data is None:
                return False
            record: EndpointRecord = decode(data, EndpointRecord)
            known = self._hosts[incarnation] = (
                same_host(record.place, here()),
                record.agent != seats.endpoints[rank],
            )
        return all(known)

    def _buffer_for(self, plan: Plan) -> Buffer:
        order = f"{plan.world_hash}/{plan.target_hash}/{plan.window_bytes}"
        if self._buffer is None or self._buffer.order != order:
            self.close()
            parcels = make_parcels(plan, aliases=self._staging.layout is None)
            role = f"{self._member.policy}-r{self._rank}"
            self._buffer = Buffer(self._member.endpoint, role, parcels, order=order, window_bytes=plan.window_bytes)
        return self._buffer

    def settle(self, loan: Loan, stages: Sequence[Stage | None]) -> Lender:
        """All ranks have voted, and ``stages`` says what each holds.

        Raises IncompleteVersion where the lender holds what this plan is not made for: it has changed its layout.
        """
        stage = stages[loan.lender] if loan.lender < len(stages) else None
        if stage is None or stage.layout != loan.plan.target_hash:
            raise IncompleteVersion(
                f"rank {loan.lender} was to lend its stage to rank {self._rank} and holds another layout: stream again",
                version=loan.record.number,
                missing=[loan.lender],
            )
        assert self._buffer is not None
        loan.lent = stage.source
        return Lender(self._buffer, loan, self._member.endpoint_record(stage.source.agent), stage.source)

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


class Lender:
    """Moves the parcels of one loan. ``parcels`` as they lie in ``block`` after their ``move``."""

    def __init__(self, buffer: Buffer, loan: Loan, record: EndpointRecord, source: Source) -> None:
        self.parcels = buffer.parcels
        self._buffer = buffer
        self._loan = loan
        self._record = record
        self._source = source

    @property
    def block(self) -> Tensor:
        return self._buffer.landing.block

    def move(self, index: int) -> None:
        self._buffer.move(index, self._record, self._source, self._loan.haul, f"rank:{self._loan.lender}")


class Buffer:
    """``order`` names the plan. Parcels lie at the start of the landing's block, one at a time."""

    def __init__(
        self, endpoint: Endpoint, role: str, parcels: Sequence[Parcel], *, order: str, window_bytes: int
    ) -> None:
        self.order = order
        self._endpoint = endpoint
        self._role = role
        packed = [parcel.pack() for parcel in parcels]
        self.parcels = [parcel for parcel, _, _ in packed]
        self._nbytes = max((nbytes for _, _, nbytes in packed), default=0)
        self._sizes = [sum(nbytes for _, _, nbytes in runs) for _, runs, _ in packed]
        self._rows, self._starts, self._windows = _cut([runs for _, runs, _ in packed], window_bytes)
        self.landing = self._open()

    @property
    def registered_bytes(self) -> int:
        return self.landing.total_bytes

    def _open(self) -> Landing:
        return Landing(self._endpoint, f"{self._role}-loan", self._nbytes, serve=False)

    def move(self, index: int, record: EndpointRecord, source: Source, haul: Haul, label: str) -> None:
        """Bring one parcel out of the lender's stage, confirmed against its header.

        Raises VersionGone where that stage holds another version, PeerLost where the lender is dead or moves nothing.
        """
        windows = list(self._windows[index])
        if not windows:
            return
        stall_s = self._endpoint.options.stall_s
        flow = self._route(record, source).start(source.generation, windows)
        try:
            naps, moved_at = Naps(), time.monotonic()
            while not flow.done:
                if flow.step():
                    moved_at = time.monotonic()
                    naps.over()
                    continue
                if time.monotonic() - moved_at > stall_s:
                    raise PeerLost(f"{label} moved no byte for {stall_s} s", peer=label)
                naps.rest()
        finally:
            if not flow.close() and not self.landing.fence():
                old, self.landing = self.landing, self._open()
                old.close()  # keeps its memory for as long as late bytes may come
        haul.served_by[label] += self._sizes[index]
        haul.lanes[self.landing.link(record).lane] += 1

    def _route(self, record: EndpointRecord, source: Source) -> Route:
        if source.region >= len(record.regions):
            raise InvalidArgument(f"{record.agent} lends region {source.region} of {len(record.regions)}")
        self.landing.keep_only({record.agent})
        known = self.landing.known(record.agent, source.region, self.order)
        if known is not None:
            return known
        base = np.array([self.landing.address, record.regions[source.region].address, 0], dtype=np.int64)
        # Nothing is needed of the count of windows: a lender votes when its stage is whole.
        windows = Windows(runs=self._rows + base, starts=self._starts, needs=np.zeros(len(self._starts) - 1, np.int64))
        return self.landing.route(record, source.region, self.order, windows)

    def close(self) -> None:
        self.landing.close()


def _cut(parcels: Sequence[Sequence[tuple[int, int, int]]], window_bytes: int) -> tuple[Ints, Ints, list[range]]:
    """(runs, starts, the windows of each parcel): windows of at most ``window_bytes``, each of one parcel."""
    rows: list[tuple[int, int, int]] = []
    starts = [0]
    windows = []
    for runs in parcels:
        first, room = len(starts) - 1, window_bytes
        for at, begin, nbytes in runs:
            done = 0
            while done < nbytes:
                part = min(nbytes - done, room)
                rows.append((at + done, begin + done, part))
                done, room = done + part, room - part
                if room == 0:
                    starts.append(len(rows))
                    room = window_bytes
        if starts[-1] < len(rows):
            starts.append(len(rows))
        windows.append(range(first, len(starts) - 1))
    return ints(rows).reshape(-1, 3), ints(starts), windows
