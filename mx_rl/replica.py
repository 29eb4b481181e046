"""Ranks that switch together: the round's book at rank 0 and at the others. Pure: no I/O, no clock.

idle -> staged -> ready (asked to install) -> shut (all are ready; holds are closed, and each votes) -> decided ->
installed, or tainted where the bytes may be mixed. A round's number is never used again. After a vote nothing may wait
but for the decision; after a decision to commit every rank must install.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mx_rl.records import AnyRankMessage, Decision, Finished, Hello, Installed, Moved, Ready, Round, Shut, Vote

UNBALANCED = "DigestMismatch: the ranks' parts of boxes that are split over them do not add up to what was published"


@dataclass
class Leader:
    """Rank 0's book: votes come in, one decision goes out, and the round is finished when all have installed."""

    ranks: int
    round: int = 0
    decision: Decision | None = None
    finished: Finished | None = None
    windows: dict[int, int] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    shut: bool = False
    votes: dict[int, Vote] = field(default_factory=dict)
    installs: dict[int, Installed] = field(default_factory=dict)
    greeted: dict[int, Hello] = field(default_factory=dict)
    past: dict[int, tuple[Decision | None, Finished | None]] = field(default_factory=dict)

    def begin(self) -> int:
        """Open the next round; an open one ends as aborted."""
        if self.round and self.decision is None:
            self.decide(False, "rank 0 began another round")
        if self.round:
            self.past[self.round] = (self.decision, self.finished)
            self.past.pop(self.round - 64, None)
        self.round += 1
        self.decision, self.finished = None, None
        self.windows, self.whole, self.ready, self.shut = {}, set(), set(), False
        self.votes, self.installs = {}, {}
        return self.round

    def receive(self, message: AnyRankMessage) -> AnyRankMessage | None:
        """Note what a rank says; the reply, if any, goes back to it. Repeating a message changes nothing."""
        if isinstance(message, Hello):
            former = self.greeted.get(message.rank)
            if former is None or former.agent != message.agent or not former.amiss:
                self.greeted[message.rank] = message  # a complaint is not taken back by a greeting
            return message if message.amiss else None
        if message.round != self.round:
            decision, finished = self.past.get(message.round, (None, None))
            if isinstance(message, Installed):
                return finished or Finished(round=message.round, agree=False, reason="that round is over")
            return decision or Decision(round=message.round, commit=False, reason="that round is over")
        if isinstance(message, Moved):
            self.windows[message.rank] = max(message.windows, self.windows.get(message.rank, 0))
            if message.whole:
                self.whole.add(message.rank)
            return None
        if isinstance(message, Ready):
            self.whole.add(message.rank)
            self.ready.add(message.rank)
            return self.decision or (Shut(round=self.round) if self.shut else self.progress)
        if isinstance(message, Vote):
            if self.decision is None:
                self.votes.setdefault(message.rank, message)
            return self.decision
        if isinstance(message, Installed):
            self.installs.setdefault(message.rank, message)
            return self.finished or self.progress  # a rank without a stage may be moving its part still
        return None

    @property
    def progress(self) -> Moved:
        return Moved(round=self.round, rank=0, windows=sum(self.windows.values()))

    @property
    def missing_parts(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.whole]

    @property
    def not_ready(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.ready]

    def call_shut(self) -> Shut:
        """All ranks are ready: from here on their holds are closed."""
        assert not self.not_ready, "holds are shut when every rank has staged its part"
        self.shut = True
        return Shut(round=self.round)

    @property
    def missing_votes(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.votes]

    @property
    def refusals(self) -> dict[int, str]:
        return {rank: vote.reason for rank, vote in sorted(self.votes.items()) if not vote.agree}

    @property
    def voted(self) -> bool:
        """Nothing more to wait for: all agree, or one does not."""
        return not self.missing_votes or bool(self.refusals)

    @property
    def unbalanced(self) -> bool:
        """All have summed their parts of split boxes, before the vote or after the move, and the total is not 0."""
        for told in (self.votes, self.installs):
            found = [message.balance for message in told.values()]
            balances = [balance for balance in found if balance is not None]
            if len(balances) == self.ranks and sum(balances) % (1 << 64):
                return True
        return False

    def decide(self, commit: bool, reason: str = "") -> Decision:
        """Once a round; a second call returns the first decision. Only a full house can commit."""
        if self.decision is None:
            commit = commit and not self.missing_votes and not self.refusals and not self.unbalanced
            found = tuple(self.votes[rank].stage for rank in range(self.ranks)) if commit else ()
            stages = found if None in found else ()  # where each has its own, nobody borrows
            self.decision = Decision(round=self.round, commit=commit, reason=reason, stages=stages)
        return self.decision

    @property
    def missing_installs(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.installs]

    @property
    def broken(self) -> dict[int, str]:
        return {rank: done.reason for rank, done in sorted(self.installs.items()) if not done.agree}

    def finish(self) -> Finished:
        if self.finished is None:
            lost = {rank: "did not answer after the decision" for rank in self.missing_installs} | self.broken
            text = "; ".join(f"rank {rank}: {reason}" for rank, reason in lost.items())
            text = text or (UNBALANCED if self.unbalanced else "")
            self.finished = Finished(round=self.round, agree=not text, reason=text)
        return self.finished


