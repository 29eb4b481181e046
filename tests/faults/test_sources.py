"""Sources that stall, die or are reused in mid-move, at exact windows: whole versions or none, in bounded time."""

import gc
import threading
import time
import weakref

import pytest
import torch

from mx_rl import Publisher, Subscriber
from mx_rl.errors import Busy, HoldTimeout, MxRLError, NotReady, PeerLost, SeatTaken, VersionGone
from mx_rl.registry.memory import MemoryRegistry
from tests.support.faulty import faulty
from tests.support.local import FAST

COUNT = 64 * 1024  # float32: 64 windows of 4096 bytes
NBYTES = COUNT * 4
TRAINER, PEER = "p-pub0-", "p-r0-stage-"


@pytest.fixture
def registry():
    return MemoryRegistry()


@pytest.fixture(params=[True, False], ids=["fenced", "unfenced"])
def faults(request, monkeypatch):
    with faulty(monkeypatch, fence=request.param) as found:
        yield found


@pytest.fixture
def unfenced(monkeypatch):
    with faulty(monkeypatch, fence=False) as found:
        yield found


def weights(value=1.0):
    return {"w": torch.arange(COUNT, dtype=torch.float32) + value}


def blank():
    return {"w": torch.zeros(COUNT)}


def publisher(registry, tensors, **named):
    return Publisher("p", tensors, registry=registry, options=FAST, **named)


def subscriber(registry, tensors, **named):
    return Subscriber("p", tensors, registry=registry, options=FAST, **named)


def publish(pub, source, value):
    source["w"].copy_(weights(value)["w"])
    version = pub.publish()
    assert pub.wait(version, replicas=0, timeout=10).ready
    return version.number


def holds(target, value):
    return torch.equal(target["w"], weights(value)["w"])


def test_a_source_that_stalls_in_mid_move_is_given_up_and_a_peer_takes_over_at_the_confirmed_window(registry, faults):
    source, first, second = weights(), blank(), blank()
    with publisher(registry, source) as pub, subscriber(registry, first) as peer:
        number = publish(pub, source, 1.0)
        peer.sync(timeout=10)
        with subscriber(registry, second, sources=("trainer", "peer")) as sub:
            faults.at(TRAINER, 20, faults.network.stall)
            begun = time.monotonic()
            report = sub.sync(timeout=10)
            assert FAST.stall_s <= time.monotonic() - begun < FAST.stall_s + 3.0
            assert report.version == number
            assert report.served_by["trainer:0"] >= 4 * 4096
            assert report.served_by[f"peer:{peer.replica}"] >= 40 * 4096
            assert sum(report.served_by.values()) == NBYTES, "what was confirmed is not moved twice"
            assert "moved no byte" in report.refused["trainer:0"]
            assert holds(second, 1.0)


def test_late_bytes_of_a_stalled_source_change_nothing_and_the_quarantined_landing_is_closed(registry, unfenced):
    source, first, second = weights(), blank(), blank()
    with publisher(registry, source, slots=2) as pub, subscriber(registry, first) as peer:
        publish(pub, source, 1.0)
        peer.sync(timeout=10)
        with subscriber(registry, second, sources=("trainer", "peer")) as sub:
            normal = sub.registered_bytes
            unfenced.at(TRAINER, 20, unfenced.network.stall)
            sub.sync(timeout=10)
            assert sub.registered_bytes == 2 * normal, "one landing is in quarantine"
            for value in (2.0, 3.0):  # the slot that the late bytes come from holds another version now
                publish(pub, source, value)
            installed, staged = second["w"].clone(), sub._staging.landing.block.clone()
            for agent in unfenced.agents(TRAINER):
                unfenced.network.release(agent)
            assert torch.equal(second["w"], installed)
            assert torch.equal(sub._staging.landing.block, staged)
            assert holds(second, 1.0)
            assert sub.sync(timeout=10).kind == "full"
            assert holds(second, 3.0)
            assert sub.registered_bytes == normal


