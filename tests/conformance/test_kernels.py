"""Every set of kernels equals the plain ones, bit for bit: copies, casts, digests, differences and patches.

The CUDA ones run on the host here: the same source, compiled as C++ beside a shim for threads, ballots and shuffles.
"""

import itertools
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mx_rl import kernels
from mx_rl.errors import InvalidArgument
from mx_rl.kernels import base, cuda, plain, reference
from tests.support import cuda_host

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PLAIN = [torch.uint8, torch.int16, torch.float32, torch.float64]
CASTS = [(a, b) for a in FLOATS for b in FLOATS if a != b]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@pytest.fixture(scope="module", params=["cpu", "cpu past the cache", "cuda source on the host"])
def lab(request, tmp_path_factory):
    """The kernels to try; how many elements a block has, and a few thousand of them: fibers switch 10^5 times a second."""
    if request.param.startswith("cpu"):
        from mx_rl.kernels import fast  # numba is a dependency: without it this fails

        with pytest.MonkeyPatch.context() as patch:
            if request.param == "cpu past the cache":
                patch.setattr("mx_rl.kernels.cpu_snapshot._LARGE_BYTES", -1)
            yield SimpleNamespace(kernels=fast, block=base.BLOCK_ELEMENTS, many=100_000)
        return
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = cuda_host.build(tmp_path_factory.mktemp("cuda"))
    yield SimpleNamespace(kernels=cuda.Cuda(cuda_host.HostDevice(library)), block=700, many=2_000)


EDGES = [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 4095, 4096, 4097, 9000]


def floats(dtype, count, seed=0):
    """Every kind of number: normal, subnormal, around each overflow and rounding tie, infinite, NaN, both zeros."""
    rng = np.random.default_rng(seed)
    width = dtype.itemsize
    bits = rng.integers(0, 1 << 63, count, dtype=np.uint64).astype(UNSIGNED[width])
    wide = rng.standard_normal(count) * 10.0 ** rng.integers(-48, 40, count)
    with np.errstate(over="ignore"):
        ties = np.float32(1) + rng.integers(0, 1 << 12, count).astype(np.float32) * np.float32(2.0**-12)
    values = torch.from_numpy(np.where(rng.random(count) < 0.5, wide, ties.astype(np.float64))).to(dtype)
    values = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[width]).numpy().view(UNSIGNED[width])
    return np.where(rng.random(count) < 0.3, bits, values)


def run(live, slot_at, count, *, step=1, position=0, unit=0, kind=0):
    return [live.ctypes.data, step, slot_at, count, position, unit, kind]


def table(*rows):
    return np.array(rows, np.int64).reshape(-1, base.RUN_COLUMNS)


def aligned(nbytes, filling):
    """As arenas are: at a multiple of 64."""
    memory = np.full(nbytes + 64, filling, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + nbytes]


def snap(chosen, runs, nbytes, units=1):
    slot, sums = aligned(nbytes, 0x5A), np.zeros(units, np.uint64)
    chosen.snapshot(runs, slot.ctypes.data, sums)
    return slot, sums


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
@pytest.mark.parametrize("step", [1, 3])
def test_a_copy_and_its_digest_equal_the_plain_ones_at_every_size_and_place(lab, dtype, step):
    width, kind = dtype.itemsize, base.kind_of(dtype, dtype)
    live = np.random.default_rng(1).integers(0, 256, 9000 * step * width + 64, dtype=np.uint8)
    for count in EDGES:
        for position in (0, 1, 5, (1 << 31) + 3, (1 << 45) + 7):
            source = live[width * (count % 3) :]
            runs = table(run(source, width * (position % 4), count, step=step, position=position, kind=kind))
            slot, sums = snap(lab.kernels, runs, 9010 * width)
            want_slot, want_sums = snap(plain, runs, 9010 * width)
            assert slot.tobytes() == want_slot.tobytes()
            assert sums == want_sums


