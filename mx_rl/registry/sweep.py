"""What time takes away: silent members, their seats and leases, worlds nobody claims, blobs nobody refers to."""

from __future__ import annotations

from mx_rl.registry.policy import Policy

SWEEP_S = 1.0
EMPTY_LEASES = 10  # a policy without members is forgotten, but for its floor, after so many leases


def sweep(policy: Policy, now: float) -> bool:
    """Drop what has expired. True where the policy itself has been empty for long."""
    _members(policy, now)
    for name in [name for name, lease in policy.leases.items() if lease.until < now]:
        policy.end_lease(name)
    if policy.hold is not None and policy.hold.until < now:
        policy.hold = None
        policy.bump()
    for name, world in list(policy.pending.items()):
        for rank, item in list(world.claims.items()):
            if item.incarnation not in policy.members:
                del world.claims[rank]
        if not world.claims:
            del policy.pending[name]
    policy.reissue(now)  # its publisher may have been out of reach when a higher number was told
    policy.drop_versions()
    _unreferenced(policy)
    if policy.members:
        policy.empty_since = None
        return False
    if policy.empty_since is None:
        policy.empty_since = now
    return now - policy.empty_since > EMPTY_LEASES * policy.rules.lease_s


def _members(policy: Policy, now: float) -> None:
    limit = policy.rules.lease_s
    for incarnation, member in list(policy.members.items()):
        if now - member.seen <= limit:
            continue
        policy.bump()
        for kind, name, rank in sorted(member.seats):
            replica = policy.replicas.get(name) if kind == "replica" else None
            if replica is None:
                continue
            if rank == 0 or not replica.named:
                policy.drop_replica(replica, f"its rank {rank} has been silent for over {limit:g} s")
                continue
            policy.set_holding(replica, replica.record, ())
            replica.seats[rank] = None
            member.seats.discard((kind, name, rank))
        # A silent trainer rank keeps its seat until another takes it: it may only have been stopped.
        if policy.epoch is None or incarnation not in policy.epoch.seats or now - member.seen > EMPTY_LEASES * limit:
            del policy.members[incarnation]


def _unreferenced(policy: Policy) -> None:
    """Blobs, agents and slot generations that no version, seat or living member names."""
    layouts = {version.record.layout for version in policy.versions.values()}
    agents = {source.agent for version in policy.versions.values() for source in version.record.sources}
    for replica in policy.replicas.values():
        agents.update(source.agent for source in replica.held)
        for seat in replica.seats:
            if seat is not None:
                layouts.add(seat.layout)
                agents.add(seat.endpoint)
    if policy.epoch is not None:
        for item in policy.epoch.rounds.values():
            layouts.update(commit.layout for commit in item.commits.values())
            layouts.update(item.layouts)
    for rank_layouts, declared in policy.declared.items():
        if declared.world_layout in layouts:
            layouts.update(rank_layouts)
    for key, blob in list(policy.blobs.items()):
        blob.owners &= policy.members.keys()
        if not blob.owners and key not in layouts and key not in agents:
            del policy.blobs[key]
    for agent, incarnation in list(policy.owners.items()):
        if incarnation not in policy.members and agent not in agents:
            del policy.owners[agent]
    for place in [place for place in policy.generations if place[0] not in agents]:
        if policy.owners.get(place[0]) not in policy.members:
            del policy.generations[place]
