"""Whole publishes and syncs in one process: what travels, what is refused, and what a failure leaves."""

import threading
import time

import pytest
import torch

from mx_rl import Shard
from mx_rl.errors import (
    AliasConflict,
    Busy,
    DtypeMismatch,
    Fenced,
    HoldTimeout,
    IncompleteVersion,
    InvalidArgument,
    LayoutMismatch,
    MissingTensors,
    MxRLError,
    NotReady,
    SeatTaken,
    StepMismatch,
    TensorUnavailable,
    UnexpectedTensors,
    VersionAborted,
)
from mx_rl.partners import Partners
from mx_rl.ranks import Ranks
from tests.support.local import FAST, publisher, subscriber, together


def zeros(tensors):
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}


def equal(one, two):
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), two.contiguous().view(-1).view(torch.uint8))


def test_every_kind_of_tensor_arrives_bit_for_bit(registry):
    base = torch.randn(8, 12)
    source = {
        "bf16": torch.randn(300, 40).bfloat16(),
        "fp16": torch.randn(7).half(),
        "int64": torch.arange(1000),
        "bool": torch.rand(33) > 0.5,
        "fp8": torch.randn(16, 5).to(torch.float8_e4m3fn),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(2, 0, dtype=torch.bfloat16),
        "transposed": torch.randn(4, 3).t(),
        "strided": base[:, ::2],
    }
    target = zeros(source)
    with publisher(registry, source) as pub, subscriber(registry, target) as sub:
        version = pub.publish(step=7, metadata={"loss": 0.5})
        report = sub.sync(timeout=10)
        assert report.version == version.number == sub.version
        assert report.kind == "full"
        assert report.step == 7
        assert pub.wait(version, timeout=5).installed == (sub.replica,)
        assert pub.latest == sub.latest() == version.number
    for name, tensor in source.items():
        assert equal(tensor, target[name]), name


def test_a_version_is_what_the_weights_were_when_publish_was_called(registry):
    weights, target = {"w": torch.zeros(5000)}, {"w": torch.zeros(5000)}
    with publisher(registry, weights) as pub, subscriber(registry, target) as sub:
        version = pub.publish()
        weights["w"].fill_(9.0)
        assert sub.sync(timeout=10).version == version.number
        assert target["w"].eq(0).all()


def test_storage_that_moved_is_followed(registry):
    module = torch.nn.Linear(16, 4)
    target = zeros(module.state_dict())
    with publisher(registry, module) as pub, subscriber(registry, target) as sub:
        for value in (1.0, 2.0, 3.0):
            module.weight.data = torch.full((4, 16), value)
            version = pub.publish()
            sub.sync(at_least=version.number, timeout=10)
            assert target["weight"].eq(value).all()


def test_freed_storage_is_refused_by_name_and_the_next_version_is_whole(registry):
    weights = {"a": torch.ones(10), "b": torch.ones(10)}
    with publisher(registry, weights) as pub, subscriber(registry, zeros(weights)) as sub:
        first = pub.publish()
        weights["b"].untyped_storage().resize_(0)
        with pytest.raises(TensorUnavailable) as caught:
            pub.publish()
        assert caught.value.names == ["b"]
        weights["b"] = torch.ones(10)
        third = pub.publish()
        assert third.number == first.number + 2, "a call that raised counts: its number is burnt"
        assert sub.sync(at_least=third.number, timeout=10).version == third.number


def test_tied_names_travel_once_and_are_right_under_both(registry):
    weight = torch.randn(64, 32)
    source = {"embed": weight, "head": weight}
    tied = torch.zeros(64, 32)
    untied = zeros(source)
    with (
        publisher(registry, source) as pub,
        subscriber(registry, {"embed": tied, "head": tied}) as one,
        subscriber(registry, untied) as two,
    ):
        pub.publish()
        assert one.sync(timeout=10).model_bytes == weight.nbytes
        assert two.sync(timeout=10).model_bytes == weight.nbytes
    assert equal(tied, weight)
    assert equal(untied["embed"], weight)
    assert equal(untied["head"], weight)
    assert untied["embed"].data_ptr() != untied["head"].data_ptr()


