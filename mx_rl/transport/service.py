"""The source's side of requested writes: check every request, write, check the generation again, say so.

Nothing that one reader sends, or fails to do, may cost the source or its other readers anything: whatever goes wrong
with a reader ends with that reader being forgotten.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from mx_rl.arena import CLOSED, HEADER_BYTES, unpack
from mx_rl.errors import CorruptRecord, InvalidArgument, MxRLError, PeerLost
from mx_rl.transport.agent import Agent, Moves
from mx_rl.transport.base import Region, Windows
from mx_rl.transport.flow import POST_S
from mx_rl.transport.runs import NBYTES, SOURCE, STAGE, check_windows
from mx_rl.transport.wire import (
    MAX_TABLE_BYTES,
    PART_BYTES,
    USER,
    Ask,
    Bye,
    Cancel,
    Done,
    Drop,
    Ended,
    Gone,
    Hello,
    Inbox,
    Refused,
    Reply,
    Request,
    Table,
    TablePart,
    Told,
    Want,
    decode_request,
    decode_table,
    encode,
    session_of,
)

MAX_READERS = 4096
MAX_TABLES = 64
MAX_FLOWS = 256
MAX_WINDOWS = 1 << 22
PROBE_S = 2.0
"""How often a reader that asks for nothing is tried, so that one which died in silence is forgotten."""
STRANGER_S = 60.0
"""A sender that never said how to reach it is forgotten after so long without a word."""

_log = logging.getLogger(__name__)


def _words(header: int) -> tuple[int, int]:
    return ctypes.c_uint64.from_address(header).value, ctypes.c_uint64.from_address(header + 8).value


class _Route:
    """A reader's table, prepared."""

    def __init__(self, table: Table, windows: Windows, moves: Moves) -> None:
        self.nonce = table.nonce
        self.header = table.header
        self.needs: list[int] = windows.needs.tolist()
        self.moves = moves


class _Flow:
    def __init__(self, serial: int, route: _Route, generation: int) -> None:
        self.serial = serial
        self.route = route
        self.generation = generation
        self.waiting: deque[int] = deque()
        self.posted: list[int] = []
        self.scanned = -1  # at this count nothing that waits may be written
        self.gone: tuple[int, int] | None = None  # the words that ended it
        self.cancelled = False

    def next(self, count: int) -> int | None:
        """The first window, in the reader's order, that the source has."""
        needs, waiting = self.route.needs, self.waiting
        if waiting and needs[waiting[0]] <= count:
            return waiting.popleft()
        if self.scanned != count:
            for at, window in enumerate(waiting):
                if needs[window] <= count:
                    del waiting[at]
                    return window
            self.scanned = count
        return None


class _Reader:
    def __init__(self, name: str) -> None:
        self.name = name
        self.inbox = Inbox()
        self.known = False  # its metadata is loaded
        self.deaf = False  # it has left, or what it sent made no sense: only a new session is listened to
        self.lost = False  # its agent is gone: removed as soon as every write to it has ended
        self.parts: dict[int, list[bytes]] = {}
        self.routes: dict[int, _Route] = {}
        self.flows: dict[int, _Flow] = {}
        self.leaving: list[Moves] = []  # closed, and not all ended
        self.heard = time.monotonic()


