"""A trainer and a rollout that live together: no wire within a process, one copy between two on one host."""

import pytest

from tests.support.actors import RolloutRank
from tests.support.colocated import Colocated
from tests.support.procs import Child
from tests.support.socket_registry import RegistryServer

COUNT = 1 << 20


@pytest.fixture
def server():
    server = RegistryServer()
    yield server
    server.close()


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
