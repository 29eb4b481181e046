"""Ranks: the actors of one world or replica, placed, seated, built and ended together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from mx_rl.errors import Closed, MxRLError, StartTimeout
from mx_rl.ray.actors import Member
from mx_rl.ray.deadline import Deadline
from mx_rl.ray.farewell import leave_for
from mx_rl.ray.host import Host, Location, Seat, remote_host
from mx_rl.ray.interrupts import patience, uninterrupted
from mx_rl.ray.placement import Placement, Request, no_room, place
from mx_rl.ray.remote import died, failure, gather, most_telling
from mx_rl.ray.session import Session, kill, wait

log = logging.getLogger("mx_rl.ray")


class Ranks:
    """Actors that we make, one a rank. ``start`` once, ``end`` once."""

    answers = True
    """Whether a rank answers while it runs a user's method."""

    def __init__(self, kind: type[Host], *, name: str, title: str, policy: str, size: int) -> None:
        self.name = name
        self.title = title  # what errors call it: class and name
        self.policy = policy
        self.size = size
        self.locations: tuple[Location, ...] = ()
        self._kind = kind
        self._actors: list[Any] = []
        self._placement: Placement | None = None
        self._session = Session()
        self._registry: str | None = None
        self._incarnations: list[str] = []  # by rank: the members that the registry knows
        self._lock = threading.Lock()  # one order of calls on all ranks
        self._watches: dict[int, Any] = {}

    def start(
        self,
        user_class: type[Member],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
        *,
        request: Request,
        concurrency: int,
        deadline: Deadline,
        abort: threading.Event,
    ) -> None:
        """Place, seat and build every rank. Raises StartTimeout, ActorFailed or the MxRLError of a rank; nothing is
        left behind then."""
        up = False
        self._registry = options.get("registry")
        try:
            self._placement = place(request, self.size, name=self.name, deadline=deadline, abort=abort)
            actor_class = remote_host(self._kind)
            for rank in range(self.size):
                placed = self._placement.options(rank)
                self._actors.append(actor_class.options(max_concurrency=concurrency, **placed).remote())
            self._locate(deadline, abort, request)
            seats = self._seats()
            self._each("seat", [(seat,) for seat in seats], deadline, abort)
            built = self._each("build", [(seat, user_class, kwargs, options) for seat in seats], deadline, abort)
            self._incarnations = built
            self._watches = self.submit("watch")
            up = True
        finally:
            if not up:
                self.end(timeout=patience())

    def submit(self, operation: str, /, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """Call ``operation`` of every rank's host; references by rank.

        A Ctrl-C sends to all ranks or to none: one that missed a publish would be a version behind for ever.
        """
        refs: dict[int, Any] = {}

        def send() -> None:
            with self._lock:
                refs.update({rank: self._send(rank, operation, *args, **kwargs) for rank in range(self.size)})

        if self.size == 1:
            send()
        else:
            uninterrupted(send)
        return refs

    def submit_to(self, rank: int, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._send(rank, operation, *args, **kwargs)

    def watches(self) -> dict[int, Any]:
        """References by rank that break when the rank's process dies."""
        return dict(self._watches)

    def rewatch(self, rank: int) -> None:
        self._watches[rank] = self.submit_to(rank, "watch")

    def error(self, errors: Mapping[int, BaseException], *, doing: str) -> MxRLError:
        """The one that explains the others."""
        rank = most_telling(errors)
        return failure(errors[rank], actor=self.title, rank=rank, doing=doing)

    def end(self, *, timeout: float) -> None:
        """Close what the ranks opened, in at most ``timeout`` seconds, then kill the actors and give the resources
        back. Dead ranks cost no time. Idempotent. A Ctrl-C in it kills the actors at once."""
        if not self._session.alive():
            return
        with self._lock:
            actors, self._actors = self._actors, []
            self._watches = {}
        gone: list[str] = []
        try:
            gone = self._close(
                actors, timeout if self.locations else 0.0
            )  # what was never located has nothing to close
        finally:
            if self._session.alive():
                self._kill(actors)
        if self._session.alive():
            leave_for(gone, policy=self.policy, registry=self._registry)

    def _kill(self, actors: Sequence[Any]) -> None:
        for actor in actors:
            kill(actor, no_restart=True)
        try:
            if actors:
                # A call of a killed actor fails when Ray has seen its end; only then are its resources free.
                wait([actor.locate.remote() for actor in actors], num_returns=len(actors), timeout=patience())
        finally:
            if self._placement is not None:
                self._placement.release()

    def _close(self, actors: Sequence[Any], timeout: float) -> list[str]:
        """End the hosts of actors that this object no longer calls; the members that could not leave."""
        refs = {rank: self._end_one(actor) for rank, actor in enumerate(actors)}
        ends = gather(refs, deadline=Deadline(timeout), settle=None)
        for rank, problems in ends.values.items():
            for text in problems:
                log.warning("rank %d of %s failed to close: %s", rank, self.title, text)
        for rank, error in ends.errors.items():
            if not died(error):
                log.warning("rank %d of %s failed to close: %s", rank, self.title, error)
        return [name for rank, name in enumerate(self._incarnations) if rank in refs and rank not in ends.values]

    def _end_one(self, actor: Any) -> Any:
        return self._invoke(actor, "end")

    def _send(self, rank: int, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        if not self._actors or not self._session.alive():
            raise Closed(f"{self.title} was ended")
        return self._invoke(self._actors[rank], operation, *args, **kwargs)

    def _invoke(self, actor: Any, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        # Spread out, since Ray resolves references among a call's own arguments, not inside a tuple of them.
        return getattr(actor, operation).remote(*args, **kwargs)

    def _locate(self, deadline: Deadline, abort: threading.Event, request: Request) -> None:
        try:
            self.locations = tuple(self._each("locate", [()] * self.size, deadline, abort))
        except StartTimeout:
            if isinstance(request.placement, str):
                raise
            # No bundle of the user's placement group has room.
            raise no_room(request, self.size, name=self.title, timeout=deadline.timeout) from None

    def _each(
        self, operation: str, args: Sequence[tuple[Any, ...]], deadline: Deadline, abort: threading.Event
    ) -> list[Any]:
        """One step of the start on every rank; results by rank."""
        doing = {"locate": "starting its process", "adopt": "build"}.get(operation, operation)
        refs = {rank: self._send(rank, operation, *args[rank]) for rank in range(self.size)}
        found = gather(refs, deadline=deadline, abort=abort)
        if found.errors:
            raise self.error(found.errors, doing=doing)
        if found.pending:
            late = sorted(found.pending)
            raise StartTimeout(
                f"{self.title}: ranks {late} were not done with {doing} in {deadline.timeout:g} s: raise timeout, or look "
                "at what they do there",
                missing=late,
            )
        return [found.values[rank] for rank in range(self.size)]

    def _seats(self) -> list[Seat]:
        head = self.locations[0]
        on_node: dict[str, int] = {}
        seats = []
        for rank, location in enumerate(self.locations):
            local_rank = on_node.get(location.node_id, 0)
            on_node[location.node_id] = local_rank + 1
            seats.append(
                Seat(
                    policy=self.policy,
                    name=self.name,
                    rank=rank,
                    world_size=self.size,
                    local_rank=local_rank,
                    master_addr=head.ip,
                    master_port=head.port,
                )
            )
        return seats
