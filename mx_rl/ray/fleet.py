"""RolloutFleet: replicas that install the policy's versions, take work, are replaced when they die, and come and go."""

from __future__ import annotations

import threading
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mx_rl.errors import CallTimeout, Closed, InvalidArgument, NotReady, StartTimeout
from mx_rl.ray.actors import Rollout, check_class, check_method
from mx_rl.ray.announced import Announced
from mx_rl.ray.arguments import check_size, endpoint_options
from mx_rl.ray.deadline import Deadline
from mx_rl.ray.dispatch import Roster, dispatch
from mx_rl.ray.host import RolloutHost
from mx_rl.ray.interrupts import END_S, patience
from mx_rl.ray.placement import Request, no_room
from mx_rl.ray.remote import gather
from mx_rl.ray.replica import Replica
from mx_rl.ray.report import FleetReport
from mx_rl.ray.session import close_at_exit
from mx_rl.ray.slot import Recipe, Slot
from mx_rl.ray.sync import newest, sync_all
from mx_rl.ray.wrapped import WrappedRanks
from mx_rl.twins import run

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from mx_rl.reports import Version

_OURS = {"policy", "tensors", "registry", "replica", "rank", "world_size"}
_SLICE_S = 0.25


class RolloutFleet:
    """Replicas of a Rollout subclass, ``ranks`` actors each. A thread a replica watches it: when a rank dies the whole
    replica is torn down and another, under a new name, takes its place once it has installed a version.

    Args:
        user_class: the Rollout subclass.
        policy: whose versions are installed.
        num_cpus, num_gpus, resources: what each rank takes.
        placement: how the ranks of one replica are spread ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"), or a
            PlacementGroup of yours for all replicas (it is not removed).
        runtime_env: Ray's, for the actors.
        kwargs: for the class's ``__init__``, or attributes where it has none.
        registry: URL; None reads ``MXRL_REGISTRY``, else takes the Ray registry.
        subscriber: further arguments of ``mx_rl.Subscriber``; ``before_install`` and ``after_install`` may name methods
            of the class.
        concurrency: user calls that run at a time in a rank. Above 1 they run on several threads, ``async def`` methods as
            tasks of one loop; each call is a hold of its own.
        holds: whether a user call is a hold, so that no weight changes while it runs; None: what the class says. False is
            for engines with safe points of their own, which take ``subscriber.hold`` themselves.
        name: begins the replicas' names.
        timeout: seconds until a replica must be placed and built.

    Raises StartTimeout where the cluster has no room, ActorFailed (or a rank's own MxRLError) where a rank dies or
    raises in ``build``. Nothing is left behind then. Later failures of that kind are retried with growing pauses, and a
    place that failed five times in a row stays empty, with the reason in ``status``, until ``scale`` is called.

    Replicas hold no version at first: they fetch one at the first ``sync``, ``scale`` or ``map``, and new ones by
    themselves from then on. Thread-safe; usable in a driver and in an actor. ``close`` it: its threads keep it alive.
    """

    def __init__(
        self,
        user_class: type[Rollout],
        *,
        policy: str,
        replicas: int = 1,
        ranks: int = 1,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        placement: str | PlacementGroup | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        registry: str | None = None,
        subscriber: Mapping[str, Any] | None = None,
        concurrency: int = 1,
        holds: bool | None = None,
        name: str | None = None,
        timeout: float = 300.0,
    ) -> None:
        check_class(user_class, Rollout, kwargs or {})
        for what, number in (("ranks", ranks), ("concurrency", concurrency)):
            check_size(what, number)
        check_size("replicas", replicas, least=0)
        self.policy = policy
        self._user_class: type[Rollout] | None = user_class
        self._recipe: Recipe | None = Recipe(
            fleet=name or user_class.__name__.lower(),
            user_class=user_class,
            policy=policy,
            ranks=ranks,
            kwargs=dict(kwargs or {}),
            options=_options(subscriber, registry, holds),
            request=Request(
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                resources=dict(resources or {}),
                placement=placement if placement is not None else "PACK",
                runtime_env=runtime_env,
            ),
            concurrency=concurrency,
            timeout=timeout,
        )
        self._init()
        try:
            self._add(replicas, Deadline(timeout + END_S))
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_actors(
        cls,
        actors: Sequence[Any],
        *,
        policy: str,
        build: str = "build",
        registry: str | None = None,
        subscriber: Mapping[str, Any] | None = None,
        holds: bool | None = None,
        name: str = "wrapped",
        timeout: float = 300.0,
    ) -> RolloutFleet:
        """Make a fleet of actors of yours, whatever their class: each is a replica, or each sequence of them is the
        ranks of one. ``build`` names the method that returns a rank's tensors. Syncs take their turn among your own
        calls. In an async actor what runs goes on beside them, and new calls wait; there, and in one with
        ``max_concurrency``, methods that you call yourself take ``subscriber.hold`` (or ``async_hold``) themselves.
        A replica that dies is not replaced; ``close`` and ``scale`` down leave the actors alive."""
        fleet = cls.__new__(cls)
        fleet.policy = policy
        fleet._user_class = None
        fleet._recipe = None
        options = _options(subscriber, registry, holds)
        fleet._init()
        fleet._announced = Announced(policy, options["registry"])
        deadline = Deadline(timeout)
        try:
            for number, ranks in enumerate(actors):
                handles = list(ranks) if isinstance(ranks, (list, tuple)) else [ranks]
                replica_name = f"{name}-{number}-{uuid.uuid4().hex[:8]}"
                wrapped = WrappedRanks(
                    RolloutHost, handles, name=replica_name, title=f"the wrapped replica {replica_name}", policy=policy
                )
                wrapped.adopt(build, options, deadline=deadline, abort=fleet._closing)
                replica = Replica(wrapped, concurrency=1)
                slot = Slot.adopted(
                    replica,
                    changed=fleet._roster.changed,
                    wanted=fleet._roster.wanted,
                    announced=fleet._announced,
                )
                fleet._roster.slots.append(slot)
                slot.start()
        except BaseException:
            fleet.close()
            raise
        return fleet

    def _init(self) -> None:
        self._roster = Roster()
        self._closing = threading.Event()
        self._scaling = threading.Lock()
        self._announced: Announced | None = None
        close_at_exit(self)

    # ---- versions ----------------------------------------------------------------------------------------------------

    def sync(self, *, at_least: Version | int | None = None, timeout: float = 60.0) -> FleetReport:
        """Install one target in every replica at once: ``at_least``, else the newest READY version; a replica that
        finds a newer one takes that. Waits for the first version ever.

        Returns when every replica has answered, or at ``timeout``: the report says which installed it, which failed and
        why, and which did not answer, and never raises for one bad replica. Raises NotReady where there is no version.
        """
        self._check_open()
        self._roster.wanted.set()
        number = getattr(at_least, "number", at_least)
        if number is not None and (not isinstance(number, int) or number < 0):
            raise InvalidArgument(f"at_least={at_least!r}: a Version or its number")
        deadline = Deadline(timeout)
        if self._announced is not None:
            self._announced.wait(number or 1, deadline, check=self._check_open)
        return sync_all(self._roster, at_least=number, deadline=deadline, check=self._check_open)

    async def async_sync(self, *, at_least: Version | int | None = None, timeout: float = 60.0) -> FleetReport:
        """``sync`` on a thread of its own. Cancelled, the replicas go on with it."""
        return await run(lambda: self.sync(at_least=at_least, timeout=timeout))

    @property
    def latest(self) -> int | None:
        """Number of the newest READY version, or None."""
        self._check_open()
        return newest(self._roster, Deadline(30.0))

    async def async_latest(self) -> int | None:
        """``latest`` on a thread of its own."""
        return await run(lambda: self.latest)

    # ---- work --------------------------------------------------------------------------------------------------------

    def map(
        self, method: str, items: Iterable[Any], *, timeout: float = 600.0, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call ``method(item, **kwargs)`` for every item, one a call, on rank 0 of the replicas that hold a version,
        the least loaded first. Results in the order of the items.

        A replica that dies costs nothing but time: its items run elsewhere, up to three times each. Raises ActorFailed
        with the remote text where the method raises (its exception is the ``__cause__``) or no replica is left,
        NotReady where no replica holds a version within ``timeout`` seconds, CallTimeout where calls are not done by
        then; calls that run are not interrupted.
        """
        results: dict[int, Any] = {}
        for index, result, _ in self.stream(method, items, timeout=timeout, kwargs=kwargs):
            results[index] = result
        return [results[index] for index in range(len(results))]

    def stream(
        self, method: str, items: Iterable[Any], *, timeout: float = 600.0, kwargs: Mapping[str, Any] | None = None
    ) -> Iterator[tuple[int, Any, int | None]]:
        """As ``map``, but yields (index of the item, result, version that computed it) as results come. Items are drawn
        as replicas become free, so that ``items`` may be endless; ``timeout`` is for the whole."""
        self._check_open()
        if self._user_class is not None:
            check_method(self._user_class, method)
        self._roster.wanted.set()
        return dispatch(
            self._roster, method, items, kwargs=dict(kwargs or {}), deadline=Deadline(timeout), check=self._check_open
        )

    async def async_map(
        self, method: str, items: Iterable[Any], *, timeout: float = 600.0, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """``map`` on a thread of its own, which also draws the items. Cancelled, calls that were sent run on."""
        return await run(lambda: self.map(method, items, timeout=timeout, kwargs=kwargs))

    async def async_stream(
        self, method: str, items: Iterable[Any], *, timeout: float = 600.0, kwargs: Mapping[str, Any] | None = None
    ) -> AsyncIterator[tuple[int, Any, int | None]]:
        """``stream`` for ``async for``: each result is awaited on a thread, which also draws the items."""
        results = self.stream(method, items, timeout=timeout, kwargs=kwargs)
        while (found := await run(lambda: next(results, None))) is not None:
            yield found

    async def async_call(
        self, method: str, /, *args: Any, timeout: float = 600.0, **kwargs: Any
    ) -> dict[str, list[Any]]:
        """``call`` on a thread of its own. Cancelled, the ranks go on with it."""
        return await run(lambda: self.call(method, *args, timeout=timeout, **kwargs))

    def call(self, method: str, /, *args: Any, timeout: float = 600.0, **kwargs: Any) -> dict[str, list[Any]]:
        """Call ``method`` on every rank of every replica, with a version or without; replica to results by rank.

        Raises ActorFailed (or the MxRLError) of the first replica with a rank that raised or died, when all are done,
        and CallTimeout after ``timeout`` seconds.
        """
        self._check_open()
        if self._user_class is not None:
            check_method(self._user_class, method)
        deadline = Deadline(timeout)
        sent = {}
        for replica in self._roster.replicas():
            try:
                sent[replica] = replica.send_all(method, deadline, *args, **kwargs)
            except Closed:  # it ended a moment ago, and is of the fleet no more
                self._check_open()
        refs = {(replica, rank): ref for replica, ranks in sent.items() for rank, ref in ranks.items()}
        found = gather(refs, deadline=deadline, settle=None)
        for replica, ranks in sent.items():
            errors = {rank: found.errors[replica, rank] for rank in ranks if (replica, rank) in found.errors}
            for rank, ref in ranks.items():
                if (replica, rank) not in found.pending:
                    replica.done(ref)
            if errors:
                raise replica.ranks.error(errors, doing=method)
        if found.pending:
            late = sorted(f"{replica.name} rank {rank}" for replica, rank in found.pending)
            raise CallTimeout(
                f"{method} was not done in {timeout:g} s by {late}; they go on with it", method=method, missing=late
            )
        return {
            replica.name: [found.values[replica, rank] for rank in sorted(ranks)] for replica, ranks in sent.items()
        }

    # ---- size --------------------------------------------------------------------------------------------------------

    def scale(self, replicas: int, *, timeout: float = 300.0, drain_timeout: float = 30.0) -> tuple[str, ...]:
        """Grow or shrink to ``replicas`` while training goes on; the names of the replicas after that.

        Growing returns when the new replicas are built and, where the policy has a version, have installed it. Raises
        what the constructor raises, having taken back those that did not start; NotReady where new replicas could not
        install a version within ``timeout`` seconds: they stay, and serve as soon as they can. Shrinking ends the
        youngest first; their running calls get ``drain_timeout`` seconds. Places that were given up are tried again.
        """
        check_size("replicas", replicas, least=0)
        with self._scaling:
            self._check_open()
            deadline = Deadline(timeout)
            slots = self._roster.slots
            self._end([slot for slot in slots if slot.error is not None], Deadline(0))
            more = replicas - len(slots)
            if more > 0:
                self._roster.wanted.set()
                self._wait_installed(self._add(more, deadline), deadline)
            elif more < 0:
                self._end(sorted(slots, key=lambda slot: slot.born, reverse=True)[:-more], Deadline(drain_timeout))
            return tuple(slot.replica.name for slot in slots if slot.replica is not None)

    async def async_scale(
        self, replicas: int, *, timeout: float = 300.0, drain_timeout: float = 30.0
    ) -> tuple[str, ...]:
        """``scale`` on a thread of its own. Cancelled, it is carried out all the same."""
        return await run(lambda: self.scale(replicas, timeout=timeout, drain_timeout=drain_timeout))

    def _add(self, number: int, deadline: Deadline) -> list[Slot]:
        """Start slots, all at once, and wait until each has a built replica; none stays where one fails, nor after a
        Ctrl-C."""
        if self._recipe is None:
            raise InvalidArgument(
                "a fleet made by from_actors cannot make actors: wrap more of yours in a fleet of their own"
            )
        new = [Slot(self._recipe, changed=self._roster.changed, wanted=self._roster.wanted) for _ in range(number)]
        waited = False
        try:
            self._roster.slots.extend(new)
            for slot in new:
                slot.start()
            with self._roster.changed:
                while not (all(slot.settled for slot in new) or any(slot.error for slot in new) or deadline.over):
                    self._check_open()
                    self._roster.changed.wait(min(_SLICE_S, deadline.left))
            waited = True
        finally:
            if not waited:
                self._end(new, Deadline(0))
        failed = [slot.error for slot in new if slot.error is not None]
        late = [slot for slot in new if not slot.settled]
        if failed or late:
            states = self._roster.states()
            placeless = [slot.replica for slot in late if slot.replica is not None and not slot.replica.locations]
            if placeless and not failed:
                recipe, timeout = self._recipe, deadline.timeout
                failed = [no_room(recipe.request, recipe.ranks, name=placeless[0].name, timeout=timeout)]
            self._end(new, Deadline(0))
            if failed:
                # A lack of room explains what else was late meanwhile.
                raise next((error for error in failed if "requested" in error.fields), failed[0])
            raise StartTimeout(
                f"{len(late)} of {number} new replicas were not built in {deadline.timeout:g} s: {states}",
                missing=len(late),
            )
        return new

    def _wait_installed(self, new: Sequence[Slot], deadline: Deadline) -> None:
        if newest(self._roster, Deadline(min(30.0, deadline.left))) is None:
            return
        while True:
            self._check_open()
            late = [slot.replica.name for slot in new if slot.replica is not None and not slot.replica.serving]
            if not late:
                return
            if deadline.over:
                raise NotReady(
                    f"{len(late)} new replicas installed no version in {deadline.timeout:g} s: {self._roster.states()}",
                    latest=None,
                    missing=late,
                )
            for slot in new:
                if slot.error is not None:
                    raise slot.error
            with self._roster.changed:
                self._roster.changed.wait(min(_SLICE_S, deadline.left))

    def _end(self, slots: Sequence[Slot], drain: Deadline) -> None:
        """Returns when their replicas are gone, or are overdue. After a Ctrl-C they go on ending by themselves."""
        ending = list(slots)
        try:
            for slot in ending:
                slot.stop(drain)
            until = Deadline(drain.left + 3 * patience())
            for slot in ending:
                slot.join(until)
        finally:
            for slot in ending:
                slot.stop(drain)  # again: the first round may not have come to an end
                if slot in self._roster.slots:
                    self._roster.slots.remove(slot)

    # ---- state -------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Plain values, at once and without asking anybody: what is known of each replica is at most a second old.

        A replica's ``state`` is "starting", "waiting" (built, no version), "ready", "unready" (tainted or paused),
        "suspect" (does not answer), "draining", "lost" (being replaced) or "failed" (given up, see ``reason``).
        ``restarts`` counts the replicas that were lost in its place before it.
        """
        rows = {}
        for slot in list(self._roster.slots):
            replica = slot.replica
            if replica is None:
                continue
            rows[replica.name] = {
                "version": replica.version,
                "ready": replica.serving,
                "state": "failed" if slot.error is not None else replica.state,
                "pids": [place.pid for place in replica.locations],
                "node_ids": [place.node_id for place in replica.locations],
                "calls": replica.load,
                "restarts": slot.restarts,
                "reason": replica.reason or slot.reason,
            }
        return {
            "policy": self.policy,
            "closed": self._closing.is_set(),
            "size": len(self._roster.slots),
            "num_ready": sum(row["ready"] for row in rows.values()),
            "replicas": rows,
        }

    def close(self) -> None:
        """End every replica, without waiting for their calls, in bounded time; actors and placement groups of others
        are not touched. Idempotent. A fleet that was made in an actor ends with that actor; Ray keeps its placement
        groups to the end of the job unless it is closed first."""
        self._closing.set()
        for slot in list(self._roster.slots):
            slot.stop(Deadline(0))  # a scale that drains lets go of the lock then
        with self._scaling:
            self._end(self._roster.slots, Deadline(0))
        if self._announced is not None:
            self._announced.close()

    def __enter__(self) -> RolloutFleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise Closed(f"the RolloutFleet of {self.policy!r} was closed")


def _options(subscriber: Mapping[str, Any] | None, registry: str | None, holds: bool | None) -> dict[str, Any]:
    return {**endpoint_options("subscriber", subscriber, registry, ours=_OURS), "holds": holds}
