"""The digest for CPUs, compiled by numba: one pass at memory speed, without the interpreter's lock."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from mx_rl.kernels import reference

_STEP, _MULTIPLIER, _TURN = reference.STEP, reference.MULTIPLIER, np.uint64(reference.TURN)
_BACK = np.uint64(64 - reference.TURN)
_ONE, _8, _29, _32, _64 = np.uint64(1), np.uint64(8), np.uint64(29), np.uint64(32), np.uint64(64)
_LOW = np.uint64(0xFFFFFFFF)


def _compile(signature: str, function: Any) -> Any:
    """Cached on disk where numba finds a place to write."""
    try:
        return numba.njit(signature, nogil=True, cache=True)(function)
    except RuntimeError:  # numba: "no locator available": neither the package's folder nor the user's can be written
        return numba.njit(signature, nogil=True)(function)


@numba.njit(inline="always")
def _term(word: Any, k: Any) -> Any:
    return _weighed(word, (k + _ONE) * _STEP)


@numba.njit(inline="always")
def _weighed(word: Any, seed: Any) -> Any:
    """``seed``: (k + 1) * STEP, which goes up by STEP from word to word."""
    mixed = (seed ^ (seed >> _32)) * _MULTIPLIER
    mixed ^= mixed >> _29
    turned = (mixed << _TURN) | (mixed >> _BACK)
    return (word & _LOW) * (mixed | _ONE) + (word >> _32) * (turned | _ONE)


@numba.njit(nogil=True)
def _sum_words(words: Any, k: Any) -> Any:
    total, seed = np.uint64(0), (k + _ONE) * _STEP
    for i in range(len(words)):
        total += _weighed(words[i], seed)
        seed += _STEP
    return total


@numba.njit(nogil=True)
def _sum_turned(words: Any, following: Any, k: Any, shift: Any) -> Any:
    """Of words that begin ``shift`` bits inside ``words``."""
    total, seed = np.uint64(0), (k + _ONE) * _STEP
    for i in range(len(words)):
        total += _weighed((words[i] >> shift) | (following[i] << (_64 - shift)), seed)
        seed += _STEP
    return total


def _sum_runs(data: Any, words: Any, runs: Any, starts: Any) -> Any:
    """``words`` is ``data`` in 8-byte words, its last bytes left out where they fill none."""
    sums = np.zeros(len(starts) - 1, np.uint64)
    for group in range(len(sums)):
        total = np.uint64(0)
        for row in range(starts[group], starts[group + 1]):
            local, place, left = runs[row, 0], runs[row, 1], runs[row, 2]
            if left <= 0:
                continue
            k = np.uint64(place // 8)
            at = place % 8
            if at != 0 or left < 8:
                word = np.uint64(0)
                count = min(8 - at, left)
                for i in range(count):
                    word |= np.uint64(data[local + i]) << (_8 * np.uint64(at + i))
                total += _term(word, k)
                local, left, k = local + count, left - count, k + _ONE
            shift = np.uint64(local % 8) * _8
            index = local // 8
            if shift == 0:
                whole = left // 8
                total += _sum_words(words[index : index + whole], k)
            else:
                whole = max(min(left // 8, len(words) - index - 1), 0)
                total += _sum_turned(words[index : index + whole], words[index + 1 : index + 1 + whole], k, shift)
            local, left, k = local + 8 * whole, left - 8 * whole, k + np.uint64(whole)
            while left > 0:
                word = np.uint64(0)
                count = min(np.int64(8), left)
                for i in range(count):
                    word |= np.uint64(data[local + i]) << (_8 * np.uint64(i))
                total += _term(word, k)
                local, left, k = local + count, left - count, k + _ONE
        sums[group] = total
    return sums


sum_runs = _compile("uint64[::1](uint8[::1], uint64[::1], int64[:, ::1], int64[::1])", _sum_runs)
"""As ``reference.sum_runs``, with the words of ``data`` (which begins at a multiple of 8) after it."""
