"""The data plane between processes, over NIXL and UCX: one agent a Server, one a Receiver."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from mx_rl.arena import HEADER_BYTES
from mx_rl.config import Options
from mx_rl.errors import Closed, CorruptRecord, InvalidArgument, MxRLError, PeerLost
from mx_rl.records import EndpointRecord
from mx_rl.records import decode as decode_record
from mx_rl.transport.agent import Agent, Moves, keep, let_go, load_nixl
from mx_rl.transport.base import Flow, Link, Receiver, Region, Route, Server, Transport, Windows
from mx_rl.transport.flow import ReadFlow, Reads, check_header
from mx_rl.transport.lanes import choose_lane
from mx_rl.transport.place import rdma_devices
from mx_rl.transport.requested import Asking, Desk, HeaderQuestion, RequestedFlow, send_table
from mx_rl.transport.runs import NBYTES, SOURCE, STAGE, check_choice, check_windows, regions_of
from mx_rl.transport.service import Service
from mx_rl.transport.wire import REQUEST, USER, Bye, Drop, Hello, Outbox, Request, decode_reply, encode

_MAX_ADDRESS_BYTES = 16 << 20  # a few dozen bytes for each piece of registered memory
_INBOX_BYTES = 256 << 20
_CLOSE_S = 1.0
"""How long a server that closes waits for writes under way."""


class _Address(msgspec.Struct, frozen=True, kw_only=True):
    """``EndpointRecord.address`` of this transport."""

    metadata: tuple[bytes, ...]
    rdma: bool


class NixlTransport(Transport):
    """Raises MissingExtra at construction where nixl is not installed."""

    name = "nixl"

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or Options()
        _, self.release = load_nixl()

    def serve(self, name: str, regions: Sequence[Region]) -> NixlServer:
        return NixlServer(name, regions, self._options)

    def receive(self, name: str, regions: Sequence[Region]) -> NixlReceiver:
        return NixlReceiver(name, regions, self._options)

    def close(self) -> None:
        """Nothing is held beyond servers and receivers."""


class NixlServer(Server):
    def __init__(self, name: str, regions: Sequence[Region], options: Options) -> None:
        self.name = name
        self._agent = Agent(name, options)
        self.address = msgspec.msgpack.encode(
            _Address(metadata=_registered(self._agent, regions), rdma=bool(rdma_devices()))
        )
        self._service = Service(self._agent, regions, in_flight=options.in_flight)
        self._lock = threading.Lock()
        self._inbox: list[bytes] = []
        self._inbox_bytes = 0
        self._closed = False

    @property
    def num_readers(self) -> int:
        """Readers that have sent a request or message and not left."""
        return self._service.num_readers

    @property
    def num_peers(self) -> int:
        """Readers that a connection is held to: those, and ones that left but whose agent still lives."""
        return self._service.num_peers

    def step(self) -> bool:
        if self._closed:
            return False
        notices = self._agent.notices()
        for sender, frames in notices.items():
            for frame in frames:
                if frame:
                    self._deliver(self._service.take(sender, frame))
        return self._service.step() or bool(notices)

    def _deliver(self, messages: list[bytes]) -> None:
        if messages:
            with self._lock:
                for message in messages:
                    if self._inbox_bytes < _INBOX_BYTES:  # beyond that nobody takes them: the rest is lost
                        self._inbox.append(message)
                        self._inbox_bytes += len(message)

    def messages(self) -> list[bytes]:
        with self._lock:
            taken, self._inbox, self._inbox_bytes = self._inbox, [], 0
        return taken

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._service.close(timeout=_CLOSE_S)
            self._agent.close()


class _Peer:
    """A source as one Receiver knows it, shared by its links."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.links = 0
        self.moves = 0  # Moves that are not released
        self.outbox = Outbox()
        self.introduced = False  # in this session
        self.met = False  # in any
        self.lost = False


