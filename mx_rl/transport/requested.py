"""The reader's side of requested writes: ask the source for windows, and believe only what it says it checked."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from mx_rl.errors import Closed, InvalidArgument, MxRLError, PeerLost
from mx_rl.transport.base import Flow, Windows
from mx_rl.transport.flow import check_generation, check_header
from mx_rl.transport.wire import (
    PART_BYTES,
    WINDOWS_PER_WANT,
    Ask,
    Cancel,
    Done,
    Ended,
    Gone,
    Refused,
    Reply,
    Request,
    Table,
    TablePart,
    Told,
    Want,
    encode,
)

PROBE_S = 0.1
"""After so long without an answer the source is asked for its header: of one that died the asking itself fails."""
ASK_AGAIN_S = 0.5


class Desk:
    """Where the answers of all sources to one receiver are sorted by flow. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._flows: dict[int, deque[Reply]] = {}
        self._peers: dict[int, str] = {}
        self._cancelled: set[int] = set()
        self._serial = 0

    def open(self, peer: str) -> int:
        with self._lock:
            self._serial += 1
            self._flows[self._serial] = deque()
            self._peers[self._serial] = peer
            return self._serial

    def put(self, peer: str, reply: Reply) -> None:
        with self._lock:
            if self._peers.get(reply.flow) != peer:
                return  # a late answer to a flow that is over, or an answer to someone else's
            if reply.flow not in self._cancelled:
                self._flows[reply.flow].append(reply)
            elif not isinstance(reply, Done):
                self.forget(reply.flow)

    def take(self, flow: int) -> list[Reply]:
        with self._lock:
            replies = self._flows[flow]
            taken = list(replies)
            replies.clear()
            return taken

    def cancel(self, flow: int) -> None:
        """Answers are awaited only to learn that nothing is under way any more."""
        with self._lock:
            self._cancelled.add(flow)

    def forget(self, flow: int) -> None:
        with self._lock:
            self._cancelled.discard(flow)
            self._flows.pop(flow, None)
            self._peers.pop(flow, None)

    @property
    def settled(self) -> bool:
        return not self._cancelled


class Asking:
    """What a flow needs of its link. ``send`` raises PeerLost; ``pump`` takes in what has arrived for all flows."""

    def __init__(self, peer: str, desk: Desk, *, send: Callable[[Request], None], pump: Callable[[], None]) -> None:
        self.peer = peer
        self.desk = desk
        self.send = send
        self.pump = pump


class HeaderQuestion:
    """A header asked for, one question at a time."""

    def __init__(self, asking: Asking, header: int) -> None:
        self._asking = asking
        self._header = header
        self._flow = 0
        self._sent = 0.0
        self._words = (0, 0)

    @property
    def busy(self) -> bool:
        return self._flow != 0

    def post(self) -> bool:
        self._flow = self._asking.desk.open(self._asking.peer)
        self._send()
        return False

    def poll(self) -> bool:
        if not self._flow:
            return True
        self._asking.pump()
        for reply in self._asking.desk.take(self._flow):
            if isinstance(reply, Told):
                self._words = (reply.nonce, reply.word)
                self.close()
                return True
            if isinstance(reply, Refused):
                self.close()
                raise InvalidArgument(f"{self._asking.peer} refused to answer: {reply.reason}")
        if time.monotonic() - self._sent > ASK_AGAIN_S:
            self._send()  # not since a question might be lost, but since only sending tells that nobody is there
        return False

    def _send(self) -> None:
        self._sent = time.monotonic()
        try:
            self._asking.send(Ask(flow=self._flow, header=self._header))
        except MxRLError:
            self.close()
            raise

    def words(self) -> tuple[int, int]:
        return self._words

    def close(self) -> None:
        self._asking.desk.forget(self._flow)
        self._flow = 0