def test_one_storage_cannot_take_two_different_tensors(registry):
    source = {"embed": torch.ones(8), "head": torch.ones(8)}
    tied = torch.zeros(8)
    with publisher(registry, source) as pub, subscriber(registry, {"embed": tied, "head": tied}) as sub:
        first = pub.publish()
        assert sub.sync(timeout=10).version == first.number, "equal values are fine"
        source["head"].fill_(2.0)
        pub.wait(pub.publish(), replicas=0)
        with pytest.raises(AliasConflict):
            sub.sync(timeout=10)
        assert sub.version == first.number
        assert tied.eq(1).all()


def test_wire_dtype_casts_as_tensor_to_does_and_without_it_dtypes_must_agree(registry):
    source = {"w": torch.randn(1000), "ids": torch.arange(10)}
    target = {"w": torch.zeros(1000, dtype=torch.bfloat16), "ids": torch.zeros(10, dtype=torch.int64)}
    with publisher(registry, source) as pub, subscriber(registry, target) as sub:
        pub.publish()
        with pytest.raises(DtypeMismatch):
            sub.sync(timeout=10)
        assert target["w"].eq(0).all()
    with publisher(registry, source, wire_dtype="bfloat16") as pub, subscriber(registry, target) as sub:
        version = pub.publish()
        sub.sync(at_least=version.number, timeout=10)
    assert equal(target["w"], source["w"].to(torch.bfloat16))
    assert equal(target["ids"], source["ids"])


def test_names_are_compared_before_a_byte_moves_and_all_problems_come_at_once(registry):
    source = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4)}
    with publisher(registry, source) as pub:
        pub.publish()
        with subscriber(registry, {"a": torch.zeros(4), "d": torch.zeros(4)}) as sub:
            with pytest.raises(LayoutMismatch) as caught:
                sub.sync(timeout=5)
            assert caught.value.missing == ["d"]
            assert len(caught.value.unexpected) == 2
        with subscriber(registry, {**zeros(source), "d": torch.zeros(4)}) as sub, pytest.raises(MissingTensors):
            sub.sync(timeout=5)
        with subscriber(registry, {"a": torch.zeros(4)}) as sub, pytest.raises(UnexpectedTensors):
            sub.sync(timeout=5)
        with subscriber(
            registry, {"a": torch.zeros(4), "mtp.x": torch.zeros(4)}, strict=False, allow_missing=["mtp.*"]
        ) as sub:
            sub.sync(timeout=5)


def test_a_sync_waits_for_the_first_version_and_says_who_has_not_committed(registry):
    source = {"w": torch.ones(4)}
    with subscriber(registry, zeros(source)) as sub:
        with pytest.raises(NotReady):
            sub.sync(timeout=0.2)
        pubs = [publisher(registry, source, rank=rank, world_size=2, world="w") for rank in (0, 1)]
        pubs[0].publish()
        with pytest.raises(NotReady) as caught:
            sub.sync(timeout=0.3)
        assert caught.value.missing == [1]
        pubs[1].publish()
        assert sub.sync(timeout=5).kind == "full"
        for pub in pubs:
            pub.close()


def test_a_late_subscriber_and_one_that_was_away_take_the_newest(registry):
    source = {"w": torch.zeros(100)}
    with publisher(registry, source) as pub, subscriber(registry, zeros(source)) as away:
        pub.publish()
        away.sync(timeout=5)
        for value in range(1, 11):
            source["w"].fill_(value)
            version = pub.publish()
        target = zeros(source)
        with subscriber(registry, target) as late:
            assert late.sync(at_least=version.number, timeout=5).version == version.number
            assert target["w"].eq(10).all()
        assert away.sync(timeout=5).version == version.number
        assert away.sync(timeout=5).kind == "none"


def shards_of(full, rank, world_size):
    rows = torch.tensor_split(torch.arange(full.shape[0]), world_size)[rank]
    first = int(rows[0]) if len(rows) else full.shape[0]
    return Shard(full[first : first + len(rows)].clone(), shape=full.shape, offset=(first, *[0] * (full.dim() - 1)))


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_that_do_not_divide_and_empty_shards_make_one_version(registry, world_size):
    full = torch.randn(5, 33)
    pubs = [
        publisher(registry, {"w": shards_of(full, rank, world_size)}, rank=rank, world_size=world_size, world="w")
        for rank in range(world_size)
    ]
    target = {"w": torch.zeros(5, 33)}
    with subscriber(registry, target) as sub:
        versions = together(*[lambda pub=pub: pub.publish(step=1) for pub in pubs])
        assert len({version.number for version in versions}) == 1
        sub.sync(timeout=10)
    assert equal(target["w"], full)
    for pub in pubs:
        pub.close()


