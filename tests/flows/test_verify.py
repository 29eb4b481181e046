"""Damage of every kind between a snapshot and an install: it is seen, named, and costs another source or nothing at all."""

from functools import partial

import numpy as np
import pytest
import torch

from mx_rl import Shard
from mx_rl.errors import DigestMismatch, Tainted
from mx_rl.fetch import Fetch
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.tensors import resolve
from mx_rl.trailer import boxes_at
from mx_rl.transport.base import Windows
from tests.flows.test_memory_modes import IDS, MODES
from tests.support.faulty import faulty
from tests.support.local import steady_publisher as publisher
from tests.support.local import steady_subscriber as subscriber
from tests.support.local import together

BIG = (64, 200)  # 51,200 bytes: a dozen windows of 4096


def weights(value=0.0):
    torch.manual_seed(7)
    return {name: torch.randn(BIG) + value for name in ("a", "b", "c")} | {"bias": torch.randn(5) + value}


def zeros(tensors):
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}


def ready(pub, tensors=None, value=None):
    if value is not None:
        for tensor, fresh in zip(tensors.values(), weights(value).values(), strict=True):
            tensor.copy_(fresh)
    version = pub.publish()
    assert pub.wait(version, replicas=0, timeout=10).ready
    return version.number


def slot(pub):
    """The bytes of the newest version, at its source."""
    ring = pub._ring
    newest = max((one for one in ring.slots if one.key is not None), key=lambda one: one.key)
    return ring.served.arena.blocks[newest.index].numpy()


def box_of(pub, name):
    (found,) = (box for box in pub._ring.layout.packing() if box.name == name)
    return slice(found.offset, found.offset + found.nbytes)


def equal(one, two):
    return all(
        torch.equal(
            one[name].contiguous().view(-1).view(torch.uint8), two[name].contiguous().view(-1).view(torch.uint8)
        )
        for name in two
    )


def flip(pub, name, at=1000):
    slot(pub)[box_of(pub, name)][at] ^= 4


def swap(pub, name):
    data = slot(pub)[box_of(pub, name)].view(np.uint32)
    data[[100, 3000]] = data[[3000, 100]]


def stale(pub, name):
    """The whole slot as it was a version ago, its trailer too; the header is the new one's."""
    ring, now = pub._ring, slot(pub)
    (before,) = (block.numpy() for block in ring.served.arena.blocks if block.data_ptr() != now.ctypes.data)
    now[:] = before


def wrong_sums(pub, name):
    slot(pub)[pub._ring.trailer.offset] ^= 1


DAMAGES = {"flipped bit": flip, "swapped elements": swap, "stale slot": stale, "wrong sums": wrong_sums}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_at_the_only_source_is_named_and_the_old_version_runs_on(registry, damage):
    source, target = weights(), zeros(weights())
    with publisher(registry, source) as pub, subscriber(registry, target) as sub:
        first = ready(pub)
        assert sub.sync(timeout=10).version == first
        second = ready(pub, source, 1.0)
        damage(pub, "b")
        with pytest.raises(DigestMismatch) as caught:
            sub.sync(at_least=second, timeout=10)
        named = caught.value.tensors
        assert named == (["the sums of trainer rank 0"] if damage in (stale, wrong_sums) else ["b"])
        assert caught.value.version == second
        assert equal(target, weights())
        assert sub.version == first
        assert sub.ready
        receipt = pub.wait(second, replicas=1, timeout=0.1)
        assert "DigestMismatch" in receipt.failed[sub.replica]
        third = ready(pub, source, 2.0)
        assert sub.sync(timeout=10).version == third
        assert equal(target, source)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_another_source_takes_over_from_one_whose_bytes_are_wrong(registry, damage):
    source, target = weights(), zeros(weights())
    with publisher(registry, source) as pub, subscriber(registry, zeros(source)) as peer:
        ready(pub)
        number = ready(pub, source, 1.0)
        peer.sync(timeout=10)
        damage(pub, "b")
        with subscriber(registry, target, sources=("trainer", "peer")) as sub:
            report = sub.sync(timeout=10)
        assert report.version == number
        assert "DigestMismatch" in report.refused["trainer:0"]
        if damage is not wrong_sums:  # then the trailer alone comes from the peer, and is not counted
            assert f"peer:{peer.replica}" in report.served_by
        assert equal(target, source)


