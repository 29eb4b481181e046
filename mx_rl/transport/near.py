"""A wire for others, and plain copies inside this process: a trainer and a rollout that live together need no wire."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from mx_rl.errors import Closed
from mx_rl.records import EndpointRecord
from mx_rl.transport.base import Link, Receiver, Region, Server, Transport
from mx_rl.transport.memory import NETWORK, MemoryLink, MemoryReceiver, MemoryServer
from mx_rl.transport.place import here


class NearTransport(Transport):
    """Endpoints of this process reach one another by copies, all others over ``wire``, under whose name it goes.

    Host memory only is copied: where a source or a stage lies on a device, the wire is taken within the process too.
    """

    def __init__(self, wire: Transport, *, in_flight: int) -> None:
        self.name = wire.name
        self.release = wire.release
        self._wire = wire
        self._in_flight = in_flight

    def serve(self, name: str, regions: Sequence[Region]) -> NearServer:
        return NearServer(self._wire.serve(name, regions), regions)

    def receive(self, name: str, regions: Sequence[Region]) -> NearReceiver:
        return NearReceiver(name, regions, self._wire, self._in_flight)

    def close(self) -> None:
        self._wire.close()


def _on_host(regions: Sequence[Region]) -> tuple[Region, ...]:
    return tuple(region for region in regions if region.device == "cpu")


class NearServer(Server):
    """One name in two directories: the wire's, and this process's."""

    def __init__(self, wire: Server, regions: Sequence[Region]) -> None:
        self.name = wire.name
        self.address = wire.address
        self._wire = wire
        self._near = MemoryServer(wire.name, _on_host(regions), NETWORK)
        NETWORK.add(self._near)

    def step(self) -> bool:
        near = self._near.step()
        return self._wire.step() or near

    def messages(self) -> list[bytes]:
        return self._near.messages() + self._wire.messages()

    def close(self) -> None:
        self._near.close()
        self._wire.close()


class NearReceiver(Receiver):
    """The wire's agent, which takes half a second to make, is made when the first source of another process is met."""

    def __init__(self, name: str, regions: Sequence[Region], wire: Transport, in_flight: int) -> None:
        self.name = name
        self._regions = tuple(regions)
        self._transport = wire
        self._lock = threading.Lock()
        self._closed = False
        self._wire: Receiver | None = None
        NETWORK.take_name(name)
        self._near = MemoryReceiver(name, _on_host(regions), NETWORK, in_flight)

    def connect(self, record: EndpointRecord) -> Link:
        if self._lives_here(record):
            return MemoryLink(self._near, record, NETWORK.server(record.agent))
        with self._lock:
            if self._closed:
                raise Closed(f"receiver {self.name} is closed")
            if self._wire is None:
                self._wire = self._transport.receive(self.name, self._regions)
        return self._wire.connect(record)

    def _lives_here(self, record: EndpointRecord) -> bool:
        devices = {region.device for region in record.regions} | {region.device for region in self._regions}
        return record.place == here() and devices <= {"cpu"}

    @property
    def settled(self) -> bool:
        return self._near.settled and (self._wire is None or self._wire.settled)

    def close(self) -> bool:
        with self._lock:
            self._closed = True
        near = self._near.close()
        return (self._wire is None or self._wire.close()) and near
