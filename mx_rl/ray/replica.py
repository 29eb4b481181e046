"""Replica: one replica of a fleet as the fleet's process knows it: its ranks, what it runs, and what it is doing."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mx_rl.errors import MxRLError
from mx_rl.ray.deadline import Deadline
from mx_rl.ray.host import Location
from mx_rl.ray.ranks import Ranks
from mx_rl.ray.remote import Gathered
from mx_rl.ray.session import wait

if TYPE_CHECKING:
    from mx_rl.reports import SyncReport


@dataclass(frozen=True, kw_only=True)
class Round:
    """One sync under way on every rank."""

    at_least: int | None
    refs: Mapping[int, Any]


class Replica:
    """Its slot's thread and the fleet's calls write the fields, each by one assignment: readers need no lock."""

    def __init__(self, ranks: Ranks, *, concurrency: int) -> None:
        self.name = ranks.name
        self.ranks = ranks
        self.built = False
        self.version: int | None = None
        self.ready = False
        self.suspect = False
        self.draining = False
        self.gone = False
        self.reason = ""
        self.sent = 0  # user calls ever sent here: breaks ties between equally loaded replicas
        self._concurrency = concurrency
        self._calls: set[Any] = set()
        self._together: set[Any] = set()  # those of them that run on every rank
        self._lock = threading.Lock()
        self._round: Round | None = None

    @property
    def locations(self) -> tuple[Location, ...]:
        return self.ranks.locations

    @property
    def live(self) -> bool:
        """Its ranks take calls, whether or not they hold a version."""
        return self.built and not self.gone and not self.draining

    @property
    def serving(self) -> bool:
        """It may be given work: it holds a version, and it answers."""
        return self.live and self.ready and self.version is not None and not self.suspect

    @property
    def state(self) -> str:
        for name, holds in (
            ("lost", self.gone),
            ("draining", self.draining),
            ("starting", not self.built),
            ("suspect", self.suspect),
            ("ready", self.serving),
            ("waiting", self.version is None),
        ):
            if holds:
                return name
        return "unready"  # tainted or paused

    # ---- user calls --------------------------------------------------------------------------------------------------

    @property
    def load(self) -> int:
        return len(self._calls)

    @property
    def has_room(self) -> bool:
        return len(self._calls) < self._concurrency

    def send(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call rank 0; the reference gives (result, version)."""
        ref = self.ranks.submit_to(0, "call_stamped", method, *args, **kwargs)
        self.sent += 1
        with self._lock:
            self._calls.add(ref)
        return ref

    def send_all(self, method: str, deadline: Deadline, /, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """Call every rank, which may meet in collectives, at a time when no round is under way: a rank whose holds are
        shut would let the others wait in the call, and so their holds, for ever."""
        while True:
            with self._lock:
                unfinished = self._unfinished_round()
                if self.ranks.size == 1 or not unfinished or deadline.over:
                    refs = self.ranks.submit("call", method, *args, **kwargs)
                    self._calls.update(refs.values())
                    self._together.update(refs.values())
                    return refs
            wait(unfinished, num_returns=len(unfinished), timeout=deadline.left)

    def done(self, ref: Any) -> None:
        with self._lock:
            self._calls.discard(ref)
            self._together.discard(ref)

    def prune(self) -> None:
        """Forget finished calls that nobody waits for any more."""
        with self._lock:
            calls = list(self._calls)
        if calls:
            finished, _ = wait(calls, num_returns=len(calls), timeout=0)
            with self._lock:
                self._calls.difference_update(finished)
                self._together.difference_update(finished)

    def drain(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the calls that run; none is sent any more. Whether some run still."""
        self.draining = True
        with self._lock:
            calls = list(self._calls)
        if not calls:
            return False
        _, unfinished = wait(calls, num_returns=len(calls), timeout=timeout)
        return bool(unfinished)

    # ---- versions ----------------------------------------------------------------------------------------------------

    def begin_round(self, at_least: int | None, timeout: float) -> Round:
        """Start a sync on every rank, or take part in the one that is under way."""
        with self._lock:
            if self._round is not None and self._unfinished_round():
                return self._round
            # Behind calls in which ranks wait for one another, in the one order that all ranks see; else beside calls,
            # so that bytes move while they run.
            in_turn = self.ranks.size > 1 and bool(self._together)
            refs = self.ranks.submit("sync_in_turn" if in_turn else "sync", at_least, timeout)
            self._round = Round(at_least=at_least, refs=refs)
            return self._round

    def _unfinished_round(self) -> list[Any]:
        if self._round is None:
            return []
        refs = list(self._round.refs.values())
        _, unfinished = wait(refs, num_returns=len(refs), timeout=0)
        return list(unfinished)

    def end_round(self, found: Gathered) -> SyncReport | MxRLError | None:
        """What a round came to on all ranks: rank 0's report, the error that explains the others, or None while some
        rank has not answered."""
        if found.errors:
            error = self.ranks.error(found.errors, doing="sync")
            self.reason = str(error)
            return error
        if found.pending:
            return None
        report: SyncReport = found.values[0]
        self.version = report.version
        self.ready = True
        self.reason = ""
        return report

    def end(self, *, timeout: float) -> None:
        """End what is left of it, with ``timeout`` seconds for leaving in order; the name is never used again."""
        self.gone = True
        self.ready = False
        self.ranks.end(timeout=timeout)
        with self._lock:
            self._calls.clear()
            self._together.clear()
