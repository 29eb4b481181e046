"""Copies equal torch's own, bit for bit, whichever way they are done."""

import threading

import pytest
import torch

from mx_rl import copies


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(
    "source",
    [
        torch.randn(300, 7),
        torch.randn(300, 7).t(),
        torch.randn(12, 8)[:, ::2],
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.tensor([float("nan"), -0.0]),
        torch.randn(4, dtype=torch.complex64).conj(),
    ],
    ids=["plain", "transposed", "strided", "scalar", "empty", "nan", "conjugate"],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["same", "cast"])
def test_a_copy_is_what_torch_makes_of_it(source, dtype):
    dtype = dtype if dtype is not None and not source.is_complex() else source.dtype  # complex is never cast
    mine, theirs = torch.zeros(source.shape, dtype=dtype), torch.zeros(source.shape, dtype=dtype)
    copies.copy_all([(mine, source)])
    theirs.copy_(source)
    assert torch.equal(bits(mine), bits(theirs))


def test_many_threads_move_every_byte_once(monkeypatch):
    monkeypatch.setattr(copies, "_PARALLEL_BYTES", 1)
    monkeypatch.setattr(copies, "_CHUNK_BYTES", 1000)
    sources = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in (1, 999, 1000, 1001, 54321, 0, 7)]
    targets = [torch.zeros_like(source) for source in sources]
    copies.copy_all(zip(targets, sources, strict=True))
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


def test_pools_are_closed_and_made_again(monkeypatch):
    monkeypatch.setattr(copies, "_PARALLEL_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    source = torch.arange(5000)
    for _ in range(2):
        target = torch.zeros_like(source)
        copies.copy_all([(target, source)])
        assert torch.equal(target, source)
        assert [thread for thread in threading.enumerate() if thread.name.startswith("mx-rl-copy")]
        copies.close_pools()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("mx-rl-copy")]


def test_a_strided_target_keeps_what_lies_between():
    base = torch.zeros(4, 6)
    copies.copy(base[:, 1:3], torch.ones(4, 2))
    assert base[:, 1:3].eq(1).all()
    assert base.sum() == 8


def test_inference_tensors_are_written():
    with torch.inference_mode():
        target = torch.zeros(3, 4)
    copies.copy(target, torch.ones(3, 4))
    copies.copy(target.t(), torch.full((4, 3), 2.0))
    assert target.eq(2).all()
