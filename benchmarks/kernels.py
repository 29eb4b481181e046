"""``python -m benchmarks.kernels [--bytes N] [--rounds R] [--json PATH]``: each CPU kernel beside a memcpy, in turns.

Single thread, memory that was touched before; every row checks what it made. The ratio is to the memcpy of as many bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.figures import spread
from benchmarks.machine import describe, load
from mx_rl import delta
from mx_rl.blob import entries_of
from mx_rl.blocks import blocks_of_layout
from mx_rl.kernels import base, fast
from mx_rl.kernels.cpu_memory import tile_sum
from mx_rl.lattice import live_of, snapshot_runs
from mx_rl.layout import RankLayout
from mx_rl.tensors import resolve

Case = tuple[str, int, Callable[[], Any], Callable[[], bool]]
"""(name, bytes that a memcpy would move, what is timed, whether it did what it says)."""


class Bench:
    """One bf16 tensor as a rank's only one, two slots, and steps that change a share of its elements."""

    def __init__(self, nbytes: int) -> None:
        rng = np.random.default_rng(0)
        self.count = nbytes // 2
        self.live = torch.from_numpy(rng.integers(0, 1 << 15, self.count, dtype=np.int16)).view(torch.bfloat16)
        self.single = torch.from_numpy(rng.standard_normal(self.count, dtype=np.float32))
        self.layout = RankLayout.of(resolve({"w": self.live}))
        self.blocks = blocks_of_layout(self.layout)
        self.slots = [np.zeros(self.layout.nbytes, np.uint8) for _ in range(2)]
        self.payload, self.old = (np.zeros(self.layout.nbytes, np.uint8) for _ in range(2))
        self.sums = np.zeros(1, np.uint64)
        self.steps = {share: self._step(rng, share) for share in (0.0, 0.004, 0.03)}
        self.bases = {share: np.empty_like(self.slots[0]) for share in self.steps}
        for share, moved in self.steps.items():
            self.bases[share].view(np.int16)[: self.count] = moved.view(torch.int16).numpy()

    def _step(self, rng: np.random.Generator, share: float) -> torch.Tensor:
        change = rng.random(self.count) < share
        bits = self.live.view(torch.int16).numpy() + np.where(change, rng.choice([-1, 1], self.count), 0)
        return torch.from_numpy(bits.astype(np.int16)).view(torch.bfloat16)

    def runs(self, tensor: torch.Tensor, *, digest: bool = True, wire: torch.dtype = torch.bfloat16) -> base.Ints:
        layout = RankLayout.of(resolve({"w": tensor}), wire_dtype=wire)
        found = snapshot_runs(layout, live_of(layout, resolve({"w": tensor})))
        if not digest:
            found[:, base.UNIT] = -1
        return found

    def cases(self) -> list[Case]:
        slot, nbytes = self.slots[0], 2 * self.count
        address, bits = slot.ctypes.data, self.live.view(torch.int16).numpy()

        def copied() -> bool:
            return bool((slot.view(np.int16)[: self.count] == bits).all())

        cast = self.single.bfloat16().view(torch.int16).numpy()
        plain, bare, single = self.runs(self.live), self.runs(self.live, digest=False), self.runs(self.single)
        found: list[Case] = [
            ("memcpy", nbytes, lambda: ctypes.memmove(address, bits.ctypes.data, nbytes), copied),
            ("copy", nbytes, lambda: fast.snapshot(bare, address, self.sums), copied),
            ("copy and digest", nbytes, lambda: fast.snapshot(plain, address, self.sums), copied),
            ("digest", nbytes, lambda: tile_sum(address, nbytes, 0), lambda: True),
            (
                "cast fp32 to bf16, and digest",
                nbytes,
                lambda: fast.snapshot(single, address, self.sums),
                lambda: bool((slot.view(np.int16)[: self.count] == cast).all()),
            ),
            ("scatter", nbytes, lambda: fast.scatter(self.runs_of_slot(), address), lambda: True),
        ]
        for share in self.steps:
            found += self._delta(share, plain)
        return found

    def runs_of_slot(self) -> base.Ints:
        runs = self.runs(self.live, digest=False)
        runs[:, base.LIVE] = self.slots[1].ctypes.data
        return runs

    def _delta(self, share: float, runs: base.Ints) -> list[Case]:
        slot, was = self.slots[0], self.bases[share]
        target = was.copy()
        nbytes = 2 * self.count

        known = np.zeros(1, np.uint64)
        fast.snapshot(self.runs(self.steps[share]), slot.ctypes.data, known)

        def encode(base_sums: base.Sums | None = known) -> delta.Encoded:
            found, _ = delta.encode(
                fast, runs, self.blocks, slot=slot.ctypes.data, base_slot=was.ctypes.data, num_units=1,
                payload=self.payload, old=self.old, base_sums=base_sums,
            )  # fmt: skip
            assert found is not None
            return found

        counts = encode().counts
        entries, size = entries_of(self.blocks, counts)
        one = delta.Delta(blocks=self.blocks, entries=entries, payload=self.payload[:size].copy())
        patch = runs.copy()
        patch[:, base.LIVE] = target.ctypes.data
        one = one.met_by(patch)
        changes, name = one.num_changes, f"{share:.1%} changed"

        def equal() -> bool:
            return bool((target.view(np.int16)[: self.count] == self.live.view(torch.int16).numpy()).all())

        def listed() -> bool:
            return changes == int((slot != was).reshape(-1, 2).any(axis=1).sum())

        return [
            (f"diff, and digest of the changes, {name}", nbytes, encode, listed),
            (f"diff, and digest of the whole, {name}", nbytes, lambda: encode(None), listed),
            (f"check, {name}", nbytes, lambda: one.check(fast, patch, 1), lambda: True),
            (f"write, {name}", nbytes, lambda: one.write(fast, patch), equal),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=269 << 20)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(describe(options.bytes, options.rounds), flush=True)
    cases = Bench(options.bytes).cases()
    taken: dict[str, list[float]] = {name: [] for name, *_ in cases}
    for turn in range(options.rounds + 1):
        for name, _, run, fine in cases:
            begun = time.perf_counter()
            run()
            spent = time.perf_counter() - begun
            if not fine():
                raise SystemExit(f"{name}: wrong bytes")
            if turn:  # the first touches what it writes
                taken[name].append(spent)
    floor = statistics.median(taken["memcpy"])
    print("| kernel | ms (least..most) | GB/s | x memcpy |\n| --- | ---: | ---: | ---: |")
    rows = []
    for name, nbytes, _, _ in cases:
        middle = statistics.median(taken[name])
        rows.append({"kernel": name, "bytes": nbytes, "seconds": taken[name], "ratio": middle / floor})
        print(f"| {name} | {spread(taken[name])} | {nbytes / middle / 1e9:.1f} | {middle / floor:.2f} |")
    print(f"after: {load()}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
