"""Work for a fleet: one item a call, to the least loaded replica, again elsewhere when a replica dies."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mx_rl.errors import ActorFailed, CallTimeout, Closed, NotReady
from mx_rl.ray.deadline import Deadline
from mx_rl.ray.remote import died, failure, fetch
from mx_rl.ray.replica import Replica
from mx_rl.ray.session import wait
from mx_rl.ray.slot import Slot

MAX_DEATHS = 3
"""An item in whose call so many replicas died is not tried again: it may be what kills them."""

_SLICE_S = 0.25


class Roster:
    """The slots of a fleet, and who takes the next call."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.wanted = threading.Event()
        self.slots: list[Slot] = []
        self.closed = False

    def replicas(self) -> list[Replica]:
        """Those whose ranks take calls."""
        return [slot.replica for slot in list(self.slots) if slot.replica is not None and slot.replica.live]

    def send(self, method: str, /, *args: Any, **kwargs: Any) -> tuple[Replica, Any] | None:
        """Call the least loaded replica that serves and has room; None where there is none at the moment."""
        with self.changed:
            free = [replica for replica in self.replicas() if replica.serving and replica.has_room]
            for replica in sorted(free, key=lambda each: (each.load, each.sent)):
                try:
                    return replica, replica.send(method, *args, **kwargs)
                except Closed:  # it ended between the two lines
                    continue
        return None

    def states(self) -> dict[str, str]:
        """Name to state with its reason, for errors."""
        found = {}
        for slot in list(self.slots):
            if slot.replica is not None:
                reason = slot.replica.reason or slot.reason
                state = "failed" if slot.error is not None else slot.replica.state
                found[slot.replica.name] = f"{state}: {reason.splitlines()[0]}" if reason else state
        return found

    def hopeless(self) -> Slot | None:
        """A slot that is down for good, where all are."""
        slots = list(self.slots)
        return slots[0] if slots and all(slot.error is not None for slot in slots) else None


@dataclass(kw_only=True)
class _Work:
    index: int
    item: Any
    deaths: int = 0


def dispatch(
    roster: Roster,
    method: str,
    items: Iterable[Any],
    *,
    kwargs: Mapping[str, Any],
    deadline: Deadline,
    check: Callable[[], None],
) -> Iterator[tuple[int, Any, int | None]]:
    """Yield (index of the item, result, version it was computed with) as results come. Items are drawn as replicas
    become free. ``check`` raises when the fleet was closed.

    Raises ActorFailed where the method raised (its exception is the ``__cause__``), where ``MAX_DEATHS`` replicas died
    in the call of one item, or where every replica is down for good; NotReady where no replica holds a version by the
    deadline; CallTimeout where calls are not done by then.
    """
    source = enumerate(items)
    again: deque[_Work] = deque()
    running: dict[Any, tuple[_Work, Replica]] = {}
    drawn = True
    while True:
        check()
        while drawn or again:
            work = again.popleft() if again else _draw(source)
            if work is None:
                drawn = False
                break
            sent = roster.send(method, work.item, **kwargs)
            if sent is None:
                again.appendleft(work)
                break
            replica, ref = sent
            running[ref] = work, replica
        if not (running or again or drawn):
            return
        _expect(roster, method, running, again, deadline)
        if not running:
            with roster.changed:
                roster.changed.wait(min(_SLICE_S, deadline.left))
            continue
        done, _ = wait(list(running), num_returns=1, timeout=min(_SLICE_S, deadline.left))
        for ref in done:
            work, replica = running.pop(ref)
            value, error = fetch(ref, deadline=deadline)
            replica.done(ref)
            if error is None:
                result, version = value
                yield work.index, result, version
            else:
                _retry(work, replica, error, method)
                again.append(work)


def _draw(source: Iterator[tuple[int, Any]]) -> _Work | None:
    for index, item in source:
        return _Work(index=index, item=item)
    return None


def _retry(work: _Work, replica: Replica, error: BaseException, method: str) -> None:
    """Raise what another replica would not mend."""
    failed = failure(error, actor=replica.ranks.title, rank=0, doing=method)
    if not died(error):
        raise failed
    replica.suspect = True  # until its slot has looked: the next item goes elsewhere
    work.deaths += 1
    if work.deaths >= MAX_DEATHS:
        raise ActorFailed(
            f"{method} of item {work.index}: {work.deaths} replicas died in this call, the last: {failed}",
            actor=replica.ranks.title,
            rank=0,
            text=failed.fields.get("text", ""),
            index=work.index,
        ) from error


def _expect(
    roster: Roster, method: str, running: Mapping[Any, tuple[_Work, Replica]], again: deque[_Work], deadline: Deadline
) -> None:
    """Raise where nothing more can come."""
    hopeless = roster.hopeless()
    if hopeless is not None:
        raise ActorFailed(
            f"no replica is left for {method}: {hopeless.reason}", actor="", rank=None, text=hopeless.reason
        )
    if not deadline.over:
        return
    states = roster.states()
    if not running and not any(replica.serving for replica in roster.replicas()):
        raise NotReady(
            f"no replica holds a version for {method} in {deadline.timeout:g} s: {states}",
            latest=None,
            missing=sorted(states),
        )
    late = sorted([work.index for work, _ in running.values()] + [work.index for work in again])
    raise CallTimeout(
        f"{method} was not done in {deadline.timeout:g} s for {len(late)} of the items begun (the first: {late[:10]}); "
        f"replicas: {states}",
        method=method,
        missing=late,
    )
