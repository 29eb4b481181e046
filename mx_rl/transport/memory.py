"""A data plane inside one process, with real copies and faults on demand: for trying things out, and for tests.

``MemoryNetwork`` is the wire between all MemoryTransports of a process; its methods make a peer die, stall or be slow.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterable, Sequence

from mx_rl.arena import HEADER_BYTES
from mx_rl.config import Options
from mx_rl.errors import Closed, CorruptRecord, InvalidArgument, PeerLost
from mx_rl.records import EndpointRecord
from mx_rl.transport.base import Flow, Link, Receiver, Region, Route, Server, Transport, Windows
from mx_rl.transport.flow import ReadFlow, Reads, check_header
from mx_rl.transport.runs import check_choice, check_windows, regions_of

MAX_MESSAGE_BYTES = 1 << 20


class _Move:
    """Posted copies: rows of (target, source, nbytes)."""

    def __init__(self, receiver: object, agent: str, rows: Iterable[tuple[int, int, int]], due: float) -> None:
        self.receiver = receiver
        self.agent = agent
        self.rows = rows
        self.due = due
        self.ended = False

    def copy(self) -> None:
        for target, source, nbytes in self.rows:
            ctypes.memmove(target, source, nbytes)
        self.ended = True


class MemoryNetwork:
    """The wire between MemoryTransports. Agents are named by ``Server.name``. Thread-safe.

    ``fence=False`` makes ``Receiver.close`` behave as a READ lane over TCP does: what was posted still arrives.
    """

    def __init__(self, *, fence: bool = True) -> None:
        self.fence = fence
        self._change = threading.Condition()
        self._servers: dict[str, MemoryServer] = {}
        self._names: set[str] = set()
        self._lost: set[str] = set()
        self._stalled: set[str] = set()
        self._delays: dict[str, float] = {}
        self._pending: list[_Move] = []

    # ---- faults

    def lose(self, agent: str) -> None:
        """The agent dies: every read of it, posted or new, is PeerLost, and no late byte arrives."""
        with self._change:
            self._lost.add(agent)
            self._drop(agent)

    def stall(self, agent: str) -> None:
        """Reads posted from now on do not end until ``release``, as those of a stopped process."""
        with self._change:
            self._stalled.add(agent)

    def release(self, agent: str) -> None:
        """End a stall: all that was posted arrives now, wanted or not."""
        with self._change:
            self._stalled.discard(agent)
            late = [move for move in self._pending if move.agent == agent]
            self._pending = [move for move in self._pending if move.agent != agent]
            for move in late:
                move.copy()

    def delay(self, agent: str, seconds: float) -> None:
        """Every read of the agent takes so long; 0 ends that."""
        with self._change:
            self._delays[agent] = seconds

    # ---- what transports use

    def add(self, server: MemoryServer) -> None:
        with self._change:
            self.take_name(server.name)
            self._servers[server.name] = server

    def take_name(self, name: str) -> None:
        with self._change:
            if name in self._names:
                raise InvalidArgument(f"agent name {name!r} was used before in this process: a name is unique for ever")
            self._names.add(name)

    def remove(self, server: MemoryServer) -> None:
        """After this returns nobody reads from the server's memory."""
        with self._change:
            self._servers.pop(server.name, None)
            self._drop(server.name)
            self._change.wait_for(lambda: server.readers == 0, timeout=10.0)

    def server(self, agent: str) -> MemoryServer:
        with self._change:
            return self._alive(agent)

    def post(self, receiver: object, agent: str, rows: Sequence[tuple[int, int, int]]) -> _Move:
        with self._change:
            server = self._alive(agent)
            delay = self._delays.get(agent, 0.0)
            move = _Move(receiver, agent, rows, time.monotonic() + delay)
            if agent in self._stalled or delay:
                self._pending.append(move)
                return move
            server.readers += 1
        try:
            move.copy()
        finally:
            with self._change:
                server.readers -= 1
                self._change.notify_all()
        return move

    def poll(self, move: _Move) -> bool:
        if move.ended:
            return True
        with self._change:
            self._alive(move.agent)
            if move.agent in self._stalled or time.monotonic() < move.due:
                return False
            if move in self._pending:
                self._pending.remove(move)
                move.copy()
            if not move.ended:
                raise Closed(f"a read of {move.agent} was ended by Receiver.close: nothing arrived")
            return True

    def unsettled(self, receiver: object) -> bool:
        with self._change:
            mine = [move for move in self._pending if move.receiver is receiver]
            left = [move for move in mine if not self.poll(move)]
            return bool(left)

    def forget(self, receiver: object) -> bool:
        """The receiver's agent is destroyed. Whether nothing can arrive in its memory any more."""
        with self._change:
            if self.fence:
                self._pending = [move for move in self._pending if move.receiver is not receiver]
            return not any(move.receiver is receiver for move in self._pending)

    def _alive(self, agent: str) -> MemoryServer:
        server = self._servers.get(agent)
        if server is None or agent in self._lost:
            raise PeerLost(f"{agent} is not served in this process any more: read from another source", peer=agent)
        return server

    def _drop(self, agent: str) -> None:
        self._pending = [move for move in self._pending if move.agent != agent]


