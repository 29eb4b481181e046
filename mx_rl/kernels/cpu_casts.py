"""Casts between floating-point formats on integer registers, one tile at a time: equal to ``Tensor.to`` bit for bit.

16-bit floats are made from, and read as, 32-bit ones; numba has neither format for CPUs, and the loops below become
vector code without them. What NaNs become is written in ``plain.cast``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mx_rl.kernels.cpu_memory import compiled, copy_bytes, doubles_at, floats_at, halves_at, inline

_1, _13, _16 = np.uint32(1), np.uint32(13), np.uint32(16)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_SIGN = np.uint32(0x80000000)
_INF = np.uint32(0x7F800000)
_QUIET = np.uint32(0x00400000)


@inline
def _bits(value: Any) -> Any:
    return np.float32(value).view(np.uint32)


@inline
def _float(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)  # numba makes 64 bits of an operation on two times 32


@inline
def _to_bf16(value: Any) -> Any:
    bits = _bits(value)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> _16) & _1)) >> _16
    return np.uint16(np.uint32(0xFFFF) if (bits & _MAGNITUDE) > _INF else rounded)


@inline
def _to_f16(value: Any) -> Any:
    bits = _bits(value)
    size = bits & _MAGNITUDE
    sign = (bits >> _16) & np.uint32(0x8000)
    # The exponent is 112 less; what rounds over the largest finite number becomes infinity by its own carry.
    normal = (size - np.uint32(0x38000000) + np.uint32(0xFFF) + ((size >> _13) & _1)) >> _13
    # Below 2^-14: added to 0.5, whose last bit is the smallest subnormal, a number is rounded to one.
    small = _bits(_float(size) + np.float32(0.5)) - np.uint32(0x3F000000)
    found = small if size < np.uint32(0x38800000) else normal
    found = np.uint32(0x7C00) if size >= np.uint32(0x47800000) else found
    found = np.uint32(0x7E00) | ((size >> _13) & np.uint32(0x3FF)) if size > _INF else found
    return np.uint16(found | sign)


@inline
def _of_f16(half: Any) -> Any:
    bits = np.uint32(half)
    size = bits & np.uint32(0x7FFF)
    sign = (bits & np.uint32(0x8000)) << _16
    normal = (size << _13) + np.uint32(0x38000000)
    small = _bits(np.float32(np.int32(size)) * np.float32(2.0**-24))
    found = small if size < np.uint32(0x400) else normal
    found = (size << _13) | _INF if size >= np.uint32(0x7C00) else found
    found = found | _QUIET if size > np.uint32(0x7C00) else found
    return _float(found | sign)


@inline
def _of_bf16(half: Any) -> Any:
    return _float(np.uint32(half) << _16)


@inline
def _f16_to_bf16(half: Any) -> Any:
    size = np.uint32(half) & np.uint32(0x7FFF)
    return np.uint16(0x7FC0) if size > np.uint32(0x7C00) else _to_bf16(_of_f16(half))


@compiled("void(int64, int64, int64, int64)")
def move(kind: int, target: int, source: int, count: int) -> None:
    """Copy, and cast, ``count`` elements that lie side by side on both sides."""
    wire = kind & 7
    if kind >> 3 == wire:
        copy_bytes(target, source, count << wire)
    elif kind == 4 << 3 | 5:
        of, to = halves_at(source, count), halves_at(target, count)
        for i in range(count):
            to[i] = _f16_to_bf16(of[i])
    elif kind == 4 << 3 | 6:
        of, to32 = halves_at(source, count), floats_at(target, count)
        for i in range(count):
            to32[i] = _of_f16(of[i])
    elif kind == 4 << 3 | 7:
        of, to64 = halves_at(source, count), doubles_at(target, count)
        for i in range(count):
            to64[i] = np.float64(_of_f16(of[i]))
    elif kind == 5 << 3 | 4:
        of, to = halves_at(source, count), halves_at(target, count)
        for i in range(count):
            to[i] = _to_f16(_of_bf16(of[i]))
    elif kind == 5 << 3 | 6:
        of, to32 = halves_at(source, count), floats_at(target, count)
        for i in range(count):
            to32[i] = _of_bf16(of[i])
    elif kind == 5 << 3 | 7:
        of, to64 = halves_at(source, count), doubles_at(target, count)
        for i in range(count):
            to64[i] = np.float64(_of_bf16(of[i]))
    elif kind == 6 << 3 | 4:
        of32, to = floats_at(source, count), halves_at(target, count)
        for i in range(count):
            to[i] = _to_f16(of32[i])
    elif kind == 6 << 3 | 5:
        of32, to = floats_at(source, count), halves_at(target, count)
        for i in range(count):
            to[i] = _to_bf16(of32[i])
    elif kind == 6 << 3 | 7:
        of32, to64 = floats_at(source, count), doubles_at(target, count)
        for i in range(count):
            to64[i] = np.float64(of32[i])
    elif kind == 7 << 3 | 4:
        of64, to = doubles_at(source, count), halves_at(target, count)
        for i in range(count):
            to[i] = _to_f16(np.float32(of64[i]))
    elif kind == 7 << 3 | 5:
        of64, to = doubles_at(source, count), halves_at(target, count)
        for i in range(count):
            to[i] = _to_bf16(np.float32(of64[i]))
    elif kind == 7 << 3 | 6:
        of64, to32 = doubles_at(source, count), floats_at(target, count)
        for i in range(count):
            to32[i] = np.float32(of64[i])
