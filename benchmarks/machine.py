"""What a figure was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import datetime, timezone
from pathlib import Path


def describe(nbytes: int, rounds: int) -> str:
    """A few lines for people; the load average is part of the measurement."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "ray", "nixl"))
    return "\n".join(
        [
            f"machine: {_cpu()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB, {platform.system()} {platform.release()}",
            f"software: Python {platform.python_version()}, {versions}, {_mx_rl()}",
            f"run: {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, {nbytes:,} bytes of bf16, {rounds} rounds, {load()}",
        ]
    )


def load() -> str:
    one, five, _ = os.getloadavg()
    return f"load average {one:.1f} (1 min), {five:.1f} (5 min)"


def _mx_rl() -> str:
    import mx_rl

    return f"mx-rl {mx_rl.__version__}"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
