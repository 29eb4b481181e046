"""On Ray: registry actor and publisher die together, in plain actors that the user wrote; numbers go on above."""

from __future__ import annotations

import os
import secrets
import signal
from typing import Any

import pytest
import ray
import torch

from mx_rl import Publisher, Subscriber
from mx_rl.registry.ray_actor import RayRegistry
from tests.support.local_ray import eventually, local_ray

VERSIONS = 57


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray(num_cpus=4):
        yield


@ray.remote(num_cpus=0)
class Trainer:
    """An actor that knows nothing of mx_rl.ray."""

    def __init__(self, url: str) -> None:
        self.weights = {"w": torch.zeros(1000)}
        self.pub = Publisher("p", self.weights, registry=url)

    def publish(self, count: int) -> int:
        for _ in range(count):
            self.weights["w"].add_(1)
            version = self.pub.publish()
        assert self.pub.wait(version, replicas=0, timeout=60).ready
        return version.number

    def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0)
class Rollout:
    def __init__(self, url: str) -> None:
        self.weights = {"w": torch.zeros(1000)}
        self.sub = Subscriber("p", self.weights, registry=url)

    def sync(self, at_least: int) -> tuple[int, float]:
        report = self.sub.sync(at_least=at_least, timeout=60)
        assert self.weights["w"].unique().numel() == 1
        return report.version, float(self.weights["w"][0])


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=90)


def kill_registry(url: str) -> None:
    registry = RayRegistry(url)
    actor = ray.get_actor(url.partition("://")[2], namespace=registry.namespace())
    pid = get(actor.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not os.path.exists(f"/proc/{pid}"), what="the registry's process is gone")


@pytest.mark.parametrize("first", ["registry", "publisher"])
def test_registry_and_publisher_killed_together_the_next_version_is_above_and_every_subscriber_takes_it(first):
    url = f"ray://test-{secrets.token_hex(6)}"
    trainer, rollouts = Trainer.remote(url), [Rollout.remote(url) for _ in range(2)]
    number = get(trainer.publish.remote(VERSIONS))
    assert number == VERSIONS
    assert [get(rollout.sync.remote(number)) for rollout in rollouts] == [(VERSIONS, float(VERSIONS))] * 2
    pid = get(trainer.pid.remote())
    if first == "registry":
        kill_registry(url)
        os.kill(pid, signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGKILL)
        kill_registry(url)
    successor = Trainer.remote(url)
    again = get(successor.publish.remote(1))
    assert again > VERSIONS
    assert [get(rollout.sync.remote(again)) for rollout in rollouts] == [(again, 1.0)] * 2
    for actor in (successor, *rollouts):
        ray.kill(actor)


def test_the_registry_killed_alone_costs_a_wait_and_no_number():
    url = f"ray://test-{secrets.token_hex(6)}"
    trainer, rollout = Trainer.remote(url), Rollout.remote(url)
    number = get(trainer.publish.remote(3))
    get(rollout.sync.remote(number))
    kill_registry(url)
    assert get(trainer.publish.remote(1)) == number + 1
    assert get(rollout.sync.remote(number + 1)) == (number + 1, float(number + 1))
    kill_registry(url)
    joiner = Rollout.remote(url)
    assert get(joiner.sync.remote(number + 1)) == (number + 1, float(number + 1)), "told again by its members"
    for actor in (trainer, rollout, joiner):
        ray.kill(actor)