def test_a_peer_of_a_reader_in_quarantine_reads_the_new_landing_or_the_trainer_never_the_old_one(registry, unfenced):
    source, first, second, third = weights(), blank(), blank(), blank()
    with publisher(registry, source) as pub, subscriber(registry, first) as peer:
        publish(pub, source, 1.0)
        peer.sync(timeout=10)
        with subscriber(registry, second, sources=("trainer", "peer")) as sub:
            unfenced.at(TRAINER, 20, unfenced.network.stall)
            sub.sync(timeout=10)
            peer.close()
            with subscriber(registry, third, sources=("peer",)) as joiner:
                report = joiner.sync(timeout=10)
                assert set(report.served_by) == {f"peer:{sub.replica}"}
                assert holds(third, 1.0)


def test_a_subscriber_that_closes_with_bytes_on_their_way_keeps_their_memory(registry, unfenced):
    """Freed, the next owner of those pages would be written into, or the process would crash."""
    source, first, second = weights(), blank(), blank()
    with publisher(registry, source) as pub, subscriber(registry, first) as peer:
        publish(pub, source, 1.0)
        peer.sync(timeout=10)
        sub = subscriber(registry, second, sources=("trainer", "peer"))
        unfenced.at(TRAINER, 20, unfenced.network.stall)
        sub.sync(timeout=10)
        quarantined = sub._staging.stage.quarantine[0]._arena
        low = quarantined.address(0)
        late = [row[0] for move in unfenced.network._pending for row in move.rows if row[2] == 4096]
        assert late
        assert all(low <= address < low + quarantined.total_bytes for address in late)
        alive = weakref.ref(quarantined)
        del quarantined
        sub.close()
        del sub
        gc.collect()
        assert alive() is not None
        for agent in unfenced.agents(TRAINER):
            unfenced.network.release(agent)


def test_a_peer_that_dies_in_mid_read_is_taken_over_by_the_trainer(registry, faults):
    source, first, second = weights(), blank(), blank()
    with publisher(registry, source) as pub, subscriber(registry, first) as peer, subscriber(registry, second) as sub:
        publish(pub, source, 1.0)
        peer.sync(timeout=10)
        faults.at(PEER, 20, faults.network.lose)
        report = sub.sync(timeout=10)
        assert report.served_by[f"peer:{peer.replica}"] >= 4 * 4096
        assert report.served_by["trainer:0"] >= 40 * 4096
        assert sum(report.served_by.values()) == NBYTES
        assert report.retries == 1
        assert holds(second, 1.0)


def test_when_all_sources_are_dead_the_old_version_stays_and_the_next_publish_is_installed(registry, faults):
    source, target = weights(), blank()
    pub = publisher(registry, source)
    with subscriber(registry, target) as sub:
        first = publish(pub, source, 1.0)
        sub.sync(timeout=10)
        second = publish(pub, source, 2.0)
        faults.at(TRAINER, 20, faults.network.lose)
        begun = time.monotonic()
        with pytest.raises((PeerLost, VersionGone, NotReady)):
            sub.sync(at_least=second, timeout=1.5)
        assert time.monotonic() - begun < 5.0
        assert sub.version == first
        assert sub.ready
        assert holds(target, 1.0)
        with publisher(registry, source, world="again", rank=0, world_size=1) as successor:
            number = publish(successor, source, 3.0)
            assert sub.sync(at_least=number, timeout=10).version == number
            assert holds(target, 3.0)
    pub.close(timeout=1.0)


def test_a_source_that_stalls_for_ever_ends_the_sync_at_its_timeout(registry, faults):
    source, target = weights(), blank()
    with publisher(registry, source) as pub, subscriber(registry, target) as sub:
        first = publish(pub, source, 1.0)
        sub.sync(timeout=10)
        second = publish(pub, source, 2.0)
        faults.at(TRAINER, 20, faults.network.stall)
        begun = time.monotonic()
        with pytest.raises((PeerLost, VersionGone, NotReady)):
            sub.sync(at_least=second, timeout=1.5)
        assert time.monotonic() - begun < 5.0
        assert sub.version == first
        assert holds(target, 1.0)
        assert sub.sync(timeout=10).kind == "none", "what nobody can give is not waited for without need"
        for agent in faults.agents(TRAINER):
            faults.network.release(agent)
        number = publish(pub, source, 3.0)
        assert sub.sync(at_least=number, timeout=10).version == number
        assert holds(target, 3.0)


