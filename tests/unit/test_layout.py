"""Layouts of one rank and of a world: packing, aliases, agreement, coverage, and the wire form."""

import itertools
import struct
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_rl.errors import (
    AliasConflict,
    CorruptRecord,
    CoverageMismatch,
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    OverlapMismatch,
    ShapeMismatch,
)
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.tensors import Shard, resolve


def rank_layout(tensors, **options):
    return RankLayout.of(resolve(tensors), **options)


def rows(whole, begin, end):
    return Shard(whole[begin:end], shape=whole.shape, offset=(begin, *(0,) * (whole.ndim - 1)))


def world_of(*ranks):
    return WorldLayout.merge([rank_layout(tensors) for tensors in ranks])


# ---- one rank --------------------------------------------------------------------------------------------------------


def test_boxes_are_packed_in_natural_order_at_multiples_of_64():
    layout = rank_layout({"w.10": torch.zeros(3), "w.9": torch.zeros(5, 5), "w.11": torch.zeros(7, dtype=torch.int8)})
    assert [(p.name, p.offset, p.nbytes, p.shape, p.dtype) for p in layout.packing()] == [
        ("w.9", 0, 100, (5, 5), "float32"),
        ("w.10", 128, 12, (3,), "float32"),
        ("w.11", 192, 7, (7,), "int8"),
    ]
    assert layout.nbytes == 199


def test_several_boxes_of_one_name_are_numbered_in_their_order():
    whole = torch.zeros(6, 2)
    layout = rank_layout({"qkv": (rows(whole, 4, 5), rows(whole, 0, 1), rows(whole, 2, 2))})
    assert [(p.box, p.offset, p.nbytes) for p in layout.packing()] == [(0, 0, 8), (1, 64, 8), (2, 128, 0)]
    assert layout.boxes.lo.tolist() == [[4, 0], [0, 0], [2, 0]]


def test_scalars_and_empty_tensors_have_a_layout():
    layout = rank_layout({"e": torch.empty(2, 0, dtype=torch.bfloat16), "s": torch.tensor(3.0)})
    assert layout.shapes == ((2, 0), ())
    assert layout.dtypes == ("bfloat16", "float32")
    assert [p.nbytes for p in layout.packing()] == [0, 4]
    assert layout.packing()[1].shape == ()


def test_a_rank_without_tensors_has_an_empty_layout():
    layout = rank_layout({})
    assert (layout.nbytes, layout.names, layout.packing()) == (0, (), [])
    assert RankLayout.decode(layout.encode()).hash == layout.hash


def test_insertion_order_does_not_change_the_layout():
    tensors = {f"layers.{i}.w": torch.zeros(i + 1) for i in range(12)}
    turned = dict(reversed(tensors.items()))
    resolved = {name: (Shard(tensor),) for name, tensor in turned.items()}
    assert rank_layout(tensors).hash == rank_layout(turned).hash == RankLayout.of(resolved).hash


def test_anything_that_a_reader_sees_changes_the_hash():
    whole = torch.zeros(4, 4)
    variants = [
        {"w": whole},
        {"v": whole},
        {"w": whole.double()},
        {"w": whole.view(2, 8)},
        {"w": rows(whole, 0, 2)},
        {"w": rows(whole, 2, 4)},
        {"w": (rows(whole, 0, 2), rows(whole, 2, 4))},
        {"w": (rows(whole, 2, 4), rows(whole, 0, 2))},
        {"w": whole, "x": whole},
        {"w": whole, "x": whole.clone()},
        {"w": whole.view(4, 4, 1)},
    ]
    assert len({rank_layout(tensors).hash for tensors in variants}) == len(variants)


# ---- wire dtype ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", [torch.bfloat16, "bfloat16", "torch.bfloat16", {"*": "bfloat16"}])
def test_wire_dtype_casts_wide_floats_only(wire):
    kinds = (torch.float32, torch.float64, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)
    layout = rank_layout({str(i): torch.zeros(2).to(kind) for i, kind in enumerate(kinds)}, wire_dtype=wire)
    assert layout.dtypes == ("bfloat16", "bfloat16", "bfloat16", "int64", "bool", "float8_e4m3fn", "complex64")
    assert [p.nbytes for p in layout.packing()] == [4, 4, 4, 16, 2, 2, 16]


