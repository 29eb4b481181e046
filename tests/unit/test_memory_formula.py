"""The formulas of docs/memory.md give the bytes that are really registered."""

import pytest
import torch

from mx_rl import Publisher, Subscriber
from mx_rl.registry.memory import MemoryRegistry
from tests.support.local import FAST


def align(nbytes, to):
    return -(-nbytes // to) * to


def arena(count, nbytes):
    page = 2 << 20 if nbytes >= 2 << 20 else 4096
    return count * align(max(nbytes, 1), page) + align(64 * count, 4096)


def packed(sizes):
    """Boxes of these bytes, each beginning at a multiple of 64, up to the end of the last."""
    end = 0
    for size in sizes:
        end = align(end, 64) + size
    return end


@pytest.mark.parametrize("shapes", [[(3,), (5, 7), (100,)], [(1024, 1024), (300, 40), (9,)]], ids=["small", "large"])
def test_registered_bytes_are_those_of_the_formula(shapes):
    registry = MemoryRegistry()
    tensors = {f"t{index}": torch.ones(shape) for index, shape in enumerate(shapes)}
    wire = packed([2 * tensor.numel() for tensor in tensors.values()])
    target = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in tensors.items()}
    with (
        Publisher("p", tensors, registry=registry, options=FAST, wire_dtype=torch.bfloat16, slots=3) as pub,
        Subscriber("p", target, registry=registry, options=FAST) as sub,
    ):
        sub.sync(at_least=pub.publish().number, timeout=10)
        assert pub.registered_bytes == arena(3, wire)
        assert sub.registered_bytes == arena(1, wire + wire // 64 + (64 << 10))
