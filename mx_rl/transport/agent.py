"""One NIXL agent with its UCX backend, and moves prepared on it: the only file that touches NIXL; its error border."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mx_rl.config import Options
from mx_rl.errors import Closed, CorruptRecord, InvalidArgument, MxRLError, PeerLost, missing_extra
from mx_rl.transport.base import Region

BACKEND = "UCX"
PROGRESS_US = 10_000
"""How long NIXL's progress thread sleeps at most; UCX wakes it by a file descriptor when something arrives."""

_patching = threading.Lock()
_names: set[str] = set()
_kept: list[object] = []
"""What must not be destroyed, since bytes may still arrive through it."""


def keep(thing: object) -> None:
    _kept.append(thing)


def let_go(thing: object) -> None:
    """Its last byte has arrived. Nothing happens where it was not kept."""
    _kept[:] = [other for other in _kept if other is not thing]


def memory_of(device: str) -> tuple[str, int]:
    """NIXL's (memory type, device number). Raises InvalidArgument."""
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return "DRAM", 0
    if kind == "cuda":
        return "VRAM", int(number or 0)
    raise InvalidArgument(f'device {device!r}: NIXL moves "cpu" and "cuda" memory')


def load_nixl() -> tuple[Any, str]:
    """(API module, release). Raises MissingExtra."""
    try:
        entry = importlib.import_module("nixl._api")
        api = importlib.import_module(entry.nixl_agent.__module__)
        release = importlib.metadata.version("nixl")
    except ImportError as exc:
        raise missing_extra("nixl", "nixl") from exc
    logger = logging.getLogger("nixl")
    if logger.level == logging.INFO:  # its default, which writes a line to stdout for each agent
        logger.setLevel(logging.WARNING)
    return api, release


