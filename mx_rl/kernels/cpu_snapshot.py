"""Snapshot, diff and scatter for CPUs."""

from __future__ import annotations

from typing import Any

import numpy as np

from mx_rl.kernels import base
from mx_rl.kernels.base import Bytes, Counts, Ints, Sums
from mx_rl.kernels.cpu_casts import move
from mx_rl.kernels.cpu_lines import LINE, copy_line, copy_line_differs, line_differs, settle
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
_LARGE_BYTES = 4 << 20


@inline
def _log2(code: Any) -> Any:
    """Of the width, by code: 0, 1, 2, 3 for plain copies, then f16, bf16, f32, f64."""
    return code if code < 4 else (1 if code < 6 else code - 4)


@inline
def _gathered(runs: Any, row: Any, done: Any, count: Any, scratch: Any) -> Any:
    """Where elements ``done`` to ``done + count`` of a run lie side by side."""
    shift = _log2(runs[row, KIND] >> 3)
    source = runs[row, LIVE] + ((done * runs[row, STEP]) << shift)
    if runs[row, STEP] != 1 and count > 1:
        collect(scratch, source, runs[row, STEP], count, 1 << shift)
        return scratch
    return source


@inline
def _plain(kind: Any) -> Any:
    return kind >> 3 == kind & 7


@compiled("void(int64, int64, int64)")
def _stream(target: int, source: int, nbytes: int) -> None:
    """Copy past the cache; the target begins at a line."""
    whole = nbytes // LINE * LINE
    for at in range(0, whole, LINE):
        copy_line(target + at, source + at)
    copy_bytes(target + whole, source + whole, nbytes - whole)


@inline
def _take(runs: Any, row: Any, done: Any, count: Any, slot: Any, scratch: Any, sums: Any, large: Any) -> Any:
    """Bring elements ``done`` to ``done + count`` of a run into the slot, and add their digest."""
    kind, shift = runs[row, KIND], _log2(runs[row, KIND] & 7)
    source, target, nbytes = (
        _gathered(runs, row, done, count, scratch),
        slot + runs[row, SLOT] + (done << shift),
        count << shift,
    )
    if large and _plain(kind) and target % LINE == 0:
        _stream(target, source, nbytes)
    else:
        move(kind, target, source, count)
    if runs[row, UNIT] >= 0:  # from where the bytes are in cache
        sums[runs[row, UNIT]] += tile_sum(
            source if _plain(kind) else target, nbytes, (runs[row, POSITION] + done) << shift
        )


@compiled("void(int64[:, ::1], int64, uint64[::1], uint64[::1], boolean)")
def _snapshot(runs: Any, slot: Any, sums: Any, tile: Any, large: Any) -> None:
    scratch = tile.ctypes.data
    for row in range(len(runs)):
        count = runs[row, COUNT]
        for done in range(0, count, TILE):
            _take(runs, row, done, min(TILE, count - done), slot, scratch, sums, large)
    settle()


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
def _compare(
    target: Any, source: Any, other: Any, stream: Any, new: Any, old: Any, first: Any, index: Any, values: Any,
    olds: Any, listed: Any,
) -> Any:  # fmt: skip
    """``new`` and ``old``: elements at ``source`` and ``other``; with ``stream``, new ones go to ``target`` on the way."""
    size = new.itemsize
    per, in_word, found, start = LINE // size, 8 // size, np.uint64(listed), np.uint64(first)
    lines = len(new) // per
    a, b = longs_at(source, 8 * lines), longs_at(other, 8 * lines)
    for line in range(lines):
        at = line * LINE
        if stream:
            differs = copy_line_differs(target + at, source + at, other + at)
        else:
            differs = line_differs(source + at, other + at)
        if differs:
            for word in range(np.uint64(8 * line), np.uint64(8 * line + 8)):
                if a[word] != b[word]:
                    begin = word * np.uint64(in_word)
                    found = _append(new, old, begin, begin + np.uint64(in_word), start, index, values, olds, found)
    begin = np.uint64(lines * per)
    if stream:
        copy_bytes(target + lines * LINE, source + lines * LINE, len(new) * size - lines * LINE)
    return np.int64(_append(new, old, begin, np.uint64(len(new)), start, index, values, olds, found))


