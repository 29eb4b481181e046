"""The windows of a route: what a plan moves from one source, with the addresses of both ends."""

from __future__ import annotations

import numpy as np

from mx_rl.addresses import payload_rows
from mx_rl.columns import Ints
from mx_rl.errors import CorruptRecord
from mx_rl.plan import Part, Plan
from mx_rl.runs import NBYTES, SOURCE, STAGE, compose, join
from mx_rl.transport.base import Windows


def make_windows(plan: Plan, part: Part | None, *, stage: int | Ints, source: int | Ints) -> Windows:
    """``part``: what is read from one trainer rank; None: everything, from a peer whose stage equals ours.

    ``stage`` and ``source``: the address of offset 0, or a run table. Raises CorruptRecord where the source's table
    lacks bytes that the plan needs.
    """
    if part is not None:
        runs, starts, needs = part.runs, part.starts, part.needs
    else:
        bounds = plan.all_bounds
        low, high = bounds[:, 0], bounds[:, 1]
        count = len(bounds)
        runs = np.stack([low, low, high - low], axis=1)
        starts, needs = np.arange(count + 1, dtype=np.int64), np.arange(1, count + 1, dtype=np.int64)
    window = np.repeat(np.arange(len(needs), dtype=np.int64), np.diff(starts))
    if not isinstance(source, int):
        runs, group = compose(runs, payload_rows(plan), STAGE)
        window, wanted = window[group], int(runs[:, NBYTES].sum())
        runs, group = compose(runs, source, SOURCE)
        window, found = window[group], int(runs[:, NBYTES].sum())
        if found != wanted:
            raise CorruptRecord(f"the source's run table has {found} of {wanted} bytes: read from another source")
    if not isinstance(stage, int):
        runs, group = compose(runs, stage, STAGE)
        window = window[group]
    runs = runs + np.array([_base(stage), _base(source), 0], dtype=np.int64)
    window, runs = join(window, runs)
    return Windows(runs=runs, starts=np.searchsorted(window, np.arange(len(needs) + 1)).astype(np.int64), needs=needs)


def _base(end: int | Ints) -> int:
    return end if isinstance(end, int) else 0
