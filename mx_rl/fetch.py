"""Move one version's windows into a stage from several sources, taking over at the confirmed window when one fails."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from mx_rl.columns import Ints
from mx_rl.errors import CorruptRecord, DigestMismatch, InvalidArgument, MxRLError, PeerLost, VersionGone
from mx_rl.landing import Landing
from mx_rl.patience import Naps, Patience
from mx_rl.plan import Part, Plan
from mx_rl.records import PACKING, EndpointRecord, Holder, Source, VersionRecord
from mx_rl.transport.base import Flow, Windows
from mx_rl.windows import make_windows

log = logging.getLogger("mx_rl")


@dataclass(frozen=True)
class Supplier:
    """One source and the windows of the stage that it can fill. ``part`` None: a peer, whose stage equals ours.

    Suppliers of one ``group`` hold the same boxes, and share its windows; of peers each is a group of its own.
    """

    label: str
    source: Source
    first: int
    last: int  # exclusive
    part: Part | None
    group: tuple[str, int]

    @property
    def windows(self) -> range:
        return range(self.first, self.last)

    @property
    def giver(self) -> Giver:
        return (self.source.agent, self.first)


def suppliers(
    plan: Plan, record: VersionRecord, holders: Sequence[Holder], rank: int, kinds: Sequence[str]
) -> list[Supplier]:
    """Who can fill which windows, in the order of ``kinds`` ("peer", "trainer"). Raises CorruptRecord where a record names
    fewer sources than it has ranks."""
    ranks = max((source.rank for part in plan.parts for source in (part, *part.copies)), default=-1) + 1
    if len(record.sources) < ranks or any(len(holder.sources) <= rank for holder in holders):
        raise CorruptRecord(
            f"version {record.number} is told with {len(record.sources)} trainer sources where {ranks} are needed, and "
            f"holders with {[len(holder.sources) for holder in holders]} sources, of which rank {rank} takes one"
        )
    total = len(plan.all_bounds)
    found: list[Supplier] = []
    for kind in kinds:
        if kind == "peer":
            found += [_peer(holder.replica, holder.sources[rank], total) for holder in holders]
        elif kind == "trainer":
            found += [
                _trainer(part, record.sources[part.rank], owner.windows.start)
                for owner in (*plan.parts, *plan.trailers)
                for part in (owner, *owner.copies)
            ]
    return found


def _peer(replica: str, source: Source, total: int) -> Supplier:
    return Supplier(f"peer:{replica}", source, 0, total, None, ("peer:" + replica, 0))


def _trainer(part: Part, source: Source, group: int) -> Supplier:
    return Supplier(f"trainer:{part.rank}", source, part.windows.start, part.windows.stop, part, ("trainer", group))


Giver: TypeAlias = tuple[str, int]
"""A supplier: its agent, and the first window that it can fill."""


@dataclass
class Progress:
    """What is confirmed of one version in one landing, and who gave it; survives a stalled attempt, so that the next one goes
    on. A window without a giver is the trailer of a rank that is gone, which others make up for."""

    identity: tuple[int, int, int]
    order: str
    landing: Landing
    confirmed: set[int] = field(default_factory=set)
    givers: dict[int, Giver] = field(default_factory=dict)

    def forget(self, givers: Container[Giver]) -> dict[int, Giver]:
        """What these gave, by window: it is to be moved again."""
        found = {window: giver for window, giver in self.givers.items() if giver in givers}
        for window in found:
            del self.givers[window]
        self.confirmed.difference_update(found)
        return found


@dataclass
class Haul:
    """What a fetch moved, for the report."""

    served_by: Counter[str] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)
    lanes: Counter[str] = field(default_factory=Counter)
    dead: list[str] = field(default_factory=list)
    retries: int = 0
    damaged: list[str] = field(default_factory=list)  # tensors that arrived with other sums than the publisher made


class Fetch:
    """One attempt. ``replace`` gives a fresh landing when bytes may still arrive late in the present one; ``moved`` is told how
    many windows are here."""

    def __init__(
        self,
        plan: Plan,
        progress: Progress,
        found: Sequence[Supplier],
        *,
        haul: Haul,
        lookup: Callable[[str], EndpointRecord],
        table: Callable[[str, str], Ints],
        replace: Callable[[Landing], Landing],
        patience: Patience,
        moved: Callable[[int], None],
    ) -> None:
        self._plan = plan
        self._progress = progress
        self._suppliers = list(found)
        self._haul = haul
        self._lookup = lookup
        self._table = table
        self._replace = replace
        self._patience = patience
        self._moved = moved
        self._flows: dict[Supplier, Flow] = {}
        self._assigned: dict[Supplier, set[int]] = {}  # windows that this supplier has been given and not confirmed
        self._moved_at: dict[Supplier, float] = {}
        self._prefix = 0

    def run(self) -> None:
        """Return when every window is confirmed.

        Raises VersionGone when a window has no source left and one of them said that the version is gone, PeerLost when
        the sources are dead, stalled or out of reach; what is confirmed by then stays in ``progress``.
        """
        self._raise_watermark()
        naps = Naps()
        try:
            self._assign(set(range(len(self._plan.all_bounds))) - self._progress.confirmed)
            while self._flows:
                self._patience.check()
                if self._step():
                    naps.over()
                    if self._patience.over:  # progress grants time, a deadline for the whole does not
                        raise PeerLost("the deadline for the whole passed while bytes arrived", peer="")
                    continue
                if self._patience.over:
                    waiting = ", ".join(sorted(supplier.label for supplier in self._flows))
                    raise PeerLost(f"the deadline passed while bytes from {waiting} were on their way", peer=waiting)
                naps.rest()
        finally:
            if not self._close_flows():
                self._isolate()

    def _step(self) -> bool:
        moved = False
        for supplier, flow in list(self._flows.items()):
            if self._flows.get(supplier) is not flow:
                continue
            try:
                confirmed = flow.step()
            except MxRLError as exc:
                self._fail(supplier, exc)
                return True
            now = time.monotonic()
            if confirmed:
                moved = True
                self._moved_at[supplier] = now
                self._confirm(supplier, confirmed)
            elif now - self._moved_at[supplier] > self._patience.stall_s:
                stalled = f"{supplier.label} moved no byte for {self._patience.stall_s} s"
                self._fail(supplier, PeerLost(stalled, peer=supplier.label))
                return True
            if flow.done:
                flow.close()
                del self._flows[supplier]
                if self._assigned[supplier]:  # given to it while it was busy
                    self._assign(self._assigned.pop(supplier))
        return moved

    def _confirm(self, supplier: Supplier, local: Sequence[int]) -> None:
        for index in local:
            window = supplier.first + index
            self._progress.confirmed.add(window)
            self._progress.givers[window] = supplier.giver
            self._assigned[supplier].discard(window)
            if window < self._plan.num_windows:  # trailers are not counted
                low, high = self._plan.window_bounds[window]
                self._haul.served_by[supplier.label] += int(high - low)
        self._raise_watermark()
        self._patience.moved()
        self._moved(len(self._progress.confirmed))

    def _raise_watermark(self) -> None:
        while self._prefix in self._progress.confirmed:
            self._prefix += 1
        if self._prefix:
            self._progress.landing.header.confirm(self._prefix)

    # ---- who gives what

    def _assign(self, wanted: set[int]) -> None:
        """Start flows for ``wanted`` at the first suppliers that have each window; copies of one part take turns."""
        while wanted:
            first = next((one for one in self._suppliers if not wanted.isdisjoint(one.windows)), None)
            if first is None:
                self._do_without(wanted)
                return
            mine = wanted.intersection(first.windows)
            wanted = wanted.difference(mine)
            copies = [one for one in self._suppliers if one.group == first.group]
            for turn, supplier in enumerate(copies):
                share = {window for window in mine if window % len(copies) == turn}
                if share:
                    wanted |= self._give(supplier, share)

    def _do_without(self, wanted: set[int]) -> None:
        """No source is left for these windows: fine where they are trailers that the others make up for."""
        progress = self._progress
        trailers = {window: part.rank for part in self._plan.trailers for window in part.windows}
        lacking = wanted | {window for window in progress.confirmed if window not in progress.givers}
        ranks = {trailers[window] for window in lacking if window in trailers}
        if not wanted.issubset(trailers) or not self._plan.proves(ranks):
            raise self._exhausted(wanted)
        progress.confirmed.update(wanted)
        self._raise_watermark()

    def _give(self, supplier: Supplier, windows: set[int]) -> set[int]:
        """Returns the windows that come back where the supplier cannot be reached."""
        self._assigned.setdefault(supplier, set()).update(windows)
        if supplier not in self._flows:
            try:
                self._start(supplier)
            except MxRLError as exc:
                self._refuse([supplier], exc)
                return self._assigned.pop(supplier)
        return set()

    def _start(self, supplier: Supplier) -> None:
        source = supplier.source
        landing = self._progress.landing
        record = self._lookup(source.agent)
        order = f"{self._progress.order}/{supplier.first}"  # one agent may be a copy of several parts
        route = landing.known(source.agent, source.region, order)
        if route is None:
            route = landing.route(record, source.region, order, self._windows(supplier, record))
        windows = sorted(self._assigned[supplier])
        self._flows[supplier] = route.start(source.generation, [window - supplier.first for window in windows])
        self._moved_at[supplier] = time.monotonic()
        self._haul.lanes[landing.link(record).lane] += 1

    def _windows(self, supplier: Supplier, record: EndpointRecord) -> Windows:
        if supplier.source.region >= len(record.regions):
            raise InvalidArgument(f"{supplier.label} names region {supplier.source.region} of {len(record.regions)}")
        region = record.regions[supplier.source.region]
        order = PACKING if supplier.part is not None else self._plan.world_hash
        source = self._table(record.agent, order) if region.extents else region.address
        return make_windows(self._plan, supplier.part, stage=self._progress.landing.place, source=source)

    def _fail(self, supplier: Supplier, error: MxRLError) -> None:
        """Take the supplier's process out and give its open windows to another; if bytes may come late, leave the landing
        first."""
        agent = supplier.source.agent
        these = [one for one in self._suppliers if one.source.agent == agent]  # one for each part that it has
        clean = all([flow.close() for flow in (self._flows.pop(one, None) for one in these) if flow is not None])
        lost = {window for one in these for window in self._assigned.pop(one, ())}
        self._refuse(these, error)
        if not clean:
            self._assigned.clear()
            self._close_flows()
            self._isolate()
            lost = set(range(len(self._plan.all_bounds))) - self._progress.confirmed
        elif isinstance(error, PeerLost):
            self._progress.landing.drop(agent)
        self._assign(lost)

    def _refuse(self, these: Sequence[Supplier], error: MxRLError) -> None:
        label, agent = these[0].label, these[0].source.agent
        log.warning("%s is out: %s", label, error)
        self._haul.refused[label] = f"{type(error).__name__}: {error}"
        self._haul.retries += 1
        if isinstance(error, PeerLost) and agent not in self._haul.dead:
            self._haul.dead.append(agent)
        self._suppliers = [one for one in self._suppliers if one not in these]

    def _exhausted(self, wanted: set[int]) -> MxRLError:
        reasons = (
            "; ".join(f"{label}: {reason}" for label, reason in self._haul.refused.items()) or "no source was named"
        )
        text = f"{len(wanted)} of {len(self._plan.all_bounds)} windows have no source left ({reasons})"
        kinds = {reason.partition(":")[0] for reason in self._haul.refused.values()}
        if "VersionGone" in kinds:
            return VersionGone(text, version=self._progress.identity[2])
        if kinds == {"DigestMismatch"}:
            return DigestMismatch(text, version=self._progress.identity[2], tensors=list(self._haul.damaged))
        return PeerLost(text, peer="")

    # ---- late bytes

    def _close_flows(self) -> bool:
        clean = True
        for flow in self._flows.values():
            clean &= flow.close()
        self._flows.clear()
        return clean

    def _isolate(self) -> None:
        """A posted move owns its target until it is seen to end: fence it off, or go on in another stage with a copy of
        what is confirmed (late bytes belong to windows that are not)."""
        landing = self._progress.landing
        if landing.fence():
            return
        fresh = self._replace(landing)
        fresh.header.begin()
        if landing.table is not None:
            self._progress.confirmed.clear()  # it lies in an order of its own: all of it is moved again
            self._progress.givers.clear()
        for window in self._progress.confirmed:
            low, high = self._plan.all_bounds[window]
            fresh.block[low:high].copy_(landing.block[low:high])
        self._progress.landing = fresh
        self._prefix = 0
        self._raise_watermark()