class NixlReceiver(Receiver):
    def __init__(self, name: str, regions: Sequence[Region], options: Options) -> None:
        self.name = name
        self.regions = tuple(regions)
        self.options = options
        self.agent = Agent(name, options)
        # An agent that has registered nothing cannot be answered: its metadata names no backend.
        self._anchor = np.zeros(HEADER_BYTES, dtype=np.uint8)
        anchor = Region(address=int(self._anchor.ctypes.data), nbytes=HEADER_BYTES)
        self.metadata = _registered(self.agent, regions or [anchor])
        self.lines = _Lines(self.agent)
        self.desk = Desk()
        self.lock = threading.RLock()
        self._peers: dict[str, _Peer] = {}
        self._moves: dict[Moves, bool] = {}  # all that are not released; whether they move into the stage
        self._leaving: list[tuple[_Peer, Moves, int | None]] = []  # closed and not ended, with the header line they use
        self._unfenced = False  # a write was asked for on a lane where destroying the agent is no fence
        self._tables = 0
        self._fence: bool | None = None
        self._kept = False  # closed, while reads were under way
        self._ended = False  # those have ended since, and nothing else can arrive

    def connect(self, record: EndpointRecord) -> NixlLink:
        if record.transport != NixlTransport.name:
            raise CorruptRecord(f"{record.agent} is reached by {record.transport!r}, this process uses 'nixl'")
        address: _Address = decode_record(record.address, _Address, max_bytes=_MAX_ADDRESS_BYTES)
        lane = choose_lane(record, self.options, peer_rdma=address.rdma)
        with self.lock:
            if self._fence is not None:
                raise Closed(f"receiver {self.name} is closed")
            self._sweep()
            peer = self._peers.get(record.agent)
            if peer is None:
                self.agent.add_peer(address.metadata, record.agent)
                peer = self._peers[record.agent] = _Peer(record.agent)
            peer.links += 1
            if lane.writes and not lane.fenced:
                self._unfenced = True
        link = NixlLink(self, record, peer, lane.name, writes=lane.writes)
        try:
            if record.regions:
                link.header(0, timeout=self.options.stall_s)
        except MxRLError:
            link.close()
            raise
        return link

    @property
    def settled(self) -> bool:
        with self.lock:
            if self._fence is None:
                self.pump()
                return self._reads_ended() and self.desk.settled
            if not self._fence and self._kept and self._reads_ended():
                self._destroy()
            return self._fence or self._ended

    def _reads_ended(self) -> bool:
        self._settle()
        busy = [moves for moves, into_stage in self._moves.items() if into_stage and not moves.settle()]
        return not busy

    def close(self) -> bool:
        with self.lock:
            if self._fence is None:
                reads_ended = self._reads_ended()
                self._fence = reads_ended and (self.desk.settled or not self._unfenced)
                for peer in self._peers.values():
                    self._tell_end(peer, final=True)
                if reads_ended:
                    self._destroy()
                else:
                    self._kept = True
                    keep(self)  # destroying the agent would not stop what is posted, only hide its end
            return self._fence

    def _destroy(self) -> None:
        """All reads have ended."""
        self._ended = self.desk.settled or not self._unfenced
        for moves in self._moves:  # one handle that is left would keep the agent, and its sockets, alive
            moves.discard()
        self._moves.clear()
        self._leaving.clear()
        for name in self._peers:
            self.agent.remove_peer(name)  # a connection that just vanishes has wedged sources
        self.agent.close()
        self._kept = False
        let_go(self)

    # ---- what links and routes use

    def pump(self) -> None:
        """Sort what sources have answered."""
        with self.lock:
            for sender, frames in self.agent.notices().items():
                for frame in frames:
                    if frame:
                        with contextlib.suppress(CorruptRecord):  # not a source's answer: nobody waits for it
                            self.desk.put(sender, decode_reply(frame))

    def new_table(self) -> int:
        with self.lock:
            self._tables += 1
            return self._tables

    def moves(
        self, peer: _Peer, windows: Windows, my_device: str, their_device: str, *, into_stage: bool = True
    ) -> Moves:
        runs = windows.runs
        with self.lock:
            made = Moves(
                self.agent,
                peer.name,
                "READ",
                mine=runs[:, STAGE],
                theirs=runs[:, SOURCE],
                nbytes=runs[:, NBYTES],
                starts=windows.starts,
                my_device=my_device,
                their_device=their_device,
            )
            peer.moves += 1
            self._moves[made] = into_stage
            return made

    def retire(self, peer: _Peer, moves: Moves, *, line: int | None = None) -> None:
        """Release these moves once they have ended. ``line``: they read a header into it."""
        with self.lock:
            if self._fence is None:
                moves.close()
                self._leaving.append((peer, moves, line))
                self._settle()

    def _settle(self) -> None:
        left = []
        for peer, moves, line in self._leaving:
            if moves.settle():
                peer.moves -= 1
                self._moves.pop(moves, None)
                if line is not None:
                    self.lines.give(line)
                self._part(peer)
            else:
                left.append((peer, moves, line))
        self._leaving = left

    def leave(self, peer: _Peer) -> None:
        """A link is closed. The peer stays connected: two agents that part and meet again lose, in silence, messages of
        more than one fragment (UCX drops them at the end that had removed the other)."""
        with self.lock:
            if self._fence is None:
                peer.links -= 1
                if not peer.links and not self._tell_end(peer):
                    self._part(peer)

    def _tell_end(self, peer: _Peer, *, final: bool = False) -> bool:
        """Whether there was somebody to tell."""
        try:
            if peer.introduced or (final and peer.met):
                self.agent.notify(peer.name, peer.outbox.frame(REQUEST, encode(Bye(final=final))))
            else:
                self.agent.notify(peer.name, b"")
        except PeerLost:
            peer.lost = True
        peer.outbox, peer.introduced = Outbox(), False
        return not peer.lost

    def _sweep(self) -> None:
        """Remove peers that nobody uses and that have died."""
        for peer in list(self._peers.values()):
            if not peer.links and not self._tell_end(peer):
                self._part(peer)

    def _part(self, peer: _Peer) -> None:
        if peer.lost and not peer.links and not peer.moves and self._peers.pop(peer.name, None) is peer:
            self.agent.remove_peer(peer.name)

    def send(self, peer: _Peer, kind: bytes, body: bytes) -> None:
        with self.lock:
            frame = peer.outbox.frame
            if not peer.introduced:
                # Also before a mere message: the source could not tell otherwise whether its sender still lives.
                peer.introduced = peer.met = True
                self.agent.notify(peer.name, frame(REQUEST, encode(Hello(metadata=self.metadata))))
            self.agent.notify(peer.name, frame(kind, body))