def test_a_peer_whose_stage_was_damaged_is_refused_and_the_trainer_takes_over(registry):
    source, target = weights(), zeros(weights())
    with publisher(registry, source) as pub, subscriber(registry, zeros(source)) as peer:
        ready(pub)
        peer.sync(timeout=10)
        peer._staging.landing.block[60_000] ^= 1
        with subscriber(registry, target) as sub:
            report = sub.sync(timeout=10)
        assert list(report.refused) == [f"peer:{peer.replica}"]
        assert "trainer:0" in report.served_by
        assert equal(target, source)


def test_a_peer_whose_trailer_was_damaged_gives_way_too(registry):
    source, target = weights(), zeros(weights())
    with publisher(registry, source) as pub, subscriber(registry, zeros(source)) as peer:
        ready(pub)
        peer.sync(timeout=10)
        staging = peer._staging
        (plan, _) = next(iter(staging._plans.values()))
        staging.landing.block[plan.trailer_begin] ^= 1
        with subscriber(registry, target) as sub:
            report = sub.sync(timeout=10)
        assert list(report.refused) == [f"peer:{peer.replica}"]
        assert equal(target, source)


def shifted(windows):
    """Each window but the first few from 8 bytes further on."""
    runs = windows.runs.copy()
    runs[3:5, 1] += 8
    return Windows(runs=runs, starts=windows.starts, needs=windows.needs)


def skipped(windows):
    """Without what fills windows 3 and 4."""
    starts = windows.starts.copy()
    begin, end = starts[3], starts[5]
    starts = np.where(starts > begin, np.maximum(starts - (end - begin), begin), starts)
    runs = np.delete(windows.runs, np.s_[begin:end], axis=0)
    return Windows(runs=runs, starts=starts, needs=windows.needs)


@pytest.mark.parametrize("change", [shifted, skipped])
@pytest.mark.parametrize("verify", [True, False])
def test_a_plan_that_reads_the_wrong_bytes_or_none_is_noticed(registry, monkeypatch, change, verify):
    source, target = weights(), zeros(weights())
    made = Fetch._windows
    with publisher(registry, source) as pub, subscriber(registry, target, verify=verify) as sub:
        first = ready(pub)
        sub.sync(timeout=10)
        sub._staging.landing.drop(pub._ring.served.name)  # its routes were right
        monkeypatch.setattr(
            Fetch,
            "_windows",
            lambda self, one, record: (change if one.first == 0 else lambda x: x)(made(self, one, record)),
        )
        second = ready(pub, source, 1.0)
        if verify:
            with pytest.raises(DigestMismatch) as caught:
                sub.sync(timeout=10)
            assert set(caught.value.tensors) <= {"a", "b"}
            assert sub.version == first
            assert equal(target, weights())
        else:
            assert sub.sync(timeout=10).version == second
            assert not equal(target, source)


