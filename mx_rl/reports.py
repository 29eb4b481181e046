"""What publish, wait and sync return: frozen, picklable, flat on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


def flat(report: Any) -> dict[str, Any]:
    """A dataclass as one level of plain values: nested figures become ``seconds.move`` and so on."""
    found: dict[str, Any] = {}
    for key, value in asdict(report).items():
        if isinstance(value, dict):
            found.update({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            found[key] = value
    return found


@dataclass(frozen=True, kw_only=True)
class Version:
    """A published version. ``wire_bytes`` is this rank's share, ``seconds`` its time by stage; ``kind`` is "full"."""

    number: int
    epoch: int
    step: int | None
    kind: str
    wire_bytes: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return flat(self)


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Who runs a version (or a newer one): names of replicas, and the reasons of those that failed."""

    version: int
    ready: bool
    installed: tuple[str, ...]
    failed: Mapping[str, str]
    missing: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return flat(self)


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What a sync did. ``kind``: "full", or "none" where nothing newer was there. Bytes are this rank's; ``seconds`` by
    stage, ``pause`` (the time in which holds were shut) apart. ``served_by`` maps a source to its bytes, ``source`` is
    what served most, ``refused`` maps a source to why it was not used. ``unproved``: the first 100 tensors of which the
    replica takes a box in part only, so that its bytes could not be verified."""

    version: int
    previous: int | None
    step: int | None
    kind: str
    source: str
    served_by: Mapping[str, int] = field(default_factory=dict)
    wire_bytes: int = 0
    model_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    lane: str = ""
    retries: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)
    unproved: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return flat(self)


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What one Publisher or Subscriber holds now, in bytes of resident memory; the formulas are in docs/memory.md.

    ``slots``: versions that a publisher keeps. ``stage``: where versions wait. ``swap``: the two arenas of ``swap=True``, of
    which one is the module's storage. ``live``: the caller's own tensors, where they are not in such an arena.
    ``headers``: headers, and what alignment to pages adds. ``quarantine``: stages that late bytes may still come into.

    Of the weights an install points at other storage ``swapped_bytes`` and copies ``copied_bytes``; with ``stage="none"``
    both are 0.
    """

    slots_bytes: int = 0
    stage_bytes: int = 0
    swap_bytes: int = 0
    live_bytes: int = 0
    headers_bytes: int = 0
    quarantine_bytes: int = 0
    swapped_bytes: int = 0
    copied_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Of all kinds of memory."""
        own = self.slots_bytes + self.stage_bytes + self.swap_bytes + self.headers_bytes + self.quarantine_bytes
        return own + self.live_bytes

    def as_dict(self) -> dict[str, Any]:
        return flat(self) | {"total_bytes": self.total_bytes}
