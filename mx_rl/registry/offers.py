"""Which version a replica is offered, from whom, under which lease; and who still reads a slot."""

from __future__ import annotations

import heapq

from mx_rl.errors import StaleVersion, VersionGone
from mx_rl.records import AwaitFree, Free, Holder, Nothing, Refused, Resolve, Source, Target
from mx_rl.registry.policy import Hold, Lease, Policy, Replica, Version, refused
from mx_rl.registry.replicas import dead, led_by, seat_taken
from mx_rl.registry.trainer import staging_of

MAX_HOLDERS = 4


def resolve(
    policy: Policy, command: Resolve, now: float, *, final: bool, again: bool
) -> Target | Nothing | Refused | None:
    """``again``: this command was seen before and waits; what it reported is not reported anew."""
    if not again:
        dead(policy, command.dead)
        if command.installed is not None:
            policy.tell(command.installed)
            policy.reissue(now)
    replica = led_by(policy, command.replica, command.incarnation)
    if replica is None:
        other = policy.replicas.get(command.replica)
        if other is not None and other.incarnations[0] and policy.alive(other.incarnations[0], now):
            return seat_taken(policy, other, 0, other.incarnations[0], command.incarnation)
        return Nothing(latest=policy.floor)
    if command.exactly is not None and command.installed is not None and command.exactly < command.installed[2]:
        return refused(
            StaleVersion,
            f"policy {policy.name!r}: replica {replica.name!r} runs version {command.installed[2]} and never goes down to "
            f"{command.exactly}",
            installed=command.installed[2],
            offered=command.exactly,
        )
    lost = 0
    for number in sorted(policy.versions, reverse=True):
        version = policy.versions[number]
        if not version.offered or not _wanted(version, command):
            continue
        trainer, holders = policy.trainer_has(version, now), _holders(policy, replica, version, now)
        if trainer or holders:
            return _offer(policy, replica, version, command, now, trainer=trainer, holders=holders, newer_lost=lost)
        lost = lost or number
    return _nothing(policy, replica, command, now, lost, final=final)


def _wanted(version: Version, command: Resolve) -> bool:
    number, installed = version.record.number, command.installed
    if command.exactly is not None and number != command.exactly:
        return False
    if command.at_least is not None and number < command.at_least:
        return False
    if installed is None or number > installed[2]:
        return True
    if number < installed[2]:
        return False
    return command.force or version.record.identity != installed  # one number, two contents: a conflict to heal


def _holders(policy: Policy, replica: Replica, version: Version, now: float) -> list[Replica]:
    """Complete peers that lie as this replica does, the least read first."""
    if None in replica.seats:
        return []
    names = policy.holders.get((version.record.identity, replica.layouts), {})
    living = (
        holder
        for holder in (policy.replicas[name] for name in names if name != replica.name)
        if all(source.agent and policy.source_lives(source, now) for source in holder.held)
    )
    return heapq.nsmallest(MAX_HOLDERS, living, key=lambda x: (policy.readers.get(x.name, 0), x.ordinal))


def _offer(
    policy: Policy,
    replica: Replica,
    version: Version,
    command: Resolve,
    now: float,
    *,
    trainer: bool,
    holders: list[Replica],
    newer_lost: int,
) -> Target | Refused:
    newest = policy.newest()
    left = 0.0
    if command.lease and version is newest:
        lease = _lease(policy, replica, version, command, now, trainer=trainer, holders=holders)
        if isinstance(lease, Refused):
            return lease
        left = lease.until - now if lease is not None else 0.0
    return Target(
        record=version.record,
        trainer=trainer,
        holders=tuple(Holder(replica=x.name, layouts=x.layouts, sources=x.held) for x in holders),
        lease_s=left,
        newer_lost=newer_lost,
    )


def _lease(
    policy: Policy,
    replica: Replica,
    version: Version,
    command: Resolve,
    now: float,
    *,
    trainer: bool,
    holders: list[Replica],
) -> Lease | Refused | None:
    """A lease on the newest READY version: never longer for being asked again. Who lost one slot to the grace gets
    leases at peers only; who lost two running gets the policy's one hold, so that a slow reader comes to its end."""
    number, identity = version.record.number, version.record.identity
    parents = tuple(holder.name for holder in holders)
    old = policy.leases.get(replica.name)
    if old is not None and old.identity == identity and old.until >= now:
        lease = Lease(number, identity, old.until, old.trainer, parents)
        policy.start_lease(replica.name, lease)
        return lease
    duration = policy.rules.lease_s
    slot = trainer
    if command.lost >= 2 and trainer:
        if command.read_s > policy.rules.grace_max_s:
            if not holders:
                return _too_slow(policy, replica, number, command)
            slot = False
        else:
            duration = max(duration, _hold(policy, replica, number, command, now))
    elif command.lost == 1:
        slot = False
    if not slot and not parents:
        policy.end_lease(replica.name)
        return None
    lease = Lease(number, identity, now + duration, slot, parents)
    policy.start_lease(replica.name, lease)
    return lease


