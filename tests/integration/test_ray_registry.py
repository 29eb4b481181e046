"""The Ray registry under real deaths: its process, its makers, its users."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from mx_rl.config import Options
from mx_rl.errors import InvalidArgument, RegistryLost
from mx_rl.records import Ack, Beat, Commit, Leave, Outcome, Resolve, Target, View
from mx_rl.registry.ray_actor import DEFAULT_NAME, KV_NAMESPACE, SHARED_NAMESPACE, RayRegistry
from tests.support.registry_lab import POLICY, Lab, source

ROOT = str(Path(__file__).resolve().parents[2])


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[str]:
    mine = not ray.is_initialized()
    if mine:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": ROOT}},
        )
    yield ray.get_runtime_context().gcs_address
    if mine:
        ray.shutdown()


@pytest.fixture
def registry() -> RayRegistry:
    """One of its own, so that a kill in one test is no other's."""
    return RayRegistry(f"ray://test-{secrets.token_hex(6)}")


def lab_over(registry: RayRegistry, timeout: float = 60.0) -> Lab:
    return Lab(lambda command: registry.call(command, timeout=command.wait + timeout))


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)
    return found


def actor_of(registry: RayRegistry) -> Any:
    name = registry.url.partition("://")[2] or DEFAULT_NAME
    return ray.get_actor(name, namespace=registry.namespace())


def pid_of(registry: RayRegistry) -> int:
    return int(ray.get(actor_of(registry).__ray_call__.remote(lambda self: os.getpid()), timeout=60.0))


def exists(registry: RayRegistry) -> bool:
    try:
        actor_of(registry)
    except ValueError:
        return False
    return True


def test_the_floor_survives_the_kill_of_the_registry_and_a_new_claim_goes_above(registry: RayRegistry) -> None:
    lab = lab_over(registry)
    lab.launch("a0")
    for k in range(1, 6):
        lab.publish("a0", k=k)
    boot = lab.last.boot if lab.last else 0
    os.kill(pid_of(registry), signal.SIGKILL)
    lab.launch("b0", world="v")
    assert lab.last is not None
    assert lab.last.boot != boot
    assert lab.last.floor == 5
    assert lab.publish("b0", world="v").number == 6


def test_members_bring_a_killed_registry_back_to_where_it_was(registry: RayRegistry) -> None:
    lab = lab_over(registry)
    seat = lab.launch("a0", "a1")
    lab.join("r")
    record = lab.publish("a0", "a1")
    lab.install("r")
    os.kill(pid_of(registry), signal.SIGKILL)
    lab.beat("a0", "a1", "r")
    assert lab.last is not None
    assert not lab.last.known, "this is how a member notices"
    asked = {"epoch": seat.epoch, "nonce": seat.nonce, "base": seat.base, "k": 1, "held": record}
    lab.claim("a0", 0, 2, **asked)
    assert lab.claim("a1", 1, 2, **asked) == seat
    lab.join("r")
    lab.ask(
        Ack(policy=POLICY, replica="r", incarnation="r", record=record, state="installed", held=(source("r", 0, 1),))
    )
    lab.join("new")
    target = lab.resolve("new")
    assert target.record == record
    assert target.trainer
    assert [x.replica for x in target.holders] == ["r"]
    lab.declare("a0", 2)
    assert lab.publish("a0", "a1", k=2).number == 2


def test_a_call_under_way_while_the_registry_is_killed_is_answered_by_its_successor(registry: RayRegistry) -> None:
    lab = lab_over(registry)
    lab.launch("a0")
    lab.publish("a0")

    @ray.remote(num_cpus=0)
    def wait_long(url: str) -> int:
        answer = RayRegistry(url).call(
            Resolve(policy=POLICY, replica="r", incarnation="r", at_least=9, wait=45.0), timeout=60.0
        )
        return answer.boot

    boot = lab.last.boot if lab.last else 0
    lab.join("r")
    waiting = wait_long.remote(registry.url)
    pid = pid_of(registry)

    def waits(actor: Any) -> int:
        return int(actor._waits)

    until(lambda: ray.get(actor_of(registry).__ray_call__.remote(waits), timeout=60.0) == 1)
    os.kill(pid, signal.SIGKILL)
    assert ray.get(waiting, timeout=60.0) != boot