NETWORK = MemoryNetwork()
"""What a MemoryTransport uses unless it is given its own."""
# The condition's lock is re-entrant, so that methods may call one another.


class MemoryTransport(Transport):
    """Endpoints of this process reach one another; no others do."""

    name = "memory"
    release = "1"

    def __init__(self, options: Options | None = None, *, network: MemoryNetwork | None = None) -> None:
        self._options = options or Options()
        self.network = network or NETWORK

    def serve(self, name: str, regions: Sequence[Region]) -> MemoryServer:
        server = MemoryServer(name, _host_only(regions), self.network)
        self.network.add(server)
        return server

    def receive(self, name: str, regions: Sequence[Region]) -> MemoryReceiver:
        self.network.take_name(name)
        return MemoryReceiver(name, _host_only(regions), self.network, self._options.in_flight)

    def close(self) -> None:
        """Nothing is held beyond servers and receivers."""


def _host_only(regions: Sequence[Region]) -> tuple[Region, ...]:
    wrong = [region.device for region in regions if region.device != "cpu"]
    if wrong:
        raise InvalidArgument(f"the memory transport copies host memory only, not {sorted(set(wrong))}: use nixl")
    return tuple(regions)


class MemoryServer(Server):
    def __init__(self, name: str, regions: tuple[Region, ...], network: MemoryNetwork) -> None:
        self.name = name
        self.address = str(os.getpid()).encode()
        self.regions = regions
        self.readers = 0  # copies under way; guarded by the network's lock
        self._network = network
        self._lock = threading.Lock()
        self._new = False
        self._inbox: list[bytes] = []

    def step(self) -> bool:
        new, self._new = self._new, False
        return new

    def deliver(self, message: bytes) -> None:
        with self._lock:
            self._inbox.append(message)
            self._new = True

    def messages(self) -> list[bytes]:
        with self._lock:
            taken, self._inbox = self._inbox, []
        return taken

    def close(self) -> None:
        self._network.remove(self)


class MemoryReceiver(Receiver):
    def __init__(self, name: str, regions: tuple[Region, ...], network: MemoryNetwork, in_flight: int) -> None:
        self.name = name
        self.regions = regions
        self.network = network
        self.in_flight = in_flight
        self._fenced: bool | None = None

    def connect(self, record: EndpointRecord) -> MemoryLink:
        if self._fenced is not None:
            raise Closed(f"receiver {self.name} is closed")
        if record.transport != MemoryTransport.name:
            raise CorruptRecord(f"{record.agent} is reached by {record.transport!r}, this process uses 'memory'")
        if record.address != str(os.getpid()).encode():
            raise PeerLost(
                f"{record.agent} lives in another process, which the memory transport cannot reach: install nixl on "
                "both sides",
                peer=record.agent,
            )
        return MemoryLink(self, record, self.network.server(record.agent))

    @property
    def settled(self) -> bool:
        return not self.network.unsettled(self)

    def close(self) -> bool:
        if self._fenced is None:
            self._fenced = self.network.forget(self)
        return self._fenced