class _Lines:
    """Registered lines of 64 bytes that headers are read into."""

    def __init__(self, agent: Agent, count: int = 1024) -> None:
        self._agent = agent
        self._blocks: list[np.ndarray] = []
        self._free: list[int] = []
        self._count = count

    def take(self) -> int:
        if not self._free:
            block = np.zeros(self._count * HEADER_BYTES // 8 + 8, dtype=np.uint64)
            self._blocks.append(block)
            begin = -(-block.ctypes.data // HEADER_BYTES) * HEADER_BYTES
            self._agent.register([Region(address=begin, nbytes=self._count * HEADER_BYTES)])
            self._free = [begin + i * HEADER_BYTES for i in range(self._count)]
        return self._free.pop()

    def give(self, line: int) -> None:
        self._free.append(line)

    def words(self, line: int) -> tuple[int, int]:
        for block in self._blocks:
            at = (line - block.ctypes.data) // 8
            if 0 <= at < len(block):
                return int(block[at]), int(block[at + 1])
        raise AssertionError(f"{line:#x} is no line")


class _HeaderReads:
    """Reads of one header into one line, one at a time."""

    def __init__(self, receiver: NixlReceiver, peer: _Peer, header: int) -> None:
        self._receiver = receiver
        self._peer = peer
        with receiver.lock:
            self._line = receiver.lines.take()
            row = np.array([[self._line, header, HEADER_BYTES]], dtype=np.int64)
            windows = Windows(runs=row, starts=np.array([0, 1]), needs=np.array([0]))
            try:
                self._moves = receiver.moves(peer, windows, "cpu", "cpu", into_stage=False)
            except MxRLError:
                receiver.lines.give(self._line)
                raise

    @property
    def busy(self) -> bool:
        return bool(self._moves.busy)

    def post(self) -> bool:
        return self._moves.post(0)

    def poll(self) -> bool:
        return self._moves.poll(0)

    def words(self) -> tuple[int, int]:
        return self._receiver.lines.words(self._line)

    def close(self) -> None:
        self._receiver.retire(self._peer, self._moves, line=self._line)


class NixlLink(Link):
    def __init__(self, receiver: NixlReceiver, record: EndpointRecord, peer: _Peer, lane: str, *, writes: bool) -> None:
        self.lane = lane
        self.writes = writes
        """Whether the source writes on request, because a READ is emulated on this lane."""
        self.receiver = receiver
        self.record = record
        self.peer = peer
        self._headers: dict[int, _HeaderReads | HeaderQuestion] = {}
        self._closed = False
        self.asking = Asking(peer.name, receiver.desk, send=self.request, pump=receiver.pump)

    def header(self, region: int, *, timeout: float) -> tuple[int, int]:
        deadline = time.monotonic() + timeout
        reads = self._headers.get(region)
        stale = reads is not None and reads.busy  # posted before this call: what it brings is too old
        words = self.try_header(region)
        pause = 20e-6
        while words is None or stale:
            stale = stale and words is None
            if time.monotonic() > deadline:
                # The read may end later and bring what was true long ago: the next one has a line of its own.
                self._headers.pop(region).close()
                raise PeerLost(f"{self.peer.name} did not answer a header read in {timeout} s", peer=self.peer.name)
            time.sleep(pause)
            pause = min(pause * 2, 1e-3)
            words = self.try_header(region)
        return check_header(words, nonce=self.record.nonce, peer=self.peer.name)

    def try_header(self, region: int) -> tuple[int, int] | None:
        """Begin or continue a header read: its words once it has ended."""
        if self._closed:
            raise Closed(f"the link to {self.peer.name} is closed")
        reads = self._headers.get(region)
        if reads is None:
            address = self.record.regions[region].header
            reads = (
                HeaderQuestion(self.asking, address) if self.writes else _HeaderReads(self.receiver, self.peer, address)
            )
            self._headers[region] = reads
        ended = reads.poll() if reads.busy else reads.post()
        return reads.words() if ended else None

    def send(self, message: bytes) -> None:
        self.receiver.send(self.peer, USER, message)

    def request(self, request: Request) -> None:
        self.receiver.send(self.peer, REQUEST, encode(request))

    def route(self, region: int, windows: Windows) -> Route:
        source = regions_of(self.record.regions[region])
        their_device, my_device = check_windows(windows, source=source, stage=self.receiver.regions)
        if self.writes:
            return _RequestedRoute(self, region, windows, my_device)
        return _ReadRoute(self, region, windows, my_device, their_device)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for reads in self._headers.values():
            reads.close()
        self.receiver.leave(self.peer)


class _RequestedRoute(Route):
    def __init__(self, link: NixlLink, region: int, windows: Windows, my_device: str) -> None:
        self._link = link
        self._count = len(windows)
        self._table = link.receiver.new_table()
        self._closed = False
        self._asking = link.asking
        self._region = region
        header = link.record.regions[region].header
        send_table(self._asking, self._table, windows, nonce=link.record.nonce, header=header, device=my_device)

    def start(self, generation: int, windows: Sequence[int]) -> Flow:
        if self._closed:
            raise Closed("this route is closed")
        chosen = check_choice(windows, self._count)
        return RequestedFlow(
            self._asking,
            self._table,
            nonce=self._link.record.nonce,
            generation=generation,
            windows=chosen,
            probe=lambda: self._link.try_header(self._region),
        )

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(MxRLError):  # the source forgets it with us
                self._asking.send(Drop(table=self._table))


class _ReadRoute(Route):
    def __init__(self, link: NixlLink, region: int, windows: Windows, my_device: str, their_device: str) -> None:
        self._link = link
        self._region = region
        self._windows = windows
        self._moves = link.receiver.moves(link.peer, windows, my_device, their_device)
        self._header: _HeaderReads | None = None
        self._closed = False

    def start(self, generation: int, windows: Sequence[int]) -> Flow:
        if self._closed:
            raise Closed("this route is closed")
        if not self._moves.settle():
            raise InvalidArgument(
                f"{len(self._moves.busy)} windows of an earlier flow from {self._link.peer.name} are still arriving: "
                "use another stage until Receiver.settled"
            )
        if self._header is None:
            self._header = _HeaderReads(
                self._link.receiver, self._link.peer, self._link.record.regions[self._region].header
            )
        return ReadFlow(
            _NixlReads(self, self._moves, self._header, self._link.peer.name),
            nonce=self._link.record.nonce,
            generation=generation,
            windows=check_choice(windows, len(self._windows)),
            needs=self._windows.needs,
            in_flight=self._link.receiver.options.in_flight,
        )

    def ended(self) -> bool:
        """The flow is over: whether its moves are."""
        if self._header is not None and self._header.busy:
            self._header.close()  # what it brings later says nothing about the next flow
            self._header = None
        return self._moves.settle()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._header is not None:
                self._header.close()
            self._link.receiver.retire(self._link.peer, self._moves)


class _NixlReads(Reads):
    def __init__(self, route: _ReadRoute, moves: Moves, header: _HeaderReads, peer: str) -> None:
        self.peer = peer
        self._route = route
        self._moves = moves
        self._header = header

    def post(self, window: int) -> bool:
        return self._moves.post(window)

    def poll(self, window: int) -> bool:
        return self._moves.poll(window)

    def post_header(self) -> bool:
        return self._header.post()

    def poll_header(self) -> bool:
        return self._header.poll()

    def words(self) -> tuple[int, int]:
        return self._header.words()

    def abandon(self, posted: Sequence[int]) -> bool:
        return self._route.ended()


def _registered(agent: Agent, regions: Sequence[Region]) -> tuple[bytes, ...]:
    """Where it fails, what the agent has registered by then does not stay for as long as somebody keeps the exception."""
    try:
        return agent.register(regions)
    except BaseException:
        agent.close()
        raise
