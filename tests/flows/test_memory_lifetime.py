"""Arenas go with close(), not with the cyclic garbage collector: a trainer that reopens must not hold two models."""

import gc
import weakref

import pytest
import torch

from mx_rl import Publisher, Subscriber
from mx_rl.arena import Arena
from mx_rl.registry.memory import MemoryRegistry
from mx_rl.transport.memory import MemoryTransport
from tests.support.local import STEADY, together


@pytest.fixture
def arenas(monkeypatch):
    """Weak references to every arena that is made; the cyclic collector is off meanwhile."""
    found = []
    make = Arena.__init__

    def noted(self, *args, **named):
        make(self, *args, **named)
        found.append(weakref.ref(self))

    monkeypatch.setattr(Arena, "__init__", noted)
    gc.collect()
    gc.disable()
    yield found
    gc.enable()


def test_arenas_are_freed_by_close_although_the_closed_objects_are_kept(arenas):
    registry = MemoryRegistry()
    source, target = {"w": torch.ones(5000)}, {"w": torch.zeros(5000)}
    pub = Publisher("p", source, registry=registry, options=STEADY)
    sub = Subscriber("p", target, registry=registry, options=STEADY)
    sub.sync(at_least=pub.publish().number, timeout=10)
    assert len(arenas) == 2
    assert all(arena() is not None for arena in arenas)
    sub.close()
    pub.close()
    assert [arena() for arena in arenas] == [None, None]
    assert pub.registered_bytes == sub.registered_bytes == 0


def test_publishers_and_subscribers_that_are_dropped_leave_no_circle(arenas):
    registry = MemoryRegistry()

    def once(value):
        with (
            Publisher("p", {"w": torch.full((5000,), value)}, registry=registry, options=STEADY) as pub,
            Subscriber("p", {"w": torch.zeros(5000)}, registry=registry, options=STEADY) as sub,
        ):
            staged = None
            if sub.stage(pub.publish().number, timeout=10) is not None:
                staged = sub.sync(timeout=10)
            return weakref.ref(pub), weakref.ref(sub), staged

    for value in (1.0, 2.0):
        pub, sub, _ = once(value)
        assert pub() is None
        assert sub() is None
    assert all(arena() is None for arena in arenas)


def test_arenas_of_streams_go_with_close_too(arenas):
    registry = MemoryRegistry()
    pub = Publisher("p", None, registry=registry, options=STEADY)
    subs = [
        Subscriber("p", None, registry=registry, options=STEADY, replica="tp", rank=rank, world_size=2)
        for rank in range(2)
    ]
    for _ in range(2):
        number = pub.publish(stream=[("a", torch.ones(5000)), ("b", torch.ones(300))]).number
        assert together(*(lambda sub=sub, n=number: len(list(sub.stream(n, timeout=10))) for sub in subs)) == [2, 2]
    for thing in (*subs, pub):
        thing.close()
    left = [arena().nbytes for arena in arenas if arena() is not None]
    assert all(nbytes <= 64 for nbytes in left), left  # those of the ranks' messages go with the subscriber
    assert all(sub.registered_bytes == 0 and sub.last_report is not None for sub in subs)


@pytest.mark.parametrize(
    ("count", "named"),
    [
        (1, {}),
        (1, {"swap": True}),
        (2, {"swap": True}),
        (1, {"stage": "none", "serve": "off"}),
        (1, {"serve": "live"}),
        (2, {"rank": 0, "world_size": 2, "replica": "r"}),
    ],
    ids=["stage", "first of swap", "second of swap", "direct", "live", "ranks"],
)
def test_a_constructor_that_fails_half_way_leaves_nothing_registered(monkeypatch, count, named):
    receive, opened = MemoryTransport.receive, []

    def failing(self, name, regions):
        if len(opened) + 1 == count:
            raise MemoryError("no more can be registered")
        opened.append(receive(self, name, regions))
        return opened[-1]

    registry = MemoryRegistry()
    live = torch.nn.Linear(300, 200)
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    with Publisher("p", {"w": torch.ones(3)}, registry=registry, options=STEADY) as pub:
        served = list(pub._endpoint._served)
        monkeypatch.setattr(MemoryTransport, "receive", failing)
        with pytest.raises(MemoryError):
            Subscriber("p", live, registry=registry, options=STEADY, **named)
        assert len(opened) == count - 1
        assert pub._endpoint._served == served
        assert all(receiver._fenced is not None for receiver in opened)
    for name, tensor in live.state_dict().items():
        assert torch.equal(tensor, before[name])
