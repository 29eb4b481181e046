"""The trailer of a slot: behind the packed boxes, one sum for each box that is not empty, in their order.

A commit tells the trailer's hash, and the version record has it by rank: a few bytes a rank, never by tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch

from mx_rl.columns import Ints, ints
from mx_rl.digest import Bytes, Summing, Sums, box_runs, spanned
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.runs import STAGE, compose
from mx_rl.table import ALIGN

SUM_BYTES = 8


def trailer_offset(packed: int) -> int:
    """Where the trailer of a slot whose boxes take ``packed`` bytes begins."""
    return -(-packed // ALIGN) * ALIGN


def proof_of(sums: Sums) -> bytes:
    """What a commit tells of a trailer. The record names the layout that it belongs to."""
    return hashlib.blake2b(sums.astype("<u8").tobytes(), digest_size=8).digest()


def boxes_at(world: WorldLayout) -> Ints:
    """By rank, how many sums its trailer has."""
    patterns = world.patterns
    tensors = np.bincount(world.pattern_of, minlength=len(patterns.counts))
    counts = np.bincount(patterns.rank, tensors[patterns.of_row], minlength=world.world_size)
    return ints(np.rint(counts))


class Trailer:
    """Of one rank layout."""

    def __init__(self, layout: RankLayout) -> None:
        boxes, table = layout.boxes, layout.table
        self._held = np.flatnonzero(boxes.nbytes)
        self._rows = len(boxes)
        self.offset = trailer_offset(layout.nbytes)
        self.nbytes = SUM_BYTES * len(self._held)
        self.slot_nbytes = self.offset + self.nbytes if self.nbytes else layout.nbytes
        tensor = boxes.tensor[self._held]
        self._runs, self._starts = box_runs(
            table.shape[tensor],
            boxes.lo[self._held],
            boxes.size[self._held],
            table.itemsize[tensor],
            boxes.offset[self._held],
        )
        self._summing: Summing | None = None

    def sums(self, data: Bytes) -> Sums:
        """Of every box of the layout, by row, 0 for an empty one. ``data``: the packed boxes, aligned to 8 bytes."""
        if self._summing is None:
            self._summing = Summing(self._runs, self._starts)
        return self._by_row(self._summing.run(data))

    def sums_by(self, table: Ints) -> Callable[[], Sums]:
        """What gives the same of boxes that lie scattered, by a run table from offsets among the packed boxes."""
        runs, owner = compose(self._runs, table, STAGE)
        data, runs = spanned(runs)
        box = np.repeat(np.arange(len(self._held), dtype=np.int64), np.diff(self._starts))[owner]
        summing = Summing(runs, np.searchsorted(box, np.arange(len(self._held) + 1)).astype(np.int64))
        return lambda: self._by_row(summing.run(data))

    def _by_row(self, sums: Sums) -> Sums:
        found = np.zeros(self._rows, np.uint64)
        found[self._held] = sums
        return found

    def write(self, sums: Sums, block: torch.Tensor, at: int) -> bytes:
        """Put the sums (by row) into ``block``, from byte ``at``; their proof."""
        held = sums[self._held]
        block[at : at + self.nbytes].numpy()[:] = np.frombuffer(held.astype("<u8").tobytes(), np.uint8)
        return proof_of(held)
