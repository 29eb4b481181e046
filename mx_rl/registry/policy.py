"""What the registry knows of one policy: members, the world that publishes, READY versions, who holds and leases them.

Plain data and the rules that every command shares. No I/O, no clock: ``now`` is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from mx_rl.errors import MxRLError
from mx_rl.records import Claim, Commit, Declare, Join, Refused, Source, VersionRecord

MAX_FENCED = 4096  # incarnations remembered as fenced; one that was forgotten still fails on its old epoch
MAX_ROUNDS = 64  # finished publishes of an epoch that Await can still ask about
MAX_STAGING = 16  # publishes begun and not finished
MAX_VERSIONS = 256
MAX_GONE = 1024
MAX_DECLARED = 16
MAX_TOLD = 16

Identity = tuple[int, int, int]


def refused(error: type[MxRLError], message: str, **fields: Any) -> Refused:
    return Refused(error=error.__name__, message=message, fields=fields)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Durations in seconds. ``settle_s``: how long after its start a registry that may have forgotten waits for members
    to tell what they hold, before a claim without a known floor opens an epoch or a version is called lost."""

    lease_s: float = 30.0
    grace_max_s: float = 60.0
    settle_s: float = 0.0


class Saved(msgspec.Struct, frozen=True, omit_defaults=True):
    """What outlives the registry's process, one small value a policy."""

    floor: int = 0
    epoch: int = 0
    world: str = ""


@dataclass(slots=True)
class Member:
    """One incarnation. ``seats`` are ("world" or "replica", name, rank)."""

    seen: float
    suspect: bool = False
    lingers: bool = False  # it has left, but its memory may be read while its lease lasts
    seats: set[tuple[str, str, int]] = field(default_factory=set)


@dataclass(slots=True)
class World:
    """Seats being claimed for the next epoch."""

    name: str
    size: int
    claims: dict[int, Claim] = field(default_factory=dict)


@dataclass(slots=True)
class Round:
    """The k-th publish of an epoch."""

    number: int
    state: str = "staging"
    reason: str = ""
    commits: dict[int, Commit] = field(default_factory=dict)
    layouts: tuple[str, ...] = ()
    declared: bool = False
    steps: dict[str, int | None] = field(default_factory=dict)
    basis: str = ""
    whole: bool = False
    differ: tuple[int, ...] = ()
    entries: tuple[int, ...] = ()


@dataclass(slots=True)
class Epoch:
    number: int
    nonce: int
    world: str
    seats: list[str]  # incarnations by rank; "" once that rank has left
    base: int
    rejoined: bool = False
    ready: bool = False  # one of its versions became READY
    begun: int = 0  # the highest k that a rank said it had begun
    superseded: str = ""  # why nothing of it becomes READY any more
    rounds: dict[int, Round] = field(default_factory=dict)

    def staging(self) -> dict[int, Round]:
        return {k: item for k, item in self.rounds.items() if item.state == "staging"}

    def missing(self, item: Round) -> tuple[int, ...]:
        return tuple(rank for rank in range(len(self.seats)) if rank not in item.commits)


@dataclass(slots=True)
class Version:
    record: VersionRecord
    audience: tuple[str, ...] | None  # replicas that were members when it became READY
    offered: bool = True  # False: known for its leases only


@dataclass(slots=True)
class Replica:
    name: str
    ordinal: int
    named: bool
    seats: list[Join | None]
    record: VersionRecord | None = None  # what it runs
    state: str = "joining"  # "joining", "installed", "tainted"
    said: str = "joining"  # how its last round ended
    reason: str = ""
    failed: int = 0  # the newest version that it failed to install
    acked: tuple[str, ...] = ()  # incarnations, by rank, that the last Ack spoke for
    held: tuple[Source, ...] = ()
    spoke: tuple[str, int] = ("", 0)  # who led it when it last acknowledged, and that acknowledgement's count

    @property
    def incarnations(self) -> tuple[str, ...]:
        return tuple(seat.incarnation if seat is not None else "" for seat in self.seats)

    @property
    def layouts(self) -> tuple[str, ...]:
        return tuple(seat.layout if seat is not None else "" for seat in self.seats)

    @property
    def number(self) -> int:
        return self.record.number if self.record is not None else 0


