"""Look at a registry from outside: ``mx_rl.connect("ray").status("policy")``."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

from mx_rl.errors import CorruptRecord
from mx_rl.records import View, ViewOf
from mx_rl.registry import Registry, open_registry


class Connection:
    """A look at a registry; it is no member of anything."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def status(self, policy: str, *, timeout: float = 30.0) -> dict[str, Any]:
        """The state of one policy: floor, latest, epoch, world, seats, versions, replicas, leases. Raises
        RegistryLost."""
        return self._view(policy, timeout)

    def policies(self, *, timeout: float = 30.0) -> list[str]:
        found: list[str] = self._view("", timeout)["policies"]
        return found

    def _view(self, policy: str, timeout: float) -> dict[str, Any]:
        result = self._registry.call(View(policy=policy), timeout=timeout).result
        if not isinstance(result, ViewOf):
            raise CorruptRecord(f"the registry answered View with {type(result).__name__}: releases differ")
        view: dict[str, Any] = json.loads(result.json)
        return view

    def close(self) -> None:
        self._registry.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(registry: Registry | str | None = None) -> Connection:
    """Reach a registry by object or URL, as ``registry=`` of Publisher does."""
    return Connection(open_registry(registry))
