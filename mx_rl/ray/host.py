"""What runs in each actor: it seats the user's object, opens its publisher or subscriber, and takes calls by name."""

from __future__ import annotations

import copy
import itertools
import os
import socket
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import ray

from mx_rl.errors import ActorFailed, InvalidArgument
from mx_rl.ray.actors import Member, check_method, make
from mx_rl.ray.loop import Loop

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
    streams_by: str  # its method for tensors that come, or go, one at a time

    def __init__(self) -> None:
        self.worker: Any = None
        self.endpoint: Any = None
        self.group = ""  # whose endpoint it is, in an actor that its user made
        self._ended = threading.Event()
        self._loop = Loop()
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

    def adopt(self, seat: Seat, build: str, options: Mapping[str, Any], group: str) -> str:
        """As ``build``, for an actor that its user made: ``build`` names the method that returns its tensors. From here on
        ``group`` ends what it opens, and no other."""
        with portable():
            check_method(self.worker, build)
            self.group = group
            if self.endpoint is not None:  # of a driver that is gone, where the actor outlives it, or of another group
                self.endpoint.close()
                self.endpoint = None
            self.endpoint = self.open(seat, self._loop.run(getattr(self.worker, build)), options)
            there = getattr(self.worker, self.attribute, None)
            if hasattr(self.worker, "__dict__") and (there is None or there is _given.get(self.attribute)):
                setattr(self.worker, self.attribute, self.endpoint)
                _given[self.attribute] = self.endpoint
            return str(self.endpoint.incarnation)

    def given(self, seat: Seat) -> dict[str, Any]:
        return {}

    @abstractmethod
    def open(self, seat: Seat, tensors: Any, options: Mapping[str, Any]) -> Any:
        """The Publisher or Subscriber of this rank."""

    def check_given(self, tensors: Any) -> None:
        """None means a stream, and is most often a forgotten ``return`` where the class has no method that streams."""
        if tensors is None and not hasattr(self.worker, self.streams_by):
            raise InvalidArgument(
                f"{type(self.worker).__name__} gave NoneType where tensors are built: return a module, a mapping or a "
                f"callable; or give it a method {self.streams_by}(), for tensors that come one at a time"
            )

    def guard(self) -> AbstractContextManager[Any]:
        """What surrounds a user call."""
        return nullcontext()

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        with portable():
            check_method(self.worker, method)
            with self.guard():
                return self._loop.run(getattr(self.worker, method), *args, **kwargs)

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
        self._loop.stop()
        self._reserved.close()
        self._ended.set()
        return problems


class TrainerHost(Host):
    """A rank that publishes."""

    attribute = "publisher"

    by_name = False
    """``build`` gave no memory to publish from: a publish takes what the user's ``export`` gives."""
    streams_by = "export"

    def open(self, seat: Seat, tensors: Any, options: Mapping[str, Any]) -> Any:
        from mx_rl.publisher import Publisher
        from mx_rl.tensors import only_declared

        self.check_given(tensors)
        self.by_name = only_declared(tensors)
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
            return self.endpoint.publish(step=step, metadata=metadata, stream=self.exported(), timeout=timeout)

    def exported(self) -> Any:
        export = getattr(self.worker, "export", None)
        if not self.by_name or export is None:
            return None
        try:
            return self._loop.run(export)
        except Exception as exc:  # noqa: BLE001 - raised by the publish, which counts on every rank
            return _raising(exc)

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

    by_name = False
    """``build`` gave no memory to install into: a sync goes through the user's ``load_weights``."""
    streams_by = "load_weights"

    def __init__(self) -> None:
        super().__init__()
        self._holds: bool | None = None

    def given(self, seat: Seat) -> dict[str, Any]:
        return {"replica": seat.name}

    def open(self, seat: Seat, tensors: Any, options: Mapping[str, Any]) -> Any:
        from mx_rl.subscriber import Subscriber
        from mx_rl.tensors import only_declared

        self.check_given(tensors)
        self.by_name = only_declared(tensors)
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
                return self._loop.run(getattr(self.worker, method), *args, **kwargs), version

    @ray.method(concurrency_group="sync")
    def sync(self, at_least: int | None, timeout: float) -> Any:
        with portable():
            return self.take(at_least, timeout)

    def take(self, at_least: int | None, timeout: float) -> Any:
        load = getattr(self.worker, "load_weights", None)
        if not self.by_name or load is None:
            return self.endpoint.sync(at_least=at_least, timeout=timeout)
        with closing(self.endpoint.stream(at_least, timeout=timeout)) as items:
            first = next(items, None)
            if first is not None:  # else nothing newer was there
                self._loop.run(load, itertools.chain([first], items))
                for _ in items:  # an engine may know that it has all it needs
                    pass
        return self.endpoint.last_report

    def sync_in_turn(self, at_least: int | None, timeout: float) -> Any:
        """In the order of user calls. Ranks that call collectives need one order of calls and installs on all of them:
        else one rank waits inside a call for another, which waits for the first one's hold."""
        with portable():
            return self.take(at_least, timeout)

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
            raise ActorFailed(f"{type(error).__name__}: {error}", text=text, stands_for=type(error).__name__) from None
        raise


_adopted: dict[type[Host], Host] = {}
_given: dict[
    str, Any
] = {}  # what ``adopt`` set on the user's object: an earlier one of ours is replaced, its own is not
_adopting = threading.Lock()  # a threaded actor of the user's runs several operations at once


def operate(worker: Any, kind: type[Host], operation: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run a host's operation in an actor that its user made; there is one such object a process."""
    if operation == "end":
        return _end(worker, kind, *args, **kwargs)
    with _adopting:
        host = _adopted.get(kind)
        if host is None or host.worker is not worker:
            host = _adopted[kind] = kind()
            host.worker = worker
    if host.endpoint is None and operation not in ("locate", "adopt"):
        raise ActorFailed(
            f"no {host.attribute} in this process: the actor was restarted since it was wrapped, or its group was "
            "closed; wrap it anew (from_actors)",
            actor=type(worker).__name__,
            rank=None,
            text="",
        )
    return getattr(host, operation)(*args, **kwargs)


def _end(worker: Any, kind: type[Host], group: str) -> list[str]:
    """Nothing where another group has wrapped the actor since: what is open is its."""
    with _adopting:
        host: Any = _adopted.get(kind)  # untyped: Ray's stubs make another thing of its methods
        if host is None or host.worker is not worker or host.group not in ("", group):
            return []
        del _adopted[kind]
    problems: list[str] = host.end()
    return problems


def remote_host(kind: type[Host]) -> Any:
    """``kind`` as a Ray actor class, never restarted in place: what comes back under an old handle has forgotten."""
    remote: Any = ray.remote  # its stubs lack concurrency_groups
    return remote(max_restarts=0, max_task_retries=0, concurrency_groups=dict(GROUPS))(kind)


def _raising(exc: Exception) -> Iterator[Any]:
    raise exc
    yield
