"""Integer columns: ragged expansion in bounded chunks, and a compact, bounded wire form for them and for names."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mx_rl.errors import CorruptRecord, InvalidArgument

Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

CHUNK_ROWS = 1 << 20
"""Rows expanded at a time: bounds memory where every row meets many others."""

MAX_BODY_BYTES = 1 << 30
MAX_RATIO = 1100
"""Deflate never does better: a claim beyond it is refused before anything is allocated."""


def ints(values: object) -> Ints:
    return np.asarray(values, dtype=np.int64)


def starts_of(counts: Ints) -> Ints:
    """Where each group begins, and the end: one entry more than ``counts``."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def expand(counts: Ints) -> tuple[Ints, Ints]:
    """For ``counts[i]`` rows of each group i: (the group of each row, its position within the group)."""
    group = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return group, np.arange(len(group), dtype=np.int64) - np.repeat(starts_of(counts)[:-1], counts)


def chunks(counts: Ints, limit: int = CHUNK_ROWS) -> Iterator[slice]:
    """Cut groups into slices of at most ``limit`` rows together, at least one group each."""
    ends = np.cumsum(counts, dtype=np.int64)
    begin = 0
    while begin < len(counts):
        done = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + limit, side="right")))
        yield slice(begin, end)
        begin = end


def groups(*keys: Ints) -> Flags:
    """True where a row differs from the one before it in any key (columns, or matrices of columns)."""
    found = np.ones(len(keys[0]), dtype=np.bool_)
    if len(found) > 1:
        found[1:] = False
        for key in keys:
            differs = key[1:] != key[:-1]
            found[1:] |= differs.any(axis=1) if differs.ndim == 2 else differs
    return found


def distinct(rows: Ints) -> tuple[Ints, Ints]:
    """(the rows without repeats, for each row its index among them), in the order of first appearance."""
    order = np.lexsort(rows.T[::-1]) if len(rows) else np.zeros(0, np.int64)
    new = groups(rows[order])
    first = order[new]  # lexsort is stable: the first of equal rows
    rank = np.argsort(np.argsort(first))
    inverse = np.empty(len(rows), np.int64)
    inverse[order] = rank[np.cumsum(new) - 1] if len(rows) else rank
    return rows[np.sort(first)], inverse


class Packer:
    """Collects texts and columns; the content hash is over the plain body, so that no zlib build can change it."""

    def __init__(self, kind: bytes, *counts: int) -> None:
        self._head = struct.pack(f"<4s{len(counts)}q", kind, *counts)
        self._parts: list[bytes] = []

    def column(self, values: Ints) -> Packer:
        self._parts.append(np.ascontiguousarray(values.T, dtype="<i8").tobytes())
        return self

    def texts(self, values: Sequence[str]) -> Packer:
        try:
            body = "".join(values).encode()
        except UnicodeEncodeError as exc:
            raise InvalidArgument(f"a tensor name is no valid Unicode: {exc}") from exc
        self._parts.append(struct.pack("<q", len(body)) + body)
        return self.column(ints([len(text) for text in values]))

    def digest(self) -> str:
        state = hashlib.blake2b(self._head, digest_size=16)
        for part in self._parts:
            state.update(part)
        return state.hexdigest()

    def bytes(self) -> bytes:
        body = b"".join(self._parts)
        if len(body) > MAX_BODY_BYTES:
            raise InvalidArgument(f"a layout of {len(body)} bytes is over the limit of {MAX_BODY_BYTES}")
        return self._head + struct.pack("<q", len(body)) + zlib.compress(body, 1)


class Unpacker:
    """Reads what Packer wrote; raises CorruptRecord for anything else, before it allocates what a length claims."""

    def __init__(self, kind: bytes, data: bytes, num_counts: int) -> None:
        head = struct.Struct(f"<4s{num_counts + 1}q")
        if len(data) < head.size or data[:4] != kind:
            raise CorruptRecord(f"{len(data)} bytes are no {kind.decode()} record of this release")
        *counts, length = head.unpack_from(data)[1:]
        packed = len(data) - head.size
        if min(counts) < 0 or not 0 <= length <= min(MAX_BODY_BYTES, MAX_RATIO * packed):
            raise CorruptRecord(f"a {kind.decode()} record claims {length} bytes in {packed}, counts {counts}")
        engine = zlib.decompressobj()
        try:
            self._body = engine.decompress(data[head.size :], length + 1)
        except zlib.error as exc:
            raise CorruptRecord(f"a {kind.decode()} record is damaged: {exc}") from exc
        if len(self._body) != length or not engine.eof or engine.unused_data:
            raise CorruptRecord(f"a {kind.decode()} record of {length} bytes unpacks to another length")
        self.counts: list[int] = counts
        self._at = 0

    def _take(self, length: int) -> bytes:
        if not 0 <= length <= len(self._body) - self._at:
            raise CorruptRecord(f"a record wants {length} bytes where {len(self._body) - self._at} are left")
        self._at += length
        return self._body[self._at - length : self._at]

    def column(self, rows: int) -> Ints:
        return np.frombuffer(self._take(8 * rows), dtype="<i8").astype(np.int64)

    def matrix(self, rows: int, width: int) -> Ints:
        return np.ascontiguousarray(self.column(rows * width).reshape(width, rows).T)

    def texts(self, count: int) -> tuple[str, ...]:
        (length,) = struct.unpack("<q", self._take(8))
        try:
            body = self._take(length).decode()
        except UnicodeDecodeError as exc:
            raise CorruptRecord(f"a record's names are no UTF-8: {exc}") from exc
        lengths = self.column(count)
        if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= len(body):
            raise CorruptRecord("a record's name lengths are out of range")
        ends = np.cumsum(lengths)
        if (int(ends[-1]) if count else 0) != len(body):
            raise CorruptRecord("a record's name lengths do not add up")
        return tuple(body[end - size : end] for end, size in zip(ends.tolist(), lengths.tolist(), strict=True))

    def finish(self) -> None:
        if self._at != len(self._body):
            raise CorruptRecord(f"a record has {len(self._body) - self._at} bytes too many")
