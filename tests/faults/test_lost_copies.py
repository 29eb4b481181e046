"""Worlds that hold copies, in separate processes: the death of one rank costs their readers nothing."""

import signal
import time
from functools import partial

import pytest

from mx_rl.errors import ReplicaMismatch
from tests.support.actors import RolloutRank, TrainerRank
from tests.support.stopping import StoppingReader

MIB = 1 << 20
SHAPES = {f"w{i}": (1024, 1024) for i in range(12)}  # 12 boxes of 4 MiB
TOTAL = 48 * MIB


def together(ranks, name, *args):
    return [future.result(60) for future in [rank.begin(name, *args) for rank in ranks]]


def ready(ranks, value):
    numbers = together(ranks, "publish_ready", value)
    assert len(set(numbers)) == 1
    return numbers[0]


def start(children, server, world_size, **named):
    ranks = [
        children(partial(TrainerRank, whole=True), server.path, SHAPES, rank, world_size, **named)
        for rank in range(world_size)
    ]
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        ready(ranks, value)
    sizes = together(ranks, "slot_bytes")
    assert sum(sizes) == 2 * TOTAL, "each box is snapshotted by two ranks"
    return ranks


@pytest.mark.parametrize(("lane", "victim"), [("shm", 0), pytest.param("shm", 2, marks=pytest.mark.soak), ("tcp", 1)])
def test_a_rank_killed_in_mid_transfer_is_replaced_by_the_other_copy(server, children, lane, victim):
    env = {"UCX_TLS": "tcp"} if lane == "tcp" else {}
    ranks = start(children, server, 3, env=env)
    reader = children(StoppingReader, server.path, SHAPES, "reader", env=env)
    number = ready(ranks, 6.0)
    normal = reader.call("sync", number)
    assert sorted(normal.served_by) == ["trainer:0", "trainer:1", "trainer:2"]
    number = ready(ranks, 7.0)
    label = f"trainer:{victim}"
    begun = time.monotonic()
    report = reader.call("sync_and_stop", ranks[victim].pid, label, 3, number, signal.SIGKILL)
    assert time.monotonic() - begun < 10.0
    ranks[victim].process.join(10)
    assert not ranks[victim].process.is_alive()
    assert report.version == number
    late = report.served_by.get(label) == normal.served_by[label]  # all of it had arrived when the reader next looked
    assert report.retries == (0 if late else 1)
    assert list(report.refused) == ([] if late else [label])
    assert report.served_by[label] >= 3 * MIB
    assert sum(report.served_by.values()) == TOTAL, "what was confirmed is not moved twice"
    assert reader.call("values") == {7.0}


def test_a_reader_that_comes_after_the_death_reads_the_other_copies(server, children):
    ranks = start(children, server, 2)
    number = ready(ranks, 6.0)
    ranks[0].kill()
    for _ in range(2):  # the first one finds out and tells the registry
        joiner = children(partial(RolloutRank, sources=("trainer",)), server.path, SHAPES)
        report = joiner.call("sync", number)
        assert report.version == number
        assert joiner.call("values") == {6.0}
        assert report.served_by["trainer:1"] == TOTAL


def test_a_drifted_rank_in_a_process_of_its_own_is_named_to_all(server, children):
    ranks = start(children, server, 2)
    number = ready(ranks, 6.0)
    reader = children(RolloutRank, server.path, SHAPES)
    reader.call("sync", number)
    ranks[1].call("set_element", "w7", 6.0000005)
    published = together(ranks, "publish")
    for rank in ranks:
        with pytest.raises(ReplicaMismatch) as caught:
            rank.call("wait", published[0])
        assert (caught.value.ranks, caught.value.version) == ([0, 1], published[0])
        assert caught.value.tensors == ["w7"]
    assert reader.call("sync").kind == "none"
    number = ready(ranks, 8.0)
    assert reader.call("sync", number).version == number
    assert reader.call("values") == {8.0}
