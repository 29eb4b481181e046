"""Slot: one place in a fleet. Its thread starts a replica, brings it to a version, watches it, and replaces it."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError

from mx_rl.errors import ActorFailed, Closed, MxRLError, StartTimeout
from mx_rl.ray.actors import Rollout
from mx_rl.ray.announced import Announced
from mx_rl.ray.deadline import Deadline
from mx_rl.ray.host import RolloutHost
from mx_rl.ray.interrupts import END_S
from mx_rl.ray.placement import Request
from mx_rl.ray.ranks import Ranks
from mx_rl.ray.replica import Replica
from mx_rl.ray.session import Session
from mx_rl.ray.watch import Watch

log = logging.getLogger("mx_rl.ray")

MAX_FAILURES = 5
"""A slot whose replicas failed to build so often in a row stays down, with the reason in ``status``."""
BACKOFF_S = (0.5, 30.0)
"""The pause after a first failure, doubled with each further one up to the second figure."""
LOST_S = 2.0
"""How long the surviving ranks of a lost replica get to leave in order."""
_SLICE_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a fleet's replicas are made."""

    fleet: str
    user_class: type[Rollout]
    policy: str
    ranks: int
    kwargs: Mapping[str, Any]
    options: Mapping[str, Any]
    request: Request
    concurrency: int
    timeout: float
    counter: itertools.count[int] = field(default_factory=itertools.count)

    def replica(self) -> Replica:
        """A new replica, not started: its name has never been used and never will be."""
        name = f"{self.fleet}-{next(self.counter)}-{uuid.uuid4().hex[:8]}"
        title = f"{self.user_class.__name__} (replica {name})"
        ranks = Ranks(RolloutHost, name=name, title=title, policy=self.policy, size=self.ranks)
        return Replica(ranks, concurrency=self.concurrency)

    def start(self, replica: Replica, abort: threading.Event) -> None:
        replica.ranks.start(
            self.user_class,
            self.kwargs,
            self.options,
            request=self.request,
            concurrency=self.concurrency,
            deadline=Deadline(self.timeout),
            abort=abort,
        )


class Slot:
    """``changed`` is told of every step; ``wanted`` is set once new replicas are to fetch a version by themselves."""

    def __init__(self, recipe: Recipe | None, *, changed: threading.Condition, wanted: threading.Event) -> None:
        self.replica: Replica | None = None
        self.restarts = 0
        self.error: MxRLError | None = None
        """Why the slot is down for good, or None."""
        self.reason = ""
        """What became of its last replica, until the next one is built."""
        self.born = time.monotonic()
        """When its replica was made."""
        self._recipe = recipe
        self._changed = changed
        self._wanted = wanted
        self._session = Session()
        self._failures = 0  # replicas in a row that never held a version
        self._was_built = False
        self._announced: Announced | None = None
        self._stop = threading.Event()
        self._drain = Deadline(0)
        self._thread = threading.Thread(target=self._run, name="mx-rl-slot", daemon=True)

    @classmethod
    def adopted(
        cls, replica: Replica, *, changed: threading.Condition, wanted: threading.Event, announced: Announced
    ) -> Slot:
        """A slot of actors that their user made: watched, never replaced."""
        slot = cls(None, changed=changed, wanted=wanted)
        slot._announced = announced
        slot.replica = replica
        replica.built = True
        return slot

    def start(self) -> None:
        self._thread.start()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    @property
    def settled(self) -> bool:
        """Built, down for good, or ended: a start has come to its end."""
        return (
            self.error is not None or not self._thread.is_alive() or (self.replica is not None and self.replica.built)
        )

    def stop(self, drain: Deadline) -> None:
        """Take no more work, let running calls end until ``drain``, leave. Returns at once; ``join`` waits."""
        self._drain = drain
        if self.replica is not None:
            self.replica.draining = True
        self._stop.set()
        self._tell()

    def join(self, deadline: Deadline) -> bool:
        """Whether the slot's replica is gone, within the deadline."""
        if self._thread.ident is not None:
            self._thread.join(deadline.left)
        return not self._thread.is_alive()

    @property
    def _halted(self) -> bool:
        return self._stop.is_set() or not self._session.alive()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while not self._halted:
                replica = self.replica if self._recipe is None else self._next_replica(self._recipe)
                if replica is None:
                    break
                self._tell()
                self._live(replica)
                if self._recipe is None or self._halted:
                    break
                self.restarts += 1
        except Exception as error:  # a thread has nobody above it: the fleet's status must show it
            if self._session.alive():
                log.exception("a slot of the fleet broke")
            self._give_up(error)
            if self.replica is not None:
                self.replica.end(timeout=LOST_S)
        finally:
            self._tell()

    def _next_replica(self, recipe: Recipe) -> Replica | None:
        """A built replica, after the pause that failures call for; None when the slot is stopped or gives up."""
        while not self._halted:
            pause = min(BACKOFF_S[0] * 2 ** (self._failures - 1), BACKOFF_S[1]) if self._failures else 0.0
            if self._stop.wait(pause):
                return None
            replica = self.replica = recipe.replica()
            self.born = time.monotonic()
            try:
                recipe.start(replica, self._stop)
            except Closed:
                return None
            except (MxRLError, RayError) as error:
                replica.gone = True
                self.reason = replica.reason = str(error)
                log.warning("replica %s did not start: %s", replica.name, error)
                no_room = isinstance(error, StartTimeout) and "requested" in error.fields
                if not self._was_built:
                    self._give_up(error)
                elif not no_room:  # a cluster may grow again, a broken build does not mend by waiting
                    self._fail(error)
                if self.error is not None:
                    return None
                self._tell()
            else:
                replica.built = self._was_built = True
                self.reason = ""
                return replica
        return None

    def _live(self, replica: Replica) -> None:
        """Until the slot stops or the replica is lost, to its end."""
        watch = Watch(replica, self._announced)
        lost = ""
        while not self._halted and not lost:
            lost = watch.look(_SLICE_S)
            replica.prune()
            if replica.version is not None:
                self._failures = 0
            elif not lost and self._wanted.is_set():
                watch.join()
            self._tell()
        if lost:
            replica.gone = True
            replica.reason = self.reason = lost
            log.warning("replica %s is lost: %s", replica.name, lost)
            error = ActorFailed(f"replica {replica.name}: {lost}", actor=replica.name, rank=None, text=lost)
            if self._recipe is None:
                self._give_up(error)
            elif replica.version is None:
                self._fail(error)
            self._tell()
        while not lost and self._session.alive() and not self._drain.over and replica.drain(_SLICE_S):
            self._tell()
        replica.end(timeout=LOST_S if lost else END_S)

    def _fail(self, error: BaseException) -> None:
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        self.reason = str(error)
        self.error = error if isinstance(error, MxRLError) else MxRLError(f"{type(error).__name__}: {error}")
