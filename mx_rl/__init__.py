"""mx-rl: the weight plane for reinforcement-learning post-training on Ray."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mx_rl.config import Options
    from mx_rl.errors import MxRLError
    from mx_rl.publisher import Publisher
    from mx_rl.reports import MemoryReport, Receipt, SyncReport, Version
    from mx_rl.staged import Staged
    from mx_rl.status import connect
    from mx_rl.subscriber import Subscriber
    from mx_rl.tensors import Shard, shards

__version__ = "0.1.0.dev0"

__all__ = [
    "MemoryReport",
    "MxRLError",
    "Options",
    "Publisher",
    "Receipt",
    "Shard",
    "Staged",
    "Subscriber",
    "SyncReport",
    "Version",
    "connect",
    "shards",
]

_HOMES = {
    "MemoryReport": "reports",
    "MxRLError": "errors",
    "Options": "config",
    "Publisher": "publisher",
    "Receipt": "reports",
    "Shard": "tensors",
    "Staged": "staged",
    "Subscriber": "subscriber",
    "SyncReport": "reports",
    "Version": "reports",
    "connect": "status",
    "shards": "tensors",
}


def __getattr__(name: str) -> Any:
    """Torch, Ray and NIXL are imported with the first name that needs them, not with the package."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'mx_rl' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mx_rl.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
