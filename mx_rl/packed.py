"""The packed codec of a delta: index gaps and small value steps in planes of bytes, each compressed by itself.

A frame holds 256 blocks: six u32 lengths, then six streams, each zstd or, where that is no shorter, plain:

    counts   u16 for each block, as in the raw table
    low      of every listed change, the gap from the one before it (less one) modulo 256 ...
    high     ... and divided by 256
    steps    of every value, listed or of a dense block: new bits - old bits, zigzag (0, -1, 1, -2 ...); 255: escaped
    small    of every escaped step, its lowest byte ...
    large    ... and the others, as many as the value has

A mean gap of 250 fills its low byte evenly; its high byte and the step, most often one unit of the last place, take a
bit or two: planes keep what compresses apart from what does not. Steps need the reader's own old values: what comes
out is absolute.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mx_rl.blob import FRAME_BLOCKS, check_counts, entries_of
from mx_rl.blocks import ragged
from mx_rl.columns import Flags, Ints, starts_of
from mx_rl.errors import CorruptRecord
from mx_rl.kernels.base import BLOCK_ELEMENTS, E_BLOCK, E_COUNT, E_DENSE, E_INDEX, E_VALUE, WIDTH, Bytes, Counts
from mx_rl.zstd import compress, expand

_HEAD = struct.Struct("<6I")
_ESCAPE = 255
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Values = npt.NDArray[np.uint64]


def pack(blocks: Ints, counts: Counts, payload: Bytes, old: Bytes) -> list[bytes]:
    """The frames of what ``Kernels.diff`` listed: its payload, and the old values in the same places."""
    frames = []
    at = 0
    for begin in range(0, len(blocks), FRAME_BLOCKS):
        rows, some = blocks[begin : begin + FRAME_BLOCKS], counts[begin : begin + FRAME_BLOCKS]
        entries, nbytes = entries_of(rows, some)
        frames.append(_frame(rows, some, entries, payload[at : at + nbytes], old[at : at + nbytes]))
        at += nbytes
    return frames


def _frame(blocks: Ints, counts: Counts, entries: Ints, payload: Bytes, old: Bytes) -> bytes:
    listed = entries[entries[:, E_DENSE] == 0]
    index = payload.view(np.uint16)[ragged(listed[:, E_INDEX] // 2, listed[:, E_COUNT])].astype(np.int64)
    before = np.concatenate([[-1], index[:-1]])[: len(index)]
    before[starts_of(listed[:, E_COUNT])[:-1]] = -1
    gap = index - before - 1
    new, was = values_of(blocks, entries, payload), values_of(blocks, entries, old)
    width = np.repeat(blocks[entries[:, E_BLOCK], WIDTH], entries[:, E_COUNT]).astype(np.uint64)
    bits = width << np.uint64(3)
    step = (new - was) << (np.uint64(64) - bits)  # at the top of the word, where its sign is the word's
    sign = step.view(np.int64) >> 63
    zigzag = (((step << np.uint64(1)) ^ sign.view(np.uint64)) >> (np.uint64(64) - bits)) & _mask(bits)
    codes = np.minimum(zigzag, _ESCAPE).astype(np.uint8)
    streams = [
        counts.astype("<u2").tobytes(),
        (gap & 255).astype(np.uint8).tobytes(),
        (gap >> 8).astype(np.uint8).tobytes(),
        codes.tobytes(),
        *_escaped(zigzag, width, codes == _ESCAPE),
    ]
    packed = [compress(stream) for stream in streams]
    return _HEAD.pack(*map(len, packed)) + b"".join(packed)


@dataclass(frozen=True, eq=False)
class Frame:
    """A frame without its values: rows for the blocks that changed, placed in a payload that has the indices only."""

    blocks: Ints
    entries: Ints
    payload: Bytes
    codes: Bytes
    escaped: Values

    def resolve(self, old: Bytes) -> None:
        """Put the new values into the payload. ``old``: as large as it, the reader's own values at each E_VALUE."""
        was = values_of(self.blocks, self.entries, old)
        width = np.repeat(self.blocks[self.entries[:, E_BLOCK], WIDTH], self.entries[:, E_COUNT]).astype(np.uint64)
        zigzag = self.codes.astype(np.uint64)
        zigzag[self.codes == _ESCAPE] = self.escaped
        new = was + ((zigzag >> np.uint64(1)) ^ (np.uint64(0) - (zigzag & np.uint64(1))))
        put_values(self.blocks, self.entries, self.payload, new & _mask(width << np.uint64(3)))


