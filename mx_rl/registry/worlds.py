"""Claims: which launch publishes a policy, and under which epoch. Opening one fences every older world."""

from __future__ import annotations

import msgspec

from mx_rl.errors import Fenced, InvalidArgument, SeatTaken
from mx_rl.records import Claim, Refused, Seat
from mx_rl.registry.policy import MAX_FENCED, Epoch, Policy, World, refused

MAX_WORLD = 65536
MAX_PENDING = 8


def claim(policy: Policy, command: Claim, now: float, *, final: bool) -> Seat | Refused | None:
    if command.held is not None:
        policy.tell(command.held.identity)  # even a fenced world's READY number is never given again
    if (command.world, command.incarnation) in policy.fenced:
        return fenced(policy, command.incarnation)
    if not 1 <= command.world_size <= MAX_WORLD or not 0 <= command.rank < command.world_size:
        return refused(
            InvalidArgument,
            f"policy {policy.name!r}: rank {command.rank} of {command.world_size} is no seat of a world",
        )
    epoch = policy.epoch
    if epoch is not None and epoch.world != command.world:
        epoch = None
    if epoch is None and 0 < command.epoch < policy.known_epoch and command.world != policy.known_world:
        return fenced(policy, command.incarnation)
    refusal = _size_refusal(policy, epoch, command, now)
    if refusal is not None:
        return refusal
    epoch = epoch if epoch is policy.epoch else None
    if epoch is not None and not epoch.superseded and epoch.seats[command.rank] == command.incarnation:
        policy.seat(command.incarnation, ("world", command.world, command.rank), now)
        _restore(policy, command, now)
        return seat_of(epoch)
    refusal = _take_seat(policy, epoch, command, now)
    if refusal is not None:
        return refusal
    world = policy.pending[command.world]
    missing = _missing(policy, world, now)
    settling = now < policy.settled_at and not policy.floor and not command.epoch
    if not missing and not settling:
        _open(policy, world, now)
    _restore(policy, command, now)
    if not missing and not settling and policy.epoch is not None:
        return seat_of(policy.epoch)
    if not final and command.wait > 0:
        return None
    return Seat(epoch=0, nonce=0, base=0, open=False, missing=missing)


def fenced(policy: Policy, incarnation: str) -> Refused:
    epoch = policy.known_epoch
    world = policy.known_world
    return refused(
        Fenced,
        f"policy {policy.name!r}: {incarnation} lost its seat: epoch {epoch} of world {world!r} publishes now. "
        "This publisher is finished; start a new world to take over",
        policy=policy.name,
        epoch=epoch,
    )


def seat_of(epoch: Epoch) -> Seat:
    return Seat(
        epoch=epoch.number,
        nonce=epoch.nonce,
        base=epoch.base,
        open=True,
        missing=(),
        rejoined=epoch.rejoined and not epoch.ready,
    )


def unclaimed(policy: Policy, now: float) -> tuple[int, ...]:
    """Ranks that the most complete pending world still waits for."""
    worlds = [_missing(policy, world, now) for world in policy.pending.values()]
    return min(worlds, key=len) if worlds else ()


def fence(policy: Policy, world: str, rank: int, incarnation: str) -> None:
    policy.unseat(incarnation, ("world", world, rank))
    policy.fenced[world, incarnation] = None
    while len(policy.fenced) > MAX_FENCED:
        del policy.fenced[next(iter(policy.fenced))]
    policy.bump()


def supersede(policy: Policy, epoch: Epoch, why: str) -> None:
    """Nothing of this epoch becomes READY any more; what is staging is aborted."""
    if epoch.superseded:
        return
    epoch.superseded = why
    for item in epoch.staging().values():
        item.state, item.reason = "aborted", why
        item.commits = {}
    policy.bump()


def _size_refusal(policy: Policy, epoch: Epoch | None, command: Claim, now: float) -> Refused | None:
    """One world has one size. A world of which nobody lives may be launched again with another."""
    world = policy.pending.get(command.world)
    seats: dict[int, str] = dict(enumerate(epoch.seats)) if epoch is not None else {}
    if world is not None:
        seats |= {rank: item.incarnation for rank, item in world.claims.items()}
    size = world.size if world is not None else len(seats)
    if not seats or size == command.world_size:
        return None
    living = sorted(rank for rank, incarnation in seats.items() if policy.alive(incarnation, now))
    if not living:
        policy.pending.pop(command.world, None)
        if epoch is not None:
            supersede(policy, epoch, f"world {epoch.world!r} was launched again with {command.world_size} ranks")
            policy.previous, policy.epoch = epoch, None
            for rank, incarnation in enumerate(epoch.seats):
                fence(policy, epoch.world, rank, incarnation)
        return None
    return refused(
        InvalidArgument,
        f"policy {policy.name!r}: rank {command.rank} says that world {command.world!r} has {command.world_size} ranks, "
        f"its living ranks {living[:10]} said {size}: give each launch a world name of its own",
        world=command.world,
        expected=size,
        got=command.world_size,
    )


