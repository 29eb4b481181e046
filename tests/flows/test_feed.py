"""Publishing from a stream of full tensors: shares, passes, what is refused, and what is left behind."""

import asyncio
import gc
import threading
import weakref

import pytest
import torch

from mx_rl import Publisher, Shard, Subscriber
from mx_rl.errors import (
    DtypeMismatch,
    IncompleteVersion,
    InvalidArgument,
    LayoutMismatch,
    MissingTensors,
    NameCollision,
    ShapeMismatch,
    TensorUnavailable,
    UnexpectedTensors,
    VersionAborted,
)
from mx_rl.feed import cut
from tests.support.local import FAST, together

NAMES = [f"layers.{index}.weight" for index in range(6)]


def model(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return {
        **{name: normal(33 + index, 20) for index, name in enumerate(NAMES)},
        "narrow": normal(2, 4000),
        "norm": normal(7).bfloat16(),
        "scalar": normal(),
        "ids": torch.arange(seed, seed + 5000),
        "empty": torch.empty(3, 0),
        "transposed": normal(60, 50).t(),
    }


def pairs(tensors):
    """A generator that gives copies and keeps none, as exporters do."""
    for name, tensor in tensors.items():
        yield name, tensor.clone(memory_format=torch.preserve_format)


async def async_pairs(tensors):
    for name, tensor in tensors.items():
        await asyncio.sleep(0)
        yield name, tensor.clone()


def world(registry, size, tensors=None, **named):
    return [
        Publisher("p", tensors, registry=registry, options=FAST, rank=rank, world_size=size, world="w", **named)
        for rank in range(size)
    ]


def publish(pubs, stream, **named):
    """Every rank draws a stream of its own, at once."""
    outcomes = together(*(lambda pub=pub: pub.publish(stream=stream(), **named) for pub in pubs))
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes[0]


def close(*things):
    for thing in things:
        thing.close()


def zeros(tensors):
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}


def columns(tensors, rank, ranks):
    """Tensor parallel: the last dimension cut, small tensors whole."""
    found = {}
    for name, tensor in tensors.items():
        size = tensor.shape[-1] if tensor.ndim else 0
        if not size or size % ranks:
            found[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
            continue
        part, offset = size // ranks, [0] * (tensor.ndim - 1) + [rank * size // ranks]
        local = torch.zeros(*tensor.shape[:-1], part, dtype=tensor.dtype)
        found[name] = Shard(local, shape=tensor.shape, offset=offset)
    return found


def assert_holds(target, source):
    for name, tensor in source.items():
        found = target[name]
        if isinstance(found, Shard):
            index = tuple(slice(lo, lo + size) for lo, size in zip(found.lo, found.box, strict=True))
            found, tensor = found.tensor, tensor[index]
        assert torch.equal(found, tensor), name


@pytest.mark.parametrize("stream", [pairs, async_pairs], ids=["generator", "async_generator"])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "declared"])
def test_a_stream_arrives_bit_for_bit_in_any_layout(registry, size, stream, learned):
    declared = {name: tensor.to("meta") for name, tensor in model().items()}
    pubs = world(registry, size, None if learned else declared)
    whole = Subscriber("p", zeros(model()), registry=registry, options=FAST)
    halves = [
        Subscriber(
            "p", columns(model(), rank, 2), registry=registry, options=FAST, replica="tp", rank=rank, world_size=2
        )
        for rank in range(2)
    ]
    try:
        for seed in range(3):
            version = publish(pubs, lambda seed=seed: stream(model(seed)), step=seed)
            subs = [whole, *halves]
            reports = together(*(lambda sub=sub, n=version.number: sub.sync(at_least=n, timeout=10) for sub in subs))
            assert [report.version for report in reports] == [version.number] * 3, reports
            for sub in subs:
                assert_holds(sub._tensors, model(seed))
    finally:
        close(*pubs, whole, *halves)


def test_each_rank_keeps_its_part_of_every_large_tensor(registry):
    tensors = {f"w{index}": torch.randn(1024 + index, 8) for index in range(8)}
    pubs = world(registry, 4)
    try:
        version = publish(pubs, lambda: pairs(tensors))
        assert pubs[0].wait(version, replicas=0, timeout=10).ready
        total = sum(tensor.nbytes for tensor in tensors.values())
        for pub in pubs:
            assert pub._ring.layout.nbytes < total / 4 + 8 * (64 + 32)
    finally:
        close(*pubs)


