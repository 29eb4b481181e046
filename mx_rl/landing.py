"""Where a version lands at a rollout rank: one stage, the agent that fills it and the agent that lets peers read it."""

from __future__ import annotations

import secrets

import torch

from mx_rl.arena import Arena
from mx_rl.endpoint import Endpoint, Served, unique_name
from mx_rl.records import EndpointRecord
from mx_rl.transport.base import Link, Receiver, Route, Windows

_kept: list[Arena] = []
"""Memory that late bytes may still come into although its owner has closed: never freed in this process."""


class Landing:
    """A stage of ``nbytes`` host memory. Links and routes are kept between versions; a fence drops them all."""

    def __init__(self, endpoint: Endpoint, role: str, nbytes: int, *, serve: bool) -> None:
        self.nbytes = nbytes
        self._endpoint = endpoint
        self._role = role
        self.served: Served | None = endpoint.serve(f"{role}-stage", 1, nbytes) if serve else None
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
        self._receiver = self._open_receiver()

    @property
    def total_bytes(self) -> int:
        return self._arena.total_bytes

    def _open_receiver(self) -> Receiver:
        return self._endpoint.transport.receive(unique_name(f"{self._role}-recv"), self._arena.regions())

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
        if not self._receiver.close():
            return False
        self._receiver = self._open_receiver()
        return True

    @property
    def settled(self) -> bool:
        return self._receiver.settled

    def _drop_all(self) -> None:
        for agent in list(self._links):
            self.drop(agent)

    def close(self) -> None:
        self._drop_all()
        if not self._receiver.close() and not self._receiver.settled:
            _kept.append(self._arena)
        self.stop_serving()

    def stop_serving(self) -> None:
        if self.served is not None:
            self._endpoint.unserve(self.served)
