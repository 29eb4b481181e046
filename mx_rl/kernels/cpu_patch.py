"""Check, write and gather for CPUs: what a delta's entries meet in live memory, found by the runs of a plan."""

from __future__ import annotations

from typing import Any

import numpy as np

from mx_rl.kernels import base
from mx_rl.kernels.base import Bytes, Ints, Sums
from mx_rl.kernels.cpu_memory import (
    bytes_at,
    compiled,
    halves_at,
    inline,
    longs_at,
    value_term,
    words_at,
)

LIVE, STEP, SLOT, COUNT, POSITION, UNIT, KIND = range(base.RUN_COLUMNS)
LO, LENGTH, WIDTH = range(base.BLOCK_COLUMNS)
E_BLOCK, E_COUNT, E_DENSE, E_INDEX, E_VALUE, E_FIRST, E_LAST = range(base.ENTRY_COLUMNS)
_CHECK, _WRITE, _GATHER, _WEIGH = range(4)


@inline
def _at_least(index: Any, begin: Any, end: Any, bound: Any) -> Any:
    """The first of ``index[begin:end]``, ascending, that is not below ``bound``: most often near the begin."""
    step = 1
    while begin + step < end and index[begin + step] < bound:
        begin += step
        step *= 2
    end = min(end, begin + step + 1)
    while begin < end:
        middle = (begin + end) >> 1
        if index[middle] < bound:
            begin = middle + 1
        else:
            end = middle
    return begin


@inline
def _meet(
    mode: Any,
    entry: Any,
    index: Any,
    values: Any,
    other: Any,
    live: Any,
    run: Any,
    first: Any,
    begin: Any,
    end: Any,
    width: Any,
    sums_old: Any,
    sums_new: Any,
) -> None:
    """Entries ``begin`` to ``end`` of a block, all of which one run takes; ``first``: its element 0 in the block."""
    dense, step, position, unit = entry[E_DENSE] != 0, run[STEP], run[POSITION], run[UNIT]
    if mode == _CHECK:
        was, will = np.uint64(0), np.uint64(0)
        for j in range(begin, end):
            element = (j if dense else np.int64(index[j])) - first
            was += value_term(live[element * step], position + element, width)
            will += value_term(values[j], position + element, width)
        sums_old[unit] += was
        sums_new[unit] += will
    elif mode == _WEIGH:
        was, will = np.uint64(0), np.uint64(0)
        for j in range(begin, end):
            place = position + (j if dense else np.int64(index[j])) - first
            was += value_term(other[j], place, width)
            will += value_term(values[j], place, width)
        sums_old[unit] += was
        sums_new[unit] += will
    elif mode == _WRITE:
        for j in range(begin, end):
            live[((j if dense else np.int64(index[j])) - first) * step] = values[j]
    else:
        for j in range(begin, end):
            other[j] = live[((j if dense else np.int64(index[j])) - first) * step]


@compiled("void(int64, int64[:, ::1], int64[:, ::1], uint8[::1], int64[:, ::1], uint64[::1], uint64[::1], uint8[::1])")
def _patch(
    mode: int, entries: Any, blocks: Any, payload: Any, runs: Any, sums_old: Any, sums_new: Any, old: Any
) -> None:
    memory, memory_old = payload.ctypes.data, old.ctypes.data
    for row in range(len(entries)):
        entry = entries[row]
        count, dense = entry[E_COUNT], entry[E_DENSE] != 0
        if count == 0:
            continue
        lo, width = blocks[entry[E_BLOCK], LO], blocks[entry[E_BLOCK], WIDTH]
        index = halves_at(memory + entry[E_INDEX], 0 if dense else count)
        at, at_old = memory + entry[E_VALUE], memory_old + entry[E_VALUE]
        passed, reached = 0, 0  # entries before ``reached`` lie before element ``passed``
        for turn in range(entry[E_LAST] - entry[E_FIRST]):
            # Backwards where they are read: of several runs over one element, the first is read last and stays.
            which = entry[E_LAST] - 1 - turn if mode == _GATHER else entry[E_FIRST] + turn
            run = runs[which]
            if run[UNIT] < 0 and mode in (_CHECK, _WEIGH):
                continue
            first = (run[SLOT] - lo) // width
            lowest, highest = max(first, 0), first + run[COUNT]
            if dense:
                begin, end = min(lowest, count), min(highest, count)
            else:
                begin = _at_least(index, reached if lowest >= passed else 0, count, lowest)
                end = _at_least(index, begin, count, highest)
                passed, reached = highest, end
            if begin >= end:
                continue
            if width == 1:
                _meet(
                    mode, entry, index, bytes_at(at, count), bytes_at(at_old, count),
                    bytes_at(run[LIVE], run[COUNT]), run, first, begin, end, width, sums_old, sums_new,
                )  # fmt: skip
            elif width == 2:
                _meet(
                    mode, entry, index, halves_at(at, count), halves_at(at_old, count),
                    halves_at(run[LIVE], run[COUNT]), run, first, begin, end, width, sums_old, sums_new,
                )  # fmt: skip
            elif width == 4:
                _meet(
                    mode, entry, index, words_at(at, count), words_at(at_old, count),
                    words_at(run[LIVE], run[COUNT]), run, first, begin, end, width, sums_old, sums_new,
                )  # fmt: skip
            else:
                _meet(
                    mode, entry, index, longs_at(at, count), longs_at(at_old, count),
                    longs_at(run[LIVE], run[COUNT]), run, first, begin, end, width, sums_old, sums_new,
                )  # fmt: skip


@compiled("int64(int64[:, ::1], int64[:, ::1], uint8[::1])")
def _disorder(entries: Any, blocks: Any, payload: Any) -> Any:
    for row in range(len(entries)):
        count, length = entries[row, E_COUNT], blocks[entries[row, E_BLOCK], LENGTH]
        if entries[row, E_DENSE]:
            if count > length:
                return row
            continue
        index = halves_at(payload.ctypes.data + entries[row, E_INDEX], count)
        before: Any = -1
        wrong: Any = False
        for j in range(count):
            wrong |= np.int64(index[j]) <= before
            before = np.int64(index[j])
        if wrong or before >= length:
            return row
    return -1


_NO_SUMS = np.zeros(0, np.uint64)
_NO_BYTES = np.zeros(0, np.uint8)


def check(entries: Ints, blocks: Ints, payload: Bytes, runs: Ints, sums_old: Sums, sums_new: Sums) -> None:
    _patch(_CHECK, entries, blocks, payload, runs, sums_old, sums_new, _NO_BYTES)


def weigh(entries: Ints, blocks: Ints, payload: Bytes, old: Bytes, runs: Ints, sums_old: Sums, sums_new: Sums) -> None:
    _patch(_WEIGH, entries, blocks, payload, runs, sums_old, sums_new, old)


def write(entries: Ints, blocks: Ints, payload: Bytes, runs: Ints) -> None:
    _patch(_WRITE, entries, blocks, payload, runs, _NO_SUMS, _NO_SUMS, _NO_BYTES)


def gather(entries: Ints, blocks: Ints, payload: Bytes, runs: Ints, old: Bytes) -> None:
    _patch(_GATHER, entries, blocks, payload, runs, _NO_SUMS, _NO_SUMS, old)


def disorder(entries: Ints, blocks: Ints, payload: Bytes) -> int:
    return int(_disorder(entries, blocks, payload))