def test_first_matching_wire_dtype_pattern_wins_and_others_keep_their_own():
    tensors = {"a.norm": torch.zeros(1), "a.proj": torch.zeros(1), "b": torch.zeros(1, dtype=torch.float16)}
    layout = rank_layout(tensors, wire_dtype={"*.norm": torch.float32, "a.*": torch.bfloat16})
    assert layout.dtypes == ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("wire", ["int8", "bf16", torch.int32, {"*": "nonsense"}])
def test_bad_wire_dtype_is_refused(wire):
    with pytest.raises(InvalidArgument, match="wire_dtype"):
        rank_layout({"a": torch.zeros(1)}, wire_dtype=wire)


# ---- aliases ---------------------------------------------------------------------------------------------------------


def test_tied_parameters_are_packed_once_under_the_first_name():
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(3, 5, bias=False)
    model.embed = torch.nn.Embedding(5, 3)
    model.lm_head.weight = model.embed.weight
    layout = rank_layout(model)
    assert layout.names == ("embed.weight",)
    assert layout.aliases == {"lm_head.weight": "embed.weight"}
    assert layout.nbytes == 60


def test_views_of_other_elements_are_no_alias():
    base = torch.zeros(4, 4)
    tensors = {"a": base, "b": base.t(), "c": base[:2], "d": base.view(16), "e": base.view(torch.int32), "f": base[1:3]}
    assert rank_layout(tensors).aliases == {}


def test_equal_memory_as_another_box_is_no_alias():
    part = torch.zeros(2, 2)
    tensors = {"a": Shard(part, shape=(4, 2)), "b": Shard(part, shape=(4, 2), offset=(2, 0))}
    assert rank_layout(tensors).aliases == {}


def test_empty_tensors_are_aliases_only_as_one_object():
    one = torch.nn.Parameter(torch.empty(0, 3))
    assert rank_layout({"a": one, "b": one}).aliases == {"b": "a"}
    assert rank_layout({"a": torch.empty(0, 3), "b": torch.empty(0, 3)}).aliases == {}


def test_one_memory_in_two_wire_dtypes_is_two_tensors():
    shared = torch.zeros(4)
    layout = rank_layout({"a": shared, "b": shared}, wire_dtype={"b": "bfloat16"})
    assert (layout.aliases, layout.dtypes) == ({}, ("float32", "bfloat16"))


def test_a_rank_with_an_empty_box_takes_the_alias_from_the_others():
    embed = torch.zeros(2, 3)
    full, empty = {"embed": rows(embed, 0, 2)}, {"embed": rows(embed, 2, 2)}
    world = world_of(
        full | {"lm_head": full["embed"]},
        empty | {"lm_head": Shard(torch.empty(0, 3), shape=(2, 3), offset=(2, 0))},
    )
    assert world.aliases == {"lm_head": "embed"}
    assert world.names == ("embed",)
    assert world.model_bytes == 24


def test_an_alias_held_under_its_other_name_alone_counts_for_the_canonical_one():
    embed = torch.zeros(4, 3)
    first = Shard(embed[:2], shape=(4, 3))
    world = world_of({"embed": first, "lm_head": first}, {"a": torch.zeros(1), "lm_head": rows(embed, 2, 4)})
    assert world.aliases == {"lm_head": "embed"}
    assert world.names == ("a", "embed")
    boxes = world.boxes
    assert list(zip(boxes.tensor.tolist(), boxes.rank.tolist(), boxes.offset.tolist(), strict=True)) == [
        (0, 1, 0),
        (1, 0, 0),
        (1, 1, 64),
    ]


