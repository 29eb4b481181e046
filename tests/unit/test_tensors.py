"""Names and boxes of what a user gives, without a process group."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_rl.errors import InvalidArgument, NameCollision, ShapeMismatch, TensorUnavailable
from mx_rl.tensors import Shard, natural_key, resolve, sharded_boxes, shards


def test_shard_defaults_to_the_whole_tensor():
    shard = Shard(torch.zeros(2, 3))
    assert (shard.lo, shard.box, shard.global_shape) == ((0, 0), (2, 3), (2, 3))


def test_shard_keeps_offset_and_global_shape_as_tuples():
    shard = Shard(torch.zeros(2, 3), shape=torch.Size([4, 3]), offset=[2, 0])
    assert (shard.lo, shard.box, shard.global_shape) == ((2, 0), (2, 3), (4, 3))


@pytest.mark.parametrize(
    ("shape", "offset"),
    [
        ((4,), None),
        ((4, 3), (1,)),
        ((4, 3), (3, 0)),
        ((4, 3), (-1, 0)),
        ((4, 2), None),
        ((4, 3.5), None),
        ((4, 1 << 62), None),
    ],
)
def test_shard_refuses_a_box_that_is_not_inside(shape, offset):
    with pytest.raises(InvalidArgument):
        Shard(torch.zeros(2, 3), shape=shape, offset=offset)


def test_shard_refuses_what_is_no_tensor():
    with pytest.raises(InvalidArgument, match="list"):
        Shard([1, 2])


def test_module_gives_parameters_and_persistent_buffers():
    module = torch.nn.BatchNorm1d(4)
    module.register_buffer("cache", torch.zeros(2), persistent=False)
    assert set(shards(module)) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def test_extra_state_is_not_published():
    class Noted(torch.nn.Linear):
        def get_extra_state(self):
            return {"private": 1}

    assert set(shards(Noted(2, 2))) == {"weight", "bias"}


def test_callable_is_asked_each_time():
    state = {"w": torch.zeros(2)}

    def source():
        return state

    assert resolve(source)["w"][0].box == (2,)
    state["w"] = torch.zeros(3)
    assert resolve(source)["w"][0].box == (3,)


@pytest.mark.parametrize(
    ("given_name", "name"),
    [
        ("module.a.weight", "a.weight"),
        ("_orig_mod.module.a.b", "a.b"),
        ("a._checkpoint_wrapped_module.b", "a.b"),
        ("a._fsdp_wrapped_module.module.b", "a.b"),
        ("a.module", "a.module"),
        ("submodule.a", "submodule.a"),
    ],
)
def test_wrapper_prefixes_are_stripped_anywhere(given_name, name):
    assert list(shards({given_name: torch.zeros(1)})) == [name]


def test_compiled_and_checkpointed_modules_keep_their_names():
    inner = torch.nn.Linear(2, 2)
    wrapper = torch.nn.Module()
    wrapper.module = torch.nn.Module()
    wrapper.module._orig_mod = inner
    assert set(shards(wrapper)) == {"weight", "bias"}


@pytest.mark.parametrize(
    "rename",
    [{"a.b": "x.b"}, lambda name: name.replace("a.", "x."), [(r"^a\.", "y."), ("^y", "x")]],
    ids=["dict", "callable", "regexes in order"],
)
def test_rename_maps_names(rename):
    assert set(shards({"a.b": torch.zeros(1), "c": torch.zeros(1)}, rename=rename)) == {"x.b", "c"}


def test_include_and_exclude_see_the_renamed_name():
    source = {"a.w": torch.zeros(1), "a.b": torch.zeros(1), "c.w": torch.zeros(1)}
    found = shards(source, rename=[("^a", "z")], include=["z.*", "a.*"], exclude="*.b")
    assert list(found) == ["z.w"]


def test_include_of_nothing_includes_nothing():
    assert shards({"a": torch.zeros(1)}, include=()) == {}


@pytest.mark.parametrize("rename", [[("(", "x")], [1], lambda name: None])
def test_bad_rename_is_refused(rename):
    with pytest.raises(InvalidArgument, match="rename"):
        shards({"a": torch.zeros(1)}, rename=rename)


def test_bad_patterns_are_refused():
    with pytest.raises(InvalidArgument, match="include"):
        shards({"a": torch.zeros(1)}, include=[1])


def test_two_names_that_map_to_one_collide_by_name():
    with pytest.raises(NameCollision, match=r"'a' from 'a' and 'module\.a'") as caught:
        shards({"a": torch.zeros(1), "module.a": torch.zeros(1), "b": torch.zeros(1)})
    assert caught.value.names == ["a"]


def test_a_collision_that_is_excluded_is_none():
    assert list(shards({"a": torch.zeros(1), "module.a": torch.zeros(1), "b": torch.zeros(1)}, exclude="a")) == ["b"]


@pytest.mark.parametrize("value", [1.0, (), [torch.zeros(1)], None, torch.zeros(2).to_sparse()])
def test_what_is_no_tensor_is_refused_by_name(value):
    with pytest.raises(InvalidArgument, match="'w'"):
        shards({"w": value})


@pytest.mark.parametrize("source", [3, [("w", torch.zeros(1))], lambda: 3, {1: torch.zeros(1)}])
def test_sources_of_other_types_are_refused(source):
    with pytest.raises(InvalidArgument):
        shards(source)


def test_dtypes_whose_meaning_lies_outside_the_bytes_are_refused():
    with pytest.raises(InvalidArgument, match=r"'w'.*cannot travel"):
        shards({"w": torch.empty(2, dtype=torch.bits8)})


def test_boxes_of_one_name_must_agree():
    boxes = (Shard(torch.zeros(1), shape=(4,)), Shard(torch.zeros(1), shape=(5,), offset=(1,)))
    with pytest.raises(ShapeMismatch, match="'w'"):
        shards({"w": boxes})


def test_resolve_gives_tuples_in_natural_order():
    found = resolve({f"layers.{i}.w": torch.zeros(1) for i in (10, 2, 1)})
    assert list(found) == ["layers.1.w", "layers.2.w", "layers.10.w"]
    assert all(isinstance(boxes, tuple) for boxes in found.values())


def test_resolve_detaches_and_shares_memory():
    parameter = torch.nn.Parameter(torch.zeros(3))
    tensor = resolve({"w": parameter})["w"][0].tensor
    tensor.fill_(2.0)
    assert parameter.tolist() == [2, 2, 2]
    assert not tensor.requires_grad


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(4, 3).t(), torch.randn(4, 6)[:, ::2], torch.randn(6)[2:], torch.tensor(3.0), torch.randn(1).expand(3)],
    ids=["transposed", "strided", "tail", "0-d", "expanded"],
)
def test_strides_and_views_are_available(tensor):
    assert resolve({"w": tensor})["w"][0].tensor.equal(tensor)


def _resized_away():
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _tail_cut_off():
    tensor = torch.zeros(8)
    view = tensor[4:]
    tensor.untyped_storage().resize_(20)
    return view


@pytest.mark.parametrize("lost", [_resized_away, _tail_cut_off, lambda: torch.zeros(4, device="meta")])
def test_memory_that_is_not_there_is_named(lost):
    with pytest.raises(TensorUnavailable, match=r"a \(.*c \(") as caught:
        resolve({"a": lost(), "b": torch.zeros(1), "c": lost()})
    assert caught.value.names == ["a", "c"]


@pytest.mark.parametrize(
    "empty", [torch.empty(2, 0), torch.empty(0, device="meta"), torch.empty(0, 5, dtype=torch.bfloat16)]
)
def test_tensors_without_elements_need_no_memory(empty):
    assert resolve({"e": empty})["e"][0].box == tuple(empty.shape)


@settings(deadline=None)
@given(st.lists(st.text(alphabet="a01.9é٣", max_size=6), max_size=8))
def test_natural_order_is_total_and_independent_of_insertion(names):
    ordered = sorted(set(names), key=natural_key)
    assert sorted(dict.fromkeys(names), key=natural_key) == ordered
    assert sorted(map(natural_key, ordered)) == [natural_key(name) for name in ordered]


def test_natural_order_survives_a_million_digits():
    assert natural_key("9" * 1_000_000) < natural_key("1" + "0" * 1_000_000)


def test_plain_sharding_cuts_like_torch_chunk():
    for size in (0, 1, 4, 5, 7):
        for parts in (1, 2, 3, 7):
            chunks = torch.arange(size).chunk(parts)
            for index in range(parts):
                [((lo, box), start)] = sharded_boxes((size,), (parts,), (index,), ((0, 0),))
                want = chunks[index].tolist() if index < len(chunks) else []
                assert list(range(lo[0], lo[0] + box[0])) == want
                assert start == (0,)


def test_strided_sharding_gives_every_stretch():
    # Nine rows, split in two (5 and 4) and each again in four: the first rank holds rows 0, 1 and 5.
    boxes = sharded_boxes((9,), (4,), (0,), ((0, 2),))
    assert boxes == ((((0,), (2,)), (0,)), (((5,), (1,)), (2,)))
