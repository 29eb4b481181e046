"""Which lane is taken to which process."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from mx_rl.arena import Arena
from mx_rl.config import Options
from mx_rl.errors import InvalidArgument, MissingExtra, PeerLost, StaleIncarnation
from mx_rl.records import EndpointRecord
from mx_rl.transport import lanes, make_transport
from mx_rl.transport.lanes import choose_lane
from mx_rl.transport.place import here

ARENA = Arena(1, 64, nonce=7)


def record(**place: object) -> EndpointRecord:
    return EndpointRecord(
        agent="a",
        nonce=7,
        transport="nixl",
        release="1",
        place=msgspec.structs.replace(here(), **place),
        address=b"",
        regions=ARENA.records(),
    )


@pytest.fixture(autouse=True)
def no_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)


def test_processes_that_see_each_other_share_memory() -> None:
    assert choose_lane(record(), Options(), peer_rdma=False).name == "shm"
    assert not choose_lane(record(), Options(), peer_rdma=False).writes
    assert choose_lane(record(), Options(lane="write"), peer_rdma=False).writes


@pytest.mark.parametrize(
    ("tls", "lane"),
    [("all", "shm"), ("tcp", "tcp"), ("tcp,cma", "shm"), ("posix,tcp", "tcp"), ("^cma", "tcp"), ("^ib", "shm")],
)
def test_ucx_tls_is_obeyed(monkeypatch: pytest.MonkeyPatch, tls: str, lane: str) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    assert choose_lane(record(), Options(), peer_rdma=False).name == lane


@pytest.mark.parametrize("place", [{"boot": "other"}, {"pid_ns": "other"}, {"boot": "other", "pid_ns": "other"}])
def test_windows_are_requested_from_other_hosts_and_containers(place: dict[str, str]) -> None:
    lane = choose_lane(record(**place), Options(), peer_rdma=False)
    assert lane == lanes.Lane(name="tcp", writes=True, fenced=True)
    assert not choose_lane(record(**place), Options(lane="read"), peer_rdma=False).writes


def test_rdma_is_taken_where_both_sides_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "rdma_devices", lambda: ("mlx5_0",))
    far = record(boot="other")
    lane = choose_lane(far, Options(require_rdma=True), peer_rdma=True)
    assert (lane.name, lane.writes) == ("rdma", False)
    assert choose_lane(far, Options(), peer_rdma=False).name == "tcp"
    monkeypatch.setenv("UCX_TLS", "tcp")
    with pytest.raises(InvalidArgument, match="require_rdma"):
        choose_lane(far, Options(require_rdma=True), peer_rdma=True)
    assert choose_lane(record(), Options(require_rdma=True), peer_rdma=True).name == "tcp"  # the same host


def test_a_forbidden_copy_is_noticed_named_and_gone_around(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidding:
        def process_vm_readv(self, *_: object) -> int:
            import ctypes

            ctypes.set_errno(1)
            return -1

    monkeypatch.setattr(lanes, "_libc", Forbidding)
    lanes._warn_forbidden.cache_clear()
    with pytest.warns(RuntimeWarning, match="process_vm_readv"):
        lane = choose_lane(record(), Options(), peer_rdma=False)
    assert lane.name == "tcp"
    assert lane.writes


def test_a_process_that_is_gone_or_another_one_is_noticed_before_anything_is_connected() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(PeerLost):
        choose_lane(record(pid=child.pid), Options(), peer_rdma=False)
    with pytest.raises(StaleIncarnation):
        choose_lane(msgspec.structs.replace(record(), nonce=8), Options(), peer_rdma=False)


def test_a_missing_nixl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(MissingExtra, match="nixl"):
        make_transport(Options(transport="nixl"))
    assert make_transport(Options(transport="memory")).name == "memory"


def test_place_follows_a_fork() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, str(here().pid).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert int(os.read(read, 20)) == pid
