"""Sources and readers for transport tests, each in a process of its own, or in this one for the memory transport."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from mx_rl.arena import Arena
from mx_rl.config import Options
from mx_rl.errors import MxRLError
from mx_rl.records import EndpointRecord, RegionRecord, decode, encode
from mx_rl.transport import make_transport
from mx_rl.transport.base import Link, Region, Route, Windows
from mx_rl.transport.place import here

CALL_S = 60.0
_CONSTRUCT = "construct"
_numbers = itertools.count()
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.transport_world"])

soak = (
    pytest.mark.soak,
    pytest.mark.skipif(os.environ.get("MXRL_SOAK") != "1", reason="long: set MXRL_SOAK=1"),
)


@dataclass(frozen=True)
class Kind:
    """A transport, the lane that it is held to, and how windows move on it."""

    transport: str
    lane: str  # expected Link.lane
    option: str  # Options.lane
    env: tuple[tuple[str, str], ...] = ()

    @property
    def local(self) -> bool:
        """Both ends live in the calling process."""
        return self.lane == "memory"

    @property
    def writes(self) -> bool:
        return self.transport == "nixl" and (self.option == "write" or (self.option == "auto" and self.lane == "tcp"))

    def __str__(self) -> str:
        return f"{self.transport}-{self.lane}-{'write' if self.writes else 'read'}"


_TCP = (("UCX_TLS", "tcp"),)
MEMORY = Kind("memory", "memory", "auto")
NEAR = Kind("near", "memory", "auto")
SHM_READ = Kind("nixl", "shm", "auto")
SHM_WRITE = Kind("nixl", "shm", "write")
TCP_WRITE = Kind("nixl", "tcp", "auto", _TCP)
TCP_READ = Kind("nixl", "tcp", "read", _TCP)
KINDS = [MEMORY, NEAR, SHM_READ, SHM_WRITE, TCP_WRITE, TCP_READ]


def make(kind: Kind, **options: Any) -> Any:
    """A transport of this kind in the calling process."""
    chosen = Options(lane=kind.option, transport="nixl" if kind is NEAR else kind.transport, **options)
    if kind is NEAR:
        return make_transport(chosen)
    if kind.transport == "memory":
        from mx_rl.transport.memory import MemoryTransport

        return MemoryTransport(chosen)
    from mx_rl.transport.nixl import NixlTransport

    return NixlTransport(chosen)


def noise(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def cut(nbytes: int, window: int) -> list[tuple[int, int, int]]:
    """Rows (stage offset, source offset, nbytes) that copy a block as it lies, a row a window."""
    return [(at, at, min(window, nbytes - at)) for at in range(0, nbytes, window)]


def usage() -> dict[str, int]:
    with open("/proc/self/statm") as file:
        rss = int(file.read().split()[1]) * 4096
    return {"fds": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")), "rss": rss}


class Blocks:
    """Slots or stages on one device, with their headers in host memory."""

    def __init__(self, count: int, nbytes: int, nonce: int, device: str) -> None:
        self.arena = Arena(count, nbytes if device == "cpu" else 64, nonce=nonce)
        self.headers = self.arena.headers
        self.tensors = self.arena.blocks
        self.regions = self.arena.regions()
        self.records = self.arena.records()
        if device != "cpu":
            self.tensors = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
            self.regions += [Region(address=t.data_ptr(), nbytes=nbytes, device=device) for t in self.tensors]
            self.records = tuple(
                RegionRecord(header=header.address, address=t.data_ptr(), nbytes=nbytes, device=device)
                for header, t in zip(self.headers, self.tensors, strict=True)
            )


class Source:
    """Serves blocks; a thread steps the server as an endpoint's would."""

    def __init__(self, kind: Kind, name: str, nbytes: int, count: int = 1, device: str = "cpu") -> None:
        self.nonce = int.from_bytes(os.urandom(7), "little")
        self.blocks = Blocks(count, nbytes, self.nonce, device)
        self.transport = make(kind)
        self.server = self.transport.serve(name, self.blocks.regions)
        self.record = encode(
            EndpointRecord(
                agent=name,
                nonce=self.nonce,
                transport=self.transport.name,
                release=self.transport.release,
                place=here(),
                address=self.server.address,
                regions=self.blocks.records,
            )
        )
        self._over = threading.Event()
        self._churner: tuple[threading.Event, threading.Thread] | None = None
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        pause = 50e-6
        while not self._over.is_set():
            pause = 50e-6 if self.server.step() else min(pause * 2, 1e-3)
            self._over.wait(pause)

    def get_record(self) -> bytes:
        return self.record

    def publish(self, seed: int, block: int = 0, window: int = 1 << 20, confirm: bool = True) -> int:
        """Fill a block with noise(seed); returns the generation."""
        header, tensor = self.blocks.headers[block], self.blocks.tensors[block]
        generation = header.begin()
        tensor.copy_(torch.from_numpy(noise(seed, len(tensor))))
        if confirm:
            header.confirm(-(-len(tensor) // window))
        return generation

    def begin(self, block: int = 0) -> int:
        return self.blocks.headers[block].begin()

    def write(self, at: int, nbytes: int, seed: int, block: int = 0) -> None:
        whole = noise(seed, len(self.blocks.tensors[block]))
        self.blocks.tensors[block][at : at + nbytes] = torch.from_numpy(whole[at : at + nbytes])

    def confirm(self, count: int, block: int = 0) -> None:
        self.blocks.headers[block].confirm(count)

    def close_headers(self) -> None:
        self.blocks.arena.close()

    def churn(self, windows: int, block: int = 0) -> None:
        """Rewrite a block for ever as fast as it goes, every byte the low byte of its generation."""

        over = threading.Event()

        def run() -> None:
            header, tensor = self.blocks.headers[block], self.blocks.tensors[block]
            random = np.random.default_rng(0)
            while not over.is_set():
                generation = header.begin()
                tensor.fill_(generation & 0xFF)
                header.confirm(windows)
                over.wait(random.choice([0, 0, 0.0005, 0.003]))

        thread = threading.Thread(target=run, daemon=True)
        self._churner = (over, thread)
        thread.start()

    def rest(self) -> None:
        """End a churn, and forget what was published and sent."""
        if self._churner is not None:
            self._churner[0].set()
            self._churner[1].join()
            self._churner = None
        for header in self.blocks.headers:
            header.begin()
        self.server.messages()

    def messages(self) -> list[bytes]:
        return list(self.server.messages())

    def num_readers(self) -> int:
        return int(getattr(self.server, "num_readers", 0))

    def num_peers(self) -> int:
        return int(getattr(self.server, "num_peers", 0))

    def usage(self) -> dict[str, int]:
        return usage()

    def idle_cpu(self, seconds: float) -> float:
        """CPU share of this process while nothing is stepped."""
        self._over.set()
        self._threads[0].join()
        begin, cpu = time.monotonic(), time.process_time()
        time.sleep(seconds)
        return (time.process_time() - cpu) / (time.monotonic() - begin)

    def step_seconds(self, times: int) -> float:
        """Mean cost of an idle step."""
        self._over.set()
        self._threads[0].join()
        begin = time.perf_counter()
        for _ in range(times):
            self.server.step()
        return (time.perf_counter() - begin) / times

    def close(self) -> None:
        self.rest()
        self._over.set()
        for thread in self._threads:
            thread.join(5)
        self.blocks.arena.close()
        self.server.close()


class Reader:
    """Reads from sources into its stages."""

    def __init__(
        self, kind: Kind, name: str, nbytes: int, count: int = 1, device: str = "cpu", in_flight: int = 4
    ) -> None:
        self.name = name
        self.blocks = Blocks(count, nbytes, 1, device)
        self.transport = make(kind, in_flight=in_flight)
        self.receiver = self.transport.receive(name, self.blocks.regions)
        self.links: dict[str, tuple[EndpointRecord, Link]] = {}
        self.routes: dict[str, tuple[int, Route]] = {}
        self.flow: Any = None
        self.confirmed: list[int] = []
        self._renewed = 0

    def connect(self, blob: bytes, key: str = "") -> str:
        record = decode(blob, EndpointRecord)
        link = self.receiver.connect(record)
        self.links[key] = (record, link)
        return str(link.lane)

    def header(self, key: str = "", region: int = 0, timeout: float = 2.0) -> tuple[int, int]:
        return self.links[key][1].header(region, timeout=timeout)

    def send(self, message: bytes, key: str = "") -> None:
        self.links[key][1].send(message)

    def route(
        self,
        rows: list[tuple[int, int, int]],
        starts: list[int] | None = None,
        needs: list[int] | None = None,
        key: str = "",
        stage: int = 0,
        region: int = 0,
    ) -> None:
        """``rows`` are offsets into stage and block; by default a row a window, which needs those up to its own."""
        record, link = self.links[key]
        runs = np.array(rows, dtype=np.int64).reshape(-1, 3)
        runs[:, 0] += self.blocks.records[stage].address
        runs[:, 1] += record.regions[region].address
        edges = np.array(starts if starts is not None else range(len(rows) + 1), dtype=np.int64)
        wanted = np.array(needs if needs is not None else range(1, len(edges)), dtype=np.int64)
        self.routes[key] = (stage, link.route(region, Windows(runs=runs, starts=edges, needs=wanted)))

    def start(self, generation: int, windows: list[int], key: str = "") -> None:
        self.confirmed = []
        self.flow = self.routes[key][1].start(generation, windows)

    def step(self, seconds: float = 0.0, until: int | None = None) -> list[int]:
        """Step for so long, or until so many are confirmed in all; what was confirmed in this call."""
        found: list[int] = []
        end = time.monotonic() + seconds
        pause = 50e-6
        while True:
            now = self.flow.step()
            found += now
            self.confirmed += now
            over = time.monotonic() >= end or self.flow.done
            if over or (until is not None and len(self.confirmed) >= until):
                return found
            pause = 50e-6 if now else min(pause * 2, 1e-3)
            if not now:
                time.sleep(pause)

    def longest_step(self, seconds: float) -> float:
        """Step for so long; the longest that a step took."""
        longest, end = 0.0, time.monotonic() + seconds
        while time.monotonic() < end and not self.flow.done:
            begin = time.monotonic()
            self.confirmed += self.flow.step()
            longest = max(longest, time.monotonic() - begin)
            time.sleep(1e-3)
        return longest

    def done(self) -> bool:
        return bool(self.flow.done)

    def finish(self) -> bool:
        return bool(self.flow.close())

    def pull(self, generation: int, windows: list[int], key: str = "", timeout: float = 30.0) -> None:
        """A whole flow; raises what it raises, and TimeoutError."""
        self.start(generation, windows, key)
        try:
            self.step(timeout)
            if not self.flow.done:
                raise TimeoutError(f"{len(self.confirmed)} of {len(windows)} windows in {timeout} s")
        finally:
            self.finish()

    def settled(self, timeout: float = 0.0) -> bool:
        end = time.monotonic() + timeout
        while not self.receiver.settled:
            if time.monotonic() > end:
                return False
            time.sleep(2e-3)
        return True

    def data(self, stage: int = 0) -> bytes:
        return self.blocks.tensors[stage].cpu().numpy().tobytes()

    def clear(self, stage: int = 0) -> None:
        self.blocks.tensors[stage].zero_()

    def rest(self) -> None:
        """Leave every source and wipe the stages."""
        if self.flow is not None:
            self.flow.close()
        for key in list(self.links):
            self.unplug(key)
        if not self.settled(10.0):
            raise TimeoutError("moves have not ended")
        for tensor in self.blocks.tensors:
            tensor.zero_()

    def unplug(self, key: str = "") -> None:
        if key in self.routes:
            self.routes.pop(key)[1].close()
        self.links.pop(key)[1].close()

    def renew(self) -> bool:
        """Destroy the agent and make another over the same stages; what ``Receiver.close`` said."""
        fenced = self.receiver.close()
        self.links.clear()
        self.routes.clear()
        self._renewed += 1
        self.receiver = self.transport.receive(f"{self.name}.{self._renewed}", self.blocks.regions)
        return bool(fenced)

    def pull_uniform(self, windows: int, window: int, seconds: float, key: str = "") -> dict[str, int]:
        """Read from a source that churns: every confirmed window must hold its generation's byte and nothing else."""
        count = {"flows": 0, "gone": 0, "windows": 0, "torn": 0}
        end = time.monotonic() + seconds
        stage = self.routes[key][0]
        while time.monotonic() < end:
            generation, _ = self.header(key)
            self.start(generation, list(range(windows)), key)
            try:
                self.step(5.0)
                count["flows"] += self.flow.done
            except LookupError:
                count["gone"] += 1
            assert self.finish() or self.settled(5.0)
            bytes_ = self.blocks.tensors[stage].cpu().numpy()
            for index in self.confirmed:
                part = bytes_[index * window : (index + 1) * window]
                count["windows"] += 1
                count["torn"] += bool((part != generation & 0xFF).any())
        return count

    def usage(self) -> dict[str, int]:
        return usage()

    def agent_notice(self, blob: bytes, key: str = "") -> None:
        """Send raw bytes where frames are expected."""
        self.receiver.agent.notify(self.links[key][0].agent, blob)

    def request(self, request: Any, key: str = "") -> None:
        self.links[key][1].request(request)  # type: ignore[attr-defined]

    def idle_cpu(self, seconds: float) -> float:
        begin, cpu = time.monotonic(), time.process_time()
        time.sleep(seconds)
        return (time.process_time() - cpu) / (time.monotonic() - begin)

    def close(self) -> bool:
        for key in list(self.links):
            self.unplug(key)
        return bool(self.receiver.close())


class Died(Exception):
    """A child ended without an answer."""


class Child:
    """An object in a process of its own: methods are called by name, and errors of mx-rl raised here."""

    def __init__(self, kind: type, *args: Any, env: tuple[tuple[str, str], ...] = (), **keywords: Any) -> None:
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_child, args=(theirs, kind, args, keywords, env), daemon=True)
        self.process.start()
        theirs.close()
        self._answer(_CONSTRUCT)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            self.begin_call(method, *args, **keywords)
            return self._answer(method)

        return call

    def begin_call(self, method: str, *args: Any, **keywords: Any) -> None:
        self._pipe.send((method, args, keywords))

    def end_call(self) -> Any:
        return self._answer("end_call")

    def _answer(self, method: str) -> Any:
        if not self._pipe.poll(CALL_S):
            raise TimeoutError(f"{method} did not return in {CALL_S} s")
        try:
            outcome, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join(5)
            raise Died(f"in {method}: exit code {self.process.exitcode}") from None
        if outcome == "raised":
            raise value
        return value

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.process.join(5)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def alive(self) -> bool:
        return self.process.is_alive()

    def end(self) -> None:
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.process.join(5)
        self._pipe.close()


def _child(pipe: Connection, kind: type, args: Any, keywords: Any, env: tuple[tuple[str, str], ...]) -> None:
    os.environ.update(dict(env))
    thing: Any = None
    method = _CONSTRUCT
    while True:
        try:
            value = kind(*args, **keywords) if method == _CONSTRUCT else getattr(thing, method)(*args, **keywords)
            thing = value if method == _CONSTRUCT else thing
            pipe.send(("ok", None if method == _CONSTRUCT else value))
        except (MxRLError, AssertionError, TimeoutError) as exc:
            pipe.send(("raised", exc))
        except Exception:
            pipe.send(("raised", AssertionError(f"in a child: {traceback.format_exc()}")))
        try:
            method, args, keywords = pipe.recv()
        except EOFError:
            return


class Local:
    """The same face over an object in this process; killing and stopping go to the memory network."""

    def __init__(self, kind: type, *args: Any, **keywords: Any) -> None:
        self._thing = kind(*args, **keywords)
        self._name = args[1]
        self._result: Any = None
        self._thread: threading.Thread | None = None

    def __getattr__(self, method: str) -> Any:
        return getattr(self._thing, method)

    def begin_call(self, method: str, *args: Any, **keywords: Any) -> None:
        def run() -> None:
            try:
                self._result = (True, getattr(self._thing, method)(*args, **keywords))
            except Exception as exc:
                self._result = (False, exc)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def end_call(self) -> Any:
        assert self._thread is not None
        self._thread.join(CALL_S)
        good, value = self._result
        if not good:
            raise value
        return value

    def kill(self) -> None:
        from mx_rl.transport.memory import NETWORK

        NETWORK.lose(self._name)

    def stop(self) -> None:
        from mx_rl.transport.memory import NETWORK

        NETWORK.stall(self._name)

    def cont(self) -> None:
        from mx_rl.transport.memory import NETWORK

        NETWORK.release(self._name)

    def alive(self) -> bool:
        return True

    def end(self) -> None:
        self._thing.close()


class World:
    """Makes sources and readers of one kind, and ends them all."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._children: list[Any] = []

    def _make(self, role: type, nbytes: int, **keywords: Any) -> Any:
        name = f"{role.__name__}-{os.getpid()}-{next(_numbers)}"
        if self.kind.local:
            child: Any = Local(role, self.kind, name, nbytes, **keywords)
        else:
            child = Child(role, self.kind, name, nbytes, env=self.kind.env, **keywords)
        self._children.append(child)
        return child

    def source(self, nbytes: int, **keywords: Any) -> Any:
        return self._make(Source, nbytes, **keywords)

    def reader(self, nbytes: int, **keywords: Any) -> Any:
        return self._make(Reader, nbytes, **keywords)

    def end(self) -> None:
        for child in reversed(self._children):
            child.end()


class Pairs:
    """One source and one reader of each kind, kept from test to test for as long as none fails."""

    def __init__(self, nbytes: int, count: int) -> None:
        self._nbytes = nbytes
        self._count = count
        self._worlds: dict[Kind, tuple[World, Any, Any]] = {}

    def take(self, kind: Kind) -> tuple[Any, Any]:
        if kind not in self._worlds:
            world = World(kind)
            source = world.source(self._nbytes, count=self._count)
            self._worlds[kind] = (world, source, world.reader(self._nbytes, count=self._count))
        return self._worlds[kind][1:]

    def give(self, kind: Kind) -> None:
        _, source, reader = self._worlds[kind]
        reader.rest()
        source.rest()

    def drop(self, kind: Kind) -> None:
        self._worlds.pop(kind)[0].end()

    def end(self) -> None:
        for kind in list(self._worlds):
            self.drop(kind)


@contextlib.contextmanager
def world_of(kind: Kind) -> Iterator[World]:
    made = World(kind)
    try:
        yield made
    finally:
        made.end()


def wait_until(condition: Any, timeout: float, what: str) -> None:
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not in {timeout} s: {what}")
        time.sleep(5e-3)