@pytest.mark.parametrize("mode", MODES, ids=IDS)
@pytest.mark.parametrize("slots", [2, 0])
def test_every_memory_mode_sees_a_flipped_bit(registry, mode, slots):
    source, module = torch.nn.Module(), torch.nn.Module()
    for name, tensor in weights().items():
        source.register_parameter(name, torch.nn.Parameter(tensor))
        module.register_parameter(name, torch.nn.Parameter(torch.zeros_like(tensor)))
    with publisher(registry, source, slots=slots) as pub, subscriber(registry, module, **mode) as sub:
        first = ready(pub)
        assert sub.sync(timeout=10).unproved == ()
        with pub.mutating(), torch.no_grad():
            source.b.add_(1.0)
        second = ready(pub)
        if slots:
            flip(pub, "b")
        else:  # behind the publisher's back
            source.b.data.view(-1).view(torch.uint8)[1000] ^= 4
        with pytest.raises(Tainted if mode["stage"] == "none" else DigestMismatch, match="b arrived with other sums"):
            sub.sync(at_least=second, timeout=10)
        if mode["stage"] != "none":
            assert sub.version == first
            assert torch.equal(module.b, weights()["b"])
        with pub.mutating(), torch.no_grad():
            source.b.add_(1.0)
        third = ready(pub)
        assert sub.sync(at_least=third, timeout=10).version == third
        assert equal(dict(module.named_parameters()), dict(source.named_parameters()))


def test_verify_false_installs_what_came(registry):
    source, target = weights(), zeros(weights())
    with publisher(registry, source) as pub, subscriber(registry, target, verify=False) as sub:
        number = ready(pub)
        flip(pub, "b")
        report = sub.sync(timeout=10)
        assert report.version == number
        assert not torch.equal(target["b"], source["b"])
        assert "verify" not in report.seconds


def half(tensors, rank, ranks=2):
    """A rank's share of the columns of every matrix; vectors whole."""
    found = {}
    for name, tensor in tensors.items():
        width = tensor.shape[-1] // ranks
        found[name] = (
            Shard(torch.zeros(tensor.shape[0], width), shape=tensor.shape, offset=(0, rank * width))
            if tensor.dim() == 2
            else torch.zeros_like(tensor)
        )
    return found


def damaging(monkeypatch, sub, at):
    """Flip a byte of this subscriber's stage when all of it is there, once."""
    run, done = Fetch.run, []

    def damaged(self):
        run(self)
        if self._progress.landing is sub._staging.landing and not done:
            done.append(True)
            self._progress.landing.block[at] ^= 16

    monkeypatch.setattr(Fetch, "run", damaged)


def replica_of(registry, parts, **named):
    size = len(parts)
    return [
        subscriber(registry, part, replica="tp", rank=rank, world_size=size, **named) for rank, part in enumerate(parts)
    ]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("stage", ["device", "none"])
def test_a_flipped_bit_in_one_ranks_part_of_a_box_is_caught_by_the_totals(registry, monkeypatch, victim, stage):
    source = weights()
    parts = [half(source, rank) for rank in (0, 1)]
    serve = "stage" if stage == "device" else "off"
    subs = replica_of(registry, parts, stage=stage, serve=serve)
    with publisher(registry, source) as pub:
        number = ready(pub)
        if stage == "none":
            run, done = Fetch.run, []

            def damaged(self):
                run(self)
                if self._progress.landing is subs[victim]._staging.landing and not done:
                    done.append(True)
                    parts[victim]["a"].tensor[3, 3] += 1

            monkeypatch.setattr(Fetch, "run", damaged)
        else:
            damaging(monkeypatch, subs[victim], 5000)
        found = together(*[partial(sub.sync, exactly=number, timeout=3) for sub in subs])
        expected = DigestMismatch if stage == "device" else Tainted
        assert isinstance(found[0], expected), found
        assert "do not add up" in str(found[0])
        if stage == "device":
            assert [sub.version for sub in subs] == [None, None]
            assert not parts[victim]["a"].tensor.any()
        reports = together(*[partial(sub.sync, timeout=20) for sub in subs])
        assert [report.version for report in reports] == [number, number], reports
        assert [report.unproved for report in reports] == [(), ()]
        for rank, part in enumerate(parts):
            assert torch.equal(part["a"].tensor, source["a"][:, 100 * rank : 100 * rank + 100])
        for sub in subs:
            sub.close()


