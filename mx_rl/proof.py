"""What one rank can prove of a version that arrived: sums of its bytes, box by box, against the trailers of the publisher.

A source box that a rank takes whole it proves alone. Of a box whose parts lie at several ranks of the replica each adds the
sum of its parts to a total, and the lowest of them takes the box's own sum off: together they are 0 (``balance``). A part
that several ranks have is counted once, and the others' are compared with it in the same total. Pure but for the reading.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mx_rl.columns import Flags, Ints, groups, ints
from mx_rl.digest import Bytes, Summing, Sums, box_runs, spanned
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.patterns import overlaps
from mx_rl.pieces import Pieces, find_pieces
from mx_rl.plan import Part, Plan, find_links
from mx_rl.runs import STAGE, compose
from mx_rl.table import widen
from mx_rl.trailer import proof_of

_TWICE = np.uint64(0xC2B2AE3D27D4EB4F)
"""Odd: weighs the comparison of parts that several ranks have, so that it does not cancel what the rest adds up to."""

_LESS = np.uint64((1 << 64) - int(_TWICE))


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A box whose bytes are not those that were published (or the sums of a rank, which tell it), and where it lies."""

    name: str
    windows: tuple[int, ...]  # of the plan


@dataclass(frozen=True, kw_only=True)
class Verdict:
    wrong: tuple[Wrong, ...]
    balance: int  # modulo 2^64


@dataclass(frozen=True, eq=False)
class _Cuts:
    """Parts of source boxes that one rank takes; what is only compared is not among them."""

    box: Ints
    lo: Ints
    size: Ints

    @classmethod
    def of(cls, pieces: Pieces, which: Ints) -> _Cuts:
        return cls(pieces.box[which], pieces.lo[which], pieces.size[which])

    def only(self, kept: Flags) -> _Cuts:
        return _Cuts(self.box[kept], self.lo[kept], self.size[kept])

    def whole(self, world: WorldLayout) -> Flags:
        """Per cut: together with the others of its box it covers it, and none overlaps another."""
        box, number = np.unique(self.box, return_inverse=True)
        have = np.zeros(len(box), np.int64)
        np.add.at(have, number, self.size.prod(axis=1))
        good = have == world.box_elements(box)
        good[list(overlaps(number, self.lo, self.lo + self.size))] = False
        found: Flags = good[number]
        return found


def _taken(pieces: Pieces) -> Ints:
    return np.flatnonzero(np.diff(pieces.dest_starts))


