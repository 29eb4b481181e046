"""Run tables: composing runs with a table and copying once is copying twice."""

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_rl.runs import SOURCE, STAGE, compose, in_order, join, strided

EXAMPLES = settings(max_examples=80, deadline=None)


@st.composite
def tables(draw, size):
    """Disjoint rows (offset, address, nbytes) over ``size`` bytes, with gaps, at shuffled disjoint addresses."""
    cuts = sorted(draw(st.sets(st.integers(0, size), max_size=12)))
    rows = [(low, high - low) for low, high in itertools.pairwise(cuts) if draw(st.booleans())]
    addresses, at = {}, 0
    for index in draw(st.permutations(range(len(rows)))):
        at += draw(st.integers(0, 3))
        addresses[index] = at
        at += rows[index][1]
    listed = [(low, addresses[index], nbytes) for index, (low, nbytes) in enumerate(rows)]
    return np.array(listed, dtype=np.int64).reshape(-1, 3), at


def copied(target, source, runs, *, start=0):
    for to, at, nbytes in runs.tolist():
        target[to : to + nbytes] = source[at : at + nbytes]
    return target


@EXAMPLES
@given(data=st.data(), size=st.integers(1, 60))
def test_composing_the_target_side_and_copying_is_copying_twice(data, size):
    source = np.arange(1, 200, dtype=np.int64)
    runs, _ = data.draw(tables(size))  # disjoint in the stage, anywhere in the source
    table, width = data.draw(tables(size))
    stage = copied(np.zeros(size, np.int64), source, runs)
    twice = np.zeros(max(width, 1), np.int64)
    for offset, address, nbytes in table.tolist():
        twice[address : address + nbytes] = stage[offset : offset + nbytes]
    found, owner = compose(runs, table, STAGE)
    for once in (found, join(owner, found)[1]):
        assert np.array_equal(copied(np.zeros(max(width, 1), np.int64), source, once), twice)
    assert (np.diff(owner) >= 0).all()


@EXAMPLES
@given(data=st.data(), size=st.integers(1, 60))
def test_composing_the_source_side_and_copying_is_copying_twice(data, size):
    table, width = data.draw(tables(size))
    live = np.arange(1, max(width, 1) + 1, dtype=np.int64)
    laid = np.zeros(size, np.int64)
    for offset, address, nbytes in table.tolist():
        laid[offset : offset + nbytes] = live[address : address + nbytes]
    runs, _ = data.draw(tables(size))
    runs = runs[:, [1, 0, 2]]
    end = int((runs[:, 0] + runs[:, 2]).max(initial=0))
    found, owner = compose(runs, table, SOURCE)
    twice = copied(np.zeros(end, np.int64), laid, runs)
    for once in (found, join(owner, found)[1]):
        assert np.array_equal(copied(np.zeros(end, np.int64), live, once), twice)


@EXAMPLES
@given(data=st.data(), dims=st.lists(st.integers(0, 4), max_size=4))
def test_rows_of_a_strided_tensor_are_its_elements(data, dims):
    base = torch.arange(2000, dtype=torch.int16)
    order = data.draw(st.permutations(range(len(dims))))
    spread, strides = 1, [0] * len(dims)
    for dim in order:
        strides[dim] = spread * data.draw(st.integers(1, 2))
        spread = strides[dim] * max(dims[dim], 1)
    tensor = base.as_strided(dims, strides, 5)
    compact = torch.empty(dims).stride()
    rows = strided(100, 10, [(2 * a, 2 * b) for a, b in zip(compact, strides, strict=True)], dims, 2)
    memory, target = base.numpy().view(np.uint8), np.zeros(2 * tensor.numel(), np.uint8)
    for offset, address, nbytes in in_order(rows).tolist():
        target[offset - 100 : offset - 100 + nbytes] = memory[address : address + nbytes]
    assert np.array_equal(target.view(np.int16), tensor.contiguous().numpy().reshape(-1))
    assert tensor.is_contiguous() == (len(rows) <= 1) or tensor.numel() <= 1


def test_a_whole_table_leaves_runs_as_they_are():
    runs = np.array([[0, 50, 10], [10, 70, 5], [20, 75, 5]], dtype=np.int64)
    found, owner = compose(runs, np.array([[0, 1000, 100]]), STAGE)
    assert found.tolist() == [[1000, 50, 10], [1010, 70, 5], [1020, 75, 5]]
    assert owner.tolist() == [0, 1, 2]