def test_ranks_that_disagree_about_an_alias_are_told():
    tied = torch.zeros(2, 3)
    with pytest.raises(AliasConflict, match="embed and lm_head: one tensor on rank 0, several on rank 1"):
        world_of({"embed": tied, "lm_head": tied}, {"embed": tied.clone(), "lm_head": tied.clone()})


# ---- a world ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_uneven_and_empty_shards_keep_the_global_shape(parts):  # pitfall B1
    whole = torch.arange(10.0).view(5, 2)
    step = -(-5 // parts)
    cuts = [(min(i * step, 5), min((i + 1) * step, 5)) for i in range(parts)]
    world = world_of(*({"w": rows(whole, *cut)} for cut in cuts))
    assert world.shapes == ((5, 2),)
    assert [tuple(lo) for lo in world.boxes.lo.tolist()] == [(a, 0) for a, b in cuts if a < b]
    assert world.model_bytes == 40


def test_more_ranks_than_rows_is_complete():  # pitfall B4
    whole = torch.zeros(4, 2)
    world = world_of(*({"w": rows(whole, min(i, 4), min(i + 1, 4))} for i in range(16)))
    assert world.boxes.rank.tolist() == [0, 1, 2, 3]
    assert [world.rank_nbytes(i) for i in (0, 3, 4, 15)] == [8, 8, 0, 0]


def test_a_rank_without_any_tensor_is_a_seat_but_no_coverage():  # pitfall A6
    whole = torch.zeros(4, 2)
    full = [{"w": rows(whole, 0, 2)}, {}, {"w": rows(whole, 2, 4)}, {}]
    world = world_of(*full)
    assert (world.world_size, world.rank_nbytes(1), len(world.boxes)) == (4, 0, 2)
    with pytest.raises(CoverageMismatch, match="w: 4 of 8 elements"):
        world_of(*full[:2])


def test_a_world_without_tensors_is_allowed():
    world = world_of({}, {})
    assert (world.names, world.model_bytes, len(world.boxes)) == ((), 0, 0)
    assert WorldLayout.decode(world.encode()).hash == world.hash


def test_the_lowest_rank_owns_equal_boxes():
    whole = torch.zeros(4, 2)
    a, b = {"w": rows(whole, 0, 2)}, {"w": rows(whole, 2, 4)}
    boxes = world_of(b, a, a, b).boxes
    assert list(zip(boxes.rank.tolist(), boxes.owner.tolist(), strict=True)) == [(0, 0), (1, 1), (2, 1), (3, 0)]


def test_a_box_held_twice_on_one_rank_is_one_owner():
    whole = torch.zeros(2, 2)
    world = world_of({"w": (Shard(whole), Shard(whole.clone()))})
    assert world.boxes.owner.tolist() == [0, 0]
    assert world.patterns.owned.tolist() == [0]


def test_overlapping_boxes_are_named_with_their_ranks():
    whole = torch.zeros(6, 2)
    with pytest.raises(OverlapMismatch, match=r"w: \[0:4, 0:2\] on rank 0 and \[3:6, 0:2\] on rank 1"):
        world_of({"w": rows(whole, 0, 4)}, {"w": rows(whole, 3, 6)})


def test_an_overlap_that_hides_a_hole_is_still_an_overlap():
    whole = torch.zeros(6)
    with pytest.raises(OverlapMismatch):  # 4 + 2 elements of 6, but 2 twice and 2 never
        world_of({"w": rows(whole, 0, 4)}, {"w": rows(whole, 2, 4)})


def test_all_problems_of_a_world_come_in_one_error():
    good = {"s": torch.zeros(4), "d": torch.zeros(4), "o": rows(torch.zeros(4), 0, 3), "c": rows(torch.zeros(4), 0, 1)}
    bad = {"s": torch.zeros(5), "d": torch.zeros(4).half(), "o": rows(torch.zeros(4), 2, 4)}
    with pytest.raises(LayoutMismatch) as caught:
        world_of(good, good | bad)
    error = caught.value
    assert type(error) is LayoutMismatch
    assert error.shapes == ["s: (4,) on rank 0, (5,) on rank 1"]
    assert error.dtypes == ["d: float32 on rank 0, float16 on rank 1"]
    assert error.overlaps == ["o: [0:3] on rank 0 and [2:4] on rank 1"]
    assert error.uncovered == ["c: 1 of 4 elements are held"]


def test_a_single_kind_of_problem_has_its_own_class():
    with pytest.raises(ShapeMismatch):
        world_of({"w": torch.zeros(4)}, {"w": torch.zeros(4, 1)})
    with pytest.raises(DtypeMismatch):
        world_of({"w": torch.zeros(4)}, {"w": torch.zeros(4).half()})


def test_no_rank_is_no_world():
    with pytest.raises(InvalidArgument):
        WorldLayout.merge([])


grids = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4).map(sorted), min_size=1, max_size=3)


