"""Every kernel in plain torch and numpy, run by run: what the fast ones must equal."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mx_rl.kernels import base, reference
from mx_rl.kernels.base import Bytes, Counts, Ints, Sums

_DTYPES = {code: dtype for dtype, code in base.CASTS.items()}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_VECTOR = 64


def cast(values: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """``values.to(wire)`` of a 1-d tensor, the same wherever an element lies.

    torch itself gives NaNs another payload in the last few elements than in full vectors, and in strided tensors: here
    all are as in full vectors of contiguous ones.
    """
    padded = torch.zeros(-(-len(values) // _VECTOR) * _VECTOR, dtype=values.dtype)
    padded[: len(values)].view(_SIGNED[values.itemsize]).copy_(values.view(_SIGNED[values.itemsize]))
    return padded.to(wire)[: len(values)]


_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def snapshot(runs: Ints, slot: int, sums: Sums) -> None:
    for live, step, at, count, position, unit, kind in runs.tolist():
        wire = _take(live, step, count, kind)
        _memory(slot + at, len(wire))[:] = wire
        if unit >= 0:
            sums[unit : unit + 1] += _digest(wire, position, base.WIDTHS[kind & 7])


def diff(
    runs: Ints, blocks: Ints, slot: int, base_slot: int, sums: Sums, counts: Counts, payload: Bytes, old: Bytes
) -> int:
    snapshot(runs, slot, sums)
    used = 0
    fits = True
    for row, (lo, length, width) in enumerate(blocks.tolist()):
        inside = np.zeros(length, np.bool_)
        for _, _, at, count, _, _, _ in runs.tolist():
            begin, end = max(at - lo, 0) // width, (at - lo) // width + count
            inside[begin : max(end, 0)] = True
        new = _memory(slot + lo, length * width).view(_UNSIGNED[width])
        was = _memory(base_slot + lo, length * width).view(_UNSIGNED[width])
        changed = np.flatnonzero((new != was) & inside)
        dense = len(changed) > base.most_listed(length, width)
        counts[row] = base.DENSE if dense else len(changed)
        size = base.payload_bytes(int(counts[row]), length, width)
        values, olds = (new, was) if dense else (new[changed], was[changed])
        parts = [] if dense else [changed.astype(np.uint16)]
        fits = fits and used + size <= len(payload)
        if fits:
            at = used
            for part in (*parts, values):
                payload[at : at + part.nbytes] = part.view(np.uint8)
                at += base.pad8(part.nbytes)
            used += size
            begin = used - base.pad8(olds.nbytes)
            old[begin : begin + olds.nbytes] = olds.view(np.uint8)
    return used if fits else -1


def check(entries: Ints, blocks: Ints, payload: Bytes, runs: Ints, sums_old: Sums, sums_new: Sums) -> None:
    for run, target, elements, where, values in _hits(entries, blocks, payload, runs):
        unit, width = int(run[base.UNIT]), values.itemsize
        if unit < 0:
            continue
        place = (elements + int(run[base.POSITION])) * width
        sums_old[unit : unit + 1] += _terms(target[where], place)
        sums_new[unit : unit + 1] += _terms(values, place)


def _terms(values: npt.NDArray[np.unsignedinteger], place: npt.NDArray[np.int64]) -> np.uint64:
    """The digest of elements that begin at these bytes of the global tensor."""
    words = values.astype(np.uint64) << (8 * (place % 8)).astype(np.uint64)
    low, high = reference.weights((place // 8).astype(np.uint64))
    return np.uint64(((words & np.uint64(0xFFFFFFFF)) * low + (words >> np.uint64(32)) * high).sum(dtype=np.uint64))


def weigh(entries: Ints, blocks: Ints, payload: Bytes, old: Bytes, runs: Ints, sums_old: Sums, sums_new: Sums) -> None:
    for values, sums in ((payload, sums_new), (old, sums_old)):
        mixed = payload.copy()  # the indices of one, the values of the other
        for entry in entries.tolist():
            begin, nbytes = entry[base.E_VALUE], entry[base.E_COUNT] * int(blocks[entry[base.E_BLOCK], base.WIDTH])
            mixed[begin : begin + nbytes] = values[begin : begin + nbytes]
        for run, _, elements, _, found in _hits(entries, blocks, mixed, runs):
            unit, width = int(run[base.UNIT]), found.itemsize
            if unit >= 0:
                sums[unit : unit + 1] += _terms(found, (elements + int(run[base.POSITION])) * width)


def write(entries: Ints, blocks: Ints, payload: Bytes, runs: Ints) -> None:
    for _, target, _, where, values in _hits(entries, blocks, payload, runs):
        target[where] = values


def gather(entries: Ints, blocks: Ints, payload: Bytes, runs: Ints, old: Bytes) -> None:
    for entry in entries[::-1]:
        for run in range(int(entry[base.E_LAST]) - 1, int(entry[base.E_FIRST]) - 1, -1):
            one = entry.copy()
            one[base.E_FIRST], one[base.E_LAST] = run, run + 1
            for _, target, elements, where, values in _hits(one[None], blocks, payload, runs):
                width = values.itemsize
                kept = old[int(entry[base.E_VALUE]) :][: int(entry[base.E_COUNT]) * width].view(values.dtype)
                kept[_chosen(entry, blocks, payload, runs[run])] = target[where]
                assert len(elements) == len(where)


def disorder(entries: Ints, blocks: Ints, payload: Bytes) -> int:
    for row, entry in enumerate(entries):
        index = _indices(entry, payload)
        if (np.diff(index, append=blocks[entry[base.E_BLOCK], base.LENGTH]) <= 0).any():
            return row
    return -1


def scatter(runs: Ints, stage: int) -> None:
    for live, step, at, count, _, _, kind in runs.tolist():
        width = base.WIDTHS[kind & 7]
        target = _memory(live, ((count - 1) * step + 1) * width).view(_UNSIGNED[width])
        target[::step] = _memory(stage + at, count * width).view(_UNSIGNED[width])


def _hits(entries: Ints, blocks: Ints, payload: Bytes, runs: Ints) -> Iterator[tuple[Any, ...]]:
    """Per (block, run): the run, its live memory, the elements of the run that change, where they lie, their values."""
    for entry in entries:
        width = int(blocks[entry[base.E_BLOCK], base.WIDTH])
        values = payload[int(entry[base.E_VALUE]) :][: int(entry[base.E_COUNT]) * width].view(_UNSIGNED[width])
        for run in runs[int(entry[base.E_FIRST]) : int(entry[base.E_LAST])]:
            chosen = _chosen(entry, blocks, payload, run)
            begin = (int(run[base.SLOT]) - int(blocks[entry[base.E_BLOCK], base.LO])) // width
            elements = _indices(entry, payload)[chosen] - begin
            span = ((int(run[base.COUNT]) - 1) * int(run[base.STEP]) + 1) * width
            target = _memory(int(run[base.LIVE]), span).view(_UNSIGNED[width])
            yield run, target, elements, elements * int(run[base.STEP]), values[chosen]


def _chosen(entry: Ints, blocks: Ints, payload: Bytes, run: Ints) -> npt.NDArray[np.int64]:
    """Which entries of a block a run takes."""
    lo, _, width = blocks[entry[base.E_BLOCK]].tolist()
    begin = (int(run[base.SLOT]) - lo) // width
    index = _indices(entry, payload)
    return np.flatnonzero((index >= begin) & (index < begin + int(run[base.COUNT])))


def _indices(entry: Ints, payload: Bytes) -> npt.NDArray[np.int64]:
    count = int(entry[base.E_COUNT])
    if entry[base.E_DENSE]:
        return np.arange(count, dtype=np.int64)
    return payload[int(entry[base.E_INDEX]) :][: 2 * count].view(np.uint16).astype(np.int64)


def _take(live: int, step: int, count: int, kind: int) -> Bytes:
    """A run of live memory as compact wire bytes."""
    width = base.WIDTHS[kind >> 3]
    values = _memory(live, ((count - 1) * step + 1) * width).view(_UNSIGNED[width])
    values = values[np.arange(count) * step]  # a step may be 0: an expanded tensor
    if kind >> 3 == kind & 7:
        return values.view(np.uint8)
    signed = torch.from_numpy(values.view(f"i{width}")).view(_DTYPES[kind >> 3])
    found = cast(signed, _DTYPES[kind & 7])
    return found.view(_SIGNED[found.itemsize]).numpy().view(np.uint8)


def _digest(wire: Bytes, position: int, width: int) -> np.uint64:
    return np.uint64(reference.sum_runs(wire, np.array([[0, position * width, len(wire)]]), np.array([0, 1]))[0])


def _memory(address: int, nbytes: int) -> Bytes:
    if nbytes <= 0:
        return _NONE
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8)


_NONE = np.zeros(0, np.uint8)