class Agent:
    """A NIXL agent that serves or receives. Thread-safe: NIXL's own lock is on.

    Calls that concern a peer raise PeerLost, others InvalidArgument.
    """

    def __init__(self, name: str, options: Options) -> None:
        self._api, self.release_text = load_nixl()
        with _patching:
            if name in _names:
                raise InvalidArgument(f"agent name {name!r} was used before in this process: a name is unique for ever")
            _names.add(name)
        self.name = name
        bind = self._api.nixlBind
        self._errors: tuple[type[Exception], ...] = tuple(
            kind
            for key, kind in vars(bind).items()
            if key.startswith("nixl") and key.endswith("Error") and key != "nixlRepostActiveError"
        )
        self._agent: Any = _calm_agent(self._api, name)
        params = {"ucx_error_handling_mode": "peer", "engine_config": f"MAX_RMA_RAILS={options.rails}"}
        if options.net_devices:
            params["device_list"] = options.net_devices
        self._local(self._agent.create_backend, BACKEND, params)

    def _peer(self, peer: str, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except self._errors as exc:
            raise PeerLost(f"{peer} is gone or cannot be reached: {exc}", peer=peer) from exc

    def _local(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except self._errors as exc:
            raise InvalidArgument(f"NIXL agent {self.name}: {call.__name__} failed: {exc}") from exc

    @property
    def _open(self) -> Any:
        agent = self._agent
        if agent is None:
            raise Closed(f"agent {self.name} is destroyed")
        return agent

    # ---- memory

    def register(self, regions: Sequence[Region]) -> tuple[bytes, ...]:
        """Register; returns the metadata that lets a peer reach exactly these regions, one blob a memory type."""
        kinds: dict[str, list[tuple[int, int, int]]] = {}
        for region in regions:
            kind, number = memory_of(region.device)
            kinds.setdefault(kind, []).append((region.address, region.nbytes, number))
        blobs = []
        for kind, rows in kinds.items():
            listed = self._local(self._open.register_memory, np.array(rows, dtype=np.uint64), kind)
            blobs.append(self._local(self._open.get_partial_agent_metadata, listed, True, [BACKEND]))
        return tuple(blobs)

    # ---- peers

    def add_peer(self, metadata: Sequence[bytes], expected: str) -> None:
        """Raises CorruptRecord where the metadata cannot be read or is another agent's, PeerLost where none answers."""
        for blob in metadata:
            try:
                found = self._open.add_remote_agent(blob)
            except self._api.nixlBind.nixlBackendError as exc:
                self.remove_peer(expected)  # the next attempt begins afresh
                raise PeerLost(f"{expected} cannot be reached: {exc}", peer=expected) from exc
            except self._errors as exc:
                raise CorruptRecord(f"{len(blob)} bytes are no NIXL metadata of {expected}: {exc}") from exc
            name = found.decode() if isinstance(found, bytes) else str(found)
            if name != expected:
                self.remove_peer(name)
                raise CorruptRecord(f"NIXL metadata of {name!r} where that of {expected!r} was expected")

    def remove_peer(self, peer: str) -> None:
        """Only when no handle to it is open."""
        try:
            self._open.remove_remote_agent(peer)
        except self._errors as exc:  # it was removed by NIXL when the connection broke: what was wanted
            logging.getLogger(__name__).debug("remove_remote_agent(%s): %s", peer, exc)

    def notify(self, peer: str, message: bytes) -> None:
        self._peer(peer, self._open.send_notif, peer, message)

    def notices(self) -> dict[str, list[bytes]]:
        found: dict[Any, list[bytes]] = self._local(self._open.get_new_notifs)
        return {sender.decode() if isinstance(sender, bytes) else sender: list(new) for sender, new in found.items()}

    # ---- moves

    def prepare(self, peer: str | None, rows: npt.NDArray[np.uint64], kind: str) -> Any:
        """A descriptor list of (address, nbytes, device) rows: mine (``peer`` None) or a peer's.

        Raises InvalidArgument where the rows are not registered.
        """
        try:
            return self._open.prep_xfer_dlist(peer or "NIXL_INIT_AGENT", rows, kind, [BACKEND])
        except self._errors as exc:
            raise InvalidArgument(f"{len(rows)} runs are not registered memory of {peer or self.name}: {exc}") from exc

    def combine(self, peer: str, operation: str, mine: Any, theirs: Any, indices: npt.NDArray[np.int32]) -> Any:
        return self._peer(peer, self._open.make_prepped_xfer, operation, mine, indices, theirs, indices)

    def post(self, peer: str, handle: Any) -> bool:
        return self._state(peer, self._peer(peer, self._open.transfer, handle))

    def poll(self, peer: str, handle: Any) -> bool:
        return self._state(peer, self._peer(peer, self._open.check_xfer_state, handle))

    def _state(self, peer: str, state: str) -> bool:
        if state == "ERR":
            raise PeerLost(f"a transfer with {peer} failed", peer=peer)
        return bool(state == "DONE")

    def release(self, thing: Any) -> None:
        """Release a handle or a descriptor list."""
        try:
            thing.release()
        except self._errors as exc:  # it went with its peer
            thing._released = True  # or NIXL's finaliser would try, and complain, again
            logging.getLogger(__name__).debug("release: %s", exc)

    def close(self) -> None:
        """Destroy the agent, and with it its connections and registrations. Idempotent. Handles are released first."""
        self._agent = None


def _calm_agent(api: Any, name: str) -> Any:
    """NIXL's Python face fixes its progress thread's delay at 0, which burns a core per agent: keep it at 10 ms."""
    bind = api.nixlBind
    delay = bind.nixlAgentConfig.pthrDelay

    class CalmConfig(bind.nixlAgentConfig):  # type: ignore[misc,name-defined]
        @property
        def pthrDelay(self) -> int:
            return PROGRESS_US

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:
            delay.__set__(self, PROGRESS_US)

    class CalmBindings:
        nixlAgentConfig = CalmConfig

        def __getattr__(self, key: str) -> Any:
            return getattr(bind, key)

    config = api.nixl_agent_config(
        enable_prog_thread=True, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    )
    with _patching:
        api.nixlBind = CalmBindings()
        try:
            return api.nixl_agent(name, config)
        finally:
            api.nixlBind = bind


class Moves:
    """Prepared moves between one agent and one peer, in numbered groups of runs. Each posted move owns its target until
    it is seen to end, so a handle is released only then: ``close`` may have to be asked again (``settle``)."""

    def __init__(
        self,
        agent: Agent,
        peer: str,
        operation: str,
        *,
        mine: npt.NDArray[np.int64],
        theirs: npt.NDArray[np.int64],
        nbytes: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        my_device: str = "cpu",
        their_device: str = "cpu",
    ) -> None:
        self.peer = peer
        self.busy: set[int] = set()
        """Groups that are posted and not seen to end."""
        self._failed: set[int] = set()  # ended by an error that ``settle`` saw first
        self._agent = agent
        self._operation = operation
        self._starts = starts
        self._handles: dict[int, Any] = {}
        self._lists: list[Any] = []
        self._closing = False
        if len(nbytes):
            kind, number = memory_of(my_device)
            self._lists.append(agent.prepare(None, _rows(mine, nbytes, number), kind))
            kind, number = memory_of(their_device)
            try:
                self._lists.append(agent.prepare(peer, _rows(theirs, nbytes, number), kind))
            except MxRLError:
                self._release()
                raise

    def post(self, group: int) -> bool:
        if self._closing:
            raise Closed(f"the moves from or to {self.peer} are closed")
        begin, end = int(self._starts[group]), int(self._starts[group + 1])
        if begin == end:
            return True
        self._failed.discard(group)
        handle = self._handles.get(group)
        if handle is None:
            indices = np.arange(begin, end, dtype=np.int32)
            handle = self._agent.combine(self.peer, self._operation, self._lists[0], self._lists[1], indices)
            self._handles[group] = handle
        ended = self._agent.post(self.peer, handle)
        if not ended:
            self.busy.add(group)
        return ended

    def poll(self, group: int) -> bool:
        """Whether the move has ended. An error is an end too: the connection that carried it is closed."""
        if group in self._failed:
            raise PeerLost(f"{self.peer} was lost while it was read", peer=self.peer)
        if group not in self.busy:
            return True
        try:
            ended = self._agent.poll(self.peer, self._handles[group])
        except PeerLost:
            self.busy.discard(group)
            raise
        if ended:
            self.busy.discard(group)
        return ended

    def settle(self) -> bool:
        """Poll what is posted; True when all has ended, and, after ``close``, all is released. Never raises."""
        for group in list(self.busy):
            try:
                self.poll(group)
            except PeerLost:
                self._failed.add(group)
        if self._closing and not self.busy:
            self._release()
        return not self.busy

    def close(self) -> bool:
        self._closing = True
        return self.settle()

    def discard(self) -> None:
        """Before the agent is destroyed: release what can be, and let go of what cannot."""
        self._closing = True
        for group in self.busy:
            self._handles.pop(group)._released = True  # NIXL frees it with the agent
        self.busy.clear()
        self._release()

    def _release(self) -> None:
        for thing in (*self._handles.values(), *self._lists):
            self._agent.release(thing)
        self._handles.clear()
        self._lists.clear()


def _rows(addresses: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64], number: int) -> npt.NDArray[np.uint64]:
    rows = np.empty((len(nbytes), 3), dtype=np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = nbytes
    rows[:, 2] = number
    return rows