@pytest.mark.parametrize(("live", "wire"), CASTS, ids=str)
def test_a_cast_is_the_one_of_torch_bit_for_bit_nans_too(lab, live, wire):
    values = floats(live, lab.many)
    if live.itemsize == 2 and lab.many > 1 << 16:
        values = np.concatenate([np.arange(1 << 16, dtype=np.uint16), values])
    runs = table(run(values, 0, len(values), kind=base.kind_of(live, wire), position=11))
    slot, sums = snap(lab.kernels, runs, len(values) * wire.itemsize)
    want_slot, want_sums = snap(plain, runs, len(values) * wire.itemsize)
    view = UNSIGNED[wire.itemsize]
    wrong = np.flatnonzero(slot.view(view) != want_slot.view(view))
    assert not len(wrong), [(hex(values[i]), hex(slot.view(view)[i]), hex(want_slot.view(view)[i])) for i in wrong[:5]]
    assert sums == want_sums
    signed = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensor = torch.from_numpy(values.view(f"i{live.itemsize}")).view(live)
    numbers = ~tensor.isnan().numpy()
    torch_bits = tensor.to(wire).view(signed[wire.itemsize]).numpy().view(view)
    assert (slot[: torch_bits.nbytes].view(view)[numbers] == torch_bits[numbers]).all()


def test_a_strided_cast_equals_a_plain_one(lab):
    values = floats(torch.float32, 30_000)
    runs = table(run(values, 8, 9_999, step=3, kind=base.kind_of(torch.float32, torch.bfloat16)))
    assert snap(lab.kernels, runs, 20_100)[0].tobytes() == snap(plain, runs, 20_100)[0].tobytes()
    assert snap(lab.kernels, runs, 20_100)[1] == snap(plain, runs, 20_100)[1]


def test_an_expanded_tensor_is_read_with_step_nought(lab):
    value = np.array([0x1234], np.uint16)
    slot, _ = snap(lab.kernels, table(run(value, 0, 500, step=0, kind=1 << 3 | 1)), 1000)
    assert (slot[:1000].view(np.uint16) == 0x1234).all()


def test_the_digest_is_that_of_the_reference_under_any_cut(lab):
    data = np.random.default_rng(3).integers(0, 256, 4001, dtype=np.uint8)
    whole = reference.sum_runs(data, np.array([[0, 13, 4001]]), np.array([0, 1]))
    cuts = [0, 1, 8, 9, 777, 4000, 4001]
    runs = table(*(run(data[a:], a, b - a, position=13 + a) for a, b in itertools.pairwise(cuts)))
    assert snap(lab.kernels, runs, 4001)[1] == whole


def test_what_no_kernel_casts_is_refused():
    with pytest.raises(InvalidArgument, match="float8_e4m3fn"):
        base.kind_of(torch.float32, torch.float8_e4m3fn)


# ---- differences


def blocks_of(nbytes_per_segment, length=base.BLOCK_ELEMENTS):
    rows, at = [], 0
    for width, elements in nbytes_per_segment:
        for begin in range(0, elements, length):
            rows.append([at + begin * width, min(elements - begin, length), width])
        at += -(-elements * width // 64) * 64
    return np.array(rows, np.int64).reshape(-1, 3), at


def diffed(chosen, runs, blocks, was, room):
    slot = aligned(len(was), 0x77)
    sums, counts = np.zeros(8, np.uint64), np.zeros(len(blocks), np.uint16)
    payload, old = np.zeros(room, np.uint8), np.zeros(room, np.uint8)
    found = chosen.diff(runs, blocks, slot.ctypes.data, was.ctypes.data, sums, counts, payload, old)
    return found, counts.tolist(), payload.tobytes(), old.tobytes(), slot.tobytes(), sums.tolist()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.004, 0.03, 0.5, 1.0])
def test_a_diff_lists_exactly_the_elements_whose_bits_differ(lab, width, share):
    rng = np.random.default_rng(width)
    elements = 2 * lab.block + 77
    blocks, nbytes = blocks_of([(width, elements)], lab.block)
    was = rng.integers(0, 256, nbytes, dtype=np.uint8)
    live = was.copy()
    changed = np.flatnonzero(rng.random(elements) < share)
    live.view(UNSIGNED[width])[changed] ^= UNSIGNED[width](1)
    code = {1: 0, 2: 1, 4: 2, 8: 3}[width]
    # Gaps that no run covers are padding: never listed, whatever lies in them.
    gap = lab.block + 300
    cuts = [0, 1, gap, gap + 64, elements]
    pieces = [(a, b) for a, b in itertools.pairwise(cuts) if a != gap]
    runs = table(*(run(live[a * width :], a * width, b - a, position=a, kind=code << 3 | code) for a, b in pieces))
    results = [diffed(chosen, runs, blocks, was, 2 * nbytes) for chosen in (lab.kernels, plain)]
    # What lies between runs is copied by nobody; both slots hold the same filling there.
    assert results[0] == results[1]
    used, counts, payload, old, _, _ = results[0]
    assert used == sum(base.payload_bytes(c, int(n), width) for c, n in zip(counts, blocks[:, 1], strict=True))
    if share == 0:
        assert (used, counts) == (0, [0, 0, 0])
    if share == 1:
        assert counts == [base.DENSE] * 3
    if share == 0.004:
        listed = np.frombuffer(payload[: 2 * counts[0]], np.uint16)
        assert listed.tolist() == [i for i in changed.tolist() if i < lab.block]
        values = np.frombuffer(payload, UNSIGNED[width], counts[0], base.pad8(2 * counts[0]))
        assert values.tolist() == live.view(UNSIGNED[width])[listed].tolist()
        assert (
            np.frombuffer(old, UNSIGNED[width], counts[0], base.pad8(2 * counts[0])).tolist()
            == was.view(UNSIGNED[width])[listed].tolist()
        )


