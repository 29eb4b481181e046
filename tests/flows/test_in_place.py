"""slots=0: live tensors are the version; what changes them shuts readers out first."""

import numpy as np
import pytest
import torch

from mx_rl import Publisher
from mx_rl.errors import InvalidArgument, PeerLost, VersionGone
from tests.flows.test_memory_modes import IDS, MODES, Net, assert_same, change
from tests.support.local import steady_publisher
from tests.support.local import steady_subscriber as subscriber

COUNT = 64 * 1024  # float32: 64 windows of 4096 bytes
TRAINER = "p-pub0-"


def publisher(registry, tensors, **named):
    return steady_publisher(registry, tensors, **({"slots": 0} | named))


def weights(value):
    return torch.arange(COUNT, dtype=torch.float32) + value


@pytest.mark.parametrize("mode", MODES, ids=IDS)
def test_live_tensors_are_read_in_place_by_every_mode(registry, mode):
    source, live = Net(0), Net(1)
    with publisher(registry, source) as pub, subscriber(registry, live, **mode) as sub:
        assert pub.memory.slots_bytes == 0
        for _ in range(4):
            with pub.mutating():
                change(source)
            version = pub.publish()
            assert sub.sync(at_least=version.number, timeout=10).version == version.number
            assert_same(source, live)
            assert pub.wait(version, timeout=10).installed == (sub.replica,)


@pytest.mark.parametrize("by", ["mutating", "optimizer"])
def test_a_read_that_races_a_change_is_refused_and_the_next_version_is_whole(registry, faults, by):
    parameter = torch.nn.Parameter(weights(1))
    target = {"w": torch.zeros(COUNT)}
    optimizer = torch.optim.SGD([parameter], lr=1.0)

    def mutate(_agent=None):
        if by == "mutating":
            with pub.mutating(), torch.no_grad():
                parameter.sub_(1)
        else:
            parameter.grad = torch.ones(COUNT)
            optimizer.step()

    with publisher(registry, {"w": parameter}) as pub, subscriber(registry, target) as sub:
        first = pub.publish()
        sub.sync(at_least=first.number, timeout=10)
        mutate()
        second = pub.publish()
        pub.wait(second, replicas=0, timeout=10)
        faults.at(TRAINER, 20, mutate)
        with pytest.raises((VersionGone, PeerLost)):
            sub.sync(at_least=second.number, timeout=0.4)
        assert sub.version == first.number
        assert torch.equal(target["w"], weights(1))
        third = pub.publish()
        assert sub.sync(at_least=third.number, timeout=10).version == third.number
        assert torch.equal(target["w"], parameter.detach())
        assert torch.equal(target["w"], weights(-1))


def test_a_step_over_other_tensors_shuts_nobody_out(registry):
    other = torch.nn.Parameter(torch.ones(5))
    other.grad = torch.ones(5)
    target = {"w": torch.zeros(COUNT)}
    with publisher(registry, {"w": weights(1)}) as pub, subscriber(registry, target) as sub:
        version = pub.publish()
        pub.wait(version, replicas=0, timeout=10)
        torch.optim.SGD([other], lr=1.0).step()
        assert sub.sync(timeout=10).version == version.number


def test_tensors_that_moved_are_published_from_where_they_lie(registry):
    module, target = torch.nn.Linear(64, 32), {}
    target = {name: torch.zeros_like(tensor) for name, tensor in module.state_dict().items()}
    with publisher(registry, module) as pub, subscriber(registry, target) as sub:
        for value in (1.0, 2.0, 3.0):
            with pub.mutating():
                module.weight.data = torch.full((32, 64), value)
            version = pub.publish()
            sub.sync(at_least=version.number, timeout=10)
            assert target["weight"].eq(value).all()
        blobs = registry._state.policies["p"].blobs
        assert len([key for key in blobs if key.startswith(TRAINER)]) == 2, "one record and one table"


def test_what_cannot_be_published_in_place_is_refused(registry):
    with pytest.raises(InvalidArgument, match="cast"):
        publisher(registry, {"w": torch.zeros(3)}, wire_dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match="contiguous"):
        publisher(registry, {"w": torch.zeros(2000, 2000)[:, ::2]})
    with pytest.raises(InvalidArgument, match="at least 2"):
        publisher(registry, {"w": torch.zeros(3)}, slots=1)
    with publisher(registry, {"w": torch.zeros(3)}) as pub:
        with pub.mutating(), pytest.raises(InvalidArgument, match="mutating"):
            pub.publish()
        pub.wait(pub.publish(), replicas=0, timeout=10)


def test_mutating_waits_for_readers_no_longer_than_the_grace(registry):
    source, target = {"w": weights(1)}, {"w": torch.zeros(COUNT)}
    with publisher(registry, source) as pub, subscriber(registry, target, sources=("peer",)) as sub:
        pub.wait(pub.publish(), replicas=0, timeout=10)
        with pytest.raises((PeerLost, VersionGone)):
            sub.sync(timeout=0.3)  # resolves, takes a lease, and reads nothing
        with pub.mutating():
            source["w"].add_(1)


def test_a_ctrl_c_while_readers_are_awaited_leaves_no_mutation_open(registry, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "_shut_out", interrupted)
        pub = publisher(registry, {"w": torch.zeros(3)})
    with pub:
        pub.wait(pub.publish(), replicas=0, timeout=10)
        with pytest.raises(KeyboardInterrupt), pub.mutating():
            pytest.fail("the body ran")
        pub.wait(pub.publish(), replicas=0, timeout=10)


def test_a_step_over_the_second_of_two_storages_that_overlap_is_noticed(registry):
    memory = np.zeros(COUNT + 64, dtype=np.float32)
    left, right = torch.from_numpy(memory[:COUNT]), torch.from_numpy(memory[64:])
    parameter = torch.nn.Parameter(right)
    parameter.grad = torch.ones(COUNT)
    target = {"left": torch.zeros(COUNT), "right": torch.zeros(COUNT)}
    with publisher(registry, {"left": left, "right": parameter}) as pub, subscriber(registry, target) as sub:
        version = pub.publish()
        pub.wait(version, replicas=0, timeout=10)
        torch.optim.SGD([parameter], lr=1.0).step()
        with pytest.raises((VersionGone, PeerLost)):
            sub.sync(at_least=version.number, timeout=0.4)
        assert target["left"].eq(0).all()
