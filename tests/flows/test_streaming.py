"""Versions handed over name by name: what a loop gets, when it counts, and what a broken one leaves."""

import asyncio
import itertools
import threading
import time

import pytest
import torch

from mx_rl import Publisher, Shard, Subscriber
from mx_rl.config import Options
from mx_rl.errors import (
    AliasConflict,
    Busy,
    HoldTimeout,
    InvalidArgument,
    MissingTensors,
    NotReady,
    TensorUnavailable,
    UnexpectedTensors,
    VersionAborted,
)
from mx_rl.parcels import Box, Part
from mx_rl.patience import Patience
from tests.support.local import FAST, together


def model(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return {
        **{f"layers.{index}.weight": normal(32 + index, 60) for index in range(12)},
        "norm": normal(7).bfloat16(),
        "scalar": normal(),
        "ids": torch.arange(seed, seed + 5000),
        "empty": torch.empty(3, 0),
    }


def rows(tensors, rank, ranks):
    """A trainer rank's part: dimension 0 cut where it can be."""
    found = {}
    for name, tensor in tensors.items():
        if not tensor.ndim or tensor.shape[0] < ranks:
            if rank == 0:
                found[name] = tensor
            continue
        edges = [tensor.shape[0] * edge // ranks for edge in (rank, rank + 1)]
        local = tensor[edges[0] : edges[1]].clone()
        found[name] = Shard(local, shape=tensor.shape, offset=(edges[0], *[0] * (tensor.ndim - 1)))
    return found


def columns(tensors, rank, ranks, device="meta"):
    """A rollout rank's part: the last dimension cut where it divides."""
    found = {}
    for name, tensor in tensors.items():
        size = tensor.shape[-1] if tensor.ndim else 1
        part = size // ranks if size and size % ranks == 0 else size
        local = torch.zeros((*tensor.shape[:-1], part) if tensor.ndim else (), dtype=tensor.dtype, device=device)
        offset = [0] * (tensor.ndim - 1) + [rank * part if part < size else 0] if tensor.ndim else []
        found[name] = Shard(local, shape=tensor.shape, offset=offset)
    return found


def part_of(shard, tensor):
    return tensor[tuple(slice(lo, lo + size) for lo, size in zip(shard.lo, shard.box, strict=True))]


class World:
    """Trainer ranks of one process that publish ``model(seed)``."""

    def __init__(self, registry, size=1, tensors=model, options=FAST):
        self.tensors = tensors
        self.parts = [rows(tensors(), rank, size) for rank in range(size)]
        self.pubs = [
            Publisher("p", part, registry=registry, options=options, rank=rank, world_size=size, world="w")
            for rank, part in enumerate(self.parts)
        ]

    def publish(self, seed):
        size = len(self.pubs)
        for rank, part in enumerate(self.parts):
            for name, value in rows(self.tensors(seed), rank, size).items():
                target = part[name].tensor if isinstance(part[name], Shard) else part[name]
                target.copy_(value.tensor if isinstance(value, Shard) else value)
        version = together(*(pub.publish for pub in self.pubs))[0]
        assert self.pubs[0].wait(version, replicas=0, timeout=10).ready
        return version.number

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for pub in self.pubs:
            pub.close()


def subscriber(registry, tensors, **named):
    return Subscriber("p", tensors, registry=registry, **{"options": FAST, **named})


class Engine(torch.nn.Module):
    """Loads by name, one tensor at a time, as inference engines do."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "_"), torch.zeros(tensor.shape, dtype=tensor.dtype))

    def load_weights(self, weights):
        own = dict(self.named_buffers())
        loaded = set()
        for name, tensor in weights:
            own[name.replace(".", "_")].copy_(tensor)
            loaded.add(name)
        return loaded

    def equals(self, tensors):
        own = dict(self.named_buffers())
        return all(torch.equal(own[name.replace(".", "_")], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("size", [1, 3])
def test_an_engine_loads_every_version_by_the_publishers_names(registry, size):
    engine = Engine(model())
    with World(registry, size) as world, subscriber(registry, None) as sub:
        for seed in range(3):
            number = world.publish(seed)
            assert engine.load_weights(sub.stream(at_least=number, timeout=10)) == set(model())
            assert engine.equals(model(seed))
            assert sub.version == sub.last_report.version == number
            assert sub.ready
            assert world.pubs[0].wait(number, replicas=1, timeout=5).installed == (sub.replica,)
        assert list(sub.stream()) == []
        assert sub.last_report.kind == "none"


@pytest.mark.parametrize("size", [1, 3])
def test_a_stream_gives_what_a_sync_installs(registry, size):
    meta = {name: tensor.to("meta") for name, tensor in model().items()}
    live = {name: torch.zeros_like(tensor) for name, tensor in model().items()}
    with World(registry, size) as world, subscriber(registry, meta) as one, subscriber(registry, live) as two:
        for seed in range(2):
            number = world.publish(seed)
            given = dict(one.stream(at_least=number, timeout=10, copy=True))
            two.sync(at_least=number, timeout=10)
            assert (
                list(given) == sorted(given, key=lambda name: ([int(x) for x in name.split(".")[1:2]], name)) or given
            )
            assert given.keys() == live.keys()
            for name, tensor in live.items():
                assert given[name].dtype == tensor.dtype
                assert torch.equal(given[name], tensor), name
        number = world.publish(7)
        given = dict(two.stream(at_least=number, timeout=10, copy=True))
        assert all(torch.equal(given[name], tensor) for name, tensor in model(7).items())
        assert all(torch.equal(live[name], tensor) for name, tensor in model(1).items()), (
            "a stream installs nothing itself"
        )
        number = world.publish(8)
        assert two.sync(at_least=number, timeout=10).previous == number - 1
        assert all(torch.equal(live[name], tensor) for name, tensor in model(8).items())


@pytest.mark.parametrize("size", [1, 3])
def test_a_tensor_parallel_replica_streams_its_parts(registry, size):
    wanted = [columns(model(), rank, 2) for rank in range(2)]
    with World(registry, size) as world:
        subs = [subscriber(registry, wanted[rank], replica="tp", rank=rank, world_size=2) for rank in range(2)]
        for seed in range(2):
            number = world.publish(seed)
            found = together(*(lambda sub=sub, n=number: dict(sub.stream(n, timeout=10, copy=True)) for sub in subs))
            for rank, given in enumerate(found):
                assert not isinstance(given, BaseException), given
                for name, shard in wanted[rank].items():
                    assert torch.equal(given[name], part_of(shard, model(seed)[name])), name
            assert [sub.version for sub in subs] == [number] * 2
        for sub in subs:
            sub.close()


def test_several_boxes_of_a_name_come_as_a_tuple_and_names_may_be_missing(registry):
    whole = {"w": torch.arange(40.0).view(10, 4)}
    boxes = (
        Shard(torch.empty(2, 4, device="meta"), shape=(10, 4), offset=(1, 0)),
        Shard(torch.empty(3, 2, device="meta"), shape=(10, 4), offset=(7, 2)),
    )
    wanted = {"w": boxes, "extra": torch.empty(5, device="meta")}
    with Publisher("p", whole, registry=registry, options=FAST) as pub:
        with subscriber(registry, wanted, allow_missing="extra") as sub:
            pub.publish()
            ((name, given),) = sub.stream(timeout=10)
            assert name == "w"
            assert torch.equal(given[0], whole["w"][1:3])
            assert torch.equal(given[1], whole["w"][7:10, 2:4])
        with subscriber(registry, {"w": boxes, "lost": torch.empty(5, device="meta")}) as sub:
            with pytest.raises(MissingTensors, match="lost"):
                next(sub.stream(timeout=10))
        with subscriber(registry, {"w": boxes}) as sub:
            assert len(list(sub.stream(timeout=10))) == 1
        with subscriber(registry, {"v": torch.empty(1, device="meta")}, allow_missing="*") as sub:
            with pytest.raises(UnexpectedTensors):
                list(sub.stream(timeout=10))


def test_tied_names_are_given_under_both(registry):
    weight = torch.randn(30, 8)
    tied = torch.zeros(30, 8)
    with Publisher("p", {"embed": weight, "head": weight}, registry=registry, options=FAST) as pub:
        pub.publish()
        for tensors in (None, {"embed": tied, "head": tied}, {"embed": tied, "head": torch.zeros(30, 8)}):
            with subscriber(registry, tensors) as sub:
                given = dict(sub.stream(timeout=10, copy=True))
                assert sorted(given) == ["embed", "head"]
                assert all(torch.equal(one, weight) for one in given.values())
                assert sub.last_report.model_bytes == weight.nbytes
    with Publisher("q", {"embed": weight, "head": weight + 1}, registry=registry, options=FAST) as pub:
        pub.publish()
        with Subscriber("q", {"embed": tied, "head": tied}, registry=registry, options=FAST) as sub:
            with pytest.raises(AliasConflict):
                list(sub.stream(timeout=10))


def test_tensors_are_views_of_the_stage_unless_copies_are_wanted(registry):
    with World(registry) as world, subscriber(registry, None) as sub:
        world.publish(0)
        stage = None
        for _, tensor in sub.stream(timeout=10):
            stage = stage or sub._staging.landing
            inside = stage.address <= tensor.data_ptr() < stage.address + stage.nbytes
            assert inside or tensor.numel() == 0
        world.publish(1)
        for _, tensor in sub.stream(timeout=10, copy=True):
            assert not stage.address <= tensor.data_ptr() < stage.address + stage.nbytes


def test_nothing_counts_before_the_loop_has_ended(registry):
    calls = []
    with World(registry) as world:
        with subscriber(
            registry,
            None,
            before_install=lambda old, new: calls.append(("before", old, new)),
            after_install=lambda old, new: calls.append(("after", old, new)),
        ) as sub:
            number = world.publish(0)
            for _ in sub.stream(timeout=10):
                assert calls == [("before", None, number)]
                assert sub.version is None
                assert not sub.ready
                assert world.pubs[0].wait(number, replicas=1, timeout=0.01).installed == ()
            assert calls == [("before", None, number), ("after", None, number)]
            assert sub.ready


class Broken(Exception):
    pass


def leave_by_break(sub):
    for index, _ in enumerate(sub.stream(timeout=10)):
        if index == 3:
            break


def leave_by_error(sub):
    with pytest.raises(Broken):
        for index, _ in enumerate(sub.stream(timeout=10)):
            if index == 3:
                raise Broken


def leave_by_forgetting(sub):
    loop = sub.stream(timeout=10)
    forgotten.append(loop)
    list(itertools.islice(loop, 3))


def leave_at_the_last(sub):
    for index, _ in enumerate(sub.stream(timeout=10)):
        if index == len(model()) - 1:
            break


forgotten: list[object] = []


@pytest.mark.parametrize("heal", ["stream", "sync"])
@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, leave_by_forgetting, leave_at_the_last])
def test_a_loop_that_is_left_taints_the_replica_and_the_next_heals_it(registry, leave, heal):
    live = {name: torch.zeros_like(tensor) for name, tensor in model().items()}
    with World(registry) as world, subscriber(registry, live) as sub:
        first = world.publish(0)
        assert len(list(sub.stream(timeout=10))) == len(model())
        world.publish(1)
        leave(sub)
        assert not sub.ready
        assert sub.version == first
        if heal == "sync":
            assert sub.sync(timeout=10).kind == "full"
            assert all(torch.equal(live[name], tensor) for name, tensor in model(1).items())
        else:
            given = dict(sub.stream(timeout=10, copy=True))
            assert all(torch.equal(given[name], tensor) for name, tensor in model(1).items())
        assert sub.ready
        assert sub.version == first + 1
        if forgotten:
            with pytest.raises(VersionAborted, match="broken off"):
                list(forgotten.pop())
    assert not [thread for thread in threading.enumerate() if thread.name == "mx-rl-stream"]


def test_after_a_broken_loop_the_version_is_given_again_though_none_is_newer(registry):
    with World(registry) as world, subscriber(registry, None) as sub:
        number = world.publish(0)
        assert len(list(sub.stream(timeout=10))) == len(model())
        world.publish(1)
        leave_by_break(sub)
        status = world.pubs[0].wait(number + 1, timeout=0.1)
        assert "LoopBroken" in status.failed[sub.replica]
        assert len(list(sub.stream(timeout=10))) == len(model())
        assert sub.version == number + 1
        leave_by_break(sub)
        assert sub.ready, "nothing newer was there, so the loop that was left had nothing to give"


def test_a_loop_in_another_thread_is_waited_for_and_a_close_ends_it(registry):
    live = {name: torch.zeros_like(tensor) for name, tensor in model().items()}
    with World(registry) as world, subscriber(registry, live) as sub:
        world.publish(0)
        loop = sub.stream(timeout=10)
        next(loop)
        (outcome,) = together(lambda: sub.sync(timeout=0.2))
        assert isinstance(outcome, Busy)
        assert len(list(loop)) == len(model()) - 1, "the loop goes on"
        world.publish(1)
        loop = sub.stream(timeout=10)
        next(loop)
        sub.close()
        with pytest.raises(VersionAborted, match="close"):
            next(loop)


def test_a_loop_may_be_drawn_by_several_threads(registry):
    with World(registry) as world, subscriber(registry, None) as sub:
        number = world.publish(0)
        loop = sub.stream(timeout=10, copy=True)
        given = {}
        for _ in range(3):
            (found,) = together(lambda: list(itertools.islice(loop, 4)))
            given |= dict(found)
        given |= dict(loop)
        assert all(torch.equal(given[name], tensor) for name, tensor in model().items())
        assert sub.version == number


def test_what_cannot_be_given_is_said_at_the_first_draw(registry):
    with subscriber(registry, None) as sub:
        with pytest.raises(NotReady):
            next(sub.stream(timeout=0.1))
        for call in (sub.sync, sub.stage):
            with pytest.raises(InvalidArgument, match="stream"):
                call(timeout=1)
    with World(registry) as world, subscriber(registry, {"w": torch.empty(3, device="meta")}) as sub:
        world.publish(0)
        with pytest.raises(TensorUnavailable, match="w"):
            sub.sync(timeout=1)


def test_one_rank_that_leaves_its_loop_taints_all_and_all_heal(registry):
    with World(registry, 2) as world:
        subs = [
            subscriber(registry, columns(model(), rank, 2), replica="tp", rank=rank, world_size=2) for rank in range(2)
        ]
        world.publish(0)
        for leaver in range(2):
            number = world.publish(leaver + 1)
            together(
                lambda leaver=leaver: leave_by_break(subs[leaver]),
                lambda leaver=leaver: list(subs[1 - leaver].stream(timeout=10)),
            )
            assert not any(sub.ready for sub in subs)
            outcomes = together(*(lambda sub=sub: len(list(sub.stream(timeout=10))) for sub in subs))
            assert outcomes == [len(model())] * 2
            assert [sub.version for sub in subs] == [number] * 2
            assert all(sub.ready for sub in subs)
        for sub in subs:
            sub.close()


def test_a_new_layout_of_the_world_is_streamed_too(registry):
    with subscriber(registry, None) as sub:
        for size in (1, 3, 2):
            with World(registry, size) as world:
                number = world.publish(size)
                given = dict(sub.stream(at_least=number, timeout=10, copy=True))
                assert all(torch.equal(given[name], tensor) for name, tensor in model(size).items())


def test_a_replica_that_streams_serves_another_one(registry):
    with World(registry) as world, subscriber(registry, None) as one, subscriber(registry, None) as two:
        number = world.publish(0)
        list(one.stream(timeout=10))
        assert dict(two.stream(at_least=number, timeout=10, copy=True)).keys() == model().keys()
        assert two.last_report.source == f"peer:{one.replica}"


# ---- one stage a host


def large(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {f"w{index:02}": torch.randn(64, 256, generator=generator) for index in range(40)} | {
        "odd": torch.randn(5, 3, generator=generator)
    }


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_of_one_host_share_one_stage(registry, size):
    total = sum(tensor.nbytes for tensor in large().values())
    with World(registry, size, large) as world:
        subs = [subscriber(registry, None, replica="tp", rank=rank, world_size=3) for rank in range(3)]
        for seed in range(3):
            number = world.publish(seed)
            found = together(*(lambda sub=sub, n=number: dict(sub.stream(n, timeout=10, copy=True)) for sub in subs))
            for given in found:
                assert not isinstance(given, BaseException), given
                assert given.keys() == large().keys()
                assert all(torch.equal(given[name], tensor) for name, tensor in large(seed).items())
        assert subs[0].registered_bytes > total
        for sub in subs[1:]:
            assert sub.registered_bytes < 64 * 256 * 4 + (128 << 10), "a buffer of the largest tensor"
            assert sub.last_report.served_by.keys() == {"rank:0"}
            assert sub.last_report.served_by["rank:0"] == total
        with subscriber(registry, None, replica="other", rank=0, world_size=1) as other:
            list(other.stream(timeout=10))
        for sub in subs:
            sub.close()


def test_a_tensor_stays_as_it_is_until_the_next_is_drawn(registry):
    def slowly(sub):
        for name, tensor in sub.stream(timeout=10):
            threading.Event().wait(0.001)  # whoever writes too early has the time to
            assert torch.equal(tensor, large(2)[name]), name

    with World(registry, 3, large) as world:
        subs = [subscriber(registry, None, replica="tp", rank=rank, world_size=2) for rank in range(2)]
        world.publish(2)
        assert together(*(lambda sub=sub: slowly(sub) for sub in subs)) == [None, None]
        for sub in subs:
            sub.close()


def test_a_rank_that_serves_nothing_lends_nothing(registry):
    with World(registry, 2, large) as world:
        serve = ["off", "stage", "stage"]
        subs = [
            subscriber(registry, None, replica="tp", rank=rank, world_size=3, serve=serve[rank]) for rank in range(3)
        ]
        number = world.publish(1)
        found = together(*(lambda sub=sub: dict(sub.stream(number, timeout=10, copy=True)) for sub in subs))
        for given in found:
            assert all(torch.equal(given[name], tensor) for name, tensor in large(1).items())
        assert "rank:1" in subs[2].last_report.served_by
        assert "trainer:0" in subs[1].last_report.served_by
        for sub in subs:
            sub.close()


def test_ranks_of_other_layouts_stage_for_themselves(registry):
    with World(registry, 1, large) as world:
        tensors = [None, columns(large(), 0, 2), None]
        subs = [subscriber(registry, tensors[rank], replica="tp", rank=rank, world_size=3) for rank in range(3)]
        number = world.publish(1)
        found = together(*(lambda sub=sub: dict(sub.stream(number, timeout=10, copy=True)) for sub in subs))
        assert all(
            torch.equal(found[1][name], tensor[..., : tensor.shape[-1] // 2])
            for name, tensor in large(1).items()
            if name != "odd"
        )
        assert "rank:0" in subs[2].last_report.served_by
        assert "trainer:0" in subs[1].last_report.served_by
        for sub in subs:
            sub.close()


def test_a_lender_that_leaves_its_loop_taints_the_borrower_and_both_heal(registry):
    with World(registry, 1, large) as world:
        subs = [subscriber(registry, None, replica="tp", rank=rank, world_size=2) for rank in range(2)]
        number = world.publish(1)
        outcomes = together(lambda: leave_by_break(subs[0]), lambda: list(subs[1].stream(timeout=10)))
        assert outcomes[0] is None
        assert not any(sub.ready for sub in subs)
        found = together(*(lambda sub=sub: dict(sub.stream(timeout=10, copy=True)) for sub in subs))
        for given in found:
            assert all(torch.equal(given[name], tensor) for name, tensor in large(1).items())
        assert [sub.version for sub in subs] == [number] * 2
        for sub in subs:
            sub.close()


def test_tensors_larger_than_a_window_are_borrowed_in_several(registry):
    options = Options(transport="memory", window_bytes=4096, in_flight=2)

    def wide(seed=0):
        return {"w": torch.arange(40000.0) + seed, "b": torch.arange(300.0).view(3, 100) + seed}

    with World(registry, 2, wide, options) as world:
        subs = [subscriber(registry, None, replica="tp", rank=rank, world_size=2, options=options) for rank in range(2)]
        number = world.publish(3)
        found = together(*(lambda sub=sub: dict(sub.stream(number, timeout=10, copy=True)) for sub in subs))
        for given in found:
            assert all(torch.equal(given[name], tensor) for name, tensor in wide(3).items())
        for sub in subs:
            sub.close()


@pytest.mark.parametrize(
    ("box", "part", "start", "expected"),
    [
        ((6, 4), (2, 4), (3, 0), 3 * 4 * 4),
        ((6, 4), (6, 2), (0, 2), None),
        ((6, 4), (1, 2), (3, 1), (3 * 4 + 1) * 4),
        ((2, 3, 4), (1, 2, 4), (1, 1, 0), (12 + 4) * 4),
        ((2, 3, 4), (2, 1, 4), (0, 1, 0), None),
        ((), (), (), 0),
        ((5,), (5,), (0,), 0),
    ],
)
def test_a_part_is_one_stretch_of_its_box_or_it_is_not(box, part, start, expected):
    whole = Box(box, "float32", ())
    assert whole.stretch(Part(0, 0, part, start)) == expected
    index = torch.arange(max(1, torch.Size(box).numel())).view(box)
    cut = index[tuple(slice(a, a + n) for a, n in zip(start, part, strict=True))].flatten()
    contiguous = torch.equal(cut, torch.arange(int(cut[0]), int(cut[0]) + len(cut)))
    assert contiguous == (expected is not None)
    assert expected is None or int(cut[0]) * 4 == expected


# ---- beside holds, tasks and prefetch


def test_holds_are_shut_while_a_loop_runs_but_for_its_own(registry):
    with World(registry) as world, subscriber(registry, None) as sub:
        number = world.publish(0)
        with sub.hold():  # its own: a safe point, as for sync
            loop = sub.stream(timeout=10)
            next(loop)

            def hold(timeout):
                with sub.hold(timeout=timeout) as version:
                    return version

            (outcome,) = together(lambda: hold(0.1))
            assert isinstance(outcome, HoldTimeout)
            waiting = together(lambda: hold(10), lambda: list(loop))
            assert waiting[0] == number


def test_a_task_streams_without_blocking_its_loop(registry):
    with World(registry) as world, subscriber(registry, None) as sub:
        number = world.publish(0)

        async def load():
            return {name: tensor async for name, tensor in sub.async_stream(timeout=10, copy=True)}

        async def main():
            ticks = asyncio.create_task(asyncio.sleep(0))
            given = await load()
            await ticks
            assert all(torch.equal(given[name], tensor) for name, tensor in model().items())
            assert sub.version == number
            waiting = asyncio.create_task(anext(aiter(sub.async_stream(at_least=number + 1, timeout=30))))
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert sub.ready, "cancelled before a byte: the old version runs on"
            world.publish(1)
            async for _ in sub.async_stream(timeout=10):
                break
            for _ in range(100):  # the generator is closed by the loop's own hook
                if not sub.ready:
                    break
                await asyncio.sleep(0.01)
            assert not sub.ready
            given = await load()
            assert all(torch.equal(given[name], tensor) for name, tensor in model(1).items())
            assert sub.ready

        asyncio.run(main())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prefetched_version_is_streamed_without_a_move(registry, ranks):
    with World(registry, 1, large) as world:
        subs = [
            subscriber(registry, None, replica="tp", rank=rank, world_size=ranks, prefetch=True)
            for rank in range(ranks)
        ]
        for seed in range(2):
            number = world.publish(seed)
            limit = time.monotonic() + 10
            while any(sub.staged != number for sub in subs) and time.monotonic() < limit:
                time.sleep(0.01)
            assert [sub.staged for sub in subs] == [number] * ranks
            found = together(*(lambda sub=sub: dict(sub.stream(timeout=10, copy=True)) for sub in subs))
            for sub, given in zip(subs, found, strict=True):
                assert not isinstance(given, BaseException), given
                assert all(torch.equal(given[name], tensor) for name, tensor in large(seed).items())
                assert "ahead" in sub.last_report.seconds
        for sub in subs:
            sub.close()


def test_a_task_that_leaves_a_stream_keeps_no_other_task_waiting(registry, monkeypatch):
    options = Options(transport="memory", window_bytes=4096, stall_s=20.0)
    with World(registry) as world, subscriber(registry, None, options=options) as sub:
        world.publish(0)
        ticked, heard, ask = threading.Event(), [], sub._acknowledge

        def slowly(*args):
            heard.append(ticked.wait(5))
            ask(*args)

        monkeypatch.setattr(sub, "_acknowledge", slowly)

        async def main():
            loop = sub.async_stream(timeout=10)
            await anext(loop)
            leaving = asyncio.create_task(loop.aclose())
            await asyncio.sleep(0)
            ticked.set()
            await leaving

        asyncio.run(main())
        assert heard == [True]
        assert not sub.ready


def test_a_cancel_that_meets_an_item_just_given_is_not_lost(registry):
    with World(registry) as world, subscriber(registry, None) as sub:
        world.publish(0)

        async def main():
            loop = sub.async_stream(timeout=10)
            await anext(loop)
            hand = sub._streams._pouring[0]
            draw, cancelled = hand.draw, threading.Event()

            def cancel():
                task.cancel()
                asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, cancelled.set)

            def draw_late():
                item = draw()
                task.get_loop().call_soon_threadsafe(cancel)
                assert cancelled.wait(5)
                return item

            hand.draw = draw_late
            task = asyncio.create_task(anext(loop))
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(StopAsyncIteration):
                await anext(loop)

        asyncio.run(main())


def test_a_loop_is_not_forgotten_when_another_thread_wants_one(registry):
    with World(registry) as world, subscriber(registry, None) as sub:
        world.publish(0)
        loop = sub.stream(timeout=10)
        next(loop)
        (outcome,) = together(lambda: list(sub.stream(timeout=0.1)))
        assert isinstance(outcome, Busy)
        assert sub.stream(timeout=10) is not None
        sub.close()
        with pytest.raises(VersionAborted, match="close"):
            list(loop)


def test_a_rank_whose_loop_is_slow_is_waited_for_while_it_draws(registry, monkeypatch):
    monkeypatch.setattr("mx_rl.ranks._PROGRESS_S", 0.05)
    monkeypatch.setattr(Patience, "extended", lambda self, seconds: Patience(0.7))
    with World(registry) as world:
        subs = [subscriber(registry, None, replica="tp", rank=rank, world_size=2) for rank in range(2)]
        number = world.publish(0)

        def slowly():
            given = 0
            for _ in subs[1].stream(number, timeout=5):
                threading.Event().wait(0.1)  # an engine at work
                given += 1
            return given

        found = together(lambda: len(list(subs[0].stream(number, timeout=5))), slowly)
        assert found == [len(model())] * 2
        assert [sub.version for sub in subs] == [number] * 2
        for sub in subs:
            sub.close()


# ---- memory modes


@pytest.mark.parametrize("mode", [{"stage": "none", "serve": "off"}, {"swap": True}, {"serve": "live"}])
def test_a_mode_without_a_stage_in_plan_order_says_so(registry, mode):
    with World(registry) as world:
        world.publish(0)
        with pytest.raises(InvalidArgument, match="only streams"):
            subscriber(registry, None, **mode)
        module = torch.nn.Linear(4, 4)
        live = module if "swap" in mode else {name: torch.zeros_like(tensor) for name, tensor in model().items()}
        with subscriber(registry, live, **mode) as sub, pytest.raises(InvalidArgument, match=r"stream\(\) takes"):
            sub.stream()


def test_the_memory_report_of_a_stream_counts_its_stage_and_no_weights(registry):
    total = sum(tensor.nbytes for tensor in large().values())
    with Publisher("p", None, registry=registry, options=FAST) as pub, subscriber(registry, None) as sub:
        number = pub.publish(stream=large().items()).number
        assert len(list(sub.stream(number, timeout=10))) == len(large())
        assert pub.wait(number, replicas=1, timeout=10).installed
        pub.publish(stream=large(1).items())  # the ring that was there before the names were known has gone
        assert pub.memory.live_bytes == sub.memory.live_bytes == 0
        assert total <= sub.memory.stage_bytes <= total + 64 * len(large())
        assert 2 * total <= pub.memory.slots_bytes <= 2 * (total + 64 * len(large()))
        assert pub.memory.total_bytes == pub.registered_bytes
        assert sub.memory.total_bytes == sub.registered_bytes