@settings(deadline=None)
@given(grids, st.randoms(use_true_random=False))
def test_grids_fit_and_one_box_more_or_less_does_not(axes, random):
    shape = tuple(axis[-1] for axis in axes)
    intervals = [list(itertools.pairwise([0, *axis])) for axis in axes]
    cells = [cell for cell in itertools.product(*intervals) if all(a < b for a, b in cell)]
    whole = torch.zeros(shape)
    shards = [
        Shard(whole[tuple(slice(a, b) for a, b in cell)], shape=shape, offset=[a for a, _ in cell]) for cell in cells
    ]
    random.shuffle(shards)
    if not shards:
        assert world_of({"w": whole}).model_bytes == 0
        return
    ranks = [{"w": shard} for shard in shards]
    assert world_of(*ranks, *ranks[:2]).model_bytes == whole.numel() * 4
    if len(cells) > 1:
        with pytest.raises(CoverageMismatch):
            world_of(*ranks[1:])
        with pytest.raises(OverlapMismatch):
            world_of(*ranks, {"w": whole})


# ---- the wire --------------------------------------------------------------------------------------------------------


def sample_world():
    whole = torch.zeros(6, 4)
    shared = torch.zeros(3)
    ranks = [
        {
            "w": (rows(whole, i, i + 1), rows(whole, i + 3, i + 4)),
            "norm": shared,
            "ünïcode": shared,
            "e": torch.empty(2, 0),
            "s": torch.tensor(1.0).double(),
        }
        for i in range(3)
    ]
    return [rank_layout(tensors) for tensors in ranks]


def test_rank_layout_survives_the_wire():
    layout = sample_world()[1]
    copy = RankLayout.decode(layout.encode())
    assert copy.hash == layout.hash
    assert copy.packing() == layout.packing()
    assert (copy.shapes, copy.dtypes, copy.aliases) == (layout.shapes, layout.dtypes, {"ünïcode": "norm"})


def test_world_layout_survives_the_wire():
    world = WorldLayout.merge(sample_world())
    copy = WorldLayout.decode(world.encode())
    assert copy.hash == world.hash
    assert (copy.shapes, copy.dtypes, copy.aliases) == (world.shapes, world.dtypes, world.aliases)
    assert [copy.rank_nbytes(i) for i in range(3)] == [world.rank_nbytes(i) for i in range(3)]
    for column in ("tensor", "lo", "size", "offset", "nbytes", "rank", "owner"):
        assert np.array_equal(getattr(copy.boxes, column), getattr(world.boxes, column))


def test_the_hash_is_over_the_content_not_the_compression():
    layout = sample_world()[0]
    data = layout.encode()
    head = len(data) - len(zlib.compress(zlib.decompress(data[4 + 4 * 8 :]), 1))
    again = data[:head] + zlib.compress(zlib.decompress(data[head:]), 9)
    assert again != data
    assert RankLayout.decode(again).hash == layout.hash


def test_every_truncation_is_corrupt():
    for kind, data in (
        (RankLayout, sample_world()[0].encode()),
        (WorldLayout, WorldLayout.merge(sample_world()).encode()),
    ):
        for end in range(len(data)):
            with pytest.raises(CorruptRecord):
                kind.decode(data[:end])
        with pytest.raises(CorruptRecord):
            kind.decode(data + b"\0")


