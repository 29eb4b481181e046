"""Snapshot, diff and scatter for CPUs."""

from __future__ import annotations

from typing import Any

import numpy as np

from mx_rl.kernels import base
from mx_rl.kernels.base import Bytes, Counts, Diffed, Ints, Sums
from mx_rl.kernels.cpu_casts import move
from mx_rl.kernels.cpu_memory import (
    TILE,
    bytes_at,
    collect,
    compiled,
    copy_bytes,
    halves_at,
    inline,
    longs_at,
    spread,
    tile_sum,
    words_at,
)

LIVE, STEP, SLOT, COUNT, POSITION, UNIT, KIND = range(base.RUN_COLUMNS)
LO, LENGTH, WIDTH = range(base.BLOCK_COLUMNS)
DENSE = base.DENSE
_ROOM = base.BLOCK_ELEMENTS + 64
_LINE = 16
"""Words compared at a time: a line of cache without a change is passed over."""


@inline
def _log2(code: Any) -> Any:
    """Of the width, by code: 0, 1, 2, 3 for plain copies, then f16, bf16, f32, f64."""
    return code if code < 4 else (1 if code < 6 else code - 4)


@inline
def _take(runs: Any, row: Any, done: Any, count: Any, slot: Any, scratch: Any, sums: Any) -> Any:
    """Bring elements ``done`` to ``done + count`` of a run into the slot, and add their digest."""
    kind = runs[row, KIND]
    source = runs[row, LIVE] + ((done * runs[row, STEP]) << _log2(kind >> 3))
    shift = _log2(kind & 7)
    target = slot + runs[row, SLOT] + (done << shift)
    if runs[row, STEP] != 1 and count > 1:
        collect(scratch, source, runs[row, STEP], count, 1 << _log2(kind >> 3))
        source = scratch
    move(kind, target, source, count)
    if runs[row, UNIT] >= 0:
        sums[runs[row, UNIT]] += tile_sum(target, count << shift, (runs[row, POSITION] + done) << shift)


@compiled("void(int64[:, ::1], int64, uint64[::1], uint64[::1])")
def _snapshot(runs: Any, slot: Any, sums: Any, tile: Any) -> None:
    scratch = tile.ctypes.data
    for row in range(len(runs)):
        count = runs[row, COUNT]
        for done in range(0, count, TILE):
            _take(runs, row, done, min(TILE, count - done), slot, scratch, sums)


@inline
def _append(
    new: Any, old: Any, begin: Any, end: Any, first: Any, index: Any, values: Any, olds: Any, found: Any
) -> Any:
    """Without a branch: what does not differ is overwritten by the next. Unsigned, or each index is tested for its sign."""
    for i in range(begin, end):
        index[found] = first + i
        values[found] = new[i]
        olds[found] = old[i]
        found += np.uint64(new[i] != old[i])
    return found


