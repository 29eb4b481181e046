"""Real kills and stops in separate processes: whoever is hit, the others finish in their normal time."""

import os
import signal
import time

import pytest

from mx_rl.errors import MxRLError, Tainted
from mx_rl.registry.memory import MemoryRegistry
from tests.support.actors import RolloutRank, TrainerRank
from tests.support.procs import Child

SHAPES = {"a": (1024, 512), "b": (2048, 1024), "c": (7,)}
BIG = {"a": (16384, 1024)}


def sync_all(readers, at_least, timeout=60.0):
    return [
        future.result(timeout) for future in [reader.begin("sync", at_least, timeout=timeout) for reader in readers]
    ]


@pytest.mark.parametrize("seconds", [6.0, pytest.param(60.0, marks=pytest.mark.soak)])
@pytest.mark.parametrize("lane", ["shm", "tcp"])
def test_eight_readers_against_a_publisher_at_full_speed_never_install_a_torn_version(server, children, lane, seconds):
    env = {"UCX_TLS": "tcp"} if lane == "tcp" else {}
    trainer = children(TrainerRank, server.path, SHAPES, env=env)
    readers = [children(RolloutRank, server.path, SHAPES, env=env) for _ in range(8)]
    trainer.call("publish_ready", 1.0)
    trainer.call("start_publishing")
    loops = [reader.begin("sync_for", seconds, timeout=seconds + 90) for reader in readers]
    found = [loop.result(seconds + 90) for loop in loops]
    published = trainer.call("stop_publishing", timeout=90)
    assert published > 10
    for one in found:
        assert one["torn"] == 0
        assert one["fell"] == 0
        assert one["installed"] > 0


def test_a_reader_killed_in_mid_transfer_does_not_delay_others(server, children):
    trainer = children(TrainerRank, server.path, BIG)
    readers = [children(RolloutRank, server.path, BIG) for _ in range(3)]
    victim = children(RolloutRank, server.path, BIG)
    first = trainer.call("publish_ready", 1.0)
    sync_all(readers, first)
    normal = []
    for value in (2.0, 3.0, 4.0):
        number = trainer.call("publish_ready", value)
        begun = time.monotonic()
        sync_all(readers, number)
        normal.append(time.monotonic() - begun)
    number = trainer.call("publish_ready", 5.0)
    victim.begin("sync", number)
    victim.kill()
    begun = time.monotonic()
    sync_all(readers, number)
    assert time.monotonic() - begun < 5 * max(normal) + 1.0
    for reader in readers:
        assert reader.call("values") == {5.0}
    again = children(RolloutRank, server.path, BIG)
    assert again.call("sync", number).version == number


def test_a_stopped_reader_costs_the_publisher_and_the_others_nothing(server, children):
    trainer = children(TrainerRank, server.path, SHAPES)
    victim, other = (children(RolloutRank, server.path, SHAPES) for _ in range(2))
    first = trainer.call("publish_ready", 1.0)
    sync_all([victim, other], first)
    os.kill(victim.pid, signal.SIGSTOP)
    pending = victim.begin("sync", first + 1)
    begun = time.monotonic()
    for value in range(2, 8):
        number = trainer.call("publish_ready", float(value))
        assert other.call("sync", number).version == number
    assert time.monotonic() - begun < 12.0
    os.kill(victim.pid, signal.SIGCONT)
    assert pending.result(60).version > first
    assert victim.call("sync", number).version == number
    assert victim.call("values") == {7.0}


def test_a_publisher_killed_in_mid_publish_leaves_the_last_version_and_its_successor_goes_above(server, children):
    trainer = children(TrainerRank, server.path, BIG)
    reader = children(RolloutRank, server.path, BIG)
    number = trainer.call("publish_ready", 1.0)
    reader.call("sync", number)
    trainer.begin("publish", 2.0)
    trainer.kill()
    assert reader.call("values") == {1.0}
    assert reader.call("ready")
    successor = children(TrainerRank, server.path, BIG, 0, 1, "w")
    again = successor.call("publish_ready", 3.0)
    assert again > number
    assert reader.call("sync", again).version == again
    assert reader.call("values") == {3.0}


def test_a_dead_trainer_does_not_stop_a_joiner_who_reads_from_a_peer(server, children):
    trainer = children(TrainerRank, server.path, SHAPES)
    peer = children(RolloutRank, server.path, SHAPES)
    number = trainer.call("publish_ready", 4.0)
    peer.call("sync", number)
    trainer.kill()
    joiner = children(RolloutRank, server.path, SHAPES)
    report = joiner.call("sync", number)
    assert report.version == number
    assert report.source == f"peer:{peer.call('name')}"
    assert joiner.call("values") == {4.0}