def test_minus_zero_and_nan_payloads_are_differences(lab):
    was = np.array([0.0, 1.0, np.nan, np.nan], np.float32)
    live = was.copy()
    live[0] = -0.0
    live.view(np.uint32)[2] ^= 1
    blocks, _ = blocks_of([(4, 4)])
    runs = table(run(live, 0, 4, kind=2 << 3 | 2))
    found = diffed(lab.kernels, runs, np.array([[0, 4, 4]]), was.view(np.uint8), 64)
    assert found[1] == [2]
    assert np.frombuffer(found[2], np.uint16, 2).tolist() == [0, 2]
    assert len(blocks) == 1


@pytest.mark.parametrize("room", [0, 64, 500, 10_000])
def test_what_does_not_fit_is_no_delta_and_the_snapshot_is_whole(lab, room):
    blocks, nbytes = blocks_of([(2, 5000), (4, 5000)], 5000)
    was = np.zeros(nbytes, np.uint8)
    small, large = np.arange(5000, dtype=np.uint16), np.arange(5000, dtype=np.uint32) % 7 // 6
    at = int(blocks[1, 0])
    runs = table(run(small, 0, 5000, kind=9), run(large, at, 5000, kind=18, unit=1))
    results = [diffed(chosen, runs, blocks, was, room) for chosen in (lab.kernels, plain)]
    assert results[0][0] == results[1][0] == -1
    assert results[0][4:] == results[1][4:]
    assert np.frombuffer(results[0][4], np.uint16, 5000).tolist() == small.tolist()


