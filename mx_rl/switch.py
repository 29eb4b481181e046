"""The last half of a sync: all ranks of a replica switch to the staged version, or none does.

ready (every rank) -> shut holds -> vote -> decide (rank 0) -> write -> conclude -> acknowledge
"""

from __future__ import annotations

import time

from mx_rl.borrow import Loan
from mx_rl.errors import (
    Busy,
    Closed,
    DigestMismatch,
    HoldTimeout,
    IncompleteVersion,
    InvalidArgument,
    MxRLError,
    PeerLost,
    RegistryLost,
    StaleIncarnation,
    Tainted,
    VersionAborted,
    VersionGone,
)
from mx_rl.install import Work, check_stage
from mx_rl.layout import RankLayout
from mx_rl.patience import Cancelled, Patience
from mx_rl.records import Decision, Installed, Stage, VersionRecord, Vote
from mx_rl.reports import SyncReport
from mx_rl.staged import Staged
from mx_rl.standing import Standing
from mx_rl.streaming import Pour
from mx_rl.tensors import layout_tensors, resolve

TRANSIENT = (VersionGone, PeerLost, RegistryLost, VersionAborted)
"""What may go well at the next attempt."""


class Switch(Standing):
    """Installs what is staged."""

    def _install(self, staged: Staged, patience: Patience, *, waited: float | None = None) -> SyncReport:
        """``waited``: the version was staged before this call, which waited so long for it."""
        with self._exclusive(patience):
            if staged.over:
                raise VersionAborted(
                    f"version {staged.version} is staged no more", version=staged.version, reason="discarded"
                )
            begun = time.monotonic()
            previous = self.version
            try:
                self._gather(staged, patience)
                met = time.monotonic()
                with self._holds.shut(patience):
                    shut = time.monotonic()
                    self._switch(staged, previous, patience)
                    done = time.monotonic()
            except BaseException as exc:
                if self._keeps(staged, exc):
                    self._acknowledge("staged", staged.version)  # ends its lease
                elif not staged.over:
                    self._end(staged)
                    self._refuse_round(staged.round, staged.version, exc)
                raise
            self._acknowledge("installed", staged.version)
            acked = time.monotonic()
            before = staged.cargo.seconds
            if waited is not None:
                before = {"ahead": sum(before.values()), "wait": waited}
            seconds = before | {
                "ranks": met - begun,
                "install": done - shut,
                "pause": done - shut,
                "ack": acked - done,
            }
            seconds["total"] = acked - begun + (sum(before.values()) if waited is None else waited)
            return self._report(staged.cargo, previous, seconds)

    def _keeps(self, staged: Staged, exc: BaseException) -> bool:
        """Holds stayed open, and nobody else waits: the version is whole, and the next call installs it."""
        alone = self.world_size == 1 and not staged.over
        whole = self._staging is not None and not self._staging.stage.direct
        return alone and whole and isinstance(exc, HoldTimeout)

    def _gather(self, staged: Staged, patience: Patience) -> None:
        """Every rank has staged its part and was asked to install it: only now do holds shut anywhere."""
        _, ranks, _ = self._parts
        if self.world_size == 1:
            return
        decision = ranks.meet(patience) if self.rank == 0 else ranks.ready(staged.round, patience)
        if decision is not None:
            self._end(staged)
            self._raise_called_off(staged.version, decision.reason)

    def _switch(self, staged: Staged, previous: int | None, patience: Patience) -> None:
        """Holds are shut and drained: prepare, vote, decide, write. After the vote nothing waits but for the others."""
        cargo = staged.cargo
        self._call_before(previous, staged.version, patience)
        try:
            work = self._work(staged, patience)  # of the tensors as the hook left them: an engine may have moved them
            patience.commit()
        except BaseException:  # refused or told to stop, and nothing is voted yet
            self._call_after(previous, previous)
            raise
        try:
            decision = self._decide(staged, patience)
        except BaseException as exc:
            self._abandon(staged, exc)
            self._call_after(previous, previous)
            raise
        self._end(staged)
        if not decision.commit:
            self._call_after(previous, previous)
            self._raise_called_off(staged.version, decision.reason)
        if isinstance(work, Pour):
            self._taint = self._taint or "the loop over a stream is not at its end"
        fault = self._write(work, cargo.record, previous)
        # The loops of other ranks may take as long as this one's did.
        loop_s = work.spent_s if isinstance(work, Pour) else 0.0
        self._conclude(staged, fault, patience.extended(self.options.lease_s + loop_s))

    def _work(self, staged: Staged, patience: Patience) -> Work:
        """Everything that can be refused is refused here."""
        staging, ranks, _ = self._parts
        cargo, streams = staged.cargo, self._streams
        if streams is None or not streams.giving:
            return staging.prepare(
                staged.told, cargo, patience, lambda windows: ranks.tell_progress(staged.round, windows)
            )
        if not isinstance(cargo, Loan):  # a lender's layout is ours, and it looks itself
            check_stage(cargo.plan, cargo.landing.block)
        moved = len(cargo.plan.window_bounds)  # told when the part was staged: each item counts as one more
        return streams.work(
            cargo, lambda: ranks.stages, patience, lambda done: ranks.tell_progress(staged.round, moved + done)
        )

    def _layout(self) -> RankLayout | None:
        """Of the tensors as they are now; None for the publisher's names. A stream needs no memory behind them."""
        streaming = self._streams is not None and self._streams.giving
        if self._tensors is None:
            if streaming:
                return None
            raise InvalidArgument(f"Subscriber({self.policy!r}, None) has nothing to install into: use stream()")
        return RankLayout.of(layout_tensors(self._tensors) if streaming else resolve(self._tensors))

    def _abandon(self, staged: Staged, exc: BaseException) -> None:
        """Interrupted between vote and decision: called off where that is still possible, else this rank is tainted."""
        _, ranks, _ = self._parts
        self._end(staged)
        if self.rank == 0:
            self._refuse_round(staged.round, staged.version, exc)
        if self.rank or ranks.committed:
            self._taint = self._taint or f"interrupted after the vote: {type(exc).__name__}"

    def _decide(self, staged: Staged, patience: Patience) -> Decision:
        _, ranks, _ = self._parts
        cargo = staged.cargo
        stage = Stage(layout=cargo.plan.target_hash, source=cargo.source) if cargo.source is not None else None
        vote = Vote(round=staged.round, rank=self.rank, agree=True, stage=stage, balance=cargo.balance)
        if self.rank == 0:
            return ranks.collect_votes(vote, patience)
        found = ranks.vote(vote, patience.extended(patience.left + self.options.stall_s))
        if found is None:
            self._taint = "rank 0 did not tell its decision"
            raise Tainted(
                f"rank {self.rank} of replica {self.replica!r} voted for version {staged.version} and could not learn "
                "the decision; sync again to heal",
                reason=self._taint,
            )
        return found

    def _write(self, work: Work, record: VersionRecord, previous: int | None) -> BaseException | None:
        try:
            work.run()
            self._record = record
            self._call_after(previous, record.number)
        except BaseException as exc:  # noqa: BLE001 - the others must learn of it before it is raised
            return exc
        return None

    def _conclude(self, staged: Staged, fault: BaseException | None, patience: Patience) -> None:
        """All ranks have installed, or the replica is tainted on all of them."""
        _, ranks, _ = self._parts
        reason = "" if fault is None else f"{type(fault).__name__}: {fault}"[:1024]
        self._taint = self._taint or "interrupted before all ranks had answered"
        mine = Installed(
            round=staged.round,
            rank=self.rank,
            agree=fault is None,
            reason=reason,
            source=staged.cargo.source,
            balance=staged.cargo.balance if fault is None else None,
        )
        told = ranks.collect_installs(mine, patience) if self.rank == 0 else ranks.report_install(mine, patience)
        if told is not None and told.agree and fault is None:
            self._taint, self._void = None, False
            self._held = ranks.stage_sources() if self.rank == 0 else ()
            return
        self._taint = reason or (told.reason if told is not None else "rank 0 did not say how the round ended")
        self._acknowledge("tainted", staged.version, self._taint)
        if fault is not None and not isinstance(fault, Exception):
            raise fault  # Ctrl-C and exit are not ours to rename
        raise Tainted(
            f"version {staged.version} of {self.policy!r} may be mixed on replica {self.replica!r}: {self._taint}; "
            "sync again to heal",
            reason=self._taint,
        ) from fault

    def _raise_called_off(self, version: int, reason: str) -> None:
        """A round that may go well next time is VersionAborted, which ``sync`` tries again; anything else is final."""
        text = f"version {version} was not installed on replica {self.replica!r}: {reason}"
        kinds: tuple[type[MxRLError], ...] = (*TRANSIENT, StaleIncarnation)
        transient = [kind.__name__ for kind in kinds]
        if self.rank == 0 and not any(name in reason for name in transient):
            self._acknowledge("failed", version, reason)
            if DigestMismatch.__name__ in reason:
                raise DigestMismatch(text, version=version, tensors=[])
            raise IncompleteVersion(text, version=version, missing=[])
        raise VersionAborted(text, version=version, reason=reason)

    def _refuse_round(self, number: int, version: int, exc: BaseException) -> None:
        """This rank cannot install: the round ends with nothing changed anywhere."""
        _, ranks, _ = self._parts
        reason = f"{type(exc).__name__}: {exc}"[:1024]
        if self.rank:
            ranks.refuse(Vote(round=number, rank=self.rank, agree=False, reason=reason))
            return
        ranks.call_off(reason)
        if not isinstance(exc, (*TRANSIENT, Cancelled, Busy, Closed)):  # told to stop is not failed
            self._acknowledge("failed", version, reason)

    def _discard(self, staged: Staged, reason: str) -> None:
        if not self._busy.acquire(timeout=self.options.lease_s):
            raise Busy(f"another sync or install of policy {self.policy!r} is under way in this process: try again")
        try:
            if not staged.over:
                self._end(staged)
                text = VersionAborted(reason, version=staged.version, reason=reason)
                self._refuse_round(staged.round, staged.version, text)
        finally:
            self._busy.release()
        self._poke()

    def _end(self, staged: Staged) -> None:
        staged.over = True
        if self._open_stage is staged:
            self._open_stage = None
