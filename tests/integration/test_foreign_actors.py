"""Actors that the library has never seen, in placement groups of their user's: wrapped, failing, and left alive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mx_rl.errors import ActorFailed, InvalidArgument, StartTimeout
from mx_rl.ray import RolloutFleet, TrainerGroup
from mx_rl.records import View
from mx_rl.registry import open_registry
from tests.integration.workers import Echo, Fill
from tests.support.local_ray import ROOT, eventually, living_actors, living_placement_groups, local_ray, nothing_left

pytestmark = pytest.mark.timeout(300)  # a busy machine is no failure


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray(num_cpus=8):
        yield
        nothing_left()


SCRIPT = '''
import asyncio, sys, threading
import ray, torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from mx_rl.ray import RolloutFleet, TrainerGroup

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")


class Plain:
    __slots__ = ("inside", "weight", "worst")

    def __init__(self, value):
        self.weight = torch.full((64,), float(value))
        self.inside = self.worst = 0

    def tensors(self):
        return {"weight": self.weight}

    def fill(self, value):
        self.weight.fill_(value)

    def weigh(self, item=None):
        return item, self.weight.unique().tolist()


class Threaded(Plain):
    """Its calls run beside one another."""

    __slots__ = ("barrier",)

    def __init__(self, value):
        super().__init__(value)
        self.barrier = threading.Barrier(2)

    def meet(self):
        return self.barrier.wait(20) in (0, 1)


class Async(Plain):
    """What it makes in its loop belongs there; its methods never run beside one another but where they await."""

    __slots__ = ("engine", "lock", "loop")

    def __init__(self, value):
        super().__init__(value)
        self.loop = asyncio.get_running_loop()
        self.lock = asyncio.Lock()
        self.engine = asyncio.Queue()
        self.loop.create_task(self._serve())

    async def _serve(self):
        while True:
            item, answer = await self.engine.get()
            answer.set_result(Plain.weigh(self, item))

    async def tensors(self):
        async with self.lock:
            await asyncio.sleep(0.01)
            assert asyncio.get_running_loop() is self.loop
            return {"weight": self.weight}

    async def weigh(self, item=None):
        answer = self.loop.create_future()
        await self.engine.put((item, answer))
        return await answer

    def fill(self, value):
        assert asyncio.get_running_loop() is self.loop
        self.weight.fill_(value)


for kind, concurrency in ((Plain, 1), (Threaded, 4), (Async, 100)):
    room = placement_group([{"CPU": 1}] * 3, name="theirs")
    place = [PlacementGroupSchedulingStrategy(room, bundle) for bundle in range(3)]
    remote = ray.remote(num_cpus=1)(kind)
    trainer, *rollouts = [
        remote.options(scheduling_strategy=each, max_concurrency=concurrency).remote(-number)
        for number, each in enumerate(place)
    ]
    policy = kind.__name__.lower()
    with (
        TrainerGroup.from_actors([trainer], policy=policy, build="tensors") as group,
        RolloutFleet.from_actors(rollouts, policy=policy, build="tensors") as fleet,
    ):
        for step in (1, 2, 3):
            group.call("fill", step)
            report = fleet.sync(at_least=group.publish(step=step))
            assert report.ok, report
            assert fleet.map("weigh", range(5)) == [(item, [float(step)]) for item in range(5)], step
            own = ray.get([rollout.weigh.remote("mine") for rollout in rollouts], timeout=30)
            assert own == [("mine", [float(step)])] * 2
        assert len(group.wait(3, timeout=20).installed) == 2
        assert {version for _, _, version in fleet.stream("weigh", range(4))} == {3}
        if kind is Threaded:
            assert ray.get([trainer.meet.remote(), trainer.meet.remote()], timeout=30) == [True, True]
    assert ray.get(trainer.weigh.remote("alive"), timeout=30) == ("alive", [3.0])
    print(kind.__name__, flush=True)
    for actor in (trainer, *rollouts):
        ray.kill(actor)
    remove_placement_group(room)
'''


def test_actors_of_the_drivers_main_in_their_own_placement_groups_plain_threaded_and_async():
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, address],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["Plain", "Threaded", "Async"]
    nothing_left()


@ray.remote(num_cpus=0, max_restarts=2)
class Fragile:
    """An actor of the user's whose build may fail."""

    def __init__(self, how: str = "") -> None:
        self.how = how

    def tensors(self) -> dict[str, Any]:
        if self.how == "raise":
            raise LookupError("no such checkpoint")
        if self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "nothing":
            return None
        import torch

        return {"weight": torch.zeros(64)}

    def mend(self) -> int:
        self.how = ""
        return os.getpid()


CASES = {"raise": "LookupError: no such checkpoint", "die": "died in build"}


