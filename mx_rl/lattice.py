"""Element runs: boxes cut where an arena, the global tensor and live memory all go on at equal steps.

They are what the kernels are told by (``kernels/base.py``): made once per layout or plan, reused while addresses stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mx_rl.columns import Ints, chunks, expand, ints
from mx_rl.errors import InvalidArgument
from mx_rl.kernels import base
from mx_rl.kernels.base import kind_of, wire_width
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.plan import Part, Plan
from mx_rl.runs import SOURCE, STAGE, strides_of
from mx_rl.table import widen
from mx_rl.tensors import DTYPES, Shard


@dataclass(frozen=True, eq=False, kw_only=True)
class Live:
    """Where a rank's boxes lie in live memory: one row for each box of its layout."""

    address: Ints
    stride: Ints  # [boxes, D], in elements
    kind: Ints  # from kernels.base.kind_of


@dataclass(frozen=True, eq=False, kw_only=True)
class Units:
    """What the sums of a target's runs are of: one row for each destination of each piece."""

    box: Ints  # row of the source shard in the world's boxes
    elements: Ints
    first: Ints  # the unit of the piece's first destination: this one, unless the same bytes are wanted twice


def live_of(layout: RankLayout, resolved: Mapping[str, Sequence[Shard]]) -> Live:
    """Raises InvalidArgument where a tensor is cast in a way that no kernel knows, or is a lazy conjugate or negative."""
    width = layout.boxes.size.shape[1]
    tensors = [part.tensor for name in layout.names for part in resolved[name]]
    lazy = [tensor.dtype for tensor in tensors if tensor.is_conj() or tensor.is_neg()]
    if lazy:
        raise InvalidArgument(f"{len(lazy)} tensors are lazy conjugates or negatives: resolve_conj(), resolve_neg()")
    strides = np.zeros((len(tensors), width), np.int64)
    for row, tensor in enumerate(tensors):
        strides[row, : tensor.dim()] = tensor.stride()
    wire = [
        DTYPES[name] for name, parts in zip(layout.dtypes, layout.counts.tolist(), strict=True) for _ in range(parts)
    ]
    return Live(
        address=ints([tensor.data_ptr() for tensor in tensors]),
        stride=strides,
        kind=ints([kind_of(tensor.dtype, to) for tensor, to in zip(tensors, wire, strict=True)]),
    )


def snapshot_runs(layout: RankLayout, live: Live) -> Ints:
    """The runs [n, 7] between live memory and a slot that is packed by this layout; the unit is the row of the box."""
    boxes, held = layout.boxes, np.flatnonzero(layout.boxes.nbytes)
    shape = layout.table.shape[boxes.tensor[held]]
    return _rows(
        size=boxes.size[held],
        arena=strides_of(boxes.size[held]),
        whole=strides_of(shape),
        live=live.stride[held],
        itemsize=layout.table.itemsize[boxes.tensor[held]],
        slot=boxes.offset[held],
        position=(boxes.lo[held] * strides_of(shape)).sum(axis=1),
        address=live.address[held],
        unit=held,
        kind=live.kind[held],
    )


