"""Checks of byte runs before anything is prepared from them: on both sides, since no address from a wire is trusted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mx_rl.errors import InvalidArgument
from mx_rl.records import RegionRecord
from mx_rl.transport.base import Region, Windows

STAGE, SOURCE, NBYTES = 0, 1, 2
"""Columns of ``Windows.runs``."""

Array = npt.NDArray[np.int64]


def check_windows(windows: Windows, *, source: Sequence[Region], stage: Sequence[Region]) -> tuple[str, str]:
    """Check shapes, and that every run lies in one of ``source`` and one of ``stage``.

    Returns the two devices, (source's, stage's). Raises InvalidArgument.
    """
    runs, starts, needs = windows.runs, windows.starts, windows.needs
    if runs.ndim != 2 or runs.shape[1] != 3 or starts.ndim != 1 or needs.ndim != 1 or len(starts) != len(needs) + 1:
        raise InvalidArgument(
            f"Windows of shapes runs {runs.shape}, starts {starts.shape}, needs {needs.shape}: "
            "expected (runs, 3), (windows + 1,), (windows,)"
        )
    if any(array.dtype != np.int64 for array in (runs, starts, needs)):
        raise InvalidArgument(f"Windows of {runs.dtype}, {starts.dtype}, {needs.dtype}: expected int64")
    if starts[0] != 0 or starts[-1] != len(runs) or (len(needs) and int(np.diff(starts).min()) < 0):
        raise InvalidArgument(f"Windows.starts must rise from 0 to {len(runs)}, the number of runs")
    if len(needs) and int(needs.min()) < 0:
        raise InvalidArgument(f"Windows.needs holds {int(needs.min())}: a count of windows, 0 or more")
    return device_of(runs[:, SOURCE], runs[:, NBYTES], source, "source"), device_of(
        runs[:, STAGE], runs[:, NBYTES], stage, "stage"
    )


def device_of(addresses: Array, nbytes: Array, regions: Sequence[Region], side: str) -> str:
    """The device of the regions that the runs lie in; all must be on one. Raises InvalidArgument."""
    if not len(addresses):
        return regions[0].device if regions else "cpu"
    # Each run can only lie in the region that begins last before it, or in one that reaches further: regions inside
    # others are left out. Compared without adding an address to a length, which could overflow.
    outer = _outermost(regions) or [Region(address=0, nbytes=0)]
    begins = np.array([region.address for region in outer], dtype=np.int64)
    lengths = np.array([region.nbytes for region in outer], dtype=np.int64)
    at = np.maximum(np.searchsorted(begins, addresses, side="right") - 1, 0)
    inside = (nbytes > 0) & (nbytes <= lengths[at]) & (addresses >= begins[at])
    inside &= addresses - begins[at] <= lengths[at] - nbytes
    devices: set[str] = {outer[index].device for index in np.unique(at[inside]).tolist()}
    outside = ~inside
    if outside.any():
        row = int(np.argmax(outside))
        raise InvalidArgument(
            f"{int(outside.sum())} of {len(addresses)} runs are empty or outside the registered {side}; the first is "
            f"run {row}: {int(nbytes[row])} bytes at {int(addresses[row]):#x}"
        )
    if len(devices) != 1:
        raise InvalidArgument(f"runs on several devices of the {side}, {sorted(devices)}: make a route for each")
    return devices.pop()


def _outermost(regions: Sequence[Region]) -> list[Region]:
    found: list[Region] = []
    for region in sorted(regions, key=lambda one: (one.address, -one.nbytes)):
        if not found or region.address + region.nbytes > found[-1].address + found[-1].nbytes:
            found.append(region)
    return found


def regions_of(record: RegionRecord) -> list[Region]:
    """The memory that a route from this region may read."""
    if record.extents:
        return [Region(address=one.address, nbytes=one.nbytes, device=one.device) for one in record.extents]
    return [Region(address=record.address, nbytes=record.nbytes, device=record.device)]


def check_choice(chosen: Sequence[int], count: int) -> list[int]:
    """Window indices of a flow, each once. Raises InvalidArgument."""
    indices = [int(index) for index in chosen]
    wrong = [index for index in indices if not 0 <= index < count]
    if wrong or len(set(indices)) != len(indices):
        raise InvalidArgument(f"windows {wrong[:10] or 'repeated'}: each of 0 to {count - 1} at most once")
    return indices
