"""The formulas of docs/memory.md give the bytes that are really registered."""

import math

import pytest
import torch

from mx_rl import MemoryReport, Publisher, Subscriber
from mx_rl.registry.memory import MemoryRegistry
from tests.flows.test_memory_modes import IDS, MODES
from tests.support.local import STEADY


def align(nbytes, to):
    return -(-nbytes // to) * to


def arena(count, nbytes):
    page = 2 << 20 if nbytes >= 2 << 20 else 4096
    return count * align(max(nbytes, 1), page) + align(64 * count, 4096)


ARENA_OF_NOTHING = arena(1, 0)


def stage(nbytes):
    return nbytes + nbytes // 64 + (64 << 10)


def slot(pack, boxes):
    """A slot: the packed boxes, and a sum of 8 bytes each."""
    return align(pack, 64) + 8 * boxes


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
        Publisher("p", tensors, registry=registry, options=STEADY, wire_dtype=torch.bfloat16, slots=3) as pub,
        Subscriber("p", target, registry=registry, options=STEADY) as sub,
    ):
        sub.sync(at_least=pub.publish().number, timeout=10)
        assert pub.registered_bytes == arena(3, slot(wire, len(shapes)))
        assert sub.registered_bytes == arena(1, stage(wire))


@pytest.mark.parametrize("mode", MODES, ids=IDS)
@pytest.mark.parametrize("shapes", [[(3,), (5, 7), (100,)], [(1024, 1024), (300, 40), (9,)]], ids=["small", "large"])
def test_the_report_of_every_mode_is_the_formula(shapes, mode):
    registry = MemoryRegistry()
    source, target = torch.nn.Module(), torch.nn.Module()
    for module in (source, target):
        for index, shape in enumerate(shapes):
            module.register_parameter(f"t{index}", torch.nn.Parameter(torch.randn(shape)))
    sizes = [4 * math.prod(shape) for shape in shapes]
    model, pack = sum(sizes), packed(sizes)
    with (
        Publisher("p", source, registry=registry, options=STEADY, slots=3) as pub,
        Subscriber("p", target, registry=registry, options=STEADY, **mode) as sub,
    ):
        for _ in range(2):
            assert pub.memory == MemoryReport(
                slots_bytes=3 * pack, live_bytes=model, headers_bytes=arena(3, slot(pack, len(shapes))) - 3 * pack
            )
            serving = ARENA_OF_NOTHING if mode["serve"] == "live" else 0
            if mode.get("swap"):
                expected = MemoryReport(
                    swap_bytes=2 * stage(pack),
                    headers_bytes=2 * (arena(1, stage(pack)) - stage(pack)),
                    swapped_bytes=model,
                )
            elif mode["stage"] == "none":
                expected = MemoryReport(live_bytes=model, headers_bytes=ARENA_OF_NOTHING + serving)
            else:
                room = stage(pack)
                expected = MemoryReport(
                    stage_bytes=room,
                    live_bytes=model,
                    headers_bytes=arena(1, room) - room + serving,
                    copied_bytes=model,
                )
            assert sub.memory == expected
            assert sub.memory.as_dict()["total_bytes"] == expected.total_bytes
            sub.sync(at_least=pub.publish().number, timeout=10)