class Proof:
    """Of one plan, of rank ``rank`` of a replica with these layouts by rank; made once, used for every version."""

    def __init__(self, plan: Plan, rank: int, replica: Sequence[RankLayout]) -> None:
        self._plan = plan
        self._pieces = pieces = plan.pieces
        world = pieces.world
        taken = _taken(pieces)
        cuts = _Cuts.of(pieces, taken)
        whole = cuts.whole(world)
        parts = cuts.only(~whole)
        factor, owned, proved = _shared(world, rank, replica, parts)
        names = [world.names[row] for row in pieces.tensor[taken[~whole][~proved]].tolist()]
        self.unproved = tuple(dict.fromkeys(names))
        """Tensors of which the replica takes a box in part only, so that its sum tells nothing."""
        # Pieces in the order in which they are summed: boxes that lie here whole, box by box, then parts.
        alone = taken[whole][np.argsort(pieces.box[taken[whole]], kind="stable")]
        shared = taken[~whole][proved]
        self._order = np.concatenate([alone, shared])
        self._alone = len(alone)
        self._first = np.flatnonzero(groups(pieces.box[alone])) if len(alone) else alone
        self._factor = factor[proved]
        self._expects = np.concatenate(
            [alone[self._first], shared[owned[proved]]]
        )  # a piece of each box whose sum is due
        begins = ints([plan.window_bounds[part.windows.start, 0] for part in plan.parts])
        self._part = np.searchsorted(begins, pieces.offset[self._expects], side="right") - 1
        self._entries: dict[tuple[int, int], Ints] = {}
        self._aimed: tuple[int | Ints, Bytes, Summing] | None = None

    def check(self, place: int | Ints, proofs: Sequence[bytes]) -> Verdict:
        """``place``: where the plan's stage lies, an address or a run table; ``proofs``: those of the version record."""
        trailers = {part.rank: self._trailer(place, part, proofs) for part in self._plan.trailers}
        expected, lost = self._expected(trailers)
        sums = self._sums(place)
        count = len(self._first)
        mine = np.add.reduceat(sums[: self._alone], self._first) if count else sums[:0]
        wrong = [Wrong(name=name, windows=windows) for name, windows in lost]
        due = expected[:count]
        known = ~np.isin(self._part[:count], ints([part for part, _ in self._unknown(trailers)]))
        bad = np.flatnonzero((mine != due) & known)
        ends = [*self._first[1:].tolist(), self._alone]
        for index in bad.tolist():
            these = self._order[self._first[index] : ends[index]]
            name = self._pieces.world.names[self._pieces.tensor[these[0]]]
            wrong.append(Wrong(name=name, windows=self._windows(these)))
        parts, owed = (self._factor * sums[self._alone :]).sum(dtype=np.uint64), expected[count:].sum(dtype=np.uint64)
        return Verdict(wrong=tuple(wrong), balance=(int(parts) - int(owed)) % (1 << 64))

    # ---- what the publisher says

    def _trailer(self, place: int | Ints, part: Part, proofs: Sequence[bytes]) -> Sums | None:
        """The sums of one rank, or None where they are not those that it committed."""
        offset, nbytes = int(part.runs[0, STAGE]), part.nbytes
        if isinstance(place, int):
            address = place + offset
        else:
            row = place[np.searchsorted(place[:, 0], offset, side="right") - 1]
            address = int(row[1] + offset - row[0])
        sums = np.frombuffer(ctypes.string_at(address, nbytes), "<u8").astype(np.uint64)
        told = proofs[part.rank] if part.rank < len(proofs) else b""
        return sums if proof_of(sums) == told else None

    def _unknown(self, trailers: dict[int, Sums | None]) -> list[tuple[int, list[int]]]:
        """Parts of the plan whose sums no trailer tells, with the ranks that could have told."""
        ranks = [[source.rank for source in (part, *part.copies)] for part in self._plan.parts]
        needed = set(np.unique(self._part).tolist())
        return [
            (index, these)
            for index, these in enumerate(ranks)
            if index in needed and all(trailers.get(rank) is None for rank in these)
        ]

    def _expected(self, trailers: dict[int, Sums | None]) -> tuple[Sums, list[tuple[str, tuple[int, ...]]]]:
        """(the sum of each box that is due, where sums that are needed lie and are not what was committed)."""
        found = np.zeros(len(self._expects), np.uint64)
        unknown = dict(self._unknown(trailers))
        windows = {part.rank: part.windows for part in self._plan.trailers}
        lost = [
            (f"the sums of trainer rank {rank}", tuple(windows[rank]))
            for rank in dict.fromkeys(rank for ranks in unknown.values() for rank in ranks)
        ]
        for index in np.unique(self._part).tolist():
            part = self._plan.parts[index]
            for source in (part, *part.copies):
                sums = trailers.get(source.rank)
                if sums is not None:
                    found[self._part == index] = sums[self._entry(index, source.rank)]
                    break
        return found, lost

    def _entry(self, part: int, rank: int) -> Ints:
        """Where the sums that are due of one part lie in the trailer of one of the ranks that hold it."""
        known = self._entries.get((part, rank))
        if known is None:
            world, these = self._pieces.world, self._expects[self._part == part]
            tensor = self._pieces.tensor[these]
            row = world.patterns.rows_at(world.row_of(tensor, self._pieces.box[these]), rank)
            known = np.searchsorted(np.sort(world.offsets[world.boxes_of(rank)]), world.offset_at(tensor, row))
            self._entries[part, rank] = known
        return known

    # ---- what is here

    def _sums(self, place: int | Ints) -> Sums:
        """Of each piece."""
        if self._aimed is None or not np.array_equal(self._aimed[0], place):
            pieces, these = self._pieces, self._order
            table, tensor = pieces.world.table, pieces.tensor[these]
            shape = widen(table.shape[tensor], pieces.size.shape[1], 1)
            size, lo = pieces.size[these], pieces.lo[these]
            runs, starts = box_runs(shape, lo, size, table.itemsize[tensor], pieces.offset[these])
            if isinstance(place, int):
                runs = runs + np.array([place, 0, 0], dtype=np.int64)
            else:
                piece = np.repeat(np.arange(len(these), dtype=np.int64), np.diff(starts))
                runs, owner = compose(runs, place, STAGE)
                starts = np.searchsorted(piece[owner], np.arange(len(these) + 1)).astype(np.int64)
            data, runs = spanned(runs)
            self._aimed = (place, data, Summing(runs, starts))
        _, data, summing = self._aimed
        return summing.run(data)

    def _windows(self, these: Ints) -> tuple[int, ...]:
        begin, end = self._pieces.offset[these], self._pieces.offset[these] + self._pieces.nbytes[these]
        bounds = self._plan.window_bounds
        first = np.searchsorted(bounds[:, 1], begin, side="right").tolist()
        last = np.searchsorted(bounds[:, 0], end, side="left").tolist()
        return tuple(sorted({window for a, b in zip(first, last, strict=True) for window in range(a, b)}))


