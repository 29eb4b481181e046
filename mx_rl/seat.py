"""Which seat of which world a publisher takes, read from where the launch says it."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass

from mx_rl.config import torchrun_seat
from mx_rl.errors import InvalidArgument

_STORE_KEY = "mx_rl/world"


@dataclass(frozen=True, kw_only=True)
class WorldSeat:
    """``world`` is one name a launch: all ranks of it share the name, no other launch does."""

    world: str
    rank: int
    world_size: int


def find_seat(rank: int | None, world_size: int | None, world: str | None) -> WorldSeat:
    """Explicit arguments first, then torch.distributed, then torchrun's variables, else a world of one rank.

    Raises InvalidArgument where several ranks have no common world name, or the arguments contradict one another.
    """
    if rank is None and world_size is None:
        found = _distributed_seat() or _torchrun_seat()
        if found is None:
            return WorldSeat(world=world or f"single-{secrets.token_hex(8)}", rank=0, world_size=1)
        return WorldSeat(world=world or found.world, rank=found.rank, world_size=found.world_size)
    if rank is None or world_size is None:
        raise InvalidArgument(f"rank={rank} and world_size={world_size}: give both or neither")
    if world_size < 1 or not 0 <= rank < world_size:
        raise InvalidArgument(f"rank={rank} of world_size={world_size}: rank must be 0 to world_size - 1")
    if world is None:
        if world_size > 1:
            raise InvalidArgument(
                f"rank={rank} of world_size={world_size} without world=: give all ranks of this launch one name, "
                "and another name to the next launch"
            )
        world = f"single-{secrets.token_hex(8)}"
    return WorldSeat(world=world, rank=rank, world_size=world_size)


def _distributed_seat() -> WorldSeat | None:
    """torch.distributed's rank; the world's name is agreed through its store, so that every launch has another."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    store = distributed.distributed_c10d._get_default_store()
    name = store.compare_set(_STORE_KEY, "", f"launch-{secrets.token_hex(8)}").decode()
    return WorldSeat(world=name, rank=distributed.get_rank(), world_size=distributed.get_world_size())


def _torchrun_seat() -> WorldSeat | None:
    found = torchrun_seat()
    return None if found is None else WorldSeat(world=found[2], rank=found[0], world_size=found[1])