def test_serve_off_gives_peers_nothing_and_reads_as_well(registry):
    source, first, second = weights(), blank(), blank()
    with publisher(registry, source) as pub, subscriber(registry, first, serve="off") as quiet:
        publish(pub, source, 1.0)
        quiet.sync(timeout=10)
        with subscriber(registry, second) as sub:
            assert set(sub.sync(timeout=10).served_by) == {"trainer:0"}
        assert holds(first, 1.0)
        assert holds(second, 1.0)


def test_a_peer_whose_stage_is_reused_in_mid_read_is_left_for_the_trainer(registry, faults):
    source, first, second = weights(), blank(), blank()
    with publisher(registry, source, slots=3) as pub, subscriber(registry, first) as peer:
        with subscriber(registry, second) as sub:
            publish(pub, source, 1.0)
            peer.sync(timeout=10)

            def reuse(_agent):
                publish(pub, source, 2.0)
                peer.sync(timeout=10)

            faults.at(PEER, 20, reuse)
            report = sub.sync(timeout=10)
            assert "VersionGone" in report.refused[f"peer:{peer.replica}"]
            assert report.served_by["trainer:0"] > 0
            assert sum(report.served_by.values()) == NBYTES
            assert holds(second, 1.0)
            sub.sync(timeout=10)
            assert holds(second, 2.0)


def test_another_layout_gets_another_ring_and_the_old_one_is_given_back(registry):
    shape = [1000]

    def tensors():
        return {"w": torch.full((shape[0],), float(shape[0]))}

    live = {"w": torch.zeros(1000)}
    with publisher(registry, tensors) as pub, subscriber(registry, lambda: live) as sub:
        pub.publish()
        sub.sync(timeout=10)
        before = pub.registered_bytes
        for size in (2000, 500, 300_000, 1000):
            shape[0] = size
            live = {"w": torch.zeros(size)}
            number = pub.publish().number
            assert sub.sync(at_least=number, timeout=10).version == number
            assert live["w"].eq(float(size)).all()
        pub.wait(pub.publish(), replicas=0, timeout=10)
        pub.wait(pub.publish(), replicas=0, timeout=10)
        assert pub.registered_bytes == before, "rings of former layouts are closed"


def test_a_subscriber_may_change_what_it_takes_between_two_syncs(registry):
    source = {"a": torch.ones(5000), "b": torch.full((7000,), 2.0)}
    live = [{"a": torch.zeros(5000)}]
    with publisher(registry, source) as pub, subscriber(registry, lambda: live[0], strict=False) as sub:
        pub.publish()
        sub.sync(timeout=10)
        live[0] = {"a": torch.zeros(5000), "b": torch.zeros(7000)}
        number = pub.publish().number
        assert sub.sync(at_least=number, timeout=10).version == number
        assert live[0]["a"].eq(1).all()
        assert live[0]["b"].eq(2).all()


def test_a_replica_whose_stage_was_replaced_keeps_its_seat(registry):
    """Who wants its seat asks it on the data plane: by the agent it serves with now, not by the one it closed."""
    source = {"a": torch.ones(5000), "b": torch.ones(700_000)}
    live = [{"a": torch.zeros(5000)}]
    with publisher(registry, source) as pub:
        with subscriber(registry, lambda: live[0], strict=False, replica="r") as sub:
            pub.publish()
            sub.sync(timeout=10)
            live[0] = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
            sub.sync(at_least=pub.publish().number, timeout=10)
            with pytest.raises(SeatTaken):
                subscriber(registry, {"a": torch.zeros(5000)}, strict=False, replica="r")
            number = pub.publish().number
            assert sub.sync(at_least=number, timeout=10).version == number


def test_a_busy_engine_is_asked_again_until_it_can_stop_or_the_deadline(registry):
    source, target, calls = weights(), blank(), []
    busy_for = [3]

    def before(_old, _new):
        calls.append(1)
        if len(calls) <= busy_for[0]:
            raise Busy("requests are running")

    with publisher(registry, source) as pub, subscriber(registry, target, before_install=before) as sub:
        first = publish(pub, source, 1.0)
        assert sub.sync(timeout=10).version == first
        assert len(calls) == 4
        publish(pub, source, 2.0)
        busy_for[0] = 1 << 30
        begun = time.monotonic()
        with pytest.raises(Busy):
            sub.sync(timeout=0.5)
        assert time.monotonic() - begun < 3.0
        assert sub.version == first
        assert holds(target, 1.0)
        busy_for[0] = 0
        sub.sync(timeout=10)
        assert holds(target, 2.0)