def _shared(world: WorldLayout, rank: int, replica: Sequence[RankLayout], parts: _Cuts) -> tuple[Sums, Flags, Flags]:
    """Per part of ours: (what its sum is multiplied with, whether this rank answers for its box, once a box, whether the
    replica takes all of its box)."""
    count = len(parts.box)
    factor, owned = np.zeros(count, np.uint64), np.zeros(count, np.bool_)
    if len(replica) < 2 or not count:
        return factor, owned, np.zeros(count, np.bool_)
    cuts = [parts if other == rank else _others(world, layout, parts.box) for other, layout in enumerate(replica)]
    width = max(one.lo.shape[1] for one in cuts)
    box = np.concatenate([one.box for one in cuts])
    lo = np.concatenate([widen(one.lo, width, 0) for one in cuts])
    size = np.concatenate([widen(one.size, width, 1) for one in cuts])
    ranks = np.repeat(np.arange(len(cuts), dtype=np.int64), [len(one.box) for one in cuts])
    order = np.lexsort((ranks, *size.T, *lo.T, box))
    new = groups(box[order], lo[order], size[order])
    number = np.cumsum(new) - 1  # of the distinct part, in order
    times = np.bincount(number)
    distinct = _Cuts(box[order][new], lo[order][new], size[order][new])
    good = distinct.whole(world)
    # Back to our own parts, which are those of ``rank`` as they came.
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    mine = place[ranks == rank]
    lowest = new[mine]
    more = times[number[mine]].astype(np.uint64) - np.uint64(1)
    factor = np.where(lowest, np.uint64(1) + _TWICE * more, _LESS)
    proved = good[number[mine]]
    # The lowest rank that has a part of a box answers for its sum.
    boxes, inverse = np.unique(box, return_inverse=True)
    least = np.full(len(boxes), len(replica), np.int64)
    np.minimum.at(least, inverse, ranks)
    answers = np.flatnonzero(least[np.searchsorted(boxes, parts.box)] == rank)
    owned[answers[np.unique(parts.box[answers], return_index=True)[1]]] = True
    return factor, owned, proved


def _others(world: WorldLayout, layout: RankLayout, boxes: Ints) -> _Cuts:
    """What another rank takes of these boxes in part."""
    pieces = find_pieces(world, layout, find_links(world, layout)[0]).pieces
    cuts = _Cuts.of(pieces, _taken(pieces))
    cuts = cuts.only(np.isin(cuts.box, boxes))
    return cuts.only(~cuts.whole(world))
