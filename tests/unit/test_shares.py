"""Shares: every box with several holders at exactly two of them, every other one at its rank."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_rl import Shard
from mx_rl.errors import InvalidArgument
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.partners import chosen, pack
from mx_rl.shares import CHECK_EVERY, Shares
from mx_rl.tensors import resolve


def layout(tensors):
    return RankLayout.of(resolve(tensors))


def shares_of(layouts):
    shares = Shares(WorldLayout.merge(layouts))
    return [shares.of(rank, layout) for rank, layout in enumerate(layouts)]


def held(layout):
    """Every box that is not empty."""
    return Counter(
        (layout.names[box.tensor], box.lo, box.size)
        for box in map(Row, *(getattr(layout.boxes, name).tolist() for name in ("tensor", "lo", "size", "nbytes")))
        if box.nbytes
    )


class Row:
    def __init__(self, tensor, lo, size, nbytes):
        self.tensor, self.lo, self.size, self.nbytes = tensor, tuple(lo), tuple(size), nbytes


def check(layouts):
    """The rules; returns the shares."""
    found = shares_of(layouts)
    whole = sum((Counter(held(layout).keys()) for layout in layouts), Counter())
    kept = sum((Counter(held(share.layout).keys()) for share in found), Counter())
    assert kept == Counter({box: min(count, 2) for box, count in whole.items()})
    before, after = WorldLayout.merge(layouts), WorldLayout.merge([share.layout for share in found])
    assert (after.names, after.aliases, after.shapes) == (before.names, before.aliases, before.shapes)
    shares = Shares(before)
    for rank, share in enumerate(found):
        assert share.layout.counts.tolist() == layouts[rank].counts.tolist()
        for other, boxes in share.partners.items():
            assert (
                boxes.tolist()
                == found[other].partners[rank].tolist()
                == shares.between(rank, other, 1)[: len(boxes)].tolist()
            )
            mine = [row_of(share.layout, row) for row in share.rows[boxes]]
            assert mine == [row_of(found[other].layout, row) for row in found[other].rows[boxes]]
            assert [name for name, *_ in mine] == shares.names(boxes)
    check_witnesses(
        shares, found, [sum(row >= 0 for row in rows) for rows in zip(*[one.rows for one in found], strict=True)]
    )
    return found


def check_witnesses(shares, found, holders):
    """In as many turns as there are ranks without a copy, each of them compares each of its boxes once."""
    turns = max(holders, default=2) - 2
    seen = Counter()
    ks = [
        k for k in range(1, CHECK_EVERY * max(turns, 1) + 1) if k % CHECK_EVERY < len(holders)
    ]  # else it is no box's turn
    for k in ks:
        for rank, share in enumerate(found):
            without, _ = shares.checks(rank, k)
            for other, boxes in without.items():
                _, holding = shares.checks(other, k)
                assert holding[rank].tolist() == boxes.tolist()
                assert shares.between(rank, other, k).tolist() == shares.between(other, rank, k).tolist()
                for box in boxes.tolist():
                    assert share.rows[box] >= 0
                    assert rank not in (shares.first[box], shares.second[box])
                    seen[box, rank] += 1
    wanted = {
        (box, rank)
        for box, count in enumerate(holders)
        if count == turns + 2
        for rank in range(len(found))
        if found[rank].rows[box] >= 0 and rank not in (shares.first[box], shares.second[box])
    }
    assert {key for key in seen if holders[key[0]] == turns + 2} == wanted
    assert all(seen[key] == 1 for key in wanted)


def row_of(layout, row):
    boxes = layout.boxes
    return layout.names[boxes.tensor[row]], boxes.lo[row].tolist(), boxes.size[row].tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_data_parallel_ranks_snapshot_two_copies_of_everything_in_equal_shares(world_size):
    model = {f"layers.{i}.w": torch.zeros(8, 64) for i in range(24)} | {"scalar": torch.tensor(1.0)}
    found = check([layout(model)] * world_size)
    total = layout(model).nbytes
    copies = min(world_size, 2)
    for share in found:
        assert abs(int(share.layout.nbytes) - total * copies / world_size) <= 3 * 8 * 64 * 4
        assert len(share.partners) == min(world_size - 1, 1 if world_size % 2 == 0 else 2)


def test_a_world_without_copies_leaves_nothing_to_others():
    whole = torch.zeros(6, 4)
    layouts = [layout({"w": Shard(whole[i : i + 2], shape=(6, 4), offset=(i, 0))}) for i in (0, 2, 4)]
    found = check(layouts)
    assert all(share.layout is full and not share.partners for share, full in zip(found, layouts, strict=True))


def test_replicated_norms_beside_shards_and_hybrid_shards():
    whole = torch.zeros(8, 4)
    norms = {f"n{i}": torch.zeros(7) for i in range(9)}
    check([layout(norms | {"w": Shard(whole[i : i + 2], shape=(8, 4), offset=(i, 0))}) for i in (0, 2, 4, 6)])
    hybrid = [layout({"w": Shard(whole[i : i + 4], shape=(8, 4), offset=(i, 0))} | norms) for i in (0, 4, 0, 4)]
    found = check(hybrid)
    assert [sorted(share.partners) for share in found] == [[2], [3], [0], [1]]


def test_aliases_empty_boxes_and_boxes_held_twice_keep_their_names():
    shared = torch.zeros(5)
    base = torch.zeros(4, 3)
    twice = (Shard(base[:2], shape=(4, 3), offset=(0, 0)), Shard(base[2:], shape=(4, 3), offset=(2, 0)))
    model = {
        "a": shared,
        "b": shared,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.0),
        "many": twice,
        "again": (Shard(torch.zeros(3), shape=(3,), offset=(0,)), Shard(torch.zeros(3), shape=(3,), offset=(0,))),
    }
    check([layout(model)] * 3)
    lone = {"a": torch.zeros(0), "b": torch.zeros(0)}
    check([layout(model)] * 3 + [layout({name: Shard(t, shape=(5,), offset=(0,)) for name, t in lone.items()})])


def test_another_layout_than_the_worlds_is_refused():
    world = Shares(WorldLayout.merge([layout({"a": torch.zeros(4)})] * 3))
    with pytest.raises(InvalidArgument):
        world.of(0, layout({"a": torch.zeros(5)}))
    with pytest.raises(InvalidArgument):
        world.of(0, layout({"b": torch.zeros(4)}))


@st.composite
def worlds(draw):
    """Meshes of replicas and shards; some tensors sharded, some whole, some at a few ranks only."""
    replicas, cuts = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    tensors = []
    for i in range(draw(st.integers(1, 6))):
        shape = (draw(st.integers(1, 7)), draw(st.integers(1, 5)))
        tensors.append((f"t{i}", shape, draw(st.sampled_from(["shard", "whole", "some"]))))
    ranks = []
    for rank in range(replicas * cuts):
        held = {}
        for name, shape, kind in tensors:
            whole = torch.zeros(shape)
            if kind == "whole" or (kind == "some" and (rank == 0 or draw(st.booleans()))):
                held[name] = whole
            elif kind == "shard":
                rows = torch.tensor_split(torch.arange(shape[0]), cuts)[rank % cuts]
                first = int(rows[0]) if len(rows) else shape[0]
                held[name] = Shard(whole[first : first + len(rows)], shape=shape, offset=(first, 0))
        ranks.append(layout(held))
    return ranks


@settings(max_examples=50, deadline=None)
@given(worlds())
def test_any_mesh_keeps_two_copies_of_what_had_more(layouts):
    check(layouts)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 700, 4096, 10_000])
def test_a_differing_box_is_told_by_its_row_and_column(count):
    import numpy as np

    sums = np.random.default_rng(0).integers(0, 1 << 63, count).astype(np.uint64)
    one = pack(sums)
    assert len(one) <= 1024
    for index in {0, count // 2, count - 1}:
        other = sums.copy()
        other[index] += np.uint64(1)
        two = pack(other)
        entries = [i for i in range(len(one) // 8) if one[8 * i : 8 * i + 8] != two[8 * i : 8 * i + 8]]
        found = chosen(count, entries)
        assert index in found
        assert len(found) == 1 or count > 4096