def test_shares_cover_every_element_once_and_small_tensors_are_spread():
    shapes = {f"big.{index}": (index + 4, 300) for index in range(9)} | {f"norm.{index}": (30,) for index in range(400)}
    counts = [0] * 4
    for name, shape in shapes.items():
        seen = torch.zeros(shape, dtype=torch.int64)
        for rank in range(4):
            lo, size = cut(name, shape, 2, rank=rank, world_size=4)
            seen[tuple(slice(a, a + n) for a, n in zip(lo, size, strict=True))] += 1
            counts[rank] += name.startswith("norm") and size == shape
        assert seen.eq(1).all(), name
    assert min(counts) > 60, counts
    assert sum(cut("scalar", (), 4, rank=rank, world_size=4)[1] == () for rank in range(4)) == 1


def test_the_dtype_on_the_wire_is_cast_as_tensor_to_does(registry):
    tensors = model()
    target = {
        name: torch.zeros(tensor.shape, dtype=torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors.items()
    }
    pubs = world(registry, 2, wire_dtype=torch.bfloat16)
    with Subscriber("p", target, registry=registry, options=FAST) as sub:
        for seed in range(2):
            version = publish(pubs, lambda seed=seed: pairs(model(seed)))
            sub.sync(at_least=version.number, timeout=10)
            for name, tensor in model(seed).items():
                assert torch.equal(target[name], tensor.to(target[name].dtype)), name
    close(*pubs)


def test_a_pass_may_come_in_another_order(registry):
    pubs = world(registry, 2)
    with Subscriber("p", zeros(model()), registry=registry, options=FAST) as sub:
        publish(pubs, lambda: pairs(model(0)))
        version = publish(pubs, lambda: pairs(dict(reversed(model(1).items()))))
        sub.sync(at_least=version.number, timeout=10)
        assert_holds(sub._tensors, model(1))
    close(*pubs)


def test_odd_tensors_of_an_exporter_are_taken_as_they_are(registry):
    base = torch.randn(40, 60, requires_grad=True)
    tied = torch.randn(50, 30)
    with torch.inference_mode():
        frozen = torch.randn(9, 9)
    with Publisher("p", None, registry=registry, options=FAST) as pub:
        stream = [
            ("module.strided", base[:, ::3]),
            ("leaf", base),
            ("a", tied),
            ("b", tied),
            ("c.module", base[0]),
            ("frozen", frozen),
        ]
        version = pub.publish(stream=stream)
        expected = {"strided": base[:, ::3], "leaf": base, "a": tied, "b": tied, "c.module": base[0], "frozen": frozen}
        with Subscriber("p", zeros(expected), registry=registry, options=FAST) as sub:
            sub.sync(at_least=version.number, timeout=10)
            assert_holds(sub._tensors, expected)


def test_several_generators_a_step_are_one_stream_when_chained(registry):
    import itertools

    with Publisher("p", None, registry=registry, options=FAST) as pub:
        first, second = dict(list(model().items())[:4]), dict(list(model().items())[4:])
        version = pub.publish(stream=itertools.chain(pairs(first), pairs(second)))
        with Subscriber("p", zeros(model()), registry=registry, options=FAST) as sub:
            sub.sync(at_least=version.number, timeout=10)
            assert_holds(sub._tensors, model())


def without(name):
    return {other: tensor for other, tensor in model(1).items() if other != name}


def changed(name, tensor):
    return model(1) | {name: tensor}


REFUSED = {
    "missing": (lambda: pairs(without("norm")), MissingTensors, {"missing": ["norm"]}),
    "unexpected": (lambda: pairs(changed("more", torch.ones(3))), UnexpectedTensors, {"unexpected": ["more"]}),
    "shape": (lambda: pairs(changed("norm", torch.ones(8).bfloat16())), ShapeMismatch, {}),
    "dtype": (lambda: pairs(changed("norm", torch.ones(7))), DtypeMismatch, {}),
    "several": (lambda: pairs(without("norm") | {"more": torch.ones(1)}), LayoutMismatch, {"missing": ["norm"]}),
    "doubled": (lambda: [*pairs(model(1)), ("norm", torch.ones(7))], NameCollision, {"names": ["norm"]}),
    "meta": (lambda: pairs(changed("norm", torch.ones(7, device="meta").bfloat16())), TensorUnavailable, {}),
    "no pair": (lambda: [*pairs(model(1)), "norm"], InvalidArgument, {}),
    "none": (lambda: [*pairs(model(1)), None], InvalidArgument, {}),
    "no tensor": (lambda: changed("norm", 3.0).items(), InvalidArgument, {}),
    "sparse": (lambda: changed("norm", torch.ones(7).to_sparse()).items(), InvalidArgument, {}),
    "no iterable": (lambda: 7, InvalidArgument, {}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_pass_is_refused_by_name_after_it_was_drawn_whole_and_the_next_is_published(registry, kind):
    stream, error, fields = REFUSED[kind]
    drawn = []

    def counted():
        given = stream()
        if not hasattr(given, "__iter__"):
            return given
        return (drawn.append(pair) or pair for pair in given)

    pubs = world(registry, 2)
    with Subscriber("p", zeros(model()), registry=registry, options=FAST) as sub:
        first = publish(pubs, lambda: pairs(model(0)))
        assert sub.sync(at_least=first.number, timeout=10).version == first.number
        outcomes = together(*(lambda pub=pub: pub.publish(stream=counted()) for pub in pubs))
        assert [type(outcome) for outcome in outcomes] == [error] * 2, outcomes
        for name, value in fields.items():
            assert getattr(outcomes[0], name) == value
        if kind not in ("no iterable", "no pair", "none"):
            assert "norm" in str(outcomes[0]) or "more" in str(outcomes[0])
        assert len(drawn) == 2 * sum(1 for _ in stream()) if kind != "no iterable" else not drawn
        third = publish(pubs, lambda: pairs(model(2)))
        assert third.number == first.number + 2, "the version that raised is burnt"
        assert sub.sync(at_least=third.number, timeout=10).version == third.number
        assert_holds(sub._tensors, model(2))
    close(*pubs)


class Broken(Exception):
    pass


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("learning", [True, False])
def test_what_the_stream_raises_is_raised_as_it_is_and_the_version_is_aborted_on_all_ranks(registry, kind, learning):
    error = Broken("half-way")

    def broken():
        for index, pair in enumerate(pairs(model(1))):
            if index == 4:
                raise error
            yield pair

    async def broken_async():
        for pair in broken():
            yield pair

    pubs = world(registry, 2)
    with Subscriber("p", zeros(model()), registry=registry, options=FAST) as sub:
        if not learning:
            publish(pubs, lambda: pairs(model(0)))
        one, other = together(
            lambda: pubs[0].publish(stream=broken() if kind == "sync" else broken_async()),
            lambda: pubs[1].publish(stream=pairs(model(1))),
        )
        assert one is error
        with pytest.raises(VersionAborted, match="half-way"):
            pubs[1].wait(other, replicas=0, timeout=10)
        version = publish(pubs, lambda: pairs(model(2)))
        assert sub.sync(at_least=version.number, timeout=10).version == version.number
        assert_holds(sub._tensors, model(2))
    close(*pubs)


def test_ranks_whose_streams_differ_abort_the_version_and_the_ready_one_stays(registry):
    pubs = world(registry, 2)
    with Subscriber("p", zeros(model()), registry=registry, options=FAST) as sub:
        first = publish(pubs, lambda: pairs(model(0)))
        assert pubs[0].wait(first, replicas=0, timeout=10).ready
        one, _ = together(
            lambda: pubs[0].publish(stream=pairs(without("norm"))), lambda: pubs[1].publish(stream=pairs(model(1)))
        )
        assert isinstance(one, MissingTensors)
        assert sub.sync(timeout=10).version == first.number
        assert_holds(sub._tensors, model(0))
    close(*pubs)


def test_ranks_that_learn_different_names_become_no_version(registry):
    pubs = world(registry, 2)
    versions = together(
        lambda: pubs[0].publish(stream=pairs(without(NAMES[0]))), lambda: pubs[1].publish(stream=pairs(model(1)))
    )
    with pytest.raises((VersionAborted, LayoutMismatch)):
        pubs[0].wait(versions[0], replicas=0, timeout=10)
    close(*pubs)


def test_an_error_of_ours_before_the_first_draw_still_draws_the_stream_whole(registry):
    drawn = []
    with Publisher("p", None, registry=registry, options=FAST) as pub:
        with pytest.raises(InvalidArgument, match="metadata"):
            pub.publish(
                stream=(drawn.append(name) or (name, tensor) for name, tensor in pairs(model())), metadata={"x": {1}}
            )
        assert drawn == list(model())
    with Publisher("p", None, registry=registry, options=FAST, rank=0, world_size=2, world="half") as pub:
        drawn.clear()
        with pytest.raises(IncompleteVersion):
            pub.publish(stream=(drawn.append(name) or (name, tensor) for name, tensor in pairs(model())), timeout=0.1)
        assert drawn == list(model())


@pytest.mark.parametrize("stream", [pairs, async_pairs], ids=["generator", "async_generator"])
@pytest.mark.parametrize("mistake", [False, True])
def test_nothing_that_was_given_is_held_when_the_next_is_drawn(registry, stream, mistake):
    given = []

    def seen(tensor):
        assert all(ref() is None for ref in given), f"{len(given)} drawn before, and one of them is alive"
        given.append(weakref.ref(tensor))
        return tensor

    def watched():
        for name, tensor in model().items():
            yield name, seen(tensor.clone())
            if mistake and name == "norm":
                yield name, seen(torch.ones(7).to_sparse())

    async def watched_async():
        for pair in watched():
            yield pair
            del pair

    gc.disable()
    try:
        with Publisher("p", None, registry=registry, options=FAST) as pub:
            for _ in range(2):  # a pass that learns, and one that knows
                given.clear()
                try:
                    pub.publish(stream=watched() if stream is pairs else watched_async())
                except InvalidArgument:
                    assert mistake
                assert len(given) == len(model()) + mistake
    finally:
        gc.enable()


def test_an_async_stream_inside_a_running_loop_names_the_awaitable_twin_and_is_driven_by_that_loop(registry):
    with Publisher("p", None, registry=registry, options=FAST) as pub:

        async def main():
            threads = set()

            async def stream():
                threads.add(threading.get_ident())
                for pair in pairs(model()):
                    await asyncio.sleep(0.001)
                    yield pair

            with pytest.raises(InvalidArgument, match="async_publish"):
                pub.publish(stream=stream())
            version = await pub.async_publish(stream=stream())
            assert threads == {threading.get_ident()}

            async def broken():
                yield "a", torch.ones(3)
                raise TimeoutError("its own")

            with pytest.raises(TimeoutError, match="its own"):
                await pub.async_publish(stream=broken())
            return version

        version = asyncio.run(main())
        with Subscriber("p", zeros(model()), registry=registry, options=FAST) as sub:
            assert sub.sync(timeout=10).version == version.number
            assert_holds(sub._tensors, model())


def test_the_loop_of_an_async_stream_leaves_nothing_behind(registry):
    ended = []

    async def background():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("task")

    async def stream():
        task = asyncio.create_task(background())
        yield "a", await asyncio.to_thread(lambda: torch.ones(4))
        ended.append(task.done())

    before = set(threading.enumerate())
    with Publisher("p", None, registry=registry, options=FAST) as pub:
        pub.publish(stream=stream())
        assert ended == [False, "task"]
        assert not [thread for thread in set(threading.enumerate()) - before if "asyncio" in thread.name]


def test_a_publisher_with_tensors_may_publish_a_stream_of_them(registry):
    tensors = model()
    with Publisher("p", tensors, registry=registry, options=FAST) as pub:
        with Subscriber("p", zeros(tensors), registry=registry, options=FAST) as sub:
            for stream in (None, pairs(model(1)), None, pairs(model(3))):
                version = pub.publish(stream=stream)
                sub.sync(at_least=version.number, timeout=10)
            assert_holds(sub._tensors, model(3))


def test_a_publisher_without_tensors_says_what_it_lacks(registry):
    with Publisher("p", None, registry=registry, options=FAST) as pub:
        with pytest.raises(InvalidArgument, match="stream"):
            pub.publish()
    with Publisher("p", {"w": torch.empty(5, device="meta")}, registry=registry, options=FAST) as pub:
        with pytest.raises(TensorUnavailable, match="w"):
            pub.publish()