@inline
def _compare(new: Any, old: Any, a: Any, b: Any, first: Any, index: Any, values: Any, olds: Any, listed: Any) -> Any:
    """``a`` and ``b`` are ``new`` and ``old`` in words."""
    per, found, start = np.uint64(8 // new.itemsize), np.uint64(listed), np.uint64(first)
    whole = np.uint64(len(a) // _LINE * _LINE)
    for word in range(np.uint64(0), whole, np.uint64(_LINE)):
        differs = np.uint64(0)
        for i in range(_LINE):
            differs |= a[word + np.uint64(i)] ^ b[word + np.uint64(i)]
        if differs:
            for i in range(_LINE):
                at = word + np.uint64(i)
                if a[at] != b[at]:
                    found = _append(new, old, at * per, (at + np.uint64(1)) * per, start, index, values, olds, found)
    return np.int64(_append(new, old, whole * per, np.uint64(len(new)), start, index, values, olds, found))


@compiled("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _list(
    width: int, new: int, old: int, count: int, first: int, index: int, values: int, olds: int, found: int
) -> Any:
    """Append where ``count`` elements differ to lists of at most a block; returns how many are listed then."""
    words = count * width >> 3
    a, b, listed = longs_at(new, words), longs_at(old, words), halves_at(index, _ROOM)
    if width == 1:
        return _compare(
            bytes_at(new, count),
            bytes_at(old, count),
            a,
            b,
            first,
            listed,
            bytes_at(values, _ROOM),
            bytes_at(olds, _ROOM),
            found,
        )
    if width == 2:
        return _compare(
            halves_at(new, count),
            halves_at(old, count),
            a,
            b,
            first,
            listed,
            halves_at(values, _ROOM),
            halves_at(olds, _ROOM),
            found,
        )
    if width == 4:
        return _compare(
            words_at(new, count),
            words_at(old, count),
            a,
            b,
            first,
            listed,
            words_at(values, _ROOM),
            words_at(olds, _ROOM),
            found,
        )
    return _compare(a, b, a, b, first, listed, longs_at(values, _ROOM), longs_at(olds, _ROOM), found)


@inline
def _pad8(nbytes: Any) -> Any:
    return (nbytes + 7) & ~7


@compiled(
    "UniTuple(int64, 2)(int64[:, ::1], int64[:, ::1], int64, int64, uint64[::1], uint16[::1], uint8[::1], uint8[::1],"
    " uint64[:, ::1])"
)
def _diff(
    runs: Any, blocks: Any, slot: Any, base_slot: Any, sums: Any, counts: Any, payload: Any, old: Any, lists: Any
) -> Any:
    index = lists.ctypes.data
    values, olds, scratch = index + 8 * _ROOM, index + 16 * _ROOM, index + 24 * _ROOM
    to, to_old = payload.ctypes.data, old.ctypes.data
    used, used_old, fits = 0, 0, True
    row, done = 0, 0
    for block in range(len(blocks)):
        lo, length, width = blocks[block, LO], blocks[block, LENGTH], blocks[block, WIDTH]
        end, most, found = lo + length * width, min(length * width // (2 + width), DENSE - 1), 0
        while row < len(runs) and runs[row, SLOT] + done * width < end:
            at = runs[row, SLOT] + done * width
            count = min(TILE, runs[row, COUNT] - done, (end - at) // width)
            _take(runs, row, done, count, slot, scratch, sums)
            if fits and found <= most:
                found = _list(width, slot + at, base_slot + at, count, (at - lo) // width, index, values, olds, found)
            done += count
            if done == runs[row, COUNT]:
                row, done = row + 1, 0
        counts[block] = found if found <= most else DENSE
        if not fits:
            continue
        if found <= most:
            size, size_old = _pad8(2 * found) + _pad8(width * found), _pad8(width * found)
        else:
            size, size_old = _pad8(length * width), _pad8(length * width)
        fits = used + size <= len(payload) and used_old + size_old <= len(old)
        if not fits:
            continue
        if found <= most:
            copy_bytes(to + used, index, 2 * found)
            copy_bytes(to + used + _pad8(2 * found), values, width * found)
            copy_bytes(to_old + used_old, olds, width * found)
        else:
            copy_bytes(to + used, slot + lo, length * width)
            copy_bytes(to_old + used_old, base_slot + lo, length * width)
        used, used_old = used + size, used_old + size_old
    return (used, used_old) if fits else (-1, -1)


@compiled("void(int64[:, ::1], int64)")
def _scatter(runs: Any, stage: Any) -> None:
    for row in range(len(runs)):
        shift, step = _log2(runs[row, KIND] & 7), runs[row, STEP]
        if step == 1:
            copy_bytes(runs[row, LIVE], stage + runs[row, SLOT], runs[row, COUNT] << shift)
        else:
            spread(runs[row, LIVE], stage + runs[row, SLOT], step, runs[row, COUNT], 1 << shift)


def snapshot(runs: Ints, slot: int, sums: Sums) -> None:
    _snapshot(runs, slot, sums, np.empty(TILE, np.uint64))


def diff(
    runs: Ints, blocks: Ints, slot: int, base_slot: int, sums: Sums, counts: Counts, payload: Bytes, old: Bytes
) -> Diffed:
    # Not made inside: numba frees an array after the last use of its name, whoever still has its address.
    lists = np.empty((4, _ROOM), np.uint64)
    return Diffed(*_diff(runs, blocks, slot, base_slot, sums, counts, payload, old, lists))


def scatter(runs: Ints, stage: int) -> None:
    _scatter(runs, stage)