@pytest.mark.parametrize("how", list(CASES))
@pytest.mark.parametrize("side", ["trainer", "rollout"])
def test_a_failing_build_of_an_actor_of_the_users_is_one_error_and_leaves_the_others(side, how):
    sound, broken = Fragile.options(max_restarts=0).remote(), Fragile.options(max_restarts=0).remote(how)
    before = ray.get(sound.mend.remote(), timeout=30)
    kind = TrainerGroup if side == "trainer" else RolloutFleet
    actors = [sound, broken] if side == "trainer" else [[sound, broken]]
    begun = time.monotonic()
    with pytest.raises(ActorFailed, match=CASES[how]) as caught:
        kind.from_actors(actors, policy="fragile", build="tensors", timeout=60)
    assert time.monotonic() - begun < 20
    assert caught.value.rank == 1
    if how == "raise":
        assert isinstance(caught.value.__cause__, LookupError)
        ray.get(broken.mend.remote(), timeout=30)
        with kind.from_actors(actors, policy="fragile", build="tensors", timeout=60):
            assert ray.get(sound.mend.remote(), timeout=30) == before, "the same process: it can be wrapped again"
    assert ray.get(sound.mend.remote(), timeout=30) == before
    assert not living_actors()
    for actor in (sound, broken):
        ray.kill(actor)


def test_a_build_that_returns_no_tensors_says_so():
    actor = Fragile.remote("nothing")
    with pytest.raises(InvalidArgument, match="NoneType"):
        TrainerGroup.from_actors([actor], policy="fragile", build="tensors", timeout=60)
    ray.kill(actor)


def test_an_actor_that_ray_restarted_says_that_it_must_be_wrapped_again():
    actor = Fragile.remote()
    with TrainerGroup.from_actors([actor], policy="restarted", build="tensors") as group:
        first = group.publish()
        os.kill(ray.get(actor.mend.remote(), timeout=30), signal.SIGKILL)

        def back() -> bool:
            try:
                return bool(ray.get(actor.mend.remote(), timeout=5))
            except ray.exceptions.RayError:
                return False

        eventually(back, what="the actor restarted by Ray")
        with pytest.raises(ActorFailed, match="from_actors"):
            group.publish()
    with TrainerGroup.from_actors([actor], policy="restarted", build="tensors") as group:
        assert group.publish().number > first.number
    ray.kill(actor)


def test_an_actor_that_is_wrapped_again_finds_the_new_subscriber_and_the_old_one_is_closed():
    """As where the driver of a detached actor died without a word, and the next one wraps it."""

    class Keeps:
        def tensors(self) -> dict[str, Any]:
            import torch

            return {"weight": torch.zeros(64)}

        def where(self) -> tuple[str, bool]:
            return self.subscriber.policy, self.subscriber.ready

    actor = ray.remote(num_cpus=0)(Keeps).remote()
    first = RolloutFleet.from_actors([actor], policy="first", build="tensors")
    with RolloutFleet.from_actors([actor], policy="second", build="tensors") as second:
        assert second.call("where").popitem()[1] == [("second", False)]
        assert ray.get(actor.where.remote(), timeout=30) == ("second", False)
        members = json.loads(open_registry("ray").call(View(policy="first"), timeout=30).result.json)
        assert not members["replicas"], "the old subscriber has left"
        first.close()  # which may happen at the exit of the driver, too
        with pytest.raises(InvalidArgument, match="no method 'lost'"):
            RolloutFleet.from_actors([actor], policy="third", build="lost")
        assert second.call("where").popitem()[1] == [("second", False)], "neither of them ended what is not theirs"
    ray.kill(actor)


def test_one_actor_is_trainer_and_rollout_of_one_policy():
    actor = Fragile.remote()
    with (
        TrainerGroup.from_actors([actor], policy="both", build="tensors") as group,
        RolloutFleet.from_actors([actor], policy="both", build="tensors") as fleet,
    ):
        with pytest.raises(TimeoutError):
            fleet.sync(timeout=0.5)  # and the wait for a first version does not hold its publish up
        assert fleet.sync(at_least=group.publish(timeout=10), timeout=20).ok
    ray.kill(actor)


def test_a_fleet_without_room_says_what_it_asked_and_what_there_is():
    for request in (
        {"num_cpus": 64},
        {"num_gpus": 1},
        {"resources": {"moonstone": 2}},
        {"replicas": 3, "num_cpus": 4},
        {"ranks": 2, "num_cpus": 5},
    ):
        begun = time.monotonic()
        with pytest.raises(StartTimeout, match="no room for") as caught:
            # Two of three replicas have room, and must not run out of time before the third does.
            RolloutFleet(Echo, policy="huge", timeout=10.0 if "replicas" in request else 1.0, **request)
        assert time.monotonic() - begun < 25
        assert caught.value.requested == [caught.value.requested[0]] * request.get("ranks", 1)
        assert caught.value.cluster["CPU"] == 8
        assert "CPU" not in caught.value.available or caught.value.available["CPU"] <= 8
    nothing_left()


