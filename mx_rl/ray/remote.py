"""Waiting for the ranks of one call, and turning what Ray raises into our errors with rank and remote text."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    OwnerDiedError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from mx_rl.errors import ActorFailed, Closed, MxRLError
from mx_rl.ray.deadline import Deadline
from mx_rl.ray.session import get, wait

DEATHS = (RayActorError, WorkerCrashedError, ObjectLostError, OwnerDiedError)
"""What Ray raises when the process or the node at the other end is gone, and another one may do the work."""

SETTLE_S = 1.0
"""After the first failure the other ranks have so long to say what they saw: the rank that was first to raise is often
only the one that noticed another's death."""

_SLICE_S = 0.5
_COLOURS = re.compile("\x1b\\[[0-9;]*m")


@dataclass(kw_only=True)
class Gathered:
    """What each key's reference came to. A key that is in neither had not answered."""

    values: dict[Any, Any] = field(default_factory=dict)
    errors: dict[Any, BaseException] = field(default_factory=dict)
    pending: dict[Any, Any] = field(default_factory=dict)


def gather(
    refs: Mapping[Any, Any],
    *,
    deadline: Deadline,
    settle: float | None = SETTLE_S,
    abort: threading.Event | None = None,
) -> Gathered:
    """Wait for references, keyed by whatever the caller likes, to the deadline, or ``settle`` seconds beyond the first
    failure (None: to the deadline all the same). Never raises what a reference holds; Closed once ``abort`` is set."""
    found = Gathered(pending=dict(refs))
    keys = {ref: key for key, ref in refs.items()}
    until = deadline
    while found.pending:
        done, _ = wait(list(found.pending.values()), num_returns=1, timeout=min(_SLICE_S, until.left))
        for ref in done:
            key = keys[ref]
            del found.pending[key]
            value, error = fetch(ref, deadline=deadline)
            if error is None:
                found.values[key] = value
            else:
                found.errors[key] = error
        if abort is not None and abort.is_set():
            raise Closed("closed while it was starting")
        if found.errors and settle is not None and until is deadline:
            until = Deadline(min(settle, deadline.left))
        if not done and until.over:
            break
    return found


def fetch(ref: Any, *, deadline: Deadline) -> tuple[Any, BaseException | None]:
    """The value of a finished call, or what it raised."""
    try:
        # The call is over; what is left is at most the copy of a large result from another node.
        return get(ref, timeout=max(deadline.left, 5.0)), None
    except (RayError, GetTimeoutError) as error:
        return None, error
    except Exception as error:  # noqa: BLE001 - Ray raises the user's class where it cannot derive from it
        return None, error


def failure(error: BaseException, *, actor: str, rank: int, doing: str) -> MxRLError:
    """Our error for what a remote call raised: an MxRLError keeps its class and fields (its ``__cause__`` has rank and
    text), anything else is ActorFailed, with the user's own exception as ``__cause__`` where it could be rebuilt."""
    if isinstance(error, MxRLError) and not isinstance(error, RayError):
        return error
    text = _COLOURS.sub("", str(error)).strip()
    if isinstance(error, DEATHS):
        why = _last_line(text) if "in its creation task" in text else cause_of_death(error)
        failed = ActorFailed(f"rank {rank} of {actor} died in {doing}: {why}", actor=actor, rank=rank, text=text)
        failed.__cause__ = error
        return failed
    cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else error
    if isinstance(cause, ActorFailed) and "stands_for" in cause.fields:  # could not be rebuilt here, and came as text
        text = cause.fields.get("text", text)
        return ActorFailed(f"rank {rank} of {actor} raised in {doing}: {cause}", actor=actor, rank=rank, text=text)
    what = f"{type(cause).__name__}: {cause}" if cause is not None else _last_line(text)
    failed = ActorFailed(f"rank {rank} of {actor} raised in {doing}: {what}", actor=actor, rank=rank, text=text)
    if isinstance(cause, MxRLError):
        cause.__cause__ = failed
        return cause
    failed.__cause__ = cause
    return failed


def cause_of_death(error: BaseException) -> str:
    """One line of what Ray says: its first only says that the actor died, and the last guesses at common causes."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    telling = next((line for line in lines if "dead because" in line), lines[0] if lines else type(error).__name__)
    return telling.partition(" Some common causes")[0]


def died(error: BaseException) -> bool:
    """Whether the process is gone, rather than the call having raised."""
    return isinstance(error, DEATHS)


def most_telling(errors: Mapping[int, BaseException]) -> int:
    """The rank whose error explains the others': a death before an error, one that begins with itself (a user's error)
    before those that tell of other ranks."""

    def weight(rank: int) -> tuple[int, int]:
        error = errors[rank]
        cause = getattr(error, "cause", error)
        if died(error):
            return 0, rank
        if isinstance(cause, (ConnectionError, TimeoutError)) or type(cause).__name__ == "VersionAborted":
            return 2, rank
        return 1, rank

    return min(errors, key=weight)


def _last_line(text: str) -> str:
    return text.splitlines()[-1] if text else "no reason given"