def test_three_of_four_ranks_never_make_a_version_nor_destroy_the_last_ready_one(registry):
    full = torch.full((8, 4), 1.0)
    shards = [{"w": shards_of(full, rank, 4)} for rank in range(4)]
    pubs = [publisher(registry, shards[rank], rank=rank, world_size=4, world="w") for rank in range(4)]
    first = together(*[lambda pub=pub: pub.publish() for pub in pubs])[0]
    for share in shards:
        share["w"].tensor.fill_(2.0)
    for pub in pubs[:3]:
        pub.publish()
    for pub in pubs[:3]:
        with pytest.raises(IncompleteVersion) as caught:
            pub.publish(timeout=0.3)
        assert caught.value.missing == [3]
    target = {"w": torch.zeros(8, 4)}
    with subscriber(registry, target) as sub:
        assert sub.sync(timeout=5).version == first.number
        assert target["w"].eq(1).all()
    for pub in pubs:
        pub.close(timeout=0.5)


def test_a_rank_whose_publish_raises_aborts_that_version_and_the_next_is_of_one_step(registry):
    full = torch.ones(8, 4)
    shards = [{"w": shards_of(full, rank, 2)} for rank in range(2)]
    broken = [False]

    def tensors():
        if broken[0]:
            raise RuntimeError("export failed")
        return shards[1]

    pubs = [publisher(registry, shards[0], rank=0, world_size=2, world="w")]
    pubs.append(publisher(registry, tensors, rank=1, world_size=2, world="w"))
    together(*[lambda pub=pub: pub.publish(step=0) for pub in pubs])
    broken[0] = True
    outcome = together(*[lambda pub=pub: pub.publish(step=1) for pub in pubs])
    assert isinstance(outcome[1], RuntimeError)
    with pytest.raises(VersionAborted, match="export failed"):
        pubs[0].wait(outcome[0], replicas=0, timeout=5)
    broken[0] = False
    for share in shards:
        share["w"].tensor.fill_(5.0)
    versions = together(*[lambda pub=pub: pub.publish(step=2) for pub in pubs])
    target = {"w": torch.zeros(8, 4)}
    with subscriber(registry, target) as sub:
        report = sub.sync(at_least=versions[0].number, timeout=5)
    assert report.version == versions[0].number == versions[1].number
    assert report.step == 2
    assert target["w"].eq(5).all()
    for pub in pubs:
        pub.close()


def test_different_steps_abort_the_version_and_are_named(registry):
    pubs = [
        publisher(registry, {"w": shards_of(torch.ones(4, 2), r, 2)}, rank=r, world_size=2, world="w") for r in (0, 1)
    ]
    versions = together(lambda: pubs[0].publish(step=3), lambda: pubs[1].publish(step=4))
    with pytest.raises(StepMismatch) as caught:
        pubs[0].wait(versions[0], replicas=0, timeout=5)
    assert set(caught.value.steps.values()) == {3, 4}
    for pub in pubs:
        pub.close()


def test_a_hole_in_the_layout_is_an_error_that_names_the_tensor(registry):
    half = Shard(torch.ones(2, 2), shape=(4, 2), offset=(0, 0))
    pubs = [publisher(registry, {"w": half}, rank=r, world_size=2, world="w") for r in (0, 1)]
    versions = together(*[lambda pub=pub: pub.publish() for pub in pubs])
    with pytest.raises((LayoutMismatch, VersionAborted), match="w"):
        pubs[0].wait(versions[0], replicas=0, timeout=5)
    with pytest.raises(VersionAborted, match="w"):
        pubs[1].wait(versions[1], replicas=0, timeout=5)
    for pub in pubs:
        pub.close()


