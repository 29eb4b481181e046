"""From commits to READY versions: numbers, aborts, layouts."""

from __future__ import annotations

import pytest

from mx_rl.records import Await, Commit, Dead, Leave, Ok
from tests.support.registry_lab import POLICY, StateLab, error, source


def test_a_version_is_ready_only_when_every_rank_committed_and_the_layout_is_declared() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    first = lab.commit("a0", 0, step=3, metadata=b'{"x":1}')
    assert (first.number, first.state, first.missing, first.layouts) == (1, "staging", (1,), ())
    both = lab.commit("a1", 1, step=3)
    assert (both.state, both.layouts, both.declared) == ("staging", ("layout0", "layout1"), False)
    assert lab.declare("a0", 2) == Ok()
    ready = lab.wait()
    assert (ready.number, ready.state, ready.latest) == (1, "ready", 1)
    record = ready.record
    assert record.step == 3
    assert record.metadata == b'{"x":1}'
    assert record.wire_bytes == 200
    assert record.layout == "W"
    assert record.window_bytes == 4096
    assert record.sources == (source("a0", 1, 1), source("a1", 1, 1))
    assert lab.commit("a0", 0, k=2).missing == (1,)
    assert lab.commit("a1", 1, k=2).state == "ready", "a layout is declared once"


def test_a_declaration_by_another_hash_of_layouts_does_not_help() -> None:
    lab = StateLab()
    lab.launch("a0")
    lab.declare("a0", layouts=("other",))
    assert not lab.commit("a0").declared


def test_repeating_a_commit_changes_nothing() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    lab.declare("a0", 2)
    first = lab.commit("a0", 0, source=source("a0", 0, 5))
    assert lab.commit("a0", 0, source=source("a0", 1, 9)) == first, "the first word counts"
    ready = lab.commit("a1", 1)
    assert ready.state == "ready"
    assert ready.record.sources[0] == source("a0", 0, 5)
    changes = lab.state.changes(POLICY)
    assert lab.commit("a0", 0) == ready
    assert lab.commit("a1", 1) == ready
    assert lab.state.changes(POLICY) == changes
    assert lab.view()["floor"] == 1


def test_an_error_on_one_rank_aborts_the_version_for_all_and_burns_its_number() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    lab.declare("a0", 2)
    lab.commit("a0", 0)
    aborted = lab.commit("a1", 1, error="OutOfMemoryError: 3 GiB")
    assert aborted.state == "aborted"
    assert aborted.reason == "rank 1: OutOfMemoryError: 3 GiB"
    assert lab.wait() == aborted
    assert lab.commit("a0", 0) == aborted
    assert lab.publish("a0", "a1", k=2).number == 2
    assert lab.view()["floor"] == 2


def test_an_error_on_the_first_rank_aborts_before_the_others_have_spoken() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    assert lab.commit("a0", 0, error="boom").state == "aborted"
    assert lab.commit("a1", 1).state == "aborted"


def test_different_steps_abort_the_version_and_name_ranks_and_steps() -> None:
    lab = StateLab()
    lab.launch("a0", "a1", "a2")
    lab.commit("a0", 0, step=7)
    aborted = lab.commit("a1", 1, step=8)
    assert aborted.state == "aborted"
    assert aborted.steps == {"0": 7, "1": 8}
    assert aborted.reason.startswith("StepMismatch")
    assert "rank 0: 7" in aborted.reason
    assert "rank 1: 8" in aborted.reason


def test_different_windows_abort_the_version() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    lab.commit("a0", 0)
    aborted = lab.commit("a1", 1, window_bytes=8192)
    assert aborted.state == "aborted"
    assert "8192" in aborted.reason
    assert "4096" in aborted.reason


def test_a_rank_without_bytes_commits_an_empty_share() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    lab.declare("a0", 2)
    lab.commit("a0", 0)
    record = lab.commit("a1", 1, source=None, window_bytes=0, wire_bytes=0).record
    assert record.sources[1].agent == ""
    assert record.window_bytes == 4096
    lab.join("r")
    assert lab.resolve("r").trainer, "an empty share is always there"


def test_the_first_version_after_a_rejoin_needs_equal_steps_on_every_rank() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    lab.publish("a0", "a1")
    lab.ask(Dead(policy=POLICY, agents=("a1",)))
    lab.claim("b1", 1, 2)
    assert lab.claim("a0", 0, 2).rejoined
    lab.commit("a0", 0, k=1)
    aborted = lab.commit("b1", 1, k=1)
    assert aborted.state == "aborted"
    assert aborted.reason.startswith("StepMismatch")
    assert aborted.steps
    lab.commit("a0", 0, k=2, step=5)
    assert lab.commit("b1", 1, k=2, step=5).state == "ready"
    lab.commit("a0", 0, k=3)
    assert lab.commit("b1", 1, k=3).state == "ready", "only the first one needs it"


