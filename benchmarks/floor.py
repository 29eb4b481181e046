"""What the machine itself can do: a memcpy in one process, and one NIXL read between two."""

from __future__ import annotations

import base64
import secrets
import time

import numpy as np
from torch import Tensor

from mx_rl.arena import Arena
from mx_rl.config import Options
from mx_rl.transport.agent import Agent, Moves


def copy_floor(nbytes: int) -> float:
    """Seconds of a copy of ``nbytes`` between two huge-page blocks; pages are touched before it is timed."""
    if nbytes not in _blocks:
        _blocks[nbytes] = Arena(2, nbytes, nonce=1)
        _blocks[nbytes].blocks[1].copy_(_blocks[nbytes].blocks[0])
    begun = time.perf_counter()
    _blocks[nbytes].blocks[1].copy_(_blocks[nbytes].blocks[0])
    return time.perf_counter() - begun


_blocks: dict[int, Arena] = {}


class Memory:
    """Two huge-page blocks of the model's size at a reader; one at the trainer."""

    def __init__(self, weights: dict[str, Tensor], blocks: int, *hello: tuple[str, list[str], int]) -> None:
        self.nbytes = sum(tensor.nbytes for tensor in weights.values())
        self.arena = Arena(blocks, self.nbytes, nonce=1)
        self.name = f"bench-{secrets.token_hex(8)}"
        self.agent = Agent(self.name, Options())
        self.metadata = self.agent.register(self.arena.regions())
        self.moves: Moves | None = None
        if hello:
            self._prepare(*hello[0])

    def hello(self) -> tuple[str, list[str], int]:
        return self.name, [base64.b64encode(blob).decode() for blob in self.metadata], self.arena.address(0)

    def _prepare(self, peer: str, metadata: list[str], address: int) -> None:
        self.agent.add_peer([base64.b64decode(blob) for blob in metadata], peer)
        one = {"mine": self.arena.address(0), "theirs": address, "nbytes": self.nbytes}
        rows = {key: np.array([value], dtype=np.int64) for key, value in one.items()}
        self.moves = Moves(self.agent, peer, "READ", **rows, starts=np.array([0, 1], dtype=np.int64))

    def copy(self) -> float:
        begun = time.perf_counter()
        self.arena.blocks[1].copy_(self.arena.blocks[0])
        return time.perf_counter() - begun

    def read(self) -> float:
        assert self.moves is not None
        begun = time.perf_counter()
        ended = self.moves.post(0)
        while not ended:
            ended = self.moves.poll(0)
            if time.perf_counter() - begun > 60.0:
                raise RuntimeError("a raw NIXL read did not end in 60 s")
        return time.perf_counter() - begun

    def close(self) -> None:
        if self.moves is not None:
            self.moves.close()
        self.agent.close()