def test_a_second_process_on_a_living_seat_is_refused_and_a_new_world_fences_the_old(registry):
    source = {"w": torch.ones(4)}
    old = publisher(registry, source, rank=0, world_size=1, world="one")
    with pytest.raises(SeatTaken):
        publisher(registry, source, rank=0, world_size=1, world="one")
    first = old.publish()
    new = publisher(registry, source, rank=0, world_size=1, world="two")
    second = new.publish()
    assert second.number > first.number
    with pytest.raises(Fenced):  # copied, but its commit is refused; a beat may have brought the news before
        old.wait(old.publish(), replicas=0, timeout=5)
    with pytest.raises(Fenced):
        old.publish()
    new.wait(second, replicas=0, timeout=5)
    with subscriber(registry, zeros(source)) as sub:
        assert sub.sync(at_least=second.number, timeout=5).version == second.number
    old.close()
    new.close()


def test_ranks_of_a_replica_switch_together_with_fused_and_column_shards(registry):
    q, k, v, o = (torch.randn(8, 16) for _ in range(4))
    gate, up = torch.randn(12, 16), torch.randn(12, 16)
    source = {"q": q, "k": k, "v": v, "o": o.t().contiguous(), "gate": gate, "up": up}
    live = []
    for rank in (0, 1):
        qkv, gate_up = torch.zeros(12, 16), torch.zeros(12, 16)
        o_part = torch.zeros(16, 4)
        live.append(
            {
                "q": Shard(qkv[0:4], shape=(8, 16), offset=(4 * rank, 0)),
                "k": Shard(qkv[4:8], shape=(8, 16), offset=(4 * rank, 0)),
                "v": Shard(qkv[8:12], shape=(8, 16), offset=(4 * rank, 0)),
                "o": Shard(o_part, shape=(16, 8), offset=(0, 4 * rank)),
                "gate": Shard(gate_up[0:6], shape=(12, 16), offset=(6 * rank, 0)),
                "up": Shard(gate_up[6:12], shape=(12, 16), offset=(6 * rank, 0)),
            }
        )
    subs = [subscriber(registry, live[rank], replica="tp", rank=rank, world_size=2) for rank in (0, 1)]
    with publisher(registry, source) as pub:
        for value in range(3):
            q.fill_(value)
            version = pub.publish()
            pub.wait(version, replicas=0)
            reports = together(*[lambda sub=sub: sub.sync(timeout=10) for sub in subs])
            assert [report.version for report in reports] == [version.number] * 2
            for rank in (0, 1):
                for name, shard in live[rank].items():
                    whole = source[name]
                    part = whole
                    for dim, (start, size) in enumerate(zip(shard.lo, shard.box, strict=True)):
                        part = part.narrow(dim, start, size)
                    assert equal(part, shard.tensor), (rank, name)
        assert [r.kind for r in together(*[lambda sub=sub: sub.sync(timeout=10) for sub in subs])] == ["none", "none"]
    for sub in subs:
        sub.close()


def test_a_replica_that_has_just_met_reads_its_first_version_once(registry):
    source = {"w": torch.ones(8)}
    subs = [subscriber(registry, zeros(source), replica="tp", rank=r, world_size=2) for r in (0, 1)]
    with publisher(registry, source) as pub:
        pub.wait(pub.publish(), replicas=0)
        for kind in ("full", "none", "none"):
            assert [r.kind for r in together(*[lambda sub=sub: sub.sync(timeout=10) for sub in subs])] == [kind] * 2
            assert all(sub.ready for sub in subs)
    for sub in subs:
        sub.close()


@pytest.mark.parametrize("delay", [0.0, 0.03], ids=["prompt", "slow messages"])
def test_ranks_that_run_different_versions_are_healed_by_a_full_round(registry, monkeypatch, delay):
    receive = Ranks._on_message
    monkeypatch.setattr(Ranks, "_on_message", lambda self, data: (time.sleep(delay), receive(self, data)))
    source = {"w": torch.ones(8)}
    targets = [zeros(source) for _ in (0, 1)]
    subs = [subscriber(registry, targets[r], replica="tp", rank=r, world_size=2) for r in (0, 1)]
    with publisher(registry, source) as pub:
        version = pub.publish()
        pub.wait(version, replicas=0)
        together(*[lambda sub=sub: sub.sync(timeout=10) for sub in subs])
        subs[1]._record = None  # as if it had missed the install
        targets[1]["w"].fill_(-1)
        outcomes = together(*[lambda sub=sub: sub.sync(timeout=10) for sub in subs])
        assert outcomes[0].kind == "none"
        assert isinstance(outcomes[1], IncompleteVersion)
        reports = together(*[lambda sub=sub: sub.sync(timeout=10) for sub in subs])
        assert [report.kind for report in reports] == ["full", "full"]
        assert targets[1]["w"].eq(1).all()
    for sub in subs:
        sub.close()