class MemoryLink(Link):
    lane = "memory"

    def __init__(self, receiver: MemoryReceiver, record: EndpointRecord, server: MemoryServer) -> None:
        self.receiver = receiver
        self.record = record
        self._server = server

    def check_header(self, address: int) -> None:
        ends = [(region.address, region.address + region.nbytes - HEADER_BYTES) for region in self._server.regions]
        if not any(low <= address <= high for low, high in ends):
            raise InvalidArgument(
                f"{self.record.agent} has no header at {address:#x}: not in the memory that it serves"
            )

    def header(self, region: int, *, timeout: float) -> tuple[int, int]:
        self.check_header(self.record.regions[region].header)
        reads = _MemoryReads(self, region, None)
        deadline = time.monotonic() + timeout
        ended = reads.post_header()
        while not ended:
            if time.monotonic() > deadline:
                raise PeerLost(f"{reads.peer} did not answer a header read in {timeout} s", peer=reads.peer)
            time.sleep(200e-6)
            ended = reads.poll_header()
        return check_header(reads.words(), nonce=self.record.nonce, peer=reads.peer)

    def send(self, message: bytes) -> None:
        if len(message) > MAX_MESSAGE_BYTES:
            raise InvalidArgument(f"a message of {len(message)} bytes: at most {MAX_MESSAGE_BYTES}")
        self.receiver.network.server(self.record.agent).deliver(bytes(message))

    def route(self, region: int, windows: Windows) -> MemoryRoute:
        block = self.record.regions[region]
        check_windows(windows, source=regions_of(block), stage=self.receiver.regions)
        # The record may claim what it likes: only what the source has registered is read.
        check_windows(windows, source=self._server.regions, stage=self.receiver.regions)
        self.check_header(block.header)
        return MemoryRoute(self, region, windows)

    def close(self) -> None:
        """Nothing is held."""


class MemoryRoute(Route):
    def __init__(self, link: MemoryLink, region: int, windows: Windows) -> None:
        self._link = link
        self._region = region
        self._windows = windows

    def start(self, generation: int, windows: Sequence[int]) -> Flow:
        return ReadFlow(
            _MemoryReads(self._link, self._region, self._windows),
            nonce=self._link.record.nonce,
            generation=generation,
            windows=check_choice(windows, len(self._windows)),
            needs=self._windows.needs,
            in_flight=self._link.receiver.in_flight,
        )

    def close(self) -> None:
        """Nothing is held: moves that have not ended belong to the receiver."""


class _MemoryReads(Reads):
    def __init__(self, link: MemoryLink, region: int, windows: Windows | None) -> None:
        self.peer = link.record.agent
        self._receiver = link.receiver
        self._header = link.record.regions[region].header
        self._windows = windows
        self._moves: dict[int, _Move] = {}
        self._line = (ctypes.c_uint64 * (HEADER_BYTES // 8))()
        self._header_move: _Move | None = None

    def post(self, window: int) -> bool:
        assert self._windows is not None
        begin, end = self._windows.starts[window : window + 2]
        rows = [(stage, source, nbytes) for stage, source, nbytes in self._windows.runs[begin:end].tolist()]
        move = self._moves[window] = self._receiver.network.post(self._receiver, self.peer, rows)
        return move.ended

    def poll(self, window: int) -> bool:
        return self._receiver.network.poll(self._moves[window])

    def post_header(self) -> bool:
        rows = [(ctypes.addressof(self._line), self._header, ctypes.sizeof(self._line))]
        # The line, not the receiver, is what this read belongs to: it says nothing about the stage.
        self._header_move = self._receiver.network.post(self._line, self.peer, rows)
        return self._header_move.ended

    def poll_header(self) -> bool:
        assert self._header_move is not None
        return self._receiver.network.poll(self._header_move)

    def words(self) -> tuple[int, int]:
        return int(self._line[0]), int(self._line[1])

    def abandon(self, posted: Sequence[int]) -> bool:
        ended = [self._ended(self._moves[window]) for window in posted]
        return all(ended)

    def _ended(self, move: _Move) -> bool:
        try:
            return self._receiver.network.poll(move)
        except (PeerLost, Closed):  # dropped with the peer or the receiver: it will never copy
            return True
