"""Faults that have broken weight sync for others, tried here: each test names the public thread it comes from.

Those that are tested elsewhere are listed in tests/README.md.
"""

import random
import threading
import time

import pytest
import torch

from mx_rl import Shard
from mx_rl.errors import MxRLError, NotReady
from tests.support.local import publisher, subscriber, together


def test_payload_that_looks_like_a_control_marker_arrives_unchanged(registry):
    # verl-project/verl#6813: an end marker overwrote the first weights. There are no in-band markers.
    source = {"w": torch.full((4096,), 255, dtype=torch.uint8), "z": torch.zeros(64, dtype=torch.uint8)}
    target = {name: torch.ones_like(tensor) for name, tensor in source.items()}
    with publisher(registry, source) as pub, subscriber(registry, target) as sub:
        sub.sync(at_least=pub.publish(), timeout=10)
    assert torch.equal(target["w"], source["w"])
    assert torch.equal(target["z"], source["z"])


def test_bytes_reported_are_bytes_moved_not_a_buffer_s_size(registry):
    # verl#7107: the last bucket was always sent full size.
    source = {"w": torch.arange(10, dtype=torch.uint8)}
    with publisher(registry, source) as pub, subscriber(registry, {"w": torch.zeros(10, dtype=torch.uint8)}) as sub:
        report = sub.sync(at_least=pub.publish(), timeout=10)
    assert report.wire_bytes == report.model_bytes == sum(report.served_by.values()) == 10


def test_a_rank_that_is_late_never_sees_the_next_version_s_bytes(registry):
    # modelscope/ms-swift#10204: the buffer was reused when one rank of the group had acknowledged.
    source, targets = {"w": torch.zeros(4096)}, [{"w": torch.zeros(4096)} for _ in range(2)]
    subs = [subscriber(registry, targets[r], replica="tp", rank=r, world_size=2) for r in (0, 1)]
    with publisher(registry, source) as pub:
        for value in range(1, 4):
            source["w"].fill_(value)
            version = pub.publish()
            pub.wait(version, replicas=0)

            def late(value=value):
                time.sleep(0.05)
                source["w"].fill_(value + 0.5)  # the trainer is in its next step already
                return subs[1].sync(timeout=10)

            reports = together(lambda: subs[0].sync(timeout=10), late)
            assert [report.version for report in reports] == [version.number] * 2
            assert all(target["w"].eq(value).all() for target in targets)
    for sub in subs:
        sub.close()


def test_two_engines_of_four_ranks_are_eight_readers_with_the_right_slices(registry):
    # NovaSky-AI/SkyRL#1398: rank arithmetic mixed up data-parallel engines.
    whole = torch.arange(64.0).reshape(8, 8)
    subs = []
    for replica in ("a", "b"):
        for rank in range(4):
            part = Shard(torch.zeros(2, 8), shape=(8, 8), offset=(2 * rank, 0))
            subs.append((rank, part, subscriber(registry, {"w": part}, replica=replica, rank=rank, world_size=4)))
    with publisher(registry, {"w": whole}) as pub:
        version = pub.publish()
        pub.wait(version, replicas=0)
        together(*[lambda sub=sub: sub.sync(timeout=20) for _, _, sub in subs])
        assert len({sub.incarnation for _, _, sub in subs}) == 8
        for rank, part, sub in subs:
            assert sub.version == version.number
            assert torch.equal(part.tensor, whole[2 * rank : 2 * rank + 2])
        assert pub.wait(version, timeout=5).installed == ("a", "b")
    for _, _, sub in subs:
        sub.close()


def test_a_subscriber_that_cannot_apply_is_named_to_the_publisher_and_heals_in_full(registry):
    # THUDM/slime#2119: the receiver's failure was ignored, and the sender advanced.
    source, target, broken = {"w": torch.ones(8)}, {"w": torch.zeros(8)}, [True]

    def before(old, new):
        if broken[0]:
            raise RuntimeError("engine refuses")

    with publisher(registry, source) as pub, subscriber(registry, target, before_install=before) as sub:
        version = pub.publish()
        with pytest.raises(RuntimeError, match="refuses"):
            sub.sync(at_least=version, timeout=5)
        receipt = pub.wait(version, timeout=0.3)
        assert receipt.ready
        assert "refuses" in receipt.failed[sub.replica]
        assert not receipt.installed
        broken[0] = False
        assert sub.sync(timeout=5).kind == "full"
        assert pub.wait(version, timeout=5).installed == (sub.replica,)


