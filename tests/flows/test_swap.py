"""swap=True: storage is swapped where nobody else holds it, copied where somebody does, found out at every install."""

import copy

import pytest
import torch

from mx_rl import Publisher, Subscriber
from mx_rl.registry.memory import MemoryRegistry
from tests.support.local import STEADY


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(300, 200)
        self.second = torch.nn.Linear(200, 300, bias=False)
        self.tied = torch.nn.Linear(300, 200, bias=False)
        self.tied.weight = torch.nn.Parameter(self.first.weight.data)  # another object over the same storage
        self.register_buffer("steps", torch.arange(1000))


@pytest.fixture
def pair():
    registry = MemoryRegistry()
    source, live = Net(), Net()
    with (
        Publisher("p", source, registry=registry, options=STEADY) as pub,
        Subscriber("p", live, registry=registry, options=STEADY, swap=True) as sub,
    ):

        def step():
            with torch.no_grad():
                for tensor in (*source.parameters(), *source.buffers()):
                    tensor.copy_(torch.randn(tensor.shape) * 100)
            sub.sync(at_least=pub.publish().number, timeout=10)
            for name, tensor in source.state_dict().items():
                assert torch.equal(tensor, live.state_dict()[name]), name

        step.live, step.sub, step.pub = live, sub, pub
        yield step


def swapped(step):
    return step.sub.memory.swapped_bytes


def nbytes(*tensors):
    return sum(tensor.nbytes for tensor in tensors)


def everything(live):
    return nbytes(live.first.weight, live.first.bias, live.second.weight, live.steps)


def test_parameters_buffers_and_tied_ones_are_swapped_and_stay_the_same_objects(pair):
    live = pair.live
    objects, places = list(live.parameters()), set()
    assert swapped(pair) == everything(live)
    for _ in range(4):
        pair()
        assert swapped(pair) == everything(live)
        assert pair.sub.memory.copied_bytes == 0
        assert live.tied.weight.data_ptr() == live.first.weight.data_ptr()
        places.add(live.second.weight.data_ptr())
    assert len(places) == 2, "two arenas take turns"
    assert all(one is two for one, two in zip(objects, live.parameters(), strict=True))


def test_the_old_storage_is_freed_at_construction():
    live, registry = Net(), MemoryRegistry()
    before = live.second.weight.data_ptr()
    values = copy.deepcopy(live.state_dict())
    with Subscriber("p", live, registry=registry, options=STEADY, swap=True):
        assert live.second.weight.data_ptr() != before
        for name, tensor in values.items():
            assert torch.equal(tensor, live.state_dict()[name])


def test_a_view_that_somebody_holds_is_followed_and_its_tensor_is_swapped_again_when_it_is_gone(pair):
    live = pair.live
    pair()
    rows = live.second.weight.detach()[10:20]
    for _ in range(4):
        pair()
        assert torch.equal(rows, live.second.weight[10:20])
        assert swapped(pair) == everything(live) - live.second.weight.nbytes
        assert pair.sub.memory.copied_bytes == live.second.weight.nbytes
    del rows
    pair()
    assert swapped(pair) == everything(live)


def test_a_view_of_weights_that_were_replaced_keeps_its_values(pair):
    """Nobody may write into memory that was handed out, even if the module no longer uses it."""
    live = pair.live
    pair()
    old = live.second.weight.detach()
    live.second.weight.data = torch.zeros(300, 200)
    values = old.clone()
    for _ in range(4):
        pair()
        assert torch.equal(old, values)
    assert swapped(pair) == everything(live)


def test_an_array_or_a_storage_object_held_elsewhere_is_a_holder(pair):
    live = pair.live
    pair()
    array, storage = live.second.weight.detach().numpy(), live.first.bias.untyped_storage()
    pair()
    assert swapped(pair) == everything(live) - nbytes(live.second.weight, live.first.bias)
    assert (array == live.second.weight.detach().numpy()).all()
    del array, storage
    pair()
    assert swapped(pair) == everything(live)


def test_storage_that_was_offloaded_and_reloaded_is_swapped_in_again(pair):
    live = pair.live
    for _ in range(3):
        pair()
        for tensor in live.parameters():
            tensor.data = tensor.data.clone()
    pair()
    assert swapped(pair) >= nbytes(live.second.weight, live.first.bias, live.steps)


class Wrapped(torch.nn.Module):
    """As torch.compile wraps a module (integration/test_swap_compiled.py has the real one)."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


def test_a_compiled_module_and_a_mapping_are_copied():
    for made in (Wrapped, lambda live: dict(live.state_dict())):
        registry = MemoryRegistry()
        source, live = Net(), Net()
        place = live.second.weight.data_ptr()
        with (
            Publisher("p", source, registry=registry, options=STEADY) as pub,
            Subscriber("p", made(live), registry=registry, options=STEADY, swap=True) as sub,
        ):
            for _ in range(2):
                sub.sync(at_least=pub.publish().number, timeout=10)
                assert torch.equal(live.second.weight, source.second.weight)
                assert live.second.weight.data_ptr() == place
                assert sub.memory.swapped_bytes == 0
                assert sub.memory.copied_bytes == everything(live)


def test_weights_stay_when_the_subscriber_is_closed():
    registry = MemoryRegistry()
    source, live = Net(), Net()
    with Publisher("p", source, registry=registry, options=STEADY) as pub:
        with Subscriber("p", live, registry=registry, options=STEADY, swap=True) as sub:
            sub.sync(at_least=pub.publish().number, timeout=10)
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, live.state_dict()[name])
