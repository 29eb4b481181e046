"""Saying goodbye for members that died: else the registry, and whoever waits for installs, waits a lease for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mx_rl.errors import RegistryLost
from mx_rl.records import Leave
from mx_rl.registry import open_registry

log = logging.getLogger("mx_rl.ray")

_TIMEOUT_S = 2.0


def leave_for(incarnations: Sequence[str], *, policy: str, registry: str | None) -> None:
    """Take these members out of the registry. Their processes must have ended. One that cannot be reached is not waited
    for: the lease does the same later."""
    if not incarnations:
        return
    door = open_registry(registry)
    try:
        for incarnation in incarnations:
            door.call(Leave(policy=policy, incarnation=incarnation), timeout=_TIMEOUT_S)
    except RegistryLost as error:
        log.warning("policy %s: the registry could not be told of dead members: %s", policy, error)
    finally:
        door.close()