def test_a_version_in_use_outlives_the_next_publish_until_its_lease_or_the_grace(registry):
    # PrimeIntellect-ai/prime-rl#1857: the cleaner deleted what was being read.
    source, target = {"w": torch.ones(64)}, {"w": torch.zeros(64)}
    with publisher(registry, source) as pub, subscriber(registry, target) as sub:
        first = pub.publish()
        pub.wait(first, replicas=0)
        staged = sub.stage(timeout=5)
        source["w"].fill_(2.0)
        pub.publish()
        source["w"].fill_(3.0)
        pub.publish()
        assert staged.install(timeout=5).version == first.number
        assert target["w"].eq(1).all()


def test_a_publisher_resumed_at_a_step_serves_those_who_wait_for_it_at_once(registry):
    # prime-rl#3004: everybody waited for step 40, the resumed trainer began with 41.
    source, target = {"w": torch.ones(8)}, {"w": torch.zeros(8)}
    with subscriber(registry, target) as sub:
        box = []
        waiter = threading.Thread(target=lambda: box.append(sub.sync(at_least=40, timeout=20)))
        waiter.start()
        with publisher(registry, source, start_after=39) as pub:
            assert pub.publish(step=40).number == 40
            waiter.join(20)
            assert box[0].version == 40


def test_a_publisher_never_waits_for_readers_that_have_gone(registry):
    # prime-rl#3050: the watcher had finished, and the broadcast blocked for ever.
    source = {"w": torch.ones(8)}
    with publisher(registry, source) as pub:
        subs = [subscriber(registry, {"w": torch.zeros(8)}) for _ in range(3)]
        version = pub.publish()
        subs[0].sync(at_least=version, timeout=5)
        begun = time.monotonic()
        receipt = pub.wait(version, timeout=0.3)
        assert set(receipt.missing) == {subs[1].replica, subs[2].replica}
        for sub in subs:
            sub.close()
        for _ in range(5):
            version = pub.publish()
        assert pub.wait(version, timeout=5).missing == ()
        assert time.monotonic() - begun < 10


def test_subscribers_that_start_at_any_time_all_join(registry):
    # verl#6967: joins at different moments hung before the first generation.
    source = {"w": torch.ones(8)}
    chance = random.Random(0)

    def start(delay):
        time.sleep(delay)
        with subscriber(registry, {"w": torch.zeros(8)}) as sub:
            return sub.sync(timeout=20).version

    with publisher(registry, source) as pub:
        delays = [chance.random() * 0.5 for _ in range(12)]
        versions = together(lambda: (time.sleep(0.2), pub.publish())[1].number, *[lambda d=d: start(d) for d in delays])
        assert set(versions) == {1}


def test_sixty_four_readers_at_one_instant_all_succeed(registry):
    # kvcache-ai/Mooncake#2044: a storm of handshakes.
    source = {"w": torch.ones(1000)}
    targets = [{"w": torch.zeros(1000)} for _ in range(64)]
    with publisher(registry, source) as pub:
        subs = [subscriber(registry, target) for target in targets]
        version = pub.publish()
        pub.wait(version, replicas=0)
        outcomes = together(*[lambda sub=sub: sub.sync(timeout=30) for sub in subs], timeout=60)
        assert not [outcome for outcome in outcomes if isinstance(outcome, MxRLError)]
        assert all(target["w"].eq(1).all() for target in targets)
        assert len(pub.wait(version, timeout=10).installed) == 64
        for sub in subs:
            sub.close()


def test_a_fleet_grows_and_shrinks_while_versions_go_on(registry):
    # inclusionAI/AReaL#1101: a static group needed a full restart to grow.
    source = {"w": torch.zeros(64)}
    with publisher(registry, source) as pub:
        subs = [subscriber(registry, {"w": torch.zeros(64)}) for _ in range(2)]
        for step, size in enumerate((2, 8, 8, 5, 5)):
            while len(subs) < size:
                subs.append(subscriber(registry, {"w": torch.zeros(64)}))
            while len(subs) > size:
                subs.pop().close()
            source["w"].fill_(step)
            version = pub.publish(step=step)
            together(*[lambda sub=sub, version=version: sub.sync(at_least=version, timeout=20) for sub in subs])
            assert set(pub.wait(version, timeout=10).installed) == {sub.replica for sub in subs}
        for sub in subs:
            sub.close()


def test_a_replacement_is_not_ready_before_it_has_installed(registry):
    # radixark/miles#1724: a replacement served before it had weights.
    source = {"w": torch.ones(8)}
    with publisher(registry, source) as pub, subscriber(registry, {"w": torch.zeros(8)}) as sub:
        assert not sub.ready
        with pytest.raises(NotReady):
            sub.sync(timeout=0.1)
        assert not sub.ready
        sub.sync(at_least=pub.publish(), timeout=5)
        assert sub.ready
