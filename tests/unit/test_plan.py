"""Plans, carried out with plain copies: what arrives is what was published, whatever the two shardings."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_rl.errors import (
    AliasConflict,
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    MissingTensors,
    ShapeMismatch,
    UnexpectedTensors,
)
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.plan import make_plan
from mx_rl.tensors import DTYPES, Shard, resolve, shards

WINDOW = 128


def rank_layout(tensors, **options):
    return RankLayout.of(resolve(tensors), **options)


def box(whole, *ranges):
    """The box of ``whole`` over these (begin, end) ranges, as a Shard that views it."""
    index = tuple(slice(a, b) for a, b in ranges)
    return Shard(whole[index], shape=whole.shape, offset=[a for a, _ in ranges])


def rows(whole, begin, end):
    return box(whole, (begin, end), *((0, n) for n in whole.shape[1:]))


def empty_like(shard):
    return Shard(torch.full_like(shard.tensor, 0).contiguous(), shape=shard.shape, offset=shard.offset)


def as_bytes(tensor, dtype):
    return tensor.to(DTYPES[dtype]).contiguous().flatten().view(torch.uint8).numpy()


def raw(tensor):
    """The bits of any tensor: NaNs included, which are equal to nothing."""
    return tensor.contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []


def pack(tensors, layout):
    """What a snapshot does: one rank's arena."""
    arena = np.full(layout.nbytes, 0x55, np.uint8)
    resolved = resolve(tensors)
    for name, index, offset, nbytes, shape, dtype in layout.packing():
        shard = resolved[name][index]
        assert shard.box == shape
        arena[offset : offset + nbytes] = as_bytes(shard.tensor, dtype)
    return arena


def fill(plan, arenas):
    """What the transport does; checks every promise about windows on the way."""
    stage = np.full(plan.stage_nbytes, 0xAA, np.uint8)
    assert [w for part in plan.parts for w in part.windows] == list(range(plan.num_windows))
    for part in plan.parts:
        fill_part(plan, arenas, part, stage)
        for copy in part.copies:
            again = np.full(plan.stage_nbytes, 0xAA, np.uint8)
            assert copy.windows == part.windows
            assert copy.rank > part.rank
            fill_part(plan, arenas, copy, again)
            for piece in plan.pieces:
                lo, hi = plan.window_bounds[part.windows.start, 0], plan.window_bounds[part.windows.stop - 1, 1]
                if lo <= piece.offset < hi:
                    here = slice(piece.offset, piece.offset + piece.nbytes)
                    assert np.array_equal(again[here], stage[here]), "a copy gives the same bytes"
    sets = [(part.rank, *[copy.rank for copy in part.copies]) for part in plan.parts]
    alone = [ranks for ranks in sets if len(ranks) == 1]
    assert len(alone) == len({ranks[0] for ranks in alone}), "one part an owner, where nothing is replicated"
    assert plan.wire_bytes == sum(int(part.runs[:, 2].sum()) for part in plan.parts)
    assert plan.model_bytes <= plan.wire_bytes <= plan.stage_nbytes
    return stage


