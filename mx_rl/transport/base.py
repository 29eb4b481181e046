"""The data plane's contract: how a reader's process reaches the memory of others.

A move, step by step, and who runs it:

1. The holder's process makes a Server over its regions (slots or stages, headers included) and writes its ``address``
   into the endpoint record. The Server answers from then on without the holder's user code.
2. The reader's process makes a Receiver over its own stage, and a Link to the Server's address.
3. The reader prepares a Route once: which byte runs of a region make up which window of its stage.
4. For each version the reader starts a Flow on the Route under the generation it was told, and steps it. A window is
   *confirmed* only when the region's header still showed that generation in a read that began after the window's bytes
   had arrived (one-sided lanes), or when the source says that it checked before and after writing (requested writes).
5. The reader closes the Flow. If that returns False, bytes may still arrive in the stage: the stage is in quarantine
   until ``Receiver.settled``, and the reader goes on in another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mx_rl.records import EndpointRecord


@dataclass(frozen=True, kw_only=True)
class Region:
    """Memory to register: ``nbytes`` from ``address`` on ``device`` ("cpu", "cuda:0")."""

    address: int
    nbytes: int
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Byte runs that fill a stage, grouped into windows.

    ``runs``: int64 rows (stage address, source address, nbytes), grouped by window, addresses absolute.
    ``starts``: int64, windows + 1 entries; window i is runs[starts[i]:starts[i + 1]].
    ``needs``: int64, one a window; the source's confirmed count that must be reached before it may be read.
    """

    runs: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    needs: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.needs)


class Transport(ABC):
    """One process's way onto the data plane. Thread-safe."""

    name: str
    release: str

    @abstractmethod
    def serve(self, name: str, regions: Sequence[Region]) -> Server:
        """Register ``regions`` (all of them, once) under an agent of this name, unique for ever."""

    @abstractmethod
    def receive(self, name: str, regions: Sequence[Region]) -> Receiver:
        """An agent that only reads into, or has written into, ``regions``. It can be destroyed at any time."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent. Servers and Receivers are closed first by their owners."""


class Server(ABC):
    """Memory that others may read."""

    name: str
    address: bytes

    @abstractmethod
    def step(self) -> bool:
        """Do what readers asked for (requested writes) and take messages. Called by one thread only, often; returns
        whether anything happened, so that the caller can sleep longer when nothing does. Never raises for a reader's fault."""

    @abstractmethod
    def messages(self) -> list[bytes]:
        """Messages that peers sent with Link.send since the last call, in the order of each sender. At most 1 MiB each."""

    @abstractmethod
    def close(self) -> None:
        """De-register. Idempotent. The caller has closed every header first."""


class Receiver(ABC):
    """Memory that is being filled."""

    name: str

    @abstractmethod
    def connect(self, record: EndpointRecord) -> Link:
        """Reach a Server. Raises PeerLost where that process is gone or unreachable, CorruptRecord for a foreign format,
        InvalidArgument where Options.require_rdma forbids the lane."""

    @property
    @abstractmethod
    def settled(self) -> bool:
        """Every move into these regions has ended; after a Flow.close that returned False, poll this."""

    @abstractmethod
    def close(self) -> bool:
        """Destroy the agent. Returns True where that also ended every move into its regions (a fence), False where late
        bytes may still arrive: the regions must then not be used again, nor freed, in this process. Idempotent."""


class Link(ABC):
    """A Receiver's connection to one Server."""

    lane: str  # "memory", "shm", "rdma", "tcp"

    @abstractmethod
    def header(self, region: int, *, timeout: float) -> tuple[int, int]:
        """Read the header of a region: (generation, confirmed windows). Raises StaleIncarnation for a foreign nonce or a
        closed header, PeerLost for a dead peer or no answer in ``timeout`` seconds."""

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Queue a message (at most 1 MiB) for the Server's ``messages``. Raises PeerLost; may be lost with the peer."""

    @abstractmethod
    def route(self, region: int, windows: Windows) -> Route:
        """Prepare moves from one region. Raises InvalidArgument for runs outside the region or the registered stage."""

    @abstractmethod
    def close(self) -> None:
        """Drop the peer. Routes are closed first. Idempotent."""


class Route(ABC):
    """Prepared windows from one region of one Server, used again for every version."""

    @abstractmethod
    def start(self, generation: int, windows: Sequence[int]) -> Flow:
        """Begin to move these windows (indices, in this order) under ``generation``. One Flow at a time on a Route."""

    @abstractmethod
    def close(self) -> None:
        """Release handles. The Flow is closed first. Idempotent."""


class Flow(ABC):
    """Some windows of one version on their way. Driven by the reader's thread; no call blocks longer than one window."""

    @abstractmethod
    def step(self) -> list[int]:
        """Post, poll, confirm; returns the windows confirmed now (perhaps none).

        Raises VersionGone when the header shows another generation (nothing that was not confirmed counts), StaleIncarnation
        for another process, PeerLost when the peer is dead. After an error only ``close`` may follow.
        """

    @property
    @abstractmethod
    def done(self) -> bool:
        """All windows are confirmed."""

    @abstractmethod
    def close(self) -> bool:
        """End the flow, confirmed or not. True: nothing more arrives in the stage. False: a posted move has not ended."""