@dataclass
class Follower:
    """Another rank's book: the rounds that rank 0 told, and what was decided about the one taken."""

    taken: int = 0
    seen: int = 0  # the newest round told
    offered: Round | None = None
    nothing: Round | None = None  # "nothing newer", to be answered by a call of this rank; a prefetch leaves it
    shut: bool = False
    windows: int = 0  # of all ranks: it grows while one of them makes progress
    decision: Decision | None = None
    finished: Finished | None = None
    over: int = 0  # the newest round known to be aborted
    heard: bool = False  # rank 0 has noted the complaint

    def receive(self, message: AnyRankMessage) -> None:
        if isinstance(message, Hello):
            self.heard = self.heard or message.amiss
        elif isinstance(message, Round):
            self._hear(message)
        elif isinstance(message, Decision):
            if not message.commit:
                self.over = max(self.over, message.round)
            if message.round == self.taken and self.decision is None:
                self.decision = message
        elif message.round != self.taken:
            return
        elif isinstance(message, Shut):
            self.shut = True
        elif isinstance(message, Moved):
            self.windows = max(self.windows, message.windows)
        elif isinstance(message, Finished):
            self.finished = message

    def _hear(self, told: Round) -> None:
        if told.record is not None and not told.ahead and self.nothing is not None and self.nothing.round < told.round:
            self.nothing = None  # rank 0 has answered another call since: each call of ours answers the newest of its
        if told.round <= self.seen:
            return
        self.seen = told.round
        if told.record is None:
            self.nothing, self.offered = told, None
        else:
            self.offered = told

    @property
    def next_part(self) -> Round | None:
        """A round with a version to stage: newer than the last taken, and not known to be over."""
        offered = self.offered
        return offered if offered is not None and offered.round > max(self.taken, self.over) else None

    @property
    def next_round(self) -> Round | None:
        """What the next call answers: "nothing newer" before what rank 0 has only fetched ahead."""
        nothing = self.nothing
        return nothing if nothing is not None and nothing.round > self.over else self.next_part

    def superseded(self, number: int) -> bool:
        """The round taken was given up by rank 0."""
        return self.over >= number or self.seen > number

    def take(self) -> Round:
        found = self.next_round
        assert found is not None, "take() without a round on offer"
        if found is self.nothing:
            self.nothing = None
        return self._begin(found)

    def take_part(self) -> Round:
        found = self.next_part
        assert found is not None, "take_part() without a version on offer"
        return self._begin(found)

    def _begin(self, told: Round) -> Round:
        if told.record is not None:
            self.offered = None
        if told.round > self.taken:
            self.taken, self.shut, self.windows = told.round, False, 0
            self.decision, self.finished = None, None
        return told
