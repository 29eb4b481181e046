"""The digest in numpy: what every other kernel must equal, and what runs where numba is not installed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mx_rl.columns import chunks, expand

Words = npt.NDArray[np.uint64]

STEP = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
TURN = 23

_LONG_BYTES = 1 << 10
"""Shorter runs are summed byte by byte, many at once: a step of the interpreter costs more."""

_CHUNK_WORDS = 1 << 17
"""Words at a time: the temporaries stay in cache."""


def weights(words: Words) -> tuple[Words, Words]:
    """The two odd weights of the 8-byte words with these numbers: of the low and of the high 4 bytes."""
    mixed = (words + np.uint64(1)) * STEP
    mixed = (mixed ^ (mixed >> np.uint64(32))) * MULTIPLIER
    mixed ^= mixed >> np.uint64(29)
    turned = (mixed << np.uint64(TURN)) | (mixed >> np.uint64(64 - TURN))
    return mixed | np.uint64(1), turned | np.uint64(1)


def sum_runs(data: npt.NDArray[np.uint8], runs: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> Words:
    """One sum for each group of runs, group i being runs[starts[i]:starts[i + 1]].

    ``data``: contiguous bytes. ``runs``: rows (offset in ``data``, byte of the global tensor, nbytes).
    """
    group = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    sums = np.zeros(len(starts) - 1, np.uint64)
    long = runs[:, 2] >= _LONG_BYTES
    for i in np.flatnonzero(long).tolist():
        np.add.at(sums, group[i], _sum(data, *runs[i].tolist()))
    short = np.flatnonzero(~long)
    for part in chunks(runs[short, 2], _CHUNK_WORDS):
        rows = short[part]
        row, position = expand(runs[rows, 2])
        place = runs[rows, 1][row] + position
        low, high = weights((place // 8).astype(np.uint64))
        half = data[runs[rows, 0][row] + position].astype(np.uint64) << (place % 4 * 8).astype(np.uint64)
        np.add.at(sums, group[rows][row], half * np.where(place % 8 < 4, low, high))
    return sums


def _sum(data: npt.NDArray[np.uint8], local: int, place: int, nbytes: int) -> np.uint64:
    """Of one run, as if the bytes around it in its first and last word were 0: sums of disjoint runs add up."""
    total = np.zeros(1, np.uint64)
    first, end = place // 8, -(-(place + nbytes) // 8)
    for begin in range(first, end, _CHUNK_WORDS):
        count = min(_CHUNK_WORDS, end - begin)
        lo, hi = max(place, 8 * begin), min(place + nbytes, 8 * (begin + count))
        padded = np.zeros(8 * count, np.uint8)
        padded[lo - 8 * begin : hi - 8 * begin] = data[local + lo - place : local + hi - place]
        halves = padded.view("<u4").astype(np.uint64)
        low, high = weights(np.arange(begin, begin + count, dtype=np.uint64))
        total += (halves[0::2] * low + halves[1::2] * high).sum(dtype=np.uint64)
    return np.uint64(total[0])
