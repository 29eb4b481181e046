"""TrainerGroup: the ranks of one publishing world, called as one."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mx_rl.errors import ActorFailed, CallTimeout, Closed, InvalidArgument
from mx_rl.ray.actors import Trainer, check_class, check_method
from mx_rl.ray.arguments import check_size, endpoint_options
from mx_rl.ray.deadline import Deadline
from mx_rl.ray.host import TrainerHost
from mx_rl.ray.interrupts import END_S
from mx_rl.ray.placement import Request
from mx_rl.ray.ranks import Ranks
from mx_rl.ray.remote import Gathered, died, failure, gather
from mx_rl.ray.session import close_at_exit
from mx_rl.ray.wrapped import WrappedRanks
from mx_rl.reports import Receipt
from mx_rl.twins import run

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from mx_rl.reports import Version

_WAIT_PART_S = 1.0
_OURS = {"policy", "tensors", "registry", "rank", "world_size", "world"}


class TrainerGroup:
    """``world_size`` actors of a Trainer subclass, built and publishing as one world under a name of its own.

    Args:
        user_class: the Trainer subclass.
        policy: under which the ranks publish.
        num_cpus, num_gpus, resources: what each rank takes.
        placement: "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD", or a PlacementGroup of yours with room for all
            ranks (taken in order where it has exactly one bundle a rank; it is not removed).
        runtime_env: Ray's, for the actors.
        kwargs: for the class's ``__init__``, or attributes where it has none.
        registry: URL; None reads ``MXRL_REGISTRY``, else takes the Ray registry.
        publisher: further arguments of ``mx_rl.Publisher``, e.g. ``{"wire_dtype": torch.bfloat16}``.
        timeout: seconds until all ranks must be placed and built.

    Raises StartTimeout where the cluster has no room, ActorFailed (or a rank's own MxRLError) where a rank dies or
    raises in ``build``. Nothing is left behind then. Thread-safe; usable in a driver and in an actor.
    """

    def __init__(
        self,
        user_class: type[Trainer],
        *,
        policy: str,
        world_size: int = 1,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        placement: str | PlacementGroup | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        registry: str | None = None,
        publisher: Mapping[str, Any] | None = None,
        timeout: float = 300.0,
    ) -> None:
        check_class(user_class, Trainer, kwargs or {})
        check_size("world_size", world_size)
        self.policy = policy
        self.world_size = world_size
        self._user_class: type[Trainer] | None = user_class
        self._kwargs = dict(kwargs or {})
        self._options = endpoint_options("publisher", publisher, registry, ours=_OURS)
        self._request = Request(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            resources=dict(resources or {}),
            placement=placement if placement is not None else "PACK",
            runtime_env=runtime_env,
        )
        self._timeout = timeout
        self._init()
        self._launch(timeout)

    @classmethod
    def from_actors(
        cls,
        actors: Sequence[Any],
        *,
        policy: str,
        build: str = "build",
        registry: str | None = None,
        publisher: Mapping[str, Any] | None = None,
        timeout: float = 300.0,
    ) -> TrainerGroup:
        """Make a world of actors of yours, one a rank, whatever their class: ``build`` names the method that returns a
        rank's tensors. The group's calls take their turn among your own; ``close`` leaves the actors alive."""
        group = cls.__new__(cls)
        group.policy = policy
        group.world_size = len(actors)
        group._user_class = None
        check_size("the number of actors", len(actors))
        options = endpoint_options("publisher", publisher, registry, ours=_OURS)
        group._init()
        ranks = WrappedRanks(TrainerHost, actors, name=_world(policy), title="the wrapped trainer", policy=policy)
        ranks.adopt(build, options, deadline=Deadline(timeout), abort=group._closing)
        group._ranks = ranks
        return group

    def _init(self) -> None:
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._ranks: Ranks | None = None
        self._dead: ActorFailed | None = None
        close_at_exit(self)

    def _launch(self, timeout: float) -> None:
        assert self._user_class is not None
        world = _world(self.policy)
        title = f"{self._user_class.__name__} (world {world})"
        ranks = Ranks(TrainerHost, name=world, title=title, policy=self.policy, size=self.world_size)
        ranks.start(
            self._user_class,
            self._kwargs,
            self._options,
            request=self._request,
            concurrency=1,
            deadline=Deadline(timeout),
            abort=self._closing,
        )
        self._ranks = ranks
        self._dead = None

    def call(self, method: str, /, *args: Any, timeout: float = 600.0, wait: bool = True, **kwargs: Any) -> list[Any]:
        """Call ``method`` of every rank's object; results by rank, or Ray's ObjectRefs with ``wait=False``.

        Raises ActorFailed with the rank and its remote traceback when a rank raised (the exception itself is the
        ``__cause__``) or died; an MxRLError comes as it is. The others are not waited for then. After a death every
        call raises until ``restart``. CallTimeout after ``timeout`` seconds: the ranks go on with the call, and a later
        one queues behind it.
        """
        if self._user_class is not None:
            check_method(self._user_class, method)
        deadline = Deadline(timeout)
        refs = self._alive().submit("call", method, *args, **kwargs)
        if not wait:
            return list(refs.values())
        return self._collect(refs, deadline, doing=method)

    async def async_call(self, method: str, /, *args: Any, timeout: float = 600.0, **kwargs: Any) -> list[Any]:
        """``call`` on a thread of its own. Cancelled, the ranks go on with it."""
        return await run(lambda: self.call(method, *args, timeout=timeout, **kwargs))

    def publish(
        self, *, step: int | None = None, metadata: Mapping[str, Any] | None = None, timeout: float = 30.0
    ) -> Version:
        """Publish on every rank; rank 0's Version. Returns as soon as the tensors may be changed again on all ranks.

        Raises what ``Publisher.publish`` raises on a rank, or ActorFailed where one died.
        """
        refs = self._alive().submit("publish", step, metadata, timeout)
        # A rank bounds its own publish, which may queue behind a call that is still running.
        version: Version = self._collect(refs, Deadline(timeout + END_S), doing="publish")[0]
        return version

    async def async_publish(
        self, *, step: int | None = None, metadata: Mapping[str, Any] | None = None, timeout: float = 30.0
    ) -> Version:
        """``publish`` on a thread of its own. Cancelled, the ranks publish all the same, and may not change their tensors
        before they have."""
        return await run(lambda: self.publish(step=step, metadata=metadata, timeout=timeout))

    async def async_wait(
        self, version: Version | int, *, replicas: int | None = None, timeout: float = 60.0
    ) -> Receipt:
        """``wait`` on a thread of its own. Cancelled, it ends at once; nothing depends on it."""
        return await run(lambda: self.wait(version, replicas=replicas, timeout=timeout))

    def wait(self, version: Version | int, *, replicas: int | None = None, timeout: float = 60.0) -> Receipt:
        """Until ``replicas`` replicas (None: the members at READY) have installed ``version`` or a newer one. Returns,
        never raises, on expiry: the Receipt says who is missing, rank 0 itself where it did not answer in some seconds
        more. Raises ActorFailed where rank 0 is dead."""
        deadline, last = Deadline(timeout), Deadline(timeout + END_S)
        receipt: Receipt | None = None
        while True:
            # In parts, so that one which a Ctrl-C leaves behind is soon over: it has a thread of the actor's, and an
            # actor of the user's to itself.
            part = min(_WAIT_PART_S, deadline.left)
            begun = time.monotonic()
            ranks = self._alive()
            ref = ranks.submit_to(0, "wait", version, replicas, part)
            found = gather({0: ref}, deadline=last)
            if found.pending:
                return receipt or _silent(ranks, version)
            receipt = self._results(found, last, doing="wait")[0]
            if deadline.over or time.monotonic() - begun < part:
                return receipt

    @property
    def latest(self) -> int | None:
        """Number of the newest READY version, or None."""
        ref = self._alive().submit_to(0, "latest")
        latest: int | None = self._collect({0: ref}, Deadline(30.0), doing="latest")[0]
        return latest

    async def async_latest(self) -> int | None:
        """``latest`` on a thread of its own."""
        return await run(lambda: self.latest)

    @property
    def world(self) -> str:
        """The name of this launch; ``restart`` makes another."""
        return self._open().name

    def restart(self, *, timeout: float | None = None) -> None:
        """End what is left of the world, and start it anew: new actors, built again, under a new world name that fences
        the old one. Version numbers go on. Raises what the constructor raises; ``restart`` may be called again then."""
        with self._lock:
            if self._user_class is None:
                raise InvalidArgument(
                    "a group made by from_actors cannot restart your actors: make them anew and wrap them"
                )
            if self._closing.is_set():
                raise Closed(f"the TrainerGroup of {self.policy!r} was closed")
            ranks, self._ranks = self._ranks, None
            if ranks is not None:
                ranks.end(timeout=END_S)
            self._launch(self._timeout if timeout is None else timeout)

    async def async_restart(self, *, timeout: float | None = None) -> None:
        """``restart`` on a thread of its own. Cancelled, it is carried out all the same."""
        await run(lambda: self.restart(timeout=timeout))

    def status(self, *, timeout: float = 5.0) -> dict[str, Any]:
        """Who the ranks are and whether they live; answers within ``timeout`` seconds whatever they do."""
        ranks = self._ranks
        view: dict[str, Any] = {"policy": self.policy, "world_size": self.world_size, "world": None, "latest": None}
        if ranks is None:
            return {**view, "state": "closed" if self._closing.is_set() else "down", "reason": "", "ranks": []}
        deadline = Deadline(timeout)
        found = gather(ranks.submit("locate"), deadline=deadline, settle=None)
        rows = [
            {
                "rank": rank,
                "pid": place.pid,
                "node_id": place.node_id,
                "ip": place.ip,
                "alive": rank in found.values,
                "reason": str(found.errors[rank]).splitlines()[0]
                if rank in found.errors
                else ""
                if rank in found.values
                else "does not answer",
            }
            for rank, place in enumerate(ranks.locations)
        ]
        reason = "" if self._dead is None else str(self._dead)
        if 0 in found.values:
            asked = gather({0: ranks.submit_to(0, "latest")}, deadline=Deadline(timeout))
            view["latest"] = asked.values.get(0)
        state = "running" if all(row["alive"] for row in rows) else "failed"
        return {**view, "world": ranks.name, "state": state, "reason": reason, "ranks": rows}

    def close(self) -> None:
        """End the actors and give their resources back, in bounded time. Idempotent. A group that was made in an actor
        ends with that actor; Ray keeps its placement group to the end of the job unless it is closed first."""
        self._closing.set()
        with self._lock:
            if self._ranks is not None:
                self._ranks.end(timeout=END_S)
                self._ranks = None

    def __enter__(self) -> TrainerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Ranks:
        ranks = self._ranks
        if ranks is None:
            if self._closing.is_set():
                raise Closed(f"the TrainerGroup of {self.policy!r} was closed")
            raise ActorFailed(
                f"the world of {self.policy!r} is down: its last start failed; call restart()", actor="", rank=None
            )
        return ranks

    def _alive(self) -> Ranks:
        ranks = self._open()
        if self._dead is not None:
            raise ActorFailed(
                f"{self._dead}. The world lacks that rank since: call restart()", **self._dead.fields
            ) from self._dead
        return ranks

    def _collect(self, refs: Mapping[int, Any], deadline: Deadline, *, doing: str) -> list[Any]:
        """Results by rank, or the error that explains the others."""
        return self._results(gather(refs, deadline=deadline), deadline, doing=doing)

    def _results(self, found: Gathered, deadline: Deadline, *, doing: str) -> list[Any]:
        ranks = self._open()
        for rank, error in found.errors.items():
            if died(error):
                lost = failure(error, actor=ranks.title, rank=rank, doing=doing)
                assert isinstance(lost, ActorFailed)
                self._dead = lost
        if found.errors:
            raise ranks.error(found.errors, doing=doing)
        if found.pending:
            late = sorted(found.pending)
            raise CallTimeout(
                f"ranks {late} of {ranks.title} were not done with {doing} in {deadline.timeout:g} s; they go on",
                method=doing,
                missing=late,
            )
        return [found.values[rank] for rank in sorted(found.values)]


def _silent(ranks: Ranks, version: Version | int) -> Receipt:
    number = version if isinstance(version, int) else version.number
    return Receipt(version=number, ready=False, installed=(), failed={}, missing=(f"rank 0 of {ranks.title}",))


def _world(policy: str) -> str:
    return f"{policy}-{uuid.uuid4().hex[:12]}"
