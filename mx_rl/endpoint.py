"""This process on the data plane and at the registry: what it serves, its I/O and lease threads, and its members."""

from __future__ import annotations

import atexit
import logging
import os
import re
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from mx_rl import errors
from mx_rl.addresses import decode_table
from mx_rl.arena import Arena
from mx_rl.columns import Ints
from mx_rl.config import Options
from mx_rl.copies import close_pools
from mx_rl.errors import Closed, Fenced, InvalidArgument, MxRLError, PeerLost, RegistryLost, SeatTaken, VersionGone
from mx_rl.records import (
    MAX_EXTENTS,
    SEAT_PREFIX,
    AnyCommand,
    AnyResult,
    Beat,
    Blobs,
    Dead,
    EndpointRecord,
    ExtentRecord,
    GetBlobs,
    Leave,
    PutBlob,
    Refused,
    RegionRecord,
    decode,
    table_key,
)
from mx_rl.registry import Registry, open_registry, registry_name
from mx_rl.transport import make_transport
from mx_rl.transport.base import Region, Server, Transport
from mx_rl.transport.place import here

log = logging.getLogger("mx_rl")

CALL_TIMEOUT_S = 30.0
"""For a command whose answer is not held; Ray needs a few seconds to restart the registry's actor."""

SLACK_S = 2.0
"""How far an answer of the registry may come behind the end of the call that needs it."""

_IDLE_SLEEP_S = 0.005
_BUSY_SLEEP_S = 0.0002

T = TypeVar("T", bound=AnyResult)


def seat_key(incarnation: str) -> str:
    """Blob under which a seat's holder can be found on the data plane by who wants the seat."""
    return SEAT_PREFIX + incarnation


def unique_name(role: str) -> str:
    """An agent name that no process ever uses again: role, host and pid for people, randomness for truth."""
    host = re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())[:32]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', role)[:48]}-{host}-{os.getpid()}-{secrets.token_hex(6)}"


class Served:
    """An arena that peers may read, under an agent of its own."""

    def __init__(self, name: str, nonce: int, arena: Arena, server: Server, record: EndpointRecord) -> None:
        self.name = name
        self.nonce = nonce
        self.arena = arena
        self.server = server
        self.record = record
        self.on_message: Callable[[bytes], None] | None = None


class Endpoint:
    """One per process, registry and options; shared by every publisher and subscriber in it, closed with the last of them."""

    _lock = threading.Lock()
    _open: ClassVar[dict[tuple[int, str, Options], Endpoint]] = {}

    def __init__(self, registry: Registry, options: Options) -> None:
        self.registry = registry
        self.options = options
        self.transport: Transport = make_transport(options)
        self._served: list[Served] = []
        self._members: list[Member] = []
        self._change = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._hurry = 0
        self._users = 0
        self._io = threading.Thread(target=self._serve_loop, name="mx-rl-io", daemon=True)
        self._beat = threading.Thread(target=self._beat_loop, name="mx-rl-beat", daemon=True)
        self._io.start()
        self._beat.start()

    # ---- sharing

    @classmethod
    def acquire(cls, registry: Registry | str | None, options: Options) -> Endpoint:
        """The process's endpoint at this registry; each acquire needs one ``release``."""
        with cls._lock:
            key = (os.getpid(), registry_name(registry), options)
            endpoint = cls._open.get(key)
            if endpoint is None:
                endpoint = cls._open[key] = cls(open_registry(registry), options)
            endpoint._users += 1
            return endpoint

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for key in [key for key, value in self._open.items() if value is self]:
                del self._open[key]
            last = not self._open
        self._stop.set()
        self._wake.set()
        for thread in (self._io, self._beat):
            if thread is not threading.current_thread():
                thread.join(timeout=10)
        self.transport.close()
        if last:
            close_pools()

    # ---- serving

    def serve(
        self, role: str, count: int, nbytes: int, device: str = "cpu", *, extents: Sequence[Region] | None = None
    ) -> Served:
        """Allocate ``count`` blocks of ``nbytes`` and let members read them. All of it is registered before the record
        exists: what is allocated later gets another agent.

        ``extents``: the one block, if it has any bytes, and this memory of others are read by a run table
        (``records.table_key``).
        """
        name, nonce = unique_name(role), secrets.randbits(63)
        arena = Arena(count, nbytes, nonce=nonce, huge_pages=self.options.huge_pages, device=device)
        server = self.transport.serve(name, [*arena.regions(), *(extents or ())])
        regions = arena.records() if extents is None else (_scattered(arena, extents),)
        record = EndpointRecord(
            agent=name,
            nonce=nonce,
            transport=self.transport.name,
            release=self.transport.release,
            place=here(),
            address=server.address,
            regions=regions,
        )
        served = Served(name, nonce, arena, server, record)
        with self._change:
            self._served = [*self._served, served]
        self._wake.set()
        return served

    def unserve(self, served: Served) -> None:
        """Mark the headers closed, then de-register. Idempotent."""
        with self._change:
            if served not in self._served:
                return
            self._served = [other for other in self._served if other is not served]
        served.arena.close()
        served.server.close()

    def hurry(self) -> _Hurry:
        """While open, messages are looked for every 0.2 ms rather than every 5."""
        return _Hurry(self)

    def _serve_loop(self) -> None:
        nap = _BUSY_SLEEP_S
        while not self._stop.is_set():
            busy = False
            for served in self._served:
                try:
                    busy |= served.server.step()
                    if served.on_message is not None:
                        for message in served.server.messages():
                            busy = True
                            served.on_message(message)
                except Exception:
                    log.exception("serving %s: one reader's fault must not end the others'", served.name)
            nap = _BUSY_SLEEP_S if busy or self._hurry else min(nap * 1.5, _IDLE_SLEEP_S)
            self._wake.wait(nap)
            self._wake.clear()

    # ---- members

    def _beat_loop(self) -> None:
        while not self._stop.wait(self.options.beat_s):
            for member in list(self._members):
                member.beat()

    def add(self, member: Member) -> None:
        with self._change:
            self._members = [*self._members, member]

    def remove(self, member: Member) -> None:
        with self._change:
            self._members = [other for other in self._members if other is not member]


