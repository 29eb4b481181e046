"""Plans: the byte runs that fill one rank's stage from a world's arenas. Pure, made once per pair of layouts.

A stage is laid out in plan order: by the owner of each box, owners rotated to begin at a number from the target's hash
(so that the ranks of a replica start at different sources), inside an owner by the set of ranks that hold the box, then by
arena offset. A part is what one such set holds, so that whichever of its ranks dies, another fills the same windows.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mx_rl.columns import Ints, groups, ints
from mx_rl.errors import InvalidArgument, layout_mismatch
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.pieces import AliasCheck, Cuttings, Destination, Links, Piece, Pieces, find_pieces
from mx_rl.runs import byte_runs, cut
from mx_rl.table import ALIGN, DTYPE_NAMES, widen
from mx_rl.tensors import matches, patterns
from mx_rl.trailer import SUM_BYTES, boxes_at, trailer_offset

__all__ = ["AliasCheck", "Destination", "Part", "Piece", "Pieces", "Plan", "make_plan"]


MAX_COPIES = 4
"""Ranks that a part may be read from: its owner and so many others less one, spread over those that hold it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """What is read from one trainer rank. Offsets count from the start of the stage and of that rank's arena."""

    rank: int
    windows: range  # of the plan
    runs: Ints  # [n, 3]: stage offset, source offset, nbytes; grouped by window
    starts: Ints  # window i of the part is runs[starts[i]:starts[i + 1]]
    needs: Ints  # per window: how many of the source's windows must be confirmed
    copies: tuple[Part, ...] = ()  # the same windows from other ranks that hold the same boxes

    @property
    def nbytes(self) -> int:
        return int(self.runs[:, 2].sum())


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """How one target rank's stage is filled and taken apart. A pure function of (world, target, window_bytes)."""

    world_hash: str
    target_hash: str
    window_bytes: int
    stage_nbytes: int
    pieces: Pieces
    alias_checks: tuple[AliasCheck, ...]
    parts: tuple[Part, ...]  # in stage order: only owners of what is read
    window_bounds: Ints  # [windows, 2]: stage bytes (lo, hi) of each window of the plan

    @property
    def num_windows(self) -> int:
        return len(self.window_bounds)

    @cached_property
    def trailers(self) -> tuple[Part, ...]:
        """What comes behind the pieces: the trailers of all ranks that a piece may be read from, by rank. Not all are needed:
        see ``proves``."""
        ranks = sorted({source.rank for part in self.parts for source in (part, *part.copies)})
        if not ranks:
            return ()
        counts = boxes_at(self.pieces.world)
        begin, window, found = trailer_offset(self.stage_nbytes), self.num_windows, []
        for rank in ranks:
            source = trailer_offset(self.pieces.world.rank_nbytes(rank))
            runs, starts, needs, _ = cut(ints([[begin, source, SUM_BYTES * counts[rank]]]), self.window_bytes)
            windows = range(window, window + len(needs))
            found.append(Part(rank=rank, windows=windows, runs=runs, starts=starts, needs=needs))
            begin, window = trailer_offset(begin + SUM_BYTES * int(counts[rank])), windows.stop
        return tuple(found)

    def proves(self, without: Collection[int]) -> bool:
        """The trailers tell the sum of every box, also without those of these ranks: of a box that several hold one will
        do."""
        return all(any(one.rank not in without for one in (part, *part.copies)) for part in self.parts)

    @cached_property
    def all_bounds(self) -> Ints:
        """``window_bounds``, and those of the trailers."""
        rows = [(int(run[0]), int(run[0] + run[2])) for part in self.trailers for run in part.runs]
        return np.concatenate([self.window_bounds, ints(rows).reshape(-1, 2)])

    @property
    def landing_nbytes(self) -> int:
        """Of the stage and the trailers behind it."""
        return int(self.all_bounds[-1, 1]) if len(self.all_bounds) else 0

    @cached_property
    def trailer_begin(self) -> int:
        return int(self.trailers[0].runs[0, 0]) if self.trailers else self.stage_nbytes

    @cached_property
    def num_runs(self) -> int:
        return sum(len(part.runs) for part in self.parts)

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes in runs: the payload and the padding that travels inside a run."""
        return sum(part.nbytes for part in self.parts)

    @cached_property
    def model_bytes(self) -> int:
        """Bytes of the payload."""
        return int(self.pieces.nbytes.sum())


def make_plan(
    world: WorldLayout,
    target: RankLayout,
    *,
    window_bytes: int,
    replica: Sequence[RankLayout] = (),
    strict: bool = True,
    allow_missing: str | Sequence[str] = (),
) -> Plan:
    """Plan how ``target``, one of the ranks of ``replica`` (default: the only one), is filled from ``world``.

    Names are compared over all ranks of the replica first. Raises one LayoutMismatch for: names that the world lacks
    (but for fnmatch patterns in ``allow_missing``; those tensors are left as they are), names of the world that no rank
    takes (only if ``strict``; an alias counts as taken with either name), other shapes, other dtypes.
    ``window_bytes`` is a multiple of 64.
    """
    if window_bytes < ALIGN or window_bytes % ALIGN:
        raise InvalidArgument(f"window_bytes={window_bytes}: takes a multiple of {ALIGN}")
    links = _link(world, target, replica, strict=strict, allow_missing=patterns("allow_missing", allow_missing))
    found = find_pieces(world, target, links)
    pieces, itemsize = found.pieces, world.table.itemsize[found.pieces.tensor]
    part_of = found.rank * len(world.copy_sets) + found.copies
    parts: list[Part] = []
    bounds = [np.zeros((0, 2), np.int64)]
    edges = [*np.flatnonzero(groups(part_of)).tolist(), len(part_of)]
    owner, runs = byte_runs(part_of, pieces.offset, found.source, pieces.size, found.whole, itemsize)
    ends = [*np.flatnonzero(groups(owner)).tolist(), len(owner)]
    done = 0
    for (begin, end), (first, last) in zip(itertools.pairwise(ends), itertools.pairwise(edges), strict=True):
        rows, starts, needs, cuts = cut(runs[begin:end], window_bytes)
        windows = range(done, done + len(needs))
        copies = _copies(world, found, slice(first, last), windows, window_bytes)
        rank = int(found.rank[first])
        parts.append(Part(rank=rank, windows=windows, runs=rows, starts=starts, needs=needs, copies=copies))
        bounds.append(cuts)
        done = windows.stop
    window_bounds = np.concatenate(bounds)
    return Plan(
        world_hash=world.hash,
        target_hash=target.hash,
        window_bytes=window_bytes,
        stage_nbytes=int(window_bounds[-1, 1]) if done else 0,
        pieces=pieces,
        alias_checks=found.alias_checks,
        parts=tuple(parts),
        window_bounds=window_bounds,
    )


def _copies(world: WorldLayout, found: Cuttings, these: slice, windows: range, window_bytes: int) -> tuple[Part, ...]:
    """The windows of these pieces as other ranks can fill them."""
    others = world.copy_sets[int(found.copies[these.start])][1:]
    wanted = min(len(others), MAX_COPIES - 1)
    tensor, row = found.pieces.tensor[these], found.row[these]
    itemsize = world.table.itemsize[tensor]
    parts = []
    for turn in range(wanted):
        rank = others[len(others) * (2 * turn + 1) // (2 * wanted)]
        source = world.offset_at(tensor, world.patterns.rows_at(row, rank)) + found.first[these]
        _, runs = byte_runs(
            found.rank[these],
            found.pieces.offset[these],
            source,
            found.pieces.size[these],
            found.whole[these],
            itemsize,
        )
        rows, starts, needs, _ = cut(runs, window_bytes)
        parts.append(Part(rank=rank, windows=windows, runs=rows, starts=starts, needs=needs))
    return tuple(parts)


def _link(
    world: WorldLayout,
    target: RankLayout,
    replica: Sequence[RankLayout],
    *,
    strict: bool,
    allow_missing: Sequence[str],
) -> Links:
    """Compare names, shapes and dtypes of all ranks of a replica with the world's; returns the target's links."""
    problems: dict[str, dict[str, str]] = {kind: {} for kind in ("missing", "unexpected", "shapes", "dtypes")}
    taken = np.zeros(len(world.names), np.bool_)
    seen: set[tuple[object, ...]] = set()
    found: Links | None = None
    for layout in (target, *replica):
        table = layout.table
        same = (table.names, tuple(table.aliases.items()), table.shape.tobytes(), table.dtype.tobytes())
        if same in seen:  # the ranks of a replica most often differ in their boxes only
            continue
        seen.add(same)
        links, missing = find_links(world, layout)
        problems["missing"].update((name, name) for name in missing if not matches(name, allow_missing))
        taken[links.world] = True
        _compare(world, layout, links, problems)
        found = found or links
    assert found is not None  # the target was first
    if strict and not taken.all():
        names_of: dict[str, list[str]] = {world.names[row]: [world.names[row]] for row in np.flatnonzero(~taken)}
        for alias, name in world.aliases.items():
            if name in names_of:
                names_of[name].append(alias)
        problems["unexpected"] = {name: name for names in names_of.values() for name in names}
    if any(problems.values()):
        raise layout_mismatch(
            "the publisher's tensors and this replica's do not fit",
            "Map names with shards(rename=...), leave some out with allow_missing= or strict=False, and give the"
            " publisher wire_dtype= to send another dtype",
            **{kind: lines.values() for kind, lines in problems.items()},
        )
    return found


def find_links(world: WorldLayout, layout: RankLayout) -> tuple[Links, list[str]]:
    """(the links of one rank, names that have none). Storage with several names is filled by the first that is known."""
    index = world.table.index
    others: dict[str, list[str]] = {}
    for alias, name in layout.aliases.items():
        others.setdefault(name, []).append(alias)
    rows: list[tuple[int, int, bool]] = []
    missing: list[str] = []
    for row, name in enumerate(layout.names):
        group = (name, *others.get(name, ()))
        known = dict.fromkeys(index[member] for member in group if member in index)
        rows.extend((row, to, first == 0) for first, to in enumerate(known))
        if not known:
            missing.extend(group)
    columns = ints(rows).reshape(-1, 3).T
    return Links(tensor=columns[0], world=columns[1], taken=columns[2] == 1), missing


def _compare(world: WorldLayout, layout: RankLayout, links: Links, problems: dict[str, dict[str, str]]) -> None:
    """Note shapes and dtypes that differ, by name."""
    ours, theirs = layout.table, world.table
    width = max(ours.shape.shape[1], theirs.shape.shape[1])
    a, b = links.tensor, links.world
    differs = (widen(ours.shape, width, 1)[a] != widen(theirs.shape, width, 1)[b]).any(axis=1)
    for i in np.flatnonzero(differs | (ours.ndim[a] != theirs.ndim[b])).tolist():
        name = ours.names[a[i]]
        text = f"{name}: published as {theirs.shape_of(int(b[i]))}, wanted as {ours.shape_of(int(a[i]))}"
        problems["shapes"].setdefault(name, text)
    for i in np.flatnonzero(ours.dtype[a] != theirs.dtype[b]).tolist():
        name = ours.names[a[i]]
        text = f"{name}: {DTYPE_NAMES[theirs.dtype[b[i]]]} on the wire, {DTYPE_NAMES[ours.dtype[a[i]]]} here"
        problems["dtypes"].setdefault(name, text)
