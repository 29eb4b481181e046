"""Who holds which version: the state machine and its homes."""

from __future__ import annotations

import logging
import sys

from mx_rl.config import registry_url
from mx_rl.errors import InvalidArgument
from mx_rl.registry.base import Registry

__all__ = ["Registry", "open_registry"]


def open_registry(registry: Registry | str | None) -> Registry:
    """A Registry from what users pass: an object, a URL, or None (``MXRL_REGISTRY``, else Ray where it is up, else
    memory).

    URLs: "ray", "ray://name", "memory". Raises InvalidArgument for others.
    """
    if isinstance(registry, Registry):
        return registry
    url = registry_name(registry)
    if url == "memory":
        from mx_rl.registry.memory import MemoryRegistry

        return MemoryRegistry.shared()
    if url == "ray" or url.startswith("ray://"):
        from mx_rl.registry.ray_actor import RayRegistry

        return RayRegistry(url)
    scheme = url.partition("://")[0]
    raise InvalidArgument(f'registry={scheme!r}: this release knows "ray", "ray://name" and "memory"')


def registry_name(registry: Registry | str | None) -> str:
    """The URL that ``open_registry`` would open; an object's own is its address: two objects are two registries."""
    if isinstance(registry, Registry):
        return f"{registry.url}#{id(registry)}"
    return registry or registry_url() or _default_url()


def _default_url() -> str:
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return "ray"
    logging.getLogger("mx_rl").warning(
        "no registry given and Ray is not up: using this process's memory, which no other process sees; "
        'pass registry="ray" or set MXRL_REGISTRY'
    )
    return "memory"