@compiled("int64(int64, int64, int64, int64, boolean, int64, int64, int64, int64, int64, int64)")
def _list(
    width: int,
    target: int,
    source: int,
    other: int,
    stream: bool,
    count: int,
    first: int,
    index: int,
    values: int,
    olds: int,
    found: int,
) -> Any:
    """Append where ``count`` elements differ to lists of at most a block; returns how many are listed then."""
    listed = halves_at(index, _ROOM)
    if width == 1:
        return _compare(
            target, source, other, stream, bytes_at(source, count), bytes_at(other, count), first, listed,
            bytes_at(values, _ROOM), bytes_at(olds, _ROOM), found,
        )  # fmt: skip
    if width == 2:
        return _compare(
            target, source, other, stream, halves_at(source, count), halves_at(other, count), first, listed,
            halves_at(values, _ROOM), halves_at(olds, _ROOM), found,
        )  # fmt: skip
    if width == 4:
        return _compare(
            target, source, other, stream, words_at(source, count), words_at(other, count), first, listed,
            words_at(values, _ROOM), words_at(olds, _ROOM), found,
        )  # fmt: skip
    return _compare(
        target, source, other, stream, longs_at(source, count), longs_at(other, count), first, listed,
        longs_at(values, _ROOM), longs_at(olds, _ROOM), found,
    )  # fmt: skip


@inline
def _pad8(nbytes: Any) -> Any:
    return (nbytes + 7) & ~7


@compiled(
    "int64(int64[:, ::1], int64[:, ::1], int64, int64, uint64[::1], uint16[::1], uint8[::1], uint8[::1],"
    " uint64[:, ::1], boolean)"
)
def _diff(
    runs: Any,
    blocks: Any,
    slot: Any,
    base_slot: Any,
    sums: Any,
    counts: Any,
    payload: Any,
    old: Any,
    lists: Any,
    large: Any,
) -> Any:
    index = lists.ctypes.data
    values, olds, scratch = index + 8 * _ROOM, index + 16 * _ROOM, index + 24 * _ROOM
    to, to_old = payload.ctypes.data, old.ctypes.data
    used, fits = 0, True
    row, done = 0, 0
    for block in range(len(blocks)):
        lo, length, width = blocks[block, LO], blocks[block, LENGTH], blocks[block, WIDTH]
        end, most, found = lo + length * width, min(length * width // (2 + width), DENSE - 1), 0
        while row < len(runs) and runs[row, SLOT] + done * width < end:
            at = runs[row, SLOT] + done * width
            count = min(TILE, runs[row, COUNT] - done, (end - at) // width)
            source, kind, nbytes = _gathered(runs, row, done, count, scratch), runs[row, KIND], count * width
            target, other, first, listing = slot + at, base_slot + at, (at - lo) // width, fits and found <= most
            stream = listing and large and _plain(kind) and target % LINE == 0
            if not stream:
                move(kind, target, source, count)
            if not _plain(kind):
                source = target
            if listing:
                found = _list(width, target, source, other, stream, count, first, index, values, olds, found)
            if runs[row, UNIT] >= 0:
                sums[runs[row, UNIT]] += tile_sum(source, nbytes, (runs[row, POSITION] + done) * width)
            done += count
            if done == runs[row, COUNT]:
                row, done = row + 1, 0
        counts[block] = found if found <= most else DENSE
        if not fits:
            continue
        skip = _pad8(2 * found) if found <= most else 0
        size = skip + _pad8(width * found if found <= most else width * length)
        fits = used + size <= len(payload)
        if not fits:
            continue
        if found <= most:
            copy_bytes(to + used, index, 2 * found)
            copy_bytes(to + used + skip, values, width * found)
            copy_bytes(to_old + used + skip, olds, width * found)
        else:
            copy_bytes(to + used, slot + lo, length * width)
            copy_bytes(to_old + used, base_slot + lo, length * width)
        used += size
    settle()
    return used if fits else -1


@compiled("void(int64[:, ::1], int64, boolean)")
def _scatter(runs: Any, stage: Any, large: Any) -> None:
    for row in range(len(runs)):
        shift, step, target = _log2(runs[row, KIND] & 7), runs[row, STEP], runs[row, LIVE]
        if step != 1:
            spread(target, stage + runs[row, SLOT], step, runs[row, COUNT], 1 << shift)
        elif large and target % LINE == 0:
            _stream(target, stage + runs[row, SLOT], runs[row, COUNT] << shift)
        else:
            copy_bytes(target, stage + runs[row, SLOT], runs[row, COUNT] << shift)
    settle()


def _large(runs: Ints) -> bool:
    """More than caches hold: what is written will have left them before anyone reads it."""
    return int(runs[:, COUNT] @ base.wire_width(runs[:, KIND])) > _LARGE_BYTES


def snapshot(runs: Ints, slot: int, sums: Sums) -> None:
    _snapshot(runs, slot, sums, np.empty(TILE, np.uint64), _large(runs))


def diff(
    runs: Ints, blocks: Ints, slot: int, base_slot: int, sums: Sums, counts: Counts, payload: Bytes, old: Bytes
) -> int:
    # Not made inside: numba frees an array after the last use of its name, whoever still has its address.
    lists = np.empty((4, _ROOM), np.uint64)
    return int(_diff(runs, blocks, slot, base_slot, sums, counts, payload, old, lists, _large(runs)))


def scatter(runs: Ints, stage: int) -> None:
    _scatter(runs, stage, _large(runs))