@pytest.mark.soak
def test_a_users_placement_group_that_is_too_small_says_so_and_stays():
    room = placement_group([{"CPU": 1}] * 2, name="small")
    for make in (
        lambda: TrainerGroup(Fill, policy="small", world_size=3, placement=room, timeout=4.0),
        lambda: RolloutFleet(Echo, policy="small", replicas=3, placement=room, timeout=4.0),
        lambda: RolloutFleet(Echo, policy="small", num_cpus=2, placement=room, timeout=2.0),
    ):
        begun = time.monotonic()
        with pytest.raises(StartTimeout, match=r"no room for .* given placement group") as caught:
            make()
        assert time.monotonic() - begun < 15
        assert caught.value.requested
        assert caught.value.available
        eventually(lambda: not living_actors(), what="actors gone")
    with RolloutFleet(Echo, policy="small", replicas=2, placement=room) as fleet:
        with pytest.raises(StartTimeout, match="no room for") as caught:
            fleet.scale(3, timeout=2.0)
        assert caught.value.requested == [{"CPU": 1}]
        assert caught.value.available["CPU"] == 6
        assert len(fleet.status()["replicas"]) == 2
    assert living_placement_groups() == ["small"]
    remove_placement_group(room)


def test_an_unschedulable_actor_of_the_users_is_named(cluster):
    lost = Fragile.options(num_cpus=64).remote()
    for wrap in (TrainerGroup.from_actors, RolloutFleet.from_actors):
        begun = time.monotonic()
        with pytest.raises(StartTimeout, match=r"ranks \[0\] did not answer in 1 s.*no room") as caught:
            wrap([lost], policy="lost", build="tensors", timeout=1.0)
        assert time.monotonic() - begun < 4
        assert caught.value.available["CPU"] <= 8
    ray.kill(lost)


def test_a_strategy_of_the_users_reaches_one_bundle():
    """Actors that sit in bundles of one placement group, wrapped as the ranks of one replica."""
    room = placement_group([{"CPU": 1}] * 3, strategy="PACK", name="strategy")
    place = [PlacementGroupSchedulingStrategy(room, bundle) for bundle in range(3)]
    trainer, *ranks = [Fragile.options(num_cpus=1, scheduling_strategy=each).remote() for each in place]
    with (
        TrainerGroup.from_actors([trainer], policy="bundles", build="tensors") as group,
        RolloutFleet.from_actors([ranks], policy="bundles", build="tensors") as fleet,
    ):
        report = fleet.sync(at_least=group.publish())
        assert report.ok
        assert len(report.installed) == 1
    for actor in (trainer, *ranks):
        ray.kill(actor)
    remove_placement_group(room)


def test_an_older_group_neither_ends_nor_uses_what_a_newer_one_opened_in_the_same_actors():
    import torch

    class Own:
        def build(self):
            return {"weight": torch.ones(8)}

    actor = ray.remote(num_cpus=1)(Own).remote()
    older = TrainerGroup.from_actors([actor], policy="again")
    with TrainerGroup.from_actors([actor], policy="again") as newer:
        with pytest.raises(ActorFailed, match="another group"):
            older.publish()
        with pytest.raises(InvalidArgument):  # its clean-up reaches nothing either
            TrainerGroup.from_actors([actor], policy="again", build="nothing")
        older.close()
        assert newer.wait(newer.publish(step=1), replicas=0, timeout=20).ready
    ray.kill(actor)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_every_step_of_an_export_runs_on_the_loop_of_an_async_actor(kind):
    import asyncio

    import torch

    class Own:
        def __init__(self, kind):
            self.loop, self.kind = asyncio.get_running_loop(), kind

        async def build(self):
            return None

        def export(self):
            return self._async() if self.kind == "async" else self._plain()

        def _plain(self):
            for index in range(3):
                assert asyncio.get_running_loop() is self.loop
                yield f"w{index}", torch.full((8,), float(index))

        async def _async(self):
            for pair in self._plain():
                await asyncio.sleep(0)
                yield pair

    actor = ray.remote(num_cpus=1)(Own).remote(kind)
    with TrainerGroup.from_actors([actor], policy=f"exports-{kind}") as group:
        assert group.wait(group.publish(step=1), replicas=0, timeout=20).ready
    ray.kill(actor)


def test_a_wait_for_a_trainer_that_does_not_answer_returns_and_names_it():
    import torch

    class Own:
        def build(self):
            return {"weight": torch.ones(8)}

        def sleep(self, seconds):
            time.sleep(seconds)

    actor = ray.remote(num_cpus=1)(Own).remote()
    group = TrainerGroup.from_actors([actor], policy="silent")
    version = group.publish(step=1)
    busy = actor.sleep.remote(600)
    begun = time.monotonic()
    receipt = group.wait(version, timeout=0.5)
    assert time.monotonic() - begun < 60
    assert (receipt.version, receipt.ready) == (version.number, False)
    assert "rank 0" in receipt.missing[0]
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(busy, timeout=30)
    group.close()