def test_blocks_of_mixed_widths_and_casts_in_one_call(lab):
    many = lab.block + 4000
    blocks, nbytes = blocks_of([(2, many), (4, 3000), (1, 100)], max(lab.block, 3000))
    many_blocks = -(-many // max(lab.block, 3000))
    rng = np.random.default_rng(9)
    was = np.zeros(nbytes, np.uint8)
    weights = rng.standard_normal(many).astype(np.float32)
    codes, flags = rng.integers(0, 2, 3000).astype(np.uint32), rng.integers(0, 2, 100).astype(np.uint8)
    cast = base.kind_of(torch.float32, torch.bfloat16)
    starts = [int(blocks[i, 0]) for i in (many_blocks, many_blocks + 1)]
    runs = table(
        run(weights, 0, many, kind=cast), run(codes, starts[0], 3000, kind=18, unit=1), run(flags, starts[1], 100)
    )
    results = [diffed(chosen, runs, blocks, was, 300_000) for chosen in (lab.kernels, plain)]
    assert results[0] == results[1]
    assert results[0][1][:many_blocks] == [base.DENSE] * many_blocks


# ---- patches


def entries_of(blocks, chosen, values):
    """A payload that lists ``chosen`` (per block) with ``values``; None is dense."""
    rows, parts, at = [], [], 0
    for row, (index, value) in enumerate(zip(chosen, values, strict=True)):
        dense = index is None
        size = 0 if dense else base.pad8(2 * len(index))
        rows.append([row, len(value), int(dense), at, at + size, 0, 0])
        for part in ([] if dense else [np.asarray(index, np.uint16)]) + [value]:
            parts.append(np.pad(part.view(np.uint8), (0, -part.nbytes % 8)))
            at += len(parts[-1])
    return np.array(rows, np.int64), np.concatenate(parts) if parts else np.zeros(0, np.uint8)


@st.composite
def patches(draw):
    width = draw(st.sampled_from([1, 2, 4, 8]))
    elements = draw(st.integers(1, 400))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    blocks = np.array([[0, elements, width]], np.int64)
    dense = draw(st.booleans())
    index = None if dense else np.flatnonzero(rng.random(elements) < draw(st.sampled_from([0.01, 0.3, 0.9])))
    count = elements if dense else len(index)
    values = rng.integers(0, 1 << 63, count, dtype=np.uint64).astype(UNSIGNED[width])
    entries, payload = entries_of(blocks, [index], [values])
    live = rng.integers(0, 1 << 63, 4 * elements + 8, dtype=np.uint64).astype(UNSIGNED[width])
    code = {1: 0, 2: 1, 4: 2, 8: 3}[width]
    rows, at, taken = [], 0, 0
    while at < elements:
        count = int(rng.integers(1, elements - at + 1))
        for unit in range(int(rng.integers(0, 3))):  # taken by nobody, once, or under two names
            step = int(rng.integers(1, 3))
            begin, taken = taken, taken + count * step  # no two runs write to one place: in what order, nobody says
            rows.append(
                run(live[begin:], at * width, count, step=step, position=at + 5, unit=unit, kind=code << 3 | code)
            )
        at += count
    runs = table(*rows)
    entries[:, base.E_LAST] = len(runs)
    return blocks, entries, payload, runs, live, dense


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given_patch=patches())
def test_patches_equal_the_plain_ones(lab, given_patch):
    blocks, entries, payload, runs, live, _ = given_patch
    before = live.copy()
    assert lab.kernels.disorder(entries, blocks, payload) == plain.disorder(entries, blocks, payload) == -1
    sums = [np.zeros((2, 2), np.uint64) for _ in range(2)]
    olds = [np.zeros_like(payload) for _ in range(2)]
    after, weights = [], []
    for chosen, found, old in zip((lab.kernels, plain), sums, olds, strict=True):
        live[:] = before
        chosen.check(entries, blocks, payload, runs, found[0], found[1])
        chosen.gather(entries, blocks, payload, runs, old)
        weighed = np.zeros_like(found)
        chosen.weigh(entries, blocks, payload, old, runs, weighed[0], weighed[1])
        assert (weighed[1] == found[1]).all()
        weights.append(weighed)
        assert live.tobytes() == before.tobytes()
        chosen.write(entries, blocks, payload, runs)
        after.append(live.tobytes())
    assert (sums[0] == sums[1]).all()
    assert (weights[0] == weights[1]).all()
    assert olds[0].tobytes() == olds[1].tobytes()
    assert after[0] == after[1]


def test_indices_out_of_order_or_range_are_seen(lab):
    blocks = np.array([[0, 10, 2]], np.int64)
    values = np.zeros(2, np.uint16)
    for index in ([3, 3], [4, 1], [2, 10], [2, 65535]):
        entries, payload = entries_of(blocks, [index], [values])
        assert lab.kernels.disorder(entries, blocks, payload) == plain.disorder(entries, blocks, payload) == 0
    entries, payload = entries_of(blocks, [None], [np.zeros(11, np.uint16)])
    assert lab.kernels.disorder(entries, blocks, payload) == 0


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_a_scatter_puts_every_run_in_its_place(lab, width):
    code = {1: 0, 2: 1, 4: 2, 8: 3}[width]
    stage = np.random.default_rng(2).integers(0, 256, 5000 * width, dtype=np.uint8)
    live = [aligned(12_000 * width, 0) for _ in range(2)]
    for chosen, target in zip((lab.kernels, plain), live, strict=True):
        rows = [
            run(target[8 * width :], 0, 1001, kind=code << 3 | code),
            run(target[2000 * width :], 1001 * width, 3000, step=3, kind=code << 3 | code),
        ]
        chosen.scatter(table(*rows), stage.ctypes.data)
    assert live[0].tobytes() == live[1].tobytes()
    assert live[0].view(UNSIGNED[width])[8 : 8 + 1001].tolist() == stage.view(UNSIGNED[width])[:1001].tolist()


def test_without_numba_the_plain_ones_are_taken(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "mx_rl.kernels.fast", None)  # as an import that fails
    kernels.for_cpu.cache_clear()
    try:
        assert kernels.for_cpu() is plain
        assert "numba" in caplog.text
    finally:
        kernels.for_cpu.cache_clear()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the extra dev brings NVRTC on Linux only")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_the_cuda_source_compiles_for(architecture):
    assert cuda.compile_for(architecture)[:4] == b"\x7fELF"