def _scattered(arena: Arena, extents: Sequence[Region]) -> RegionRecord:
    (block,) = arena.records()
    own = [Region(address=block.address, nbytes=block.nbytes, device=block.device)] if block.nbytes else []
    if len(own) + len(extents) > MAX_EXTENTS:
        raise InvalidArgument(f"{len(extents)} separate pieces of memory: at most {MAX_EXTENTS} are served in place")
    listed = [ExtentRecord(address=x.address, nbytes=x.nbytes, device=x.device) for x in (*own, *extents)]
    return RegionRecord(header=block.header, address=block.address, nbytes=block.nbytes, extents=tuple(listed))


class _Hurry:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def __enter__(self) -> None:
        with self._endpoint._change:
            self._endpoint._hurry += 1
        self._endpoint._wake.set()

    def __exit__(self, *exc: object) -> None:
        with self._endpoint._change:
            self._endpoint._hurry -= 1


class Member:
    """One publisher's or subscriber's seat at the registry: it asks, beats, and says again what it holds when the
    registry has forgotten (a new boot id, a floor below what this member holds, or an unknown incarnation)."""

    def __init__(self, endpoint: Endpoint, policy: str, incarnation: str, reassert: Callable[[], None]) -> None:
        self.endpoint = endpoint
        self.policy = policy
        self.incarnation = incarnation
        self.floor = 0
        self._reassert = reassert
        self._telling = threading.Lock()
        self._bounds = threading.local()
        self._teller = 0  # the thread that is telling the registry what we hold
        self._boot: int | None = None
        self._stale = False
        self._records: dict[str, EndpointRecord] = {}
        self._tables: dict[str, Ints] = {}
        endpoint.add(self)

    def ask(self, command: AnyCommand, kind: type[T] | None = None, *, timeout: float | None = None) -> T:
        """Send a command, and return its result or raise what it was refused with."""
        limit = command.wait + CALL_TIMEOUT_S if timeout is None else timeout
        end = getattr(self._bounds, "end", None)
        if end is not None:
            limit = min(limit, max(end() - time.monotonic(), 0.0) + SLACK_S)
        deadline = time.monotonic() + limit
        for _ in range(3):
            answer = self.endpoint.registry.call(command, timeout=max(deadline - time.monotonic(), 0.1))
            forgotten = not answer.known or answer.floor < self.floor or self._boot not in (None, answer.boot)
            self._boot = answer.boot
            self.floor = max(self.floor, answer.floor)
            if not forgotten or self._teller == threading.get_ident():
                break
            with self._telling:
                self._teller = threading.get_ident()
                try:
                    self._reassert()
                finally:
                    self._teller = 0
        result = answer.result
        if isinstance(result, Refused):
            raise refused(result)
        if kind is not None and not isinstance(result, kind):
            raise errors.CorruptRecord(f"the registry answered {type(command).__name__} with {type(result).__name__}")
        return result  # type: ignore[return-value]

    @contextmanager
    def bounded(self, end: Callable[[], float]) -> Iterator[None]:
        """The body is a call that ends by ``end()``, on the monotonic clock: what it asks of a registry that is away ends
        soon after that. Of this thread only."""
        outer = getattr(self._bounds, "end", None)
        self._bounds.end = end
        try:
            yield
        finally:
            self._bounds.end = outer

    def beat(self) -> None:
        """Called by the lease thread. A registry that is away is no fault of ours: the next beat tells it again."""
        try:
            self.beat_now(timeout=self.endpoint.options.beat_s * 2)
            if self._stale:
                self._reassert()
                self._stale = False
        except (Fenced, SeatTaken) as exc:
            log.warning("policy %s: %s", self.policy, exc)
            self.endpoint.remove(self)
        except MxRLError as exc:
            log.warning("policy %s: beat of %s failed: %s", self.policy, self.incarnation, exc)
        except Exception:
            log.exception(
                "policy %s: beat of %s: one member's fault must not end the others' beats",
                self.policy,
                self.incarnation,
            )

    def beat_now(self, *, timeout: float | None = None) -> None:
        self.ask(Beat(policy=self.policy, incarnations=(self.incarnation,)), timeout=timeout)

    def repeat_later(self) -> None:
        """Something could not be told: say everything again with the next beat that gets through."""
        self._stale = True

    def put(self, key: str, data: bytes, *, replaces: Sequence[str] = ()) -> None:
        """Tell a blob; what it ``replaces`` is forgotten."""
        self.ask(PutBlob(policy=self.policy, key=key, data=data, owner=self.incarnation, replaces=tuple(replaces)))

    def blobs(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Those of ``keys`` that the registry knows."""
        if not keys:
            return {}
        return self.ask(GetBlobs(policy=self.policy, keys=tuple(keys)), Blobs).blobs

    def endpoint_record(self, agent: str) -> EndpointRecord:
        """Raises PeerLost where the registry no longer knows the agent: it has left or died."""
        record = self._records.get(agent)
        if record is None:
            data = self.blobs([agent]).get(agent)
            if data is None:
                raise PeerLost(f"agent {agent} has left: the registry holds no endpoint record of it", peer=agent)
            record = decode(data, EndpointRecord)
            if len(self._records) > 4096:
                self._records.clear()
            self._records[agent] = record
        return record

    def run_table(self, agent: str, order: str) -> Ints:
        """The run table of scattered memory. Raises VersionGone where the registry has none: its owner serves with
        another agent now, or has left."""
        key = table_key(agent, order)
        rows = self._tables.get(key)
        if rows is None:
            data = self.blobs([key]).get(key)
            if data is None:
                raise VersionGone(
                    f"agent {agent} reads out no table for {order}: it has moved", version=None, peer=agent
                )
            rows = decode_table(data)
            if len(self._tables) >= 64:
                self._tables.clear()
            self._tables[key] = rows
        return rows

    def report_if_dead(self, holder: str) -> bool:
        """Ask a seat's holder on the data plane itself: its lease may outlive its process by half a minute.

        True where its process is gone, which the registry knows then too.
        """
        data = self.blobs([seat_key(holder)]).get(seat_key(holder))
        if data is None:
            return False
        record: EndpointRecord = decode(data, EndpointRecord)
        probe = self.endpoint.transport.receive(unique_name(f"{self.policy}-probe"), [])
        try:
            link = probe.connect(record)
            link.header(0, timeout=2.0)
            link.close()
        except PeerLost as exc:
            log.warning("policy %s: the holder of a seat is gone (%s): taking it", self.policy, exc)
            self.ask(Dead(policy=self.policy, agents=(holder, record.agent)))
            return True
        finally:
            probe.close()
        return False

    def leave(self) -> None:
        """Idempotent; a registry that does not answer lets the lease run out instead."""
        self.endpoint.remove(self)
        self._reassert = _nothing  # its owner's method: a circle that would keep the owner's arenas until gc runs
        try:
            self.endpoint.registry.call(Leave(policy=self.policy, incarnation=self.incarnation), timeout=5.0)
        except RegistryLost as exc:
            log.warning("policy %s: %s could not say goodbye: %s", self.policy, self.incarnation, exc)


def _nothing() -> None:
    """What a member that has left says again."""


def refused(result: Refused) -> MxRLError:
    kind: Any = getattr(errors, result.error, MxRLError)
    if not (isinstance(kind, type) and issubclass(kind, MxRLError)):
        kind = MxRLError
    error: MxRLError = kind(result.message, **result.fields)
    return error


_closers: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(thing: Any) -> None:
    """``thing.close()`` at interpreter exit, so that a script that forgets to close leaves nothing behind."""
    _closers.add(thing)


@atexit.register
def _close_all() -> None:
    for thing in list(_closers):
        try:
            thing.close()
        except Exception:
            log.exception("closing %r at exit", thing)


def check_policy(policy: str) -> None:
    if not isinstance(policy, str) or not 1 <= len(policy) <= 128 or not policy.isprintable() or "/" in policy:
        raise InvalidArgument(f"policy={policy!r}: a printable name of 1 to 128 characters without '/'")


def check_open(closed: bool, what: str) -> None:
    if closed:
        raise Closed(f"{what} is closed: make a new one")
