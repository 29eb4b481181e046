"""What replicas tell: who sits where, what they run and hold, who is gone. And what a publisher learns of it."""

from __future__ import annotations

from mx_rl.errors import InvalidArgument, SeatTaken
from mx_rl.records import Ack, AwaitInstalled, Installs, Join, Leave, Ok, Refused, ReplicaSeats, Source
from mx_rl.registry.policy import Policy, Replica, refused

MAX_RANKS = 4096
CLOSED_GENERATION = 1 << 62  # above every generation: nothing of that slot is read any more


def join(policy: Policy, command: Join, now: float, *, final: bool) -> ReplicaSeats | Refused | None:
    if not 1 <= command.ranks <= MAX_RANKS or not 0 <= command.rank < command.ranks or not command.replica:
        return refused(
            InvalidArgument,
            f"policy {policy.name!r}: rank {command.rank} of {command.ranks} is no seat of replica {command.replica!r}",
        )
    replica = policy.replicas.get(command.replica)
    if replica is not None and len(replica.seats) != command.ranks:
        living = [x for x in replica.incarnations if x and x != command.incarnation and policy.alive(x, now)]
        if living:
            return refused(
                InvalidArgument,
                f"policy {policy.name!r}: replica {replica.name!r} has {len(replica.seats)} ranks, of which {living[0]} "
                f"lives; {command.incarnation} says {command.ranks}. Give them one size, or another name",
                expected=len(replica.seats),
                got=command.ranks,
            )
        policy.drop_replica(replica, "")
        replica = None
    if replica is None:
        policy.ordinals += 1
        replica = Replica(command.replica, policy.ordinals, command.named, [None] * command.ranks)
        policy.replicas[command.replica] = replica
        policy.gone.pop(command.replica, None)
        policy.bump()
    refusal = _sit(policy, replica, command, now)
    if refusal is not None:
        return refusal
    is_open = all(policy.alive(incarnation, now) for incarnation in replica.incarnations)
    if not is_open and not final and command.wait > 0:
        return None
    return ReplicaSeats(
        agents=replica.incarnations,
        endpoints=tuple(seat.endpoint if seat is not None else "" for seat in replica.seats),
        layouts=replica.layouts,
        open=is_open,
    )


def _sit(policy: Policy, replica: Replica, command: Join, now: float) -> Refused | None:
    seat = replica.seats[command.rank]
    holder = seat.incarnation if seat is not None else ""
    if holder and holder != command.incarnation:
        if policy.alive(holder, now):
            return seat_taken(policy, replica, command.rank, holder, command.incarnation)
        policy.unseat(holder, ("replica", replica.name, command.rank))
        if command.rank == 0:  # the leader's death is the replica's
            policy.set_holding(replica, None, ())
            replica.state = replica.said = "joining"
            policy.end_lease(replica.name)
    same = seat is not None and holder == command.incarnation
    if not (same and seat is not None and (seat.layout, seat.endpoint) == (command.layout, command.endpoint)):
        policy.set_holding(replica, replica.record, ())  # before the layouts change: the index is by layouts
        replica.seats[command.rank] = command
        policy.bump()
    policy.seat(command.incarnation, ("replica", replica.name, command.rank), now)
    if command.endpoint:
        policy.owners[command.endpoint] = command.incarnation
    return None


def seat_taken(policy: Policy, replica: Replica, rank: int, holder: str, asker: str) -> Refused:
    return refused(
        SeatTaken,
        f"policy {policy.name!r}: rank {rank} of replica {replica.name!r} is held by {holder}, which lives; {asker} cannot "
        "take it. Stop that process, or give this replica another name",
        holder=holder,
    )


def led_by(policy: Policy, name: str, incarnation: str) -> Replica | None:
    replica = policy.replicas.get(name)
    if replica is None or replica.incarnations[0] != incarnation:
        return None
    return replica


def ack(policy: Policy, command: Ack, now: float) -> Ok | Refused:
    """The end of a round. What an older one says after a newer one changes nothing: a member never goes down."""
    record = command.record
    if record is not None:
        policy.restore(record)
        policy.reissue(now)
    replica = led_by(policy, command.replica, command.incarnation)
    if replica is None:
        other = policy.replicas.get(command.replica)
        if other is not None and other.incarnations[0] and policy.alive(other.incarnations[0], now):
            return seat_taken(policy, other, 0, other.incarnations[0], command.incarnation)
        return Ok()
    if command.seq:
        speaker, seq = replica.spoke
        if speaker == command.incarnation and command.seq < seq:
            return Ok()  # it was overtaken on its way by what this replica said later
        replica.spoke = (command.incarnation, command.seq)
    number = max(command.number, record.number if record is not None and command.state == "installed" else 0)
    lease = policy.leases.get(replica.name)
    if lease is not None and lease.number <= number:
        policy.end_lease(replica.name)
    if command.state == "staged":  # nothing is read for it any more; what lay where it was brought is gone
        mine = replica.record is not None and record is not None and record.identity == replica.record.identity
        policy.set_holding(replica, replica.record, _whole(replica, command.held) if mine else ())
        return Ok()
    if record is not None and record.number < replica.number:
        return Ok()
    before = (replica.said, replica.reason, replica.record, replica.held, replica.acked, replica.failed)
    replica.said, replica.reason = command.state, command.reason
    if command.state == "tainted":
        replica.state = "tainted"
        replica.failed = max(replica.failed, number)
        policy.set_holding(replica, record, ())
    elif record is not None:
        replica.state = "installed"
        replica.acked = replica.incarnations
        policy.set_holding(replica, record, _whole(replica, command.held))
    if command.state == "failed":
        replica.failed = max(replica.failed, number)
    for rank, source in enumerate(replica.held):
        policy.owners.setdefault(source.agent, replica.incarnations[rank])
    if before != (replica.said, replica.reason, replica.record, replica.held, replica.acked, replica.failed):
        policy.bump()
    return Ok()


