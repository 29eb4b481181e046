"""The blob of a delta: one rank's changes from one version to another, framed so that a reader fetches what it needs.

    head     64 bytes: "MXD1", codec u32, base i64, number i64, layout 16 bytes, blocks u32, frames u32, payload bytes
             u64, sums u32, 4 bytes of 0; little-endian
    table    raw: a u16 for each block: how many changes, 0xFFFF: all values follow. Packed: a u32 for each frame: bytes.
             Padded to 8 bytes
    sums     packed only: a u64 for each box that is not empty: the digest of its new values where they changed. Steps
             from a wrong base lead to wrong values by the same steps, which the digest, being linear, does not see
    payload  raw: block after block its indices (u16) and its new values, each padded to 8 bytes. Packed: ``packed.py``

Blocks are a pure function of the rank's layout (``blocks.py``), so that the table alone says where everything lies.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np

from mx_rl.columns import Ints, starts_of
from mx_rl.errors import CorruptRecord
from mx_rl.kernels import base
from mx_rl.kernels.base import DENSE, E_BLOCK, E_COUNT, E_DENSE, E_INDEX, E_VALUE, LENGTH, WIDTH, Counts, Sums

RAW: Final = 0
PACKED: Final = 1
HEAD_BYTES: Final = 64
_HEAD = struct.Struct("<4sIqq16sIIQI4x")
_MAGIC = b"MXD1"


class Head(NamedTuple):
    codec: int  # RAW or PACKED
    base: int  # the version that this one is told by
    number: int
    layout: str  # hash of the rank's layout, 32 hexadecimal digits
    num_blocks: int
    num_frames: int
    payload_bytes: int
    num_sums: int

    @property
    def table_bytes(self) -> int:
        return base.pad8(2 * self.num_blocks if self.codec == RAW else 4 * self.num_frames)

    @property
    def payload_at(self) -> int:
        """Byte of the blob with which the payload begins, behind head, table and sums."""
        return HEAD_BYTES + self.table_bytes + 8 * self.num_sums

    @property
    def nbytes(self) -> int:
        return self.payload_at + self.payload_bytes

    def encode(self) -> bytes:
        return _HEAD.pack(
            _MAGIC, self.codec, self.base, self.number, bytes.fromhex(self.layout),
            self.num_blocks, self.num_frames, self.payload_bytes, self.num_sums,
        )  # fmt: skip

    @classmethod
    def decode(cls, data: bytes, *, layout: str, num_blocks: int, num_boxes: int, most_bytes: int) -> Head:
        """What the reader knows: the rank's layout, its blocks and its boxes with bytes. Raises CorruptRecord for any
        other, and for a blob of more than ``most_bytes``."""
        if len(data) < HEAD_BYTES or data[:4] != _MAGIC or any(data[60:HEAD_BYTES]):
            raise CorruptRecord(f"{len(data)} bytes are no head of a delta of this release")
        _, codec, from_version, number, of_layout, blocks, frames, payload_bytes, sums = _HEAD.unpack_from(data)
        head = cls(codec, from_version, number, of_layout.hex(), blocks, frames, payload_bytes, sums)
        if codec not in (RAW, PACKED) or not 0 <= from_version < number:
            raise CorruptRecord(f"a delta of codec {codec} from version {from_version} to {number}")
        if (head.layout, blocks) != (layout, num_blocks):
            raise CorruptRecord(
                f"a delta of layout {head.layout}, {blocks} blocks; wanted {layout}, {num_blocks} blocks"
            )
        known = (num_frames(num_blocks), num_boxes) if codec == PACKED else (0, 0)
        if (frames, sums) != known or head.nbytes > most_bytes:
            raise CorruptRecord(f"a delta of {frames} frames, {head.nbytes} bytes: at most {most_bytes} bytes")
        return head


FRAME_BLOCKS: Final = 256
"""Blocks that are packed together: enough for the tables of an entropy coder to pay, small enough to fetch by."""


def num_frames(num_blocks: int) -> int:
    return -(-num_blocks // FRAME_BLOCKS)


def raw_table(counts: Counts) -> bytes:
    return _padded(counts.astype("<u2").tobytes())


def packed_table(frame_bytes: list[int]) -> bytes:
    return _padded(np.array(frame_bytes, "<u4").tobytes())


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def entries_of(blocks: Ints, counts: Counts) -> tuple[Ints, int]:
    """(rows for the blocks that changed, with their places in a raw payload; bytes of that payload)."""
    length, width = blocks[:, LENGTH], blocks[:, WIDTH]
    dense = counts == DENSE
    count = np.where(dense, length, counts.astype(np.int64))
    index_bytes = np.where(dense, 0, -(-2 * count // 8) * 8)
    starts = starts_of(index_bytes + -(-width * count // 8) * 8)
    kept = np.flatnonzero(count)
    entries = np.zeros((len(kept), base.ENTRY_COLUMNS), np.int64)
    entries[:, E_BLOCK], entries[:, E_COUNT], entries[:, E_DENSE] = kept, count[kept], dense[kept]
    entries[:, E_INDEX] = starts[kept]
    entries[:, E_VALUE] = (starts[:-1] + index_bytes)[kept]
    return entries, int(starts[-1])


def check_counts(blocks: Ints, counts: Counts) -> None:
    """Raises CorruptRecord where more is listed than the writer would list."""
    most = np.minimum(blocks[:, LENGTH] * blocks[:, WIDTH] // (2 + blocks[:, WIDTH]), DENSE - 1)
    wrong = np.flatnonzero((counts != DENSE) & (counts > most))
    if len(wrong):
        row = int(wrong[0])
        raise CorruptRecord(f"block {row} of a delta lists {counts[row]} changes: at most {most[row]}")


def decode_raw_table(head: Head, blocks: Ints, table: bytes) -> Ints:
    """The entries of a raw blob, placed in its whole payload. Raises CorruptRecord for what no writer makes."""
    if len(table) != head.table_bytes:
        raise CorruptRecord(f"a table of {len(table)} bytes, of {head.table_bytes}")
    counts = np.frombuffer(table, "<u2", head.num_blocks).astype(np.uint16)
    check_counts(blocks, counts)
    entries, nbytes = entries_of(blocks, counts)
    if nbytes != head.payload_bytes:
        raise CorruptRecord(f"a delta's table adds up to {nbytes} bytes, its head says {head.payload_bytes}")
    return entries


def decode_packed_table(head: Head, table: bytes) -> tuple[Ints, Sums]:
    """(where each frame begins in the payload, and the end; the sums). ``table``: with the sums behind it. Raises
    CorruptRecord for what no writer makes."""
    if len(table) != head.table_bytes + 8 * head.num_sums:
        raise CorruptRecord(f"a table of {len(table)} bytes, of {head.table_bytes} and {head.num_sums} sums")
    starts = starts_of(np.frombuffer(table, "<u4", head.num_frames).astype(np.int64))
    if int(starts[-1]) != head.payload_bytes:
        raise CorruptRecord(f"a delta's frames add up to {starts[-1]} bytes, its head says {head.payload_bytes}")
    return starts, np.frombuffer(table, "<u8", head.num_sums, head.table_bytes).astype(np.uint64)


class Fetch(NamedTuple):
    """What to read of a payload: rows (byte in the payload, byte in the local buffer, bytes), neighbours joined."""

    ranges: Ints
    nbytes: int


def fetch_entries(entries: Ints, blocks: Ints, wanted: Ints) -> tuple[Fetch, Ints]:
    """(what to read so that a local buffer holds the blocks ``wanted``, ascending rows; the entries placed in it)."""
    kept = entries[np.isin(entries[:, E_BLOCK], wanted)]
    ends = kept[:, E_VALUE] + -(-kept[:, E_COUNT] * blocks[kept[:, E_BLOCK], WIDTH] // 8) * 8
    fetch = _fetch(kept[:, E_INDEX], ends)
    moved = kept.copy()
    shift = starts_of(ends - kept[:, E_INDEX])[:-1] - kept[:, E_INDEX]
    moved[:, E_INDEX] += shift
    moved[:, E_VALUE] += shift
    return fetch, moved


def fetch_frames(starts: Ints, wanted: Ints) -> tuple[Fetch, Ints, Ints]:
    """(what to read of a packed payload, the frames that hold the blocks ``wanted``, where each begins locally + end)."""
    frames = np.unique(wanted // FRAME_BLOCKS)
    begins, ends = starts[frames], starts[frames + 1]
    return _fetch(begins, ends), frames, starts_of(ends - begins)


def _fetch(begins: Ints, ends: Ints) -> Fetch:
    local = starts_of(ends - begins)
    if not len(begins):
        return Fetch(np.zeros((0, 3), np.int64), 0)
    first = np.flatnonzero(np.concatenate([[True], begins[1:] != ends[:-1]]))
    nbytes = np.diff(np.append(local[first], local[-1]))
    return Fetch(np.stack([begins[first], local[first], nbytes], axis=1), int(local[-1]))
