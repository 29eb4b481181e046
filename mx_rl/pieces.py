"""Pieces: the boxes that a target takes out of a world's boxes, in stage order, and where each goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np

from mx_rl.columns import Flags, Ints, chunks, distinct, expand, groups, starts_of
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.patterns import Patterns
from mx_rl.runs import strides_of
from mx_rl.table import DTYPE_NAMES, align, widen


class Destination(NamedTuple):
    """Where a piece goes: box ``box`` of the target's ``name``, at index ``start`` inside that box."""

    name: str
    box: int
    start: tuple[int, ...]


class Piece(NamedTuple):
    """A box of one tensor as it lies in the stage, compact in C order."""

    name: str  # the world's canonical name
    offset: int  # bytes from the start of the stage
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    destinations: tuple[Destination, ...]  # several where two names want the same bytes, none if only compared


class AliasCheck(NamedTuple):
    """Boxes of two pieces that must be bit-equal before an install, else AliasConflict: one storage takes both names."""

    names: tuple[str, str]
    left: int  # index into Plan.pieces
    right: int
    left_start: tuple[int, ...]  # inside each piece
    right_start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Links:
    """Which tensor of the world each tensor of the target is. ``taken``: it is installed, not only compared."""

    tensor: Ints  # row in the target's table
    world: Ints  # row in the world's table
    taken: Flags


