"""Shares: which of its boxes each rank of a world snapshots, where several ranks hold the same. Pure.

A box that several ranks hold is snapshotted by two of them. The boxes of one set of holders H are split, in natural order
and by bytes, into as many groups as H has ranks; group g goes to H[g] and to the rank half-way round H from it, which on
most clusters is another host. The others keep no copy; each box is compared with the live one of one of them every 64th
version, all of them in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mx_rl.columns import Ints, expand, groups, ints, starts_of
from mx_rl.errors import InvalidArgument
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.table import widen

CHECK_EVERY = 64
"""Versions between two comparisons of a box with a rank that keeps no copy of it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Share:
    """One rank's part. A box that several ranks hold has one number in the whole world."""

    layout: RankLayout  # what it snapshots: the whole layout itself where nothing is left to others
    rows: Ints  # by number: the box's row in this rank's layout, in the share as in the whole; -1 where it holds none
    partners: dict[int, Ints]  # by rank: numbers of the boxes that both snapshot, ascending


class Shares:
    """Of a world whose layout names everything that its ranks hold."""

    def __init__(self, world: WorldLayout) -> None:
        patterns = world.patterns
        sizes = ints([len(ranks) for ranks in patterns.copy_sets])
        flat = ints([rank for ranks in patterns.copy_sets for rank in ranks])
        # Every box with several holders once, by tensor, then by row.
        rows = patterns.owned[sizes[patterns.copy_set[patterns.owned]] > 1]
        starts = np.searchsorted(rows, patterns.starts).astype(np.int64)
        counts = np.diff(starts)[world.pattern_of]
        tensor, position = expand(counts)
        row = rows[starts[world.pattern_of[tensor]] + position]
        holders = patterns.copy_set[row]
        nbytes = patterns.size[row].prod(axis=1) * world.table.itemsize[tensor]
        size, start = sizes[holders], starts_of(sizes)[:-1][holders]
        group = _groups(holders, nbytes, size)
        self.first = flat[start + group]
        self.second = flat[start + (group + size // 2) % size]
        self._flat, self._start, self._size, self._group = flat, start, size, group
        self._tensor = tensor
        self._world = world
        self._place = np.full(
            len(patterns.rank), -1, np.int64
        )  # of a pattern's row, among those that have several holders
        self._place[rows] = np.arange(len(rows)) - starts[patterns.of_row[rows]]
        self._place = self._place[patterns.owner_row]
        self._begin = starts_of(counts)[:-1]

    def of(self, rank: int, layout: RankLayout) -> Share:
        """``layout``: all that ``rank`` holds. Raises InvalidArgument where the world knows another one."""
        tensor, row, own = self._rows_of(rank, layout)
        box = np.where(self._place[row] < 0, -1, self._begin[tensor] + self._place[row])
        shared = np.flatnonzero(box >= 0)
        first, second = self.first[box[shared]], self.second[box[shared]]
        mine = (first == rank) | (second == rank)
        if not mine.all():
            kept = np.ones(len(layout.boxes), np.bool_)
            kept[own[shared[~mine]]] = False
            layout = layout.only(kept)
        rows = np.full(len(self.first), -1, np.int64)
        rows[box[shared]] = own[shared]  # of a box that this rank holds twice one counts
        numbers, at = np.unique(box[shared[mine]], return_index=True)
        return Share(layout=layout, rows=rows, partners=_by_rank((first + second - rank)[mine][at], numbers))

    def checks(self, rank: int, k: int) -> tuple[dict[int, Ints], dict[int, Ints]]:
        """Numbers of the boxes that are compared in the k-th publish between a rank that keeps no copy and the first one
        that does: (``rank`` keeps none, by the other's rank; it keeps one, by the other's rank)."""
        box = np.arange(k % CHECK_EVERY, len(self.first), CHECK_EVERY)
        box = box[self._size[box] > 2]
        size = self._size[box]
        turn = 1 + (k // CHECK_EVERY + box) % (size - 2)
        turn += turn >= size // 2  # past the second copy
        witness = self._flat[self._start[box] + (self._group[box] + turn) % size]
        without, holding = witness == rank, self.first[box] == rank
        return _by_rank(self.first[box[without]], box[without]), _by_rank(witness[holding], box[holding])

    def between(self, one: int, two: int, k: int) -> Ints:
        """Numbers of the boxes that two ranks compare in the k-th publish: those that both snapshot, then the checks."""
        both = ((self.first == one) & (self.second == two)) | ((self.first == two) & (self.second == one))
        none = np.zeros(0, np.int64)
        without, holding = (found.get(two, none) for found in self.checks(one, k))
        return np.concatenate([np.flatnonzero(both), without, holding])

    def names(self, boxes: Ints) -> list[str]:
        return [self._world.names[tensor] for tensor in self._tensor[boxes].tolist()]

    def _rows_of(self, rank: int, layout: RankLayout) -> tuple[Ints, Ints, Ints]:
        """For every box of ``rank`` that is not empty: its tensor and row in the world, its row in ``layout``."""
        world, patterns = self._world, self._world.patterns
        rows = np.flatnonzero(patterns.rank == rank)
        starts = np.searchsorted(rows, patterns.starts).astype(np.int64)
        tensor, position = expand(np.diff(starts)[world.pattern_of])
        row = rows[starts[world.pattern_of[tensor]] + position]
        own = np.flatnonzero(layout.boxes.nbytes)
        index = world.table.index
        at = ints([index.get(name, -1) for name in layout.names])[layout.boxes.tensor[own]]
        own, at = (column[np.argsort(at, kind="stable")] for column in (own, at))
        width = patterns.lo.shape[1]
        fits = layout.boxes.lo.shape[1] <= width and np.array_equal(at, tensor)
        if not fits or not (
            np.array_equal(widen(layout.boxes.lo[own], width, 0), patterns.lo[row])
            and np.array_equal(widen(layout.boxes.size[own], width, 1), patterns.size[row])
        ):
            raise InvalidArgument(f"the layout of rank {rank} is not the one that this world was made from")
        return tensor, row, own


def _by_rank(ranks: Ints, boxes: Ints) -> dict[int, Ints]:
    return {rank: boxes[ranks == rank] for rank in np.unique(ranks).tolist()}


def _groups(holders: Ints, nbytes: Ints, size: Ints) -> Ints:
    """For every box, which of the ``size`` groups of its set of holders it is in: by where its middle lies in their bytes."""
    order = np.argsort(holders, kind="stable")
    new = groups(holders[order])
    ends = np.cumsum(nbytes[order])
    which = np.cumsum(new) - 1
    before = (ends - nbytes[order])[new][which] if len(order) else ends
    total = np.bincount(which, weights=nbytes[order])[which]
    middle = ends - before - nbytes[order] / 2
    found = np.empty(len(order), np.int64)
    found[order] = np.minimum(middle * size[order] / total, size[order] - 1).astype(np.int64)
    return found