def fill_part(plan, arenas, part, stage):
    for i, window in enumerate(part.windows):
        lo, hi = plan.window_bounds[window].tolist()
        assert 0 < hi - lo <= plan.window_bytes
        ends = []
        for at, source, nbytes in part.runs[part.starts[i] : part.starts[i + 1]].tolist():
            assert lo <= at < at + nbytes <= hi
            assert 0 <= source < source + nbytes <= len(arenas[part.rank])
            stage[at : at + nbytes] = arenas[part.rank][source : source + nbytes]
            ends.append(source + nbytes)
        assert part.needs[i] == -(-max(ends) // plan.window_bytes)


def view(plan, stage, index):
    piece = plan.pieces[index]
    data = torch.from_numpy(stage[piece.offset : piece.offset + piece.nbytes].copy())
    return data.view(DTYPES[piece.dtype]).view(piece.shape)


def part_of(tensor, start, shape):
    return tensor[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]


def install(plan, stage, tensors):
    """What an install does; raises AliasConflict before it writes."""
    for check in plan.alias_checks:
        left = part_of(view(plan, stage, check.left), check.left_start, check.shape)
        right = part_of(view(plan, stage, check.right), check.right_start, check.shape)
        if raw(left) != raw(right):
            raise AliasConflict(" and ".join(check.names))
    resolved = resolve(tensors)
    for i, piece in enumerate(plan.pieces):
        assert piece.offset % 64 == 0
        for name, index, start in piece.destinations:
            target = resolved[name][index].tensor
            part_of(target, start, piece.shape).copy_(view(plan, stage, i))


def sync(ranks, target, *, wire_dtype=None, window_bytes=WINDOW, **options):
    layouts = [rank_layout(tensors, wire_dtype=wire_dtype) for tensors in ranks]
    world = WorldLayout.decode(WorldLayout.merge(layouts).encode())
    own = RankLayout.decode(rank_layout(target).encode())
    plan = make_plan(world, own, window_bytes=window_bytes, **options)
    stage = fill(plan, [pack(tensors, layout) for tensors, layout in zip(ranks, layouts, strict=True)])
    install(plan, stage, target)
    return plan


# ---- the property ----------------------------------------------------------------------------------------------------


@st.composite
def grid(draw, shape):
    """Cut a tensor of this shape into boxes: per dimension random cut points, uneven and empty ones too."""
    axes = [sorted(draw(st.lists(st.integers(0, n), max_size=3))) for n in shape]
    intervals = [list(itertools.pairwise([0, *axis, n])) for axis, n in zip(axes, shape, strict=True)]
    return list(itertools.product(*intervals))


@st.composite
def situations(draw):
    ranks = [{} for _ in range(draw(st.integers(1, 4)))]
    target, wholes = {}, {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64]))
        bits = torch.randint(-128, 128, (math.prod(shape) * dtype.itemsize,), dtype=torch.int8)
        whole = bits.view(dtype).view(shape) if bits.numel() else torch.empty(shape, dtype=dtype)
        name = f"t.{number}"
        wholes[name] = whole
        for cell in draw(grid(shape)):
            holders = draw(st.sets(st.integers(0, len(ranks) - 1), min_size=1, max_size=2))
            for rank in holders:
                ranks[rank].setdefault(name, []).append(box(whole, *cell))
        wanted = draw(
            st.lists(
                st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape)),
                min_size=1,
                max_size=3,
            )
        )
        target[name] = tuple(empty_like(box(whole, *cell)) for cell in wanted)
    return ranks, target, wholes