@pytest.mark.parametrize("victim", [None, 0, 1, 2, 3])
def test_parts_that_several_ranks_have_are_counted_once_and_compared(registry, monkeypatch, victim):
    source = {"kv": torch.randn(BIG)}
    parts = [half(source, rank) for rank in (0, 0, 1, 1)]
    subs = replica_of(registry, parts)
    with publisher(registry, source) as pub:
        number = ready(pub)
        if victim is not None:
            damaging(monkeypatch, subs[victim], 5000)
        found = together(*[partial(sub.sync, exactly=number, timeout=2) for sub in subs])
        if victim is None:
            assert [report.unproved for report in found] == [()] * 4
        else:
            assert isinstance(found[0], DigestMismatch), found
        for sub in subs:
            sub.close()


def test_one_rank_without_verify_leaves_the_totals_unchecked_and_nothing_else(registry, monkeypatch):
    source = weights()
    parts = [half(source, rank) for rank in (0, 1)]
    subs = [
        subscriber(registry, parts[0], replica="tp", rank=0, world_size=2),
        subscriber(registry, parts[1], replica="tp", rank=1, world_size=2, verify=False),
    ]
    with publisher(registry, source) as pub:
        number = ready(pub)
        damaging(monkeypatch, subs[1], 5000)
        reports = together(*[partial(sub.sync, timeout=20) for sub in subs])
        assert [report.version for report in reports] == [number, number]
        for sub in subs:
            sub.close()


def test_what_is_taken_in_part_only_is_listed_as_unproved(registry):
    source = weights()
    part = {"a": half(source, 0)["a"], "b": torch.zeros(BIG), "bias": torch.zeros(5)}
    with publisher(registry, source) as pub, subscriber(registry, part, strict=False) as sub:
        ready(pub)
        report = sub.sync(timeout=10)
        assert report.unproved == ("a",)
        second = ready(pub, source, 1.0)
        flip(pub, "b")
        with pytest.raises(DigestMismatch):
            sub.sync(at_least=second, timeout=10)


KINDS = {
    "bf16": torch.randn(301, 40).bfloat16(),
    "bool": torch.rand(33) > 0.5,
    "fp8": torch.randn(16, 5).to(torch.float8_e4m3fn),
    "int64": torch.arange(1000),
    "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(2, 0, dtype=torch.bfloat16),
    "transposed": torch.randn(14, 13).t(),
}


def test_every_kind_of_tensor_fused_and_tied_ones_too_is_proved_whole(registry):
    tied = torch.randn(33, 7)
    source = KINDS | {"embed": tied, "head": tied, "q": torch.randn(8, 6), "k": torch.randn(8, 6)}
    fused = torch.zeros(4, 2, 2, 6)  # q and k interleaved by head
    target = zeros(KINDS) | {"embed": torch.zeros(33, 7), "head": torch.zeros(33, 7)}
    target |= {
        name: tuple(Shard(fused[head, place], shape=(8, 6), offset=(2 * head, 0)) for head in range(4))
        for place, name in enumerate("qk")
    }
    with publisher(registry, source) as pub, subscriber(registry, target) as sub:
        first = ready(pub)
        assert sub.sync(timeout=10).unproved == ()
        for name in [*KINDS, "embed", "q", "k"]:
            if name == "empty":
                continue
            number = ready(pub)
            flip(pub, name, at=0)
            with pytest.raises(DigestMismatch) as caught:
                sub.sync(at_least=number, timeout=10)
            assert caught.value.tensors == [name]
        assert sub.version == first
        assert fused[1, 0].equal(source["q"][2:4])