def test_a_rank_that_does_not_call_leaves_the_old_version_on_all(registry):
    source = {"w": torch.ones(8)}
    targets = [{"w": torch.zeros(8)} for _ in (0, 1)]
    subs = [subscriber(registry, targets[r], replica="tp", rank=r, world_size=2) for r in (0, 1)]
    with publisher(registry, source) as pub:
        pub.publish()
        with pytest.raises(IncompleteVersion):
            subs[0].sync(timeout=0.5)
        assert targets[0]["w"].eq(0).all()
        with pytest.raises(IncompleteVersion, match="rank 0"):
            subs[1].sync(timeout=0.3)
        reports = together(*[lambda sub=sub: sub.sync(timeout=10) for sub in subs])
        assert [report.kind for report in reports] == ["full", "full"]
    for sub in subs:
        sub.close()


def test_stage_then_install_or_discard(registry):
    source, target = {"w": torch.ones(8)}, {"w": torch.zeros(8)}
    with publisher(registry, source) as pub, subscriber(registry, target) as sub:
        version = pub.publish()
        staged = sub.stage(timeout=5)
        assert staged.version == version.number
        assert target["w"].eq(0).all()
        staged.discard()
        staged.discard()
        with pytest.raises(VersionAborted):
            staged.install()
        assert sub.version is None
        assert sub.stage(timeout=5).install(timeout=5).version == version.number
        assert target["w"].eq(1).all()
        assert sub.stage(timeout=5) is None


def test_hooks_run_around_the_install_and_a_failing_one_is_told(registry):
    source, target = {"w": torch.ones(8)}, {"w": torch.zeros(8)}
    calls = []
    fail = {"before": False, "after": False}

    def before(old, new):
        calls.append(("before", old, new, float(target["w"][0])))
        if fail["before"]:
            raise RuntimeError("engine busy")

    def after(old, new):
        calls.append(("after", old, new, float(target["w"][0])))
        if fail["after"]:
            raise RuntimeError("cache reset failed")

    with (
        publisher(registry, source) as pub,
        subscriber(registry, target, before_install=before, after_install=after) as sub,
    ):
        one = pub.publish().number
        sub.sync(timeout=5)
        assert calls == [("before", None, one, 0.0), ("after", None, one, 1.0)]
        source["w"].fill_(2.0)
        two = pub.publish().number
        pub.wait(two, replicas=0)
        fail["before"] = True
        with pytest.raises(RuntimeError, match="busy"):
            sub.sync(timeout=5)
        assert sub.version == one
        assert sub.ready
        assert target["w"].eq(1).all()
        fail.update(before=False, after=True)
        from mx_rl.errors import Tainted

        with pytest.raises(Tainted, match="cache reset"):
            sub.sync(timeout=5)
        assert not sub.ready
        fail["after"] = False
        assert sub.sync(timeout=5).version == two, "the next sync heals"
        assert sub.ready


def test_a_slow_reader_costs_the_publisher_the_grace_at_most(registry):
    source = {"w": torch.zeros(1000)}
    with publisher(registry, source) as pub, subscriber(registry, zeros(source)) as sub:
        pub.publish()
        staged = sub.stage(timeout=5)  # holds a lease on version 1 and does nothing more
        assert staged is not None
        begun = time.monotonic()
        for _ in range(4):
            pub.wait(pub.publish(), replicas=0, timeout=5)
        assert time.monotonic() - begun < 4 * FAST.grace_s + 1.0


