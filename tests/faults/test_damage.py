"""Bytes that change at their source after the publisher has summed them, in processes of their own."""

from functools import partial

import pytest

from mx_rl.errors import DigestMismatch
from tests.support.actors import RolloutRank, TrainerRank

SHAPES = {f"w{i}": (1024, 512) for i in range(6)}  # 12 MiB: summed by the compiled kernel


class DamagedTrainer(TrainerRank):
    """Its memory goes bad."""

    def flip(self, at: int) -> None:
        ring = self.pub._ring
        newest = max((slot for slot in ring.slots if slot.key is not None), key=lambda slot: slot.key)
        ring.served.arena.blocks[newest.index][at] ^= 8


@pytest.mark.parametrize("lane", ["shm", "tcp"])
def test_a_flipped_bit_is_named_then_a_peer_gives_the_version_whole(server, children, lane):
    env = {"UCX_TLS": "tcp"} if lane == "tcp" else {}
    trainer = children(DamagedTrainer, server.path, SHAPES, env=env)
    readers = [children(RolloutRank, server.path, SHAPES, f"r{i}", env=env) for i in (0, 1)]
    late = children(partial(RolloutRank, sources=("trainer", "peer")), server.path, SHAPES, "late", env=env)
    first = trainer.call("publish_ready", 1.0)
    for reader in readers:
        report = reader.call("sync", first)
        assert report.unproved == ()
        assert report.seconds["verify"] > 0
    second = trainer.call("publish_ready", 2.0)
    assert readers[0].call("sync", second).version == second
    trainer.call("flip", 3 * (2 << 20) + 4321)
    report = late.call("sync", second)
    assert "DigestMismatch: w3" in report.refused["trainer:0"]
    assert report.served_by["peer:r0"] > 0
    assert late.call("values") == {2.0}
    third = trainer.call("publish_ready", 3.0)
    trainer.call("flip", 4321)
    with pytest.raises(DigestMismatch, match="w0"):
        readers[1].call("sync", third)
    assert readers[1].call("values") == {1.0}
    fourth = trainer.call("publish_ready", 4.0)
    for reader in (*readers, late):
        assert reader.call("sync", fourth).version == fourth
        assert reader.call("values") == {4.0}
