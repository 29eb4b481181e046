"""What torch.compile compiled guards on addresses: swap=True copies into it."""

import torch

from mx_rl import Publisher, Subscriber
from mx_rl.registry.memory import MemoryRegistry
from tests.support.local import STEADY


def test_the_tensors_of_a_compiled_module_stay_where_they_are():
    for compiled in (torch.compile, lambda module: module.compile() or module):
        registry = MemoryRegistry()
        source, live = torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)
        place = live.weight.data_ptr()
        with (
            Publisher("p", source, registry=registry, options=STEADY) as pub,
            Subscriber("p", compiled(live), registry=registry, options=STEADY, swap=True) as sub,
        ):
            for _ in range(2):
                with torch.no_grad():
                    source.weight.add_(1)
                sub.sync(at_least=pub.publish().number, timeout=10)
                assert torch.equal(live.weight, source.weight)
                assert live.weight.data_ptr() == place
                assert sub.memory.swapped_bytes == 0
