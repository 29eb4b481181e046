"""The faults that a MemoryNetwork plays, and the framing of messages."""

from __future__ import annotations

import numpy as np
import pytest

from mx_rl.arena import Arena
from mx_rl.config import Options
from mx_rl.errors import Closed, CorruptRecord, InvalidArgument, PeerLost
from mx_rl.records import EndpointRecord
from mx_rl.transport.base import Region, Windows
from mx_rl.transport.memory import MemoryNetwork, MemoryTransport
from mx_rl.transport.place import here
from mx_rl.transport.wire import REQUEST, USER, Inbox, Outbox

NBYTES = 1 << 16


class Pair:
    def __init__(self, *, fence: bool = True) -> None:
        self.network = MemoryNetwork(fence=fence)
        self.transport = MemoryTransport(Options(), network=self.network)
        self.source, self.stage = Arena(1, NBYTES, nonce=7), Arena(1, NBYTES, nonce=8)
        self.server = self.transport.serve("source", self.source.regions())
        self.receiver = self.transport.receive("reader", self.stage.regions())
        self.record = EndpointRecord(
            agent="source",
            nonce=7,
            transport="memory",
            release="1",
            place=here(),
            address=self.server.address,
            regions=self.source.records(),
        )
        self.link = self.receiver.connect(self.record)
        rows = np.array([[self.stage.address(0), self.source.address(0), NBYTES]], dtype=np.int64)
        self.route = self.link.route(0, Windows(runs=rows, starts=np.array([0, 1]), needs=np.array([1])))
        self.generation = self.source.headers[0].begin()
        self.source.blocks[0].fill_(5)
        self.source.headers[0].confirm(1)

    @property
    def arrived(self) -> bool:
        return bool((self.stage.blocks[0] == 5).all())


def test_late_bytes_of_a_stalled_peer_really_arrive_after_the_flow_was_given_up() -> None:
    pair = Pair(fence=False)
    rows = np.array([[pair.stage.address(0), pair.source.address(0), NBYTES]], dtype=np.int64)
    route = pair.link.route(0, Windows(runs=rows, starts=np.array([0, 1]), needs=np.array([0])))
    pair.network.stall("source")
    flow = route.start(pair.generation, [0])
    assert flow.step() == []
    assert not flow.close() and not pair.receiver.settled and not pair.arrived
    assert pair.receiver.close() is False
    pair.network.release("source")
    assert pair.arrived and pair.receiver.settled


def test_closing_the_receiver_is_a_fence_unless_it_is_told_not_to_be() -> None:
    pair = Pair()
    rows = np.array([[pair.stage.address(0), pair.source.address(0), NBYTES]], dtype=np.int64)
    route = pair.link.route(0, Windows(runs=rows, starts=np.array([0, 1]), needs=np.array([0])))
    pair.network.stall("source")
    flow = route.start(pair.generation, [0])
    flow.step()
    assert pair.receiver.close() is True
    pair.network.release("source")
    assert not pair.arrived
    with pytest.raises(Closed):
        flow.step()
    with pytest.raises(Closed):
        pair.receiver.connect(pair.record)


def test_a_lost_peer_is_peer_lost_wherever_it_is_met() -> None:
    pair = Pair()
    flow = pair.route.start(pair.generation, [0])
    pair.network.lose("source")
    for call in (flow.step, lambda: pair.link.header(0, timeout=1.0), lambda: pair.link.send(b"x")):
        with pytest.raises(PeerLost):
            call()
    assert flow.close()


def test_a_closed_server_is_lost_to_its_readers() -> None:
    pair = Pair()
    pair.server.close()
    pair.server.close()
    with pytest.raises(PeerLost):
        pair.receiver.connect(pair.record)


def test_a_header_that_does_not_come_in_time_is_peer_lost() -> None:
    pair = Pair()
    pair.network.delay("source", 60.0)
    with pytest.raises(PeerLost):
        pair.link.header(0, timeout=0.05)


def test_names_are_never_reused_and_device_memory_is_refused() -> None:
    pair = Pair()
    with pytest.raises(InvalidArgument):
        pair.transport.serve("source", [])
    with pytest.raises(InvalidArgument):
        pair.transport.receive("gpu", [Region(address=0, nbytes=1, device="cuda:0")])


def test_frames_come_out_in_the_order_they_went_in_whatever_the_lane_does() -> None:
    outbox, inbox = Outbox(), Inbox()
    frames = [outbox.frame(USER if number % 2 else REQUEST, b"%d" % number) for number in range(6)]
    got = [body for at in (2, 1, 0, 5, 3, 4) for _, body in inbox.take(frames[at])]
    assert got == [b"%d" % number for number in range(6)]


def test_a_new_session_starts_afresh_and_frames_of_an_old_one_are_dropped() -> None:
    old, inbox = Outbox(), Inbox()
    first, late = old.frame(USER, b"a"), old.frame(USER, b"late")
    assert inbox.take(first) == [(USER, b"a")]
    assert inbox.take(Outbox().frame(USER, b"b")) == [(USER, b"b")]
    assert inbox.take(late) == []


@pytest.mark.parametrize("frame", [b"", b"x" * 5, b"y" * 40, Outbox().frame(USER, b"")[:-1]])
def test_what_is_no_frame_is_a_corrupt_record(frame: bytes) -> None:
    with pytest.raises(CorruptRecord):
        Inbox().take(frame)


def test_frames_far_ahead_or_repeated_are_refused() -> None:
    outbox = Outbox()
    frames = [outbox.frame(USER, b"") for _ in range(2000)]
    with pytest.raises(CorruptRecord):
        Inbox().take(frames[1500])
    inbox = Inbox()
    inbox.take(frames[0])
    with pytest.raises(CorruptRecord):
        inbox.take(frames[0])
    with pytest.raises(InvalidArgument):
        outbox.frame(USER, bytes((1 << 20) + 1))