def test_a_stopped_registry_is_reported_in_time_and_used_again_when_it_continues(registry: RayRegistry) -> None:
    lab = lab_over(registry)
    lab.launch("a0")
    pid = pid_of(registry)
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(RegistryLost, match=registry.url):
            registry.call(View(policy=POLICY), timeout=1.5)
        assert time.monotonic() - began < 20.0
    finally:
        os.kill(pid, signal.SIGCONT)
    assert lab.publish("a0").number == 1


def test_no_answer_says_ready_before_the_floor_is_written(registry: RayRegistry) -> None:
    """The KV refuses the write: the commit must not be answered, and is answered once the KV takes it."""
    lab = lab_over(registry)
    seat = lab.launch("a0")
    lab.declare("a0")

    def break_kv(actor: Any) -> None:
        def refuse() -> None:
            raise OSError("the KV is not there")

        actor._save, actor._kept = refuse, actor._save

    def mend_kv(actor: Any) -> None:
        actor._save = actor._kept

    handle = actor_of(registry)
    ray.get(handle.__ray_call__.remote(break_kv), timeout=60.0)
    commit = Commit(policy=POLICY, epoch=seat.epoch, nonce=seat.nonce, k=1, rank=0, incarnation="a0", layout="layout0")
    with pytest.raises(RegistryLost, match="KV"):
        registry.call(commit, timeout=1.0)
    ray.get(handle.__ray_call__.remote(mend_kv), timeout=60.0)
    outcome = registry.call(commit, timeout=60.0).result
    assert isinstance(outcome, Outcome)
    assert outcome.state == "ready"
    key = f"floor:{SHARED_NAMESPACE}:{registry._name}:{POLICY}".encode()

    def written(_: Any) -> bool:
        from ray.experimental import internal_kv

        return bool(internal_kv._internal_kv_exists(key, namespace=KV_NAMESPACE))

    assert ray.get(handle.__ray_call__.remote(written), timeout=60.0)


def test_it_works_from_sync_and_async_actors_and_from_their_threads(registry: RayRegistry) -> None:
    lab_over(registry).launch("a0")

    @ray.remote(num_cpus=0)
    class Plain:
        def here(self, url: str) -> int:
            return RayRegistry(url).call(View(policy=POLICY), timeout=60.0).boot

        def in_thread(self, url: str) -> int:
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(1) as pool:
                return pool.submit(self.here, url).result(timeout=60.0)

    @ray.remote(num_cpus=0)
    class Async:
        async def here(self, url: str) -> int:
            return RayRegistry(url).call(View(policy=POLICY), timeout=60.0).boot

        async def in_thread(self, url: str) -> int:
            import asyncio

            answer = await asyncio.to_thread(RayRegistry(url).call, View(policy=POLICY), timeout=60.0)
            return answer.boot

    boots = set()
    for kind in (Plain, Async):
        actor = kind.remote()
        boots |= set(ray.get([actor.here.remote(registry.url), actor.in_thread.remote(registry.url)], timeout=120.0))
        ray.kill(actor)
    assert len(boots) == 1


