"""The ranks of a replica talk here: messages over the data plane, repeated until they are answered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from mx_rl.endpoint import Endpoint, Member, unique_name
from mx_rl.errors import IncompleteVersion, MxRLError, PeerLost
from mx_rl.patience import Patience
from mx_rl.records import (
    AnyRankMessage,
    Decision,
    EndpointRecord,
    Finished,
    Hello,
    Installed,
    Moved,
    Ready,
    ReplicaSeats,
    Round,
    Shut,
    Source,
    Stage,
    Vote,
    decode,
    encode,
)
from mx_rl.replica import UNBALANCED, Follower, Leader
from mx_rl.transport.base import Link

log = logging.getLogger("mx_rl")

_REPEAT_S = 0.25
_SLICE_S = 0.1
_COMPLAINT_S = 1.0
_PROGRESS_S = 0.5
"""How often a rank whose part is moving says how far it is."""


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
        self._links: dict[int, tuple[str, Link | None]] = {}  # rank -> (its agent, link)
        self._told: Round | None = None  # the round that is open, told again to who does not vote
        self._told_at = 0.0  # when the progress of this rank's part was told last
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
        """Links to whom this rank talks to: rank 0 to all, the others to rank 0. Known links are kept, but for those to
        ranks that are lost. One that cannot be reached stays so."""
        if self._receiver is None:
            return
        for rank in range(1, self.ranks) if self.rank == 0 else [0]:
            agent = seats.endpoints[rank]
            known = self._links.get(rank)
            if known is not None and known[0] == agent and rank not in self._lost:
                continue
            if known is not None and known[1] is not None:
                self._links[rank] = (known[0], None)  # who it was is still to be known, by ``newcomers``
                known[1].close()
            try:
                link = self._receiver.connect(member.endpoint_record(agent))
            except PeerLost as exc:
                if rank not in self._lost:
                    log.warning("replica %s: rank %d cannot be reached: %s", self._replica, rank, exc)
                self._lost.add(rank)
                continue
            if self.rank and known is not None and known[0] != agent:
                self.follower = Follower()  # another process leads, and counts its rounds from 1
            self._links[rank] = (agent, link)
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
            Patience(_COMPLAINT_S),
            lambda: self._send(0, amiss),
        )

    def _send(self, rank: int, message: AnyRankMessage) -> None:
        _, link = self._links.get(rank, ("", None))
        if link is None:
            return
        try:
            link.send(encode(message))
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
                if reply is not None and isinstance(message, Hello | Ready | Vote | Installed):
                    self._send(message.rank, reply)
            else:
                self.follower.receive(message)
            self._change.notify_all()

    def _wait(
        self,
        done: Callable[[], bool],
        patience: Patience,
        repeat: Callable[[], None] | None = None,
        progress: Callable[[], int] | None = None,
    ) -> bool:
        """Wait for messages until ``done``; ``repeat`` says again what was not answered. What makes ``progress`` grow grants
        time anew."""
        known = progress() if progress is not None else 0
        repeated = time.monotonic()
        with self._endpoint.hurry(), self._change:
            while not done():
                patience.check()
                left = patience.left
                if left <= 0:
                    return False
                self._change.wait(min(left, _SLICE_S))
                if repeat is not None and time.monotonic() - repeated > _REPEAT_S:
                    repeated = time.monotonic()
                    repeat()
                if progress is not None and progress() > known:
                    known = progress()
                    patience.moved()
        return True

    def close(self) -> None:
        for _, link in self._links.values():
            if link is not None:
                link.close()
        self._links.clear()
        if self._receiver is not None:
            self._receiver.close()
        if self._served is not None:
            self._endpoint.unserve(self._served)

    def tell_progress(self, number: int, windows: int, *, whole: bool = False) -> None:
        """So many windows of this rank's part are here. Cheap: what nobody needs to hear yet is not sent."""
        if self.ranks == 1 and not whole:
            return
        mine = Moved(round=number, rank=self.rank, windows=windows, whole=whole)
        if self.rank == 0:
            with self._change:
                self.leader.receive(mine)
                self._change.notify_all()
        elif whole or time.monotonic() - self._told_at > _PROGRESS_S:
            self._told_at = time.monotonic()
            self._send(0, mine)

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

    def call_for(self, number: int) -> None:
        """A call of rank 0 asks for the round that was fetched ahead: the calls of the others answer it now."""
        with self._change:
            told = self._told
            if told is not None and told.ahead and told.round == number == self.leader.round:
                self._told = told = msgspec.structs.replace(told, ahead=False)
                for rank in range(1, self.ranks):
                    self._send(rank, told)

    def await_parts(self, number: int, patience: Patience) -> bool:
        """Until every rank has staged its part. False where the round ended or a rank was lost before, or at the end."""

        def over() -> bool:
            leader = self.leader
            return leader.round != number or leader.decision is not None or bool(leader.refusals or self._lost)

        self._wait(lambda: over() or not self.leader.missing_parts, patience, progress=self._windows)
        return not over() and not self.leader.missing_parts

    def _windows(self) -> int:
        return self.leader.progress.windows

    def meet(self, patience: Patience) -> Decision | None:
        """All ranks are ready, and shut their holds now: None. Else the decision that ended the round."""
        with self._change:
            self.leader.receive(Ready(round=self.leader.round, rank=0))

        def again() -> None:
            for rank in self.leader.not_ready:
                if self._told is not None:
                    self._send(rank, self._told)

        def over() -> bool:
            missing = self.leader.not_ready
            return not missing or bool(self.leader.refusals) or bool(self._lost.intersection(missing))

        self._wait(over, patience, again, self._windows)
        with self._change:
            if self.leader.not_ready or self.leader.refusals:
                return self._end_round(self.leader.not_ready, "install")
            shut = self.leader.call_shut()
            for rank in range(1, self.ranks):
                self._send(rank, shut)
        return None

    def _end_round(self, silent: Sequence[int], what: str) -> Decision:
        """Decide, to commit only where all agreed, and tell it. ``silent`` are those whose ``what`` is missing."""
        reasons = [f"rank {rank}: {reason}" for rank, reason in self.leader.refusals.items()]
        silent = [rank for rank in silent if rank not in self.leader.refusals]
        if silent and not reasons:
            cause = "lost" if self._lost.intersection(silent) else "silent until the deadline"
            reasons.append(f"no {what} from rank(s) {_list(silent)}: {cause}")
        if not reasons and self.leader.unbalanced:
            reasons.append(UNBALANCED)
        decision = self.leader.decide(self.leader.voted, "; ".join(reasons))
        for rank in range(1, self.ranks):
            self._send(rank, decision)
        return decision

    @property
    def connected(self) -> bool:
        return not self.lost

    @property
    def lost(self) -> list[int]:
        """Of whom this rank talks to, those to whom it has no link, or one that is dead."""
        wanted = range(1, self.ranks) if self.rank == 0 else [0]
        return [rank for rank in wanted if rank not in self._links or rank in self._lost]

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

    def collect_votes(self, own: Vote, patience: Patience) -> Decision:
        """Rank 0's vote and everybody's decision: to commit only if all agreed in time."""
        with self._change:
            self.leader.receive(own)

        def again() -> None:
            for rank in self.leader.missing_votes:
                if self.leader.shut:
                    self._send(rank, Shut(round=self.leader.round))

        def over() -> bool:
            return self.leader.voted or bool(self._lost.intersection(self.leader.missing_votes))

        self._wait(over, patience, again)
        with self._change:
            return self._end_round(self.leader.missing_votes, "vote")

    def collect_installs(self, own: Installed, patience: Patience) -> Finished:
        with self._change:
            self.leader.receive(own)

        def again() -> None:
            for rank in self.leader.missing_installs:
                if self.leader.decision is not None:
                    self._send(rank, self.leader.decision)

        self._wait(lambda: self._lost.issuperset(self.leader.missing_installs), patience, again, self._windows)
        with self._change:
            finished = self.leader.finish()
            for rank in range(1, self.ranks):
                self._send(rank, finished)
        return finished

    # ---- the other ranks

    def next_round(self, patience: Patience) -> Round:
        """The round that rank 0 fixed. IncompleteVersion, naming rank 0, when it fixed none in time."""
        greet = Hello(round=0, rank=self.rank, agent=self.agent)
        while self._wait(
            lambda: self.follower.next_round is not None or 0 in self._lost, patience, lambda: self._send(0, greet)
        ):
            with self._change:
                self._check_leader()
                if self.follower.next_round is not None:  # it may have been called off meanwhile
                    return self.follower.take()
        raise self._waited_in_vain()

    def await_offer(self, patience: Patience) -> bool:
        """Rank 0 tells a version to stage. Takes nothing."""
        return self._wait(lambda: self.follower.next_part is not None, patience)

    def take_part(self) -> Round | None:
        """The version to stage, where one is on offer still."""
        with self._change:
            return self.follower.take_part() if self.follower.next_part is not None else None

    def take_nothing(self) -> Round | None:
        """The answer "nothing newer" of a call of rank 0 that this rank has not answered yet."""
        with self._change:
            found = self.follower.next_round
            return self.follower.take() if found is not None and found.record is None else None

    def superseded(self, number: int) -> bool:
        with self._change:
            return self.follower.superseded(number)

    def ready(self, number: int, patience: Patience) -> Decision | None:
        """This rank is asked to install its part: None when it is to shut its holds, else the decision that ended the
        round. IncompleteVersion, naming rank 0, at the end."""
        mine = Ready(round=number, rank=self.rank)
        follower = self.follower
        self._send(0, mine)

        def over() -> bool:
            return follower.shut or follower.decision is not None or 0 in self._lost

        found = self._wait(over, patience, lambda: self._send(0, mine), lambda: follower.windows)
        if follower.decision is not None:
            return follower.decision
        if not found:
            raise self._waited_in_vain()
        if not follower.shut:
            self._check_leader()
        return None

    def _check_leader(self) -> None:
        if 0 in self._lost:
            raise PeerLost(f"rank 0 of replica {self._replica!r} is lost", peer=self._links[0][0])

    def _waited_in_vain(self) -> IncompleteVersion:
        return IncompleteVersion(
            f"rank {self.rank} of replica {self._replica!r} waited in vain for rank 0's call: every rank of a replica "
            "calls sync() or stage(), and rank 0's call fixes the version",
            version=None,
            missing=[0],
        )

    def refuse(self, own: Vote) -> None:
        self._send(0, own)

    def vote(self, own: Vote, patience: Patience) -> Decision | None:
        """Send the vote; the decision, or None where it could not be learned."""
        self._send(0, own)
        self._wait(lambda: self.follower.decision is not None or 0 in self._lost, patience, lambda: self._send(0, own))
        return self.follower.decision

    def report_install(self, own: Installed, patience: Patience) -> Finished | None:
        self._send(0, own)
        follower = self.follower

        def over() -> bool:
            return follower.finished is not None or 0 in self._lost

        self._wait(over, patience, lambda: self._send(0, own), lambda: follower.windows)
        return follower.finished


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
