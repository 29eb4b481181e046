"""Every error of the tree, raised in an actor, is caught in the driver by its class, with message and fields."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray import cloudpickle

from mx_rl import errors
from mx_rl.errors import ActorFailed, MxRLError
from mx_rl.ray import RolloutFleet, TrainerGroup
from tests.integration.workers import Echo, Fill
from tests.support.local_ray import local_ray, nothing_left

pytestmark = pytest.mark.timeout(300)  # a busy machine is no failure

MESSAGE = "what broke: expected 1, got 2\nand what to do about it"
FIELDS = {
    "peer": "p-7",
    "rank": 3,
    "version": 12,
    "names": ["a.weight", "b"],
    "missing": [1, 2],
    "requested": [{"CPU": 64.0}],
    "text": "a remote\ntraceback",
    "holder": None,
}


def tree(root: type[MxRLError]) -> list[type[MxRLError]]:
    """The class and all below it, so that one which is added later is tried too."""
    return [root, *(kind for child in root.__subclasses__() for kind in tree(child))]


KINDS = list(dict.fromkeys(tree(MxRLError)))


class Raises:
    def raise_it(self, name: str) -> None:
        raise getattr(errors, name)(MESSAGE, **FIELDS)

    def give_it(self, name: str) -> MxRLError:
        return getattr(errors, name)(MESSAGE, **FIELDS)


class RaisingTrainer(Raises, Fill):
    pass


class RaisingRollout(Raises, Echo):
    pass


@ray.remote(num_cpus=0)
class Own(Raises):
    """An actor of the user's."""

    async def raise_later(self, name: str) -> None:
        self.raise_it(name)

    async def ask(self, other: Any, name: str) -> None:
        await other.raise_it.remote(name)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray(num_cpus=4):
        yield
        nothing_left()


@pytest.fixture(scope="module")
def ways():
    """Name of a way to its call, which raises what the actor raised."""
    own, plain = Own.remote(), ray.remote(num_cpus=0)(Raises).remote()
    with (
        TrainerGroup(RaisingTrainer, policy="errors", world_size=2, num_cpus=0) as group,
        RolloutFleet(RaisingRollout, policy="errors", num_cpus=0) as fleet,
    ):
        fleet.sync(at_least=group.publish(step=1))
        yield {
            "group.call": lambda name: group.call("raise_it", name),
            "fleet.call": lambda name: fleet.call("raise_it", name),
            "fleet.map": lambda name: fleet.map("raise_it", [name]),
            "fleet.stream": lambda name: list(fleet.stream("raise_it", [name])),
            "ray.get, sync actor": lambda name: ray.get(plain.raise_it.remote(name), timeout=30),
            "ray.get, async actor": lambda name: ray.get(own.raise_later.remote(name), timeout=30),
            "ray.get, through a second actor": lambda name: ray.get(own.ask.remote(plain, name), timeout=30),
        }
    ray.kill(own)
    ray.kill(plain)


def whole(error: Any, kind: type[MxRLError]) -> None:
    assert isinstance(error, kind)
    assert isinstance(error, kind.__mro__[1:-1]), "the builtins that it stands for, too"
    assert MESSAGE in str(error)
    for name, value in FIELDS.items():
        assert getattr(error, name) == value, name
    told = error.as_dict()
    assert told["error"] == kind.__name__
    assert told["message"] == MESSAGE
    assert {name: told[name] for name in FIELDS} == FIELDS
    with pytest.raises(AttributeError):
        _ = error.no_such_field


def test_the_tree_is_the_one_that_is_drawn():
    assert len(KINDS) > 30
    assert {kind.__name__ for kind in KINDS} == {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, MxRLError)
    }


@pytest.mark.parametrize(
    "way",
    [
        "group.call",
        "fleet.call",
        "fleet.map",
        "fleet.stream",
        "ray.get, sync actor",
        "ray.get, async actor",
        "ray.get, through a second actor",
    ],
)
def test_every_error_comes_whole(ways, way):
    for kind in KINDS:
        with pytest.raises(kind) as caught:
            ways[way](kind.__name__)
        whole(caught.value, kind)
        if not way.startswith("ray.get"):
            assert type(caught.value) is kind, "an except clause in front of a sibling must not take it"
            assert isinstance(caught.value.__cause__, ActorFailed), "who raised it, and the remote traceback"


def test_every_error_survives_a_second_journey(ways):
    """Caught in one process as Ray hands it over, sent on to the next: a queue, a pool, another actor."""
    plain = ray.remote(num_cpus=0)(Raises).remote()
    for kind in KINDS:
        with pytest.raises(kind) as caught:
            ways["ray.get, sync actor"](kind.__name__)
        whole(cloudpickle.loads(cloudpickle.dumps(caught.value)), kind)
        whole(ray.get(plain.give_it.remote(kind.__name__), timeout=30), kind)
    ray.kill(plain)
