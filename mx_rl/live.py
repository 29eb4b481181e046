"""``serve="live"``: peers read the live tensors themselves between two installs, under one header."""

from __future__ import annotations

import numpy as np
import torch

from mx_rl.addresses import (
    Signature,
    Targets,
    compared_rows,
    destination_table,
    encode_table,
    extents,
    signature,
    trailer_room,
    trailer_rows,
)
from mx_rl.arena import PAGE_BYTES
from mx_rl.endpoint import Member, Served
from mx_rl.plan import Plan
from mx_rl.records import Source, encode, table_key
from mx_rl.runs import in_order


class Live:
    """The live tensors, registered once under an agent of their own; where one is found at another address they are
    registered anew, under another agent.

    Peers may read between ``open`` and ``close_reading``: whoever changes the memory closes first, so that a read that
    raced is refused by the header. What is changed behind our back is not noticed.
    """

    def __init__(self, member: Member, role: str, targets: Targets) -> None:
        self._member = member
        self._role = role
        self._plan: Plan | None = None
        self._table: tuple[str, bytes] | None = None
        self._lies: Signature = signature(targets)
        self._past: list[str] = []  # blobs of former agents and plans
        self._whole = False
        self._room = PAGE_BYTES  # for trailers; it costs nothing
        self.served: Served | None = self._register(targets)

    @property
    def source(self) -> Source | None:
        """Where peers read now, or None."""
        if self.served is None or not self._whole:
            return None
        return Source(agent=self.served.name, region=0, generation=self.served.arena.headers[0].generation)

    @property
    def total_bytes(self) -> int:
        """Of the header, the trailers and padding; the tensors are not ours."""
        return self.served.arena.total_bytes if self.served is not None else 0

    def follow(self, plan: Plan, targets: Targets) -> None:
        """Make ready to serve this plan's versions from where the tensors lie now. Asks the registry only where something
        changed. Raises InvalidArgument for memory in too many pieces, RegistryLost."""
        lies = signature(targets)
        room = trailer_room(plan)
        if self.served is None or lies != self._lies or room > self._room:
            self.close()
            self._room = max(self._room, room)
            self.served, self._lies = self._register(targets), lies
        if self._plan is not plan or self._table is None:
            trailers = trailer_rows(plan, self.served.arena.address(0))
            rows = np.concatenate([destination_table(plan, targets).rows, compared_rows(plan, targets), trailers])
            key = table_key(self.served.name, plan.world_hash)
            if self._table is not None and self._table[0] != key:
                self._past.append(self._table[0])
            self._plan = plan
            self._table = (key, encode_table(in_order(rows)))
            self.announce()

    def announce(self) -> None:
        if self.served is not None:
            self._member.put(self.served.name, encode(self.served.record), replaces=self._past)
            self._past.clear()
        if self._table is not None:
            self._member.put(*self._table)

    def close_reading(self) -> None:
        """Before a live byte changes: no read that ends after this counts."""
        self._whole = False
        if self.served is not None:
            self.served.arena.headers[0].begin()

    def open(self, plan: Plan, targets: Targets, trailers: torch.Tensor | None = None) -> None:
        """The tensors hold a version of ``plan`` whole, with these ``trailers`` (uint8; None: as before). Nothing is served
        where they are not the ones made ready."""
        if self.served is None or self._plan is not plan or signature(targets) != self._lies:
            return
        if trailers is not None:
            self.served.arena.blocks[0][: len(trailers)].copy_(trailers)
        self.served.arena.headers[0].confirm(len(plan.all_bounds))
        self._whole = True

    def reopen(self, targets: Targets) -> Source | None:
        """Serve again what lay there at ``close_reading``, untouched since; under a new generation, which peers must be
        told."""
        if self._plan is not None:
            self.open(self._plan, targets)
        return self.source

    def close(self) -> None:
        """Nothing is read any more, and nothing is registered. Idempotent; ``follow`` opens anew."""
        self._whole = False
        if self._table is not None:
            self._past.append(self._table[0])
            self._table = None
        served, self.served = self.served, None
        if served is not None:
            self._past.append(served.name)
            self._member.endpoint.unserve(served)

    def _register(self, targets: Targets) -> Served:
        return self._member.endpoint.serve(f"{self._role}-live", 1, self._room, extents=extents(targets))
