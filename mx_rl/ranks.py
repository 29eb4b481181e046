"""The ranks of a replica talk here: messages over the data plane, repeated until they are answered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from mx_rl.endpoint import Endpoint, Member, unique_name
from mx_rl.errors import IncompleteVersion, MxRLError, PeerLost
from mx_rl.records import (
    AnyRankMessage,
    Decision,
    EndpointRecord,
    Finished,
    Hello,
    Installed,
    ReplicaSeats,
    Round,
    Source,
    Stage,
    Vote,
    decode,
    encode,
)
from mx_rl.replica import Follower, Leader
from mx_rl.transport.base import Link

log = logging.getLogger("mx_rl")

_REPEAT_S = 0.25
_COMPLAINT_S = 1.0


class Ranks:
    """One rank's end. Rank 0 leads; with one rank nothing is sent and nothing waits."""

    def __init__(self, endpoint: Endpoint, policy: str, replica: str, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.leader = Leader(ranks)
        self.follower = Follower()
        self._replica = replica
        self._endpoint = endpoint
        self._change = threading.Condition()
        self._links: dict[int, tuple[str, Link]] = {}  # rank -> (its agent, link)
        self._told: Round | None = None  # the round that is open, told again to who does not vote
        self._lost: set[int] = set()  # ranks whose process the transport reports dead
        self._served = endpoint.serve(f"{policy}-rank{rank}", 1, 64) if ranks > 1 else None
        self._receiver = None
        if self._served is not None:
            self._receiver = endpoint.transport.receive(unique_name(f"{policy}-rank{rank}-out"), [])
            self._served.on_message = self._on_message

    @property
    def agent(self) -> str:
        """The agent that takes this rank's messages; "" with one rank."""
        return self._served.name if self._served is not None else ""

    @property
    def record(self) -> EndpointRecord | None:
        return self._served.record if self._served is not None else None

    # ---- both

    def connect(self, seats: ReplicaSeats, member: Member) -> None:
        """Links to whom this rank talks to: rank 0 to all, the others to rank 0. Known links are kept."""
        if self._receiver is None:
            return
        for rank in range(1, self.ranks) if self.rank == 0 else [0]:
            agent = seats.endpoints[rank]
            known = self._links.get(rank)
            if known is not None and known[0] == agent:
                continue
            if known is not None:
                known[1].close()
                if self.rank:
                    self.follower = Follower()  # another process leads, and counts its rounds from 1
            self._links[rank] = (agent, self._receiver.connect(member.endpoint_record(agent)))
            self._lost.discard(rank)
        if self.rank:
            self._send(0, Hello(round=0, rank=self.rank, agent=self.agent))

    def complain(self) -> None:
        """This rank does not run what rank 0 runs: ask for a full round. Returns when rank 0 has noted it, so that its next
        round is one; after a second in vain the next greeting says it again."""
        amiss = Hello(round=0, rank=self.rank, agent=self.agent, amiss=True)
        self.follower.heard = False
        self._send(0, amiss)
        self._wait(
            lambda: self.follower.heard or 0 in self._lost,
            time.monotonic() + _COMPLAINT_S,
            lambda: self._send(0, amiss),
        )

    def _send(self, rank: int, message: AnyRankMessage) -> None:
        known = self._links.get(rank)
        if known is None:
            return
        try:
            known[1].send(encode(message))
        except PeerLost as exc:
            if rank not in self._lost:
                log.warning("replica %s: rank %d is lost: %s", self._replica, rank, exc)
            self._lost.add(rank)

    def _on_message(self, data: bytes) -> None:
        """On the I/O thread. A bad message costs nothing but itself."""
        try:
            message: AnyRankMessage = decode(data, AnyRankMessage, max_bytes=1 << 20)
        except MxRLError as exc:
            log.warning("replica %s rank %d: %s", self._replica, self.rank, exc)
            return
        with self._change:
            if self.rank == 0:
                reply = self.leader.receive(message)
                if reply is not None and isinstance(message, Hello | Vote | Installed):
                    self._send(message.rank, reply)
            else:
                self.follower.receive(message)
            self._change.notify_all()

    def _wait(self, done: Callable[[], bool], deadline: float, repeat: Callable[[], None] | None = None) -> bool:
        """Wait for messages until ``done``; ``repeat`` says again what was not answered."""
        with self._endpoint.hurry(), self._change:
            while not done():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                if not self._change.wait(min(left, _REPEAT_S)) and repeat is not None:
                    repeat()
        return True

    def close(self) -> None:
        for _, link in self._links.values():
            link.close()
        self._links.clear()
        if self._receiver is not None:
            self._receiver.close()
        if self._served is not None:
            self._endpoint.unserve(self._served)

    # ---- rank 0

    def newcomers(self) -> bool:
        """Another process took a rank's seat since the last call, or one is amiss: the next round is a full one."""
        with self._change:
            heard, self.leader.greeted = self.leader.greeted, {}
            known = {rank: self._links[rank][0] for rank in heard if rank in self._links}
            for rank, agent in known.items():
                if heard[rank].agent != agent:
                    self._lost.add(rank)  # whoever had the seat has gone
            return any(heard[rank].amiss or heard[rank].agent != agent for rank, agent in known.items())

    def open_round(self, target: Callable[[int], Round]) -> Round:
        with self._change:
            told = target(self.leader.begin())
            self._told = told
            for rank in range(1, self.ranks):
                self._send(rank, told)
        return told

    @property
    def connected(self) -> bool:
        wanted = range(1, self.ranks) if self.rank == 0 else [0]
        return all(rank in self._links and rank not in self._lost for rank in wanted)

    def call_off(self, reason: str) -> None:
        """End the open round with nothing changed."""
        with self._change:
            if self.leader.round == 0 or self.leader.decision is not None:
                return
            decision = self.leader.decide(False, reason)
            for rank in range(1, self.ranks):
                self._send(rank, decision)

    @property
    def committed(self) -> bool:
        """The open round was decided: all install."""
        return self.leader.decision is not None and self.leader.decision.commit

    @property
    def stages(self) -> tuple[Stage | None, ...]:
        """By rank: where each has staged its part of the round that was decided last."""
        found = self.leader.decision if self.rank == 0 else self.follower.decision
        return found.stages if found is not None else ()

    def stage_sources(self) -> tuple[Source, ...]:
        """Where all ranks hold the version of this round, or () where one does not serve it."""
        with self._change:
            found = [done.source for _, done in sorted(self.leader.installs.items())]
        return tuple(source for source in found if source is not None) if all(found) else ()

    def collect_votes(self, own: Vote, deadline: float) -> Decision:
        """Rank 0's vote and everybody's decision: to commit only if all agreed in time."""
        with self._change:
            self.leader.receive(own)

        def again() -> None:
            for rank in self.leader.missing_votes:
                if self._told is not None:
                    self._send(rank, self._told)

        self._wait(
            lambda: self.leader.voted or bool(self._lost.intersection(self.leader.missing_votes)), deadline, again
        )
        with self._change:
            reasons = [f"rank {rank}: {reason}" for rank, reason in self.leader.refusals.items()]
            silent = [rank for rank in self.leader.missing_votes if rank not in self.leader.refusals]
            if not self.leader.voted:
                cause = "lost" if self._lost.intersection(silent) else "silent until the deadline"
                reasons.append(f"no vote from rank(s) {_list(silent)}: {cause}")
            decision = self.leader.decide(self.leader.voted, "; ".join(reasons))
            for rank in range(1, self.ranks):
                self._send(rank, decision)
        return decision

    def collect_installs(self, own: Installed, deadline: float) -> Finished:
        with self._change:
            self.leader.receive(own)

        def again() -> None:
            for rank in self.leader.missing_installs:
                if self.leader.decision is not None:
                    self._send(rank, self.leader.decision)

        self._wait(lambda: self._lost.issuperset(self.leader.missing_installs), deadline, again)
        with self._change:
            finished = self.leader.finish()
            for rank in range(1, self.ranks):
                self._send(rank, finished)
        return finished

    # ---- the other ranks

    def next_round(self, deadline: float) -> Round:
        """The round that rank 0 fixed. IncompleteVersion, naming rank 0, when it fixed none in time."""
        greet = Hello(round=0, rank=self.rank, agent=self.agent)
        while self._wait(
            lambda: self.follower.next_round is not None or 0 in self._lost, deadline, lambda: self._send(0, greet)
        ):
            with self._change:
                if 0 in self._lost:
                    raise PeerLost(f"rank 0 of replica {self._replica!r} is lost", peer=self._links[0][0])
                if self.follower.next_round is not None:  # it may have been called off meanwhile
                    return self.follower.take()
        raise IncompleteVersion(
            f"rank {self.rank} of replica {self._replica!r} waited in vain for rank 0's call: every rank of a replica "
            "calls sync() or stage(), and rank 0's call fixes the version",
            version=None,
            missing=[0],
        )

    def refuse(self, own: Vote) -> None:
        self._send(0, own)

    def vote(self, own: Vote, deadline: float) -> Decision | None:
        """Send the vote; the decision, or None where it could not be learned."""
        self._send(0, own)
        self._wait(lambda: self.follower.decision is not None or 0 in self._lost, deadline, lambda: self._send(0, own))
        return self.follower.decision

    def report_install(self, own: Installed, deadline: float) -> Finished | None:
        self._send(0, own)
        self._wait(lambda: self.follower.finished is not None or 0 in self._lost, deadline, lambda: self._send(0, own))
        return self.follower.finished


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
