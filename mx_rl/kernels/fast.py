"""The numba kernels as one set: ``mx_rl.kernels.base.Kernels``. Its import compiles what no earlier one has cached."""

from mx_rl.kernels.cpu_patch import check, disorder, gather, weigh, write
from mx_rl.kernels.cpu_snapshot import diff, scatter, snapshot

__all__ = ["check", "diff", "disorder", "gather", "scatter", "snapshot", "weigh", "write"]
