"""The command line beside a living cluster, beside a dead one, and beside none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import ray
import torch

import mx_rl
from mx_rl.display import findings_text, policy_text, table
from mx_rl.doctor import Finding
from mx_rl.loopback import measure
from tests.support.local_ray import ROOT, local_ray


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster in which replica r0 runs version 1 of policy "p"."""
    with local_ray(num_cpus=2):
        weights = {"w": torch.ones(64, 32), "b": torch.zeros(32)}
        with mx_rl.Publisher("p", weights, registry="ray") as pub:
            with mx_rl.Subscriber("p", {k: v.clone() for k, v in weights.items()}, registry="ray", replica="r0") as sub:
                pub.publish(step=7)
                assert sub.sync(timeout=60).version == 1
                yield ray.get_runtime_context().gcs_address


def command(*arguments: str, address: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    env.pop("RAY_ADDRESS", None)
    if address:
        env["RAY_ADDRESS"] = address
    return subprocess.run(
        [sys.executable, "-m", "mx_rl.cli", *arguments],
        capture_output=True,
        check=False,
        cwd=ROOT,
        env=env,
        text=True,
        timeout=100,
    )


def test_status_of_a_policy_shows_who_trains_what_is_there_and_who_runs_it(address: str) -> None:
    done = command("status", "p", address=address)
    assert done.returncode == 0, done.stderr
    assert "latest 1" in done.stdout
    assert "1 rank(s), all ranks alive" in done.stdout
    replica = next(line for line in done.stdout.splitlines() if line.split()[:1] == ["r0"])
    assert replica.split()[:4] == ["r0", "1", "yes", "installed"]
    assert done.stderr == "", "Ray is quiet"


def test_status_lists_policies_and_json_says_the_same(address: str) -> None:
    short = command("status", address=address)
    line = next(line for line in short.stdout.splitlines() if line.startswith("p "))
    name, latest, _, trainer, ready, behind, leases = line.split()
    assert [name, latest, trainer, ready, behind, leases] == ["p", "1", "1/1", "1/1", "0", "0"]
    found = json.loads(command("status", "--json", address=address).stdout)
    assert [view["policy"] for entry in found for view in entry["policies"]] == ["p"]
    assert found[0]["policies"][0]["versions"][0]["step"] == 7


def test_status_of_an_unknown_policy_says_so_and_fails(address: str) -> None:
    done = command("status", "other", address=address)
    assert done.returncode == 1
    assert "'other'" in done.stderr


def test_status_makes_no_registry_where_there_is_none(address: str) -> None:
    done = command("status", "--registry", "ray://nobody", address=address)
    assert done.returncode == 1
    assert "no registry runs" in done.stdout
    names = ray.util.list_named_actors(all_namespaces=True)
    assert "nobody" not in [row["name"] for row in names]


def test_a_cluster_that_does_not_answer_is_given_up_in_time() -> None:
    with socket.socket() as taken:  # bound and silent: nobody listens
        taken.bind(("127.0.0.1", 0))
        begun = time.monotonic()
        done = command("status", "--timeout", "3", address=f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 1
    assert "no Ray cluster answers at RAY_ADDRESS" in done.stderr
    assert time.monotonic() - begun < 40


def test_status_of_a_memory_registry_is_refused_with_the_reason() -> None:
    done = command("status", "--registry", "memory")
    assert done.returncode == 1
    assert "cannot be seen from another process" in done.stderr


def test_doctor_moves_bytes_and_finds_cluster_and_registry(address: str) -> None:
    done = command("doctor", "--json", address=address, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    found = {one["name"]: one for one in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert "GB/s" in found["transfer"]["found"]
    assert found["ray cluster"] == {"name": "ray cluster", "state": "ok", "found": address, "cure": ""}
    assert found["registry"]["found"] == "1 answering, 1 policy"
    assert found["cuda allocator"]["state"] == "warn"


def test_doctor_fails_where_no_lane_is_left() -> None:
    done = command("doctor", UCX_TLS="none-such", MXRL_REGISTRY="memory")
    assert done.returncode == 1
    assert "FAIL  transfer" in done.stdout
    assert "mx-rl cannot work here yet: transfer" in done.stdout


def test_a_loopback_over_sockets_says_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = measure(nbytes=1 << 20)
    assert found.lane == "tcp"
    assert found.ucx


def test_findings_end_in_a_verdict_and_cures_stand_below() -> None:
    text = findings_text(
        [
            Finding(name="one", state="ok", found="fine"),
            Finding(name="second", state="warn", found="slow", cure="do this"),
        ]
    )
    assert text.splitlines() == [
        "ok    one     fine",
        "WARN  second  slow",
        "              -> do this",
        "",
        "everything needed works; slower or weaker for second",
    ]


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table(("A", "LONG"), [("wide cell", "x")], indent="") == "A          LONG\nwide cell  x"


def test_a_policy_in_trouble_names_what_is_missing() -> None:
    view = {
        "policy": "p",
        "floor": 3,
        "latest": 3,
        "epoch": {
            "number": 2,
            "world": "w",
            "superseded": False,
            "seats": [{"rank": 0, "alive": True}, {"rank": 1, "alive": False}],
        },
        "pending": {"next": {"size": 2, "claimed": {"0": "x"}}},
        "unclaimed": [1],
        "staging": [{"k": 4, "version": 4, "missing": [1]}],
        "versions": [],
        "replicas": [
            {
                "replica": "r1",
                "version": None,
                "ready": False,
                "state": "failed",
                "reason": "MissingTensors: lm_head",
                "incarnations": ["i"],
                "serves": False,
                "lease_left_s": 12.0,
            }
        ],
        "leases": [{"replica": "r1", "version": 3, "trainer": True, "from": ["r0"], "left_s": 5.0}],
        "hold": None,
        "counts": {"members": 2, "blobs": 1, "blob_bytes": 1500},
    }
    text = policy_text(view)
    assert "rank 1 dead or silent" in text
    assert "world next has 1 of 2 ranks" in text
    assert "version 4 waits for trainer rank 1" in text
    assert "MissingTensors: lm_head" in text
    assert "r1 version 3 from the trainer and r0" in text
