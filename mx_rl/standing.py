"""What one rollout rank runs, what it tells the registry of it, and the hooks around a change."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

from mx_rl.endpoint import Member
from mx_rl.errors import Busy, MxRLError
from mx_rl.patience import Patience
from mx_rl.records import Ack, Source, VersionRecord
from mx_rl.reports import SyncReport
from mx_rl.staging import Cargo

log = logging.getLogger("mx_rl")


class Standing:
    """Base of the Subscriber. ``_taint`` says why live weights may be mixed, ``_void`` that they are lost as a whole."""

    _member: Member

    def __init__(
        self,
        policy: str,
        rank: int,
        before_install: Callable[[int | None, int], None] | None,
        after_install: Callable[[int | None, int | None], None] | None,
    ) -> None:
        self.policy = policy
        self.rank = rank
        self.replica = ""
        self.incarnation = ""
        self._before_install = before_install
        self._after_install = after_install
        self._record: VersionRecord | None = None
        self._taint: str | None = None
        self._void = False
        self._held: tuple[Source, ...] = ()
        self._acks = itertools.count(1)

    @property
    def version(self) -> int | None:
        """Number of the version that the live weights are, or None before the first."""
        return self._record.number if self._record is not None else None

    # ---- hooks

    def _call_before(self, previous: int | None, version: int, patience: Patience) -> None:
        nap = 0.01
        while self._before_install is not None:
            try:
                self._before_install(previous, version)
                return
            except Busy:
                if nap > patience.left:
                    raise
                patience.nap(nap)
                nap = min(nap * 2, 0.5)

    def _call_after(self, previous: int | None, version: int | None) -> None:
        if self._after_install is not None:
            self._after_install(previous, version)

    # ---- what the registry hears

    def _acknowledgement(self, state: str, number: int, reason: str = "") -> Ack:
        seq = next(self._acks)  # before the state is read: what is told under a higher count is never older
        return Ack(
            policy=self.policy,
            replica=self.replica,
            incarnation=self.incarnation,
            record=self._record,
            state=state,
            number=number,
            reason=reason[:4096],
            held=self._held if state == "installed" else (),
            seq=seq,
        )

    def _acknowledge(self, state: str, number: int, reason: str = "") -> None:
        """Rank 0 tells the registry. One that is away does not undo an install: it is told with a later beat."""
        if self.rank != 0:
            return
        try:
            self._member.ask(self._acknowledgement(state, number, reason), timeout=10.0)
        except MxRLError as exc:
            log.warning("policy %s replica %s: %s could not be told: %s", self.policy, self.replica, state, exc)
            self._member.repeat_later()
        except BaseException:
            self._member.repeat_later()
            raise

    # ---- what the caller hears

    def _report(self, cargo: Cargo, previous: int | None, seconds: dict[str, float]) -> SyncReport:
        haul = cargo.haul
        return SyncReport(
            version=cargo.record.number,
            previous=previous,
            step=cargo.record.step,
            kind=cargo.record.kind,
            source=haul.served_by.most_common(1)[0][0] if haul.served_by else "",
            served_by=dict(haul.served_by),
            wire_bytes=cargo.plan.wire_bytes,
            model_bytes=cargo.plan.model_bytes,
            seconds=seconds,
            lane=",".join(sorted(haul.lanes)),
            retries=haul.retries,
            refused=dict(haul.refused),
        )