def test_a_hold_that_stays_open_ends_the_sync_and_leaves_the_old_version(registry):
    source, target = weights(), blank()
    opened, release = threading.Event(), threading.Event()
    with publisher(registry, source) as pub, subscriber(registry, target) as sub:

        def compute():
            with sub.hold():
                opened.set()
                release.wait(30)

        first = publish(pub, source, 1.0)
        sub.sync(timeout=10)
        publish(pub, source, 2.0)
        thread = threading.Thread(target=compute)
        thread.start()
        assert opened.wait(10)
        with pytest.raises(HoldTimeout):
            sub.sync(timeout=0.3)
        assert sub.version == first
        release.set()
        thread.join(10)
        sub.sync(timeout=10)
        assert holds(target, 2.0)


def test_three_slots_give_a_reader_one_more_version_to_finish(registry):
    source, target = weights(), blank()
    with publisher(registry, source, slots=3) as pub, subscriber(registry, target) as sub:
        first = publish(pub, source, 1.0)
        staged = sub.stage(timeout=10)
        begun = time.monotonic()
        publish(pub, source, 2.0)
        publish(pub, source, 3.0)
        assert time.monotonic() - begun < FAST.grace_s + 2.0
        assert staged.install(timeout=10).version == first
        assert holds(target, 1.0)
        sub.sync(timeout=10)
        assert holds(target, 3.0)


def test_two_threads_that_publish_make_one_sequence_of_whole_versions(registry):
    source, target = weights(), blank()
    numbers, failures = [], []
    with publisher(registry, source) as pub, subscriber(registry, target) as sub:

        def work():
            try:
                for _ in range(10):
                    numbers.append(pub.publish(timeout=30).number)
            except BaseException as exc:
                failures.append(exc)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        assert sorted(numbers) == list(range(min(numbers), min(numbers) + 20))
        assert sub.sync(at_least=max(numbers), timeout=10).version == max(numbers)
        assert holds(target, 1.0)


def test_closing_twice_and_closing_under_leases_takes_the_grace_at_most(registry):
    source, target = weights(), blank()
    pub, sub = publisher(registry, source), subscriber(registry, target)
    publish(pub, source, 1.0)
    assert sub.stage(timeout=10) is not None  # a lease that stays open
    publish(pub, source, 2.0)
    begun = time.monotonic()
    pub.close()
    assert time.monotonic() - begun < FAST.grace_s + 2.0
    pub.close()
    sub.close()
    sub.close()
    with pytest.raises(MxRLError, match="closed"):
        pub.publish()
    with pytest.raises(MxRLError, match="closed"):
        sub.sync(timeout=1)


def test_a_reader_five_times_slower_than_the_publisher_still_installs_versions_that_rise(registry, faults):
    source, target = {"w": torch.zeros(8 * 1024)}, {"w": torch.zeros(8 * 1024)}  # 8 windows, 4 in flight
    stop, failed = threading.Event(), []
    with publisher(registry, source) as pub, subscriber(registry, target) as sub:
        pub.publish()
        for agent in faults.agents(TRAINER):
            faults.network.delay(agent, 0.05)  # a whole read takes about 0.2 s

        def work():
            try:
                while not stop.wait(0.04):
                    source["w"].fill_(source["w"][0].item() + 1.0)
                    pub.publish(timeout=30)
            except BaseException as exc:
                failed.append(exc)

        thread = threading.Thread(target=work)
        thread.start()
        installed = []
        try:
            for _ in range(4):
                report = sub.sync(timeout=20)
                if report.kind == "full":
                    installed.append(report.version)
                    assert target["w"].unique().numel() == 1
        finally:
            stop.set()
            thread.join(60)
        assert not failed
        assert len(installed) == 4
        assert installed == sorted(set(installed))