def unpack(blocks: Ints, data: bytes) -> Frame:
    """``blocks``: those of this frame. Raises CorruptRecord for anything that ``pack`` could not have made."""
    if len(data) < _HEAD.size:
        raise CorruptRecord(f"a frame of {len(data)} bytes")
    lengths = _HEAD.unpack_from(data)
    if sum(lengths) != len(data) - _HEAD.size:
        raise CorruptRecord(f"a frame of {len(data)} bytes with streams of {lengths}")
    cuts = starts_of(np.array((_HEAD.size, *lengths), np.int64)).tolist()
    streams = [data[a:b] for a, b in itertools.pairwise(cuts[1:])]
    counts = np.frombuffer(expand(streams[0], 2 * len(blocks)), "<u2").astype(np.uint16)
    check_counts(blocks, counts)
    entries, nbytes = entries_of(blocks, counts)
    listed = entries[entries[:, E_DENSE] == 0]
    num_listed, num_values = int(listed[:, E_COUNT].sum()), int(entries[:, E_COUNT].sum())
    low, high = (np.frombuffer(expand(stream, num_listed), np.uint8).astype(np.int64) for stream in streams[1:3])
    codes = np.frombuffer(expand(streams[3], num_values), np.uint8)
    width = np.repeat(blocks[entries[:, E_BLOCK], WIDTH], entries[:, E_COUNT])
    wide = width[codes == _ESCAPE]
    escaped = _read_escaped(expand(streams[4], len(wide)), expand(streams[5], int((wide - 1).sum())), wide)
    payload = np.zeros(nbytes, np.uint8)
    reach = np.cumsum(low + (high << 8) + 1)
    starts = starts_of(listed[:, E_COUNT])[:-1]
    index = reach - 1 - np.repeat(reach[starts] - (low + (high << 8) + 1)[starts], listed[:, E_COUNT])
    if len(index) and int(index.max()) >= BLOCK_ELEMENTS:
        raise CorruptRecord("a frame lists an element outside of its block")
    payload.view(np.uint16)[ragged(listed[:, E_INDEX] // 2, listed[:, E_COUNT])] = index
    return Frame(blocks, entries, payload, codes, escaped)


def values_of(blocks: Ints, entries: Ints, payload: Bytes) -> Values:
    """The values of all entries, one after another, in 64 bits."""
    found = np.empty(int(entries[:, E_COUNT].sum()), np.uint64)
    for at, where, view in _by_width(blocks, entries, payload):
        found[at] = view[where]
    return found


def put_values(blocks: Ints, entries: Ints, payload: Bytes, values: Values) -> None:
    for at, where, view in _by_width(blocks, entries, payload):
        view[where] = values[at].astype(view.dtype)


def _by_width(blocks: Ints, entries: Ints, payload: Bytes) -> list[tuple[Ints, Ints, npt.NDArray[np.unsignedinteger]]]:
    """Per width: positions among all values, positions in the payload, the payload in that width."""
    width, starts = blocks[entries[:, E_BLOCK], WIDTH], starts_of(entries[:, E_COUNT])[:-1]
    found = []
    for one in np.unique(width).tolist():
        rows = np.flatnonzero(width == one)
        counts = entries[rows, E_COUNT]
        places = ragged(entries[rows, E_VALUE] // one, counts)
        found.append((ragged(starts[rows], counts), places, payload.view(_UNSIGNED[one])))
    return found


def _mask(bits: Values) -> Values:
    return ~np.uint64(0) >> (np.uint64(64) - bits)


def _escaped(zigzag: Values, width: Values, which: Flags) -> tuple[bytes, bytes]:
    rows = zigzag[which].astype("<u8").view(np.uint8).reshape(-1, 8)
    return rows[:, 0].tobytes(), rows[:, 1:][np.arange(1, 8) < width[which].astype(np.int64)[:, None]].tobytes()


def _read_escaped(small: bytes, large: bytes, width: Ints) -> Values:
    rows = np.zeros((len(width), 8), np.uint8)
    rows[:, 0] = np.frombuffer(small, np.uint8)
    inside = np.arange(8) < width[:, None]
    inside[:, 0] = False
    rows[inside] = np.frombuffer(large, np.uint8)
    return rows.view("<u8").reshape(-1).astype(np.uint64)
