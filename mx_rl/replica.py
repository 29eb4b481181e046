"""Ranks that switch together: the round's book at rank 0 and at the others. Pure: no I/O, no clock.

idle -> staged -> shut (voted; holds are closed) -> decided -> installed, or tainted where the bytes may be mixed.
A round's number is never used again. After a vote nothing may wait but for the decision; after a decision to commit
every rank must install.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mx_rl.records import AnyRankMessage, Decision, Finished, Hello, Installed, Round, Vote


@dataclass
class Leader:
    """Rank 0's book: votes come in, one decision goes out, and the round is finished when all have installed."""

    ranks: int
    round: int = 0
    decision: Decision | None = None
    finished: Finished | None = None
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
        if isinstance(message, Vote):
            if self.decision is None:
                self.votes.setdefault(message.rank, message)
            return self.decision
        if isinstance(message, Installed):
            self.installs.setdefault(message.rank, message)
            return self.finished
        return None

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

    def decide(self, commit: bool, reason: str = "") -> Decision:
        """Once a round; a second call returns the first decision. Only a full house can commit."""
        if self.decision is None:
            commit = commit and not self.missing_votes and not self.refusals
            stages = tuple(self.votes[rank].stage for rank in range(self.ranks)) if commit else ()
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
            self.finished = Finished(round=self.round, agree=not lost, reason=text)
        return self.finished


@dataclass
class Follower:
    """Another rank's book: the newest round that rank 0 told, and what was decided about the one taken."""

    taken: int = 0
    offered: Round | None = None
    decision: Decision | None = None
    finished: Finished | None = None
    over: int = 0  # the newest round known to be aborted
    heard: bool = False  # rank 0 has noted the complaint

    def receive(self, message: AnyRankMessage) -> None:
        if isinstance(message, Hello):
            self.heard = self.heard or message.amiss
        elif isinstance(message, Round):
            if message.round > self.taken and (self.offered is None or message.round > self.offered.round):
                self.offered = message
        elif isinstance(message, Decision):
            if not message.commit:
                self.over = max(self.over, message.round)
            if message.round == self.taken and self.decision is None:
                self.decision = message
        elif isinstance(message, Finished) and message.round == self.taken:
            self.finished = message

    @property
    def next_round(self) -> Round | None:
        """A round to take: newer than the last taken, and not known to be over."""
        offered = self.offered
        return offered if offered is not None and offered.round > max(self.taken, self.over) else None

    def take(self) -> Round:
        found = self.next_round
        assert found is not None, "take() without a round on offer"
        self.taken, self.offered = found.round, None
        self.decision, self.finished = None, None
        return found
