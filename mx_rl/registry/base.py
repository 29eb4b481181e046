"""The control plane's contract: who holds which version. Weight bytes never pass through here."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mx_rl.records import Answer, AnyCommand


class Registry(ABC):
    """A door to one registry, shared by everything in a process. Thread-safe.

    Commands are idempotent: one whose answer was lost is sent again as it is. An answer with ``Refused`` is returned,
    not raised; ``call`` raises only what the door itself suffers.
    """

    url: str

    @abstractmethod
    def call(self, command: AnyCommand, *, timeout: float) -> Answer:
        """Run one command. Where ``command.wait`` > 0 the registry may hold the answer for so long.

        Raises RegistryLost when no answer came within ``timeout`` seconds (more than ``command.wait``), having
        reconnected and sent the command again as often as fits. Nothing is known then about what the registry did.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what this door holds. Idempotent; ends no registry that others may use."""
