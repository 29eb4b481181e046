"""Replicated boxes at the registry: copies that differ, shares told from other layouts, what is left when a rank dies."""

from __future__ import annotations

import pytest

from mx_rl.records import Dead, Target
from mx_rl.registry.partners import basis_of
from tests.support.registry_lab import POLICY, StateLab, error, source

BASIS = basis_of(["layout0", "layout1", "layout2"])
EQUAL = {0: {1: b"01010101", 2: b"02020202"}, 1: {0: b"01010101", 2: b"12121212"}, 2: {0: b"02020202", 1: b"12121212"}}


def world(size: int = 3) -> StateLab:
    lab = StateLab()
    names = [f"a{rank}" for rank in range(size)]
    lab.launch(*names)
    lab.declare("a0", size, copies=((0, 1), (1, 2), (0, 2)))
    return lab


def publish(lab: StateLab, k: int = 1, **changes: dict[str, object]) -> object:
    """All three ranks commit, with equal sums but for ``changes`` (by rank: "a1")."""
    for rank in range(3):
        named = {"sums": EQUAL[rank], "basis": BASIS} | changes.get(f"a{rank}", {})
        outcome = lab.commit(f"a{rank}", rank, k=k, **named)
    return outcome


def test_equal_sums_make_a_version_whose_record_says_who_holds_copies() -> None:
    lab = world()
    ready = publish(lab)
    assert ready.state == "ready"
    assert ready.record.copies == ((0, 1), (1, 2), (0, 2))
    assert (ready.basis, ready.whole, ready.differ) == (BASIS, True, ())


def test_sums_that_differ_abort_as_soon_as_both_are_told_and_name_ranks_and_entries() -> None:
    lab = world()
    lab.commit("a2", 2, sums=EQUAL[2], basis=BASIS)
    drifted = {0: EQUAL[0] | {2: b"02020202"[:-1] + b"!"}}
    outcome = lab.commit("a0", 0, sums=drifted[0], basis=BASIS)
    assert outcome.state == "aborted"
    assert outcome.differ == (0, 2)
    assert outcome.entries == (0,)
    assert "0 and 2" in outcome.reason
    assert lab.commit("a1", 1, sums=EQUAL[1], basis=BASIS) == outcome
    assert publish(lab, k=2).state == "ready"


def test_one_drifted_rank_differs_from_both_its_partners() -> None:
    lab = world()
    outcome = publish(lab, a1={"sums": {0: b"xxxxxxxx", 2: b"yyyyyyyy"}})
    assert outcome.state == "aborted"
    assert outcome.differ[:2] == (0, 1)


def test_sums_are_compared_only_between_ranks_that_know_the_same_layouts() -> None:
    lab = world()
    assert publish(lab, a1={"basis": "other", "sums": {0: b"xxxxxxxx"}}).state == "ready"
    assert publish(lab, k=2, a1={"basis": "", "sums": {}}).state == "ready"


def test_a_share_told_from_other_layouts_than_the_ranks_have_is_never_ready() -> None:
    lab = world()
    fine = {"layout": "share1", "holds": "layout1"}
    lab.declare("a0", layouts=("layout0", "share1", "layout2"))
    ready = publish(lab, a1=fine)
    assert (ready.state, ready.basis, ready.whole) == ("ready", BASIS, False)
    stale = publish(lab, k=2, a1=fine, a2={"layout": "new2", "basis": "", "sums": {}})
    assert stale.state == "aborted"
    assert "tensors have changed" in stale.reason
    assert stale.basis not in ("", BASIS), "so that every rank snapshots everything again"


def test_sums_beyond_the_limit_are_refused() -> None:
    lab = world()
    assert error(lab.commit("a0", 0, sums={1: bytes(8192)}, basis=BASIS)) == "InvalidArgument"


@pytest.mark.parametrize(("dead", "available"), [((), True), (("a0",), True), (("a2",), True), (("a0", "a1"), False)])
def test_a_version_is_there_while_one_rank_of_each_set_lives(dead: tuple[str, ...], available: bool) -> None:
    lab = world()
    record = publish(lab).record
    lab.join("r")
    lab.ask(Dead(policy=POLICY, agents=dead))
    found = lab.resolve("r")
    assert isinstance(found, Target) == available
    if available:
        assert found.record == record
        assert found.trainer


def test_without_copies_each_rank_is_needed() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    lab.declare("a0", 2)
    lab.commit("a0", 0)
    assert lab.commit("a1", 1).record.copies == ()
    lab.join("r")
    lab.ask(Dead(policy=POLICY, agents=("a1",)))
    assert not isinstance(lab.resolve("r"), Target)


def test_a_member_that_tells_a_version_tells_who_holds_copies() -> None:
    lab = world()
    record = publish(lab).record
    again = lab.restart()
    again.join("r")
    again.ack("r", record, held=(source("r", 0, 1),))
    assert again.resolve("r", installed=record.identity, force=True) is not None
    assert again.state.policies[POLICY].versions[record.number].record.copies == record.copies
