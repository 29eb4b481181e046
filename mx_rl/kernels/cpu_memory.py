"""Memory by address in compiled code, and the digest and the gather of one tile of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from mx_rl.kernels import cpu

TILE = 4096
"""Elements moved at a time: what is cast, compared and summed in turn stays in the first cache."""

_term = cpu._term


def _make_pointer(_: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), codegen


_pointer: Any = intrinsic(_make_pointer)
_array: Any = numba.carray  # type: ignore[attr-defined]


def inline(function: Any) -> Any:
    return numba.njit(nogil=True, inline="always")(function)


def compiled(signature: str) -> Callable[[Any], Any]:
    """Compiled now, for this signature, or read from the cache.

    The cache looks at the time of the file that the function stands in, not at those that it takes others from: after a
    change to a function that others inline, delete ``__pycache__``.
    """

    def decorate(function: Any) -> Any:
        return cpu._compile(signature, function)

    return decorate


@inline
def bytes_at(address: Any, count: Any) -> Any:
    return _array(_pointer(address), count, np.uint8)


@inline
def halves_at(address: Any, count: Any) -> Any:
    return _array(_pointer(address), count, np.uint16)


@inline
def words_at(address: Any, count: Any) -> Any:
    return _array(_pointer(address), count, np.uint32)


@inline
def longs_at(address: Any, count: Any) -> Any:
    return _array(_pointer(address), count, np.uint64)


@inline
def floats_at(address: Any, count: Any) -> Any:
    return _array(_pointer(address), count, np.float32)


@inline
def doubles_at(address: Any, count: Any) -> Any:
    return _array(_pointer(address), count, np.float64)


@inline
def value_term(value: Any, element: Any, width: Any) -> Any:
    """What one element adds to the digest of its tensor."""
    place = element * width
    return _term(np.uint64(value) << np.uint64(8 * (place & 7)), np.uint64(place >> 3))


@compiled("uint64(int64, int64, int64)")
def tile_sum(address: int, nbytes: int, place: int) -> Any:
    """The digest of bytes that begin at byte ``place`` of the global tensor."""
    total = np.uint64(0)
    memory = bytes_at(address, nbytes)
    done = 0
    if place & 7 or nbytes < 8:
        word = np.uint64(0)
        done = min(8 - (place & 7), nbytes)
        for i in range(done):
            word |= np.uint64(memory[i]) << np.uint64(8 * ((place & 7) + i))
        total += _term(word, np.uint64(place >> 3))
    count = (nbytes - done) >> 3
    words = longs_at(address + done, count)
    first = np.uint64((place + done) >> 3)
    for i in range(count):
        total += _term(words[i], first + np.uint64(i))
    done += 8 * count
    if done < nbytes:
        word = np.uint64(0)
        for i in range(nbytes - done):
            word |= np.uint64(memory[done + i]) << np.uint64(8 * i)
        total += _term(word, np.uint64((place + done) >> 3))
    return total


@inline
def _collect(target: Any, source: Any, step: Any, count: Any) -> None:
    for i in range(count):
        target[i] = source[i * step]


@compiled("void(int64, int64, int64, int64, int64)")
def collect(target: int, source: int, step: int, count: int, width: int) -> None:
    """Elements of ``width`` bytes, ``step`` apart, side by side."""
    span = (count - 1) * step + 1
    if width == 1:
        _collect(bytes_at(target, count), bytes_at(source, span), step, count)
    elif width == 2:
        _collect(halves_at(target, count), halves_at(source, span), step, count)
    elif width == 4:
        _collect(words_at(target, count), words_at(source, span), step, count)
    else:
        _collect(longs_at(target, count), longs_at(source, span), step, count)


@inline
def _spread(target: Any, source: Any, step: Any, count: Any) -> None:
    for i in range(count):
        target[i * step] = source[i]


@compiled("void(int64, int64, int64, int64, int64)")
def spread(target: int, source: int, step: int, count: int, width: int) -> None:
    """The other way round: side by side in ``source``, ``step`` apart in ``target``."""
    span = (count - 1) * step + 1
    if width == 1:
        _spread(bytes_at(target, span), bytes_at(source, count), step, count)
    elif width == 2:
        _spread(halves_at(target, span), halves_at(source, count), step, count)
    elif width == 4:
        _spread(words_at(target, span), words_at(source, count), step, count)
    else:
        _spread(longs_at(target, span), longs_at(source, count), step, count)


@compiled("void(int64, int64, int64)")
def copy_bytes(target: int, source: int, nbytes: int) -> None:
    whole = nbytes >> 3
    to, of = longs_at(target, whole), longs_at(source, whole)
    for i in range(whole):
        to[i] = of[i]
    left, rest = bytes_at(target, nbytes), bytes_at(source, nbytes)
    for i in range(8 * whole, nbytes):
        left[i] = rest[i]
