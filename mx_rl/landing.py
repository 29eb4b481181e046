"""Where a version lands at a rollout rank: one stage, the agent that fills it and the agent that lets peers read it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import torch

from mx_rl.arena import Arena
from mx_rl.columns import Ints
from mx_rl.endpoint import Endpoint, Served, unique_name
from mx_rl.plan import Plan
from mx_rl.records import EndpointRecord
from mx_rl.transport.base import Link, Receiver, Region, Route, Windows

_kept: list[object] = []
"""Memory that late bytes may still come into although its owner has closed: never freed in this process."""


def keep(memory: object) -> None:
    _kept.append(memory)


class Landing:
    """A stage of ``nbytes`` host memory, and (``extents``) memory of others that is filled in place. Links and routes are
    kept between versions; a fence drops them all.

    ``scattered``: what lies where in the stage is told by run tables, of which ``aim`` takes the one to fill it by.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        role: str,
        nbytes: int,
        *,
        serve: bool,
        scattered: bool = False,
        extents: Sequence[Region] | None = None,
    ) -> None:
        self.nbytes = nbytes
        self.table: Ints | None = None
        self._endpoint = endpoint
        self._role = role
        self._extents = extents
        self.served: Served | None = None
        if serve:
            self.served = endpoint.serve(f"{role}-stage", 1, nbytes, extents=() if scattered else None)
        self._arena = (
            self.served.arena
            if self.served is not None
            else Arena(1, nbytes, nonce=secrets.randbits(63), huge_pages=endpoint.options.huge_pages)
        )
        self.block: torch.Tensor = self._arena.blocks[0]
        self.header = self._arena.headers[0]
        self.address = self._arena.address(0)
        self._links: dict[str, Link] = {}
        self._routes: dict[tuple[str, int, str], Route] = {}
        try:
            self._receiver = self._open_receiver()
        except BaseException:
            self.stop_serving()
            raise
        self._fenced = True

    @property
    def total_bytes(self) -> int:
        return self._arena.total_bytes

    def _open_receiver(self) -> Receiver:
        own = self._arena.regions() if self.nbytes or self._extents is None else []
        regions = [*own, *(self._extents or ())]
        return self._endpoint.transport.receive(unique_name(f"{self._role}-recv"), regions)

    @property
    def on_host(self) -> bool:
        """All of it is host memory."""
        return all(region.device == "cpu" for region in self._extents or ())

    @property
    def place(self) -> int | Ints:
        """Where the bytes of a plan's stage go: the address of its offset 0, or a run table."""
        return self.address if self.table is None else self.table

    def trailers(self, plan: Plan) -> torch.Tensor | None:
        """Those of the version that lies here, uint8, or None where the plan has none."""
        if not plan.trailers:
            return None
        at, nbytes = plan.trailer_begin, plan.landing_nbytes - plan.trailer_begin
        if self.table is not None:
            row = self.table[np.searchsorted(self.table[:, 0], at, side="right") - 1]
            at = int(row[1] + at - row[0]) - self.address
        return self.block[at : at + nbytes]

    def aim(self, table: Ints) -> None:
        """Fill by this run table from now on."""
        if table is not self.table:
            self.table = table
            for key in list(self._routes):
                self._routes.pop(key).close()

    def owns(self, address: int) -> bool:
        return self.address <= address < self.address + self.nbytes

    def abandon(self, kept: Sequence[tuple[int, int]]) -> None:
        """Close it, and give the pages back but for the (address, nbytes) that live tensors still lie in."""
        self.close()
        self._arena.give_back(kept)

    def link(self, record: EndpointRecord) -> Link:
        link = self._links.get(record.agent)
        if link is None:
            link = self._links[record.agent] = self._receiver.connect(record)
        return link

    def route(self, record: EndpointRecord, region: int, order: str, windows: Windows) -> Route:
        """A prepared route; ``order`` names the run table, which is built by the caller only when
        ``known`` has none."""
        key = (record.agent, region, order)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = self.link(record).route(region, windows)
        return route

    def known(self, agent: str, region: int, order: str) -> Route | None:
        return self._routes.get((agent, region, order))

    def drop(self, agent: str) -> None:
        """Forget a peer: its routes first, then the link. Its flows are closed already."""
        for key in [key for key in self._routes if key[0] == agent]:
            self._routes.pop(key).close()
        link = self._links.pop(agent, None)
        if link is not None:
            link.close()

    def keep_only(self, agents: set[str]) -> None:
        """Drop peers that no record of the current version names."""
        for agent in [agent for agent in self._links if agent not in agents]:
            self.drop(agent)

    def fence(self) -> bool:
        """End every move into this stage. True: it is as good as new; False: late bytes may come, use another
        landing."""
        self._drop_all()
        self._fenced = self._receiver.close()
        if self._fenced:
            self._receiver = self._open_receiver()
        return self._fenced

    def reopen(self) -> bool:
        """Ready to receive, again if need be: False where bytes of a move that was given up may still arrive."""
        if not self._fenced and self._receiver.settled:
            self._receiver = self._open_receiver()
            self._fenced = True
        return self._fenced

    @property
    def settled(self) -> bool:
        return self._receiver.settled

    def _drop_all(self) -> None:
        for agent in list(self._links):
            self.drop(agent)

    def close(self) -> None:
        self._drop_all()
        if not self._receiver.close() and not self._receiver.settled:
            keep(self._arena)
        self.stop_serving()

    def stop_serving(self) -> None:
        if self.served is not None:
            self._endpoint.unserve(self.served)
