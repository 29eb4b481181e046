"""Rollout fleets on a real Ray: one target for all, work that survives deaths, growing, shrinking, and giving up."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import pytest
import ray
from ray.util.placement_group import remove_placement_group

from mx_rl.errors import ActorFailed, CallTimeout, Closed, InvalidArgument, NotReady, StartTimeout
from mx_rl.ray import RolloutFleet, TrainerGroup, dispatch, slot
from tests.integration.workers import Echo, Fill, GlooEcho
from tests.support.local_ray import eventually, living_actors, living_placement_groups, local_ray, nothing_left

POLICY = "fleet"


pytestmark = pytest.mark.timeout(300)  # a busy machine is no failure


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray(num_cpus=4):
        yield


@pytest.fixture(scope="module", autouse=True)
def threads_before():
    return set(threading.enumerate())


@pytest.fixture(scope="module")
def trainer():
    with TrainerGroup(Fill, policy=POLICY, num_cpus=0) as group:
        yield group


@pytest.fixture(scope="module")
def fleet(trainer):
    """Two replicas that most tests share; replicas may die here, and come back."""
    hooks = {"before_install": "before_install"}
    with RolloutFleet(Echo, policy=POLICY, replicas=2, num_cpus=1, subscriber=hooks) as fleet:
        yield fleet


def publish(trainer: TrainerGroup, value: float) -> int:
    trainer.call("train", value)
    return trainer.publish(step=int(value)).number


def names(fleet: RolloutFleet) -> list[str]:
    return sorted(fleet.status()["replicas"])


def ready(fleet: RolloutFleet, number: int) -> dict[str, dict]:
    def look():
        rows = fleet.status()["replicas"]
        return rows if len(rows) == number and all(row["ready"] for row in rows.values()) else None

    return eventually(look, timeout=40, what=f"{number} ready replicas")


def pid_of(fleet: RolloutFleet, name: str) -> int:
    return fleet.status()["replicas"][name]["pids"][0]


def test_nothing_serves_before_it_holds_a_version(trainer, fleet):
    rows = fleet.status()["replicas"]
    assert [row["state"] for row in rows.values()] == ["waiting", "waiting"]
    assert not any(row["ready"] or row["version"] for row in rows.values())
    with pytest.raises(NotReady) as caught:
        fleet.map("echo", [1], timeout=0.5)
    assert sorted(caught.value.missing) == names(fleet)
    with pytest.raises(NotReady):
        fleet.sync(timeout=0.5)
    assert fleet.call("weigh") == {name: [[-1.0]] for name in rows}


def test_sync_installs_one_target_in_every_replica(trainer, fleet):
    number = publish(trainer, 1.0)
    report = fleet.sync(at_least=number)
    assert report.version == number
    assert list(report.installed) == names(fleet)
    assert report.ok
    assert not report.failed
    assert not report.missing
    assert all(each.version == number for each in report.reports.values())
    assert report.as_dict()["num_installed"] == 2
    assert fleet.call("weigh") == {name: [[1.0]] for name in names(fleet)}
    again = fleet.sync()
    assert again.version == number
    assert {each.kind for each in again.reports.values()} == {"none"}
    with pytest.raises(NotReady):
        fleet.sync(at_least=number + 1, timeout=0.5)
    assert fleet.latest == number


def test_map_keeps_the_order_spreads_the_work_and_stamps_the_version(trainer, fleet):
    number = publish(trainer, 2.0)
    fleet.sync(at_least=number)
    results = fleet.map("echo", range(20), kwargs={"seconds": 0.01})
    assert [each["item"] for each in results] == list(range(20))
    assert {each["replica"] for each in results} == set(names(fleet))
    assert all(each["version"] == number and each["weight"] == [2.0] for each in results)
    assert fleet.map("echo", []) == []


def test_stream_takes_endless_items_and_yields_as_results_come(trainer, fleet):
    fleet.sync(at_least=publish(trainer, 2.0))
    stream = fleet.stream("echo", itertools.count(), timeout=60)
    seen = [next(stream) for _ in range(10)]
    stream.close()
    assert {index for index, _, _ in seen} >= set(range(5))
    assert all(result["item"] == index and result["version"] == version for index, result, version in seen)


def test_a_users_error_comes_back_with_its_text(trainer, fleet):
    fleet.sync(at_least=publish(trainer, 2.0))
    with pytest.raises(ActorFailed, match="KeyError: 'apple'") as caught:
        fleet.map("refuse", ["apple"])
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in refuse" in caught.value.text
    with pytest.raises(InvalidArgument):
        fleet.map("_refuse", ["apple"])
    with pytest.raises(InvalidArgument):
        fleet.call("no_such_method")


def test_weights_do_not_change_while_a_call_runs(trainer, fleet):
    fleet.sync(at_least=publish(trainer, 3.0))
    results: list[dict] = []
    calls = threading.Thread(target=lambda: results.extend(fleet.map("echo", range(12), kwargs={"seconds": 0.1})))
    calls.start()
    for value in (4.0, 5.0, 6.0):
        fleet.sync(at_least=publish(trainer, value))
    calls.join(timeout=60)
    assert len(results) == 12
    assert all(each["same"] for each in results)


def test_a_killed_rollout_is_replaced_and_map_loses_nothing(trainer, fleet):
    fleet.sync(at_least=publish(trainer, 6.0))
    before = ready(fleet, 2)
    victim = min(before)
    done = threading.Event()

    def kill() -> None:
        eventually(lambda: fleet.status()["replicas"][victim]["calls"], what="a running call")
        os.kill(before[victim]["pids"][0], signal.SIGKILL)
        done.set()

    threading.Thread(target=kill).start()
    results = fleet.map("echo", range(12), kwargs={"seconds": 0.1})
    assert done.is_set()
    assert [each["item"] for each in results] == list(range(12))
    rows = ready(fleet, 2)
    assert victim not in rows
    receipt = trainer.wait(trainer.latest, timeout=5)
    assert victim not in receipt.installed + receipt.missing, "the registry was told of the death"
    replacement = next(name for name in rows if name not in before)
    assert rows[replacement]["restarts"] == 1
    assert rows[replacement]["version"] == trainer.latest
    assert fleet.call("weigh")[replacement] == [[6.0]]


def test_one_bad_replica_is_reported_and_the_others_install(trainer, fleet):
    fleet.sync(at_least=publish(trainer, 6.0))
    good, bad = sorted(ready(fleet, 2))
    fleet.call("veto_installs", [bad])
    number = publish(trainer, 7.0)
    report = fleet.sync(at_least=number, timeout=10)
    assert report.installed == (good,)
    assert "will not stop" in report.failed[bad]
    assert not report.ok
    assert fleet.call("weigh") == {good: [[7.0]], bad: [[6.0]]}
    fleet.call("veto_installs", [])
    assert fleet.sync(at_least=number).ok


def test_a_stopped_replica_is_missing_gets_no_work_and_comes_back(trainer, fleet):
    fleet.sync(at_least=publish(trainer, 7.0))
    good, stopped = sorted(ready(fleet, 2))
    pid = pid_of(fleet, stopped)
    os.kill(pid, signal.SIGSTOP)
    try:
        report = fleet.sync(at_least=publish(trainer, 8.0), timeout=2)
        assert report.installed == (good,)
        assert report.missing == (stopped,)
        eventually(lambda: fleet.status()["replicas"][stopped]["state"] == "suspect", what="suspicion")
        assert {each["replica"] for each in fleet.map("echo", range(6))} == {good}
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: fleet.status()["replicas"][stopped]["ready"], what="suspicion withdrawn")
    assert fleet.sync(timeout=30).ok


def test_an_item_that_kills_its_replicas_is_not_tried_for_ever(trainer, fleet, monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_DEATHS", 2)
    fleet.sync(at_least=publish(trainer, 8.0))
    with pytest.raises(ActorFailed, match="2 replicas died in this call"):
        fleet.map("die", ["poison"], timeout=60)
    ready(fleet, 2)


def test_the_fleet_grows_and_shrinks_while_training_goes_on(trainer, fleet):
    fleet.sync(at_least=publish(trainer, 9.0))
    first = set(ready(fleet, 2))
    stop = threading.Event()
    published: list[int] = []

    def train() -> None:
        while not stop.is_set():
            published.append(publish(trainer, 9.0))
            stop.wait(0.1)

    training = threading.Thread(target=train)
    training.start()
    try:
        grown = fleet.scale(4, timeout=60)
        assert first < set(grown)
        assert len(grown) == 4
        assert all(row["ready"] for row in fleet.status()["replicas"].values())
        running = [threading.Thread(target=lambda: fleet.map("echo", range(8), kwargs={"seconds": 0.3}))]
        running[0].start()
        eventually(lambda: all(row["calls"] for row in fleet.status()["replicas"].values()), what="a call on each")
        shrunk = fleet.scale(2)
        assert set(shrunk) == first, "the youngest leave first"
        running[0].join(timeout=60)
    finally:
        stop.set()
        training.join(timeout=60)
    assert published == sorted(set(published))
    assert fleet.sync().ok


def test_shrinking_lets_running_calls_end(trainer, fleet):
    fleet.sync(at_least=publish(trainer, 9.0))
    ready(fleet, 2)
    results: list[dict] = []
    calls = threading.Thread(target=lambda: results.extend(fleet.map("echo", range(2), kwargs={"seconds": 1.0})))
    calls.start()
    eventually(lambda: all(row["calls"] for row in fleet.status()["replicas"].values()), what="a call on each")
    (left,) = fleet.scale(1)
    calls.join(timeout=30)
    assert {each["replica"] for each in results} > {left}, (
        "the call on the replica that left was not run again elsewhere"
    )
    fleet.scale(2)


def test_scale_beyond_the_cluster_takes_back_what_did_not_start(fleet):
    before = names(fleet)
    with pytest.raises(StartTimeout):
        fleet.scale(40, timeout=4)
    assert names(fleet) == before
    assert len(living_placement_groups()) == len(before) + 1


def test_calls_that_take_too_long_name_what_is_missing(trainer, fleet):
    fleet.sync(at_least=publish(trainer, 9.0))
    with pytest.raises(CallTimeout) as caught:
        fleet.map("echo", [1], timeout=0.3, kwargs={"seconds": 1.5})
    assert caught.value.missing == [0]
    with pytest.raises(CallTimeout, match="rank 0"):
        fleet.call("echo", 1, 1.5, timeout=0.3)
    assert fleet.map("echo", [2])[0]["item"] == 2


def test_a_place_whose_replicas_cannot_be_built_is_given_up_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(slot, "BACKOFF_S", (0.01, 0.02))
    monkeypatch.setattr(slot, "MAX_FAILURES", 2)
    marker = tmp_path / "broken"
    with RolloutFleet(Echo, policy="giveup", kwargs={"marker": str(marker)}) as fleet:
        marker.touch()
        os.kill(pid_of(fleet, names(fleet)[0]), signal.SIGKILL)
        row = eventually(
            lambda: next((row for row in fleet.status()["replicas"].values() if row["state"] == "failed"), None),
            timeout=40,
            what="giving up",
        )
        assert "forbids it" in row["reason"]
        with pytest.raises(ActorFailed, match="no replica is left"):
            fleet.map("echo", [1])
        marker.unlink()
        fleet.scale(1)
        assert [row["state"] for row in fleet.status()["replicas"].values()] == ["waiting"]
    marker.touch()
    actors = len(living_actors())
    with pytest.raises(ActorFailed, match="forbids it"):
        RolloutFleet(Echo, policy="giveup", kwargs={"marker": str(marker)})
    assert len(living_actors()) == actors


def test_ranks_of_a_replica_meet_install_together_and_are_replaced_together(trainer):
    with RolloutFleet(GlooEcho, policy=POLICY, ranks=2, num_cpus=0, resources=None) as fleet:
        fleet.sync(at_least=publish(trainer, 10.0))
        assert list(fleet.call("sum_of_ranks").values()) == [[3.0, 3.0]]
        ((name, row),) = fleet.status()["replicas"].items()

        # Calls in which ranks wait for one another, and installs that wait for calls, do not wait for one another.
        met: list[tuple] = []

        def meet() -> None:
            met.extend(fleet.call("meet", 0.1, timeout=30)[name] for _ in range(8))

        callers = [threading.Thread(target=meet) for _ in range(2)]
        for caller in callers:
            caller.start()
        while any(caller.is_alive() for caller in callers):
            report = fleet.sync(at_least=publish(trainer, len(met) + 20.0), timeout=10)
            assert report.ok, report
        assert len(met) == 16
        for first, second in met:
            assert first == second, "both ranks computed with one version"
            assert first[0] == first[1], "which did not change during the call"

        os.kill(row["pids"][1], signal.SIGKILL)
        rows = eventually(
            lambda: name not in fleet.status()["replicas"] and ready(fleet, 1), timeout=60, what="a replacement"
        )
        (new,) = rows
        assert not set(rows[new]["pids"]) & set(row["pids"])
        assert fleet.call("sum_of_ranks") == {new: [3.0, 3.0]}


def test_actors_of_the_users_own_are_a_fleet(trainer):
    @ray.remote(num_cpus=0)
    class Mine:
        def __init__(self) -> None:
            import torch

            self.weight = torch.zeros(4096)

        def build(self):
            return {"weight": self.weight}

        def weigh(self, item):
            return item, self.weight.unique().tolist()

    actors = [Mine.remote() for _ in range(2)]
    with RolloutFleet.from_actors(actors, policy=POLICY) as fleet:
        number = publish(trainer, 11.0)
        assert fleet.sync(at_least=number).ok
        assert fleet.map("weigh", range(3)) == [(0, [11.0]), (1, [11.0]), (2, [11.0])]
        ray.kill(actors[0])
        eventually(lambda: fleet.status()["num_ready"] == 1, what="the loss noticed")
        assert fleet.map("weigh", range(2)) == [(0, [11.0]), (1, [11.0])]
    assert ray.get(actors[1].weigh.remote(5), timeout=20) == (5, [11.0])
    ray.kill(actors[1])


def test_a_fleet_works_inside_an_actor_and_ends_with_it(trainer):
    @ray.remote(num_cpus=0)
    class Loop:
        def run(self) -> list[float]:
            self.fleet = RolloutFleet(Echo, policy=POLICY, num_cpus=0, name="nested")
            self.fleet.sync()
            return self.fleet.map("echo", [1])[0]["weight"]

    publish(trainer, 12.0)
    actors = len(living_actors())
    loop = Loop.remote()
    assert ray.get(loop.run.remote(), timeout=60) == [12.0]
    ray.kill(loop)
    eventually(lambda: len(living_actors()) == actors, what="the actor's fleet gone with it")
    (leftover,) = [name for name in living_placement_groups() if name.startswith("nested")]
    remove_placement_group(ray.util.get_placement_group(leftover))  # Ray keeps it to the end of the job


def test_close_leaves_nothing_behind(trainer, fleet, threads_before):
    pids = [pid for row in fleet.status()["replicas"].values() for pid in row["pids"]]
    begun = time.monotonic()
    fleet.close()
    fleet.close()
    assert time.monotonic() - begun < 15
    for use in (
        lambda: fleet.map("echo", [1]),
        lambda: fleet.sync(),
        lambda: fleet.scale(3),
        lambda: fleet.call("weigh"),
    ):
        with pytest.raises(Closed):
            use()
    assert fleet.status()["closed"]
    trainer.close()
    nothing_left()
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), what="processes gone")
    left = [thread for thread in threading.enumerate() if thread.name.startswith("mx-rl")]
    assert not set(left) - threads_before
