"""A rollout rank's stage: the plan for a version, and the move of its bytes into the landing.

plan (cached) -> move (transport): everything here may fail without a live byte having changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mx_rl.addresses import encode_table, memory_of, packing_rows
from mx_rl.digest import warm
from mx_rl.direct import DirectStage
from mx_rl.doubt import move_proved
from mx_rl.endpoint import Member, Served, seat_key
from mx_rl.errors import DigestMismatch, InvalidArgument, MxRLError, RegistryLost, VersionGone
from mx_rl.fetch import Fetch, Haul, Progress, Supplier, suppliers
from mx_rl.install import Work
from mx_rl.landing import Landing
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.live import Live
from mx_rl.parcels import everything
from mx_rl.patience import Patience
from mx_rl.plan import Plan, make_plan
from mx_rl.proof import Proof, Wrong
from mx_rl.records import Dead, ReplicaSeats, Round, Source, VersionRecord, encode, table_key
from mx_rl.reports import MemoryReport
from mx_rl.stage import PlanStage, Stage
from mx_rl.swap import SwapStage
from mx_rl.tensors import Shard, Tensors, layout_tensors, only_declared, patterns, resolve

log = logging.getLogger("mx_rl")


@dataclass
class Cargo:
    """A version that lies whole in a landing."""

    record: VersionRecord
    plan: Plan
    landing: Landing
    haul: Haul
    layout: str  # hash of the rank layout that it was planned for
    proof: Proof | None = None  # None: not to be verified
    balance: int | None = None  # see ``proof.py``
    seconds: dict[str, float] = field(default_factory=dict)

    live: Live | None = None  # peers read the live tensors, once it is installed

    @property
    def unproved(self) -> tuple[str, ...]:
        """The first of the tensors that could not be verified."""
        if self.proof is None:
            return ()
        return (self.proof.unproved if self.landing.on_host else tuple(self.plan.pieces.world.names))[:100]

    @property
    def source(self) -> Source | None:
        """Where peers may read it, until the next version begins to land there."""
        if self.live is not None:
            return self.live.source
        served = self.landing.served
        if served is None:
            return None
        return Source(agent=served.name, region=0, generation=self.landing.header.generation)


class _Install(Work):
    """Peers read nothing while live memory changes; with a direct stage the bytes move now."""

    def __init__(
        self, work: Work, live: Live | None, move: Callable[[], None] | None, done: Callable[[], None]
    ) -> None:
        self._work = work
        self._live = live
        self._move = move
        self._done = done

    def run(self) -> None:
        if self._live is not None:
            self._live.close_reading()
        if self._move is not None:
            self._move()
        self._work.run()
        self._done()


class Staging:
    """One a subscriber: where versions wait (``stage``, ``swap``) and what peers read (``serve``). ``lost`` and ``read_s``
    (versions lost in a row, seconds of a whole read) go with a resolve.

    ``layout`` None: every tensor of the publisher, whole. ``only_streams``: there is no memory to install into, and the stage
    is allocated with the first version.
    """

    def __init__(
        self,
        member: Member,
        rank: int,
        tensors: Tensors | None,
        *,
        sources: Sequence[str],
        stage: str,
        serve: str,
        swap: bool,
        strict: bool,
        allow_missing: Sequence[str],
        verify: bool = True,
    ) -> None:
        self.only_streams = only_declared(tensors)
        if self.only_streams and (stage == "none" or swap or serve == "live"):
            raise InvalidArgument(
                f"stage={stage!r}, serve={serve!r}, swap={swap} without tensors that have memory: what only streams takes "
                'stage="device", serve="stage" or "off", swap=False'
            )
        targets = resolve(tensors) if tensors is not None and not self.only_streams else {}
        self.layout: RankLayout | None = RankLayout.of(targets)
        if self.only_streams:
            self.layout = None if tensors is None else RankLayout.of(layout_tensors(tensors))
        self.lost = 0
        self.read_s = 0.0
        self.dead: list[str] = []
        self._member = member
        self._rank = rank
        self._sources = tuple(sources)
        self._tensors = tensors
        self._serve = serve
        self._strict = strict
        self._verify = verify
        if verify and self.layout is not None:
            warm(self.layout.nbytes)
        self._allow_missing = patterns("allow_missing", allow_missing)  # one string is one pattern
        self._progress: Progress | None = None
        self._plans: dict[tuple[str, ...], tuple[Plan, Proof | None]] = {}
        self._world: tuple[str, bytes] | None = None  # the world layout that was planned from last
        self._tables: dict[str, bytes] = {}  # run tables of our stages, as told
        if stage == "none" or serve == "live":
            packing_rows(
                RankLayout.of(targets), targets
            )  # refuses memory in too many pieces now, not at the first install
        del targets  # or nothing could be swapped
        self.stage = self._open_stage(stage, swap)
        self.live: Live | None = None
        if serve == "live":
            try:
                self.live = Live(member, f"{member.policy}-r{rank}", self._resolve())
            except BaseException:
                self.stage.close()
                raise

    def _resolve(self) -> dict[str, tuple[Shard, ...]]:
        assert self._tensors is not None
        return resolve(self._tensors)

    @property
    def streams(self) -> bool:
        """What is staged lies in plan order, and nobody is told that live tensors hold it."""
        return isinstance(self.stage, PlanStage) and self.live is None

    @property
    def landing(self) -> Landing:
        return self.stage.landing

    @property
    def served(self) -> tuple[Served, ...]:
        """What peers may read."""
        live = self.live.served if self.live is not None else None
        return (*self.stage.served, live) if live is not None else self.stage.served

    @property
    def serves_on(self) -> bool:
        """Peers may read what is installed while the next version comes in: it does not lie where that is brought."""
        return self.live is not None or isinstance(self.stage, SwapStage)

    @property
    def registered_bytes(self) -> int:
        landings = sum(landing.total_bytes for landing in (*self.stage.quarantine, *self.stage.landings))
        return landings + (self.live.total_bytes if self.live is not None else 0)

    @property
    def layout_name(self) -> str:
        """The layout's hash, "" for the publisher's names."""
        return self.layout.hash if self.layout is not None else ""

    @property
    def memory(self) -> MemoryReport:
        landings, kept = self.stage.landings, self.stage.quarantine
        room = 0 if self.stage.direct else sum(landing.nbytes for landing in landings)
        swaps = isinstance(self.stage, SwapStage)
        memory = memory_of(self._tensors) if self._tensors is not None and not self.only_streams else []
        own = [(at, n) for at, n in memory if not any(landing.owns(at) for landing in landings)]
        swapped = self.stage.swapped_bytes
        return MemoryReport(
            stage_bytes=0 if swaps else room,
            swap_bytes=room if swaps else 0,
            live_bytes=sum(nbytes for _, nbytes in own),
            headers_bytes=self.registered_bytes - room - sum(landing.total_bytes for landing in kept),
            quarantine_bytes=sum(landing.total_bytes for landing in kept),
            swapped_bytes=swapped,
            copied_bytes=0 if self.stage.direct or self.only_streams else self._installed_bytes - swapped,
        )

    @property
    def _installed_bytes(self) -> int:
        return int(self.layout.boxes.nbytes.sum()) if self.layout is not None else 0

    def announce(self, *, replaces: Sequence[str] = ()) -> None:
        if self.layout is not None:
            self._member.put(self.layout.hash, self.layout.encode(), replaces=replaces)
        for served in self.served:
            record = encode(served.record)
            self._member.put(served.name, record, replaces=replaces if self.layout is None else ())
            self._member.put(seat_key(self._member.incarnation), record)
        for key, table in self._tables.items():
            self._member.put(key, table)
        if self.live is not None:
            self.live.announce()

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
        plan, proof = self._planned(told.record, seats)
        cargo = Cargo(told.record, plan, self.landing, Haul(), self.layout_name, live=self.live, proof=proof)
        cargo.seconds["plan"] = time.monotonic() - begun
        if self.live is not None and not told.ahead:  # ahead of a call, user code that gives tensors is not called
            self.live.follow(plan, self._resolve())
        if not self.stage.direct:
            planned = time.monotonic()
            self._move(told, cargo, patience, moved)
            cargo.seconds["move"] = time.monotonic() - planned - cargo.seconds.get("verify", 0.0)
        return cargo

    def prepare(self, told: Round, cargo: Cargo, patience: Patience, moved: Callable[[int], None]) -> Work:
        """The install of what was loaded; all that can be refused is refused here. With a direct stage ``run`` moves the
        bytes, and may fail for all reasons that a move has."""
        plan, live = cargo.plan, self.live
        work = self.stage.prepare(plan, cargo.landing)
        if live is not None:
            live.follow(plan, self._resolve())

        def move() -> None:
            # The vote is given: what is left of the call's time must not end a move whose source is well.
            self._move(told, cargo, patience.extended(2 * patience.stall_s), moved)

        return _Install(
            work,
            live,
            move if self.stage.direct else None,
            (lambda: live.open(plan, self._resolve(), cargo.landing.trailers(plan)))
            if live is not None
            else lambda: None,
        )

    def close_reading(self) -> None:
        """Live weights are not to be read any more, until the next install or ``reopen``."""
        if self.live is not None:
            self.live.close_reading()

    def reopen(self) -> Source | None:
        """Nothing has touched the live weights since ``close_reading``: where peers may read them again."""
        return self.live.reopen(self._resolve()) if self.live is not None else None

    def release_live(self) -> None:
        """The live tensors are about to move or to go: nobody reads or fills them until the next install."""
        if self.live is not None:
            self.live.close()
        if isinstance(self.stage, DirectStage):
            self.stage.release()

    def close(self) -> None:
        self.stage.close()
        if self.live is not None:
            self.live.close()

    def take_dead(self) -> tuple[str, ...]:
        """Agents that were found dead since the last call, to be told with a resolve."""
        dead, self.dead = tuple(self.dead), []
        return dead

    # ---- plan

    def plan(self, record: VersionRecord, seats: ReplicaSeats | None) -> Plan:
        return self._planned(record, seats)[0]

    def _planned(self, record: VersionRecord, seats: ReplicaSeats | None) -> tuple[Plan, Proof | None]:
        replica = seats.layouts if seats is not None else (self.layout_name,)
        key = (record.layout, self.layout_name, str(record.window_bytes), *replica)
        found = self._plans.get(key)
        if found is None:
            world = self._blobs([record.layout], "world layout")[0]
            self._world = (record.layout, world)
            decoded = WorldLayout.decode(world)
            told = sorted({name for name in replica if name})
            blobs = self._blobs(told, "layout of the replica")
            layouts = {name: RankLayout.decode(data) for name, data in zip(told, blobs, strict=True)}
            plan = make_plan(
                decoded,
                self.layout if self.layout is not None else everything(decoded),
                window_bytes=record.window_bytes,
                replica=list(layouts.values()),
                strict=self._strict and all(replica),  # a rank without a layout of its own takes every name
                allow_missing=self._allow_missing,
            )
            by_rank = [layouts[name] if name else plan.pieces.target for name in replica]
            rank = self._rank if len(by_rank) > 1 else 0
            found = plan, Proof(plan, rank, by_rank) if self._verify else None
            self._plans = {key: found}
        return found

    def _blobs(self, names: Sequence[str], what: str) -> list[bytes]:
        found = self._member.blobs(sorted(set(names)))
        for name in names:
            if name not in found:
                raise VersionGone(f"the {what} {name} has left the registry with the rank that put it", version=None)
        return [found[name] for name in names]

    # ---- move

    def _move(self, told: Round, cargo: Cargo, patience: Patience, moved: Callable[[int], None]) -> None:
        record, plan = cargo.record, cargo.plan
        landing = self._landing_for(plan)
        if self.stage.direct:
            self._progress = None  # whatever came before, the engine may have changed it since
        order = f"{record.layout}/{plan.target_hash}/{record.window_bytes}"
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
        haul = cargo.haul

        def fetch(chosen: Sequence[Supplier]) -> None:
            Fetch(
                plan,
                progress,
                chosen,
                haul=haul,
                lookup=self._member.endpoint_record,
                table=self._member.run_table,
                replace=lambda landing: self._replace(landing, plan),
                patience=patience,
                moved=moved,
            ).run()

        begun, before = time.monotonic(), len(progress.confirmed)
        try:
            move_proved(plan, found, progress, haul, fetch, lambda: self._check(cargo, progress.landing, patience))
        except MxRLError as exc:
            self._note_failure(exc, time.monotonic() - begun, len(progress.confirmed) - before, len(plan.all_bounds))
            if self._rank:
                self._tell_dead(haul.dead)
            else:
                self.dead += haul.dead  # told with the next resolve, which comes at once
            raise
        self._tell_dead(haul.dead)
        self.lost = 0
        self.read_s = time.monotonic() - begun
        self._progress = None
        cargo.landing = progress.landing

    def _check(self, cargo: Cargo, landing: Landing, patience: Patience) -> Sequence[Wrong]:
        if cargo.proof is None or not landing.on_host:
            return ()
        begun = time.monotonic()
        verdict = cargo.proof.check(landing.place, cargo.record.proofs)
        cargo.balance = verdict.balance
        cargo.seconds["verify"] = cargo.seconds.get("verify", 0.0) + time.monotonic() - begun
        patience.moved()
        return verdict.wrong

    def _note_failure(self, exc: MxRLError, spent: float, moved: int, total: int) -> None:
        self.read_s = spent * total / moved if moved else max(self.read_s, spent)
        if isinstance(exc, VersionGone):
            self.lost += 1
        if isinstance(exc, (VersionGone, DigestMismatch)):
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

    def _open_stage(self, stage: str, swap: bool) -> Stage:
        tensors: Tensors = self._tensors if self._tensors is not None else {}
        role = f"{self._member.policy}-r{self._rank}"
        endpoint, serve = self._member.endpoint, self._serve == "stage"
        if stage == "none":
            return DirectStage(lambda x, n: Landing(endpoint, role, n, serve=False, extents=x), tensors)
        if swap:
            assert self.layout is not None
            return SwapStage(lambda n: Landing(endpoint, role, n, serve=serve, scattered=True), self.layout, tensors)
        packed = self.layout.nbytes if self.layout is not None and not self.only_streams else 0
        return PlanStage(lambda n: Landing(endpoint, role, n, serve=serve), packed, tensors)

    def _landing_for(self, plan: Plan) -> Landing:
        before = self.stage.served
        landing = self.stage.landing_for(plan)
        if self._progress is not None and self._progress.landing is not landing:
            self._progress = None
        self._tell(landing, plan, before)
        return landing

    def _replace(self, landing: Landing, plan: Plan) -> Landing:
        before = self.stage.served
        fresh = self.stage.replace(landing)
        self._tell(fresh, plan, before)
        return fresh

    def _tell(self, landing: Landing, plan: Plan, before: tuple[Served, ...]) -> None:
        """Peers can read what lies in this landing once they know its agent and, where it has one, its run table."""
        now = self.stage.served
        gone = [served.name for served in before if served not in now]
        fresh = any(served not in before for served in now)
        if landing.served is not None and landing.table is not None:
            key = table_key(landing.served.name, plan.world_hash)
            if key not in self._tables:
                others = tuple(f"{served.name}/" for served in now if served is not landing.served)
                gone += [old for old in self._tables if not old.startswith(others)]
                self._tables = {old: data for old, data in self._tables.items() if old not in gone}
                self._tables[key] = encode_table(landing.table)
                fresh = True
        if fresh:
            self.announce(replaces=gone)
