"""Every error that mx-rl raises, grouped by what the caller can do about it.

MxRLError
|-- retry:     PeerLost -- StaleIncarnation
|              RegistryLost
|              ActorFailed
|              DigestMismatch
|-- wait:      NotReady
|              IncompleteVersion
|              VersionGone
|              StartTimeout
|              HoldTimeout
|              CallTimeout
|              Busy -- Paused
|-- fix input: InvalidArgument
|              TensorUnavailable
|              NameCollision
|              LayoutMismatch -- MissingTensors, UnexpectedTensors, ShapeMismatch, DtypeMismatch,
|                                OverlapMismatch, CoverageMismatch, AliasConflict, ReplicaMismatch
|              StepMismatch
|              CorruptRecord
|              MissingExtra
`-- stop:      StaleVersion
               Fenced
               SeatTaken
               VersionAborted
               Tainted
               Closed
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class MxRLError(Exception):
    """Root of the tree. ``fields`` are plain values that survive pickling; each is an attribute too."""

    def __init__(self, message: str, /, **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), str(self), self.fields))

    def as_dict(self) -> dict[str, Any]:
        # ray.get raises a class that it derives from ours on the spot, with ours as its ``cause``.
        cause = getattr(self, "cause", None)
        told = cause if isinstance(cause, MxRLError) else self
        return {"error": type(told).__name__, "message": str(told), **told.fields}


def _rebuild(kind: type[MxRLError], message: str, fields: dict[str, Any]) -> MxRLError:
    return kind(message, **fields)


class PeerLost(MxRLError, ConnectionError):
    """The process at the other end is dead or does not answer. Field: ``peer``."""


class StaleIncarnation(PeerLost):
    """The memory belongs to another process start than the record says. Field: ``peer``."""


class RegistryLost(MxRLError, ConnectionError):
    """The registry did not answer within the time given."""


class ActorFailed(MxRLError, RuntimeError):
    """A Ray actor died or raised. Fields: ``actor``, ``rank``, ``text`` (the remote traceback)."""


class DigestMismatch(MxRLError, RuntimeError):
    """Bytes that arrived are not those that were published, and no other source has them; the version was not installed.
    Fields: ``version``, ``tensors`` (names, as far as known)."""


class NotReady(MxRLError, TimeoutError):
    """No version that satisfies the call became READY in time. Fields: ``latest``, ``missing``."""


class IncompleteVersion(MxRLError, TimeoutError):
    """Not all ranks of a world or replica did their part in time. Fields: ``version``, ``missing``."""


class VersionGone(MxRLError, LookupError):
    """No living source has the version any more. Fields: ``version``."""


class StartTimeout(MxRLError, TimeoutError):
    """Actors could not be scheduled or built in time. Fields: ``requested``, ``available``."""


class HoldTimeout(MxRLError, TimeoutError):
    """An install waited for open holds in vain. Field: ``holds``."""


class CallTimeout(MxRLError, TimeoutError):
    """Actors were not done with a call in time; they go on with it. Fields: ``method``, ``missing``."""


class Busy(MxRLError, RuntimeError):
    """Another call is at work. Also for a ``before_install`` hook to raise when the engine cannot stop yet: it is called
    again until the deadline."""


class Paused(Busy):
    """The subscriber was paused, and writes nothing until ``resume``."""


class InvalidArgument(MxRLError, ValueError):
    """An argument is wrong; the message says which, what it got and what it takes."""


class TensorUnavailable(MxRLError, RuntimeError):
    """A tensor's storage is meta, freed, or resized to nothing. Field: ``names``."""


class NameCollision(MxRLError, ValueError):
    """Two tensors map to one name. Field: ``names``."""


class LayoutMismatch(MxRLError, ValueError):
    """Two sides disagree about tensors; a field for each kind: ``missing``, ``unexpected``, ``shapes``, ``dtypes``,
    ``overlaps``, ``uncovered``, ``aliases`` (lists of text lines, one a tensor)."""


class MissingTensors(LayoutMismatch, KeyError):
    """The subscriber needs names that the publisher lacks."""


class UnexpectedTensors(LayoutMismatch):
    """The publisher has names that no rank of the replica takes."""


class ShapeMismatch(LayoutMismatch):
    """Global shapes differ."""


class DtypeMismatch(LayoutMismatch, TypeError):
    """The destination's dtype is not the wire's."""


class OverlapMismatch(LayoutMismatch):
    """Boxes of one tensor overlap without being equal."""


class CoverageMismatch(LayoutMismatch):
    """Some elements of a declared tensor are held by no rank."""


class AliasConflict(LayoutMismatch):
    """One storage would have to hold two different tensors."""


class ReplicaMismatch(LayoutMismatch):
    """Copies of one box differ between ranks. Fields: ``ranks``, ``version``, ``tensors`` (names, as far as known)."""


class StepMismatch(MxRLError, ValueError):
    """Ranks gave different ``step`` to one version. Fields: ``version``, ``steps``."""


class CorruptRecord(MxRLError, ValueError):
    """Bytes from the wire are no record that this release understands."""


class MissingExtra(MxRLError, ImportError):
    """An optional package is not installed. Field: ``extra``."""


class StaleVersion(MxRLError, ValueError):
    """The version offered is older than the one installed. Fields: ``installed``, ``offered``."""


class Fenced(MxRLError, PermissionError):
    """A newer world publishes this policy; this Publisher is finished. Fields: ``policy``, ``epoch``."""


class SeatTaken(MxRLError, PermissionError):
    """Another living process holds this (world, rank) or (replica, rank). Field: ``holder``."""


class VersionAborted(MxRLError, RuntimeError):
    """A version was given up, on this rank or another. Fields: ``version``, ``reason``."""


class Tainted(MxRLError, RuntimeError):
    """Live weights may be mixed; the next full sync heals them. Field: ``reason``."""


class Closed(MxRLError, RuntimeError):
    """The object was closed before the call."""


_KINDS: dict[str, type[LayoutMismatch]] = {
    "missing": MissingTensors,
    "unexpected": UnexpectedTensors,
    "shapes": ShapeMismatch,
    "dtypes": DtypeMismatch,
    "overlaps": OverlapMismatch,
    "uncovered": CoverageMismatch,
    "aliases": AliasConflict,
}


def layout_mismatch(subject: str, advice: str = "", /, **problems: Iterable[str]) -> LayoutMismatch:
    """One error for all problems of a layout: the kind's own class where there is only one kind, else
    ``LayoutMismatch``.

    ``problems`` maps a key of ``LayoutMismatch`` to text lines; the message lists the first ten of each and the count.
    """
    found = {kind: list(lines) for kind, lines in problems.items()}
    found = {kind: lines for kind, lines in found.items() if lines}
    if not found:
        raise AssertionError("layout_mismatch needs at least one problem")
    parts = []
    for kind, lines in found.items():
        more = f" and {len(lines) - 10} more" if len(lines) > 10 else ""
        parts.append(f"{len(lines)} {kind}: {'; '.join(lines[:10])}{more}")
    message = f"{subject}: {'. '.join(parts)}" + (f". {advice}" if advice else "")
    kind_class = _KINDS[next(iter(found))] if len(found) == 1 else LayoutMismatch
    return kind_class(message, **found)


def missing_extra(extra: str, package: str) -> MissingExtra:
    return MissingExtra(f"{package} is not installed: pip install 'mx-rl[{extra}]'", extra=extra, package=package)
