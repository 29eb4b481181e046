"""Where the actors of a world or replica run: one placement group of equal bundles, one a rank."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mx_rl.errors import Closed, InvalidArgument, StartTimeout
from mx_rl.ray.deadline import Deadline

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

_POLL_S = (0.01, 0.25)  # Ray's own wait takes whole seconds, in which a close would not be noticed
_NEXT_TO_NOTHING = {"memory": 1}  # bytes: Ray refuses empty bundles, and any part of a CPU would keep others from it


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one rank takes, and how ranks are spread: a strategy of Ray's or a user's own placement group."""

    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    placement: str | PlacementGroup = "PACK"
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        wanted = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, **self.resources}
        for name, amount in wanted.items():
            if not isinstance(amount, (int, float)) or amount < 0:
                raise InvalidArgument(f"{name}={amount!r}: a number of at least 0")
        if {"CPU", "GPU"} & set(self.resources):
            raise InvalidArgument(
                f"resources={dict(self.resources)}: CPU and GPU are asked for by num_cpus and num_gpus"
            )
        if not isinstance(self.placement, PlacementGroup) and self.placement not in STRATEGIES:
            raise InvalidArgument(f"placement={self.placement!r}: one of {', '.join(STRATEGIES)}, or a PlacementGroup")

    @property
    def bundle(self) -> dict[str, float]:
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in asked.items() if amount} or dict(_NEXT_TO_NOTHING)

    def describe(self, ranks: int) -> str:
        if isinstance(self.placement, str):
            return f"{ranks} x {self.bundle} ({self.placement})"
        return f"{ranks} x {self.bundle} (the given placement group, of bundles {self.placement.bundle_specs})"


class Placement:
    """A placement group with room for every rank."""

    def __init__(self, group: PlacementGroup, request: Request, ranks: int) -> None:
        self._group = group
        self._request = request
        self._owned = isinstance(request.placement, str)
        # A user's group of exactly one bundle a rank is taken in order; in any other Ray finds the bundle with room.
        self._in_order = self._owned or group.bundle_count == ranks

    def options(self, rank: int) -> dict[str, Any]:
        """Actor options that put ``rank`` into its bundle."""
        request = self._request
        options: dict[str, Any] = {
            "num_cpus": request.num_cpus,
            "num_gpus": request.num_gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, rank if self._in_order else -1),
        }
        if request.resources:
            options["resources"] = dict(request.resources)
        if request.runtime_env:
            options["runtime_env"] = dict(request.runtime_env)
        return options

    def release(self) -> None:
        """Give the resources back; a user's own placement group stays. Idempotent."""
        if self._owned and ray.is_initialized():
            self._owned = False
            remove_placement_group(self._group)


def place(request: Request, ranks: int, *, name: str, deadline: Deadline, abort: threading.Event) -> Placement:
    """Reserve room for ``ranks`` ranks. Raises StartTimeout, with nothing left reserved, or Closed after ``abort``."""
    given = request.placement
    if isinstance(given, PlacementGroup):
        group = given
        if not any(_fits(request.bundle, bundle) for bundle in group.bundle_specs):
            raise no_room(request, ranks, name=name, timeout=deadline.timeout)
    else:
        group = placement_group([request.bundle] * ranks, strategy=given, name=name)
    placement: Placement | None = None
    try:
        pause = _POLL_S[0]
        while not group.wait(0):
            if deadline.over:
                raise no_room(request, ranks, name=name, timeout=deadline.timeout)
            if abort.wait(min(pause, deadline.left)):
                raise Closed(f"{name} was closed while it waited for {request.describe(ranks)}")
            pause = min(2 * pause, _POLL_S[1])
        placement = Placement(group, request, ranks)
        return placement
    finally:
        if placement is None and isinstance(given, str) and ray.is_initialized():
            remove_placement_group(group)


def no_room(request: Request, ranks: int, *, name: str, timeout: float) -> StartTimeout:
    """The error of a request that found no room, with what the cluster has in all and free."""
    in_all, free = cluster_resources()
    return StartTimeout(
        f"{name}: no room for {request.describe(ranks)} in {timeout:g} s. The cluster has {in_all} in all and {free} "
        "free: ask for less, free some, or add nodes",
        requested=[request.bundle] * ranks,
        available=free,
        cluster=in_all,
    )


def cluster_resources() -> tuple[dict[str, float], dict[str, float]]:
    """What the cluster has in all, and what of it is free."""
    ask: Any = ray  # untyped functions
    return _plain(ask.cluster_resources()), _plain(ask.available_resources())


def _fits(request: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    return all(bundle.get(name, 0) >= amount for name, amount in request.items() if request != _NEXT_TO_NOTHING)


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    """Without Ray's own entries for nodes and placement groups."""
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if not name.startswith("node:") and "_group_" not in name
    }
