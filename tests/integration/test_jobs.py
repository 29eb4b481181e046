"""Two jobs on one cluster that use one policy name: apart unless they name a shared registry."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from tests.support.local_ray import ROOT, eventually, living_actors, local_ray

pytestmark = pytest.mark.timeout(300)  # a busy machine is no failure

# argv: cluster, namespace or "", registry or "", the number that fills the weights, what to make, where to meet, as whom
JOB = """
import sys, time
from pathlib import Path
import ray
cluster, namespace, registry, value, made, folder, me = sys.argv[1:]
ray.init(address=cluster, namespace=namespace or None, log_to_driver=False, logging_level="ERROR")
from mx_rl.ray import RolloutFleet, TrainerGroup
from tests.integration.workers import Echo, Fill

def meet(point):
    Path(folder, f"{point}-{me}").touch()
    end = time.monotonic() + 90
    while len(list(Path(folder).glob(f"{point}-*"))) < 2:
        assert time.monotonic() < end, f"the other job did not come to {point}"
        time.sleep(0.02)

common = dict(policy="policy", num_cpus=0, registry=registry or None)
group = TrainerGroup(Fill, **common) if "trainer" in made else None
fleet = RolloutFleet(Echo, **common) if "rollout" in made else None
meet("made")
for step in range(3):
    if group:
        group.call("train", float(value) + step)
        version = group.publish(step=step).number
        group.wait(version, replicas=0)
    meet(f"published{step}")
    if fleet:
        report = fleet.sync(at_least=step + 1)
        print("saw", report.version, *fleet.call("weigh").popitem()[1][0])
    meet(f"seen{step}")
if group:
    receipt = group.wait(version, replicas=1, timeout=20)
    print("installed by", len(receipt.installed), "latest", group.latest)
meet("done")
for thing in (fleet, group):
    if thing:
        thing.close()
"""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[str]:
    with local_ray(num_cpus=4):
        yield ray.get_runtime_context().gcs_address
        eventually(lambda: not living_actors(), what="the jobs' actors gone")


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, *arguments],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield job
    finally:
        job.kill()
        job.communicate()


def run(cluster: str, folder: Path, *jobs: tuple[str, str, str, str]) -> list[list[str]]:
    """What two jobs printed, run at one time."""
    (one, two) = [(cluster, *job, str(folder), str(number)) for number, job in enumerate(jobs)]
    with started(*one) as first, started(*two) as second:
        told = []
        for job in (first, second):
            out, errors = job.communicate(timeout=150)
            assert job.returncode == 0, errors[-4000:]
            told.append(out.splitlines())
        return told


@pytest.mark.parametrize("namespaces", [("", ""), ("team-a", "team-b")], ids=["anonymous", "named"])
def test_two_jobs_with_one_policy_name_do_not_meet(cluster, tmp_path, namespaces):
    jobs = [(name, "", value, "trainer rollout") for name, value in zip(namespaces, ("100", "200"), strict=True)]
    first, second = run(cluster, tmp_path, *jobs)
    assert first == ["saw 1 100.0", "saw 2 101.0", "saw 3 102.0", "installed by 1 latest 3"]
    assert second == ["saw 1 200.0", "saw 2 201.0", "saw 3 202.0", "installed by 1 latest 3"]


def test_two_jobs_meet_where_both_name_one_registry(cluster, tmp_path):
    trains, rolls = run(
        cluster, tmp_path, ("", "ray://shared", "300", "trainer"), ("team-c", "ray://shared", "0", "rollout")
    )
    assert trains == ["installed by 1 latest 3"]
    assert rolls == ["saw 1 300.0", "saw 2 301.0", "saw 3 302.0"]