def send_table(asking: Asking, table: int, windows: Windows, *, nonce: int, header: int, device: str) -> None:
    """Tell the source the runs of a route, once."""
    runs, starts, needs = (part.astype("<i8").tobytes() for part in (windows.runs, windows.starts, windows.needs))
    data = encode(Table(nonce=nonce, header=header, device=device, runs=runs, starts=starts, needs=needs))
    pieces = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
    for part, piece in enumerate(pieces):
        asking.send(TablePart(table=table, part=part, parts=len(pieces), data=piece))


class RequestedFlow(Flow):
    """Windows asked for at once; the source writes each as soon as it has it.

    ``probe`` asks for the source's header without waiting: its words, or None while that is under way.
    """

    def __init__(
        self,
        asking: Asking,
        table: int,
        *,
        nonce: int,
        generation: int,
        windows: Sequence[int],
        probe: Callable[[], tuple[int, int] | None],
    ) -> None:
        self._asking = asking
        self._probe = probe
        self._nonce = nonce
        self._generation = generation
        self._left = set(windows)
        self._failed = False
        self._closed: bool | None = None
        self._heard = time.monotonic()
        self._over = not windows  # the source has said that it will write nothing more
        self._flow = 0
        if windows:
            self._flow = asking.desk.open(asking.peer)
            self._ask(table, np.asarray(windows, dtype="<i4"))

    def _ask(self, table: int, chosen: npt.NDArray[np.int32]) -> None:
        for at in range(0, len(chosen), WINDOWS_PER_WANT):
            piece = chosen[at : at + WINDOWS_PER_WANT].tobytes()
            try:
                self._asking.send(Want(flow=self._flow, table=table, generation=self._generation, windows=piece))
            except MxRLError:
                self._over = at == 0  # nothing was asked for, so nothing comes
                self.close()
                raise

    @property
    def done(self) -> bool:
        return not self._left

    def step(self) -> list[int]:
        if self._closed is not None or self._failed:
            raise Closed("this flow has ended: only close() may follow")
        if not self._left:
            return []
        try:
            return self._step()
        except MxRLError:
            self._failed = True
            raise

    def _step(self) -> list[int]:
        asking = self._asking
        asking.pump()
        confirmed: list[int] = []
        for reply in asking.desk.take(self._flow):
            self._heard = time.monotonic()
            if isinstance(reply, Done):
                check_generation(reply.generation, expected=self._generation, peer=asking.peer)
                fresh = [window for window in reply.windows if window in self._left]
                confirmed += fresh
                self._left.difference_update(fresh)
            elif not isinstance(reply, Told):
                self._over = True
                self._raise(reply)
        if not self._left:
            self._over = True
        elif not confirmed and time.monotonic() - self._heard > PROBE_S:
            words = self._probe()
            if words is not None:
                self._heard = time.monotonic()
                generation, _ = check_header(words, nonce=self._nonce, peer=asking.peer)
                check_generation(generation, expected=self._generation, peer=asking.peer)
        return confirmed

    def _raise(self, reply: Gone | Ended | Refused) -> None:
        peer = self._asking.peer
        if isinstance(reply, Gone):
            generation, _ = check_header((reply.nonce, reply.word), nonce=self._nonce, peer=peer)
            check_generation(generation, expected=self._generation, peer=peer)
        if isinstance(reply, Refused):
            raise InvalidArgument(f"{peer} refused to write: {reply.reason}")
        raise PeerLost(f"{peer} has ended a flow that was not cancelled", peer=peer)

    def close(self) -> bool:
        if self._closed is None:
            self._closed = self._over or not self._flow
            if self._closed:
                self._asking.desk.forget(self._flow)
            else:
                self._asking.desk.cancel(self._flow)
                try:
                    self._asking.send(Cancel(flow=self._flow))
                except MxRLError as exc:
                    # A lost source never answers, and its last bytes may still lie in a socket: unsettled for good.
                    logging.getLogger(__name__).debug("cancelling a flow from %s: %s", self._asking.peer, exc)
        return self._closed
