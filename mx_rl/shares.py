"""Shares: which of its boxes each rank of a world snapshots, where several ranks hold the same. Pure.

A box that several ranks hold is snapshotted by two of them. The boxes of one set of holders H are split, in natural order
and by bytes, into as many groups as H has ranks; group g goes to H[g] and to the rank half-way round H from it, which on
most clusters is another host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mx_rl.columns import Ints, expand, groups, ints, starts_of
from mx_rl.errors import InvalidArgument
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.table import widen


@dataclass(frozen=True, eq=False, kw_only=True)
class Share:
    """One rank's part. Rows are those of its layout's ``boxes``, the same in the share as in the whole."""

    layout: RankLayout  # what it snapshots: the whole layout itself where nothing is left to others
    partners: dict[int, Ints]  # by rank: rows of the boxes that it snapshots too, in an order that both know


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
        partner, box, own = (first + second - rank)[mine], box[shared[mine]], own[shared[mine]]
        partners: dict[int, Ints] = {}
        for other in np.unique(partner).tolist():
            these = np.flatnonzero(partner == other)
            these = these[np.argsort(box[these], kind="stable")]
            partners[other] = own[these[groups(box[these])]]  # a box that this rank holds twice counts once
        return Share(layout=layout, partners=partners)

    def names(self, one: int, two: int) -> list[str]:
        """Of the boxes that both ranks snapshot, in the order of ``Share.partners``."""
        both = ((self.first == one) & (self.second == two)) | ((self.first == two) & (self.second == one))
        return [self._world.names[tensor] for tensor in self._tensor[both].tolist()]

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
