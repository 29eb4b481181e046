"""What runs in each actor: it seats the user's object, opens its publisher or subscriber, and takes calls by name."""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import socket
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import ray

from mx_rl.errors import ActorFailed
from mx_rl.holds import acting_for, owner
from mx_rl.ray.actors import Member, check_method, make

# User calls, build and publish run in order on the actor's default thread; everything else has threads of its own, so
# that a rank which generates or trains for minutes still answers.
GROUPS = {"watch": 1, "end": 1, "control": 2, "wait": 2, "sync": 1}


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a rank's process runs. ``port`` is free on that node and stays reserved while the process lives."""

    pid: int
    node_id: str
    ip: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank's place in its world or replica, and torch's rendezvous."""

    policy: str
    name: str  # of the world or replica
    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int

    def environment(self) -> dict[str, str]:
        return {
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
        }


class Host(ABC):
    """Base of the two kinds. ``worker`` is the user's object, ``endpoint`` its Publisher or Subscriber."""

    attribute: str  # under which the user's object finds its endpoint

    def __init__(self) -> None:
        self.worker: Any = None
        self.endpoint: Any = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        # torch listens with SO_REUSEADDR, so that a port which is bound here but not listened on is its to take, and
        # nobody else's.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("", 0))

    @ray.method(concurrency_group="control")
    def locate(self) -> Location:
        context = ray.get_runtime_context()
        util: Any = ray.util  # untyped functions
        return Location(
            pid=os.getpid(),
            node_id=context.get_node_id(),
            ip=str(util.get_node_ip_address()),
            port=self._reserved.getsockname()[1],
        )

    def seat(self, seat: Seat) -> None:
        """Before ``build``, in a call of its own: the user's module may read the environment when it is imported."""
        os.environ.update(seat.environment())

    def build(self, seat: Seat, user_class: type[Member], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        """Make the user's object and its endpoint; the name under which the registry knows this member."""
        with portable():
            given = {
                "policy": seat.policy,
                "rank": seat.rank,
                "world_size": seat.world_size,
                "local_rank": seat.local_rank,
                "device": "cuda:0" if ray.get_gpu_ids() else "cpu",
            }
            self.worker = make(user_class, kwargs, {**given, **self.given(seat)})
            self.endpoint = self.open(seat, self.worker.build(), options)
            setattr(self.worker, self.attribute, self.endpoint)
            return str(self.endpoint.incarnation)

    def adopt(self, seat: Seat, build: str, options: Mapping[str, Any]) -> str:
        """As ``build``, for an actor that its user made: ``build`` names the method that returns its tensors."""
        with portable():
            check_method(self.worker, build)
            self.endpoint = self.open(seat, self.finish(getattr(self.worker, build)()), options)
            if hasattr(self.worker, "__dict__") and not hasattr(self.worker, self.attribute):
                setattr(self.worker, self.attribute, self.endpoint)
            return str(self.endpoint.incarnation)

    def given(self, seat: Seat) -> dict[str, Any]:
        return {}

    @abstractmethod
    def open(self, seat: Seat, tensors: Any, options: Mapping[str, Any]) -> Any:
        """The Publisher or Subscriber of this rank."""

    def guard(self) -> AbstractContextManager[Any]:
        """What surrounds a user call."""
        return nullcontext()

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        with portable():
            check_method(self.worker, method)
            with self.guard():
                return self.finish(getattr(self.worker, method)(*args, **kwargs))

    def finish(self, result: Any) -> Any:
        """Wait for what an ``async def`` method returned, on the actor's one event loop: engines keep theirs."""
        if not inspect.isawaitable(result):
            return result

        who = owner()  # of the hold around this call: a sync in the coroutine is that call's safe point

        async def outcome() -> Any:
            with acting_for(who):
                return await result

        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="mx-rl-user-loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(outcome(), self._loop).result()

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Returns when the host ends; its caller's reference breaks at once when the process dies."""
        self._ended.wait()

    @ray.method(concurrency_group="end")
    def end(self) -> list[str]:
        """Close the endpoint, then the user's object; what failed comes back as text, since the actor goes anyway."""
        problems: list[str] = []
        for thing in (self.endpoint, self.worker if isinstance(self.worker, Member) else None):
            if thing is not None:
                try:
                    thing.close()
                except Exception:  # noqa: BLE001 - reported: the other one must be closed too
                    problems.append(traceback.format_exc())
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._reserved.close()
        self._ended.set()
        return problems


class TrainerHost(Host):
    """A rank that publishes."""

    attribute = "publisher"

    def open(self, seat: Seat, tensors: Any, options: Mapping[str, Any]) -> Any:
        from mx_rl.publisher import Publisher

        return Publisher(
            seat.policy,
            tensors,
            rank=seat.rank,
            world_size=seat.world_size,
            world=seat.name,
            **_for_endpoint(self, options),
        )

    def publish(self, step: int | None, metadata: Any, timeout: float) -> Any:
        with portable():
            return self.endpoint.publish(step=step, metadata=metadata, timeout=timeout)

    @ray.method(concurrency_group="wait")
    def wait(self, version: Any, replicas: int | None, timeout: float) -> Any:
        with portable():
            return self.endpoint.wait(version, replicas=replicas, timeout=timeout)

    @ray.method(concurrency_group="control")
    def latest(self) -> int | None:
        with portable():
            latest: int | None = self.endpoint.latest
            return latest


class RolloutHost(Host):
    """A rank that installs versions."""

    attribute = "subscriber"

    def __init__(self) -> None:
        super().__init__()
        self._holds: bool | None = None

    def given(self, seat: Seat) -> dict[str, Any]:
        return {"replica": seat.name}

    def open(self, seat: Seat, tensors: Any, options: Mapping[str, Any]) -> Any:
        from mx_rl.subscriber import Subscriber

        named = _for_endpoint(self, options)
        self._holds = named.pop("holds", None)
        return Subscriber(
            seat.policy,
            tensors,
            replica=seat.name,
            rank=seat.rank,
            world_size=seat.world_size,
            **named,
        )

    def guard(self) -> AbstractContextManager[Any]:
        if not (getattr(self.worker, "holds", True) if self._holds is None else self._holds):
            return nullcontext(self.endpoint.version)
        held: AbstractContextManager[Any] = self.endpoint.hold()
        return held

    def call_stamped(self, method: str, /, *args: Any, **kwargs: Any) -> tuple[Any, int | None]:
        """The result, and the version that it was computed with."""
        with portable():
            check_method(self.worker, method)
            with self.guard() as version:
                return self.finish(getattr(self.worker, method)(*args, **kwargs)), version

    @ray.method(concurrency_group="sync")
    def sync(self, at_least: int | None, timeout: float) -> Any:
        with portable():
            return self.endpoint.sync(at_least=at_least, timeout=timeout)

    def sync_in_turn(self, at_least: int | None, timeout: float) -> Any:
        """In the order of user calls. Ranks that call collectives need one order of calls and installs on all of them:
        else one rank waits inside a call for another, which waits for the first one's hold."""
        with portable():
            return self.endpoint.sync(at_least=at_least, timeout=timeout)

    @ray.method(concurrency_group="control")
    def pulse(self) -> tuple[int | None, bool]:
        """(installed version, ready)."""
        return self.endpoint.version, bool(self.endpoint.ready)

    @ray.method(concurrency_group="control")
    def latest(self) -> int | None:
        with portable():
            latest: int | None = self.endpoint.latest()
            return latest


def _for_endpoint(host: Host, options: Mapping[str, Any]) -> dict[str, Any]:
    """Hooks may be given as names of the user's methods, since bound methods do not exist before the actor does."""
    hooks = ("before_install", "after_install")
    return {
        name: getattr(host.worker, value) if name in hooks and isinstance(value, str) else value
        for name, value in options.items()
    }


@contextmanager
def portable() -> Iterator[None]:
    """Let an exception through if its receiver can rebuild it, else send its text as ActorFailed: an exception whose
    ``__init__`` takes other arguments than it hands to ``Exception`` would reach the caller without its traceback."""
    try:
        yield
    except Exception as error:
        try:
            copy.copy(error)
        except Exception:  # noqa: BLE001 - whatever a foreign constructor raises
            text = traceback.format_exc()
            raise ActorFailed(f"{type(error).__name__}: {error}", text=text) from None
        raise


_adopted: dict[type[Host], Host] = {}


def operate(worker: Any, kind: type[Host], operation: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run a host's operation in an actor that its user made; there is one such object a process."""
    host = _adopted.get(kind)
    if host is None or host.worker is not worker:
        host = _adopted[kind] = kind()
        host.worker = worker
    if operation == "end":
        del _adopted[kind]
    return getattr(host, operation)(*args, **kwargs)


def remote_host(kind: type[Host]) -> Any:
    """``kind`` as a Ray actor class, never restarted in place: what comes back under an old handle has forgotten."""
    remote: Any = ray.remote  # its stubs lack concurrency_groups
    return remote(max_restarts=0, max_task_retries=0, concurrency_groups=dict(GROUPS))(kind)
