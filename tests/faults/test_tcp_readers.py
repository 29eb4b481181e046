"""Readers that die in mid-transfer over TCP while their source is busy, and stopped now and then: it keeps serving."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Iterator

import pytest

from tests.transport_world import TCP_WRITE, World, cut, noise, soak, wait_until, world_of

MIB = 1 << 20
NBYTES = 32 * MIB
WINDOWS = list(range(NBYTES // MIB))


@pytest.fixture
def world() -> Iterator[World]:
    with world_of(TCP_WRITE) as made:
        yield made


def _burn(cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(1000))


@pytest.fixture
def busy_core() -> Iterator[int]:
    """A core that one other process keeps busy."""
    cpu = max(os.sched_getaffinity(0))
    burner = multiprocessing.get_context("forkserver").Process(target=_burn, args=(cpu,), daemon=True)
    burner.start()
    yield cpu
    burner.kill()
    burner.join(5)


@pytest.mark.parametrize("kills", [6, pytest.param(50, marks=soak)])
def test_readers_killed_one_after_another_in_mid_transfer_leave_the_source_serving(
    world: World, busy_core: int, kills: int
) -> None:
    chance = random.Random(kills)
    source = world.source(NBYTES)
    os.sched_setaffinity(source.pid, {busy_core})
    generation = source.publish(1)
    for number in range(kills):
        reader = world.reader(NBYTES)
        reader.connect(source.get_record())
        reader.route(cut(NBYTES, MIB))
        reader.start(generation, WINDOWS)
        assert reader.step(30.0, until=1 + number % 4)
        if number % 2:
            source.stop()
            reader.step(chance.uniform(0.05, 0.15))
            reader.kill()
            time.sleep(chance.uniform(0.05, 0.3))  # what is tested: for how long the source does not notice
            source.cont()
        else:
            reader.kill()
        assert source.alive()
    survivor = world.reader(NBYTES)
    survivor.connect(source.get_record())
    survivor.route(cut(NBYTES, MIB))
    survivor.pull(generation, WINDOWS, timeout=45.0)
    assert survivor.data() == noise(1, NBYTES).tobytes()
    wait_until(lambda: source.num_peers() == 1, 30.0, "the source forgets the dead readers")


@pytest.mark.parametrize("turns", [2, pytest.param(12, marks=soak)])
def test_a_reader_that_gives_up_on_a_stopped_source_does_not_kill_it(world: World, turns: int) -> None:
    """The agent is destroyed while the source sleeps for seconds. With a 64-byte READ of the header under way, UCX
    aborted the source here: "Fatal: unexpected error: Endpoint timeout"."""
    source, reader = world.source(NBYTES), world.reader(NBYTES)
    for _ in range(turns):
        reader.connect(source.get_record())
        reader.route(cut(NBYTES, MIB))
        reader.start(source.publish(1), WINDOWS)
        reader.step(30.0, until=2)
        source.stop()
        reader.step(1.0)
        reader.finish()
        assert reader.renew()
        left = reader.data()
        time.sleep(2.5)  # what is tested: UCX notices at its own pace that the reader is gone
        source.cont()
        wait_until(lambda: source.num_peers() == 0, 20.0, "the source forgets the reader")
        assert source.alive() and reader.data() == left
        reader.clear()
    reader.connect(source.get_record())
    reader.route(cut(NBYTES, MIB))
    reader.pull(source.publish(2), WINDOWS)
    assert reader.data() == noise(2, NBYTES).tobytes()


def test_a_stopped_reader_does_not_slow_the_others(world: World) -> None:
    source, stopped, other = world.source(NBYTES), world.reader(NBYTES), world.reader(NBYTES)
    generation = source.publish(1)
    for reader in (stopped, other):
        reader.connect(source.get_record())
        reader.route(cut(NBYTES, MIB))
    stopped.start(generation, WINDOWS)
    stopped.step(30.0, until=2)
    stopped.stop()
    try:
        for _ in range(3):
            other.clear()
            other.pull(generation, WINDOWS)
            assert other.data() == noise(1, NBYTES).tobytes()
    finally:
        stopped.cont()
    stopped.step(30.0, until=len(WINDOWS))
    assert stopped.done() and stopped.data() == noise(1, NBYTES).tobytes()
