"""FSDP2 and 2-d meshes in separate processes, over NIXL, to unsharded and tensor-parallel replicas: bit for bit."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from mx_rl.errors import ReplicaMismatch
from tests.support.model import FsdpRank, TensorParallelRank, WholeRank, join
from tests.support.procs import Child


def all_at_once(children, name, *args, timeout=60.0):
    return [future.result(timeout) for future in [child.begin(name, *args, timeout=timeout) for child in children]]


@pytest.mark.parametrize(
    ("mesh", "dims"),
    [((2,), ()), ((3,), ()), ((2, 2), (0, 1)), ((2, 2), (1, 0))],
    ids=["fsdp2x2", "fsdp2x3", "rows-by-columns", "columns-by-rows"],
)
def test_any_trainer_layout_arrives_whole_and_tensor_parallel(server, tmp_path, mesh, dims):
    world_size = 1
    for size in mesh:
        world_size *= size
    store = str(tmp_path / "store")
    trainers = start_world(server, store, world_size, mesh, dims)
    try:
        whole = Child(WholeRank, server.path)
        parallel = [Child(TensorParallelRank, server.path, rank) for rank in (0, 1)]
        rollouts = [whole, *parallel]
        try:
            for seed in (1, 2):
                all_at_once(trainers, "randomize", seed)
                numbers = all_at_once(trainers, "publish", seed)
                assert len(set(numbers)) == 1
                reports = all_at_once(rollouts, "sync", numbers[0])
                assert {report.version for report in reports} == {numbers[0]}
                expected = all_at_once(trainers, "digests")[0]
                assert whole.call("digests") == expected
                assert join([child.call("parts") for child in parallel]) == expected
        finally:
            for child in rollouts:
                child.stop()
    finally:
        all_at_once(trainers, "close")
        for child in trainers:
            child.kill()


@pytest.mark.parametrize(
    ("mesh", "plain", "name", "pair"),
    [((2, 2), False, "layers.1.up.weight", [1, 3]), ((3,), True, "layers.0.norm", [0, 1])],
    ids=["hybrid", "replicated-norms"],
)
def test_replicated_boxes_are_kept_twice_and_a_drifted_rank_is_found(server, tmp_path, mesh, plain, name, pair):
    trainers = start_world(server, str(tmp_path / "store"), 4 if len(mesh) == 2 else 3, mesh, (), plain)
    whole = Child(WholeRank, server.path)

    def check(seed):
        all_at_once(trainers, "randomize", seed)
        numbers = all_at_once(trainers, "publish", seed)
        all_at_once(trainers, "wait", numbers[0])
        whole.call("sync", numbers[0])
        assert whole.call("digests") == all_at_once(trainers, "digests")[0]
        return numbers[0]

    try:
        for seed in range(6):
            number = check(seed)
        sizes = all_at_once(trainers, "slot_bytes")
        assert all(slot < held for slot, held in sizes), "the buffers are at two ranks only"
        trainers[pair[1]].call("drift", name)
        published = all_at_once(trainers, "publish", 6)[0]
        for child in trainers:
            with pytest.raises(ReplicaMismatch) as caught:
                child.call("wait", published)
            assert (caught.value.ranks, caught.value.tensors) == (pair, [name])
        assert whole.call("sync", number).kind == "none"
        assert check(7) > number
    finally:
        whole.stop()
        all_at_once(trainers, "close")
        for child in trainers:
            child.kill()


def start_world(server, store, world_size, mesh, dims, plain=False):
    """All ranks at once: each waits for the others in its process group."""
    with ThreadPoolExecutor(world_size) as pool:
        args = [(FsdpRank, server.path, store, rank, world_size, mesh, dims, plain) for rank in range(world_size)]
        return list(pool.map(lambda one: Child(*one), args))


def test_fsdp2_at_its_defaults_each_version_is_the_live_weights(server, tmp_path):
    store = str(tmp_path / "store")
    trainers = start_world(server, store, 2, (2,), ())
    whole = Child(WholeRank, server.path)

    def check(step):
        numbers = all_at_once(trainers, "publish", step)
        whole.call("sync", numbers[0])
        assert whole.call("digests") == all_at_once(trainers, "digests")[0]

    try:
        check(0)
        all_at_once(trainers, "randomize", 7)
        all_at_once(trainers, "forward")  # the root stays unsharded after a forward without a backward
        check(1)
        all_at_once(trainers, "randomize", 8)
        all_at_once(trainers, "offload_and_reload")
        check(2)
        all_at_once(trainers, "replace_data")
        check(3)
    finally:
        whole.stop()
        all_at_once(trainers, "close")
        for child in trainers:
            child.kill()
