"""Every memory mode under fire, over NIXL: never torn, never ready while it may be mixed."""

import pytest

from tests.flows.test_memory_modes import DISTINCT
from tests.support.actors import TrainerRank
from tests.support.modes import KillingRollout, ModuleRollout

SHAPES = {"a": (1024, 512), "b": (2048, 1024), "c": (7,)}
FIRE = [(mode, "shm") for mode in DISTINCT] + [
    # Over TCP a run of each takes the same way; one of them always, the others in the long form.
    pytest.param(mode, "tcp", marks=() if mode["stage"] == "none" else pytest.mark.soak)
    for mode in DISTINCT
    if mode["serve"] == "live"
]
READ = [
    pytest.param(mode, "shm", marks=() if "swap" in mode or mode["serve"] == "live" else pytest.mark.soak)
    for mode in DISTINCT
    if mode["serve"] != "off"
]
BIG = {"a": (16384, 1024), "b": (999, 64)}


class Made:
    """A class with keyword arguments, picklable."""

    def __init__(self, kind, **named):
        self.kind = kind
        self.named = named

    def __call__(self, *args):
        return self.kind(*args, **self.named)


@pytest.mark.parametrize("seconds", [2.5, pytest.param(40.0, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("mode", "lane"), FIRE, ids=str)
def test_readers_of_every_mode_against_a_publisher_at_full_speed_never_install_a_torn_version(
    server, children, mode, lane, seconds
):
    """They read from one another too: each is a peer that installs while it is read."""
    env = {"UCX_TLS": "tcp"} if lane == "tcp" else {}
    trainer = children(TrainerRank, server.path, SHAPES, env=env)
    readers = [children(Made(ModuleRollout, **mode), server.path, SHAPES, env=env) for _ in range(3)]
    trainer.call("publish_ready", 1.0)
    trainer.call("start_publishing", 0.02)
    loops = [reader.begin("sync_for", seconds, timeout=seconds + 90) for reader in readers]
    found = [loop.result(seconds + 90) for loop in loops]
    assert trainer.call("stop_publishing", timeout=90) > 5
    for one in found:
        assert one.get("torn", 0) == one.get("fell", 0) == one.get("ready while tainted", 0) == 0, found
        assert one["installed"] > 0, found
        assert mode["stage"] == "none" or "tainted" not in one, found


@pytest.mark.parametrize(("mode", "lane"), READ, ids=str)
def test_readers_of_a_peer_that_installs_all_the_time_never_install_a_torn_version(server, children, mode, lane):
    env = {"UCX_TLS": "tcp"} if lane == "tcp" else {}
    trainer = children(TrainerRank, server.path, SHAPES, env=env)
    holder = children(Made(ModuleRollout, **mode, sources=("trainer",)), server.path, SHAPES, env=env)
    readers = [children(Made(ModuleRollout, sources=("peer",)), server.path, SHAPES, env=env) for _ in range(2)]
    trainer.call("publish_ready", 1.0)
    trainer.call("start_publishing", 0.2)
    loops = [child.begin("sync_for", 2.5, timeout=90) for child in (holder, *readers)]
    found = [loop.result(90) for loop in loops]
    trainer.call("stop_publishing", timeout=90)
    for one in found:
        assert one.get("torn", 0) == one.get("fell", 0) == one.get("ready while tainted", 0) == 0, found
        assert one["installed"] > 0, found
    assert all(one["served_peer"] > 0 for one in found[1:])


@pytest.mark.parametrize(
    ("lane", "mode"),
    [
        ("shm", {"stage": "none", "serve": "live"}),
        ("tcp", {"stage": "device"}),
        pytest.param("shm", {"stage": "device"}, marks=pytest.mark.soak),
        pytest.param("tcp", {"stage": "none", "serve": "live"}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_readers_of_live_tensors_that_change_all_the_time_never_install_a_torn_version(server, children, lane, mode):
    env = {"UCX_TLS": "tcp"} if lane == "tcp" else {}
    quick = {"grace_s": 0.02}
    trainer = children(Made(TrainerRank, slots=0, options=quick), server.path, SHAPES, env=env)
    readers = [children(Made(ModuleRollout, **mode), server.path, SHAPES, env=env) for _ in range(3)]
    trainer.call("publish_ready", 1.0)
    trainer.call("start_publishing", 0.1)
    loops = [reader.begin("sync_for", 4.0, timeout=90) for reader in readers]
    found = [loop.result(90) for loop in loops]
    assert trainer.call("stop_publishing", timeout=90) > 5
    for one in found:
        assert one.get("torn", 0) == one.get("fell", 0) == one.get("ready while tainted", 0) == 0, found
        assert one["installed"] > 0, found


@pytest.mark.parametrize("lane", ["shm", "tcp"])
def test_a_source_killed_in_mid_move_taints_all_ranks_of_a_replica_without_a_stage_and_the_next_sync_heals(
    server, children, lane
):
    env = {"UCX_TLS": "tcp"} if lane == "tcp" else {}
    small = {"window_bytes": 256 << 10}
    trainer = children(Made(TrainerRank, options=small), server.path, BIG, env=env)
    ranks = [
        children(
            Made(KillingRollout, options=small, stage="none", serve="live"), server.path, BIG, "tp", rank, 2, env=env
        )
        for rank in (0, 1)
    ]
    first = trainer.call("publish_ready", 1.0)
    assert [future.result(60) for future in [rank.begin("try_sync", first, 30.0) for rank in ranks]] == ["full", "full"]
    number = trainer.call("publish_ready", 2.0)
    pending = [
        ranks[0].begin("sync_and_kill", number, trainer.pid, 20.0, timeout=60),
        ranks[1].begin("try_sync", number, 20.0, timeout=60),
    ]
    assert [future.result(60) for future in pending] == ["Tainted", "Tainted"]
    assert [rank.call("ready") for rank in ranks] == [False, False]
    successor = children(Made(TrainerRank, options=small), server.path, BIG, 0, 1, "next launch", env=env)
    number = successor.call("publish_ready", 3.0)
    assert [future.result(60) for future in [rank.begin("try_sync", number, 30.0) for rank in ranks]] == [
        "full",
        "full",
    ]
    for rank in ranks:
        assert rank.call("ready")
        assert rank.call("values") == {3.0}
