"""Blocks: an arena cut into stretches of at most 2^16 elements of one width, which are what a delta is framed in."""

from __future__ import annotations

import numpy as np

from mx_rl.columns import Flags, Ints, expand, groups
from mx_rl.kernels import base
from mx_rl.kernels.base import BLOCK_ELEMENTS, met
from mx_rl.layout import RankLayout, WorldLayout


def blocks_of_layout(layout: RankLayout) -> Ints:
    """Rows (byte offset, elements, width) of a rank's arena, in its order."""
    return _blocks(layout.boxes.offset, layout.boxes.nbytes, layout.table.itemsize[layout.boxes.tensor])


def blocks_of_rank(world: WorldLayout, rank: int) -> Ints:
    """The same, of rank ``rank`` of a world."""
    boxes = world.boxes
    mine = np.flatnonzero(boxes.rank == rank)
    mine = mine[np.argsort(boxes.offset[mine], kind="stable")]
    return _blocks(boxes.offset[mine], boxes.nbytes[mine], world.table.itemsize[boxes.tensor[mine]])


def wanted(blocks: Ints, runs: Ints) -> Flags:
    """Which blocks a reader with these runs needs."""
    first, last = met(blocks, runs)
    return last > first


def _blocks(offset: Ints, nbytes: Ints, itemsize: Ints) -> Ints:
    held = np.flatnonzero(nbytes)
    if not len(held):
        return np.zeros((0, base.BLOCK_COLUMNS), np.int64)
    width = np.minimum(itemsize[held], 8)
    begins = np.flatnonzero(groups(width))
    lo, width = offset[held[begins]], width[begins]
    lasts = held[np.append(begins[1:] - 1, len(held) - 1)]
    elements = (offset[lasts] + nbytes[lasts] - lo) // width
    segment, turn = expand(-(-elements // BLOCK_ELEMENTS))
    return np.stack(
        [
            lo[segment] + turn * BLOCK_ELEMENTS * width[segment],
            np.minimum(elements[segment] - turn * BLOCK_ELEMENTS, BLOCK_ELEMENTS),
            width[segment],
        ],
        axis=1,
    )


def ragged(starts: Ints, counts: Ints) -> Ints:
    """starts[i], starts[i] + 1 ... for counts[i] each, one after another."""
    group, position = expand(counts)
    return starts[group] + position
