"""What every transport owes, on every lane: one suite. NIXL's sources and readers are processes of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from mx_rl.errors import InvalidArgument, PeerLost, StaleIncarnation, VersionGone
from mx_rl.records import EndpointRecord, decode, encode
from mx_rl.transport import wire
from tests.transport_world import (
    KINDS,
    MEMORY,
    NEAR,
    SHM_READ,
    SHM_WRITE,
    TCP_WRITE,
    Kind,
    Pairs,
    World,
    cut,
    noise,
    soak,
    wait_until,
    world_of,
)

MIB = 1 << 20


Pair = tuple[Any, Any]


@pytest.fixture(scope="module")
def pairs() -> Iterator[Pairs]:
    made = Pairs(4 * MIB, count=2)
    yield made
    made.end()


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture
def pair(kind: Kind, pairs: Pairs, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A source and a reader with two blocks of 4 MiB each."""
    failed = request.session.testsfailed
    yield pairs.take(kind)
    if request.session.testsfailed > failed:
        pairs.drop(kind)
    else:
        pairs.give(kind)


@pytest.fixture
def world(kind: Kind) -> Iterator[World]:
    with world_of(kind) as made:
        yield made


def kinds(*chosen: Kind) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", chosen, ids=str)


def expected(rows: list[tuple[int, int, int]], block: np.ndarray) -> bytes:
    stage = np.zeros_like(block)
    for target, source, nbytes in rows:
        stage[target : target + nbytes] = block[source : source + nbytes]
    return stage.tobytes()


def test_windows_arrive_bit_exact_whatever_the_shape_of_their_runs(pair: Pair, kind: Kind) -> None:
    check_shapes(*pair, kind)


@kinds(*(kind for kind in KINDS if not kind.local))  # copies within a process are of host memory
def test_windows_arrive_bit_exact_between_gpus(kind: Kind) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with world_of(kind) as world:
        check_shapes(world.source(4 * MIB, device="cuda:0"), world.reader(4 * MIB, device="cuda:0"), kind)


def check_shapes(source: Any, reader: Any, kind: Kind) -> None:
    nbytes = 4 * MIB
    assert reader.connect(source.get_record()) == kind.lane
    generation = source.publish(1)
    block = noise(1, nbytes)

    random = np.random.default_rng(2)
    sizes = random.integers(1, 900, 3000)
    targets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    short = [(int(t), int(random.integers(0, nbytes - s)), int(s)) for t, s in zip(targets, sizes, strict=True)]
    edges = [0, 0, 1, 1700, 1700, 2999, 3000, 3000]  # empty windows first, last and between
    shapes = [
        ([(0, 0, nbytes)], [0, 1]),
        ([(5, 3, nbytes - 7)], [0, 1]),
        (cut(nbytes, MIB), [0, 1, 2, 3, 4]),
        (short, edges),
        ([], [0, 0, 0]),
        ([], [0]),
    ]
    for rows, starts in shapes:
        reader.clear()
        reader.route(rows, starts=starts, needs=[1] * (len(starts) - 1))
        windows = list(range(len(starts) - 1))[::-1]
        reader.pull(generation, windows)
        assert reader.data() == expected(rows, block)
        reader.clear()
        reader.pull(generation, windows)  # the same handles again
        assert reader.data() == expected(rows, block)
    assert source.alive()


