"""The digest: an additive 64-bit sum over the wire bytes of a global tensor, equal under any cut into boxes.

Over the row-major bytes of the global tensor in its wire dtype, little-endian:

    D = sum over 8-byte words k of low(k) * w(k) + high(k) * w'(k)   mod 2^64

low and high are the word's 4-byte halves, w and w' odd 64-bit values from one mix of k (``kernels/reference.py``). It is
linear in each half, and a byte that is not there counts as 0, so that the sums of disjoint boxes add up to the sum of
their union, wherever they are cut. A single wrong byte is always seen. It finds damage, misplacement and drift; it is no
cryptographic seal: who wants two contents with one sum can make them.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mx_rl.columns import Ints, expand, groups, ints, starts_of
from mx_rl.copies import spread
from mx_rl.kernels import reference
from mx_rl.runs import byte_runs, strides_of

log = logging.getLogger("mx_rl")

Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]

SMALL_BYTES = 8 << 20
"""Up to here numpy is quick enough (some 20 ms), and an import of numba (a second, 100 MB) is not worth it."""

_PART_BYTES = 16 << 20
"""What one thread sums at a time."""

_lock = threading.Lock()
_fast: list[Any] = []  # the compiled kernel, or None where numba is not installed; empty until it is needed


def box_runs(shape: Ints, lo: Ints, size: Ints, itemsize: Ints, offset: Ints) -> tuple[Ints, Ints]:
    """(runs, starts) of boxes [n, D] at byte ``offset`` [n] of some memory, each compact in C order: the bytes of box i
    are runs[starts[i]:starts[i + 1]], rows (offset, byte of the global tensor, nbytes)."""
    place = (lo * strides_of(shape)).sum(axis=1) * itemsize
    owner, runs = byte_runs(np.arange(len(offset), dtype=np.int64), offset, place, size, shape, itemsize)
    return runs, starts_of(np.bincount(owner, minlength=len(offset)).astype(np.int64))


def sum_runs(data: Bytes, runs: Ints, starts: Ints) -> Sums:
    """One sum for each group of runs over ``data`` (contiguous). The interpreter runs on meanwhile where numba is
    installed."""
    kernel = _kernel() if int(runs[:, 2].sum()) > SMALL_BYTES else None
    if kernel is None:
        return reference.sum_runs(data, runs, starts)
    if data.ctypes.data % 8:
        data = data.copy()
    found: Sums = kernel(data, data[: len(data) // 8 * 8].view(np.uint64), np.ascontiguousarray(runs), starts)
    return found


def box_sum(data: Bytes, shape: Sequence[int], lo: Sequence[int], size: Sequence[int], itemsize: int) -> int:
    """The sum of one box, compact in ``data``, of the global tensor ``shape``; ``itemsize`` in bytes."""
    width = max(len(shape), 1)
    whole, begin, extent = (
        ints([*row, *[fill] * (width - len(row))])[None] for row, fill in ((shape, 1), (lo, 0), (size, 1))
    )
    runs, starts = box_runs(whole, begin, extent, ints([itemsize]), ints([0]))
    return int(sum_runs(data, runs, starts)[0])


def spanned(runs: Ints) -> tuple[Bytes, Ints]:
    """(memory from the first to the last byte of ``runs``, whose offsets are addresses; the same runs with offsets in it).
    Whoever sums reads no byte between the runs, which may be nobody's."""
    if not len(runs):
        return np.zeros(0, np.uint8), runs
    low = int(runs[:, 0].min()) & ~7
    nbytes = int((runs[:, 0] + runs[:, 2]).max()) - low
    data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(low))
    return data, runs - np.array([low, 0, 0], dtype=np.int64)


class Summing:
    """``sum_runs`` prepared: the same runs again and again, on several threads where there are many bytes."""

    def __init__(self, runs: Ints, starts: Ints) -> None:
        self._count = len(starts) - 1
        self._fast = int(runs[:, 2].sum()) > SMALL_BYTES
        row, position = expand(-(-runs[:, 2] // _PART_BYTES))
        parts = runs[row]  # a copy
        parts[:, :2] += (position * _PART_BYTES)[:, None]
        parts[:, 2] = np.minimum(runs[row, 2] - position * _PART_BYTES, _PART_BYTES)
        group = np.repeat(np.arange(self._count, dtype=np.int64), np.diff(starts))[row]
        job = np.cumsum(parts[:, 2]) // _PART_BYTES
        edges = [*np.flatnonzero(groups(job)).tolist(), len(parts)] if len(parts) else [0]
        self._jobs: list[tuple[Ints, Ints, Ints]] = []
        for begin, end in itertools.pairwise(edges):
            first = np.flatnonzero(groups(group[begin:end]))
            self._jobs.append((parts[begin:end], np.append(first, end - begin), group[begin:end][first]))

    def run(self, data: Bytes) -> Sums:
        """The sum of each group. ``data`` begins at a multiple of 8."""
        kernel = _kernel() if self._fast else None
        found: dict[int, Sums] = {}

        def job(index: int) -> None:
            runs, starts, _ = self._jobs[index]
            if kernel is None:
                found[index] = reference.sum_runs(data, runs, starts)
            else:
                found[index] = kernel(data, data[: len(data) // 8 * 8].view(np.uint64), runs, starts)

        spread([partial(job, index) for index in range(len(self._jobs))])
        sums = np.zeros(self._count, np.uint64)
        for index, (_, _, group) in enumerate(self._jobs):
            np.add.at(sums, group, found[index])
        return sums


def warm(nbytes: int) -> None:
    """Load what sums so many bytes now, rather than in the first version."""
    if nbytes > SMALL_BYTES:
        _kernel()


def _kernel() -> Any:
    with _lock:
        if not _fast:
            try:
                _fast.append(importlib.import_module("mx_rl.kernels.cpu").sum_runs)
            except ImportError as exc:
                log.warning("digests are made by numpy, at a tenth of the speed: numba cannot be imported: %s", exc)
                _fast.append(None)
        return _fast[0]
