"""A trainer and a rollout that live together: no wire within a process, one copy between two on one host."""

from functools import partial

from tests.support.actors import RolloutRank, TrainerRank
from tests.support.colocated import Colocated
from tests.support.procs import Child

COUNT = 1 << 20


def test_within_a_process_a_version_takes_no_wire_and_others_still_take_theirs(server):
    with Child(Colocated, server.path, COUNT) as both, Child(RolloutRank, server.path, {"w": (COUNT,)}) as other:
        for value in (1.0, 2.0, 3.0):
            report = both.call("cycle", value)
            assert (report.lane, report.source, report.kind) == ("memory", "trainer:0", "full")
        assert not both.call("has_wire")
        number = both.call("publish", 4.0)
        report = other.call("sync", number)
        assert report.lane == "shm"
        assert other.call("values") == {4.0}
        assert both.call("cycle", 5.0).lane == "memory"


NO_COPY = {"stage": "none", "serve": "off"}


def test_within_a_process_live_weights_go_into_live_weights_with_nothing_beside_them(server):
    with Child(Colocated, server.path, COUNT, 0, NO_COPY) as both:
        for value in (1.0, 2.0, 3.0):
            report = both.call("cycle", value)
            assert (report.lane, report.kind) == ("memory", "full")
        assert not both.call("has_wire")
        for memory in both.call("memory"):
            assert memory["live_bytes"] == 4 * COUNT
            assert memory["total_bytes"] - memory["live_bytes"] == memory["headers_bytes"] <= 16 << 10


def test_between_two_processes_of_a_host_live_weights_are_copied_once(server):
    shapes = {"w": (COUNT,)}
    with Child(partial(TrainerRank, slots=0), server.path, shapes) as trainer:
        with Child(partial(RolloutRank, **NO_COPY), server.path, shapes) as rollout:
            for value in (1.0, 2.0, 3.0):
                number = trainer.call("mutate_and_publish", value)
                report = rollout.call("sync", number)
                assert (report.lane, report.kind) == ("shm", "full")
                assert rollout.call("values") == {value}
