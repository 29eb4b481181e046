"""The kernels for CUDA devices: ``kernels.cu``, compiled by NVRTC through CuPy (extra ``cuda12``).

What is launched when is written once, for any device that can hold arrays and launch: tests run it on the host.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from mx_rl.errors import InvalidArgument, MissingExtra
from mx_rl.kernels import base
from mx_rl.kernels.base import BLOCK_ELEMENTS, COUNT, KIND, LENGTH, SLOT, WIDTH, Ints, met

SOURCE: Final = Path(__file__).with_name("kernels.cu")
THREADS: Final = 256
CHUNK_BLOCKS: Final = 256
"""Blocks of a delta that are listed by one launch: they bound its scratch, about 50 MB for 2-byte elements."""


class Device(Protocol):
    """Where kernels run, in the order of its current stream."""

    def launch(self, kernel: str, grid: int, *args: int) -> None:
        """``grid`` blocks of THREADS threads; arguments are addresses and 64-bit integers."""

    def put(self, array: Any) -> Any:
        """On the device: the array itself if it is there."""

    def zeros(self, count: int, dtype: type) -> Any: ...

    def address(self, array: Any) -> int: ...

    def get(self, array: Any) -> Any:
        """On the host, when everything launched so far is done."""


class Cuda:
    """``base.Kernels`` on a device. Tables, sums and payloads may lie on the host or on the device; what is given on the
    host is copied there and back, which waits for the stream; what lies on the device is only launched upon."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def snapshot(self, runs: Any, slot: int, sums: Any) -> None:
        rows = self._device.get(runs)
        pieces = -(-rows[:, COUNT] // BLOCK_ELEMENTS)
        row = np.repeat(np.arange(len(rows)), pieces)
        turn = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        width = base.wire_width(rows[row, KIND])
        left = rows[row, COUNT] - turn * BLOCK_ELEMENTS
        blocks = np.stack([rows[row, SLOT] + turn * BLOCK_ELEMENTS * width, np.minimum(left, BLOCK_ELEMENTS), width], 1)
        if len(blocks):
            out = _Out(self._device, sums)
            self._list(runs, blocks, np.stack([row, row + 1], axis=1), slot, 0, out.address, (0, 0, 0, 0), 0, 1)
            out.back()

    def diff(
        self, runs: Any, blocks: Ints, slot: int, base_slot: int, sums: Any, counts: Any, payload: Any, old: Any
    ) -> int:
        device = self._device
        ranges = np.stack(met(blocks, device.get(runs)), axis=1)
        widest = int(blocks[:, WIDTH].max(initial=1))
        most = np.minimum(blocks[:, LENGTH] * blocks[:, WIDTH] // (2 + blocks[:, WIDTH]), base.DENSE - 1)
        room, per = int(most.max(initial=1)) + 1, min(len(blocks), CHUNK_BLOCKS)
        scratch = [
            device.zeros(per * room, np.uint16),
            *(device.zeros(per * room * widest, np.uint8) for _ in range(2)),
        ]
        lists = [device.address(one) for one in scratch]
        outs = [_Out(device, one) for one in (sums, counts, payload, old)]
        table, cursor = device.put(np.ascontiguousarray(blocks)), device.put(np.array([0, 1], np.int64))
        places = device.zeros(max(per, 1), np.int64)
        for begin in range(0, len(blocks), CHUNK_BLOCKS):
            some = blocks[begin : begin + CHUNK_BLOCKS]
            at, counted = device.address(table) + begin * 24, outs[1].address + begin * 2
            self._list(
                runs,
                some,
                ranges[begin : begin + CHUNK_BLOCKS],
                slot,
                base_slot,
                outs[0].address,
                (counted, *lists),
                room,
                widest,
            )
            device.launch(
                "mx_place", 1, at, counted, len(some), len(payload), device.address(cursor), device.address(places)
            )
            device.launch(
                "mx_collect", len(some), at, counted, device.address(cursor), device.address(places), slot, base_slot,
                *lists, room, widest, outs[2].address, outs[3].address,
            )  # fmt: skip
        for out in outs:
            out.back()
        used, fits = device.get(cursor).tolist()
        return int(used) if fits else -1

    def check(self, entries: Any, blocks: Any, payload: Any, runs: Any, sums_old: Any, sums_new: Any) -> None:
        outs = [_Out(self._device, sums) for sums in (sums_old, sums_new)]
        self._patch(0, entries, blocks, payload, runs, outs[0].address, outs[1].address, 0)
        for out in outs:
            out.back()

    def weigh(self, entries: Any, blocks: Any, payload: Any, old: Any, runs: Any, sums_old: Any, sums_new: Any) -> None:
        outs = [_Out(self._device, sums) for sums in (sums_old, sums_new)]
        there = self._device.put(old)
        self._patch(3, entries, blocks, payload, runs, outs[0].address, outs[1].address, self._device.address(there))
        for out in outs:
            out.back()

    def write(self, entries: Any, blocks: Any, payload: Any, runs: Any) -> None:
        self._patch(1, entries, blocks, payload, runs, 0, 0, 0)

    def gather(self, entries: Any, blocks: Any, payload: Any, runs: Any, old: Any) -> None:
        out = _Out(self._device, old)
        self._patch(2, entries, blocks, payload, runs, 0, 0, out.address)
        out.back()

    def disorder(self, entries: Any, blocks: Any, payload: Any) -> int:
        device, none = self._device, (1 << 63) - 1
        row = device.put(np.array([none], np.int64))
        tables = [device.put(one) for one in (entries, blocks, payload)]
        if len(entries):
            device.launch("mx_disorder", len(entries), *map(device.address, tables), device.address(row))
        found = int(device.get(row)[0])
        return -1 if found == none else found

    def scatter(self, runs: Any, stage: int) -> None:
        table = self._device.put(runs)
        if len(runs):
            self._device.launch("mx_scatter", min(len(runs), 1 << 16), self._device.address(table), len(runs), stage)

    def _list(
        self,
        runs: Any,
        blocks: Ints,
        ranges: Ints,
        slot: int,
        base_slot: int,
        sums: int,
        lists: tuple[int, ...],
        room: int,
        widest: int,
    ) -> None:
        tables = [self._device.put(one) for one in (runs, np.ascontiguousarray(blocks), np.ascontiguousarray(ranges))]
        at = map(self._device.address, tables)
        self._device.launch("mx_diff", len(blocks), *at, slot, base_slot, sums, *lists, room, widest)

    def _patch(self, mode: int, entries: Any, blocks: Any, payload: Any, runs: Any, *outs: int) -> None:
        tables = [self._device.put(one) for one in (entries, blocks, payload, runs)]
        if len(entries):
            self._device.launch("mx_patch", len(entries), mode, *map(self._device.address, tables), *outs)


class _Out:
    """An array that kernels write: on the device, and brought back to where it was given."""

    def __init__(self, device: Device, given: Any) -> None:
        self._device, self._given = device, given
        self._there = device.put(given)
        self.address = device.address(self._there)

    def back(self) -> None:
        if self._there is not self._given:
            self._given[...] = self._device.get(self._there)


class CupyDevice:
    """The current CUDA device and stream of CuPy."""

    def __init__(self) -> None:
        self._cupy = _import("cupy")
        options = ("--std=c++17",)
        self._module = self._cupy.RawModule(code=SOURCE.read_text(), options=options, backend="nvrtc")

    def launch(self, kernel: str, grid: int, *args: int) -> None:
        function = self._module.get_function(kernel)
        function((grid,), (THREADS,), tuple(np.int64(arg) for arg in args))

    def put(self, array: Any) -> Any:
        return self._cupy.asarray(array)

    def zeros(self, count: int, dtype: type) -> Any:
        return self._cupy.zeros(count, dtype)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def get(self, array: Any) -> Any:
        return self._cupy.asnumpy(array)


@cache
def kernels() -> Cuda:
    """For the current CUDA device. Raises MissingExtra without CuPy; compiles at the first call."""
    return Cuda(CupyDevice())


def compile_for(architecture: str) -> bytes:
    """The binary for an architecture such as ``"sm_90"``; needs no GPU. Raises InvalidArgument with NVRTC's log."""
    nvrtc = _import("cupy.cuda").nvrtc
    program = nvrtc.createProgram(SOURCE.read_text(), SOURCE.name, [], [])
    try:
        nvrtc.compileProgram(program, [f"--gpu-architecture={architecture}", "--std=c++17"])
        found: bytes = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as exc:
        log = nvrtc.getProgramLog(program)
        raise InvalidArgument(f"NVRTC cannot compile {SOURCE.name} for {architecture}: {exc}: {log}") from exc
    finally:
        nvrtc.destroyProgram(program)
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise MissingExtra(f"CUDA kernels need CuPy: pip install 'mx-rl[cuda12]' ({exc})", extra="cuda12") from exc
