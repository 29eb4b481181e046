"""A version that waits complete in the stage of a rollout rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mx_rl.patience import Cancelled
from mx_rl.records import Round
from mx_rl.reports import SyncReport
from mx_rl.staging import Cargo
from mx_rl.twins import run

if TYPE_CHECKING:
    from mx_rl.switch import Switch


class Staged:
    """A version that waits in the stage. ``install()`` switches to it, ``discard()`` gives it up; either ends the
    round."""

    def __init__(self, switch: Switch, told: Round, cargo: Cargo) -> None:
        self.version = cargo.record.number
        self.told = told
        self.round = told.round
        self.cargo = cargo
        self.over = False
        self.ahead = told.ahead
        """Fetched by the prefetch, and asked for by no call yet."""
        self.full = told.full
        self._switch = switch

    def install(self, *, timeout: float = 60.0) -> SyncReport:
        """Switch to this version, all ranks of the replica or none. Waits until every rank has staged its part and was
        asked to install it, then for open holds and the other ranks' votes.

        After ``timeout`` the old version runs on (HoldTimeout, IncompleteVersion); of a replica of one rank HoldTimeout
        leaves this one staged. Paused in a pause. Tainted where live
        weights may be mixed.
        """
        return self._switch._install(self, self._switch._patience(timeout))

    async def async_install(self, *, timeout: float = 60.0) -> SyncReport:
        """``install`` without blocking the event loop; cancelled as ``Subscriber.async_sync`` is."""
        patience = self._switch._patience(timeout, stoppable=True)
        return await run(lambda: self._switch._install(self, patience), stop=lambda: patience.stop(Cancelled()))

    def discard(self) -> None:
        """Give the version up on all ranks. Idempotent."""
        self._switch._discard(self, "discarded")
