"""Watch: notices when a rank of a replica dies or falls silent, and brings a new replica to its first version."""

from __future__ import annotations

import time
from typing import Any

from ray.exceptions import ActorUnavailableError

from mx_rl.errors import RegistryLost
from mx_rl.ray.announced import Announced
from mx_rl.ray.deadline import Deadline
from mx_rl.ray.remote import cause_of_death, died, fetch, gather
from mx_rl.ray.replica import Replica, Round
from mx_rl.ray.session import wait

PULSE_S = 1.0
"""How often a rank is asked for its version; a death does not wait for this, it breaks a reference at once."""
SUSPECT_S = 3.0
"""A rank silent for so long is given no work until it answers."""
UNRESPONSIVE_S = 30.0
"""A rank silent for so long is taken for dead: an extension may hold the GIL for seconds."""
DOUBT_S = 2.0
"""A rank that Ray cannot reach has so long to answer."""
JOIN_S = 60.0
"""How long one sync of a new replica waits for a version; another follows."""


class Watch:
    """Notices when a rank of a replica dies or does not answer, and keeps what is known of the replica current."""

    def __init__(self, replica: Replica, announced: Announced | None) -> None:
        self._replica = replica
        self._announced = announced
        self._pulses: dict[int, tuple[Any, float]] = {}
        self._seen: dict[int, tuple[int | None, bool]] = {}
        self._doubts: dict[int, float] = {}  # rank to when Ray first said that it cannot be reached
        self._due = 0.0
        self._joining: Round | None = None
        self._rejoin = 0.0

    def look(self, timeout: float) -> str:
        """Wait up to ``timeout`` seconds for news. Why the replica is lost, or "" while it is not."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + PULSE_S
            for rank in range(self._replica.ranks.size):
                if rank not in self._pulses:
                    self._pulses[rank] = (self._replica.ranks.submit_to(rank, "pulse"), now)
        watches = {ref: rank for rank, ref in self._replica.ranks.watches().items()}
        pulses = {ref: rank for rank, (ref, _) in self._pulses.items()}
        refs = [*watches, *pulses, *self._unfinished()]
        done, _ = wait(refs, num_returns=1, timeout=timeout)
        for ref in done:
            lost = ""
            if ref in watches:
                lost = self._hear(watches[ref], ref, broken=True)
            elif ref in pulses:
                lost = self._hear(pulses[ref], ref, broken=False)
            if lost:
                return lost
        return self._overdue(time.monotonic())

    def join(self) -> None:
        """Bring a replica without a version to the newest there is; returns at once, and is called again and again."""
        if self._joining is None:
            if time.monotonic() >= self._rejoin and self._something_to_join():
                self._joining = self._replica.begin_round(None, JOIN_S)
        elif not self._unfinished():
            self._replica.end_round(gather(self._joining.refs, deadline=Deadline(1.0), settle=None))
            self._joining = None
            self._rejoin = time.monotonic() + PULSE_S

    def _something_to_join(self) -> bool:
        """Whether there is a version, where waiting for one would hold up an actor of the user's."""
        if self._announced is None:
            return True
        try:
            found = self._announced.newest() is not None
        except RegistryLost as error:
            self._replica.reason = str(error)
            found = False
        if not found:
            self._rejoin = time.monotonic() + PULSE_S
        return found

    def _unfinished(self) -> list[Any]:
        if self._joining is None:
            return []
        refs = list(self._joining.refs.values())
        _, unfinished = wait(refs, num_returns=len(refs), timeout=0)
        return list(unfinished)

    def _hear(self, rank: int, ref: Any, *, broken: bool) -> str:
        value, error = fetch(ref, deadline=Deadline(1.0))
        if not broken:
            del self._pulses[rank]
        if error is None and broken:
            return f"rank {rank} ended"
        if error is None:
            self._doubts.pop(rank, None)
            self._note(rank, value)
        elif isinstance(error, ActorUnavailableError):
            # The connection broke, which is not always the process: it has a moment to answer the next question.
            self._doubts.setdefault(rank, time.monotonic())
            self._due = time.monotonic() + 0.1
            if broken:
                self._replica.ranks.rewatch(rank)
        elif died(error):
            return f"rank {rank} died: {cause_of_death(error)}"
        else:
            self._replica.ready = False
            self._replica.reason = f"rank {rank}: {cause_of_death(error)}"
        return ""

    def _note(self, rank: int, pulse: tuple[int | None, bool]) -> None:
        replica = self._replica
        self._seen[rank] = pulse
        if rank == 0 and pulse[0] is not None:
            replica.version = max(pulse[0], pulse[0] if replica.version is None else replica.version)
        if len(self._seen) == replica.ranks.size and replica.version is not None:
            # A pulse from before the last install says nothing about it.
            current = [
                ready for version, ready in self._seen.values() if version is not None and version >= replica.version
            ]
            if current:
                replica.ready = all(current)

    def _overdue(self, now: float) -> str:
        replica = self._replica
        for rank, since in self._doubts.items():
            if now - since > DOUBT_S:
                return f"rank {rank} cannot be reached"
        silent = {rank: now - since for rank, (_, since) in self._pulses.items() if replica.ranks.answers}
        for rank, seconds in silent.items():
            if seconds > UNRESPONSIVE_S:
                return f"rank {rank} has not answered for {seconds:.0f} s"
        replica.suspect = bool(self._doubts) or any(seconds > SUSPECT_S for seconds in silent.values())
        return ""