def _take_seat(policy: Policy, epoch: Epoch | None, command: Claim, now: float) -> Refused | None:
    world = policy.pending.get(command.world)
    claimed = world.claims.get(command.rank) if world is not None else None
    seats = epoch.seats if epoch is not None else []
    holder = claimed.incarnation if claimed is not None else (seats[command.rank] if command.rank < len(seats) else "")
    if holder and holder != command.incarnation:
        since = claimed.epoch if claimed is not None else (epoch.number if epoch is not None else 0)
        if 0 < command.epoch < since:
            return fenced(policy, command.incarnation)
        if policy.alive(holder, now) and command.epoch <= since:
            return refused(
                SeatTaken,
                f"policy {policy.name!r}: rank {command.rank} of world {command.world!r} is held by {holder}, which lives; "
                f"{command.incarnation} cannot take it. Stop that process, or give this launch another world name",
                holder=holder,
            )
        fence(policy, command.world, command.rank, holder)
    if epoch is not None:
        left = "left" if not holder else f"({holder}) was replaced by {command.incarnation}"
        supersede(policy, epoch, f"rank {command.rank} of world {command.world!r} {left}: claim a seat again")
    if world is None:
        world = policy.pending[command.world] = World(command.world, command.world_size)
        while len(policy.pending) > MAX_PENDING:
            del policy.pending[next(iter(policy.pending))]
    known = world.claims.get(command.rank)
    if known is None or known.incarnation != command.incarnation or known.epoch != command.epoch:
        policy.bump()
    world.claims[command.rank] = msgspec.structs.replace(command, held=None, wait=0.0)
    policy.seat(command.incarnation, ("world", command.world, command.rank), now)
    if command.epoch:
        policy.know_epoch(command.epoch, command.world)
    return None


def _missing(policy: Policy, world: World, now: float) -> tuple[int, ...]:
    """Seats without a living claimer: an epoch never opens over the dead."""
    return tuple(
        rank
        for rank in range(world.size)
        if rank not in world.claims or not policy.alive(world.claims[rank].incarnation, now)
    )


def _open(policy: Policy, world: World, now: float) -> None:
    claims = [world.claims[rank] for rank in range(world.size)]
    seats = [item.incarnation for item in claims]
    old = policy.epoch
    same_world = old is not None and old.world == world.name
    asserted = {(item.epoch, item.nonce) for item in claims}
    number, nonce = next(iter(asserted)) if len(asserted) == 1 else (0, 0)
    if number and number >= policy.known_epoch and (old is None or old.number < number):
        base = max(item.base for item in claims)  # a registry that forgot: nothing changes for them
        rejoined = any(item.rejoined for item in claims)
        policy.highest = max(policy.highest, base + max(item.k for item in claims))
    else:
        number = max(policy.known_epoch + 1, int(now * 1000))
        nonce = _last(world).nonce
        base = max(policy.floor, policy.highest, *(item.start_after for item in claims))
        kept = [
            old.seats[rank] == item.incarnation if old is not None and same_world else item.epoch > 0
            for rank, item in enumerate(claims)
        ]
        rejoined = any(kept) and not all(kept)
    if old is not None:
        supersede(policy, old, f"fenced: epoch {number} of world {world.name!r} publishes now")
        for rank, incarnation in enumerate(old.seats):
            if incarnation and not (same_world and incarnation in seats):
                fence(policy, old.world, rank, incarnation)
    policy.previous = old
    begun = max(item.k for item in claims) if number in {item.epoch for item in claims} else 0
    policy.epoch = Epoch(number, nonce, world.name, seats, base, rejoined=rejoined, begun=begun)
    policy.epoch.ready = any(item.record.identity[:2] == (number, nonce) for item in policy.versions.values())
    policy.know_epoch(number, world.name)
    del policy.pending[world.name]
    policy.bump()


def _last(world: World) -> Claim:
    """The claimer that completed the world: dicts keep the order of first insertion."""
    return world.claims[next(reversed(world.claims))]


def _restore(policy: Policy, command: Claim, now: float) -> None:
    held = command.held
    if held is not None:
        policy.restore(held)
        if command.epoch == held.epoch and command.rank < len(held.sources):
            policy.owners.setdefault(held.sources[command.rank].agent, command.incarnation)
    policy.reissue(now)