def test_a_lost_rank_aborts_what_is_staging_and_survivors_are_told_to_claim_again() -> None:
    lab = StateLab()
    old = lab.launch("a0", "a1")
    lab.commit("a0", 0, step=1)
    lab.ask(Dead(policy=POLICY, agents=("a1",)))
    assert lab.wait().state == "staging", "it may come back"
    lab.claim("b1", 1, 2)
    aborted = lab.wait(seat=old)
    assert aborted.state == "aborted"
    assert "b1" in aborted.reason
    again = lab.commit("a0", 0, k=2, step=2, seat=old)
    assert error(again) == "IncompleteVersion"
    assert again.fields["claim_again"]
    assert again.fields["missing"] == [0]
    assert error(lab.commit("a1", 1, seat=old)) == "Fenced"
    lab.claim("a0", 0, 2)
    assert error(lab.commit("a0", 0, k=2, step=2, seat=old)) == "IncompleteVersion"
    lab.commit("a0", 0, k=1, step=2)
    lab.commit("b1", 1, k=1, step=2)
    lab.declare("a0", 2)
    assert lab.wait().number == 2, "1 was told as the number of the aborted version: it is burnt"


def test_a_rank_that_closed_aborts_what_it_has_not_committed() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    lab.commit("a0", 0)
    lab.ask(Leave(policy=POLICY, incarnation="a1"))
    assert lab.wait().state == "aborted"
    refusal = lab.commit("a0", 0, k=2)
    assert error(refusal) == "IncompleteVersion"
    assert "closed" in refusal.message


def test_a_version_may_become_ready_after_a_committed_rank_has_closed_but_keeps_serving() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    lab.declare("a0", 2)
    lab.commit("a1", 1)
    lab.ask(Leave(policy=POLICY, incarnation="a1", keep_sources=True))
    assert lab.commit("a0", 0).state == "ready"
    lab.join("r")
    assert lab.resolve("r").trainer
    lab.pass_time(31, "a0", "r")
    assert error(lab.resolve("r")) == "VersionGone", "it serves for one lease, not for ever"


def test_a_later_publish_that_overtakes_aborts_the_earlier_one() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    lab.declare("a0", 2)
    lab.commit("a0", 0, k=1)
    lab.publish("a0", "a1", k=2)
    assert lab.wait(1).state == "aborted"
    assert lab.commit("a1", 1, k=1).state == "aborted", "a READY number never appears below another"
    assert lab.view()["floor"] == 2


def test_a_commit_that_waits_is_answered_when_its_version_is_ready() -> None:
    lab = StateLab()
    seat = lab.launch("a0", "a1")
    lab.declare("a0", 2)
    waiting = Commit(
        policy=POLICY, epoch=seat.epoch, nonce=seat.nonce, k=1, rank=0, incarnation="a0", layout="layout0", wait=9
    )
    assert lab.poll(waiting, again=False) is None
    lab.commit("a1", 1)
    assert lab.poll(waiting).state == "ready"


def test_waiting_for_layouts_ends_when_all_have_told_theirs() -> None:
    lab = StateLab()
    seat = lab.launch("a0", "a1")
    waiting = Await(policy=POLICY, epoch=seat.epoch, k=1, layouts_only=True, wait=9)
    assert lab.poll(waiting) is None
    lab.commit("a0", 0)
    assert lab.poll(waiting) is None
    lab.commit("a1", 1)
    assert lab.poll(waiting).layouts == ("layout0", "layout1")
    assert lab.poll(Await(policy=POLICY, epoch=seat.epoch, k=1, wait=9)) is None, "READY is another question"


@pytest.mark.parametrize("k", [0, -3])
def test_publishes_count_from_one(k: int) -> None:
    lab = StateLab()
    lab.launch("a0")
    assert error(lab.commit("a0", k=k, source=source("a0"))) == "InvalidArgument"


def test_metadata_is_bounded() -> None:
    lab = StateLab()
    lab.launch("a0")
    refusal = lab.commit("a0", metadata=b"x" * (64 * 1024 + 1))
    assert error(refusal) == "InvalidArgument"
    assert "65537" in refusal.message
    assert lab.commit("a0", metadata=b"x" * 64 * 1024).state == "staging"


def test_ten_thousand_versions_leave_bounded_state_behind() -> None:
    lab = StateLab()
    lab.launch("a0")
    lab.declare("a0")
    lab.join("r")
    for k in range(1, 10_001):
        lab.clock.now += 0.01
        assert lab.commit("a0", k=k).state == "ready"
        if k % 50 == 0:
            lab.install("r", lease=True)
            lab.beat("a0", "r")
    policy = lab.state.policies[POLICY]
    assert policy.floor == 10_000
    sizes = {name: len(value) for name in policy.__slots__ if isinstance(value := getattr(policy, name), dict)} | {
        "rounds": len(policy.epoch.rounds) if policy.epoch else 0
    }
    assert max(sizes.values()) <= 70, sizes
