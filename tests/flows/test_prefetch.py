"""Prefetch: the next version waits complete before it is asked for, and none that waits is lost to a newer one."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from mx_rl import Subscriber
from mx_rl.errors import HoldTimeout, IncompleteVersion, Paused, VersionAborted
from mx_rl.records import Resolve
from tests.support.local import FAST, together
from tests.support.until import until


def subscriber(registry, tensors, **named):
    return Subscriber("p", tensors, registry=registry, options=FAST, **{"prefetch": True, **named})


def publish(pub, weights, value):
    weights["w"].fill_(value)
    number = pub.publish().number
    assert pub.wait(number, replicas=0, timeout=10).ready
    return number


def test_a_version_waits_complete_before_the_first_call_and_sync_is_the_install_alone(registry, weights, pub):
    target = {"w": torch.zeros(5000)}
    with subscriber(registry, target) as sub:
        assert sub.staged is None
        for value in (1.0, 2.0, 3.0):
            number = publish(pub, weights, value)
            until(lambda number=number: sub.staged == number)
            assert not target["w"].eq(value).any(), "nothing is installed before the call"
            report = sub.sync(timeout=10)
            assert (report.version, report.kind) == (number, "full")
            assert "move" not in report.seconds
            assert report.seconds["ahead"] > 0
            assert target["w"].eq(value).all()
            assert sub.sync(timeout=5).kind == "none"


def test_a_version_that_waits_is_installed_whatever_is_newer_and_then_the_newest_follows(registry, weights, pub):
    target = {"w": torch.zeros(5000)}
    with subscriber(registry, target) as sub:
        first = publish(pub, weights, 1.0)
        until(lambda: sub.staged == first)
        publish(pub, weights, 2.0)
        third = publish(pub, weights, 3.0)
        assert sub.staged == first
        assert sub.sync(timeout=5).version == first
        assert target["w"].eq(1).all()
        until(lambda: sub.staged == third)
        assert sub.sync(at_least=first, timeout=5).version == third
        assert target["w"].eq(3).all()


def test_a_call_for_a_newer_version_discards_the_one_that_waits(registry, weights, pub):
    target = {"w": torch.zeros(5000)}
    with subscriber(registry, target) as sub:
        first = publish(pub, weights, 1.0)
        until(lambda: sub.staged == first)
        second = publish(pub, weights, 2.0)
        report = sub.sync(at_least=second, timeout=5)
        assert report.version == second
        assert "move" in report.seconds
        assert target["w"].eq(2).all()


def test_a_version_staged_by_hand_is_installed_by_the_next_sync(registry, weights, pub):
    target = {"w": torch.zeros(5000)}
    with subscriber(registry, target, prefetch=False) as sub:
        first = publish(pub, weights, 1.0)
        staged = sub.stage(timeout=5)
        assert sub.staged == staged.version == first
        publish(pub, weights, 2.0)
        assert sub.sync(timeout=5).version == first
        assert sub.staged is None
        with pytest.raises(VersionAborted):
            staged.install(timeout=1)


def test_stage_hands_out_what_was_prefetched_and_its_install_ends_it(registry, weights, pub):
    with subscriber(registry, {"w": torch.zeros(5000)}) as sub:
        first = publish(pub, weights, 1.0)
        until(lambda: sub.staged == first)
        staged = sub.stage(timeout=5)
        assert staged.version == first
        assert staged.install(timeout=5).version == first
        assert sub.stage(timeout=5) is None


def test_a_version_that_waits_costs_the_publisher_no_grace(registry, weights, pub):
    """Its lease ended when its last byte was here: nobody waits for a replica that generates."""
    with subscriber(registry, {"w": torch.zeros(5000)}) as sub:
        first = publish(pub, weights, 1.0)
        until(lambda: sub.staged == first)
        until(lambda: not registry._state.policies["p"].leases)
        for value in range(2, 8):
            version = pub.publish()
            assert version.seconds["slot"] < FAST.grace_s / 2, "no reader was waited for"
            assert pub.wait(version, replicas=0, timeout=5).ready
            weights["w"].fill_(value)
        assert sub.staged == first


def test_waiting_for_news_costs_one_poll_and_no_lease(registry, weights, pub):
    asked = []
    call = registry.call

    def counted(command, *, timeout):
        asked.append(command)
        return call(command, timeout=timeout)

    with subscriber(registry, {"w": torch.zeros(5000)}) as sub:
        first = publish(pub, weights, 1.0)
        until(lambda: sub.staged == first)
        registry.call = counted
        sub.sync(timeout=5)
        until(lambda: any(type(command).__name__ == "Resolve" for command in asked))
        threading.Event().wait(0.5)  # time for a busy loop to show itself
        polls = [command for command in asked if type(command).__name__ == "Resolve"]
        assert len(polls) == 1
        assert not polls[0].lease
        assert not registry._state.policies["p"].leases
        registry.call = call


def test_an_error_of_the_prefetch_is_met_again_by_the_next_sync(registry, weights, pub, caplog):
    from mx_rl.errors import LayoutMismatch

    with subscriber(registry, {"other": torch.zeros(5000)}) as sub:
        publish(pub, weights, 1.0)
        until(lambda: "prefetch" in caplog.text and "LayoutMismatch" in caplog.text)
        with pytest.raises(LayoutMismatch):
            sub.sync(timeout=5)
        assert sub.staged is None


def test_pause_stops_the_prefetch_and_what_is_noted_meanwhile_comes_after_resume(registry, weights, pub):
    target = {"w": torch.zeros(5000)}
    with subscriber(registry, target) as sub:
        first = publish(pub, weights, 1.0)
        sub.sync(at_least=first, timeout=5)
        sub.pause()
        sub.pause()
        second = publish(pub, weights, 2.0)
        assert not sub.ready
        assert sub.latest() == second
        for call in (sub.sync, sub.stage):
            with pytest.raises(Paused, match="resume"):
                call(timeout=1)
        assert sub.staged is None
        sub.resume()
        sub.resume()
        assert sub.ready
        until(lambda: sub.staged == second)
        sub.pause()
        with pytest.raises(Paused):
            sub.sync(timeout=1)
        assert target["w"].eq(1).all()
        sub.resume()
        assert sub.sync(timeout=5).version == second


def test_a_pause_in_the_middle_of_a_prefetch_stops_it_and_resume_goes_on_from_there(registry, weights, pub):
    patient = replace(FAST, stall_s=10.0)
    target = {"w": torch.zeros(5000)}
    with Subscriber("p", target, registry=registry, options=patient, prefetch=True) as sub:
        network, agent = sub._endpoint.transport.network, pub._ring.served.name
        network.stall(agent)
        number = publish(pub, weights, 1.0)
        until(lambda: sub._staging._progress is not None)
        sub.pause(timeout=5)
        assert sub._current is None, "nothing is written any more"
        assert sub.staged is None
        network.release(agent)
        with pytest.raises(Paused):
            sub.sync(timeout=0.5)
        assert sub.staged is None
        sub.resume()
        until(lambda: sub.staged == number)
        assert sub.sync(timeout=5).version == number
        assert target["w"].eq(1).all()
        assert not pub.wait(number, timeout=5).failed, "a pause is no failure of the version"


def test_a_sync_that_waits_ends_with_the_pause(registry, pub):
    with subscriber(registry, {"w": torch.zeros(5000)}) as sub:
        ends, asked, call = [], threading.Event(), registry.call

        def noted(command, *, timeout):
            if isinstance(command, Resolve) and command.lease:
                asked.set()
            return call(command, timeout=timeout)

        registry.call = noted
        waiting = threading.Thread(target=lambda: ends.append(together(lambda: sub.sync(at_least=1, timeout=1))[0]))
        waiting.start()
        assert asked.wait(10)
        sub.pause(timeout=20)
        waiting.join(10)
        assert isinstance(ends[0], Paused)


def test_close_ends_a_prefetch_that_waits_for_the_other_ranks_part(registry, weights, pub):
    subs = [
        subscriber(registry, {"w": torch.zeros(5000)}, replica="tp", rank=rank, world_size=2, prefetch=rank == 0)
        for rank in (0, 1)
    ]
    number = publish(pub, weights, 1.0)
    met = threading.Thread(target=lambda: together(lambda: subs[1].sync(timeout=0.5)))
    met.start()
    met.join(10)
    until(lambda: subs[0].staged == number, timeout=20)
    begun = time.monotonic()
    for sub in subs:
        sub.close()
    assert time.monotonic() - begun < 3
    assert not subs[0]._prefetch._thread.is_alive()


def test_after_a_pause_that_lost_the_weights_the_same_version_is_installed_in_full(registry, weights, pub):
    target = {"w": torch.zeros(5000)}
    with subscriber(registry, target) as sub:
        first = publish(pub, weights, 1.0)
        sub.sync(at_least=first, timeout=5)
        sub.pause()
        target["w"].fill_(-1.0)
        sub.resume(weights_kept=False)
        assert not sub.ready
        report = sub.sync(timeout=5)
        assert (report.version, report.kind) == (first, "full")
        assert sub.ready
        assert target["w"].eq(1).all()


def test_close_ends_a_prefetch_that_waits_for_news_at_once(registry, weights, pub):
    sub = subscriber(registry, {"w": torch.zeros(5000)})
    thread = sub._prefetch._thread
    begun = time.monotonic()
    sub.close()
    assert time.monotonic() - begun < 2
    assert not thread.is_alive()


@pytest.mark.parametrize(("mode", "serves"), [({"serve": "live"}, True), ({"swap": True}, True), ({}, False)])
def test_what_is_installed_is_a_source_while_a_version_waits_unless_that_lies_in_its_place(
    registry, weights, pub, mode, serves
):
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.zeros(5000))
    with subscriber(registry, module, **mode) as sub:
        first = publish(pub, weights, 1.0)
        sub.sync(at_least=first, timeout=10)
        second = publish(pub, weights, 2.0)
        until(lambda: sub.staged == second)
        until(lambda: not registry._state.policies["p"].leases)  # told: it is read whole
        told = registry._state.policies["p"].replicas[sub.replica]
        assert (told.number, bool(told.held)) == (first, serves)
        assert sub.sync(timeout=10).version == second
        assert told.held


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_version_whose_install_found_open_holds_waits_for_the_next_call(registry, weights, pub, prefetch):
    target = {"w": torch.zeros(5000)}
    with subscriber(registry, target, prefetch=prefetch) as sub:
        first = publish(pub, weights, 1.0)
        inside, leave = threading.Event(), threading.Event()

        def generate():
            with sub.hold():
                inside.set()
                assert leave.wait(10)

        generating = threading.Thread(target=generate)
        generating.start()
        assert inside.wait(5)
        with pytest.raises(HoldTimeout):
            sub.sync(at_least=first, timeout=0.1)
        assert sub.staged == first
        assert not pub.wait(first, timeout=0.05).failed
        until(lambda: not registry._state.policies["p"].leases)
        leave.set()
        generating.join(5)
        report = sub.sync(timeout=5)
        assert report.version == first
        assert "move" not in report.seconds, "its bytes were here already"
        assert target["w"].eq(1).all()


# ---- a replica of two ranks


@pytest.fixture
def pair(registry):
    targets = [{"w": torch.zeros(5000)} for _ in (0, 1)]
    subs = [subscriber(registry, targets[rank], replica="tp", rank=rank, world_size=2) for rank in (0, 1)]
    yield subs, targets
    for sub in subs:
        sub.close()


def test_both_ranks_fetch_ahead_and_switch_together(registry, weights, pub, pair):
    subs, targets = pair
    for value in (1.0, 2.0, 3.0):
        number = publish(pub, weights, value)
        until(lambda number=number: all(sub.staged == number for sub in subs))
        reports = together(*[lambda sub=sub: sub.sync(timeout=10) for sub in subs])
        assert [report.version for report in reports] == [number, number]
        assert all("move" not in report.seconds for report in reports)
        assert all(target["w"].eq(value).all() for target in targets)


def test_ranks_whose_calls_run_in_step_get_the_same_answers_while_prefetch_runs_ahead(registry, weights, pub, pair):
    """Rank 0 has answered "nothing newer" when the next version is fetched ahead: rank 1's call of that step must answer the
    same, though it has the version already."""
    subs, _ = pair
    number = publish(pub, weights, 1.0)
    together(*[lambda sub=sub: sub.sync(at_least=number, timeout=10) for sub in subs])
    assert subs[0].sync(timeout=5).kind == "none"
    ahead = publish(pub, weights, 2.0)
    until(lambda: all(sub.staged == ahead for sub in subs))
    assert subs[1].sync(timeout=5).kind == "none"
    reports = together(*[lambda sub=sub: sub.sync(timeout=10) for sub in subs])
    assert [report.version for report in reports] == [ahead, ahead]


def test_a_rank_that_missed_a_call_is_in_step_again_with_the_next(registry, weights, pub, pair):
    subs, targets = pair
    number = publish(pub, weights, 1.0)
    together(*[lambda sub=sub: sub.sync(at_least=number, timeout=10) for sub in subs])
    assert subs[0].sync(timeout=5).kind == "none"  # rank 1 makes no such call
    ahead = publish(pub, weights, 2.0)
    until(lambda: all(sub.staged == ahead for sub in subs))
    zero = threading.Thread(target=lambda: subs[0].sync(timeout=10))
    zero.start()
    until(lambda: subs[1]._ranks.follower.nothing is None)  # it asks for the version now
    assert subs[1].sync(timeout=10).version == ahead
    zero.join(10)
    assert all(target["w"].eq(2).all() for target in targets)


def test_a_round_that_rank_0_gave_up_makes_the_others_take_the_next_one_in_the_same_call(registry, weights, pub, pair):
    subs, targets = pair
    first = publish(pub, weights, 1.0)
    until(lambda: all(sub.staged == first for sub in subs))
    second = publish(pub, weights, 2.0)
    reports = together(lambda: subs[0].sync(at_least=second, timeout=10), lambda: subs[1].sync(timeout=10))
    assert [report.version for report in reports] == [second, second]
    assert all(target["w"].eq(2).all() for target in targets)


def test_a_rank_that_does_not_call_shuts_no_holds_of_the_others(registry, weights, pub, pair):
    subs, targets = pair
    first = publish(pub, weights, 1.0)
    until(lambda: all(sub.staged == first for sub in subs))
    waiting = threading.Thread(target=lambda: together(lambda: subs[0].sync(timeout=1.0)))
    waiting.start()
    until(lambda: subs[0]._ranks.leader.ready)
    with subs[0].hold(timeout=0.2):
        pass
    waiting.join(10)
    assert targets[0]["w"].eq(0).all()
    with pytest.raises(IncompleteVersion, match="rank 0"):
        subs[1].sync(timeout=0.3)


def test_one_rank_in_a_pause_keeps_the_old_version_on_all_and_says_so(registry, weights, pub, pair):
    subs, targets = pair
    first = publish(pub, weights, 1.0)
    together(*[lambda sub=sub: sub.sync(at_least=first, timeout=10) for sub in subs])
    subs[1].pause()
    publish(pub, weights, 2.0)
    outcomes = together(lambda: subs[0].sync(timeout=1), lambda: subs[1].sync(timeout=1))
    assert isinstance(outcomes[1], Paused)
    assert all(target["w"].eq(1).all() for target in targets)
    subs[1].resume()
    reports = together(*[lambda sub=sub: sub.sync(timeout=10) for sub in subs])
    assert all(target["w"].eq(2).all() for target in targets), reports


@pytest.mark.parametrize("prefetch", [True, False])
def test_four_threads_generate_while_many_versions_arrive_and_no_output_is_mixed(registry, weights, pub, prefetch):
    target = {"w": torch.zeros(5000)}
    with subscriber(registry, target, prefetch=prefetch) as sub:
        first = publish(pub, weights, 1.0)
        sub.sync(at_least=first, timeout=10)
        stop, faults, outputs = threading.Event(), [], []

        def generate():
            last = 0
            while not stop.is_set():
                with sub.hold(timeout=10) as version:
                    seen = target["w"].unique().tolist()
                    if len(seen) != 1 or seen[0] != version - first + 1 or version < last:
                        faults.append((version, seen))
                    last = version
                    outputs.append(version)

        workers = [threading.Thread(target=generate) for _ in range(4)]
        for worker in workers:
            worker.start()
        try:
            for value in range(2, 102):
                number = publish(pub, weights, float(value))
                assert sub.sync(at_least=number, timeout=10).version == number
        finally:
            stop.set()
            for worker in workers:
                worker.join(10)
        assert not faults
        assert sub.version == first + 100
        assert len(set(outputs)) > 10
