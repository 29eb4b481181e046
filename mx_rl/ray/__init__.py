"""Trainer worlds and rollout fleets as Ray actors. No weights go through Ray."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mx_rl.ray.actors import Rollout, Trainer
    from mx_rl.ray.fleet import RolloutFleet
    from mx_rl.ray.group import TrainerGroup
    from mx_rl.ray.report import FleetReport

__all__ = ["FleetReport", "Rollout", "RolloutFleet", "Trainer", "TrainerGroup"]

_HOMES = {
    "FleetReport": "mx_rl.ray.report",
    "Rollout": "mx_rl.ray.actors",
    "RolloutFleet": "mx_rl.ray.fleet",
    "Trainer": "mx_rl.ray.actors",
    "TrainerGroup": "mx_rl.ray.group",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