def test_a_rank_killed_between_vote_and_install_is_replaced_and_the_replica_heals(server, children):
    trainer = children(TrainerRank, server.path, SHAPES)
    first = trainer.call("publish_ready", 1.0)
    leader, follower = (children(RolloutRank, server.path, SHAPES, "tp", rank, 2) for rank in (0, 1))
    sync_all([leader, follower], first)
    number = trainer.call("publish_ready", 2.0)
    staged = [child.begin("stage") for child in (leader, follower)]
    assert [future.result(30) for future in staged] == [number, number]
    install = leader.begin("install")
    follower.kill()
    with pytest.raises(MxRLError) as caught:
        install.result(60)
    survivor = leader.call("values")
    assert survivor == ({2.0} if isinstance(caught.value, Tainted) else {1.0})
    replaced = children(RolloutRank, server.path, SHAPES, "tp", 1, 2)
    reports = sync_all([leader, replaced], number)
    assert {report.version for report in reports} == {number}
    for child in (leader, replaced):
        assert child.call("values") == {2.0}
        assert child.call("ready")


def test_a_rank_of_the_world_killed_is_replaced_and_the_next_version_is_of_one_step(server, children):
    ranks = [children(TrainerRank, server.path, SHAPES, rank, 2) for rank in (0, 1)]
    reader = children(RolloutRank, server.path, SHAPES)

    def publish(step, members):
        numbers = [future.result(60) for future in [rank.begin("publish", float(step), step) for rank in members]]
        assert len(set(numbers)) == 1
        return numbers[0]

    reader.call("sync", publish(1, ranks))
    ranks[1].kill()
    new = children(TrainerRank, server.path, SHAPES, 1, 2)
    members = [ranks[0], new]
    lost = ranks[0].begin("publish", 2.0, 2)  # of an epoch that is over: it never becomes READY
    new_lost = new.begin("publish", 2.0, 2)
    for future in (lost, new_lost):
        try:
            future.result(60)
        except MxRLError:
            continue
    begun = time.monotonic()
    while True:
        number = publish(3, members)
        if ranks[0].call("wait", number).ready:
            break
        assert time.monotonic() - begun < 30
    report = reader.call("sync", number)
    assert report.version == number
    assert report.step == 3
    assert reader.call("values") == {3.0}


def test_a_registry_that_forgot_is_told_again_and_numbers_go_on(server, children):
    trainer = children(TrainerRank, server.path, SHAPES)
    reader = children(RolloutRank, server.path, SHAPES)
    for value in range(1, 6):
        number = trainer.call("publish_ready", float(value))
    reader.call("sync", number)
    server.replace(MemoryRegistry())
    again = trainer.call("publish_ready", 6.0)
    assert again == number + 1
    assert reader.call("sync", again).version == again
    server.replace(MemoryRegistry())
    joiner = children(RolloutRank, server.path, SHAPES)
    assert joiner.call("sync", again, timeout=30).version == again


def test_registry_and_publisher_gone_together_subscribers_alone_carry_the_number(server, children):
    trainer = children(TrainerRank, server.path, SHAPES)
    reader = children(RolloutRank, server.path, SHAPES)
    for value in range(1, 8):
        number = trainer.call("publish_ready", float(value))
    reader.call("sync", number)
    trainer.kill()
    server.replace(MemoryRegistry())
    joiner = children(RolloutRank, server.path, SHAPES)
    assert reader.call("sync", timeout=30).kind == "none"  # which also tells the new registry what it holds
    assert joiner.call("sync", number, timeout=30).version == number
    successor = children(TrainerRank, server.path, SHAPES, 0, 1, "next launch")
    again = successor.call("publish_ready", 9.0)
    assert again > number
    for child in (reader, joiner):
        assert child.call("sync", again).version == again
        assert child.call("values") == {9.0}


def test_a_source_that_restarts_in_place_is_never_read_through_the_old_record(server, children):
    reader = children(RolloutRank, server.path, SHAPES)
    for round_number in range(3):
        trainer = children(TrainerRank, server.path, SHAPES, 0, 1, "w")
        value = float(round_number + 1)
        number = trainer.call("publish_ready", value)
        assert reader.call("sync", number).version == number
        assert reader.call("values") == {value}
        trainer.kill()


@pytest.mark.parametrize("turns", [8, pytest.param(50, marks=pytest.mark.soak)])
def test_readers_in_turn_come_read_and_go_and_the_source_is_as_fast_as_before(server, children, turns):
    trainer = children(TrainerRank, server.path, SHAPES)
    number = trainer.call("publish_ready", 1.0)
    steady = children(RolloutRank, server.path, SHAPES)

    def reading():
        begun = time.monotonic()
        assert steady.call("sync", trainer.call("publish_ready", 1.0)).kind == "full"
        return time.monotonic() - begun

    steady.call("sync", number)
    before = min(reading() for _ in range(5))
    for turn in range(turns):
        child = Child(RolloutRank, server.path, SHAPES)
        child.call("sync", number)
        child.kill() if turn % 2 else child.stop()
    after = min(reading() for _ in range(5))
    assert after < 3 * before + 0.1
