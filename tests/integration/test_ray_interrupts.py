"""Ctrl-C in every blocking call of groups and fleets: it comes out at once, all can be used on, nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import ray

from tests.support.local_ray import ROOT, local_ray, nothing_left

pytestmark = pytest.mark.timeout(300)  # a busy machine is no failure

MAX_S = 2.0
CASES = {
    "constructors": [
        "group_constructor",
        "group_constructor_without_room",
        "fleet_constructor",
        "group_close",
        "fleet_close",
    ],
    "calls": ["call", "publish", "wait", "sync", "fleet_call", "map", "stream"],
    "sizes": ["scale_up", "scale_down", "restart"],
    "wrapped actors": ["sync_of_wrapped_actors", "group_from_actors", "fleet_from_actors"],
}


LONG = {"sizes", "wrapped actors"}
"""For `make soak`: half a minute or more each."""


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray(num_cpus=4):
        yield
        nothing_left()


@pytest.mark.parametrize(
    "group", [pytest.param(name, marks=pytest.mark.soak if name in LONG else ()) for name in CASES]
)
def test_ctrl_c_comes_out_at_once_and_leaves_everything_in_order(group, tmp_path):
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.interrupted_job", address, str(tmp_path), *CASES[group]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    told = {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, f"{told}\n{done.stderr[-4000:]}"
    assert list(told) == [*CASES[group], "end"]
    for name in CASES[group]:
        assert told[name]["raised"] == "KeyboardInterrupt", told[name]
        assert told[name]["took"] <= MAX_S, told[name]
    assert told["end"] == {"case": "end", "left": {}, "threads": []}
