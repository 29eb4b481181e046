"""Where a version is brought for an install: the contract, and the stage in plan order that most subscribers have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from mx_rl.endpoint import Served
from mx_rl.install import Copies, Installer, Work
from mx_rl.landing import Landing
from mx_rl.plan import Plan
from mx_rl.tensors import Tensors, resolve

SLACK_SHARE = 64
SLACK_BYTES = 1 << 16


def roomy(packed: int) -> int:
    """Bytes of a stage for a rank that packs to ``packed``: with slack for trailers, and for the padding of pieces that other
    cuts make. A plan that needs more gets another landing."""
    return packed + packed // SLACK_SHARE + SLACK_BYTES


class Stage(ABC):
    """A subscriber's memory for versions under way. A landing that late bytes may come into is replaced, and kept apart
    until they have come."""

    landing: Landing
    """What the next version fills, or has filled."""

    direct = False
    """Bytes go straight into live tensors: they move at the install, after the vote."""

    swapped_bytes = 0
    """Of the weights: what an install swaps rather than copies."""

    @abstractmethod
    def landing_for(self, plan: Plan) -> Landing:
        """A landing that takes all bytes of this plan. Raises InvalidArgument where there can be none."""

    @abstractmethod
    def replace(self, landing: Landing) -> Landing:
        """Another landing for the same plan. The old one is never verified, installed or served again; it is closed when
        its last move has ended. Raises PeerLost where there can be none."""

    @abstractmethod
    def prepare(self, plan: Plan, landing: Landing) -> Work:
        """Everything that can be refused is refused here, before a live byte changes: AliasConflict, InvalidArgument where
        a target's layout changed since, TensorUnavailable."""

    @property
    @abstractmethod
    def landings(self) -> tuple[Landing, ...]:
        """Those in use, without quarantine."""

    @property
    @abstractmethod
    def quarantine(self) -> tuple[Landing, ...]:
        """Those that late bytes may still come into."""

    @property
    def served(self) -> tuple[Served, ...]:
        """What peers may read."""
        return tuple(landing.served for landing in self.landings if landing.served is not None)

    def close(self) -> None:
        for landing in (*self.quarantine, *self.landings):
            landing.close()


class Quarantine:
    """Landings that were given up."""

    def __init__(self) -> None:
        self.landings: tuple[Landing, ...] = ()

    def take(self, landing: Landing) -> None:
        landing.stop_serving()
        self.landings = (*self.landings, landing)

    def sweep(self) -> None:
        """Close those whose last move has ended."""
        settled = [landing for landing in self.landings if landing.settled]
        self.landings = tuple(landing for landing in self.landings if landing not in settled)
        for landing in settled:
            landing.close()


class PlanStage(Stage):
    """One stage in plan order; an install copies it into the live tensors. ``open_landing`` takes a size in bytes."""

    def __init__(self, open_landing: Callable[[int], Landing], packed: int, tensors: Tensors) -> None:
        self._open = open_landing
        self._tensors = tensors
        self._installer = Installer()
        self._quarantine = Quarantine()
        self.landing = open_landing(roomy(packed))

    def landing_for(self, plan: Plan) -> Landing:
        self._quarantine.sweep()
        if plan.landing_nbytes > self.landing.nbytes:
            old, self.landing = self.landing, self._open(plan.landing_nbytes)
            old.close()
        return self.landing

    def replace(self, landing: Landing) -> Landing:
        self.landing = self._open(landing.nbytes)
        self._quarantine.take(landing)
        return self.landing

    @torch.no_grad()
    def prepare(self, plan: Plan, landing: Landing) -> Copies:
        return self._installer.prepare(plan, landing.block, resolve(self._tensors))

    @property
    def landings(self) -> tuple[Landing, ...]:
        return (self.landing,)

    @property
    def quarantine(self) -> tuple[Landing, ...]:
        return self._quarantine.landings