@settings(max_examples=80, deadline=None)
@given(situations(), st.sampled_from([64, 128, 4096]))
def test_any_target_box_arrives_from_any_grid(situation, window_bytes):
    ranks, target, wholes = situation
    plan = sync(ranks, target, window_bytes=window_bytes)
    for name, boxes in target.items():
        for shard in boxes:
            want = part_of(wholes[name], shard.lo, shard.box)
            assert raw(shard.tensor) == raw(want)
    ends = 0
    for piece in plan.pieces:
        assert piece.offset == -(-ends // 64) * 64
        ends = piece.offset + piece.nbytes


# ---- what tensors look like ------------------------------------------------------------------------------------------


def test_a_transposed_tensor_arrives_c_contiguous():  # pitfall A1
    w = torch.randn(4, 3).t()
    target = {"w": torch.zeros(3, 4)}
    sync([{"w": w}], target)
    assert target["w"].equal(w)


def test_a_strided_tensor_sends_its_own_elements():  # pitfall A2
    base = torch.randn(6, 8)
    target = {"w": torch.zeros(6, 4)}
    plan = sync([{"w": base[:, ::2]}], target)
    assert target["w"].equal(base[:, ::2])
    assert plan.model_bytes == 6 * 4 * 4


def test_strided_and_transposed_destinations_are_filled():
    w = torch.randn(6, 4)
    host = torch.zeros(4, 12)
    sync([{"w": w}], {"w": host.t()[::2]})
    assert host.t()[::2].equal(w)
    assert not host.t()[1::2].any()


def test_a_scalar_arrives():  # pitfall A4
    target = {"scale": torch.zeros(())}
    plan = sync([{"scale": torch.tensor(3.0)}], target)
    assert target["scale"].shape == ()
    assert target["scale"].item() == 3
    assert plan.pieces[0].shape == ()


def test_a_tensor_without_elements_moves_nothing():  # pitfall A5
    target = {"e": torch.empty(2, 0, dtype=torch.bfloat16)}
    plan = sync([{"e": torch.empty(2, 0, dtype=torch.bfloat16)}], target)
    assert (len(plan.pieces), plan.num_runs, plan.wire_bytes, plan.stage_nbytes, plan.parts) == (0, 0, 0, 0, ())
    assert plan.window_bounds.shape == (0, 2)


def test_a_target_box_without_elements_moves_nothing():
    w = torch.randn(4, 2)
    target = {"w": Shard(torch.empty(0, 2), shape=(4, 2), offset=(4, 0))}
    assert sync([{"w": w}], target).num_runs == 0


def test_a_rank_with_nothing_is_not_contacted():  # pitfall A6
    w = torch.randn(6, 2)
    target = {"w": torch.zeros(6, 2)}
    plan = sync([{"w": rows(w, 0, 2)}, {"w": rows(w, 2, 4)}, {}, {"w": rows(w, 4, 6)}], target)
    assert target["w"].equal(w)
    assert sorted(part.rank for part in plan.parts) == [0, 1, 3]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_keeps_its_bits(dtype):
    bits = torch.arange(48, dtype=torch.uint8) % (2 if dtype is torch.bool else 48)
    target = {"w": torch.zeros(48, dtype=torch.uint8).view(dtype)}
    sync([{"w": bits.view(dtype)}], target)
    assert target["w"].view(torch.uint8).equal(bits)


# ---- shardings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_uneven_shards_arrive_whole(parts):  # pitfall B1
    w = torch.randn(5, 3)
    step = -(-5 // parts)
    target = {"w": torch.zeros(5, 3)}
    sync([{"w": rows(w, min(i * step, 5), min((i + 1) * step, 5))} for i in range(parts)], target)
    assert target["w"].equal(w)


def test_experts_cut_in_two_dimensions_arrive_by_expert():  # pitfall B3
    w = torch.randn(4, 6, 5)
    ranks = [
        {"w": box(w, (2 * e, 2 * e + 2), (3 * f, 3 * f + 3), (0, 5))} for e, f in itertools.product(range(2), repeat=2)
    ]
    for expert in range(4):
        target = {"w": empty_like(rows(w, expert, expert + 1))}
        plan = sync(ranks, target)
        assert target["w"].tensor.equal(w[expert : expert + 1])
        assert len(plan.parts) == 2


def test_more_ranks_than_rows_arrive_whole():  # pitfall B4
    w = torch.randn(4, 8)
    target = {"w": torch.zeros(4, 8)}
    plan = sync([{"w": rows(w, min(i, 4), min(i + 1, 4))} for i in range(16)], target)
    assert target["w"].equal(w)
    assert sorted(part.rank for part in plan.parts) == [0, 1, 2, 3]


def test_insertion_order_does_not_change_the_plan():  # pitfall B10
    tensors = {f"layers.{i}.w": torch.randn(3, 3) for i in range(12)}
    turned = dict(reversed(tensors.items()))
    plans = [
        make_plan(WorldLayout.merge([rank_layout(a)]), rank_layout(b), window_bytes=WINDOW)
        for a, b in itertools.product((tensors, turned), repeat=2)
    ]
    assert len({(plan.world_hash, plan.target_hash) for plan in plans}) == 1
    assert [piece.name for piece in plans[0].pieces] == [f"layers.{i}.w" for i in range(12)]
    for plan in plans[1:]:
        assert list(plan.pieces) == list(plans[0].pieces)
        assert all(a.runs.tolist() == b.runs.tolist() for a, b in zip(plan.parts, plans[0].parts, strict=True))


def test_equal_shardings_of_64_ranks_read_from_one_publisher_each():  # pitfall B12
    tensors = {f"layers.{i}.w": torch.zeros(128, 8) for i in range(20)}
    ranks = [{name: rows(w, 2 * i, 2 * i + 2) for name, w in tensors.items()} for i in range(64)]
    layouts = [rank_layout(rank) for rank in ranks]
    world = WorldLayout.merge(layouts)
    for number, layout in enumerate(layouts):
        plan = make_plan(world, layout, window_bytes=4096, replica=layouts)
        assert [part.rank for part in plan.parts] == [number]
        assert plan.num_runs == 1  # the stage is the arena, padding included
        assert plan.stage_nbytes == layout.nbytes


def test_owners_are_rotated_by_the_target():
    w = torch.zeros(64, 2)
    ranks = [{"w": rows(w, i, i + 8)} for i in range(0, 64, 8)]
    world = WorldLayout.merge([rank_layout(rank) for rank in ranks])
    firsts = set()
    for column in ((0, 1), (1, 2), (0, 2)):
        target = rank_layout({"w": box(w, (0, 64), column)})
        order = [part.rank for part in make_plan(world, target, window_bytes=WINDOW).parts]
        firsts.add(order[0])
        assert order == [*range(order[0], 8), *range(order[0])]
    assert len(firsts) > 1


def test_a_replicated_box_is_read_from_its_lowest_holder_only():
    w = torch.randn(4, 4)
    target = {"w": torch.zeros(4, 4)}
    plan = sync([{}, {"w": w}, {"w": w.clone()}], target)
    assert [part.rank for part in plan.parts] == [1]
    assert plan.wire_bytes == 64


def test_a_column_slice_is_one_run_a_row_and_no_other_bytes():
    w = torch.randn(10, 8)
    target = {"w": empty_like(box(w, (0, 10), (2, 5)))}
    plan = sync([{"w": w}], target, window_bytes=4096)
    assert target["w"].tensor.equal(w[:, 2:5])
    assert (plan.num_runs, plan.wire_bytes) == (10, 10 * 3 * 4)


def test_a_row_slice_is_one_run():
    w = torch.randn(10, 8)
    plan = sync([{"w": w}], {"w": empty_like(rows(w, 3, 7))}, window_bytes=4096)
    assert (plan.num_runs, plan.wire_bytes) == (1, 4 * 8 * 4)


def test_runs_are_cut_at_windows():
    w = torch.arange(100.0)
    target = {"w": torch.zeros(100)}
    plan = sync([{"w": w}], target, window_bytes=128)
    assert plan.window_bounds.tolist() == [[0, 128], [128, 256], [256, 384], [384, 400]]
    assert plan.parts[0].needs.tolist() == [1, 2, 3, 4]
    assert target["w"].equal(w)


def test_bytes_between_wanted_boxes_are_not_mistaken_for_padding():
    # 36 unwanted bytes lie between the two wanted rows at the source, 28 bytes of padding in the stage: two runs.
    w = torch.arange(3 * 9.0).view(3, 9)
    target = {"w": (empty_like(rows(w, 0, 1)), empty_like(rows(w, 2, 3)))}
    plan = sync([{"w": w}], target, window_bytes=4096)
    assert plan.num_runs == 2
    assert target["w"][1].tensor.equal(w[2:])


def test_runs_of_two_sources_are_never_joined():
    # The second source's box lies where the first one's would go on.
    a, b = torch.randn(16), torch.randn(16)
    orders = set()
    for i in range(16):
        target = {f"a{i}": torch.zeros(16), "b": torch.zeros(16)}
        plan = sync([{f"a{i}": a}, {"B": torch.zeros(16), "b": b}], target, window_bytes=4096, strict=False)
        orders.add(tuple(part.rank for part in plan.parts))
        assert target[f"a{i}"].equal(a)
        assert target["b"].equal(b)
    assert (0, 1) in orders


@pytest.mark.parametrize("window_bytes", [0, 32, 100])
def test_windows_that_do_not_fit_the_alignment_are_refused(window_bytes):
    with pytest.raises(InvalidArgument, match="window_bytes"):
        sync([{"w": torch.zeros(1)}], {"w": torch.zeros(1)}, window_bytes=window_bytes)


# ---- fused, interleaved, tied ----------------------------------------------------------------------------------------


def test_fused_destinations_are_names_that_view_one_tensor():
    q, k, v = torch.randn(8, 4), torch.randn(4, 4), torch.randn(4, 4)
    gate, up = torch.randn(6, 4), torch.randn(6, 4)
    qkv, gate_up = torch.zeros(8, 4), torch.zeros(6, 4)
    ranks = [
        {
            name: rows(w, i * len(w) // 2, (i + 1) * len(w) // 2)
            for name, w in (("q", q), ("k", k), ("v", v), ("gate", gate), ("up", up))
        }
        for i in range(2)
    ]
    target = {
        "q": Shard(qkv[:4], shape=(8, 4), offset=(4, 0)),
        "k": Shard(qkv[4:6], shape=(4, 4), offset=(2, 0)),
        "v": Shard(qkv[6:], shape=(4, 4), offset=(2, 0)),
        "gate": Shard(gate_up[:3], shape=(6, 4)),
        "up": Shard(gate_up[3:], shape=(6, 4)),
    }
    sync(ranks, target)
    assert qkv.equal(torch.cat([q[4:], k[2:], v[2:]]))
    assert gate_up.equal(torch.cat([gate[:3], up[:3]]))


def test_interleaved_qkv_is_several_boxes_of_one_tensor():
    heads, dim = 4, 2
    qkv = torch.randn(3 * heads * dim, 5)  # all q, then all k, then all v
    ranks = [{"qkv": rows(qkv, 0, 12)}, {"qkv": rows(qkv, 12, 24)}]
    fused = [torch.zeros(12, 5) for _ in range(2)]
    for rank, host in enumerate(fused):
        boxes = tuple(Shard(host[4 * i : 4 * i + 4], shape=qkv.shape, offset=(8 * i + 4 * rank, 0)) for i in range(3))
        sync(ranks, {"qkv": boxes})
        assert host.equal(torch.cat([qkv[8 * i + 4 * rank :][:4] for i in range(3)]))


def test_tied_at_both_ends_moves_once():  # pitfall C1
    embed = torch.randn(6, 4)
    storage = torch.zeros(6, 4)
    target = {"embed": storage, "lm_head": storage}
    plan = sync([{"embed": embed, "lm_head": embed}], target)
    assert storage.equal(embed)
    assert plan.wire_bytes == 96
    assert plan.alias_checks == ()


def test_tied_publisher_and_untied_subscriber_move_once_into_both():  # pitfall C1
    embed = torch.randn(6, 4)
    target = {"embed": torch.zeros(6, 4), "lm_head": torch.zeros(6, 4)}
    plan = sync(
        [
            {"embed": rows(embed, 0, 3), "lm_head": rows(embed, 0, 3)},
            {"embed": rows(embed, 3, 6), "lm_head": rows(embed, 3, 6)},
        ],
        target,
    )
    assert target["embed"].equal(embed)
    assert target["lm_head"].equal(embed)
    assert plan.wire_bytes == 96
    assert {d.name for d in plan.pieces[0].destinations} == {"embed", "lm_head"}


@pytest.mark.parametrize("other_cut", [3, 2])
def test_untied_publisher_and_tied_subscriber_compare_before_install(other_cut):  # pitfall C1
    embed = torch.randn(6, 4)

    def ranks(head):
        return [
            {"embed": rows(embed, 0, 3), "lm_head": rows(head, 0, other_cut)},
            {"embed": rows(embed, 3, 6), "lm_head": rows(head, other_cut, 6)},
        ]

    storage = torch.zeros(6, 4)
    plan = sync(ranks(embed.clone()), {"embed": storage, "lm_head": storage})
    assert storage.equal(embed)
    assert sum(math.prod(check.shape) for check in plan.alias_checks) == 24
    for row in range(6):
        head = embed.clone()
        head[row, 3] += 1
        storage.zero_()
        with pytest.raises(AliasConflict, match="embed and lm_head"):
            sync(ranks(head), {"embed": storage, "lm_head": storage})
        assert not storage.any()


def test_tied_subscriber_is_filled_by_whichever_name_is_published():
    w = torch.randn(3)
    for name in ("embed", "lm_head"):
        storage = torch.zeros(3)
        sync([{name: w}], {"embed": storage, "lm_head": storage})
        assert storage.equal(w)


def test_an_alias_of_the_publisher_is_taken_under_either_name():
    embed = torch.randn(6, 4)
    for name in ("embed", "lm_head"):
        target = {name: torch.zeros(6, 4)}
        sync([{"embed": embed, "lm_head": embed}], target)
        assert target[name].equal(embed)


def test_a_duplicated_expert_is_moved_once():
    w = torch.randn(4, 8)
    target = {"w": (empty_like(rows(w, 1, 2)), empty_like(rows(w, 3, 4)), empty_like(rows(w, 1, 2)))}
    plan = sync([{"w": w}], target)
    assert [shard.tensor.tolist() for shard in target["w"]] == [w[1:2].tolist(), w[3:].tolist(), w[1:2].tolist()]
    assert plan.model_bytes == 2 * 8 * 4


# ---- names and dtypes ------------------------------------------------------------------------------------------------


def test_missing_names_stop_the_plan():  # pitfall C2
    world = {"layers.3.mlp.down_proj.weight": torch.zeros(2)}
    target = world | {"layers.3.mlp.up_proj.weight": torch.zeros(2)}
    with pytest.raises(MissingTensors, match=r"layers\.3\.mlp\.up_proj\.weight") as caught:
        sync([world], target)
    assert caught.value.missing == ["layers.3.mlp.up_proj.weight"]


def test_only_allow_missing_lets_a_name_be_missing():
    kept = torch.ones(2)
    plan = sync([{"w": torch.randn(2)}], {"w": torch.zeros(2), "mtp.w": kept}, allow_missing=["mtp.*"])
    assert kept.tolist() == [1, 1]
    assert len(plan.pieces) == 1
    with pytest.raises(MissingTensors):
        sync([{"w": torch.randn(2)}], {"w": torch.zeros(2), "head": kept}, allow_missing="mtp.*")


def test_unexpected_names_stop_a_strict_plan_only():
    world = {"w": torch.randn(2), "extra": torch.randn(2), "extra_too": torch.randn(2)}
    world["extra_tied"] = world["extra"]
    with pytest.raises(UnexpectedTensors) as caught:
        sync([world], {"w": torch.zeros(2)})
    assert caught.value.unexpected == ["extra", "extra_tied", "extra_too"]
    plan = sync([world], {"w": torch.zeros(2)}, strict=False)
    assert plan.wire_bytes == 8


def test_a_target_of_fewer_or_more_dimensions_than_the_world_is_planned():
    bias, cube = torch.randn(5), torch.randn(2, 3, 4)
    target = {"bias": torch.zeros(5)}
    sync([{"bias": bias, "cube": cube}], target, strict=False)
    assert target["bias"].equal(bias)
    target = {"bias": torch.zeros(5), "cube": torch.zeros(2, 3, 4)}
    sync([{"bias": bias}], target, allow_missing="cube")
    assert target["bias"].equal(bias)


def test_names_are_compared_over_all_ranks_of_a_replica():
    world = WorldLayout.merge([rank_layout({"a": torch.zeros(2), "b": torch.zeros(2)})])
    first, second = rank_layout({"a": torch.zeros(2)}), rank_layout({"b": torch.zeros(2)})
    plan = make_plan(world, first, window_bytes=WINDOW, replica=[first, second])
    assert [piece.name for piece in plan.pieces] == ["a"]
    with pytest.raises(UnexpectedTensors):
        make_plan(world, first, window_bytes=WINDOW)
    wrong = rank_layout({"b": torch.zeros(3)})
    with pytest.raises(ShapeMismatch, match="b"):  # every rank of the replica is told
        make_plan(world, first, window_bytes=WINDOW, replica=[first, wrong])


def test_a_dtype_that_is_not_the_wire_s_is_refused_before_a_byte_moves():
    w = torch.randn(4)
    with pytest.raises(DtypeMismatch, match="w: float32 on the wire, bfloat16 here"):
        sync([{"w": w}], {"w": torch.zeros(4, dtype=torch.bfloat16)})
    target = {"w": torch.zeros(4, dtype=torch.bfloat16)}
    sync([{"w": w}], target, wire_dtype="bfloat16")
    assert target["w"].equal(w.to(torch.bfloat16))


def test_all_problems_of_a_plan_come_in_one_error():
    world = {"s": torch.zeros(4), "d": torch.zeros(4), "extra": torch.zeros(1)}
    target = {"s": torch.zeros(2, 2), "d": torch.zeros(4).half(), "lost": torch.zeros(1)}
    with pytest.raises(LayoutMismatch) as caught:
        sync([world], target)
    error = caught.value
    assert type(error) is LayoutMismatch
    assert (error.missing, error.unexpected) == (["lost"], ["extra"])
    assert error.shapes == ["s: published as (4,), wanted as (2, 2)"]
    assert error.dtypes == ["d: float32 on the wire, float16 here"]


def test_shapes_that_differ_in_trailing_ones_differ():
    with pytest.raises(ShapeMismatch):
        sync([{"w": torch.zeros(4)}], {"w": torch.zeros(4, 1)})


def test_each_side_maps_its_own_names():
    w = torch.randn(2, 2)
    engine = {"model.attn.w": torch.zeros(2, 2), "kv_cache": torch.zeros(9)}
    target = shards(engine, rename=[("^model", "policy"), ("attn", "self_attn")], exclude="kv_cache")
    sync([shards({"module.policy.self_attn.w": w})], target)
    assert engine["model.attn.w"].equal(w)


def test_a_plan_is_a_function_of_the_layouts():
    w = torch.randn(7, 5)
    ranks = [{"w": rows(w, 0, 4)}, {"w": rows(w, 4, 7)}]
    target = {"w": empty_like(box(w, (1, 6), (1, 4)))}
    one, two = sync(ranks, target), sync(ranks, target)
    assert list(one.pieces) == list(two.pieces)
    assert [part.runs.tolist() for part in one.parts] == [part.runs.tolist() for part in two.parts]
    assert one.pieces[-1] == list(one.pieces)[-1]
    assert one.pieces[:2] == list(one.pieces)[:2]


def test_many_tensors_over_many_ranks_are_planned_by_kind():
    # 500 tensors x 16 ranks, all cut alike: one case is intersected, not 8,000.
    count, ranks = 500, 16
    base = torch.zeros(count, 4, 2)
    layouts = [
        RankLayout.of({f"l.{i}": (Shard(base[i], shape=(64, 2), offset=(4 * r, 0)),) for i in range(count)})
        for r in range(ranks)
    ]
    world = WorldLayout.merge(layouts)
    assert len(world.patterns.counts) == 1
    target = RankLayout.of({f"l.{i}": (Shard(base[i], shape=(64, 2), offset=(30, 0)),) for i in range(count)})
    plan = make_plan(world, target, window_bytes=4096)
    assert sorted(part.rank for part in plan.parts) == [7, 8]
    assert len(plan.pieces) == 2 * count
    assert len(world.encode()) < 64 << 10
