"""What every set of kernels computes, and the tables that it is told by: int64 rows, so that no call loops in Python.

A *run* is elements that lie side by side in an arena (a slot or a stage) and in the global tensor, and at equal steps in
live memory. Runs are sorted by their place in the arena. Memory is named by address: who calls has checked the bounds.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from mx_rl.errors import InvalidArgument

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.uint16]
Sums = npt.NDArray[np.uint64]

LIVE: Final = 0  # address of the first element in live memory
STEP: Final = 1  # from element to element there, in elements: 1 is compact
SLOT: Final = 2  # byte offset in the arena, a multiple of the width
COUNT: Final = 3  # elements
POSITION: Final = 4  # of the first element in the global tensor, row-major
UNIT: Final = 5  # index of the sum that its digest is added to; below 0: none
KIND: Final = 6  # live and wire dtype, from ``kind_of``
RUN_COLUMNS: Final = 7

BLOCK_ELEMENTS: Final = 1 << 16
LO: Final = 0  # byte offset of the block in the arena
LENGTH: Final = 1  # elements, at most BLOCK_ELEMENTS
WIDTH: Final = 2  # bytes of an element
BLOCK_COLUMNS: Final = 3

DENSE: Final = 0xFFFF
"""The count of a block of which every element is given; a listed block has always fewer than this."""

E_BLOCK: Final = 0  # row of a block in the table of blocks
E_COUNT: Final = 1  # entries
E_DENSE: Final = 2  # 1: no indices, entry i is element i
E_INDEX: Final = 3  # byte offset of the indices (uint16) in the payload
E_VALUE: Final = 4  # byte offset of the values in the payload
E_FIRST: Final = 5  # rows of the first run that meets the block, and behind the last
E_LAST: Final = 6
ENTRY_COLUMNS: Final = 7

CASTS: Final = {torch.float16: 4, torch.bfloat16: 5, torch.float32: 6, torch.float64: 7}
"""Codes of dtypes that are cast. 0 to 3 are plain copies of 1, 2, 4 and 8 bytes; an element of 16 bytes is two of 8."""

WIDTHS: Final = (1, 2, 4, 8, 2, 2, 4, 8)
"""Bytes by code."""

_WIDTHS: Ints = np.array(WIDTHS, np.int64)


class Kernels(Protocol):
    """One set of kernels. Each makes a single pass over memory; none allocates more than a block; none checks bounds."""

    def snapshot(self, runs: Ints, slot: int, sums: Sums) -> None:
        """Copy, and cast, every run from live memory into the slot at this address; add the digest of its wire bytes to
        ``sums[unit]``. A cast is ``Tensor.to``, bit for bit (NaNs: ``plain.cast``)."""

    def diff(
        self,
        runs: Ints,
        blocks: Ints,
        slot: int,
        base_slot: int,
        sums: Sums,
        counts: Counts,
        payload: Bytes,
        old: Bytes,
    ) -> int:
        """As ``snapshot``, and list what differs, bit for bit, from the slot at ``base_slot``.

        Per block: ``counts``, and in ``payload`` the indices (uint16 in the block, ascending) and the new values, each
        padded to 8 bytes; DENSE and all values where listing would take as much. ``old``, as large as the payload: at the
        same places the values of the base. Returns the bytes used of both, -1 where the changes do not fit: there is no
        delta. Snapshot and sums are whole whatever fits.
        """

    def check(self, entries: Ints, blocks: Ints, payload: Bytes, runs: Ints, sums_old: Sums, sums_new: Sums) -> None:
        """Of what ``write`` would change: add the digest of what is there, and of what is given, to the sums by unit."""

    def weigh(
        self, entries: Ints, blocks: Ints, payload: Bytes, old: Bytes, runs: Ints, sums_old: Sums, sums_new: Sums
    ) -> None:
        """As ``check``, but what is there is taken from ``old`` as ``diff`` and ``gather`` fill it: no live memory is read."""

    def write(self, entries: Ints, blocks: Ints, payload: Bytes, runs: Ints) -> None:
        """Write the values of the entries into live memory, wherever runs take their elements."""

    def gather(self, entries: Ints, blocks: Ints, payload: Bytes, runs: Ints, old: Bytes) -> None:
        """Read what live memory holds at the entries into ``old``, at each block's E_VALUE; where several runs take an
        element, from the first; where none does, ``old`` is left."""

    def disorder(self, entries: Ints, blocks: Ints, payload: Bytes) -> int:
        """The first row whose indices are not ascending below the block's length, or -1. What has one is never applied:
        the kernels above would write outside of the runs."""

    def scatter(self, runs: Ints, stage: int) -> None:
        """Copy every run from the stage at this address to live memory; no cast."""


def kind_of(live: torch.dtype, wire: torch.dtype) -> int:
    """The KIND of runs between these dtypes. Raises InvalidArgument where there is no kernel for the cast."""
    if live == wire:
        code = {1: 0, 2: 1, 4: 2}.get(wire.itemsize, 3)
        return code << 3 | code
    if live in CASTS and wire in CASTS:
        return CASTS[live] << 3 | CASTS[wire]
    raise InvalidArgument(f"no kernel casts {live} to {wire}: takes {[str(dtype) for dtype in CASTS]}")


def wire_width(kinds: Ints) -> Ints:
    """Bytes of an element in the arena, by KIND."""
    found: Ints = _WIDTHS[kinds & 7]
    return found


def live_width(kinds: Ints) -> Ints:
    found: Ints = _WIDTHS[kinds >> 3]
    return found


def met(blocks: Ints, runs: Ints) -> tuple[Ints, Ints]:
    """Per block, the rows of the first run (sorted by SLOT) that meets it, and behind the last; equal where none does.

    Runs may overlap, where the same bytes are wanted twice: then some in between may not meet the block.
    """
    ends = runs[:, SLOT] + runs[:, COUNT] * wire_width(runs[:, KIND])
    reach = np.maximum.accumulate(ends) if len(ends) else ends
    first = np.searchsorted(reach, blocks[:, LO], side="right").astype(np.int64)
    last = np.searchsorted(runs[:, SLOT], blocks[:, LO] + blocks[:, LENGTH] * blocks[:, WIDTH], side="left").astype(
        np.int64
    )
    return first, np.maximum(first, last)


def pad8(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def most_listed(length: int, width: int) -> int:
    """Changes up to which a block is listed: beyond, all of its values take less room."""
    return min(length * width // (2 + width), DENSE - 1)


def payload_bytes(count: int, length: int, width: int) -> int:
    """What one block takes in a payload."""
    return pad8(length * width) if count == DENSE else pad8(2 * count) + pad8(width * count)