@dataclass(slots=True)
class Lease:
    """A replica's right to read one version. One a replica: its rounds follow each other."""

    number: int
    identity: Identity
    until: float
    trainer: bool = True  # covers the trainer's slot, not only its parents' stages
    parents: tuple[str, ...] = ()  # replicas that it was told to read from, first choice first


@dataclass(slots=True)
class Hold:
    """The help for a reader that lost two versions running: its publisher waits beyond the grace. One a policy."""

    replica: str
    number: int
    until: float
    read_s: float


@dataclass(slots=True)
class Blob:
    data: bytes
    owners: set[str]


@dataclass(slots=True)
class Policy:
    name: str
    rules: Rules
    settled_at: float = 0.0
    changes: int = 0  # moves with every change that a waiter may wait for
    floor: int = 0  # the highest number ever READY, as far as anybody told
    highest: int = 0  # the highest number ever given to a publish: an aborted number is burnt
    known_epoch: int = 0
    known_world: str = ""
    unsaved: bool = False
    epoch: Epoch | None = None
    previous: Epoch | None = None
    pending: dict[str, World] = field(default_factory=dict)
    fenced: dict[tuple[str, str], None] = field(default_factory=dict)  # (world, incarnation)
    declared: dict[tuple[str, ...], Declare] = field(default_factory=dict)
    told: dict[tuple[int, int], int] = field(default_factory=dict)  # (epoch, nonce) -> highest number told
    versions: dict[int, Version] = field(default_factory=dict)
    audiences: dict[int, tuple[str, ...]] = field(default_factory=dict)
    generations: dict[tuple[str, int], int] = field(default_factory=dict)  # (agent, region) -> highest seen
    members: dict[str, Member] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)  # agent -> incarnation
    replicas: dict[str, Replica] = field(default_factory=dict)
    holders: dict[tuple[Identity, tuple[str, ...]], dict[str, None]] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)  # replica -> why it was dropped without leaving
    leases: dict[str, Lease] = field(default_factory=dict)
    readers: dict[str, int] = field(default_factory=dict)  # replica -> leases whose first choice it is
    hold: Hold | None = None
    blobs: dict[str, Blob] = field(default_factory=dict)
    ordinals: int = 0
    next_sweep: float = 0.0
    empty_since: float | None = None

    def bump(self) -> None:
        self.changes += 1

    # ---- who lives ---------------------------------------------------------------------------------------------------

    def member(self, incarnation: str, now: float) -> Member:
        member = self.members.get(incarnation)
        if member is None:
            member = self.members[incarnation] = Member(now)
        return member

    def touch(self, incarnation: str, now: float) -> None:
        """Any word from an incarnation renews its lease and withdraws suspicion."""
        member = self.members.get(incarnation)
        if member is None or member.lingers:
            return
        if member.suspect or now - member.seen > self.rules.lease_s:
            self.bump()
        member.seen = now
        member.suspect = False

    def seat(self, incarnation: str, key: tuple[str, str, int], now: float) -> None:
        member = self.member(incarnation, now)
        member.seats.add(key)
        member.lingers = False
        self.owners.setdefault(incarnation, incarnation)
        self.touch(incarnation, now)

    def unseat(self, incarnation: str, key: tuple[str, str, int]) -> None:
        member = self.members.get(incarnation)
        if member is not None:
            member.seats.discard(key)

    def alive(self, incarnation: str, now: float) -> bool:
        member = self.members.get(incarnation)
        return member is not None and not member.lingers and self._within(member, now)

    def anyone(self, now: float) -> bool:
        """A member's lease lasts, whatever the transport says of it."""
        return any(now - member.seen <= self.rules.lease_s for member in self.members.values())

    def serves(self, agent: str, now: float) -> bool:
        """Memory of ``agent`` may be read. "" names an empty share."""
        if not agent:
            return True
        member = self.members.get(self.owners.get(agent, agent))
        return member is not None and self._within(member, now)

    def _within(self, member: Member, now: float) -> bool:
        return not member.suspect and now - member.seen <= self.rules.lease_s

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def raise_floor(self, number: int) -> None:
        if number > self.floor:
            self.floor = number
            self.highest = max(self.highest, number)
            self.unsaved = True
            self.bump()

    def tell(self, identity: Identity) -> None:
        """A member holds this version: it was READY, whatever this registry remembers."""
        epoch, nonce, number = identity
        self.told[epoch, nonce] = max(number, self.told.get((epoch, nonce), 0))
        if len(self.told) > MAX_TOLD:
            del self.told[min(self.told, key=lambda key: self.told[key])]
        self.raise_floor(number)

    def know_epoch(self, number: int, world: str) -> None:
        if number > self.known_epoch:
            self.known_epoch = number
            self.known_world = world
            self.unsaved = True
        elif number == self.known_epoch and world and world != self.known_world:
            self.known_world = world
            self.unsaved = True

    def saved(self) -> Saved:
        return Saved(floor=self.floor, epoch=self.known_epoch, world=self.known_world)

    # ---- versions ----------------------------------------------------------------------------------------------------

    def newest(self) -> Version | None:
        """The newest READY version that is on offer, wherever its bytes are."""
        numbers = [number for number, version in self.versions.items() if version.offered]
        return self.versions[max(numbers)] if numbers else None

    def saw(self, source: Source) -> None:
        """A slot was taken for this generation: what lay there under a lower one is gone."""
        if source.agent:
            key = (source.agent, source.region)
            self.generations[key] = max(source.generation, self.generations.get(key, 0))

    def source_lives(self, source: Source, now: float) -> bool:
        if not source.agent:
            return True
        newest = self.generations.get((source.agent, source.region), source.generation)
        return newest <= source.generation and self.serves(source.agent, now)

    def trainer_has(self, version: Version, now: float) -> bool:
        sources = version.record.sources
        if not version.record.copies:
            return all(self.source_lives(source, now) for source in sources)
        return all(
            any(self.source_lives(sources[rank], now) for rank in ranks if rank < len(sources))
            for ranks in version.record.copies
        )

    def admits(self, record: VersionRecord) -> bool:
        """May a record that a member tells be on offer again? Never one of an older epoch than one that was READY."""
        if self.epoch is not None and self.epoch.ready:
            return (record.epoch, record.nonce) == (self.epoch.number, self.epoch.nonce)
        return all(record.epoch >= item.record.epoch for item in self.versions.values() if item.offered)

    def restore(self, record: VersionRecord) -> None:
        """Take a version record from a member that verified it (protocol, section 1, re-assertion)."""
        self.tell(record.identity)
        self.know_epoch(record.epoch, "")
        known = self.versions.get(record.number)
        if (known is not None and known.record.identity == record.identity) or not self.admits(record):
            return
        for version in self.versions.values():
            if version.record.epoch < record.epoch and version.record.number >= record.number:
                version.offered = False  # a dead run's numbers do not hide the living one's
        if self.epoch is not None and (record.epoch, record.nonce) == (self.epoch.number, self.epoch.nonce):
            self.epoch.ready = True
        self.versions[record.number] = Version(record, self.audiences.get(record.number))
        self.bump()

    def reissue(self, now: float) -> None:
        """A living publisher whose newest version is not above the floor gets it under floor + 1: no byte moves."""
        epoch = self.epoch
        if epoch is None or epoch.superseded:
            return
        mine = [v for v in self.versions.values() if v.offered and v.record.identity[:2] == (epoch.number, epoch.nonce)]
        if not mine:
            return
        newest = max(mine, key=lambda version: version.record.number)
        number = newest.record.number
        others = max((told for key, told in self.told.items() if key != (epoch.number, epoch.nonce)), default=0)
        idle = not epoch.staging() and epoch.begun <= number - epoch.base
        if not (others >= number or (self.floor > number and idle)) or not self.trainer_has(newest, now):
            return
        newest.offered = False
        self.highest = max(self.floor, self.highest) + 1
        self.become_ready(msgspec.structs.replace(newest.record, number=self.highest))

    def become_ready(self, record: VersionRecord) -> None:
        audience = tuple(self.replicas)
        self.versions[record.number] = Version(record, audience)
        self.audiences[record.number] = audience
        while len(self.audiences) > MAX_ROUNDS:
            del self.audiences[next(iter(self.audiences))]
        self.tell(record.identity)
        self.drop_versions()
        self.bump()

    def drop_versions(self) -> None:
        """Forget versions older than the newest READY one that nobody holds or leases."""
        newest = self.newest()
        if newest is None or len(self.versions) == 1:
            return
        used = {lease.identity for lease in self.leases.values()} | {key[0] for key in self.holders}
        for number in sorted(self.versions):
            version = self.versions[number]
            over = len(self.versions) > MAX_VERSIONS
            if version is not newest and (over or version.record.identity not in used):
                del self.versions[number]

    # ---- replicas ----------------------------------------------------------------------------------------------------

    def ready(self, replica: Replica, now: float) -> bool:
        return (
            replica.state == "installed"
            and replica.acked == replica.incarnations
            and all(self.alive(incarnation, now) for incarnation in replica.acked)
        )

    def set_holding(self, replica: Replica, record: VersionRecord | None, held: tuple[Source, ...]) -> None:
        """What the replica runs, and where its stages hold it. Keeps the index of holders."""
        if replica.record is not None:
            key = (replica.record.identity, replica.layouts)
            names = self.holders.get(key, {})
            names.pop(replica.name, None)
            if not names:
                self.holders.pop(key, None)
        replica.record, replica.held = record, held
        for source in held:
            self.saw(source)
        if record is not None and held:
            self.holders.setdefault((record.identity, replica.layouts), {})[replica.name] = None

    def drop_replica(self, replica: Replica, why: str) -> None:
        """``why`` "": it left, and nobody waits for it."""
        self.set_holding(replica, None, ())
        for rank, seat in enumerate(replica.seats):
            if seat is not None:
                self.unseat(seat.incarnation, ("replica", replica.name, rank))
        self.end_lease(replica.name)
        del self.replicas[replica.name]
        if why:
            self.gone[replica.name] = why
            while len(self.gone) > MAX_GONE:
                del self.gone[next(iter(self.gone))]
        self.bump()

    # ---- leases ------------------------------------------------------------------------------------------------------

    def end_lease(self, replica: str) -> None:
        lease = self.leases.pop(replica, None)
        if lease is not None:
            self._count(lease, -1)
            self.bump()
        if self.hold is not None and self.hold.replica == replica:
            self.hold = None

    def start_lease(self, replica: str, lease: Lease) -> None:
        old = self.leases.get(replica)
        if old is not None:
            self._count(old, -1)
            if old.number != lease.number:
                self.bump()
        self.leases[replica] = lease
        self._count(lease, 1)

    def _count(self, lease: Lease, by: int) -> None:
        if lease.parents:
            first = lease.parents[0]
            self.readers[first] = self.readers.get(first, 0) + by
            if not self.readers[first]:
                del self.readers[first]

    def leased(self, now: float) -> tuple[int, ...]:
        """Numbers older than the newest READY version that are still leased."""
        newest = self.newest()
        top = newest.record.number if newest is not None else 0
        return tuple(
            sorted({x.number for x in self.leases.values() if x.trainer and x.number < top and x.until >= now})
        )
