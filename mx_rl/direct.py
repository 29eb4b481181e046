"""``stage="none"``: a version is moved straight into the live tensors, which the transport registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from mx_rl.addresses import (
    RunTable,
    Signature,
    destination_table,
    extents,
    signature,
    trailer_room,
    trailer_rows,
)
from mx_rl.arena import PAGE_BYTES
from mx_rl.copies import copy_all
from mx_rl.errors import PeerLost
from mx_rl.install import Work
from mx_rl.landing import Landing, keep
from mx_rl.plan import Plan
from mx_rl.runs import in_order
from mx_rl.stage import Stage
from mx_rl.tensors import Tensors, resolve
from mx_rl.transport.base import Region


class DirectStage(Stage):
    """``open_landing`` takes the memory to receive into, and how many bytes of its own it needs for trailers. It is registered
    at construction, and again where it moved."""

    direct = True

    def __init__(self, open_landing: Callable[[Sequence[Region], int], Landing], tensors: Tensors) -> None:
        self._open = open_landing
        self._tensors = tensors
        self._regions = extents(resolve(tensors))
        self._known: tuple[Plan, Signature, RunTable] | None = None
        self.landing = open_landing(self._regions, PAGE_BYTES)

    def landing_for(self, plan: Plan) -> Landing:
        return self.landing

    def replace(self, landing: Landing) -> Landing:
        raise _late()

    def prepare(self, plan: Plan, landing: Landing) -> Finish:
        targets = resolve(self._tensors)
        if not self.landing.reopen():
            raise _late()
        regions = extents(targets)
        room = trailer_room(plan)
        if regions != self._regions or room > self.landing.nbytes:
            self.landing.close()
            self.landing, self._regions = self._open(regions, max(room, self.landing.nbytes)), regions
            self._known = None
        lies = signature(targets)
        if self._known is None or self._known[:2] != (plan, lies):
            table = destination_table(plan, targets)
            rows = in_order(np.concatenate([table.rows, trailer_rows(plan, self.landing.address)]))
            self._known = (plan, lies, RunTable(rows, table.copies))
        table = self._known[2]
        self.landing.aim(table.rows)
        return Finish(table.copies)

    @property
    def landings(self) -> tuple[Landing, ...]:
        return (self.landing,)

    @property
    def quarantine(self) -> tuple[Landing, ...]:
        return ()

    def release(self) -> None:
        """De-register the live tensors, which are about to move or go; the next install registers them anew."""
        if not self.landing.reopen():
            raise _late()
        self.landing.close()
        self._regions, self._known = [], None
        self.landing = self._open([], PAGE_BYTES)

    def close(self) -> None:
        self.landing.close()
        if not self.landing.settled:
            keep(resolve(self._tensors))


class Finish(Work):
    """What is left to do when all bytes have landed: what is wanted twice is copied."""

    def __init__(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._copies = copies

    def run(self) -> None:
        copy_all(self._copies)


def _late() -> PeerLost:
    return PeerLost(
        "bytes of a move that was given up may still come into the live weights: they stay tainted until it has ended",
        peer="",
    )
