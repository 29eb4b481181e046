"""Prefetch between real processes: threads that always compute, and a replica of two ranks, one of which dies."""

from functools import partial

import pytest

from mx_rl.errors import MxRLError
from tests.support.actors import TrainerRank
from tests.support.generating import GeneratingRank

SHAPES = {"a": (64, 512), "b": (128, 256)}


@pytest.mark.parametrize("prefetch", [True, False])
def test_threads_that_always_compute_see_whole_versions_only_while_a_hundred_arrive(server, children, prefetch):
    trainer = children(TrainerRank, server.path, SHAPES)
    rollout = children(partial(GeneratingRank, prefetch=prefetch), server.path, SHAPES)
    trainer.call("start_publishing", 0.01)
    seen = rollout.call("generate_during", 100, timeout=100)
    trainer.call("stop_publishing")
    assert not seen["faults"]
    assert seen["outputs"] > 100
    assert len(set(seen["installed"])) == 100
    assert sorted(seen["installed"]) == seen["installed"], "versions only rise"


def test_two_ranks_in_two_processes_fetch_ahead_and_switch_together(server, children):
    trainer = children(TrainerRank, server.path, SHAPES)
    ranks = [children(partial(GeneratingRank, prefetch=True), server.path, SHAPES, "tp", rank, 2) for rank in (0, 1)]
    for value in (1.0, 2.0, 3.0):
        number = trainer.call("publish_ready", value)
        for rank in ranks:
            rank.call("await_staged", number)
        syncs = [rank.begin("sync") for rank in ranks]
        reports = [sync.result(60) for sync in syncs]
        assert [report.version for report in reports] == [number, number]
        assert all("move" not in report.seconds for report in reports)
        assert [rank.call("values") for rank in ranks] == [{value}, {value}]


def test_a_rank_that_dies_with_a_version_staged_is_replaced_and_both_switch(server, children):
    trainer = children(TrainerRank, server.path, SHAPES)
    make = partial(GeneratingRank, prefetch=True)
    zero, one = (children(make, server.path, SHAPES, "tp", rank, 2) for rank in (0, 1))
    number = trainer.call("publish_ready", 1.0)
    for rank in (zero, one):
        rank.call("await_staged", number)
    one.kill()
    with pytest.raises(MxRLError):
        zero.call("sync", None, 2.0)
    one = children(make, server.path, SHAPES, "tp", 1, 2)
    syncs = [rank.begin("sync", number) for rank in (zero, one)]
    assert [sync.result(60).version for sync in syncs] == [number, number]
    assert zero.call("values") == one.call("values") == {1.0}