def test_fsdp_shards_of_three_ranks_reach_a_replica_of_two_proved_whole(registry):
    full = {"w": torch.randn(10, 8), "v": torch.randn(7, 4)}
    ranks = []
    for rank in range(3):
        rows = {name: torch.tensor_split(torch.arange(len(tensor)), 3)[rank].tolist() for name, tensor in full.items()}
        ranks.append(
            {
                name: Shard(tensor[rows[name]].clone(), shape=tensor.shape, offset=(rows[name][0], 0))
                for name, tensor in full.items()
            }
        )
    pubs = [publisher(registry, tensors, rank=rank, world_size=3, world="w") for rank, tensors in enumerate(ranks)]
    parts = [half(full, rank) for rank in (0, 1)]
    subs = replica_of(registry, parts)
    together(*[pub.publish for pub in pubs])
    reports = together(*[partial(sub.sync, timeout=20) for sub in subs])
    assert [report.unproved for report in reports] == [(), ()]
    for rank, part in enumerate(parts):
        assert torch.equal(part["w"].tensor, full["w"][:, 4 * rank : 4 * rank + 4])
    versions = together(*[pub.publish for pub in pubs])
    assert pubs[0].wait(versions[0], replicas=0, timeout=10).ready
    slot(pubs[2])[0] ^= 1
    found = together(*[partial(sub.sync, at_least=versions[0].number, timeout=2) for sub in subs])
    assert isinstance(found[0], DigestMismatch), found
    for one in (*subs, *pubs):
        one.close()


def test_of_two_copies_the_right_one_is_found(registry):
    """Windows come from both ranks in turn: that the sums differ does not tell which of them is wrong."""
    full = weights()
    for victim in (0, 1):
        pubs = [publisher(registry, full, rank=rank, world_size=2, world=f"w{victim}") for rank in (0, 1)]
        target = zeros(full)
        versions = together(*[pub.publish for pub in pubs])
        assert pubs[0].wait(versions[0], replicas=0, timeout=10).ready
        for at in (5000, 9000, 20_000, 24_000):
            slot(pubs[victim])[at] ^= 1
        with subscriber(registry, target) as sub:
            report = sub.sync(at_least=versions[0].number, timeout=10)
        assert equal(target, full)
        assert list(report.refused) == [f"trainer:{victim}"]
        for pub in pubs:
            pub.close()


def test_a_rank_that_died_is_made_up_for_by_the_copy_with_its_trailer(registry, monkeypatch):
    full = weights()
    with faulty(monkeypatch, fence=True) as faults:
        pubs = [publisher(registry, full, rank=rank, world_size=2, world="w") for rank in (0, 1)]
        versions = together(*[pub.publish for pub in pubs])
        assert pubs[0].wait(versions[0], replicas=0, timeout=10).ready
        faults.at("p-pub0", 3, faults.network.lose)
        target, again = zeros(full), zeros(full)
        with subscriber(registry, target) as sub, subscriber(registry, again) as child:
            report = sub.sync(timeout=10)
            assert "trainer:0" in report.refused
            assert report.unproved == ()
            assert equal(target, full)
            assert list(child.sync(timeout=10).served_by) == [f"peer:{sub.replica}"]
            assert equal(again, full)
        for pub in pubs:
            pub.close()


def test_a_world_counts_the_boxes_of_each_rank():
    full = torch.zeros(6, 4)
    ranks = [
        {"w": Shard(full[:2], shape=(6, 4), offset=(0, 0)), "n": torch.zeros(3)},
        {"w": Shard(full[2:], shape=(6, 4), offset=(2, 0))},
        {},
    ]
    world = WorldLayout.merge([RankLayout.of(resolve(one)) for one in ranks])
    assert boxes_at(world).tolist() == [2, 1, 0]
    assert [len(world.boxes_of(rank)) for rank in range(3)] == [2, 1, 0]


def test_a_stream_gives_nothing_of_a_version_that_is_damaged(registry):
    source = weights()
    with publisher(registry, source) as pub, subscriber(registry, None) as sub:
        first = ready(pub)
        assert equal(dict(sub.stream(timeout=10, copy=True)), source)
        second = ready(pub, source, 1.0)
        flip(pub, "b")
        drawn = []
        with pytest.raises(DigestMismatch):
            drawn.extend(sub.stream(at_least=second, timeout=10))
        assert not drawn
        assert sub.version == first
        assert sub.ready
