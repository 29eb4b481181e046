"""Rollouts that never stop to generate, on a real Ray: every output is of one version, and every version is installed."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest
import ray

from mx_rl.ray import RolloutFleet, TrainerGroup
from tests.integration.workers import Fill
from tests.support.local_ray import local_ray
from tests.support.spinning import AsyncActor, Spinner, ThreadedActor

POLICY = "spin"
VERSIONS = 100

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray(num_cpus=4):
        yield


@pytest.fixture(scope="module")
def trainer():
    with TrainerGroup(Fill, policy=POLICY, num_cpus=0) as group:
        yield group


def publish(trainer: TrainerGroup, value: float) -> int:
    trainer.call("train", value)
    number = trainer.publish(step=int(value))
    assert trainer.wait(number, replicas=0, timeout=30).ready
    return number.number


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_fleet_with_four_calls_at_a_time_plain_and_async_mixes_no_version(trainer, prefetch):
    with RolloutFleet(Spinner, policy=POLICY, concurrency=4, subscriber={"prefetch": prefetch}) as fleet:
        values = {publish(trainer, 1.0): 1.0}
        fleet.sync(at_least=max(values))
        stop, outputs, broken = threading.Event(), {"generate": [], "generate_async": []}, []

        def consume(method: str) -> None:
            items = itertools.takewhile(lambda _: not stop.is_set(), itertools.count())
            try:
                for _, (before, seen), stamp in fleet.stream(method, items, timeout=250):
                    outputs[method].append((before, tuple(seen), stamp))
            except BaseException as exc:
                broken.append(exc)

        readers = [threading.Thread(target=consume, args=(method,)) for method in outputs]
        for reader in readers:
            reader.start()
        try:
            for value in range(2, VERSIONS + 2):
                number = publish(trainer, float(value))
                values[number] = float(value)
                report = fleet.sync(at_least=number, timeout=60)
                assert report.ok, report
                assert report.version == number
        finally:
            stop.set()
            for reader in readers:
                reader.join(60)
        assert not broken
        for found in outputs.values():
            assert len(found) > 4  # it computed all along: on a busy machine few calls fit between the installs
            assert all(before == stamp and seen == (values[stamp],) for before, seen, stamp in found)


@pytest.mark.parametrize("prefetch", [True, pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", [ThreadedActor, AsyncActor])
def test_an_actor_of_ones_own_with_four_calls_at_a_time_mixes_no_version(trainer, kind, prefetch):
    publish(trainer, 1.0)
    actor = ray.remote(kind).options(max_concurrency=6, num_cpus=0).remote(POLICY, prefetch)
    assert ray.get(actor.outcome.remote(), timeout=60)["version"] is None
    calls = [actor.generate.remote() for _ in range(4)]
    following = actor.follow.remote(VERSIONS)
    value = 1.0
    while not ray.wait([following], timeout=0)[0]:
        value += 1.0
        publish(trainer, value)
    installed = ray.get(following, timeout=60)
    ray.get(calls, timeout=60)
    found = ray.get(actor.outcome.remote(), timeout=30)
    ray.get(actor.close.remote(), timeout=30)
    assert not found["faults"]
    assert found["outputs"] > VERSIONS
    assert len(set(installed)) == VERSIONS
    assert sorted(installed) == installed


def test_the_next_version_comes_while_a_single_thread_generates_and_sync_is_the_install_alone(trainer):
    with RolloutFleet(Spinner, policy=POLICY, subscriber={"prefetch": True}) as fleet:
        first = publish(trainer, 1.0)
        fleet.sync(at_least=first)
        for value in (2.0, 3.0):
            expected = first + int(value) - 1
            call = threading.Thread(target=lambda: seen.append(fleet.call("generate_until_staged", expected)))  # noqa: B023
            seen: list = []
            call.start()
            number = publish(trainer, value)
            assert number == expected
            call.join(60)
            assert next(iter(seen[0].values())) == [[value - 1.0]]
            report = next(iter(fleet.sync(at_least=number, timeout=30).reports.values()))
            assert report.version == number
            assert "move" not in report.seconds
            print(f"staged ahead in {report.seconds['ahead']:.4f} s, this sync took {report.seconds['total']:.4f} s")  # noqa: T201 - the two times are what the test shows


def test_a_coroutine_may_sync_inside_its_own_call(trainer):
    with RolloutFleet(Spinner, policy=POLICY, concurrency=4) as fleet:
        fleet.sync(at_least=publish(trainer, 1.0))
        number = publish(trainer, 2.0)
        assert next(iter(fleet.call("sync_inside", number, timeout=60).values())) == [number]


def test_holds_false_leaves_safe_points_to_the_engine(trainer):
    with RolloutFleet(Spinner, policy=POLICY, holds=False) as fleet:
        fleet.sync(at_least=publish(trainer, 1.0))
        assert fleet.map("held_in_a_call", []) == []
        assert next(iter(fleet.call("held_in_a_call").values())) == [0]
    with RolloutFleet(Spinner, policy=POLICY) as fleet:
        assert next(iter(fleet.call("held_in_a_call").values())) == [1]


def test_a_paused_replica_is_reported_as_failed_and_serves_again_after_resume(trainer):
    with RolloutFleet(Spinner, policy=POLICY) as fleet:
        fleet.sync(at_least=publish(trainer, 1.0))
        fleet.call("sleep_now")
        number = publish(trainer, 2.0)
        report = fleet.sync(at_least=number, timeout=10)
        assert not report.installed
        assert all("paused" in text and "resume()" in text for text in report.failed.values())
        fleet.call("wake")
        assert fleet.sync(at_least=number, timeout=30).ok


def test_groups_and_fleets_can_be_awaited(trainer):
    async def main():
        with RolloutFleet(Spinner, policy=POLICY) as fleet:
            await trainer.async_call("train", 5.0)
            version = await trainer.async_publish(step=5)
            assert (await fleet.async_sync(at_least=version)).ok
            assert (await trainer.async_wait(version, timeout=30)).installed
            assert await trainer.async_latest() == await fleet.async_latest() == version.number
            assert [seen for _, seen in await fleet.async_map("generate", range(3))] == [[5.0]] * 3
            found = [result async for _, result, _ in fleet.async_stream("generate", range(3))]
            assert [seen for _, seen in found] == [[5.0]] * 3
            assert next(iter((await fleet.async_call("held_in_a_call")).values())) == [1]

    asyncio.run(main())
