"""Byte runs: boxes inside boxes as (stage offset, source offset, nbytes) rows, merged where both sides go on together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mx_rl.columns import Ints, chunks, expand

STAGE, SOURCE, NBYTES = range(3)


def strides_of(sizes: Ints) -> Ints:
    """C-order strides, in elements, of boxes [n, D]."""
    inner = np.ones_like(sizes)
    inner[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
    return inner


def byte_runs(owner: Ints, stage: Ints, source: Ints, size: Ints, whole: Ints, itemsize: Ints) -> tuple[Ints, Ints]:
    """The runs that copy each piece, compact in the stage, out of the box in which it lies: (owner of each run, runs).

    Per piece, in stage order: ``owner``, ``stage`` and ``source`` offset of its first byte, its ``size`` [n, D], and the
    size of the ``whole`` source box, in elements. Runs of different owners are never merged.
    """
    # A dimension is inside a run if everything below it is taken whole; the first that is not begins a new run each step.
    full = np.ones_like(size, dtype=np.bool_)
    full[:, :-1] = np.logical_and.accumulate((size == whole)[:, :0:-1], axis=1)[:, ::-1]
    outer = np.where(full, 1, size)
    nbytes = np.where(full, size, 1).prod(axis=1) * itemsize
    stride = strides_of(whole) * itemsize[:, None]
    counts = outer.prod(axis=1)
    owners, merged = [np.zeros(0, np.int64)], [np.zeros((0, 3), np.int64)]
    for part in chunks(counts):
        group, position = expand(counts[part])
        at = source[part][group]
        step = position.copy()
        for d in reversed(range(size.shape[1])):
            sizes = outer[part, d]
            if sizes.max() > 1:
                at += step % sizes[group] * stride[part, d][group]
                step //= sizes[group]
        length = nbytes[part][group]
        runs = np.stack([stage[part][group] + position * length, at, length], axis=1)
        found = merge(owner[part][group], runs)
        owners.append(found[0])
        merged.append(found[1])
    return merge(np.concatenate(owners), np.concatenate(merged))


def merge(owner: Ints, runs: Ints) -> tuple[Ints, Ints]:
    """Join neighbours of one owner with the same gap on both sides: in the stage it is padding, so nothing is lost."""
    if len(runs) < 2:
        return owner, runs
    gap = runs[1:, :2] - runs[:-1, :2] - runs[:-1, NBYTES:]
    joined = (owner[1:] == owner[:-1]) & (gap[:, STAGE] == gap[:, SOURCE])
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    last = np.append(first[1:] - 1, len(runs) - 1)
    found = runs[first]
    found[:, NBYTES] = runs[last, STAGE] + runs[last, NBYTES] - found[:, STAGE]
    return owner[first], found


def cut(runs: Ints, window_bytes: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut one source's runs every ``window_bytes`` of the stage, counted from the first run.

    Returns (runs, starts, needs, bounds): window i is runs[starts[i]:starts[i + 1]], fills stage bytes bounds[i], and
    may be read once the source has confirmed needs[i] of its own windows.
    """
    lo, ends = runs[0, STAGE], runs[:, STAGE] + runs[:, NBYTES]
    first, last = (runs[:, STAGE] - lo) // window_bytes, (ends - 1 - lo) // window_bytes
    group, position = expand(last - first + 1)
    window = first[group] + position
    begin = np.maximum(runs[group, STAGE], lo + window * window_bytes)
    end = np.minimum(ends[group], lo + (window + 1) * window_bytes)
    source = runs[group, SOURCE] + begin - runs[group, STAGE]
    count = int(last[-1]) + 1
    starts = np.searchsorted(window, np.arange(count + 1)).astype(np.int64)
    needs = np.maximum.reduceat(-(-(source + end - begin) // window_bytes), starts[:-1])
    edges = np.minimum(lo + np.arange(count + 1) * window_bytes, ends[-1])
    return np.stack([begin, source, end - begin], axis=1), starts, needs, np.stack([edges[:-1], edges[1:]], axis=1)


def strided(offset: int, address: int, strides: Sequence[tuple[int, int]], shape: Sequence[int], itemsize: int) -> Ints:
    """Rows (offset, address, nbytes) that pair the elements of two boxes of one ``shape``, each with strides of its own.

    ``strides``: per dimension (bytes in the first box, bytes in the second). Inner dimensions that lie alike and without
    a gap on both sides become one row.
    """
    nbytes = itemsize
    outer: list[tuple[int, int, int]] = []
    for (left, right), size in zip(reversed(strides), reversed(shape), strict=True):
        if size == 1:
            continue
        if not outer and left == right == nbytes:
            nbytes *= size
        else:
            outer.append((left, right, size))
    rows = np.array([[offset, address, nbytes]], dtype=np.int64)
    for left, right, size in outer:
        steps = np.arange(size, dtype=np.int64)[:, None, None] * np.array([left, right, 0], dtype=np.int64)
        rows = (steps + rows).reshape(-1, 3)
    return rows if all(shape) else rows[:0]


def in_order(rows: Ints) -> Ints:
    """Rows by their first column: what ``compose`` takes as a table."""
    return rows[np.argsort(rows[:, STAGE], kind="stable")]


def compose(runs: Ints, table: Ints, side: int) -> tuple[Ints, Ints]:
    """Replace the offsets of one side (STAGE or SOURCE) by what ``table`` says lies there.

    ``table``: rows (offset, address, nbytes), in order, disjoint. Returns (runs, for each the index of the run that it is
    a part of), in the order of the runs; runs are cut where the table goes on elsewhere, and bytes that it does not hold
    are left out: padding, and what is not wanted.
    """
    begin, end = runs[:, side], runs[:, side] + runs[:, NBYTES]
    starts, ends = table[:, 0], table[:, 0] + table[:, 2]
    first = np.searchsorted(ends, begin, side="right")
    counts = np.maximum(np.searchsorted(starts, end, side="left") - first, 0)
    found, owners = [np.zeros((0, 3), np.int64)], [np.zeros(0, np.int64)]
    for part in chunks(counts):
        group, position = expand(counts[part])
        group += part.start
        row = first[group] + position
        low = np.maximum(begin[group], starts[row])
        pieces = runs[group]  # a copy
        pieces[:, :2] += (low - begin[group])[:, None]
        pieces[:, side] = table[row, 1] + low - starts[row]
        pieces[:, NBYTES] = np.minimum(end[group], ends[row]) - low
        found.append(pieces)
        owners.append(group)
    return np.concatenate(found), np.concatenate(owners)


def join(owner: Ints, runs: Ints) -> tuple[Ints, Ints]:
    """Join neighbours of one owner that go on without a gap on both sides."""
    if len(runs) < 2:
        return owner, runs
    on = (runs[1:, :2] == runs[:-1, :2] + runs[:-1, NBYTES:]).all(axis=1) & (owner[1:] == owner[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~on]))
    found = runs[first]
    found[:, NBYTES] = np.add.reduceat(runs[:, NBYTES], first)
    return owner[first], found