def _hold(policy: Policy, replica: Replica, number: int, command: Resolve, now: float) -> float:
    """Twice the measured read time, at most grace_max; a lease's length where nothing was measured. 0: another has it."""
    hold = policy.hold
    if hold is not None and hold.replica != replica.name and hold.until >= now:
        return 0.0
    wanted = 2 * command.read_s if command.read_s > 0 else policy.rules.lease_s
    duration = min(wanted, policy.rules.grace_max_s)
    policy.hold = Hold(replica.name, number, now + duration, command.read_s)
    return duration


def _too_slow(policy: Policy, replica: Replica, number: int, command: Resolve) -> Refused:
    limit = policy.rules.grace_max_s
    return refused(
        VersionGone,
        f"policy {policy.name!r}: replica {replica.name!r} lost {command.lost} versions running; reading one takes it "
        f"{command.read_s:.1f} s, and a publisher waits at most grace_max_s = {limit:.1f} s for a reader. Give the publisher "
        "more slots, publish less often, or raise grace_max_s",
        version=number,
        read_s=command.read_s,
        grace_max_s=limit,
    )


def _nothing(
    policy: Policy, replica: Replica, command: Resolve, now: float, lost: int, *, final: bool
) -> Nothing | Refused | None:
    installed = command.installed[2] if command.installed is not None else None
    needs = (
        installed is None
        or command.force
        or (command.at_least is not None and installed < command.at_least)
        or (command.exactly is not None and installed != command.exactly)
    )
    staging, missing = staging_of(policy, now)
    newest = policy.newest()
    top = newest.record.number if newest is not None else 0
    settling = now < policy.settled_at
    if needs and lost and not staging and not settling:
        return refused(
            VersionGone,
            f"policy {policy.name!r}: version {lost} is READY, but no living source holds it whole, and nothing newer is "
            f"staging; replica {replica.name!r} cannot get it. Restart the trainer, or keep a replica that holds it",
            version=lost,
        )
    if needs and command.exactly is not None and command.exactly <= top and not settling:
        return refused(
            VersionGone,
            f"policy {policy.name!r}: version {command.exactly} is not held by any living source any more; the newest is "
            f"{top}",
            version=command.exactly,
        )
    if not final and command.wait > 0:
        return None
    hold = policy.hold
    own = hold if hold is not None and hold.replica == replica.name and hold.until >= now else None
    return Nothing(
        latest=policy.floor,
        staging=staging,
        missing=missing,
        lost=lost,
        read_s=own.read_s if own is not None else 0.0,
        held_s=own.until - now if own is not None else 0.0,
    )


def readers_of(policy: Policy, source: Source, now: float, *, closing: bool = False) -> list[str]:
    """Replicas whose lease is on a version older than the newest READY one (or on any: ``closing``) that lies in this
    slot or stage."""
    newest = policy.newest()
    top = newest.record.number if newest is not None else 0
    place = (source.agent, source.region)
    found = []
    for name, lease in policy.leases.items():
        if (lease.number >= top and not closing) or lease.until < now:
            continue
        version = policy.versions.get(lease.number)
        sources: list[Source] = []
        if lease.trainer and version is not None and version.record.identity == lease.identity:
            sources += version.record.sources
        for parent in lease.parents:
            holder = policy.replicas.get(parent)
            if holder is not None and holder.record is not None and holder.record.identity == lease.identity:
                sources += holder.held
        if any((item.agent, item.region) == place for item in sources):
            found.append(name)
    return sorted(found)


def await_free(policy: Policy, command: AwaitFree, now: float, *, final: bool) -> Free | None:
    readers = readers_of(policy, command.source, now, closing=command.closing)
    if readers and not final and command.wait > 0:
        return None
    hold = policy.hold
    held = hold is not None and hold.replica in readers and hold.until >= now
    return Free(leased_by=tuple(readers), held_for_s=hold.until - now if held and hold is not None else 0.0)
