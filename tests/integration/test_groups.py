"""Trainer worlds on a real Ray: seats, calls, failures, restarts, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from mx_rl.errors import ActorFailed, CallTimeout, Closed, InvalidArgument, NotReady, StartTimeout
from mx_rl.ray import Rollout, TrainerGroup
from tests.integration.workers import BrokenBuild, CannotBeRebuilt, Fill, GlooFill, TakesArguments
from tests.support.local_ray import (
    ROOT,
    eventually,
    living_actors,
    living_placement_groups,
    local_ray,
    nothing_left,
    process_gone,
)

pytestmark = pytest.mark.timeout(300)  # a busy machine is no failure


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray(num_cpus=8):
        yield


@pytest.fixture(scope="module")
def pair():
    """Two ranks that most tests share; none of them may kill it."""
    with TrainerGroup(GlooFill, policy="pair", world_size=2) as group:
        yield group


def test_ranks_know_their_seats_and_meet_by_gloo(pair):
    first, second = pair.call("where")
    assert (first["rank"], second["rank"]) == (0, 1)
    assert (first["local_rank"], second["local_rank"]) == (0, 1)
    assert first["world_size"] == second["world_size"] == 2
    assert first["pid"] != second["pid"]
    assert first["device"] == "cpu"
    for row in (first, second):
        assert row["env"]["RANK"] == row["env"]["LOCAL_RANK"] == str(row["rank"])
        assert row["env"]["WORLD_SIZE"] == "2"
    assert first["env"]["MASTER_PORT"] == second["env"]["MASTER_PORT"]
    assert pair.call("sum_of_ranks") == [3.0, 3.0]


def test_publish_returns_rank_0s_version_and_numbers_grow(pair):
    one = pair.publish(step=1, metadata={"loss": 0.5})
    two = pair.publish(step=2)
    assert two.number == one.number + 1
    assert one.step == 1
    assert one.metadata == {"loss": 0.5}
    assert pair.wait(two, replicas=0).ready
    assert pair.latest == two.number


def test_a_raising_rank_fails_the_call_with_its_text_and_the_world_lives_on(pair):
    with pytest.raises(ActorFailed, match="rank 1 of GlooFill") as caught:
        pair.call("divide", 1)
    assert caught.value.rank == 1
    assert "in divide" in caught.value.text
    assert "ZeroDivisionError: rank 1 divides" in caught.value.text
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert pair.call("sum_of_ranks") == [3.0, 3.0]


def test_an_exception_that_cannot_be_rebuilt_comes_as_text(pair):
    with pytest.raises(ActorFailed, match=r"CannotBeRebuilt: out of luck \(7\)") as caught:
        pair.call("cannot_be_rebuilt")
    assert "raise CannotBeRebuilt(7" in caught.value.text
    assert not isinstance(caught.value.__cause__, CannotBeRebuilt)


def test_our_own_errors_keep_class_and_fields(pair):
    with pytest.raises(NotReady) as caught:
        pair.call("not_ready")
    assert type(caught.value) is NotReady
    assert (caught.value.latest, caught.value.missing) == (3, [1])
    assert isinstance(caught.value.__cause__, ActorFailed)
    assert caught.value.__cause__.rank == 0
    assert "nothing yet" in caught.value.__cause__.text


def test_private_and_unknown_methods_are_refused_before_they_are_sent(pair):
    for name in ("_secret", "__init__", "build", "close", "no such", "unknown", "rank"):
        with pytest.raises(InvalidArgument, match=name):
            pair.call(name)


def test_async_methods_and_references(pair):
    assert pair.call("later", 5) == [5, 6]
    refs = pair.call("later", 7, wait=False)
    assert ray.get(refs, timeout=20) == [7, 8]
    assert pair.call("train", ray.put(3.5)) == [3.5, 3.5], "references are resolved as in any call of Ray's"
    assert pair.call("named", method="a", rank=1) == [("a", 1), ("a", 1)]


def test_a_call_that_takes_too_long_names_the_ranks(pair):
    with pytest.raises(CallTimeout, match=r"ranks \[1\] .* not done with sleep in 0.3 s") as caught:
        pair.call("sleep", 1.0, 1, timeout=0.3)
    assert caught.value.missing == [1]
    assert pair.call("sum_of_ranks") == [3.0, 3.0]


def test_status_answers_while_the_ranks_work(pair):
    refs = pair.call("sleep", 2.0, 0, wait=False)
    begun = time.monotonic()
    status = pair.status()
    assert time.monotonic() - begun < 2.0
    assert status["state"] == "running"
    assert status["policy"] == "pair"
    assert status["world"] == pair.world
    assert [row["alive"] for row in status["ranks"]] == [True, True]
    ray.get(refs, timeout=20)


def test_arguments_go_to_init_and_a_rank_killed_from_outside_is_noticed_by_the_next_call():
    with TrainerGroup(TakesArguments, policy="args", kwargs={"start": 4.0, "note": "hello"}) as group:
        assert group.call("told") == [(4.0, "hello rank 0")]
        os.kill(group.call("where")[0]["pid"], signal.SIGKILL)
        with pytest.raises(ActorFailed):
            group.publish()


def test_arguments_that_fit_nowhere_are_refused():
    for user_class, kwargs in (
        (TakesArguments, {"begin": 4.0}),
        (Fill, {"rank": 3}),
        (Fill, {"train": 3}),
        (Rollout, {}),
        (dict, {}),
    ):
        with pytest.raises(InvalidArgument):
            TrainerGroup(user_class, policy="args", kwargs=kwargs)


def test_a_killed_rank_fails_the_call_and_restart_makes_a_new_world():
    # Ranks that ask for nothing still get a place each.
    with TrainerGroup(Fill, policy="restarts", world_size=2, num_cpus=0, kwargs={"start": 1.5}) as group:
        before = group.publish(step=1)
        old_world, pids = group.world, [row["pid"] for row in group.call("where")]
        begun = time.monotonic()
        with pytest.raises(ActorFailed, match=r"rank 1 .* died in die") as caught:
            group.call("die", 1)
        assert time.monotonic() - begun < 10
        assert caught.value.rank == 1
        assert "worker process has died" in caught.value.text
        with pytest.raises(ActorFailed, match="restart"):
            group.publish(step=2)
        status = group.status()
        assert status["state"] == "failed"
        assert [row["alive"] for row in status["ranks"]] == [True, False]

        group.restart()

        assert group.world != old_world
        assert group.status()["state"] == "running"
        assert not set(pids) & {row["pid"] for row in group.call("where")}
        assert group.publish(step=2).number > before.number
        assert process_gone(pids[0])
    eventually(lambda: "restarts" not in str(living_placement_groups()), what="placement groups gone")


@pytest.mark.parametrize("how", ["raise", "die"])
def test_a_failing_build_says_why_and_leaves_nothing_behind(how):
    actors = len(living_actors())
    with pytest.raises(ActorFailed, match="rank 1 of BrokenBuild") as caught:
        TrainerGroup(BrokenBuild, policy="broken", world_size=2, kwargs={"broken_rank": 1, "how": how})
    assert caught.value.rank == 1
    assert ("LookupError: no such checkpoint" in caught.value.text) == (how == "raise")
    eventually(lambda: len(living_actors()) == actors, what="actors gone")
    assert "broken" not in str(living_placement_groups())


def test_an_unschedulable_request_says_what_it_asked_and_what_there_is():
    for request in ({"num_cpus": 64}, {"resources": {"moonstone": 1}}, {"world_size": 2, "placement": "STRICT_SPREAD"}):
        begun = time.monotonic()
        with pytest.raises(StartTimeout, match="no room for") as caught:
            TrainerGroup(Fill, policy="huge", timeout=1.0, **request)
        assert time.monotonic() - begun < 8
        assert len(caught.value.requested) == request.get("world_size", 1)
        assert caught.value.cluster["CPU"] == 8
        assert caught.value.available["CPU"] <= 8
    assert "huge" not in str(living_placement_groups())


def test_wrong_requests_are_refused():
    for request in (
        {"num_cpus": -1},
        {"placement": "NEAR"},
        {"world_size": 0},
        {"resources": {"CPU": 1}},
        {"registry": "memory"},
        {"publisher": {"rank": 1}},
    ):
        with pytest.raises(InvalidArgument):
            TrainerGroup(Fill, policy="wrong", **request)


def test_a_users_placement_group_is_used_and_kept():
    mine = placement_group([{"CPU": 1}], name="mine")
    with TrainerGroup(Fill, policy="placed", placement=mine) as group:
        assert group.call("train", 1.0) == [1.0]
        with pytest.raises(StartTimeout):
            TrainerGroup(Fill, policy="placed", world_size=1, placement=mine, timeout=1.0)
    assert living_placement_groups().count("mine") == 1
    remove_placement_group(mine)


def test_a_group_works_inside_an_actor():
    @ray.remote(num_cpus=0)
    class Loop:
        def run(self) -> list[int]:
            with TrainerGroup(Fill, policy="nested") as group:
                return [group.publish(step=step).number for step in (1, 2)]

    loop = Loop.remote()
    first, second = ray.get(loop.run.remote(), timeout=60)
    assert second == first + 1
    ray.kill(loop)


def test_actors_of_the_users_own_publish_as_a_world():
    @ray.remote
    class Mine:
        def __init__(self, rank: int) -> None:
            import torch

            self.weight = torch.full((16,), float(rank))

        def tensors(self):
            return {"weight": self.weight}

        def hello(self, name: str) -> str:
            return f"hello {name}"

    actors = [Mine.remote(rank) for rank in range(2)]
    with TrainerGroup.from_actors(actors, policy="wrapped", build="tensors") as group:
        assert group.call("hello", "you") == ["hello you", "hello you"]
        one = group.publish(step=1)
        assert group.publish(step=2).number == one.number + 1
        with pytest.raises(InvalidArgument):
            group.call("_hello")
        with pytest.raises(InvalidArgument, match="restart"):
            group.restart()
    assert ray.get(actors[0].hello.remote("me"), timeout=20) == "hello me"
    with pytest.raises(InvalidArgument, match="nothing"):
        TrainerGroup.from_actors(actors, policy="wrapped", build="nothing")
    assert ray.get(actors[1].hello.remote("me"), timeout=20) == "hello me"
    for actor in actors:
        ray.kill(actor)


SCRIPT = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
from mx_rl.ray import RolloutFleet, TrainerGroup
from tests.integration.workers import Echo, Fill
fleet = RolloutFleet(Echo, policy="script", num_cpus=0)
if sys.argv[2] == "exit":
    group = TrainerGroup(Fill, policy="script", num_cpus=0)
    fleet.sync(at_least=group.publish())
else:
    ray.shutdown()
    fleet.close()
    assert not ray.is_initialized()
print("done")
"""


@pytest.mark.parametrize("how", ["exit", "shutdown"])
def test_a_script_that_forgets_to_close_ends_and_leaves_nothing(how):
    actors = len(living_actors())
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", SCRIPT, address, how]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["done"]
    assert "Traceback" not in ended.stderr
    eventually(lambda: len(living_actors()) == actors, what="the script's actors gone")


def test_close_is_idempotent_final_and_leaves_nothing(pair):
    pair.close()
    pair.close()
    with pytest.raises(Closed):
        pair.call("where")
    with pytest.raises(Closed):
        pair.restart()
    assert pair.status()["state"] == "closed"
    nothing_left()
    stored = ray.available_resources()["object_store_memory"] / ray.cluster_resources()["object_store_memory"]
    assert stored == 1.0
