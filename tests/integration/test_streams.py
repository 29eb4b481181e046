"""Streams between processes over NIXL: exporters that give one tensor at a time, engines that load by name."""

import math

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from mx_rl import Publisher, Subscriber
from mx_rl.errors import ActorFailed, InvalidArgument, Tainted
from mx_rl.ray import RolloutFleet, TrainerGroup
from mx_rl.registry.memory import MemoryRegistry
from tests.integration.workers import Export, LoadByName
from tests.support.local import FAST
from tests.support.local_ray import local_ray
from tests.support.streams import ByName, Exporter, PartByName

MB = 1 << 20
SHAPES = {f"layers.{index}.weight": (256 + index, 512) for index in range(12)} | {"norm": (512,), "odd": (5, 7)}
TOTAL = sum(4 * math.prod(shape) for shape in SHAPES.values())


def all_of(children, method, *args, **named):
    futures = [child.begin(method, *args, **named) for child in children]
    return [future.result(90) for future in futures]


@pytest.mark.parametrize("size", [1, 4])
def test_an_exported_stream_is_loaded_by_name_whole_and_in_parts(server, children, size):
    trainers = [children(Exporter, server.path, SHAPES, rank, size) for rank in range(size)]
    whole = children(ByName, server.path, SHAPES)
    halves = [children(PartByName, server.path, SHAPES, rank, 2) for rank in range(2)]
    for seed, awaited in ((1, False), (2, True)):
        number = all_of(trainers, "publish", seed, awaited=awaited)[0]
        for found in all_of([whole, *halves], "load", number, seed):
            assert found["wrong"] == []
            assert found["loaded"] == len(SHAPES)
            assert found["version"] == number
    failed = [trainer.begin("publish", 3, raise_after=5) for trainer in trainers]
    for future in failed:
        with pytest.raises(ArithmeticError, match="exporter broke"):
            future.result(60)
    number = all_of(trainers, "publish", 4)[0]
    assert all_of([whole, *halves], "load", number, 4)[0]["wrong"] == []


SLACK = 64 * MB
"""What agents, threads and kernels take with their first use; a gathered model would be 192 MiB more."""


def test_an_exporter_holds_its_slots_and_one_tensor(server, children):
    shapes = {f"w{index:02}": (1024, 2048) for index in range(24)}  # 8 MiB each, 192 MiB together
    trainers = [children(Exporter, server.path, shapes, rank, 2) for rank in range(2)]
    share = 24 * 8 * MB // 2
    for trainer in trainers:
        trainer.before = trainer.call("warm")
    all_of(trainers, "publish", 1)
    for trainer in trainers:
        assert 2 * share <= trainer.call("registered") <= 2 * share + 4 * MB + (64 << 10)
        assert trainer.call("peak") - trainer.before < 3 * share + SLACK, "the first pass holds one share more"
        trainer.before = trainer.call("peak")
    for seed in range(2, 5):
        all_of(trainers, "publish", seed)
    for trainer in trainers:
        assert trainer.call("peak") - trainer.before < 16 * MB


def test_two_ranks_of_one_host_stream_one_stage(server, children):
    trainer = children(Exporter, server.path, SHAPES, 0, 1)
    engine = [children(ByName, server.path, SHAPES, rank, 2) for rank in range(2)]
    for seed in (1, 2):
        number = trainer.call("publish", seed)
        lender, borrower = all_of(engine, "load", number, seed)
        assert lender["wrong"] == borrower["wrong"] == []
        assert lender["version"] == borrower["version"] == number
        assert lender["registered"] > TOTAL
        assert borrower["registered"] < 2 * 4 * 512 * 268 + (64 << 10)
        assert borrower["served_by"] == {"rank:0": TOTAL}
    number = trainer.call("publish", 3)
    futures = [engine[0].begin("load", number, 3), engine[1].begin("load", number, 3, leave_after=4)]
    with pytest.raises(Tainted):
        futures[0].result(60)
    assert futures[1].result(60)["ready"] is False
    assert [rank.call("ready") for rank in engine] == [False, False]
    for found in all_of(engine, "load", number, 3):
        assert found["wrong"] == []
        assert found["ready"]


def test_a_lender_that_is_killed_fails_its_borrowers_loop_and_its_successor_heals_it(server, children):
    trainer = children(Exporter, server.path, SHAPES, 0, 1)
    lender, borrower = (children(ByName, server.path, SHAPES, rank, 2) for rank in range(2))
    number = trainer.call("publish", 1)
    assert all_of([lender, borrower], "draw", number, 3) == [3, 3]
    lender.kill()
    with pytest.raises(Tainted, match="PeerLost"):
        borrower.call("draw", number, len(SHAPES))
    assert borrower.call("ready") is False
    successor = children(ByName, server.path, SHAPES, 0, 2)
    for found in all_of([successor, borrower], "load", number, 1):
        assert found["wrong"] == []
        assert found["ready"]


def test_a_dtensor_is_refused_with_what_to_give_instead():
    registry = MemoryRegistry()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        whole = torch.randn(8, 4)
        tensor = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
        with Publisher("p", None, registry=registry, options=FAST) as pub:
            with pytest.raises(InvalidArgument, match=r"'w' as a DTensor.*full_tensor"):
                pub.publish(stream=[("w", tensor), ("b", torch.ones(3))])
            version = pub.publish(stream=((name, value.full_tensor()) for name, value in {"w": tensor}.items()))
            with Subscriber("p", {"w": torch.zeros(8, 4)}, registry=registry, options=FAST) as sub:
                sub.sync(at_least=version.number, timeout=10)
                assert torch.equal(sub._tensors["w"], whole)
    finally:
        distributed.destroy_process_group()


def test_a_group_that_exports_and_a_fleet_that_loads_by_name():
    with (
        local_ray(num_cpus=8),
        TrainerGroup(Export, policy="named", world_size=2) as group,
        RolloutFleet(LoadByName, policy="named", replicas=2, ranks=1) as fleet,
    ):
        for step in (1, 2):
            group.call("train", float(step))
            version = group.publish(step=step)
            report = fleet.sync(at_least=version, timeout=60)
            assert len(report.installed) == 2, report
            assert fleet.map("values", [0, 1]) == [([float(step)], step)] * 2
        assert fleet.sync(timeout=60).version == version.number
        assert fleet.map("values", [0, 1]) == [([2.0], 2)] * 2, "nothing newer, so nothing was loaded"
        group.call("train", -1.0)
        with pytest.raises(ActorFailed, match="nothing to export"):
            group.publish(step=3)
        group.call("train", 4.0)
        assert fleet.sync(at_least=group.publish(step=4), timeout=60).version == version.number + 2
        assert fleet.map("values", [0, 1]) == [([4.0], 3)] * 2
