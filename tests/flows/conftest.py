import pytest
import torch

from mx_rl.registry.memory import MemoryRegistry
from tests.support.faulty import faulty
from tests.support.local import publisher


@pytest.fixture
def registry():
    return MemoryRegistry()


@pytest.fixture
def faults(monkeypatch):
    """The memory transport's faults, by agent; closing a receiver ends what is posted into it."""
    with faulty(monkeypatch, fence=True) as found:
        yield found


@pytest.fixture
def weights():
    return {"w": torch.zeros(5000)}


@pytest.fixture
def pub(registry, weights):
    with publisher(registry, weights) as pub:
        yield pub
