"""What every registry does alike, whatever runs it: one body for all."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mx_rl.config import Options
from mx_rl.records import (
    Answer,
    AnyCommand,
    AwaitFree,
    AwaitInstalled,
    Blobs,
    GetBlobs,
    Installs,
    Nothing,
    Ok,
    PutBlob,
    Resolve,
    Target,
    ViewOf,
)
from mx_rl.registry.base import Registry
from mx_rl.registry.memory import MemoryRegistry
from tests.support.registry_lab import POLICY, Lab, error, source

LEASE_S = 6.0
ROOT = str(Path(__file__).resolve().parents[2])

Open = Callable[[], Registry]
"""One more door to the same registry."""


@pytest.fixture(scope="module")
def ray_up() -> Iterator[None]:
    import ray

    mine = not ray.is_initialized()
    if mine:
        ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": ROOT}})
    yield
    if mine:
        ray.shutdown()


@pytest.fixture(params=["memory", "ray"])
def door(request: pytest.FixtureRequest) -> Iterator[Open]:
    if request.param == "memory":
        registry = MemoryRegistry(lease_s=LEASE_S)
        yield lambda: registry
        return
    request.getfixturevalue("ray_up")
    from mx_rl.registry.ray_actor import RayRegistry

    url = f"ray://test-{secrets.token_hex(6)}"
    options = Options(lease_s=LEASE_S, beat_s=0.5)
    yield lambda: RayRegistry(url, options=options)


def lab_over(registry: Registry, policy: str = POLICY) -> Lab:
    return Lab(lambda command: registry.call(command, timeout=command.wait + 30.0), policy)


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def test_a_version_goes_from_commit_to_installed(door: Open) -> None:
    lab = lab_over(door())
    lab.launch("a0", "a1")
    lab.join("r")
    record = lab.publish("a0", "a1", step=7, metadata=b'{"lr": 1e-6}')
    assert record.number == 1
    assert record.step == 7
    assert record.metadata == b'{"lr": 1e-6}'
    assert lab.install("r") == record
    done = lab.ask(AwaitInstalled(policy=POLICY, number=1))
    assert done == Installs(number=1, ready=True, installed=("r",), failed={}, missing=())
    assert lab.view()["replicas"][0]["ready"]


def test_a_refusal_is_returned_not_raised(door: Open) -> None:
    lab = lab_over(door())
    lab.launch("a0")
    assert error(lab.claim("b0")) == "SeatTaken"


def test_a_waiting_reader_is_woken_by_the_commit_that_makes_the_version_ready(door: Open) -> None:
    lab = lab_over(door())
    lab.launch("a0")
    lab.declare("a0")
    lab.join("r")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lab_over(door()).ask, Resolve(policy=POLICY, replica="r", incarnation="r", wait=25.0))
        until(lambda: waiting.running())
        assert lab.commit("a0").state == "ready"
        target = waiting.result(timeout=20.0)
    assert isinstance(target, Target)
    assert target.record.number == 1


def test_a_wait_ends_with_nothing_when_its_time_is_over(door: Open) -> None:
    lab = lab_over(door())
    lab.launch("a0", "a1")
    lab.commit("a1", 1)
    lab.join("r")
    began = time.monotonic()
    nothing = lab.ask(Resolve(policy=POLICY, replica="r", incarnation="r", wait=0.6))
    assert isinstance(nothing, Nothing)
    assert nothing.missing == (0,)
    assert nothing.staging == 1
    assert time.monotonic() - began >= 0.5


def test_many_waiting_readers_do_not_block_a_commit_and_all_are_woken(door: Open) -> None:
    registry = door()
    lab = lab_over(registry)
    lab.launch("a0")
    lab.declare("a0")
    names = [f"r{i}" for i in range(100)]
    for name in names:
        lab.join(name)
    with ThreadPoolExecutor(len(names)) as pool:
        waiting = [
            pool.submit(registry.call, Resolve(policy=POLICY, replica=name, incarnation=name, wait=50.0), timeout=60.0)
            for name in names
        ]
        until(lambda: all(item.running() for item in waiting))
        assert lab.commit("a0").state == "ready"
        numbers = [item.result(timeout=50.0).result.record.number for item in waiting]
    assert numbers == [1] * len(names)


def test_commands_sent_twice_change_nothing(door: Open) -> None:
    registry = door()

    def twice(command: AnyCommand) -> Answer:
        first = registry.call(command, timeout=30.0)
        again = registry.call(command, timeout=30.0)
        assert again.result == first.result or isinstance(first.result, (Target, ViewOf)), (
            "these tell what time is left"
        )
        return first

    lab = Lab(twice)
    lab.claim("a0", nonce=5)
    lab.join("r")
    lab.commit("a0")
    lab.declare("a0")
    lab.install("r")
    lab.ask(PutBlob(policy=POLICY, key="k", data=b"v", owner="r"))
    view = lab.view()
    assert view["floor"] == 1
    assert view["replicas"][0]["version"] == 1
    assert view["leases"] == []


def test_a_blob_of_megabytes_comes_back_whole(door: Open) -> None:
    lab = lab_over(door())
    data = secrets.token_bytes(3 << 20)
    assert lab.ask(PutBlob(policy=POLICY, key="layout", data=data, owner="r")) == Ok()
    assert lab.ask(GetBlobs(policy=POLICY, keys=("layout", "unknown"))) == Blobs(blobs={"layout": data})


def test_a_silent_replica_is_dropped_after_its_lease_and_ends_the_wait_for_it(door: Open) -> None:
    registry = door()
    lab = lab_over(registry)
    lab.launch("a0")
    lab.join("silent")
    lab.join("r")
    lab.publish("a0")
    lab.install("r")
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.3):
            lab_over(registry).beat("a0", "r")

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        done = lab.ask(AwaitInstalled(policy=POLICY, number=1, wait=25.0))
        assert done.installed == ("r",)
        assert "silent" in done.failed
        assert [item["replica"] for item in lab.view()["replicas"]] == ["r"]
    finally:
        stop.set()
        thread.join()


def test_threads_publish_different_policies_side_by_side(door: Open) -> None:
    registry = door()

    def run(name: str) -> int:
        lab = lab_over(registry, name)
        lab.launch("a0")
        return [lab.publish("a0", k=k).number for k in range(1, 11)][-1]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(run, [f"policy-{i}" for i in range(6)])) == [10] * 6


def test_closing_one_door_leaves_the_others_open(door: Open) -> None:
    one, other = door(), door()
    lab_over(one).launch("a0")
    one.close()
    one.close()
    assert lab_over(other).view()["epoch"]["seats"][0]["incarnation"] == "a0"


def test_a_forgotten_policy_begins_anew_and_one_with_members_is_kept(door: Open) -> None:
    registry = door()
    lab = lab_over(registry)
    lab.launch("a0")
    lab.publish("a0")
    assert not registry.forget(POLICY)  # type: ignore[attr-defined]
    assert lab.view()["floor"] == 1
    until(lambda: registry.forget(POLICY))  # type: ignore[attr-defined]
    assert lab.view()["floor"] == 0


def test_a_stage_is_free_when_its_readers_have_ended(door: Open) -> None:
    lab = lab_over(door())
    lab.launch("a0")
    lab.join("r")
    record = lab.publish("a0", k=1)
    lab.resolve("r")
    lab.publish("a0", k=2)
    waiting = AwaitFree(policy=POLICY, source=source("a0", 1), wait=20.0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lab_over(door()).ask, waiting)
        until(lambda: answer.running())
        lab.ack("r", record)
        assert answer.result(timeout=20.0).leased_by == ()