@dataclass(frozen=True, eq=False, kw_only=True)
class Pieces(Sequence[Piece]):
    """Pieces in stage order, as columns; an index or an iteration makes Piece objects."""

    world: WorldLayout
    target: RankLayout
    tensor: Ints  # [n] row in world.table
    offset: Ints
    nbytes: Ints
    lo: Ints  # [n, D], in the global tensor
    size: Ints  # [n, D]
    box: Ints  # number of the source box: its owner's entry in ``world.boxes``
    dest_starts: Ints  # [n + 1]
    dest_tensor: Ints  # row in target.table
    dest_box: Ints
    dest_start: Ints  # [destinations, D]

    def __len__(self) -> int:
        return len(self.tensor)

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> list[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | list[Piece]:
        if isinstance(index, slice):
            return list(self._make(range(*index.indices(len(self)))))
        return next(self._make([range(len(self))[index]]))

    def __iter__(self) -> Iterator[Piece]:
        return self._make(range(len(self)))

    def _make(self, which: Iterable[int]) -> Iterator[Piece]:
        names, ndim, dtype = self.world.names, self.world.table.ndim, self.world.table.dtype
        for i in which:
            tensor = int(self.tensor[i])
            dims = int(ndim[tensor])
            yield Piece(
                names[tensor],
                int(self.offset[i]),
                int(self.nbytes[i]),
                tuple(self.size[i, :dims].tolist()),
                DTYPE_NAMES[dtype[tensor]],
                tuple(
                    Destination(
                        self.target.names[self.dest_tensor[j]],
                        int(self.dest_box[j]),
                        tuple(self.dest_start[j, :dims].tolist()),
                    )
                    for j in range(int(self.dest_starts[i]), int(self.dest_starts[i + 1]))
                ),
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Cuttings:
    """The pieces of a plan and, row for row, where each comes from."""

    pieces: Pieces
    rank: Ints  # the owner of the source box
    copies: Ints  # which ranks hold equal boxes: index into WorldLayout.copy_sets
    row: Ints  # of the source box in the world's patterns
    first: Ints  # byte of the source box with which the piece begins
    source: Ints  # offset of the piece's first byte in that rank's arena
    whole: Ints  # [n, D] size of the source box
    alias_checks: tuple[AliasCheck, ...]


def find_pieces(world: WorldLayout, target: RankLayout, links: Links) -> Cuttings:
    """Intersect the target's boxes with the world's, each distinct source box once, at its owner."""
    cutting = world.patterns
    width = max(world.table.shape.shape[1], target.table.shape.shape[1])
    # One entry for each box of each link.
    link, box = expand(target.counts[links.tensor])
    row = target.starts[links.tensor[link]] + box
    held = np.flatnonzero(target.boxes.nbytes[row])
    link, box, row = link[held], box[held], row[held]
    lo, size = widen(target.boxes.lo[row], width, 0), widen(target.boxes.size[row], width, 1)
    tensor = links.world[link]
    # Tensors that are cut alike and wanted alike meet alike: intersect each such case once.
    cases, case = distinct(np.concatenate([world.pattern_of[tensor][:, None], lo, size], axis=1))
    meets = _intersect(cutting, cases, width)
    counts = np.bincount(meets.case, minlength=len(cases))
    entry, position = expand(counts[case])
    meet = starts_of(counts)[case[entry]] + position
    tensor = tensor[entry]
    first = meets.first[meet] * world.table.itemsize[tensor]
    source = world.offset_at(tensor, meets.row[meet]) + first
    rank, copies = cutting.rank[meets.row[meet]], cutting.copy_set[meets.row[meet]]
    turn = (rank - int(target.hash[:15], 16)) % world.world_size
    order = np.lexsort((source, copies, turn))
    new = groups(turn[order], source[order])
    if not new.all():  # boxes that begin at one byte: the same bytes wanted twice, or another size
        order = np.lexsort((entry, *meets.size[meet].T, source, copies, turn))
        new = groups(turn[order], source[order], meets.size[meet[order]])
    chosen = order[new]
    piece = np.empty(len(order), np.int64)
    piece[order] = np.cumsum(new) - 1
    nbytes = meets.size[meet[chosen]].prod(axis=1) * world.table.itemsize[tensor[chosen]]
    wanted = order[links.taken[link[entry[order]]]]
    pieces = Pieces(
        world=world,
        target=target,
        tensor=tensor[chosen],
        offset=starts_of(align(nbytes))[:-1],
        nbytes=nbytes,
        lo=meets.lo[meet[chosen]],
        size=meets.size[meet[chosen]],
        box=world.box_at(tensor[chosen], meets.row[meet[chosen]]),
        dest_starts=starts_of(np.bincount(piece[wanted], minlength=len(chosen))),
        dest_tensor=links.tensor[link[entry[wanted]]],
        dest_box=box[entry[wanted]],
        dest_start=meets.lo[meet[wanted]] - lo[entry[wanted]],
    )
    checks: list[AliasCheck] = []
    for compared in np.flatnonzero(~links.taken[link]).tolist():
        same = (row == row[compared]) & links.taken[link]
        left, right = np.flatnonzero(same[entry]), np.flatnonzero(entry == compared)
        checks += _compare(world, tensor, piece, meets.lo[meet], meets.size[meet], left, right)
    return Cuttings(
        pieces=pieces,
        rank=rank[chosen],
        copies=copies[chosen],
        row=meets.row[meet[chosen]],
        first=first[chosen],
        source=source[chosen],
        whole=widen(cutting.size[meets.row[meet[chosen]]], width, 1),
        alias_checks=tuple(checks),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class _Meets:
    """Intersections of cases with the owned boxes of their pattern, by case."""

    case: Ints
    row: Ints  # of the source box in the patterns
    lo: Ints
    size: Ints
    first: Ints  # element of the source box with which it begins


def _intersect(cutting: Patterns, cases: Ints, width: int) -> _Meets:
    pattern, lo, hi = cases[:, 0], cases[:, 1 : width + 1], cases[:, 1 : width + 1] + cases[:, width + 1 :]
    counts = np.diff(cutting.owned_starts)[pattern]
    found: list[tuple[Ints, Ints, Ints, Ints]] = []
    for part in chunks(counts):
        group, position = expand(counts[part])
        case = group + part.start
        row = cutting.owned[cutting.owned_starts[pattern[case]] + position]
        box = widen(cutting.lo[row], width, 0)
        begin = np.maximum(box, lo[case])
        size = np.minimum(box + widen(cutting.size[row], width, 1), hi[case]) - begin
        kept = np.flatnonzero((size > 0).all(axis=1))
        found.append((case[kept], row[kept], begin[kept], size[kept]))
    if not found:
        none = np.zeros(0, np.int64)
        return _Meets(case=none, row=none, lo=none.reshape(0, width), size=none.reshape(0, width), first=none)
    case, row, begin, size = (np.concatenate(column) for column in zip(*found, strict=True))
    inside = begin - widen(cutting.lo[row], width, 0)
    first = (inside * strides_of(widen(cutting.size[row], width, 1))).sum(axis=1)
    return _Meets(case=case, row=row, lo=begin, size=size, first=first)


def _compare(
    world: WorldLayout, tensor: Ints, piece: Ints, lo: Ints, size: Ints, left: Ints, right: Ints
) -> Iterator[AliasCheck]:
    """What must be equal where one box of the target is filled from two tensors, perhaps cut differently."""
    for a in left.tolist():
        begin = np.maximum(lo[a], lo[right])
        shape = np.minimum(lo[a] + size[a], lo[right] + size[right]) - begin
        dims = int(world.table.ndim[tensor[a]])
        for i in np.flatnonzero((shape > 0).all(axis=1)).tolist():
            b = right[i]
            yield AliasCheck(
                (world.names[tensor[a]], world.names[tensor[b]]),
                int(piece[a]),
                int(piece[b]),
                tuple((begin[i] - lo[a])[:dims].tolist()),
                tuple((begin[i] - lo[b])[:dims].tolist()),
                tuple(shape[i, :dims].tolist()),
            )