class Service:
    """Serves the readers of one agent. One thread."""

    def __init__(self, agent: Agent, regions: Sequence[Region], *, in_flight: int) -> None:
        self._agent = agent
        self._regions = tuple(regions)
        self._in_flight = in_flight
        self._readers: dict[str, _Reader] = {}
        self._past: dict[str, int] = {}  # readers that left and their sessions: frames of theirs may still come in
        self._active: dict[str, _Reader] = {}  # with something to do, or to see end
        self._probed = time.monotonic()

    @property
    def num_readers(self) -> int:
        return sum(not reader.deaf for reader in self._readers.values())

    @property
    def num_peers(self) -> int:
        return len(self._readers)

    def take(self, sender: str, frame: bytes) -> list[bytes]:
        """A frame from a peer; returns the users' messages that are due now."""
        reader = self._readers.get(sender)
        if reader is None:
            if session_of(frame) <= self._past.get(sender, -1):
                return []
            self._make_room()
            reader = self._readers[sender] = _Reader(sender)
        if reader.deaf and session_of(frame) <= reader.inbox.session:
            return []
        reader.heard = time.monotonic()
        messages = []
        try:
            session = reader.inbox.session
            due = reader.inbox.take(frame)
            if reader.inbox.session != session:  # it has connected anew: nothing of before holds
                self._clear(reader)
                reader.deaf = False
            for kind, body in due:
                if kind == USER:
                    messages.append(body)
                else:
                    self._request(reader, decode_request(body))
        except MxRLError as exc:
            _log.warning("%s: reader %s is dropped: %s", self._agent.name, sender, exc)
            self._clear(reader, lost=isinstance(exc, PeerLost))
        return messages

    def step(self) -> bool:
        if not self._readers:
            return False
        moved = False
        for reader in list(self._active.values()):
            moved |= self._step(reader)
        now = time.monotonic()
        if now - self._probed > PROBE_S:
            self._probed = now
            self._probe()
        return moved

    def _step(self, reader: _Reader) -> bool:
        moved = False
        try:
            for flow in list(reader.flows.values()):
                moved |= self._advance(reader, flow)
        except MxRLError as exc:
            _log.info("%s: reader %s is lost: %s", self._agent.name, reader.name, exc)
            self._clear(reader, lost=True)
        if reader.leaving:
            reader.leaving = [moves for moves in reader.leaving if not moves.settle()]
        if not reader.flows and not reader.leaving:
            del self._active[reader.name]
            if reader.lost:
                self._remove(reader)
        return moved

    def close(self, *, timeout: float) -> None:
        """Forget everybody, before the agent is destroyed. Writes to a stopped reader end with the agent: they read
        from our memory, and what they have sent so far is confirmed by nobody."""
        deadline = time.monotonic() + timeout
        for reader in self._readers.values():
            self._clear(reader, lost=True)
        while True:
            self.step()
            if not self._readers or time.monotonic() > deadline:
                break
            time.sleep(1e-3)
        for reader in self._readers.values():
            for moves in reader.leaving:
                moves.discard()

    # ---- requests

    def _request(self, reader: _Reader, request: Request) -> None:
        match request:
            case Hello():
                if not reader.known:
                    self._agent.add_peer(request.metadata, reader.name)
                    reader.known = True
            case TablePart():
                self._table_part(reader, request)
            case Want():
                self._want(reader, request)
            case Cancel():
                flow = reader.flows.get(request.flow)
                if flow is None:
                    self._tell(reader, Ended(flow=request.flow))
                else:
                    flow.cancelled = True
            case Ask():
                self._ask(reader, request)
            case Drop():
                self._drop(reader, request.table)
            case Bye():
                self._clear(reader, lost=request.final)

    def _table_part(self, reader: _Reader, piece: TablePart) -> None:
        parts = reader.parts.setdefault(piece.table, [])
        total = piece.parts * PART_BYTES
        if piece.part != len(parts) or piece.parts < 1 or total > MAX_TABLE_BYTES or len(piece.data) > PART_BYTES:
            raise CorruptRecord(f"part {piece.part} of {piece.parts} of table {piece.table}, after {len(parts)}")
        if len(reader.parts) > MAX_TABLES or len(reader.routes) >= MAX_TABLES:
            raise CorruptRecord(f"more than {MAX_TABLES} routes of one reader")
        parts.append(piece.data)
        if len(parts) == piece.parts:
            del reader.parts[piece.table]
            self._drop(reader, piece.table)
            reader.routes[piece.table] = self._prepare(reader, decode_table(b"".join(parts)))

    def _prepare(self, reader: _Reader, table: Table) -> _Route:
        if len(table.runs) % 24 or len(table.starts) % 8 or len(table.needs) % 8:
            raise CorruptRecord("a table that is not made of whole rows")
        windows = Windows(
            runs=np.frombuffer(table.runs, dtype="<i8").astype(np.int64, copy=False).reshape(-1, 3),
            starts=np.frombuffer(table.starts, dtype="<i8").astype(np.int64, copy=False),
            needs=np.frombuffer(table.needs, dtype="<i8").astype(np.int64, copy=False),
        )
        everywhere = Region(address=0, nbytes=(1 << 63) - 1, device=table.device)  # NIXL checks it against the metadata
        my_device, their_device = check_windows(windows, source=self._regions, stage=[everywhere])
        if not self._is_header(table.header):
            raise InvalidArgument(f"a header at {table.header:#x}: not in the memory that is served here")
        moves = Moves(
            self._agent,
            reader.name,
            "WRITE",
            mine=windows.runs[:, SOURCE],
            theirs=windows.runs[:, STAGE],
            nbytes=windows.runs[:, NBYTES],
            starts=windows.starts,
            my_device=my_device,
            their_device=their_device,
        )
        return _Route(table, windows, moves)

    def _is_header(self, address: int) -> bool:
        return address % 8 == 0 and any(
            region.device == "cpu" and region.address <= address <= region.address + region.nbytes - HEADER_BYTES
            for region in self._regions
        )

    def _ask(self, reader: _Reader, ask: Ask) -> None:
        if self._is_header(ask.header):
            nonce, word = _words(ask.header)
            self._tell(reader, Told(flow=ask.flow, nonce=nonce, word=word))
        else:
            self._tell(reader, Refused(flow=ask.flow, reason=f"no header at {ask.header:#x}"))

    def _want(self, reader: _Reader, want: Want) -> None:
        route = reader.routes.get(want.table)
        chosen = np.frombuffer(want.windows[: len(want.windows) // 4 * 4], dtype="<i4")
        flow = reader.flows.get(want.flow)
        problem = ""
        if route is None:
            problem = f"no route {want.table}"
        elif len(chosen) and (int(chosen.min()) < 0 or int(chosen.max()) >= len(route.needs)):
            problem = f"windows {int(chosen.min())} to {int(chosen.max())} of {len(route.needs)}"
        elif flow is not None and (flow.route is not route or flow.generation != want.generation):
            problem = f"flow {want.flow} is another one"
        elif flow is None and len(reader.flows) >= MAX_FLOWS:
            problem = f"more than {MAX_FLOWS} flows of one reader"
        elif flow is not None and len(flow.waiting) + len(chosen) > MAX_WINDOWS:
            problem = f"more than {MAX_WINDOWS} windows of one flow"
        if problem or route is None:
            self._tell(reader, Refused(flow=want.flow, reason=problem))
            return
        if flow is None:
            flow = reader.flows[want.flow] = _Flow(want.flow, route, want.generation)
        flow.waiting.extend(chosen.tolist())
        flow.scanned = -1
        self._active[reader.name] = reader

    # ---- writes

    def _advance(self, reader: _Reader, flow: _Flow) -> bool:
        """Take what has ended, check, tell, post more; whether anything happened."""
        moves = flow.route.moves
        ended = [window for window in flow.posted if moves.poll(window)]
        # Read after the writes were seen to end: the same generation as before they were posted means none is torn.
        nonce, word = _words(flow.route.header)
        generation, count = unpack(word)
        current = nonce == flow.route.nonce and word != CLOSED and generation == flow.generation
        if not current:
            flow.gone = (nonce, word)
        if ended:
            flow.posted = [window for window in flow.posted if window not in ended]
            if current:
                self._tell(reader, Done(flow=flow.serial, windows=tuple(ended), generation=generation, count=count))
        if flow.gone or flow.cancelled:
            flow.waiting.clear()
        posted = self._post(flow, count) if flow.waiting else False
        if not flow.waiting and not flow.posted:
            del reader.flows[flow.serial]
            if flow.cancelled:
                self._tell(reader, Ended(flow=flow.serial))
            elif flow.gone:
                self._tell(reader, Gone(flow=flow.serial, nonce=flow.gone[0], word=flow.gone[1]))
        return posted or bool(ended)

    def _post(self, flow: _Flow, count: int) -> bool:
        moves = flow.route.moves
        begin = time.perf_counter()
        posted = False
        while len(flow.posted) < self._in_flight and not (posted and time.perf_counter() - begin > POST_S):
            window = flow.next(count)
            if window is None:
                break
            if window in moves.busy:  # of a flow that was cancelled: its write must end first
                flow.waiting.appendleft(window)
                break
            moves.post(window)
            flow.posted.append(window)
            posted = True
        return posted

    def _tell(self, reader: _Reader, reply: Reply) -> None:
        if reader.known:
            self._agent.notify(reader.name, encode(reply))

    # ---- forgetting

    def _probe(self) -> None:
        """Forget readers that died in silence; one with writes under way is noticed by those."""
        for reader in list(self._readers.values()):
            if reader.known and not reader.flows:
                try:
                    self._agent.notify(reader.name, b"")
                except PeerLost:
                    self._clear(reader, lost=True)
            elif not reader.known and time.monotonic() - reader.heard > STRANGER_S:
                self._clear(reader, lost=True)

    def _make_room(self) -> None:
        if len(self._readers) >= MAX_READERS:
            oldest = min(self._readers.values(), key=lambda reader: (reader.known, reader.heard))
            _log.warning("%s has %d readers: %s is forgotten", self._agent.name, MAX_READERS, oldest.name)
            self._clear(oldest, lost=True)

    def _drop(self, reader: _Reader, table: int) -> None:
        route = reader.routes.pop(table, None)
        if route is not None:
            for serial in [serial for serial, flow in reader.flows.items() if flow.route is route]:
                del reader.flows[serial]
            if not route.moves.close():
                reader.leaving.append(route.moves)

    def _clear(self, reader: _Reader, *, lost: bool = False) -> None:
        """Nothing more is done for this reader. Its agent stays connected while it lives: two agents that part and meet
        again lose messages of more than one fragment in silence."""
        reader.deaf = True
        reader.lost |= lost
        self._active[reader.name] = reader
        reader.parts.clear()
        for table in list(reader.routes):
            self._drop(reader, table)
        reader.flows.clear()

    def _remove(self, reader: _Reader) -> None:
        if reader.known:
            self._agent.remove_peer(reader.name)
        del self._readers[reader.name]
        self._past[reader.name] = reader.inbox.session
        if len(self._past) > MAX_READERS:
            del self._past[next(iter(self._past))]
