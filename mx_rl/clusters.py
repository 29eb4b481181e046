"""The registries of a Ray cluster, seen from a process that is no part of any job on it."""

from __future__ import annotations

import logging
import os
from typing import Any

from mx_rl.deadline import within
from mx_rl.errors import InvalidArgument, RegistryLost, missing_extra
from mx_rl.registry.ray_actor import DEFAULT_NAME, SHARED_NAMESPACE, RayRegistry


class FoundRegistry(RayRegistry):
    """A registry that another job made: its namespace is not this process's."""

    def __init__(self, url: str, namespace: str) -> None:
        super().__init__(url)
        self._namespace = namespace

    def namespace(self) -> str:
        return self._namespace


def join_cluster(*, timeout: float) -> str:
    """Connect to the cluster of ``RAY_ADDRESS``, else the one started last on this machine; returns its address.

    Raises MissingExtra, RegistryLost where no cluster runs or none answers in ``timeout`` seconds.
    """
    try:
        import ray
    except ImportError as exc:
        raise missing_extra("ray", "ray") from exc

    def join() -> str:
        if not ray.is_initialized():
            ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
        return str(ray.get_runtime_context().gcs_address)

    try:
        return within(timeout, join, what="Ray")
    except TimeoutError:
        where = os.environ.get("RAY_ADDRESS")
        place = f"at RAY_ADDRESS={where}" if where else "where the last one on this machine was started"
        raise RegistryLost(f"no Ray cluster answers {place} within {timeout:g} s") from None
    except (ConnectionError, RuntimeError, ValueError) as exc:
        where = os.environ.get("RAY_ADDRESS")
        problem = f"RAY_ADDRESS={where} cannot be joined: {exc}" if where else "no Ray cluster runs on this machine"
        raise RegistryLost(f"{problem}; run this on a node of the cluster, or set RAY_ADDRESS to it") from exc


def find_registries(url: str) -> list[FoundRegistry]:
    """Living registries that ``url`` ("ray" or "ray://name") means, whatever job made them. None is made.

    "ray" without a name has one registry in each job's namespace, so it may mean several.
    """
    import ray

    if url != "ray" and not url.startswith("ray://"):
        raise InvalidArgument(f'registry={url!r}: "ray" or "ray://name"')
    name = url.partition("://")[2]
    rows: list[dict[str, Any]] = ray.util.list_named_actors(all_namespaces=True)
    if name:
        return [FoundRegistry(url, SHARED_NAMESPACE)] if _listed(rows, name, SHARED_NAMESPACE) else []
    return [FoundRegistry("ray", row["namespace"]) for row in rows if row["name"] == DEFAULT_NAME] + [
        FoundRegistry(f"ray://{row['name']}", SHARED_NAMESPACE)
        for row in rows
        if row["namespace"] == SHARED_NAMESPACE and row["name"] != DEFAULT_NAME
    ]


def _listed(rows: list[dict[str, Any]], name: str, namespace: str) -> bool:
    return any(row["name"] == name and row["namespace"] == namespace for row in rows)
