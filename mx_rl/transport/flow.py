"""The one-sided flow that every READ lane shares: post a window, see it end, read the header after it, confirm."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mx_rl.arena import CLOSED, unpack
from mx_rl.errors import Closed, MxRLError, StaleIncarnation, VersionGone
from mx_rl.transport.base import Flow

SPIN_S = 50e-6
"""How long a step may spin for a header: longer would take the interpreter from the trainer."""
POST_S = 200e-6
"""A step that has copied for so long posts no further window: on shared memory a post is the whole copy."""


class Reads(ABC):
    """What a lane does for the one flow on a route. Each read owns its target until it is seen to end.

    Every method may raise PeerLost.
    """

    peer: str

    @abstractmethod
    def post(self, window: int) -> bool:
        """Begin to read a window into the stage. True when it has ended already."""

    @abstractmethod
    def poll(self, window: int) -> bool:
        """Whether the posted window has ended."""

    @abstractmethod
    def post_header(self) -> bool:
        """Begin to read the source's header. True when it has ended already."""

    @abstractmethod
    def poll_header(self) -> bool:
        """Whether the posted header read has ended."""

    @abstractmethod
    def words(self) -> tuple[int, int]:
        """(nonce, word) of the header as it was read last."""

    @abstractmethod
    def abandon(self, posted: Sequence[int]) -> bool:
        """Keep these windows' reads until they end, and with them the receiver unsettled. True when all have ended.

        Called once, at the end of the flow; a posted header read is forgotten: its target is no stage. Never raises.
        """


def check_header(words: tuple[int, int], *, nonce: int, peer: str) -> tuple[int, int]:
    """(generation, confirmed windows) of a header. Raises StaleIncarnation for a foreign nonce or a closed header."""
    if words[0] != nonce:
        raise StaleIncarnation(
            f"the memory of {peer} belongs to another start of that process (nonce {words[0]:#x}, expected "
            f"{nonce:#x}): ask the registry for its new record",
            peer=peer,
        )
    if words[1] == CLOSED:
        raise StaleIncarnation(f"{peer} has closed this memory: read from another source", peer=peer)
    return unpack(words[1])


def check_generation(found: int, *, expected: int, peer: str) -> None:
    """Raises VersionGone when the slot holds another version than the one that was asked for."""
    if found != expected:
        raise VersionGone(
            f"{peer} has reused this slot (generation {found}, expected {expected}): nothing that was not confirmed "
            "counts; read a newer version or from another source",
            version=None,
            peer=peer,
            generation=found,
        )


class ReadFlow(Flow):
    """Up to ``in_flight`` windows posted at a time, each once the source's count has reached its need."""

    def __init__(
        self,
        reads: Reads,
        *,
        nonce: int,
        generation: int,
        windows: Sequence[int],
        needs: npt.NDArray[np.int64],
        in_flight: int,
    ) -> None:
        self._reads = reads
        self._nonce = nonce
        self._generation = generation
        self._needs = {window: int(needs[window]) for window in windows}
        self._highest = max(self._needs.values(), default=0)
        self._waiting = list(windows)[::-1]  # next one last
        self._posted: list[int] = []
        self._arrived: list[int] = []  # ended, and no header read posted since
        self._covered: list[int] = []  # ended before the header read that is under way was posted
        self._asking = False
        self._count = 0
        self._left = len(self._waiting)
        self._in_flight = in_flight
        self._failed = False
        self._closed: bool | None = None

    @property
    def done(self) -> bool:
        return self._left == 0

    def step(self) -> list[int]:
        if self._closed is not None or self._failed:
            raise Closed("this flow has ended: only close() may follow")
        if self._left == 0:
            return []
        try:
            return self._step()
        except MxRLError:
            self._failed = True
            raise

    def _step(self) -> list[int]:
        self._take_arrived()
        confirmed: list[int] = []
        if self._asking and self._reads.poll_header():
            confirmed += self._answer()
        posted = self._post()
        if not self._asking and (self._arrived or self._starved()):
            confirmed += self._ask()
            if not posted and not self._posted:
                self._post()  # the first header of a flow, or the count just rose: do not lose a turn
        return confirmed

    def _take_arrived(self) -> None:
        if self._posted:
            still = []
            for window in self._posted:
                if self._reads.poll(window):
                    self._arrived.append(window)
                else:
                    still.append(window)
            self._posted = still

    def _post(self) -> bool:
        """Post what may be posted; whether anything was."""
        begin = time.perf_counter()
        posted = False
        while self._waiting and len(self._posted) < self._in_flight:
            window = self._next()
            if window is None:
                break
            posted = True
            if self._reads.post(window):
                self._arrived.append(window)
                if time.perf_counter() - begin > POST_S:
                    break
            else:
                self._posted.append(window)
        return posted

    def _next(self) -> int | None:
        """The first window, in the caller's order, whose need is met."""
        if self._count >= self._highest:
            return self._waiting.pop()
        for at in range(len(self._waiting) - 1, -1, -1):
            if self._needs[self._waiting[at]] <= self._count:
                return self._waiting.pop(at)
        return None

    def _starved(self) -> bool:
        """There is room for another window, and the source has none for us that we know of."""
        return bool(self._waiting) and len(self._posted) < self._in_flight and self._count < self._highest

    def _ask(self) -> list[int]:
        # Only windows that have ended by now are covered: reads are not ordered among each other, so a header read
        # posted earlier may be older than the last bytes of a window.
        self._covered, self._arrived = self._arrived, []
        self._asking = True
        if self._reads.post_header():
            return self._answer()
        end = time.perf_counter() + SPIN_S
        while time.perf_counter() < end:
            if self._reads.poll_header():
                return self._answer()
        return []

    def _answer(self) -> list[int]:
        self._asking = False
        generation, self._count = check_header(self._reads.words(), nonce=self._nonce, peer=self._reads.peer)
        check_generation(generation, expected=self._generation, peer=self._reads.peer)
        confirmed, self._covered = self._covered, []
        self._left -= len(confirmed)
        return confirmed

    def close(self) -> bool:
        if self._closed is None:
            self._closed = self._reads.abandon(self._posted)
            self._posted = []
        return self._closed
