"""Long runs: file descriptors, threads, registered bytes, memory and /dev/shm stay where they were."""

import os

import pytest

from tests.support.footprint import MeasuredRollout, MeasuredTrainer, OpenAndClose, shared_memory
from tests.support.procs import Child

SHAPES = {"a": (512, 1024), "b": (64, 64), "c": (7,)}
WARM_ROUNDS = 15
RSS_BYTES = 24 << 20
"""What allocators and caches may take after the warm-up, whatever the number of rounds."""


def check_rounds(server, rounds):
    before = shared_memory()
    with Child(MeasuredTrainer, server.path, SHAPES) as trainer, Child(MeasuredRollout, server.path, SHAPES) as rollout:

        def run(count, first):
            limit = 60 + 2 * count
            publishing = trainer.begin("publish_some", count, first, timeout=limit)
            assert rollout.call("sync_some", count, timeout=limit) == publishing.result(limit)
            assert rollout.call("values") == {float(first + count - 1)}

        run(WARM_ROUNDS, 1)
        warm = trainer.call("footprint"), rollout.call("footprint")
        run(rounds, WARM_ROUNDS + 1)
        for early, late in zip(warm, (trainer.call("footprint"), rollout.call("footprint")), strict=True):
            assert late.fds <= early.fds + 1
            assert late.threads <= early.threads
            assert late.python_threads == early.python_threads
            assert late.registered == early.registered
            assert late.rss <= early.rss + RSS_BYTES
            assert late.maps <= early.maps + 16
    assert shared_memory() - before == set()


def test_a_short_run_of_publish_and_sync_leaves_nothing_behind(server):
    check_rounds(server, int(os.environ.get("MXRL_TEST_ROUNDS", "60")))


@pytest.mark.soak
def test_a_long_run_of_publish_and_sync_leaves_nothing_behind(server):
    check_rounds(server, int(os.environ.get("MXRL_SOAK_ROUNDS", "600")))


@pytest.mark.parametrize("transport", ["memory", "nixl"])
def test_twenty_publishers_and_subscribers_opened_and_closed_leave_nothing_behind(server, transport):
    before = shared_memory()
    with Child(OpenAndClose, server.path) as child:
        early = child.call("cycle", 4, transport, timeout=100)  # torch's and UCX's own pools, made once
        late = child.call("cycle", 20, transport, timeout=100)
        assert late.python_threads == early.python_threads == ("MainThread",)
        assert late.threads <= early.threads
        assert late.fds <= early.fds + 1
        assert late.rss <= early.rss + RSS_BYTES
    assert shared_memory() - before == set()
