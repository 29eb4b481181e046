"""Whole worlds with replicated boxes in one process: shares, equal copies, drift, changes of layout."""

import time
from functools import partial

import pytest
import torch

from mx_rl import Publisher, Shard, Subscriber
from mx_rl.digest import box_sum
from mx_rl.errors import ReplicaMismatch, VersionAborted
from mx_rl.layout import RankLayout
from mx_rl.partners import live_sum
from mx_rl.tensors import DTYPES, resolve
from tests.support.local import FAST, together

LAYERS, SHAPE = 12, (16, 64)


def model(value=1.0):
    return {f"layers.{i}.w": torch.full(SHAPE, value + i) for i in range(LAYERS)} | {"scale": torch.tensor(value)}


class World:
    """Publishers of one world, each with tensors of its own."""

    def __init__(self, registry, tensors):
        self.tensors = tensors
        size = len(tensors)
        self.pubs = [
            Publisher("p", one, registry=registry, options=FAST, rank=rank, world_size=size, world="w")
            for rank, one in enumerate(tensors)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for pub in self.pubs:
            pub.close()

    def fill(self, value):
        for tensors in self.tensors:
            for tensor in tensors.values():
                (tensor.tensor if isinstance(tensor, Shard) else tensor).fill_(value)

    def publish(self):
        found = together(*[pub.publish for pub in self.pubs])
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return found[0]

    def ready(self, value=None):
        if value is not None:
            self.fill(value)
        version = self.publish()
        for pub in self.pubs:
            assert pub.wait(version, replicas=0, timeout=10).ready
        return version.number

    def settle(self):
        """Publish until every rank snapshots its share in one ring only."""
        end = time.monotonic() + 20
        while any(pub._retired or pub._commits.partners.known is None for pub in self.pubs):
            assert time.monotonic() < end
            self.ready()

    def slot_bytes(self):
        return [pub._ring.layout.nbytes for pub in self.pubs]


def replica(registry, tensors, **named):
    return Subscriber("p", tensors, registry=registry, options=FAST, **named)


def zeros():
    return {name: torch.zeros_like(tensor) for name, tensor in model().items()}


def values(tensors):
    return {value for tensor in tensors.values() for value in tensor.unique().tolist()}


def test_three_data_parallel_ranks_keep_two_thirds_each_and_every_version_arrives_whole(registry):
    target = zeros()
    with World(registry, [model() for _ in range(3)]) as world, replica(registry, target) as sub:
        total = world.slot_bytes()[0]
        before = [pub.registered_bytes for pub in world.pubs]
        for value in range(2, 12):
            number = world.ready(float(value))
            report = sub.sync(at_least=number, timeout=10)
            assert values(target) == {float(value)}
            assert report.retries == 0
        world.settle()
        assert all(abs(size - total * 2 / 3) <= 3 * 16 * 64 * 4 for size in world.slot_bytes())
        assert sum(world.slot_bytes()) == pytest.approx(2 * total, rel=0.05)
        assert all(now < was for now, was in zip([pub.registered_bytes for pub in world.pubs], before, strict=True))
        for value in (20, 21, 22):
            number = world.ready(float(value))
            report = sub.sync(at_least=number, timeout=10)
            assert values(target) == {float(value)}
        served = {label: count for label, count in report.served_by.items() if count}
        assert sorted(served) == ["trainer:0", "trainer:1", "trainer:2"]
        assert max(served.values()) < total / 2, "reads are spread over the copies"


def test_a_world_without_copies_changes_nothing(registry):
    whole = torch.zeros(6, 512)
    tensors = [{"w": Shard(whole[i : i + 2].clone(), shape=(6, 512), offset=(i, 0))} for i in (0, 2, 4)]
    with World(registry, tensors) as world:
        rings = [pub._ring for pub in world.pubs]
        for _ in range(6):
            world.ready()
        assert [pub._ring for pub in world.pubs] == rings
        assert all(pub._commits.partners.known is not None for pub in world.pubs)
        record = world.pubs[0]._commits.held
        assert record.copies == ()


def test_a_drifted_rank_aborts_the_version_by_name_and_the_next_equal_one_is_fine(registry):
    target = zeros()
    with World(registry, [model() for _ in range(3)]) as world, replica(registry, target) as sub:
        for value in (1.0, 2.0):
            number = world.ready(value)
        world.settle()
        number = world.ready(3.0)
        sub.sync(at_least=number, timeout=10)
        # layers.0.w lies at ranks 0 and 1: whichever of the two drifts, both tell.
        world.tensors[1]["layers.0.w"][3, 7] += 1e-6 * 3.0
        version = world.publish()
        for pub in world.pubs:
            with pytest.raises(ReplicaMismatch) as caught:
                pub.wait(version, replicas=0, timeout=10)
            assert caught.value.version == version.number
            assert caught.value.ranks == [0, 1]
            assert caught.value.tensors == ["layers.0.w"]
            assert "layers.0.w" in str(caught.value)
        assert sub.sync(timeout=5).kind == "none"
        assert values(target) == {3.0}, "the last READY version is untouched"
        assert world.pubs[0].latest == number
        number = world.ready(4.0)
        sub.sync(at_least=number, timeout=10)
        assert values(target) == {4.0}


def test_a_drift_that_nobody_waits_for_is_raised_by_a_later_publish_of_every_rank(registry):
    with World(registry, [model() for _ in range(2)]) as world:
        world.ready(1.0)
        world.ready(2.0)
        world.ready(3.0)
        world.settle()
        world.tensors[1]["scale"] += 1.0
        told = {}
        for _ in range(5):
            for rank, found in enumerate(together(*[pub.publish for pub in world.pubs])):
                if isinstance(found, ReplicaMismatch):
                    told.setdefault(rank, found.tensors)
        assert told == {0: ["scale"], 1: ["scale"]}


def test_a_rank_that_keeps_no_copy_is_compared_in_its_turn(registry):
    with World(registry, [model() for _ in range(4)]) as world:
        for value in (1.0, 2.0, 3.0):
            world.ready(value)
        world.settle()
        # Ranks 0 and 2 keep layers.0.w; of the others each is compared every 128th version.
        world.tensors[3]["layers.0.w"][0, 0] = 99.0
        for _ in range(130):
            version = world.publish()
            outcome = together(*[partial(pub.wait, version, replicas=0) for pub in world.pubs])
            if isinstance(outcome[0], ReplicaMismatch):
                break
        assert {(tuple(one.ranks), tuple(one.tensors)) for one in outcome} == {((0, 3), ("layers.0.w",))}
        world.fill(5.0)
        for _ in range(3):
            world.ready(5.0)


@pytest.mark.parametrize("wire_dtype", [None, "bfloat16"])
def test_live_boxes_are_summed_as_they_would_be_on_the_wire(registry, wire_dtype, monkeypatch):
    monkeypatch.setattr("mx_rl.partners._PIECE_BYTES", 256)
    base = torch.randn(40, 33)
    tensors = {
        "plain": torch.randn(17, 5),
        "turned": base.t(),
        "scalar": torch.tensor(2.5),
        "ids": torch.arange(100),
        "box": Shard(base[3:9, 2:20], shape=(40, 40), offset=(3, 7)),
        "empty": torch.zeros(0, 3),
    }
    resolved = resolve(tensors)
    layout = RankLayout.of(resolved, wire_dtype=wire_dtype)
    for row, box in enumerate(layout.packing()):
        shard = resolved[box.name][box.box]
        data = shard.tensor.to(DTYPES[box.dtype]).contiguous().reshape(-1).view(torch.uint8).numpy()
        size = DTYPES[box.dtype].itemsize
        expected = box_sum(data, shard.global_shape, shard.lo, shard.box, size) if box.nbytes else 0
        assert live_sum(layout, row, resolved) == expected


def test_ranks_that_learn_their_shares_at_different_times_give_whole_versions(registry):
    target = zeros()
    with World(registry, [model() for _ in range(3)]) as world, replica(registry, target) as sub:
        world.ready(1.0)
        world.ready(2.0)
        late = world.pubs[1]._commits.partners
        known, late.known = late.known, None
        late.note = lambda key, outcome: None
        for value in (3.0, 4.0, 5.0):
            number = world.ready(value)
            sub.sync(at_least=number, timeout=10)
            assert values(target) == {value}
        sizes = world.slot_bytes()
        assert sizes[1] > sizes[0], "one rank snapshots all it holds, the others their shares"
        late.known = known
        for value in (6.0, 7.0, 8.0):
            number = world.ready(value)
            sub.sync(at_least=number, timeout=10)
            assert values(target) == {value}
        assert world.slot_bytes()[1] < sizes[1]


def test_a_change_of_layout_on_all_ranks_is_published_whole_and_shared_anew(registry):
    with World(registry, [model() for _ in range(3)]) as world:
        for value in (1.0, 2.0, 3.0, 4.0):
            world.ready(value)
        world.settle()
        small = world.slot_bytes()
        for tensors in world.tensors:
            tensors["adapter"] = torch.zeros(40, 40)
        number = world.ready(5.0)
        target = zeros() | {"adapter": torch.zeros(40, 40)}
        with replica(registry, target) as sub:
            assert sub.sync(at_least=number, timeout=10).version == number
            assert values(target) == {5.0}
            assert world.slot_bytes()[0] > small[0] + 1600 * 4
            for value in (6.0, 7.0, 8.0, 9.0):
                number = world.ready(value)
            world.settle()
            number = world.ready(10.0)
            sub.sync(at_least=number, timeout=10)
            assert values(target) == {10.0}
        assert max(world.slot_bytes()) < sum(small) / 2 + 40 * 40 * 4


def test_a_change_on_one_rank_only_never_loses_a_tensor_that_shares_left_to_others(registry):
    with World(registry, [model() for _ in range(3)]) as world:
        for value in (1.0, 2.0, 3.0, 4.0):
            world.ready(value)
        world.settle()
        ready = world.pubs[0].latest
        # Rank 0 drops a tensor of which it kept a copy: the others' shares tell of layouts that are gone.
        del world.tensors[0]["layers.0.w"]
        version = world.publish()
        for pub in world.pubs:
            with pytest.raises(VersionAborted, match="tensors have changed"):
                pub.wait(version, replicas=0, timeout=10)
        assert world.pubs[0].latest == ready
        number = world.ready(5.0)
        target = zeros()
        with replica(registry, target) as sub:
            sub.sync(at_least=number, timeout=10)
            assert values(target) == {5.0}
            world.settle()
            number = world.ready(6.0)
            sub.sync(at_least=number, timeout=10)
            assert values(target) == {6.0}


def test_replicated_norms_beside_shards_are_compared_too(registry):
    whole = torch.ones(8, 128)
    tensors = [
        {
            "w": Shard(whole[i : i + 2].clone(), shape=(8, 128), offset=(i, 0)),
            **{f"norm.{j}": torch.ones(33) for j in range(8)},
        }
        for i in (0, 2, 4, 6)
    ]
    target = {"w": torch.zeros(8, 128), **{f"norm.{j}": torch.zeros(33) for j in range(8)}}
    with World(registry, tensors) as world, replica(registry, target) as sub:
        for value in (1.0, 2.0, 3.0):
            number = world.ready(value)
            sub.sync(at_least=number, timeout=10)
            assert values(target) == {value}
        world.settle()
        number = world.ready(4.0)
        sub.sync(at_least=number, timeout=10)
        assert values(target) == {4.0}
        world.tensors[0]["norm.0"][5] = 7.0
        version = world.publish()
        with pytest.raises(ReplicaMismatch) as caught:
            world.pubs[3].wait(version, replicas=0, timeout=10)
        assert (caught.value.ranks, caught.value.tensors) == ([0, 2], ["norm.0"])