def target_runs(
    plan: Plan, world: WorldLayout, target: RankLayout, live: Live, parts: Sequence[Part]
) -> tuple[Ints, Units]:
    """The runs between the arena of one trainer rank and a target's live memory, in arena order, and their units.

    ``parts``: parts of the plan, or copies of them, all of the rank whose arena it is.
    """
    pieces, boxes = plan.pieces, world.boxes
    width = pieces.size.shape[1]
    if len({part.rank for part in parts}) > 1:
        raise InvalidArgument(f"parts of ranks {sorted({part.rank for part in parts})}: takes those of one")
    rows = np.concatenate([np.zeros((0, 3), np.int64), *(part.runs for part in parts)])
    rows = rows[np.argsort(rows[:, STAGE], kind="stable")]
    rank = parts[0].rank if parts else -1
    run = np.searchsorted(rows[:, STAGE], pieces.offset, side="right") - 1
    begun = rows[np.maximum(run, 0)] if len(rows) else np.zeros((len(run), 3), np.int64)
    found = np.flatnonzero((run >= 0) & (pieces.offset < begun[:, STAGE] + begun[:, 2]) & (pieces.nbytes > 0))
    source = begun[found, SOURCE] + pieces.offset[found] - begun[found, STAGE]
    mine = np.flatnonzero(boxes.rank == rank)
    mine = mine[np.argsort(boxes.offset[mine], kind="stable")]
    box = mine[np.searchsorted(boxes.offset[mine], source, side="right") - 1] if len(found) else found
    itemsize = world.table.itemsize[pieces.tensor[found]]
    whole = widen(boxes.size[box], width, 1)
    inside = _unravel((source - boxes.offset[box]) // itemsize, strides_of(whole))
    shape = widen(world.table.shape[pieces.tensor[found]], width, 1)
    position = ((widen(boxes.lo[box], width, 0) + inside) * strides_of(shape)).sum(axis=1)
    # One unit for each destination.
    piece, turn = expand(np.diff(pieces.dest_starts)[found])
    at = pieces.dest_starts[found[piece]] + turn
    row = target.starts[pieces.dest_tensor[at]] + pieces.dest_box[at]
    stride = widen(live.stride[row], width, 0)
    size = pieces.size[found[piece]]
    runs = _rows(
        size=size,
        arena=strides_of(whole)[piece],
        whole=strides_of(shape)[piece],
        live=stride,
        itemsize=itemsize[piece],
        slot=source[piece],
        position=position[piece],
        address=live.address[row] + (pieces.dest_start[at] * stride).sum(axis=1) * itemsize[piece],
        unit=np.arange(len(piece), dtype=np.int64),
        kind=live.kind[row],
    )
    units = Units(box=box[piece], elements=size.prod(axis=1), first=np.arange(len(piece), dtype=np.int64) - turn)
    return runs[np.argsort(runs[:, base.SLOT], kind="stable")], units


def _rows(
    *,
    size: Ints,
    arena: Ints,
    whole: Ints,
    live: Ints,
    itemsize: Ints,
    slot: Ints,
    position: Ints,
    address: Ints,
    unit: Ints,
    kind: Ints,
) -> Ints:
    """Strides and positions are in elements of ``itemsize``; one of 16 bytes is made two of 8."""
    halves = np.where(itemsize == 16, 2, 1)
    if (halves == 2).any():
        size = np.column_stack([size, halves])
        arena, whole, live = (
            np.column_stack([side * halves[:, None], np.ones_like(halves)]) for side in (arena, whole, live)
        )
    owner, steps = element_runs(size, arena, whole, live)
    width, live_width = wire_width(kind)[owner], base.live_width(kind)[owner]
    runs = np.empty((len(owner), base.RUN_COLUMNS), np.int64)
    runs[:, base.LIVE] = address[owner] + steps[:, 2] * live_width
    runs[:, base.STEP] = steps[:, 4]
    runs[:, base.SLOT] = slot[owner] + steps[:, 0] * width
    runs[:, base.COUNT] = steps[:, 3]
    runs[:, base.POSITION] = (position * halves)[owner] + steps[:, 1]
    runs[:, base.UNIT] = unit[owner]
    runs[:, base.KIND] = kind[owner]
    return runs


def element_runs(size: Ints, arena: Ints, whole: Ints, live: Ints) -> tuple[Ints, Ints]:
    """(the box of each run; rows of offsets in arena, global tensor and live memory, count, live step; in elements).

    ``size`` [n, D] of boxes without empty ones, and their strides on each side. In C order of each box.
    """
    count, step = np.ones(len(size), np.int64), np.ones(len(size), np.int64)
    going, inner = np.ones(len(size), np.bool_), np.zeros_like(size, np.bool_)
    for d in reversed(range(size.shape[1])):
        flat, new = size[:, d] == 1, count == 1
        even = (arena[:, d] == count) & (whole[:, d] == count) & (new | (live[:, d] == step * count))
        joined = going & ~flat & even
        step = np.where(joined & new, live[:, d], step)
        count = np.where(joined, count * size[:, d], count)
        inner[:, d] = flat | joined
        going &= flat | joined
    outer = np.where(inner, 1, size)
    counts = outer.prod(axis=1)
    owners, rows = [np.zeros(0, np.int64)], [np.zeros((0, 5), np.int64)]
    for part in chunks(counts):
        group, left = expand(counts[part])
        offsets = [np.zeros_like(left) for _ in range(3)]
        for d in reversed(range(size.shape[1])):
            sizes = outer[part, d]
            if sizes.max() > 1:
                index = left % sizes[group]
                left = left // sizes[group]
                for offset, side in zip(offsets, (arena, whole, live), strict=True):
                    offset += index * side[part, d][group]
        owners.append(group + part.start)
        rows.append(np.stack([*offsets, count[part][group], step[part][group]], axis=1))
    return np.concatenate(owners), np.concatenate(rows)


def _unravel(element: Ints, strides: Ints) -> Ints:
    index = np.empty_like(strides)
    for d in range(strides.shape[1]):
        index[:, d], element = element // strides[:, d], element % strides[:, d]
    return index