def test_some_windows_of_a_route_fill_their_runs_and_no_others(pair: Pair) -> None:
    source, reader = pair
    reader.connect(source.get_record())
    generation = source.publish(1, window=MIB // 2)
    reader.route(cut(4 * MIB, MIB // 2))
    reader.pull(generation, [6, 1])
    rows = cut(4 * MIB, MIB // 2)
    assert reader.data() == expected([rows[6], rows[1]], noise(1, 4 * MIB))


def test_a_window_is_moved_only_when_the_source_has_it(pair: Pair) -> None:
    count, window = 8, MIB // 2
    source, reader = pair
    reader.connect(source.get_record())
    source.publish(9)  # other bytes: what is taken too early shows
    generation = source.begin()
    reader.route(cut(count * window, window), needs=[8, 1, 2, 3, 4, 5, 6, 7])  # not in the order of the windows
    reader.start(generation, list(range(count)))
    seen: list[int] = []
    for ready in range(1, count + 1):
        assert reader.step(0.02) == []
        for at in [0] if ready == count else [ready]:
            source.write(at * window, window, seed=3)
        source.confirm(ready)
        seen += reader.step(10.0, until=ready)
        assert len(seen) == ready
    assert reader.done() and reader.finish()
    assert sorted(seen) == list(range(count))
    assert reader.data() == noise(3, count * window).tobytes()
    assert reader.header() == (generation, count)


def test_a_slot_that_is_reused_in_mid_flow_is_version_gone(pair: Pair) -> None:
    source, reader = pair
    reader.connect(source.get_record())
    generation = source.publish(1, confirm=False)
    source.confirm(2)
    reader.route(cut(4 * MIB, MIB))
    reader.start(generation, [0, 1, 2, 3])
    assert reader.step(10.0, until=2) == [0, 1]
    newer = source.publish(2)
    with pytest.raises(VersionGone):
        reader.step(10.0)
    assert reader.finish() or reader.settled(5.0)
    reader.pull(newer, [0, 1, 2, 3])
    assert reader.data() == noise(2, 4 * MIB).tobytes()
    with pytest.raises(VersionGone):
        reader.pull(generation, [0])


def test_no_confirmed_window_is_torn_while_the_slot_is_rewritten_as_fast_as_it_goes(pair: Pair) -> None:
    window = 96 << 10
    source, reader = pair
    reader.connect(source.get_record())
    reader.route(cut(8 * window, window))
    source.churn(8)
    wait_until(lambda: reader.header()[0] > 1, 5.0, "the writer writes")
    count = reader.pull_uniform(8, window, 2.5)
    assert count["torn"] == 0
    assert count["windows"] and count["gone"], count


def connect_and_look(reader: Any, record: bytes) -> None:
    reader.connect(record)
    reader.header()


@kinds(MEMORY, NEAR, SHM_READ, TCP_WRITE)
def test_memory_of_another_process_start_is_stale(world: World) -> None:
    source, reader = world.source(MIB), world.reader(MIB)
    record = decode(source.get_record(), EndpointRecord)
    other = encode(msgspec.structs.replace(record, nonce=record.nonce ^ 1))
    with pytest.raises(StaleIncarnation):
        connect_and_look(reader, other)
    reader.connect(source.get_record(), key="now")  # the failed attempt left nothing in the way
    generation = source.publish(1)
    reader.route(cut(MIB, MIB), key="now")
    reader.pull(generation, [0], key="now")
    source.close_headers()
    with pytest.raises(StaleIncarnation):
        reader.header("now")
    with pytest.raises(StaleIncarnation):
        reader.pull(generation, [0], key="now")


@kinds(MEMORY, NEAR, SHM_READ, SHM_WRITE, TCP_WRITE)
def test_a_killed_source_is_lost_within_seconds_and_the_next_one_serves(world: World) -> None:
    first, second, reader = world.source(8 * MIB), world.source(8 * MIB), world.reader(8 * MIB, count=2)
    reader.connect(first.get_record(), key="first")
    reader.connect(second.get_record(), key="second")
    generation = first.publish(1, confirm=False)
    first.confirm(3)
    reader.route(cut(8 * MIB, MIB), key="first")
    reader.start(generation, list(range(8)), key="first")
    assert len(reader.step(10.0, until=3)) == 3
    record = first.get_record()
    first.kill()
    begin = time.monotonic()
    with pytest.raises(PeerLost):
        reader.step(10.0)
    assert time.monotonic() - begin < 8.0
    reader.finish()
    with pytest.raises(PeerLost):
        reader.connect(record, key="again")
    reader.route(cut(8 * MIB, MIB), key="second", stage=1)
    reader.pull(second.publish(2), list(range(8)), key="second")
    assert reader.data(1) == noise(2, 8 * MIB).tobytes()


def test_a_stopped_source_hangs_nobody_and_no_late_byte_reaches_a_fenced_stage(world: World, kind: Kind) -> None:
    nbytes = 32 * MIB
    first, second, reader = world.source(nbytes), world.source(nbytes), world.reader(nbytes, count=2)
    reader.connect(first.get_record(), key="first")
    generation = first.publish(1, window=MIB)
    windows = list(range(nbytes // MIB))
    reader.route(cut(nbytes, MIB), key="first")
    reader.start(generation, windows, key="first")
    reader.step(10.0, until=2)
    first.stop()
    try:
        assert reader.longest_step(1.0) < 0.5
        if kind is SHM_READ:
            assert reader.done()  # the kernel copies from a stopped process too
        ended = reader.finish()
        assert ended or not reader.settled()
        fenced = reader.renew() if ended or kind is TCP_WRITE or kind.local else False
        left = reader.data(0)
        if fenced:
            reader.connect(second.get_record(), key="second")
            reader.route(cut(nbytes, MIB), key="second", stage=1)
            reader.pull(second.publish(2, window=MIB), windows, key="second")
    finally:
        first.cont()
    if fenced:
        wait_until(lambda: first.alive() and first.num_readers() == 0, 10.0, "the source forgets the reader")
        assert reader.data(0) == left
        assert reader.data(1) == noise(2, nbytes).tobytes()
    else:
        assert reader.settled(10.0)


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=soak)])
@kinds(SHM_READ, TCP_WRITE)
def test_sources_that_die_and_return_under_new_names_are_read_again(world: World, count: int) -> None:
    reader = world.reader(2 * MIB)
    for cycle in range(count):
        source = world.source(2 * MIB)
        generation = source.publish(cycle)
        reader.connect(source.get_record())
        reader.route(cut(2 * MIB, MIB))
        reader.pull(generation, [0, 1])
        assert reader.data() == noise(cycle, 2 * MIB).tobytes()
        if cycle % 2:
            source.kill()
            reader.unplug()
        else:
            reader.unplug()
            source.close()
            source.end()


def test_a_reader_may_leave_and_connect_again(pair: Pair) -> None:
    source, reader = pair
    for turn in range(6):
        reader.connect(source.get_record())
        reader.route(cut(4 * MIB, 2 * MIB))
        reader.pull(source.publish(turn), [0, 1])
        assert reader.data() == noise(turn, 4 * MIB).tobytes()
        # More than one fragment: those are what UCX loses where two agents have parted and meet again.
        reader.send(b"%d" % turn + bytes(300_000))
        reader.unplug()
    got: list[bytes] = []
    wait_until(lambda: got.extend(source.messages()) or len(got) == 6, 10.0, "all messages arrive")
    assert [message[:1] for message in got] == [b"%d" % turn for turn in range(6)]
    wait_until(lambda: source.num_readers() == 0, 5.0, "the source forgets the reader")


def test_two_links_to_one_source_do_not_disturb_each_other(pair: Pair) -> None:
    source, reader = pair
    for key in ("one", "two"):
        reader.connect(source.get_record(), key=key)
    generation = source.publish(5, block=1)
    reader.route(cut(4 * MIB, 2 * MIB), key="one", region=1)
    reader.pull(generation, [0, 1], key="one")
    reader.unplug("one")
    reader.route(cut(4 * MIB, 2 * MIB), key="two", region=1, stage=1)
    reader.pull(generation, [0, 1], key="two")
    assert reader.data(0) == reader.data(1) == noise(5, 4 * MIB).tobytes()


def test_messages_arrive_whole_and_in_order(pair: Pair) -> None:
    source, reader = pair
    reader.connect(source.get_record())
    sent = []
    for number in range(90):
        body = b"%06d" % number + b"x" * [0, 10, 3000, 9000, 70_000, MIB - 6][number % 6]
        sent.append(body)
        reader.send(body)
    got: list[bytes] = []

    def all_there() -> bool:
        got.extend(source.messages())
        return len(got) >= len(sent)

    wait_until(all_there, 20.0, "all messages arrive")
    assert got == sent
    with pytest.raises(InvalidArgument):
        reader.send(b"x" * (MIB + 1))


def test_runs_outside_the_block_or_the_stage_are_refused(pair: Pair) -> None:
    source, reader = pair
    reader.connect(source.get_record())
    for row in [
        (0, 1, 4 * MIB),
        (0, -1, 10),
        (0, 4 * MIB, 1),
        (0, 0, 0),
        (0, 0, -5),
        (1 << 40, 0, 10),
        (0, 0, (1 << 63) - 1),
    ]:
        with pytest.raises(InvalidArgument):
            reader.route([row], starts=[0, 1], needs=[1])
    for starts in ([0, 2], [1, 1], [0, 1, 0, 1]):
        with pytest.raises(InvalidArgument):
            reader.route([(0, 0, 10)], starts=starts, needs=[1] * (len(starts) - 1))
    reader.route([(0, 0, MIB)])
    for windows in ([0, 0], [1], [-1]):
        with pytest.raises(InvalidArgument):
            reader.start(1, windows)


def test_posting_a_route_again_and_again_keeps_descriptors_threads_and_memory_flat(pair: Pair) -> None:
    nbytes, turns = 256 << 10, 300
    source, reader = pair
    reader.connect(source.get_record())
    reader.route(cut(nbytes, 64 << 10))
    generation = source.publish(1)
    for _ in range(40):
        reader.pull(generation, [0, 1, 2, 3])
    before = [source.usage(), reader.usage()]
    for _ in range(turns):
        reader.pull(generation, [0, 1, 2, 3])
    after = [source.usage(), reader.usage()]
    for old, new in zip(before, after, strict=True):
        assert new["fds"] <= old["fds"] and new["threads"] <= old["threads"]
        assert new["rss"] - old["rss"] < 8 * MIB
    assert reader.data()[:nbytes] == noise(1, 4 * MIB)[:nbytes].tobytes()


@pytest.mark.parametrize("count", [5, pytest.param(50, marks=soak)])
@kinds(SHM_READ, TCP_WRITE)
def test_readers_that_come_read_and_go_leave_nothing_at_the_source(world: World, count: int) -> None:
    source, reader = world.source(4 * MIB), world.reader(4 * MIB)
    generation = source.publish(1)
    before = source.usage()
    for turn in range(count):
        reader.connect(source.get_record())
        reader.send(b"hello")
        reader.route(cut(4 * MIB, MIB))
        reader.clear()
        reader.pull(generation, [0, 1, 2, 3])
        assert reader.data() == noise(1, 4 * MIB).tobytes()
        if turn % 2:
            reader.unplug()
        reader.renew()
    wait_until(lambda: source.num_peers() == 0, 20.0, "the source forgets them all")
    after = source.usage()
    assert after["threads"] <= before["threads"] and after["fds"] <= before["fds"] + 2
    assert source.step_seconds(2000) < 500e-6


@kinds(SHM_READ, TCP_WRITE)
def test_idle_agents_take_almost_no_cpu(world: World) -> None:
    source, reader = world.source(MIB), world.reader(MIB)
    reader.connect(source.get_record())
    reader.route(cut(MIB, MIB))
    reader.pull(source.publish(1), [0])
    assert source.idle_cpu(2.0) < 0.05
    assert reader.idle_cpu(2.0) < 0.05


@kinds(SHM_READ, TCP_WRITE)
def test_garbage_from_one_reader_costs_the_source_and_its_other_readers_nothing(world: World) -> None:
    source, good, bad = world.source(4 * MIB), world.reader(4 * MIB), world.reader(4 * MIB)
    generation = source.publish(1)
    good.connect(source.get_record())
    good.route(cut(4 * MIB, MIB))
    stage = 0
    frames = [b"x", bytes(40), b"mxr1" + bytes(12) + b"r"]
    last = b"mxr1" + b"\xff" * 8 + bytes(4) + b"r" + b"\xc1"  # a session that no later one of its own can follow
    outside = wire.Table(
        nonce=1,
        header=4096,
        device="cpu",
        runs=np.array([[stage, 4096, 64]], dtype="<i8").tobytes(),
        starts=np.array([0, 1], dtype="<i8").tobytes(),
        needs=np.array([0], dtype="<i8").tobytes(),
    )
    requests = [
        wire.Hello(metadata=(b"no metadata",)),
        wire.Want(flow=1, table=99, generation=1, windows=bytes(4)),
        wire.Cancel(flow=77),
        wire.Drop(table=5),
        wire.Ask(flow=1, header=16),
        wire.TablePart(table=1, part=3, parts=2, data=b"x"),
        wire.TablePart(table=1, part=0, parts=1, data=b"x"),
        wire.TablePart(table=1, part=0, parts=1, data=wire.encode(outside)),
        wire.TablePart(table=1, part=0, parts=1 << 40, data=b"x"),
    ]
    for wrong in [*frames, *requests, last]:
        bad.connect(source.get_record(), key="bad")
        if isinstance(wrong, bytes):
            bad.agent_notice(wrong, key="bad")
        else:
            bad.request(wrong, key="bad")
        good.clear()
        good.pull(generation, [0, 1, 2, 3])
        assert good.data() == noise(1, 4 * MIB).tobytes()
        bad.unplug("bad")
    assert source.alive()
