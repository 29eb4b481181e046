"""Which version a sync asks for: the forms of its arguments, and the error where none comes in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from mx_rl.errors import InvalidArgument, NotReady
from mx_rl.records import Nothing
from mx_rl.reports import Version

Number: TypeAlias = "int | Version | None"


def number_of(version: Number) -> int | None:
    return version.number if isinstance(version, Version) else version


def not_ready(policy: str, found: Nothing, at_least: int | None, exactly: int | None) -> NotReady:
    """Says what was wanted, what there is, and which trainer ranks have not committed."""
    wanted = "a version"
    if exactly is not None or at_least is not None:
        wanted = f"version {exactly}" if exactly is not None else f"a version of at least {at_least}"
    text = f"policy {policy!r}: {wanted} did not become READY in time; newest READY is {found.latest or 'none'}"
    if found.staging:
        text += f"; version {found.staging} waits for trainer rank(s) {', '.join(map(str, found.missing))}"
    if found.lost:
        text += f"; version {found.lost} is READY but no living source holds it whole"
    return NotReady(text, latest=found.latest or None, missing=list(found.missing))


def check_arguments(replica: str | None, rank: int, world_size: int, sources: Sequence[str]) -> None:
    if world_size < 1 or not 0 <= rank < world_size:
        raise InvalidArgument(f"rank={rank} of world_size={world_size}: rank must be 0 to world_size - 1")
    if world_size > 1 and replica is None:
        raise InvalidArgument(f"world_size={world_size} without replica=: give all ranks of one engine one name")
    unknown = [source for source in sources if source not in ("peer", "trainer")]
    if unknown or not sources:
        raise InvalidArgument(f'sources={tuple(sources)!r}: this release knows "peer" and "trainer"')


def check_modes(stage: str, serve: str, swap: bool, prefetch: bool) -> None:
    """Which memory modes exist, and which go together."""
    if stage not in ("device", "host", "none"):
        raise InvalidArgument(f'stage={stage!r}: takes "device", "host" or "none"')
    if serve not in ("stage", "live", "off"):
        raise InvalidArgument(f'serve={serve!r}: takes "stage", "live" or "off"')
    if stage == "none" and serve == "stage":
        raise InvalidArgument('serve="stage" with stage="none": there is no stage; give serve="live" or "off"')
    if stage == "none" and prefetch:
        raise InvalidArgument('prefetch=True with stage="none": nothing waits there; give stage="device" or "host"')
    if swap and stage == "none":
        raise InvalidArgument('swap=True with stage="none": a swap needs memory to fill; give stage="device" or "host"')
    if swap and serve == "live":
        raise InvalidArgument(
            'swap=True with serve="live": what was swapped in is the stage; give serve="stage" or "off"'
        )
