"""Arguments that groups and fleets share, checked in the caller's process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from mx_rl.config import registry_url
from mx_rl.errors import InvalidArgument


def check_size(name: str, size: int, *, least: int = 1) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < least:
        raise InvalidArgument(f"{name}={size!r}: a whole number of at least {least}")


def endpoint_options(
    what: str, options: Mapping[str, Any] | None, registry: str | None, *, ours: set[str]
) -> dict[str, Any]:
    """The keyword arguments of a Publisher or Subscriber in an actor, the registry's URL among them."""
    clash = sorted(set(options or {}) & ours)
    if clash:
        raise InvalidArgument(f"{what}={clash}: set by the group itself")
    url = registry if registry is not None else registry_url()
    if url is not None and (not isinstance(url, str) or url == "memory"):
        raise InvalidArgument(f'registry={url!r}: a URL that other processes reach, e.g. "ray" or "redis://host"')
    if not ray.is_initialized():
        ray.init()
    return {**(options or {}), "registry": url}
