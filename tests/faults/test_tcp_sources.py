"""Sources over TCP that stop in mid-move and go on later, and a world of eight under torchrun."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import mx_rl
from tests.support.actors import RolloutRank, TrainerRank
from tests.support.stopping import StoppingReader

BIG = {"a": (12288, 1024)}  # 48 windows of 1 MiB
TCP = {"UCX_TLS": "tcp"}
LATE_S = 1.5


@pytest.mark.parametrize("lane", ["auto", "read"])
def test_a_source_stopped_in_mid_move_changes_not_one_byte_when_it_goes_on(server, children, lane):
    options = {"lane": lane}
    trainer = children(partial(TrainerRank, options=options), server.path, BIG, 0, 1, "one", env=TCP)
    peer = children(partial(RolloutRank, options=options), server.path, BIG, env=TCP)
    reader = children(
        partial(StoppingReader, options=options, sources=("trainer", "peer")), server.path, BIG, "reader", env=TCP
    )
    first = trainer.call("publish_ready", 1.0)
    peer.call("sync", first)
    normal = reader.call("registered_bytes")
    report = reader.call("sync_and_stop", trainer.pid, "trainer:0", 12, first, timeout=90)
    assert report.version == first
    assert report.lane == "tcp"
    assert set(report.served_by) == {"trainer:0", f"peer:{peer.call('name')}"}
    assert sum(report.served_by.values()) == 48 << 20
    assert reader.call("values") == {1.0}
    # Another launch publishes what the stopped source never had: its late bytes would show.
    successor = children(partial(TrainerRank, options=options), server.path, BIG, 0, 1, "two", env=TCP)
    second = successor.call("publish_ready", 2.0)
    assert reader.call("sync", second).version == second
    digest = reader.call("stage_digest")
    os.kill(trainer.pid, signal.SIGCONT)
    end = time.monotonic() + LATE_S
    while time.monotonic() < end:
        assert reader.call("stage_digest") == digest
        assert reader.call("values") == {2.0}
    assert trainer.process.is_alive(), "the reader that gave it up must not cost the source its life"
    joiner = children(partial(RolloutRank, options=options, sources=("peer",)), server.path, BIG, env=TCP)
    assert joiner.call("sync", second).version == second
    assert joiner.call("values") == {2.0}
    third = successor.call("publish_ready", 3.0)
    assert reader.call("sync", third).version == third
    assert reader.call("values") == {3.0}
    assert reader.call("registered_bytes") == normal, "a stage in quarantine is given back when it has settled"


@pytest.mark.timeout(300)  # eight processes that import torch on two cores, which others may use too
def test_eight_ranks_with_default_arguments_under_torchrun_are_one_world(server, children, tmp_path):
    reader = children(RolloutRank, server.path, {"w": (32, 8)})
    root = Path(mx_rl.__file__).parent.parent
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "8", "--module"]
    launch = subprocess.Popen(
        [*command, "tests.support.torchrun_rank", server.path, str(tmp_path)],
        cwd=root,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        report = reader.call("sync", 2, 200.0, timeout=210)
        text, _ = launch.communicate(timeout=100)
    finally:
        launch.kill()
    assert launch.returncode == 0, text[-4000:]
    assert reader.call("values") == {float(rank) for rank in range(8)}
    assert report.step == 2
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(8)]
    assert {tuple(one["numbers"]) for one in told} == {(1, 2)}
    assert len({epoch for one in told for epoch in one["epochs"]}) == 1
    assert all(one["ready"] for one in told)
    assert mx_rl.connect(server.registry).status("p")["floor"] == 2
