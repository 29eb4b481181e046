"""One target for every replica of a fleet: who installed it, who failed, who did not answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mx_rl.errors import Closed, MxRLError, NotReady
from mx_rl.ray.deadline import Deadline
from mx_rl.ray.dispatch import Roster
from mx_rl.ray.remote import Gathered, failure, fetch, gather
from mx_rl.ray.replica import Replica, Round
from mx_rl.ray.report import FleetReport
from mx_rl.ray.session import wait

if TYPE_CHECKING:
    from mx_rl.reports import SyncReport

_SLICE_S = 0.25
_MARGIN_S = 2.0  # a rank raises at its own timeout; the answer then has to come back


def sync_all(roster: Roster, *, at_least: int | None, deadline: Deadline, check: Callable[[], None]) -> FleetReport:
    """See ``RolloutFleet.sync``."""
    replicas = _live(roster, deadline, check)
    target = at_least if at_least is not None else _first_version(roster, deadline, check)
    reports, errors = _run(replicas, target, deadline, check)
    if not reports and errors and all(isinstance(error, NotReady) for error in errors.values()):
        raise next(iter(errors.values()))
    failed = {replica.name: str(error) for replica, error in errors.items()}
    answered = {replica.name for replica in reports} | set(failed)
    missing = []
    for slot in list(roster.slots):
        if slot.replica is None or slot.stopping or slot.replica.name in answered:
            continue
        if slot.error is not None:
            failed[slot.replica.name] = slot.reason
        elif slot.replica in replicas or not slot.replica.live:
            missing.append(slot.replica.name)
    return FleetReport(
        version=target,
        installed=tuple(sorted(replica.name for replica in reports)),
        failed=failed,
        missing=tuple(sorted(missing)),
        reports={replica.name: report for replica, report in reports.items()},
    )


def newest(roster: Roster, deadline: Deadline) -> int | None:
    """The newest READY version that any replica can name, or None. Raises the replicas' error where none answers."""
    asked = {}
    for replica in roster.replicas()[:3]:
        try:
            asked[replica] = replica.ranks.submit_to(0, "latest")
        except Closed:
            continue
    found = gather(asked, deadline=deadline, settle=None)
    if not found.values and found.errors:
        replica, error = next(iter(found.errors.items()))
        raise failure(error, actor=replica.ranks.title, rank=0, doing="latest")
    return max((number for number in found.values.values() if number is not None), default=None)


def _live(roster: Roster, deadline: Deadline, check: Callable[[], None]) -> list[Replica]:
    """Replicas whose ranks take calls, at least one."""
    while not (replicas := roster.replicas()):
        check()
        if deadline.over or not roster.slots or roster.hopeless() is not None:
            states = roster.states()
            raise NotReady(
                f"no replica can install a version: {states or 'the fleet has none'}",
                latest=None,
                missing=sorted(states),
            )
        with roster.changed:
            roster.changed.wait(min(_SLICE_S, deadline.left))
    return replicas


def _first_version(roster: Roster, deadline: Deadline, check: Callable[[], None]) -> int:
    pause = 0.02
    while True:
        check()
        number = newest(roster, Deadline(max(deadline.left, 1.0)))
        if number is not None:
            return number
        if deadline.over:
            raise NotReady(f"no version became READY in {deadline.timeout:g} s", latest=None, missing=[])
        time.sleep(min(pause, deadline.left))
        pause = min(2 * pause, 0.5)


def _run(
    replicas: list[Replica], target: int, deadline: Deadline, check: Callable[[], None]
) -> tuple[dict[Replica, SyncReport], dict[Replica, MxRLError]]:
    """Reports and errors by replica; in neither is who did not answer."""
    reports: dict[Replica, SyncReport] = {}
    errors: dict[Replica, MxRLError] = {}
    rounds: dict[Replica, Round] = {}
    found: dict[Replica, Gathered] = {}
    unanswered: dict[Any, tuple[Replica, int]] = {}

    def begin(replica: Replica) -> None:
        try:
            each = rounds[replica] = replica.begin_round(target, deadline.left)
        except Closed as error:  # it was ended a moment ago
            errors[replica] = error
            return
        found[replica] = Gathered(pending=dict(each.refs))
        unanswered.update({ref: (replica, rank) for rank, ref in each.refs.items()})

    for replica in replicas:
        begin(replica)
    until = Deadline(deadline.left + _MARGIN_S)
    while unanswered and not until.over:
        check()
        done, _ = wait(list(unanswered), num_returns=1, timeout=min(_SLICE_S, until.left))
        for ref in done:
            replica, rank = unanswered.pop(ref)
            part = found[replica]
            del part.pending[rank]
            value, error = fetch(ref, deadline=until)
            if error is None:
                part.values[rank] = value
            else:
                part.errors[rank] = error
            if part.pending:
                continue
            outcome = replica.end_round(part)
            behind = isinstance(outcome, MxRLError) or (outcome is not None and outcome.version < target)
            if behind and rounds[replica].at_least != target and not deadline.over:
                begin(replica)  # that was a round begun by another, for another target
            elif isinstance(outcome, MxRLError):
                errors[replica] = outcome
            elif outcome is not None:
                reports[replica] = outcome
    return reports, errors
