"""Deltas, carried out on real memory: whatever the two shardings, what is written is what was published."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_rl import blob, delta, packed
from mx_rl.blocks import blocks_of_layout, blocks_of_rank, wanted
from mx_rl.digest import box_sum
from mx_rl.errors import CorruptRecord, InvalidArgument
from mx_rl.kernels import base, fast, plain
from mx_rl.lattice import live_of, snapshot_runs, target_runs
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.plan import make_plan
from mx_rl.tensors import Shard, resolve

LAYOUTS = ["whole", "columns", "fused", "transposed", "strided", "boxes"]
CASES = [(fast, kind) for kind in LAYOUTS] + [(plain, "columns"), (plain, "boxes")]


class Trainer:
    """One publishing rank: live tensors, two slots, the blobs of its last publish."""

    def __init__(self, tensors, kernels=fast, wire_dtype=None):
        self.tensors, self.kernels = tensors, kernels
        self.layout = RankLayout.of(resolve(tensors), wire_dtype=wire_dtype)
        self.blocks = blocks_of_layout(self.layout)
        self.slots = [np.zeros(self.layout.nbytes, np.uint8) for _ in range(2)]
        self.number = 0
        self.raw = self.packed = b""

    def publish(self, room=None, *, reckon=False):
        runs = snapshot_runs(self.layout, live_of(self.layout, resolve(self.tensors)))
        payload = np.zeros(base.pad8(3 * self.layout.nbytes + 64) if room is None else room, np.uint8)
        slot, base_slot = self.slots[1], self.slots[0]
        found, self.sums = delta.encode(
            self.kernels, runs, self.blocks, slot=slot.ctypes.data, base_slot=base_slot.ctypes.data,
            num_units=len(self.layout.boxes), payload=payload, base_sums=self.sums if reckon else None,
        )  # fmt: skip
        self.slots.reverse()
        self.number += 1
        self.found = found
        if found is not None:
            names = (self.number - 1, self.number, self.layout.hash)
            head, table = found.raw(*names)
            self.raw = head.encode() + table + found.payload.tobytes()
            self.packed = found.packed(runs, self.blocks, base_number=names[0], number=names[1], layout=names[2])
        return self


class Rollout:
    """One reading rank over a world of trainers; its memory holds what was published before."""

    def __init__(self, trainers, tensors, kernels=fast):
        self.trainers, self.tensors, self.kernels = trainers, tensors, kernels
        self.world = WorldLayout.merge([t.layout for t in trainers])
        self.layout = RankLayout.of(resolve(tensors))
        self.plan = make_plan(self.world, self.layout, window_bytes=4096)
        self.runs = [self.through([p for p in self.plan.parts if p.rank == rank]) for rank in range(len(trainers))]
        self.blocks = [blocks_of_rank(self.world, rank) for rank in range(len(trainers))]
        self.begin()

    def through(self, parts):
        return target_runs(self.plan, self.world, self.layout, live_of(self.layout, resolve(self.tensors)), parts)

    def begin(self):
        self.sums, self.mistold = self.digests(), []
        self.volume = self.world.boxes.size.prod(axis=1)

    def digests(self):
        """By row of the world's boxes; owners and copies alike."""
        sums = np.zeros(len(self.world.boxes), np.uint64)
        for rank, trainer in enumerate(self.trainers):
            held = np.flatnonzero(trainer.layout.boxes.nbytes)
            rows = np.flatnonzero(self.world.boxes.rank == rank)
            rows = rows[np.argsort(self.world.boxes.offset[rows], kind="stable")]
            sums[rows] = trainer.sums[held]
        return sums

    def decode(self, rank, data, onto=None):
        blocks, (runs, _) = self.blocks[rank], self.runs[rank]
        need = np.flatnonzero(wanted(blocks, runs))
        boxes = np.flatnonzero(self.world.boxes.rank == rank)
        boxes = boxes[np.argsort(self.world.boxes.offset[boxes], kind="stable")]
        known = {"layout": self.trainers[rank].layout.hash, "num_blocks": len(blocks), "num_boxes": len(boxes)}
        head = blob.Head.decode(data, **known, most_bytes=1 << 30)
        table, payload = data[blob.HEAD_BYTES : head.payload_at], data[head.payload_at :]
        if head.codec == blob.RAW:
            fetch, entries = blob.fetch_entries(blob.decode_raw_table(head, blocks, table), blocks, need)
        else:
            starts, sums = blob.decode_packed_table(head, table)
            fetch, frames, starts = blob.fetch_frames(starts, need)
        local = bytearray(fetch.nbytes)
        for at, to, nbytes in fetch.ranges.tolist():
            local[to : to + nbytes] = payload[at : at + nbytes]
        if head.codec == blob.RAW:
            found = delta.decode_raw(self.kernels, blocks, entries, np.frombuffer(local, np.uint8))
        else:
            pieces = [bytes(local[a:b]) for a, b in itertools.pairwise(starts.tolist())]
            found = delta.decode_packed(self.kernels, blocks, frames, pieces, runs, onto=onto)
        found = found.met_by(runs)
        if head.codec == blob.PACKED:
            told = np.zeros(len(self.world.boxes), np.uint64)
            told[boxes] = sums
            _, will = found.check(self.kernels, runs, len(self.runs[rank][1].box))
            proof = delta.prove_packed(self.runs[rank][1], will, volume=self.volume, told=told)
            self.mistold += [self.world.names[self.world.boxes.tensor[box]] for box in proof.wrong]
        return found

    def proofs(self, deltas, digests):
        found = []
        for rank, one in enumerate(deltas):
            runs, units = self.runs[rank]
            was, will = one.check(self.kernels, runs, len(units.box))
            found.append(delta.prove(units, was, will, volume=self.volume, base_digest=self.sums, digest=digests))
        return found

    def write(self, deltas):
        for (runs, _), one in zip(self.runs, deltas, strict=True):
            one.write(self.kernels, runs)


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []


def step(tensor, share=0.02, seed=0):
    """Change some elements by one unit of the last place."""
    rng = np.random.default_rng(seed)
    flat = torch.from_numpy(rng.random(tensor.numel()) < share).view(tensor.shape)
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    tensor.view(signed).copy_(torch.where(flat, tensor.view(signed) + 1, tensor.view(signed)))


def rows(whole, begin, end):
    return Shard(whole[begin:end], shape=whole.shape, offset=(begin, *[0] * (whole.dim() - 1)))


def columns(whole, begin, end):
    return Shard(whole[:, begin:end], shape=whole.shape, offset=(0, begin))


def model(dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    return {
        "embed": torch.randn(700, 100).to(dtype),
        "layers.0.weight": torch.randn(300, 100).to(dtype),
        "layers.0.norm": torch.randn(100),
        "layers.0.scale": torch.randn(()).to(dtype),
        "steps": torch.arange(7),
        "flags": torch.tensor([True, False, True]),
        "phase": torch.randn(5, 3, dtype=torch.complex128),
    }


def sharded(whole):
    """Two ranks, cut by rows; small ones lie on one of them."""
    first = {n: rows(t, 0, t.shape[0] // 3) for n, t in whole.items() if t.dim() == 2}
    second = {n: rows(t, t.shape[0] // 3, t.shape[0]) for n, t in whole.items() if t.dim() == 2}
    return first | {n: t for n, t in whole.items() if t.dim() < 2}, second


def mutate(whole, seed):
    for i, (name, tensor) in enumerate(whole.items()):
        if name == "flags":
            tensor.logical_not_()
        elif tensor.is_complex():
            step(torch.view_as_real(tensor), 0.3, seed + i)
        else:
            step(tensor, 1.0 if tensor.numel() < 2 else 0.02, seed + i)


def targets(published):
    """Other cuttings of the same model, holding what was published: (tensors, what each must be a copy of)."""
    embed, weight = published["embed"], published["layers.0.weight"]
    fused = torch.empty(300 + 700, 100, dtype=weight.dtype)
    transposed = torch.empty(100, 300, dtype=weight.dtype)
    whole = {n: t.clone() for n, t in published.items()}
    yield "whole", whole
    yield "columns", {"embed": columns(embed.clone(), 30, 80), "layers.0.weight": columns(weight.clone(), 0, 51)}
    yield "fused", {"layers.0.weight": fused[:300], "embed": fused[300:]}
    yield "transposed", {"layers.0.weight": transposed.t(), "embed": embed.clone()}
    every_other = torch.empty(700, 200, dtype=embed.dtype)
    yield "strided", {"embed": every_other[:, ::2]}
    yield "boxes", {"embed": (rows(embed.clone(), 5, 90), rows(embed.clone(), 600, 700))}


def fill(tensors, published):
    for name, parts in resolve(tensors).items():
        for part in parts:
            part.tensor.copy_(published[name][tuple(slice(a, a + n) for a, n in zip(part.lo, part.box, strict=True))])


def equal(tensors, published):
    for name, parts in resolve(tensors).items():
        for part in parts:
            want = published[name][tuple(slice(a, a + n) for a, n in zip(part.lo, part.box, strict=True))]
            assert bits(part.tensor) == bits(want), name


@pytest.mark.parametrize("codec", ["raw", "packed"])
@pytest.mark.parametrize(("kernels", "kind"), CASES, ids=lambda value: str(getattr(value, "__name__", value))[-8:])
def test_a_delta_reaches_every_layout_and_is_proved_before_it_is_written(kernels, codec, kind):
    whole = model()
    trainers = [Trainer(tensors, kernels).publish() for tensors in sharded(whole)]
    tensors = dict(targets(whole))[kind]
    fill(tensors, whole)
    some = {name: tensor for name, tensor in whole.items() if name in tensors}
    rollout = Rollout(trainers, tensors, kernels) if len(some) == len(whole) else narrow(trainers, tensors, kernels)
    mutate(whole, 1)
    for trainer in trainers:
        trainer.publish()
    deltas = [rollout.decode(rank, getattr(t, codec)) for rank, t in enumerate(trainers)]
    before = {n: [bits(p.tensor) for p in parts] for n, parts in resolve(tensors).items()}
    proofs = rollout.proofs(deltas, rollout.digests())
    assert not any(len(proof.wrong) for proof in proofs)
    assert not rollout.mistold
    assert {n: [bits(p.tensor) for p in parts] for n, parts in resolve(tensors).items()} == before
    rollout.write(deltas)
    equal(tensors, whole)
    rollout.write(deltas)  # absolute: twice is harmless
    equal(tensors, whole)


def narrow(trainers, tensors, kernels):
    """A reader that takes some names only."""
    rollout = Rollout.__new__(Rollout)
    rollout.trainers, rollout.tensors, rollout.kernels = trainers, tensors, kernels
    rollout.world = WorldLayout.merge([t.layout for t in trainers])
    rollout.layout = RankLayout.of(resolve(tensors))
    rollout.plan = make_plan(rollout.world, rollout.layout, window_bytes=4096, strict=False)
    rollout.runs = [rollout.through([p for p in rollout.plan.parts if p.rank == r]) for r in range(len(trainers))]
    rollout.blocks = [blocks_of_rank(rollout.world, rank) for rank in range(len(trainers))]
    rollout.begin()
    return rollout


def test_the_digest_of_a_snapshot_is_that_of_each_box():
    whole = model()
    for tensors in sharded(whole):
        trainer = Trainer(tensors).publish()
        resolved = resolve(tensors)
        for row, place in enumerate(trainer.layout.packing()):
            part = resolved[place.name][place.box]
            data = trainer.slots[0][place.offset : place.offset + place.nbytes]
            want = box_sum(data, part.global_shape, part.lo, part.box, part.tensor.element_size())
            assert int(trainer.sums[row]) == want, place.name


@pytest.mark.parametrize("codec", ["raw", "packed"])
def test_a_wrong_base_is_refused_with_nothing_written(codec):
    whole = model()
    trainers = [Trainer(tensors).publish() for tensors in sharded(whole)]
    copy = {n: t.clone() for n, t in whole.items()}
    rollout = Rollout(trainers, copy)
    mutate(whole, 1)
    changed = (copy["embed"].view(torch.int16) != whole["embed"].view(torch.int16)).nonzero()[0].tolist()
    copy["embed"].view(torch.int16)[tuple(changed)] ^= 4  # one element that is about to change is not what it should be
    for trainer in trainers:
        trainer.publish()
    deltas = [rollout.decode(rank, getattr(t, codec)) for rank, t in enumerate(trainers)]
    proofs = rollout.proofs(deltas, rollout.digests())
    names = [rollout.world.names[rollout.world.boxes.tensor[box]] for proof in proofs for box in proof.wrong]
    # Steps from a wrong value lead to a wrong value by the same steps: the difference of digests is right.
    assert (names, rollout.mistold) == ((["embed"], []) if codec == "raw" else ([], ["embed"]))


def test_parts_of_a_shard_add_up_over_the_ranks_of_a_replica():
    whole = model()
    trainers = [Trainer(tensors).publish() for tensors in sharded(whole)]
    halves = [{"embed": columns(whole["embed"].clone(), a, b)} for a, b in ((0, 33), (33, 100))]
    readers = [narrow(trainers, tensors, fast) for tensors in halves]
    mutate(whole, 1)
    for trainer in trainers:
        trainer.publish()
    total = {}
    for reader in readers:
        deltas = [reader.decode(rank, t.raw) for rank, t in enumerate(trainers)]
        assert not reader.mistold
        for proof in reader.proofs(deltas, reader.digests()):
            assert not len(proof.wrong)
            for box, change in zip(proof.partial.tolist(), proof.sums, strict=True):
                total[box] = (total.get(box, 0) + int(change)) % (1 << 64)
    want = readers[0].digests() - readers[0].sums
    assert len(total) == 2
    assert all(total[box] == int(want[box]) for box in total)


def test_tied_names_in_memory_of_their_own_both_change_and_a_drifted_one_is_seen():
    torch.manual_seed(0)
    whole = {"embed": torch.randn(500, 40).bfloat16()}
    whole["head"] = whole["embed"]
    trainer = Trainer(whole).publish()
    copy = {"embed": whole["embed"].clone(), "head": whole["embed"].clone()}
    rollout = Rollout([trainer], copy)
    step(whole["embed"], 0.05)
    trainer.publish()
    one = rollout.decode(0, trainer.packed)
    assert not len(rollout.proofs([one], rollout.digests())[0].wrong)
    at = (copy["head"].view(torch.int16) != whole["head"].view(torch.int16)).nonzero()[0].tolist()
    kept = copy["head"].clone()
    copy["head"].view(torch.int16)[tuple(at)] ^= 1
    assert len(rollout.proofs([one], rollout.digests())[0].wrong) == 1
    copy["head"].copy_(kept)
    rollout.write([one])
    equal(copy, whole)


@pytest.mark.parametrize("codec", ["raw", "packed"])
def test_several_versions_are_chained_into_one_and_checked_once(codec):
    whole = model()
    trainers = [Trainer(tensors).publish() for tensors in sharded(whole)]
    copy = {n: t.clone() for n, t in whole.items()}
    rollout = Rollout(trainers, copy)
    chained = [None, None]
    for seed in (1, 1, 2, 3):  # the second time the same elements change again
        mutate(whole, seed)
        for rank, trainer in enumerate(trainers):
            one = rollout.decode(rank, getattr(trainer.publish(), codec), onto=chained[rank])
            chained[rank] = (
                one if chained[rank] is None else delta.compose(chained[rank], one).met_by(rollout.runs[rank][0])
            )
    assert not any(len(proof.wrong) for proof in rollout.proofs(chained, rollout.digests()))
    rollout.write(chained)
    equal(copy, whole)


def test_a_copy_on_another_rank_serves_as_well_as_the_owner():
    whole = model()
    extra = {"own": torch.randn(9, 9)}
    trainers = [Trainer(whole | extra).publish(), Trainer(whole).publish()]
    copy = {n: t.clone() for n, t in whole.items()}
    rollout = narrow(trainers, copy, fast)
    other = [part for one in rollout.plan.parts for part in one.copies]
    assert {part.rank for part in other} == {1}
    rollout.runs = [rollout.through([]), rollout.through(other)]
    mutate(whole, 4)
    for trainer in trainers:
        trainer.publish()
    deltas = [rollout.decode(rank, t.packed) for rank, t in enumerate(trainers)]
    assert deltas[0].num_changes == 0
    assert not any(len(proof.wrong) for proof in rollout.proofs(deltas, rollout.digests()))
    assert not rollout.mistold
    rollout.write(deltas)
    equal(copy, whole)


def test_nothing_changed_and_everything_changed():
    whole = {"w": torch.randn(300, 500).bfloat16()}
    trainer = Trainer(whole).publish()
    copy = {"w": whole["w"].clone()}
    rollout = Rollout([trainer], copy)
    trainer.publish()
    assert rollout.decode(0, trainer.raw).num_changes == rollout.decode(0, trainer.packed).num_changes == 0
    assert len(trainer.packed) < 200
    whole["w"].copy_(torch.randn(300, 500).bfloat16())
    trainer.publish()
    for data in (trainer.raw, trainer.packed):
        one = rollout.decode(0, data)
        assert one.num_changes == whole["w"].numel()
        assert not len(rollout.proofs([one], rollout.digests())[0].wrong)
    rollout.write([rollout.decode(0, trainer.packed)])
    equal(copy, whole)


def test_minus_zero_and_nan_payloads_arrive_as_they_are():
    whole = {"w": torch.zeros(1000, dtype=torch.bfloat16)}
    trainer = Trainer(whole).publish()
    copy = {"w": whole["w"].clone()}
    rollout = Rollout([trainer], copy)
    whole["w"].view(torch.int16)[torch.tensor([3, 500, 999])] = torch.tensor([-32768, 0x7FC1, -1], dtype=torch.int16)
    trainer.publish()
    one = rollout.decode(0, trainer.packed)
    assert one.num_changes == 3
    rollout.write([one])
    equal(copy, whole)


def test_a_delta_that_does_not_fit_is_none_and_the_slot_is_whole():
    whole = {"w": torch.zeros(70_000, dtype=torch.bfloat16)}
    trainer = Trainer(whole).publish()
    whole["w"].copy_(torch.arange(70_000).bfloat16())
    trainer.publish(room=4096)
    assert trainer.found is None
    assert bits(whole["w"]) == trainer.slots[0][:140_000].tolist()


@pytest.mark.parametrize("room", [None, 64])
def test_digests_that_are_reckoned_from_the_changes_are_those_of_the_whole(room):
    whole = model()
    reckoned, made = ([Trainer(tensors).publish() for tensors in sharded(whole)] for _ in range(2))
    mutate(whole, 3)
    for one, other in zip(reckoned, made, strict=True):
        assert one.publish(room, reckon=True).sums.tolist() == other.publish().sums.tolist()


def test_a_cast_is_compared_as_it_travels():
    whole = {"w": torch.randn(70_000)}
    trainer = Trainer(whole, wire_dtype=torch.bfloat16).publish()
    copy = {"w": whole["w"].bfloat16()}
    rollout = Rollout([trainer], copy)
    whole["w"].mul_(1 + 2e-3)
    trainer.publish()
    assert 0 < trainer.found.counts[0] <= base.DENSE
    one = rollout.decode(0, trainer.packed)
    assert not len(rollout.proofs([one], rollout.digests())[0].wrong)
    rollout.write([one])
    assert bits(copy["w"]) == bits(whole["w"].bfloat16())


def test_only_the_blocks_that_a_reader_meets_are_fetched():
    whole = {"w": torch.zeros(4_000_000, dtype=torch.bfloat16)}
    trainer = Trainer(whole).publish()
    part = Shard(torch.zeros(100, dtype=torch.bfloat16), shape=(4_000_000,), offset=(2_000_000,))
    rollout = narrow([trainer], {"w": part}, fast)
    step(whole["w"], 0.01)
    trainer.publish()
    need = np.flatnonzero(wanted(rollout.blocks[0], rollout.runs[0][0]))
    assert need.tolist() == [2_000_000 >> 16]
    one = rollout.decode(0, trainer.raw)
    assert len(one.payload) < len(trainer.raw) // 50
    assert not len(rollout.proofs([one], rollout.digests())[0].wrong)
    rollout.write([one])
    equal({"w": part}, whole)


def test_more_than_2_to_the_31_elements_are_addressed():
    """By arithmetic: a shard of 2^33 elements whose memory nobody has."""
    shape = (1 << 20, 1 << 13)
    one = Shard(torch.empty(1, 1, dtype=torch.bfloat16).expand(shape), shape=shape, offset=(0, 0))
    layout = RankLayout.of({"w": (one,)})
    blocks = blocks_of_layout(layout)
    assert len(blocks) == 1 << 17
    assert blocks[-1].tolist() == [((1 << 33) - (1 << 16)) * 2, 1 << 16, 2]
    world = WorldLayout.merge([layout])
    part = Shard(torch.empty(4, 1 << 13, dtype=torch.bfloat16), shape=shape, offset=((1 << 20) - 4, 0))
    target = RankLayout.of({"w": (part,)})
    plan = make_plan(world, target, window_bytes=1 << 20)
    runs, units = target_runs(plan, world, target, live_of(target, {"w": (part,)}), plan.parts)
    assert runs[:, base.POSITION].tolist() == [(1 << 33) - (1 << 15)]
    assert runs[:, base.SLOT].tolist() == [2 * ((1 << 33) - (1 << 15))]
    assert np.flatnonzero(wanted(blocks, runs)).tolist() == [(1 << 17) - 1]
    assert units.elements.tolist() == [1 << 15]


def test_lazy_tensors_are_refused():
    tensors = {"w": torch.zeros(3, dtype=torch.complex64).conj()}
    with pytest.raises(InvalidArgument, match="conjugates"):
        live_of(RankLayout.of(resolve(tensors)), resolve(tensors))


# ---- hostile blobs


def sample():
    whole = {"w": torch.randn(90_000).bfloat16(), "n": torch.randn(50)}
    trainer = Trainer(whole).publish()
    copy = {n: t.clone() for n, t in whole.items()}
    rollout = Rollout([trainer], copy)
    step(whole["w"], 0.01)
    step(whole["n"], 0.9)
    return rollout, trainer.publish()


ROLLOUT, TRAINER = sample()
GUARD = np.zeros(1 << 16, np.uint8)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["raw", "packed"]), st.data())
def test_damaged_blobs_are_refused_or_write_inside_the_runs_only(codec, data):
    blob_bytes = bytearray(getattr(TRAINER, codec))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(blob_bytes) - 1) | st.integers(0, 200))
        blob_bytes[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del blob_bytes[data.draw(st.integers(0, len(blob_bytes))) :]
    try:
        one = ROLLOUT.decode(0, bytes(blob_bytes))
    except CorruptRecord:
        return
    assert fast.disorder(one.entries, one.blocks, one.payload) == -1
    assert (one.entries[:, base.E_VALUE] + one.entries[:, base.E_COUNT] * one.blocks[one.entries[:, 0], 2]).max(
        initial=0
    ) <= len(one.payload)
    ROLLOUT.proofs([one], ROLLOUT.digests())


@settings(max_examples=120, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_no_frame(data):
    blocks = np.array([[0, 65536, 2], [131072, 100, 2]], np.int64)
    try:
        frame = packed.unpack(blocks, data)
    except CorruptRecord:
        return
    assert len(frame.payload) <= 2 * 65536 * 2 + 1000


def test_random_streams_in_a_well_formed_frame_are_bounded():
    blocks = np.array([[0, 65536, 2]], np.int64)
    rng = np.random.default_rng(0)
    for _ in range(300):
        counts = np.array([rng.integers(0, 40)], "<u2")
        n = int(counts[0])
        codes = rng.integers(0, 256, n, dtype=np.uint8)
        streams = [
            counts.tobytes(),
            rng.bytes(n),
            rng.bytes(n),
            codes.tobytes(),
            *[rng.bytes(int((codes == 255).sum()))] * 2,
        ]
        data = packed._HEAD.pack(*map(len, streams)) + b"".join(streams)
        try:
            frame = packed.unpack(blocks, data)
        except CorruptRecord:
            continue
        assert fast.disorder(frame.entries, blocks, frame.payload) == -1