@settings(deadline=None)
@given(st.data())
def test_damaged_columns_are_corrupt_or_a_valid_layout(data):
    kind = data.draw(st.sampled_from([RankLayout, WorldLayout]))
    layouts = sample_world()
    blob = layouts[0].encode() if kind is RankLayout else WorldLayout.merge(layouts).encode()
    head = 4 + 8 * (3 if kind is RankLayout else 5) + 8
    body = bytearray(zlib.decompress(blob[head:]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) // 8 - 1)) * 8
        value = data.draw(st.sampled_from([-1, 0, 1, 2, 7, 64, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63)]))
        body[at : at + 8] = struct.pack("<q", value)
    try:
        found = kind.decode(blob[:head] + zlib.compress(bytes(body)))
    except CorruptRecord:
        return
    assert len(found.names) == len(found.shapes) == len(found.dtypes)
    assert found.boxes.nbytes.min() >= 0
    assert found.boxes.offset.min() >= 0


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_corrupt(noise):
    for kind, magic in ((RankLayout, b"MXR1"), (WorldLayout, b"MXW1")):
        for data in (noise, magic + noise):
            with pytest.raises(CorruptRecord):
                kind.decode(data)


@pytest.mark.parametrize("kind", [RankLayout, WorldLayout])
def test_lengths_are_bounded_before_they_are_allocated(kind):
    magic, num_counts = (b"MXR1", 3) if kind is RankLayout else (b"MXW1", 5)
    for counts in ([1 << 62] * num_counts, [1, 1, 1 << 40, 1, 1][:num_counts], [1 << 21, 1, 1, 1, 1][:num_counts]):
        for length in (1 << 62, 1 << 29, 0):
            with pytest.raises(CorruptRecord):
                kind.decode(magic + struct.pack(f"<{num_counts + 1}q", *counts, length) + zlib.compress(b""))
    bomb = zlib.compress(bytes(1 << 26), 9)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecord):
            kind.decode(magic + struct.pack(f"<{num_counts + 1}q", *[1] * num_counts, 100) + bomb)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_names_that_repeat_are_corrupt():
    data = rank_layout({"aaaa": torch.zeros(1), "bbbb": torch.zeros(2)}).encode()
    head = 4 + 4 * 8
    body = zlib.decompress(data[head:])
    assert body.count(b"aaaabbbb") == 1
    with pytest.raises(CorruptRecord, match="repeat"):
        RankLayout.decode(data[:head] + zlib.compress(body.replace(b"aaaabbbb", b"aaaaaaaa")))


def test_a_world_that_no_merge_would_make_is_corrupt():
    whole = torch.zeros(4, 2)
    world = world_of({"w": rows(whole, 0, 2)}, {"w": rows(whole, 2, 4)})
    cuts = world.patterns
    for lo, size in (([[0, 0], [1, 0]], cuts.size), (cuts.lo, [[2, 2], [1, 2]]), ([[0, 0], [3, 0]], cuts.size)):
        wrong = replace(cuts, lo=np.array(lo), size=np.array(size))
        with pytest.raises(CorruptRecord):
            WorldLayout.decode(replace(world, patterns=wrong).encode())
    for offsets in ([0, 1], [0, 64], [-64, 0]):
        with pytest.raises(CorruptRecord, match="arena offsets"):
            WorldLayout.decode(replace(world, offsets=np.array(offsets)).encode())


def test_ten_thousand_tensors_are_a_small_record():  # pitfall J7, scaled down ten times
    base = torch.zeros(10_000, 4, 4, dtype=torch.bfloat16)
    names = [f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.gate_proj.weight" for i in range(10_000)]
    layout = RankLayout.of(
        {name: (Shard(base[i], shape=(8, 4), offset=(4 * (i % 2), 0)),) for i, name in enumerate(names)}
    )
    data = layout.encode()
    assert len(layout.names) == 10_000
    assert len(data) < 200 << 10