def test_bad_arguments_name_what_they_take(registry):
    source = {"w": torch.ones(4)}
    for named in ({"rank": 0}, {"rank": 2, "world_size": 2, "world": "w"}, {"rank": 0, "world_size": 2}, {"slots": 1}):
        with pytest.raises(InvalidArgument):
            publisher(registry, source, **named)
    for named in ({"rank": 1, "world_size": 2}, {"sources": ("moon",)}, {"stage": "none"}):
        with pytest.raises(InvalidArgument):
            subscriber(registry, source, **named)
    with publisher(registry, source) as pub:
        with pytest.raises(InvalidArgument, match="65536"):
            pub.publish(metadata={"x": "y" * (64 << 10)})
        with pytest.raises(InvalidArgument, match="JSON"):
            pub.publish(metadata={"x": object()})


def _interrupt(*_):
    raise KeyboardInterrupt


def test_a_close_that_is_interrupted_gives_everything_back_nevertheless(registry, monkeypatch):
    source = {"w": torch.ones(8)}
    pub, sub = publisher(registry, source), subscriber(registry, zeros(source))
    endpoint = sub._endpoint
    monkeypatch.setattr(sub._streams, "leave", _interrupt)
    monkeypatch.setattr(pub._commits, "close", _interrupt)
    for one in (sub, pub):
        with pytest.raises(KeyboardInterrupt):
            one.close()
        one.close()
        assert one.registered_bytes == 0
    assert endpoint._users == 0
    assert not registry._state.policies["p"].replicas


def test_a_close_that_was_interrupted_at_its_beginning_is_gone_on_with(registry, monkeypatch):
    source = {"w": torch.ones(8)}
    for one in (publisher(registry, source), subscriber(registry, zeros(source))):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(one, "_steps", _interrupt)
            one.close()
        one.close()
        assert one.registered_bytes == 0
    assert one._endpoint._users == 0


def test_a_commit_that_fails_unforeseen_is_raised_by_wait_and_by_the_next_publish(registry, monkeypatch):
    def broken(self, commit, snapshot):
        raise ZeroDivisionError("unforeseen")

    with publisher(registry, {"w": torch.ones(3)}) as pub:
        for ask in (lambda version: pub.wait(version, replicas=0, timeout=10), lambda version: pub.publish()):
            with monkeypatch.context() as patch:
                patch.setattr(Partners, "prove", broken)
                version = pub.publish()
                pub._commits.settle(pub._commits.key_of(version.number), time.monotonic() + 10)
            with pytest.raises(MxRLError, match="unforeseen") as found:
                ask(version)
            assert isinstance(found.value.__cause__, ZeroDivisionError)
        assert pub.wait(pub.publish(), replicas=0, timeout=10).ready


def test_a_publish_beside_one_of_another_thread_that_stands_is_busy_and_counts_all_the_same(registry):
    drawn, go = threading.Event(), threading.Event()

    def stands():
        drawn.set()
        assert go.wait(20)
        yield "w", torch.ones(3)

    with publisher(registry, None) as pub:
        other = threading.Thread(target=pub.publish, kwargs={"stream": stands()}, daemon=True)
        other.start()
        assert drawn.wait(10)
        with pytest.raises(Busy, match="another thread"):
            pub.publish(stream=iter([("w", torch.ones(3))]), timeout=0.1)
        go.set()
        other.join(10)
        third = pub.publish(stream=iter([("w", torch.ones(3))]))
        assert third.number == 3
        assert pub.wait(third, replicas=0, timeout=10).ready


def test_a_version_that_met_an_open_hold_stays_staged_and_is_no_failure(registry):
    inside, leave = threading.Event(), threading.Event()
    target = {"w": torch.zeros(3)}

    def generate(sub):
        with sub.hold():
            inside.set()
            assert leave.wait(20)

    with subscriber(registry, target) as sub:
        with publisher(registry, {"w": torch.ones(3)}) as pub:
            version = pub.publish()
            holder = threading.Thread(target=generate, args=(sub,), daemon=True)
            holder.start()
            assert inside.wait(10)
            for _ in range(2):
                with pytest.raises(HoldTimeout):
                    sub.sync(at_least=version.number, timeout=0.3)
                assert sub.staged == version.number
                assert not target["w"].any()
            receipt = pub.wait(version, timeout=0.1)
            assert (receipt.installed, dict(receipt.failed)) == ((), {})
        leave.set()
        holder.join(10)
        assert sub.sync(at_least=version.number, timeout=10).version == version.number, "its publisher is gone"
        assert target["w"].eq(1).all()
