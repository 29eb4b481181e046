"""A rollout rank's stage: the plan for a version, and the move of its bytes into the landing.

plan (cached) -> move (transport): everything here may fail without a live byte having changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mx_rl.endpoint import Member, seat_key
from mx_rl.errors import MxRLError, RegistryLost, VersionGone
from mx_rl.fetch import Fetch, Haul, Progress, suppliers
from mx_rl.landing import Landing
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.patience import Patience
from mx_rl.plan import Plan, make_plan
from mx_rl.records import Dead, ReplicaSeats, Round, Source, VersionRecord, encode

log = logging.getLogger("mx_rl")


@dataclass
class Cargo:
    """A version that lies whole in a landing."""

    record: VersionRecord
    plan: Plan
    landing: Landing
    haul: Haul
    layout: str  # hash of the rank layout that it was planned for
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def source(self) -> Source | None:
        """Where peers may read it, until the next version begins to land there."""
        served = self.landing.served
        if served is None:
            return None
        return Source(agent=served.name, region=0, generation=self.landing.header.generation)


class Staging:
    """One a subscriber. ``lost`` and ``read_s`` (versions lost in a row, seconds of a whole read) go with a resolve."""

    def __init__(
        self,
        member: Member,
        rank: int,
        layout: RankLayout,
        *,
        sources: Sequence[str],
        serve: bool,
        strict: bool,
        allow_missing: Sequence[str],
    ) -> None:
        self.layout = layout
        self.lost = 0
        self.read_s = 0.0
        self.dead: list[str] = []
        self._member = member
        self._rank = rank
        self._sources = tuple(sources)
        self._serve = serve
        self._strict = strict
        self._allow_missing = tuple(allow_missing)
        self._progress: Progress | None = None
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._world: tuple[str, bytes] | None = None  # the world layout that was planned from last
        self._quarantine: list[Landing] = []
        # Slack for the padding of pieces that other cuts make; a plan that needs more gets another landing.
        self.landing = self._open_landing(layout.nbytes + layout.nbytes // 64 + (1 << 16))

    @property
    def registered_bytes(self) -> int:
        return sum(landing.total_bytes for landing in (*self._quarantine, self.landing))

    def announce(self) -> None:
        self._member.put(self.layout.hash, self.layout.encode())
        if self.landing.served is not None:
            record = encode(self.landing.served.record)
            self._member.put(self.landing.served.name, record)
            self._member.put(seat_key(self._member.incarnation), record)

    def reassert(self) -> None:
        """To a registry that forgot: a version that only replicas hold is of use with its world's layout only."""
        self.announce()
        if self._world is not None:
            self._member.put(*self._world)

    def load(self, told: Round, seats: ReplicaSeats | None, patience: Patience, moved: Callable[[int], None]) -> Cargo:
        """Bring the version of this round into the stage; ``moved`` is told how many windows are here.

        Raises LayoutMismatch and its kinds before a byte moves; VersionGone, PeerLost, RegistryLost where sources fail.
        """
        assert told.record is not None
        begun = time.monotonic()
        plan = self._plan(told.record, seats)
        planned = time.monotonic()
        cargo = self._move(told, told.record, plan, patience, moved)
        cargo.seconds |= {"plan": planned - begun, "move": time.monotonic() - planned}
        return cargo

    def close(self) -> None:
        for landing in (*self._quarantine, self.landing):
            landing.close()

    def take_dead(self) -> tuple[str, ...]:
        """Agents that were found dead since the last call, to be told with a resolve."""
        dead, self.dead = tuple(self.dead), []
        return dead

    # ---- plan

    def _plan(self, record: VersionRecord, seats: ReplicaSeats | None) -> Plan:
        replica = seats.layouts if seats is not None else (self.layout.hash,)
        key = (record.layout, self.layout.hash, str(record.window_bytes), *replica)
        plan = self._plans.get(key)
        if plan is None:
            world = self._blobs([record.layout], "world layout")[0]
            self._world = (record.layout, world)
            plan = make_plan(
                WorldLayout.decode(world),
                self.layout,
                window_bytes=record.window_bytes,
                replica=[RankLayout.decode(data) for data in self._blobs(replica, "layout of the replica")],
                strict=self._strict,
                allow_missing=self._allow_missing,
            )
            self._plans = {key: plan}
        return plan

    def _blobs(self, names: Sequence[str], what: str) -> list[bytes]:
        found = self._member.blobs(sorted(set(names)))
        for name in names:
            if name not in found:
                raise VersionGone(f"the {what} {name} has left the registry with the rank that put it", version=None)
        return [found[name] for name in names]

    # ---- move

    def _move(
        self, told: Round, record: VersionRecord, plan: Plan, patience: Patience, moved: Callable[[int], None]
    ) -> Cargo:
        landing = self._landing_for(plan)
        order = f"{record.layout}/{self.layout.hash}/{record.window_bytes}"
        progress = self._progress
        known = (progress.identity, progress.order, progress.landing) if progress is not None else None
        if progress is None or known != (record.identity, order, landing):
            # Whoever still reads the version that lies here finds the header moved and takes another source.
            landing.header.begin()
            progress = Progress(record.identity, order, landing)
        self._progress = progress
        kinds = [kind for kind in self._sources if kind != "trainer" or told.trainer]
        found = suppliers(plan, record, told.holders, self._rank, kinds)
        landing.keep_only({one.source.agent for one in found})
        haul = Haul()
        fetch = Fetch(
            plan,
            progress,
            found,
            haul=haul,
            lookup=self._member.endpoint_record,
            replace=self._replace,
            patience=patience,
            moved=moved,
        )
        begun, before = time.monotonic(), len(progress.confirmed)
        try:
            fetch.run()
        except MxRLError as exc:
            self._note_failure(exc, time.monotonic() - begun, len(progress.confirmed) - before, len(plan.window_bounds))
            if self._rank:
                self._tell_dead(haul.dead)
            else:
                self.dead += haul.dead  # told with the next resolve, which comes at once
            raise
        self._tell_dead(haul.dead)
        self.lost = 0
        self.read_s = time.monotonic() - begun
        self._progress = None
        return Cargo(record, plan, progress.landing, haul, self.layout.hash)

    def _note_failure(self, exc: MxRLError, spent: float, moved: int, total: int) -> None:
        self.read_s = spent * total / moved if moved else max(self.read_s, spent)
        if isinstance(exc, VersionGone):
            self.lost += 1
            self._progress = None

    def _tell_dead(self, agents: list[str]) -> None:
        """A death that the transport reports ends a lease at once. Told while it is news: the next word of the agent's
        owner withdraws it, and a report that comes after that word would hide a living source."""
        if not agents:
            return
        try:
            self._member.ask(Dead(policy=self._member.policy, agents=tuple(agents)), timeout=5.0)
        except RegistryLost as exc:
            log.warning("policy %s: lost agents could not be reported: %s", self._member.policy, exc)

    # ---- landings

    def _open_landing(self, nbytes: int) -> Landing:
        role = f"{self._member.policy}-r{self._rank}"
        return Landing(self._member.endpoint, role, nbytes, serve=self._serve)

    def _landing_for(self, plan: Plan) -> Landing:
        self._quarantine = [landing for landing in self._quarantine if not _retired(landing)]
        if plan.stage_nbytes > self.landing.nbytes:
            old, self.landing = self.landing, self._open_landing(plan.stage_nbytes)
            self._progress = None
            old.close()
            self.announce()
        return self.landing

    def _replace(self, landing: Landing) -> Landing:
        """The old one is never verified, installed or served again; it is closed when its last move has ended."""
        fresh = self._open_landing(landing.nbytes)
        landing.stop_serving()
        self._quarantine.append(landing)
        self.landing = fresh
        self.announce()
        return self.landing


def _retired(landing: Landing) -> bool:
    if landing.settled:
        landing.close()
        return True
    return False