def test_the_registry_outlives_the_actor_that_made_it(registry: RayRegistry) -> None:
    @ray.remote(num_cpus=0)
    class Maker:
        def make(self, url: str) -> int:
            answer = RayRegistry(url).call(Beat(policy=POLICY, incarnations=()), timeout=60.0)
            return answer.boot

        def pid(self) -> int:
            return os.getpid()

    maker = Maker.remote()
    boot = ray.get(maker.make.remote(registry.url), timeout=60.0)
    os.kill(ray.get(maker.pid.remote(), timeout=60.0), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(maker.pid.remote(), timeout=60.0)
    assert registry.call(View(policy=POLICY), timeout=60.0).boot == boot


def test_it_ends_itself_one_lease_after_its_last_member_left_and_its_floor_stays() -> None:
    registry = RayRegistry(f"ray://test-{secrets.token_hex(6)}", options=Options(lease_s=2.0, beat_s=0.5))
    lab = lab_over(registry)
    lab.launch("a0")
    lab.publish("a0")
    handle = actor_of(registry)
    lab.ask(Leave(policy=POLICY, incarnation="a0"))
    until(lambda: not exists(registry))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(handle.run.remote(b""), timeout=30.0)
    lab.launch("b0", world="v")  # the same door finds, or makes, the next one
    assert lab.publish("b0", world="v").number == 2


def test_it_does_not_end_while_a_member_beats() -> None:
    registry = RayRegistry(f"ray://test-{secrets.token_hex(6)}", options=Options(lease_s=2.0, beat_s=0.5))
    lab = lab_over(registry)
    lab.launch("a0")
    boot = lab.last.boot if lab.last else 0
    end = time.monotonic() + 6.0
    while time.monotonic() < end:
        lab.beat("a0")
        assert lab.last is not None
        assert lab.last.boot == boot
        time.sleep(0.2)


def test_a_job_without_a_namespace_gets_one_that_is_named_by_the_job() -> None:
    default = RayRegistry()
    assert default.namespace() == f"mx_rl-{ray.get_runtime_context().get_job_id()}"
    assert RayRegistry("ray://fleet").namespace() == SHARED_NAMESPACE

    @ray.remote(num_cpus=0)
    def elsewhere() -> str:
        return RayRegistry().namespace()

    assert ray.get(elsewhere.remote(), timeout=60.0) == default.namespace(), "workers of a job find the job's registry"


def test_two_jobs_share_a_registry_by_its_name(registry: RayRegistry, cluster: str) -> None:
    lab = lab_over(registry)
    lab.launch("a0")
    lab.publish("a0")
    script = (
        "import sys, ray\n"
        "from mx_rl.registry.ray_actor import RayRegistry\n"
        "from mx_rl.records import Join, Resolve\n"
        "ray.init(address=sys.argv[1], namespace='other', log_to_driver=False)\n"
        "door = RayRegistry(sys.argv[2])\n"
        "door.call(Join(policy='p', replica='r', rank=0, ranks=1, incarnation='r', layout='', endpoint=''), timeout=60)\n"
        "print('version', door.call(Resolve(policy='p', replica='r', incarnation='r'), timeout=60).result.record.number)\n"
        "print('namespace', RayRegistry().namespace())\n"
    )
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(
        [sys.executable, "-c", script, cluster, registry.url], env=env, capture_output=True, text=True, timeout=120
    )
    assert "version 1" in done.stdout, done.stderr
    assert "namespace other" in done.stdout, "a namespace with a name is the job's own"
    assert isinstance(lab.resolve("r"), Target)


@pytest.mark.parametrize("url", ["ray://", "ray://a/b", "redis://x", "rays"])
def test_a_url_that_names_no_ray_registry_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="ray://name"):
        RayRegistry(url)


def test_bytes_that_are_no_command_are_refused_and_the_registry_lives(registry: RayRegistry) -> None:
    boot = registry.call(View(policy=POLICY), timeout=60.0).boot
    from mx_rl.records import Answer, Refused, decode

    for junk in (b"", b"\x80\x04N.", secrets.token_bytes(64)):
        answer = decode(ray.get(actor_of(registry).run.remote(junk), timeout=60.0), Answer)
        assert isinstance(answer.result, Refused)
        assert answer.result.error == "CorruptRecord"
    assert registry.call(View(policy=POLICY), timeout=60.0).boot == boot