def _whole(replica: Replica, held: tuple[Source, ...]) -> tuple[Source, ...]:
    """A version that one rank lacks cannot be read from the others."""
    return held if len(held) == len(replica.seats) else ()


def await_installed(policy: Policy, command: AwaitInstalled, now: float, *, final: bool) -> Installs | None:
    """A replica counts at this version or a newer one. Leavers are dropped, later joiners not awaited."""
    newest = policy.newest()
    ready = newest is not None and newest.record.number >= command.number
    names = policy.audiences.get(command.number) if command.replicas is None else None
    installed: list[str] = []
    failed: dict[str, str] = {}
    missing: list[str] = []
    for name in sorted(policy.replicas) if names is None else names:
        replica = policy.replicas.get(name)
        if replica is None:
            if name in policy.gone:
                failed[name] = policy.gone[name]
        elif replica.state == "installed" and replica.number >= command.number:
            installed.append(name)
        elif replica.failed >= command.number:
            failed[name] = replica.reason or replica.said
        else:
            missing.append(name)
    enough = not missing if command.replicas is None else len(installed) >= command.replicas
    if not (ready and enough) and not final and command.wait > 0:
        return None
    return Installs(
        number=command.number, ready=ready, installed=tuple(installed), failed=failed, missing=tuple(missing)
    )


def dead(policy: Policy, agents: tuple[str, ...]) -> None:
    """The transport lost them: their leases end now, their memory is not named any more. Their next word withdraws it."""
    lost = {policy.owners.get(agent, agent) for agent in agents}
    for incarnation in lost:
        member = policy.members.get(incarnation)
        if member is None or member.suspect:
            continue
        member.suspect = True
        policy.bump()
        for kind, name, rank in member.seats:
            if kind == "replica" and rank == 0:
                policy.end_lease(name)


def leave(policy: Policy, command: Leave, now: float) -> Ok:
    incarnation = command.incarnation
    member = policy.members.get(incarnation)
    if member is None:
        return Ok()
    everything = not command.replica and not command.world
    if member.lingers and command.keep_sources:
        return Ok()  # said before: its last lease runs already
    for kind, name, rank in sorted(member.seats):
        if kind == "replica" and (everything or name == command.replica):
            _leave_replica(policy, policy.replicas[name], rank)
        elif kind == "world" and (everything or name == command.world):
            _leave_world(policy, name, rank, incarnation, keep=command.keep_sources)
            policy.unseat(incarnation, (kind, name, rank))
    if not member.seats:
        member.lingers = command.keep_sources
        member.seen = max(member.seen, now)
        if not command.keep_sources:
            del policy.members[incarnation]
        policy.bump()
    return Ok()


def _leave_replica(policy: Policy, replica: Replica, rank: int) -> None:
    seat = replica.seats[rank]
    if rank == 0 or not replica.named:
        policy.drop_replica(replica, "")
        return
    policy.set_holding(replica, replica.record, ())
    if seat is not None:
        policy.unseat(seat.incarnation, ("replica", replica.name, rank))
    replica.seats[rank] = None
    policy.bump()


def _leave_world(policy: Policy, world: str, rank: int, incarnation: str, *, keep: bool) -> None:
    pending = policy.pending.get(world)
    if pending is not None and rank in pending.claims and pending.claims[rank].incarnation == incarnation:
        del pending.claims[rank]
    epoch = policy.epoch
    if epoch is None or epoch.world != world or epoch.seats[rank] != incarnation:
        return
    epoch.seats[rank] = ""
    policy.bump()
    epoch.superseded = epoch.superseded or f"rank {rank} of world {world!r} has closed"
    for item in epoch.staging().values():
        if not keep or rank not in item.commits:
            item.state, item.reason, item.commits = "aborted", epoch.superseded, {}
    if keep:
        return
    for version in policy.versions.values():
        if version.record.identity[:2] == (epoch.number, epoch.nonce) and rank < len(version.record.sources):
            source = version.record.sources[rank]
            policy.generations[source.agent, source.region] = CLOSED_GENERATION
