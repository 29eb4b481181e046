"""A rollout rank's seat in its replica: joined, met with the other ranks, told again when the registry forgot."""

from __future__ import annotations

from mx_rl.claim import name_ranks
from mx_rl.endpoint import Member, seat_key
from mx_rl.errors import IncompleteVersion, SeatTaken
from mx_rl.layout import RankLayout
from mx_rl.patience import Patience
from mx_rl.ranks import Ranks
from mx_rl.records import Join, ReplicaSeats, encode
from mx_rl.staging import Staging

_NAP_S = (0.02, 0.5)


class Membership:
    """``named``: the replica has a name of its own, rather than that of rank 0's incarnation, with which it leaves."""

    def __init__(self, member: Member, staging: Staging, ranks: Ranks, replica: str, *, named: bool) -> None:
        self.replica = replica
        self._named = named
        self._member = member
        self._staging = staging
        self._ranks = ranks
        self._seats: ReplicaSeats | None = None
        self.join()

    @property
    def seats(self) -> ReplicaSeats | None:
        """Of all ranks; None where there is only this one."""
        return self._seats if self._ranks.ranks > 1 else None

    def join(self, *, wait: float = 0.0) -> ReplicaSeats:
        """Take the seat, and hear who has the others. Raises SeatTaken where the seat's holder answers."""
        self._announce()
        command = Join(
            policy=self._member.policy,
            replica=self.replica,
            rank=self._ranks.rank,
            ranks=self._ranks.ranks,
            incarnation=self._member.incarnation,
            layout=self._staging.layout_name,
            endpoint=self._ranks.agent,
            named=self._named,
            wait=wait,
        )
        try:
            self._seats = self._member.ask(command, ReplicaSeats)
        except SeatTaken as exc:
            if not self._member.report_if_dead(exc.fields.get("holder", "")):
                raise
            self._seats = self._member.ask(command, ReplicaSeats)
        return self._seats

    def reassert(self) -> None:
        self.join()
        self._staging.reassert()

    def follow(self, layout: RankLayout | None) -> None:
        """The tensors lie otherwise than before: declare them anew."""
        if layout is not None and layout.hash != self._staging.layout_name:
            self._staging.layout = layout
            self.join()

    @property
    def met(self) -> bool:
        """All ranks have joined, and those who must talk are connected."""
        return self._ranks.ranks == 1 or (self._seats is not None and self._seats.open and self._ranks.connected)

    def meet(self, patience: Patience) -> bool:
        """All ranks have joined, and those who must talk are connected. True where another process took a rank's seat
        since the last call, or a rank is amiss. One attempt at least, then IncompleteVersion with who has not joined or is
        lost."""
        ranks = self._ranks
        if ranks.ranks == 1:
            return False
        renewed, nap = ranks.newcomers(), _NAP_S[0]
        while not self.met:
            patience.check()
            seats = self.join(wait=patience.poll())
            if seats.open:
                ranks.connect(seats, self._member)
            if self.met:
                break
            if patience.over:
                raise self._unmet(seats)
            if seats.open:  # the registry answers at once, and a rank that is lost may hold its seat for a while
                patience.nap(nap)
                nap = min(nap * 2, _NAP_S[1])
        return renewed

    def _unmet(self, seats: ReplicaSeats) -> IncompleteVersion:
        missing, why = [rank for rank, agent in enumerate(seats.agents) if not agent], "have not joined"
        if seats.open:
            missing, why = self._ranks.lost, "are lost: their processes do not answer"
        return IncompleteVersion(
            f"replica {self.replica!r}: rank(s) {name_ranks(missing)} of {self._ranks.ranks} {why}",
            version=None,
            missing=missing,
        )

    def _announce(self) -> None:
        self._staging.announce()
        talks = self._ranks.record
        if talks is not None:
            self._member.put(talks.agent, encode(talks))
            if not self._staging.served:
                self._member.put(seat_key(self._member.incarnation), encode(talks))
