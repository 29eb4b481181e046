"""How long calls wait: for the first byte, without a byte, on the whole; and for a registry that is away."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from mx_rl import Publisher, Shard, Subscriber
from mx_rl.errors import (
    IncompleteVersion,
    InvalidArgument,
    MxRLError,
    NotReady,
    Paused,
    PeerLost,
    RegistryLost,
    VersionAborted,
)
from mx_rl.patience import Cancelled, Patience
from mx_rl.records import Hello
from tests.support.local import FAST, together
from tests.support.until import until

PATIENT = replace(FAST, stall_s=5.0, beat_s=0.5)
COUNT = 40_000  # forty windows, of which four are posted at a time


@pytest.fixture
def pub(registry):
    with Publisher("p", {"w": torch.ones(COUNT)}, registry=registry, options=PATIENT) as pub:
        yield pub


def subscriber(registry, **named):
    return Subscriber("p", {"w": torch.zeros(COUNT)}, registry=registry, options=PATIENT, **named)


@pytest.fixture
def sub(registry):
    with subscriber(registry) as sub:
        yield sub


@pytest.fixture
def slow(pub, sub):
    """Reads of the publisher take 0.1 s each, a header after every four windows: more than a second for the whole."""
    pub.wait(pub.publish(), replicas=0)
    network, agent = sub._endpoint.transport.network, pub._ring.served.name
    network.delay(agent, 0.1)
    yield
    network.delay(agent, 0.0)


def test_what_makes_progress_goes_on_beyond_its_timeout(slow, sub):
    report = sub.sync(timeout=0.8)
    assert report.kind == "full"
    assert report.seconds["move"] > 0.8


def test_a_deadline_is_the_end_of_the_whole_whatever_moves(slow, sub):
    with pytest.raises((PeerLost, NotReady)):
        sub.sync(timeout=5, deadline=0.4)
    assert sub.version is None


def test_a_source_that_moves_nothing_is_left_after_the_stall_timeout_of_the_call(pub, sub):
    pub.publish()
    network = sub._endpoint.transport.network
    agent = pub._ring.served.name
    network.stall(agent)
    begun = time.monotonic()
    try:
        with pytest.raises(MxRLError):
            sub.sync(timeout=0.1, stall_timeout=0.05)
        assert time.monotonic() - begun < PATIENT.stall_s, "not after the stall time of the options"
        staged = []
        waiting = threading.Thread(target=lambda: staged.append(sub.sync(timeout=10, stall_timeout=60)))
        waiting.start()
        threading.Event().wait(0.5)
    finally:
        network.release(agent)
    waiting.join(20)
    assert staged[0].retries == 0, "nor before the stall time of the call"


def test_a_rank_that_waits_for_a_slower_one_goes_on_as_long_as_that_makes_progress(registry, pub, slow):
    live = torch.zeros(COUNT)
    cuts = [(0, 100), (100, COUNT)]
    subs = [
        Subscriber(
            "p",
            {"w": Shard(live[low:high], shape=(COUNT,), offset=(low,))},
            registry=registry,
            options=PATIENT,
            replica="tp",
            rank=rank,
            world_size=2,
        )
        for rank, (low, high) in enumerate(cuts)
    ]
    reports = together(*[lambda sub=sub: sub.sync(timeout=0.6) for sub in subs])
    assert [getattr(report, "kind", report) for report in reports] == ["full", "full"]
    assert live.eq(1).all()
    waited, paused = (reports[0].seconds[name] for name in ("ranks", "pause"))
    assert waited > 0.6 > paused, "rank 0 waited for rank 1, and not with its holds shut"
    for sub in subs:
        sub.close()


def test_a_registry_that_is_away_costs_a_call_its_timeout_and_little_more(registry, pub, sub):
    call = registry.call

    def away(command, *, timeout):
        threading.Event().wait(timeout)
        raise RegistryLost("away")

    registry.call = away
    try:
        begun = time.monotonic()
        with pytest.raises(RegistryLost):
            sub.sync(timeout=0.2)
        assert time.monotonic() - begun < 4
    finally:
        registry.call = call
    until(lambda: sub.latest() is None)


def test_bad_times_are_refused(sub):
    for named in ({"timeout": -1}, {"stall_timeout": -0.5}, {"deadline": -3}, {"timeout": float("nan")}):
        with pytest.raises(InvalidArgument, match=next(iter(named))):
            sub.sync(**named)


def test_patience_is_renewed_by_bytes_and_cut_by_the_deadline():
    patience = Patience(10.0, deadline=20.0)
    begun = patience.begun
    assert patience.until == pytest.approx(begun + 10)
    patience._renewed = begun + 5
    assert patience.until == pytest.approx(begun + 15)
    patience._renewed = begun + 15
    assert patience.until == pytest.approx(begun + 20)
    other = Patience(10.0)
    other.follow(patience)
    assert other.until == pytest.approx(begun + 25)


def test_a_stop_is_heard_before_the_point_of_no_return_and_refused_after():
    patience = Patience(10.0)
    assert patience.stop(Cancelled())
    for call in (patience.check, patience.commit, lambda: patience.nap(1.0)):
        with pytest.raises(Cancelled):
            call()
    late = Patience(10.0)
    late.commit()
    assert not late.stop(Cancelled())
    late.check()
    late.nap(0.0)
    late.reopen()  # what was committed came to nothing
    for call in (late.check, late.commit, lambda: late.nap(10.0)):
        with pytest.raises(Cancelled):
            call()


def test_a_rank_that_is_stopped_before_its_vote_leaves_all_as_it_was(registry, pub):
    gate, reached = threading.Event(), threading.Event()

    def before(old, new):
        reached.set()
        assert gate.wait(10)

    subs = [
        subscriber(registry, replica="tp", rank=0, world_size=2),
        subscriber(registry, replica="tp", rank=1, world_size=2, before_install=before),
    ]
    version = pub.publish()
    pub.wait(version, replicas=0)
    ends = []
    calls = [
        threading.Thread(target=lambda sub=sub: ends.append(together(lambda: sub.sync(timeout=20)))) for sub in subs
    ]
    for call in calls:
        call.start()
    assert reached.wait(10)
    assert subs[1]._current.stop(IncompleteVersion("stopped by the test", version=None, missing=[]))
    gate.set()
    for call in calls:
        call.join(20)
    assert all(isinstance(end[0], IncompleteVersion) for end in ends), ends
    assert [sub.version for sub in subs] == [None, None]
    assert [sub._taint for sub in subs] == [None, None]
    reports = together(*[lambda sub=sub: sub.sync(timeout=10) for sub in subs])
    assert [report.version for report in reports] == [version.number] * 2
    for sub in subs:
        sub.close()


def test_a_call_that_has_voted_in_vain_hears_at_its_next_attempt_what_it_was_told_meanwhile(registry, pub, sub):
    """The first attempt commits and is called off; the stop that came meanwhile must not be lost to the second."""
    voted = threading.Event()

    def called_off(staged, patience):
        voted.set()
        until(lambda: patience._reason is not None)
        sub._end(staged)
        raise VersionAborted("called off", version=staged.version, reason="PeerLost: rank 1")

    version = pub.publish()
    pub.wait(version, replicas=0)
    sub._decide = called_off
    ends = []
    call = threading.Thread(target=lambda: ends.append(together(lambda: sub.sync(timeout=20))[0]))
    call.start()
    assert voted.wait(10)
    sub.pause(timeout=10)
    call.join(10)
    assert isinstance(ends[0], Paused), ends
    del sub._decide
    sub.resume()
    assert sub.sync(timeout=10).version == version.number


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_rank_that_is_lost_ends_a_call_at_its_deadline_and_holds_up_no_pause(registry, pub, prefetch):
    named = {"replica": "tp", "world_size": 2, "prefetch": prefetch}
    subs = [subscriber(registry, rank=rank, **named) for rank in (0, 1)]
    first = pub.publish()
    together(*[lambda sub=sub: sub.sync(at_least=first, timeout=10) for sub in subs])
    subs[1].pause()
    asked, call = [], registry.call
    registry.call = lambda command, *, timeout: (asked.append(type(command).__name__), call(command, timeout=timeout))[
        1
    ]
    network, agent = subs[0]._endpoint.transport.network, subs[1]._ranks.agent
    network.lose(agent)
    subs[0]._ranks._send(1, Hello(round=0, rank=0, agent=""))  # found out as in any round
    second = pub.publish()
    pub.wait(second, replicas=0)
    (end,) = together(lambda: subs[0].sync(at_least=second, timeout=0.4), timeout=10)
    assert isinstance(end, IncompleteVersion), end
    assert "lost" in str(end)
    assert end.fields["missing"] == [1]
    assert asked.count("Join") < 30, "the registry is not hammered"
    begun = time.monotonic()
    subs[0].pause(timeout=5)
    assert time.monotonic() - begun < 2
    network._lost.discard(agent)  # it was the network: the rank answers again
    for sub in subs:
        sub.resume()
    reports = together(*[lambda sub=sub: sub.sync(at_least=second, timeout=10) for sub in subs])
    assert [report.version for report in reports] == [second.number] * 2
    for sub in subs:
        sub.close()
