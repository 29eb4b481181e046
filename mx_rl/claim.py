"""A publisher's seat in its world: claimed, opened when all ranks have come, told again when the registry forgot."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from mx_rl.endpoint import Member
from mx_rl.errors import IncompleteVersion, SeatTaken
from mx_rl.records import Claim, Seat, VersionRecord
from mx_rl.seat import WorldSeat

_POLL_S = 10.0


def name_ranks(ranks: Sequence[int]) -> str:
    text = ", ".join(str(rank) for rank in list(ranks)[:16])
    return text + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")


class Claimant:
    """``epoch`` is the epoch that this rank holds a seat in, or None; it may not be open yet."""

    def __init__(self, member: Member, seat: WorldSeat, start_after: int) -> None:
        self.epoch: Seat | None = None
        self._member = member
        self._seat = seat
        self._nonce = secrets.randbits(63)
        self._start_after = start_after

    @property
    def open_epoch(self) -> Seat | None:
        epoch = self.epoch  # read once: another thread may find it superseded
        return epoch if epoch is not None and epoch.open else None

    def wait_open(self, deadline: float) -> Seat:
        """Claim until every rank has. Raises IncompleteVersion with who is missing, Fenced, SeatTaken, RegistryLost."""
        while True:
            epoch = self.open_epoch
            if epoch is not None:
                return epoch
            left = deadline - time.monotonic()
            if left <= 0:
                claimed = self.epoch
                missing = claimed.missing if claimed else ()
                raise IncompleteVersion(
                    f"world {self._seat.world!r} of policy {self._member.policy!r} is not complete: rank(s) "
                    f"{name_ranks(missing)} of {self._seat.world_size} have no Publisher yet",
                    version=None,
                    missing=list(missing),
                )
            self.claim(wait=min(left, _POLL_S))

    def claim(self, *, wait: float) -> None:
        command = self._command(wait=wait)
        try:
            self.epoch = self._member.ask(command, Seat)
        except SeatTaken as exc:
            if not self._member.report_if_dead(exc.fields.get("holder", "")):
                raise
            self.epoch = self._member.ask(command, Seat)

    def superseded(self, epoch: int) -> None:
        """A rank of that epoch was replaced: this one claims again at its next publish."""
        if self.epoch is not None and self.epoch.epoch == epoch:
            self.epoch = None

    def reassert(self, held: VersionRecord | None, k: int) -> None:
        self._member.ask(self._command(held=held, k=k), Seat)

    def _command(self, *, wait: float = 0.0, held: VersionRecord | None = None, k: int = 0) -> Claim:
        epoch = self.open_epoch
        return Claim(
            policy=self._member.policy,
            world=self._seat.world,
            rank=self._seat.rank,
            world_size=self._seat.world_size,
            incarnation=self._member.incarnation,
            nonce=epoch.nonce if epoch else self._nonce,
            start_after=self._start_after,
            held=held,
            epoch=epoch.epoch if epoch else 0,
            base=epoch.base if epoch else 0,
            k=k,
            rejoined=epoch.rejoined if epoch else False,
            wait=wait,
        )
