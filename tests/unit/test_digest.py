"""The digest: the same sum under any cut, another one after any damage; numba and numpy agree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_rl import digest
from mx_rl.digest import box_sum
from mx_rl.kernels import reference

MASK = (1 << 64) - 1


def plain(data, begin):
    """The formula, byte by byte: ``data`` from byte ``begin`` of the global tensor."""
    total = 0
    for i, byte in enumerate(data.tolist()):
        at = begin + i
        low, high = (int(w[0]) for w in reference.weights(np.array([at // 8], np.uint64)))
        total += (byte << (8 * (at % 4))) * (high if at % 8 >= 4 else low)
    return total & MASK


def both(data, runs):
    runs, starts = np.array(runs, np.int64).reshape(-1, 3), np.array([0, len(runs)], np.int64)
    from mx_rl.kernels import cpu

    words = data[: len(data) // 8 * 8].view(np.uint64)
    found = {int(reference.sum_runs(data, runs, starts)[0]), int(cpu.sum_runs(data, words, runs, starts)[0])}
    assert len(found) == 1, "numba and numpy agree"
    return found.pop()


def test_the_sum_is_what_it_was_in_every_release():
    data = np.arange(1, 28, dtype=np.uint8)
    assert both(data, [[0, 0, 27]]) == plain(data, 0) == 0x63D51A8E49220A4B
    assert box_sum(np.zeros(0, np.uint8), (0, 4), (0, 0), (0, 4), 2) == 0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), begin=st.integers(0, 40), local=st.integers(0, 20), size=st.integers(0, 60))
def test_any_run_sums_by_the_formula(seed, begin, local, size):
    data = np.random.default_rng(seed).integers(0, 256, local + size + seed % 9, dtype=np.uint8)
    assert both(data, [[local, begin, size]]) == plain(data[local : local + size], begin)


@st.composite
def cut_tensors(draw):
    """A tensor of odd sizes and a partition of it into boxes."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(boxes) - 1))
        lo, size = boxes[at]
        dim = draw(st.integers(0, len(shape) - 1))
        if size[dim] > 1:
            here = draw(st.integers(1, size[dim] - 1))
            first, second = list(size), list(size)
            first[dim], second[dim] = here, size[dim] - here
            moved = list(lo)
            moved[dim] += here
            boxes[at : at + 1] = [(lo, tuple(first)), (tuple(moved), tuple(second))]
    return shape, boxes, draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(0, 1 << 30))


def cut(whole, lo, size):
    here = whole[tuple(slice(a, a + n) for a, n in zip(lo, size, strict=True))]
    return np.ascontiguousarray(here).reshape(-1).view(np.uint8)


@settings(max_examples=120, deadline=None)
@given(cut_tensors())
def test_the_sums_of_any_cut_add_up_to_the_sum_of_the_whole(case):
    shape, boxes, itemsize, seed = case
    whole = (
        np.random.default_rng(seed).integers(0, 256, (*shape, itemsize), dtype=np.uint8).view(f"<u{itemsize}")[..., 0]
    )
    expected = plain(whole.reshape(-1).view(np.uint8), 0)
    assert box_sum(cut(whole, (0,) * len(shape), shape), shape, (0,) * len(shape), shape, itemsize) == expected
    sums = [box_sum(cut(whole, lo, size), shape, lo, size, itemsize) for lo, size in boxes]
    assert sum(sums) & MASK == expected


def test_columns_and_rows_of_a_large_tensor_add_up_in_the_compiled_kernel():
    whole = np.random.default_rng(1).integers(0, 1 << 16, (2053, 4099), dtype=np.uint16)
    expected = box_sum(cut(whole, (0, 0), whole.shape), whole.shape, (0, 0), whole.shape, 2)
    for dim in (0, 1):
        at, rest = 977, whole.shape[dim] - 977
        first = tuple(at if d == dim else n for d, n in enumerate(whole.shape))
        second = tuple(rest if d == dim else n for d, n in enumerate(whole.shape))
        moved = tuple(at if d == dim else 0 for d in range(2))
        parts = [((0, 0), first), (moved, second)]
        assert sum(box_sum(cut(whole, lo, size), whole.shape, lo, size, 2) for lo, size in parts) & MASK == expected


def test_a_wrong_byte_an_exchange_and_a_shift_are_seen():
    rng = np.random.default_rng(2)
    data = rng.integers(0, 256, 4096, dtype=np.uint8)
    expected = both(data, [[0, 0, 4096]])
    for trial in range(600):
        other = data.copy()
        a, b = rng.choice(4096, 2, replace=False)
        if trial % 3 == 0:
            other[a] ^= rng.integers(1, 256)
        elif trial % 3 == 1:
            a, b = a // 2 * 2, b // 2 * 2
            other[a : a + 2], other[b : b + 2] = data[b : b + 2].copy(), data[a : a + 2].copy()
        else:
            other = np.roll(data, int(a) or 1)
        assert np.array_equal(other, data) == (both(other, [[0, 0, 4096]]) == expected)


def test_without_numba_numpy_makes_the_same_sums(monkeypatch):
    data = np.random.default_rng(3).integers(0, 256, 9 << 20, dtype=np.uint8)
    expected = box_sum(data, (9 << 20,), (0,), (9 << 20,), 1)

    def missing(name):
        raise ImportError(f"no {name}")

    monkeypatch.setattr(digest, "_fast", [])
    monkeypatch.setattr(digest.importlib, "import_module", missing)
    assert box_sum(data, (9 << 20,), (0,), (9 << 20,), 1) == expected
    assert digest._fast == [None]


def test_memory_that_begins_anywhere_gives_the_same_sum():
    data = np.random.default_rng(4).integers(0, 256, (9 << 20) + 3, dtype=np.uint8)
    size = (9 << 20,)
    assert box_sum(data[3:], size, (0,), size, 1) == box_sum(data[3:].copy(), size, (0,), size, 1)


@pytest.mark.parametrize("shape", [(), (1,), (3, 0)])
def test_scalars_and_empty_boxes_have_sums(shape):
    count = int(np.prod(shape))
    found = box_sum(np.ones(4 * count, np.uint8), shape, (0,) * len(shape), shape, 4)
    assert (found == 0) == (count == 0)
