"""Registered memory: huge-page arenas cut into slots or stages, each guarded by a 64-byte header.

A header is [nonce: u64][word: u64][48 bytes unused], on its own cache line, little-endian. ``word`` is
``generation << 24 | confirmed windows``, always written by one aligned 8-byte store: as two words, a reader could see
the new generation with the old, full count.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import threading
from collections.abc import Sequence

import numpy as np
import torch

from mx_rl.errors import InvalidArgument
from mx_rl.records import RegionRecord
from mx_rl.transport.base import Region

HUGE_PAGE = 2 << 20
ALIGN = 64
HEADER_BYTES = 64
PAGE_BYTES = 4096
COUNT_BITS = 24
COUNT_MASK = (1 << COUNT_BITS) - 1
CLOSED = (1 << 64) - 1
"""The word of memory that is about to be freed."""

_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_STRONG_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")


def align_up(nbytes: int, to: int = ALIGN) -> int:
    return -(-nbytes // to) * to


def num_windows(nbytes: int, window_bytes: int) -> int:
    return -(-nbytes // window_bytes)


def unpack(word: int) -> tuple[int, int]:
    """(generation, confirmed windows)."""
    return word >> COUNT_BITS, word & COUNT_MASK


class Arena:
    """``count`` equal blocks of ``nbytes`` host memory, each with a header, allocated once and touched at once.

    ``blocks[i]`` is a uint8 tensor of ``nbytes`` elements; ``headers[i]`` its Header. Memory lives as long as any
    tensor over it: ``close`` marks the headers and drops this object's own references.
    """

    def __init__(self, count: int, nbytes: int, *, nonce: int, huge_pages: bool = True, device: str = "cpu") -> None:
        if device != "cpu":
            raise InvalidArgument(f"an arena on {device!r}: this release keeps arenas in host memory only")
        self.nbytes = nbytes
        self.device = device
        self._pitch = align_up(max(nbytes, 1), HUGE_PAGE if nbytes >= HUGE_PAGE else 4096)
        headers_bytes = align_up(max(count, 1) * HEADER_BYTES, 4096)
        # Python maps MAP_SHARED unless told otherwise, and shared anonymous memory gets no huge pages.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, self._pitch * count + headers_bytes + HUGE_PAGE, flags=private)
        if huge_pages and hasattr(self._map, "madvise"):
            self._map.madvise(_MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        begin = -whole.ctypes.data % HUGE_PAGE
        memory = whole[begin : begin + self._pitch * count + headers_bytes]
        memory[::4096] = 0  # touch every page now: a first publish must not pay for page faults
        self._whole = memory
        self.blocks = [torch.from_numpy(memory[i * self._pitch : i * self._pitch + nbytes]) for i in range(count)]
        table = memory[self._pitch * count :]
        self.headers = [Header(table[i * HEADER_BYTES : (i + 1) * HEADER_BYTES], nonce) for i in range(count)]

    @property
    def total_bytes(self) -> int:
        return len(self._whole)

    def regions(self) -> list[Region]:
        """What to register: one region over everything."""
        return [Region(address=int(self._whole.ctypes.data), nbytes=len(self._whole), device=self.device)]

    def records(self) -> tuple[RegionRecord, ...]:
        return tuple(
            RegionRecord(header=header.address, address=self.address(i), nbytes=self.nbytes, device=self.device)
            for i, header in enumerate(self.headers)
        )

    def address(self, block: int) -> int:
        return int(self._whole.ctypes.data) + block * self._pitch

    def give_back(self, kept: Sequence[tuple[int, int]]) -> None:
        """Let the system take every page that none of the (address, nbytes) in ``kept`` touches: those tensors live on,
        and would hold the whole arena with them. What was there is lost."""
        page, at, end = mmap.PAGESIZE, 0, len(self._map)
        base = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)
        for address, nbytes in [*sorted(kept), (base + end, 0)]:
            low = (address - base) // page * page
            if low > at and hasattr(self._map, "madvise"):
                self._map.madvise(_MADV_DONTNEED, at, low - at)
            at = max(at, align_up(address - base + nbytes, page))

    def close(self) -> None:
        for header in self.headers:
            header.close()


class Header:
    """The guard of one slot or stage. One writer; readers are other processes, one-sided."""

    def __init__(self, line: np.ndarray, nonce: int) -> None:
        self.address = int(line.ctypes.data)
        self._words = line.view(np.uint64)
        self._words[0] = nonce
        self._words[1] = 0
        self._lock = threading.Lock()

    def _store(self, word: int) -> None:
        if not _STRONG_ORDER:
            # Two lock cycles are a release fence: no store from before the first moves past the second.
            with self._lock:
                pass
            with self._lock:
                pass
        ctypes.c_uint64.from_address(self.address + 8).value = word  # one aligned 8-byte store

    @property
    def generation(self) -> int:
        return unpack(int(self._words[1]))[0]

    @property
    def count(self) -> int:
        return unpack(int(self._words[1]))[1]

    @property
    def closed(self) -> bool:
        return int(self._words[1]) == CLOSED

    def begin(self) -> int:
        """Take the block for a new version: nothing is confirmed. Returns the new generation, never used before."""
        generation = self.generation + 1
        self._store(generation << COUNT_BITS)
        return generation

    def confirm(self, count: int) -> None:
        """The first ``count`` windows are complete; call after the bytes are written."""
        if not 0 <= count <= COUNT_MASK:
            raise InvalidArgument(f"{count} windows: at most {COUNT_MASK}; use larger windows")
        self._store(self.generation << COUNT_BITS | count)

    def close(self) -> None:
        self._store(CLOSED)
