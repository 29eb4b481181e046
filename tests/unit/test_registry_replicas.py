"""What replicas are offered, what they tell, and what publishers learn of it."""

from __future__ import annotations

from typing import Any

from mx_rl.records import AwaitFree, AwaitInstalled, Dead, GetBlobs, Leave, Nothing, Ok, PutBlob, Resolve, Target
from tests.support.registry_lab import POLICY, StateLab, error, source


def published(*replicas: str, versions: int = 1, **rules: Any) -> StateLab:
    lab = StateLab(**rules)
    lab.launch("a0")
    lab.declare("a0")
    for replica in replicas:
        lab.join(replica)
    for k in range(1, versions + 1):
        lab.publish("a0", k=k)
    return lab


def installs(lab: StateLab, number: int, replicas: int | None = None) -> Any:
    return lab.ask(AwaitInstalled(policy=POLICY, number=number, replicas=replicas))


def free(lab: StateLab, region: int, agent: str = "a0") -> Any:
    return lab.ask(AwaitFree(policy=POLICY, source=source(agent, region)))


# ---- seats -----------------------------------------------------------------------------------------------------------


def test_a_replica_is_open_when_all_its_ranks_have_joined() -> None:
    lab = StateLab()
    first = lab.join("r", 0, 2, incarnation="i0", layout="L0")
    assert not first.open
    assert first.agents == ("i0", "")
    seats = lab.join("r", 1, 2, incarnation="i1", layout="L1", endpoint="e1")
    assert seats.open
    assert seats.agents == ("i0", "i1")
    assert seats.layouts == ("L0", "L1")
    assert seats.endpoints == ("i0", "e1")


def test_a_seat_of_a_living_replica_rank_is_taken_and_of_a_dead_one_free() -> None:
    lab = published("r")
    lab.install("r")
    taken = lab.join("r", incarnation="r2")
    assert error(taken) == "SeatTaken"
    assert taken.fields["holder"] == "r"
    lab.ask(Dead(policy=POLICY, agents=("r",)))
    assert lab.join("r", incarnation="r2").open
    assert not lab.view()["replicas"][0]["ready"], "a replacement has no weights yet"
    assert error(lab.resolve("r", incarnation="r")) == "SeatTaken"
    assert lab.install("r", incarnation="r2").number == 1
    assert lab.view()["replicas"][0]["ready"]


def test_a_replica_that_lost_a_rank_is_not_ready_until_it_acknowledges_again() -> None:
    lab = published()
    lab.join("r", 0, 2, incarnation="i0")
    lab.join("r", 1, 2, incarnation="i1")
    target = lab.resolve("r", incarnation="i0")
    held = (source("i0"), source("i1"))
    lab.ack("r", target.record, incarnation="i0", held=held)
    assert lab.view()["replicas"][0]["ready"]
    lab.ask(Dead(policy=POLICY, agents=("i1",)))
    assert not lab.view()["replicas"][0]["ready"]
    lab.join("r", 1, 2, incarnation="j1")
    view = lab.view()["replicas"][0]
    assert not view["ready"]
    assert view["version"] == 1
    assert not view["serves"]
    lab.ack("r", target.record, incarnation="i0")
    assert lab.view()["replicas"][0]["ready"]


def test_an_unknown_member_is_told_so_at_once() -> None:
    lab = StateLab()
    lab.launch("a0")
    result = lab.poll(Resolve(policy=POLICY, replica="r", incarnation="r", wait=30.0), again=False)
    assert isinstance(result, Nothing), "a long poll would hide it for as long as it waits"
    lab.resolve("r")
    assert lab.last is not None
    assert not lab.last.known
    lab.beat("r")
    assert not lab.last.known
    lab.beat("a0")
    assert lab.last.known


# ---- resolve ---------------------------------------------------------------------------------------------------------


def test_resolve_waits_for_the_first_version_and_says_who_has_not_committed() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    lab.declare("a0", 2)
    lab.join("r")
    waiting = Resolve(policy=POLICY, replica="r", incarnation="r", wait=30.0)
    assert lab.poll(waiting, again=False) is None
    lab.commit("a1", 1)
    nothing = lab.resolve("r")
    assert isinstance(nothing, Nothing)
    assert nothing.staging == 1
    assert nothing.missing == (0,)
    lab.commit("a0", 0)
    target = lab.poll(waiting)
    assert target.record.number == 1
    assert target.trainer
    assert target.lease_s == 30.0


def test_resolve_names_the_trainer_ranks_that_have_not_even_claimed() -> None:
    lab = StateLab()
    lab.claim("a0", 0, 3)
    lab.join("r")
    assert lab.resolve("r").missing == (1, 2)


def test_what_is_installed_is_not_offered_again_unless_forced() -> None:
    lab = published("r")
    record = lab.install("r")
    assert isinstance(lab.resolve("r", installed=record.identity), Nothing)
    forced = lab.resolve("r", installed=record.identity, force=True)
    assert isinstance(forced, Target)
    assert forced.record == record


def test_nothing_below_the_installed_version_is_offered() -> None:
    lab = published("peer", "r")
    lab.install("peer")
    lab.ask(Dead(policy=POLICY, agents=("a0",)))
    assert isinstance(lab.resolve("r"), Target)
    nothing = lab.resolve("r", installed=(9, 9, 99))
    assert isinstance(nothing, Nothing), "a member never goes down"
    assert nothing.latest == 99
    refusal = lab.resolve("r", installed=(9, 9, 99), exactly=1)
    assert error(refusal) == "StaleVersion"
    assert refusal.fields == {"installed": 99, "offered": 1}


def test_the_same_number_of_another_run_is_a_conflict_and_offered() -> None:
    lab = published("r")
    target = lab.resolve("r", installed=(12, 34, 1))
    assert isinstance(target, Target), "one number, two contents"
    assert target.record.identity != (12, 34, 1)


def test_at_least_and_exactly_are_respected() -> None:
    lab = published("r", versions=2)
    assert isinstance(lab.resolve("r", at_least=3), Nothing)
    assert lab.resolve("r", at_least=2).record.number == 2
    assert lab.resolve("r", exactly=2).record.number == 2
    assert isinstance(lab.resolve("r", exactly=3), Nothing)
    assert error(lab.resolve("r", exactly=1)) == "VersionGone", "the number is over, and nobody holds it"


def test_peers_that_hold_it_whole_with_equal_layouts_are_named_never_the_asker() -> None:
    lab = published("r0", "r1")
    lab.join("other", layout="S")
    for name in ("r0", "r1", "other"):
        lab.install(name)
    lab.join("new")
    names = [holder.replica for holder in lab.resolve("new").holders]
    assert names == ["r0", "r1"]
    assert [holder.replica for holder in lab.resolve("r0", force=True).holders] == ["r1"]
    holder = lab.resolve("new").holders[0]
    assert holder.sources == (source("r0", 0, 1),)
    assert holder.layouts == ("R",)


def test_readers_are_spread_over_at_most_four_holders() -> None:
    names = [f"r{i}" for i in range(6)]
    lab = published(*names)
    for name in names:
        lab.install(name)
    first_choices = []
    for i in range(6):
        lab.join(f"new{i}")
        target = lab.resolve(f"new{i}")
        assert len(target.holders) == 4
        first_choices.append(target.holders[0].replica)
    assert sorted(first_choices) == names


def test_dead_tainted_and_overwritten_holders_are_not_named() -> None:
    lab = published("dead", "tainted", "moved", "good")
    for name in ("dead", "tainted", "moved", "good"):
        lab.install(name)
    record = lab.install("good", force=True)
    lab.ask(Dead(policy=POLICY, agents=("dead",)))
    lab.ack("tainted", record, state="tainted", reason="killed")
    lab.ack("moved", record, held=())
    lab.join("new")
    assert [holder.replica for holder in lab.resolve("new").holders] == ["good"]
    lab.beat("dead")
    assert [holder.replica for holder in lab.resolve("new").holders] == ["dead", "good"], "it lives after all"


def test_a_death_reported_by_a_waiting_reader_is_not_reported_again_while_it_waits() -> None:
    lab = published("r", "peer")
    record = lab.install("peer")
    waiting = Resolve(policy=POLICY, replica="r", incarnation="r", installed=record.identity, dead=("peer",), wait=30.0)
    assert lab.poll(waiting, again=False) is None
    lab.beat("peer")
    assert lab.poll(waiting) is None
    assert lab.view()["replicas"][0]["ready"], "the accused has answered since"


def test_a_lost_trainer_leaves_the_peers_and_nobody_else_leaves_version_gone() -> None:
    lab = published("r0", "r1", "new")
    lab.install("r0")
    lab.ask(Dead(policy=POLICY, agents=("a0",)))
    target = lab.resolve("new")
    assert not target.trainer
    assert [holder.replica for holder in target.holders] == ["r0"]
    refusal = lab.poll(Resolve(policy=POLICY, replica="new", incarnation="new", dead=("r0",), wait=30.0), again=False)
    assert error(refusal) == "VersionGone", "at once, not after 30 s"
    assert refusal.fields["version"] == 1


def test_who_has_an_older_version_is_told_which_newer_one_is_lost_and_waits_on() -> None:
    lab = published("r0", "r1", "r2")
    record = lab.install("r0")
    lab.publish("a0", k=2)
    lab.ask(Dead(policy=POLICY, agents=("a0",)))
    nothing = lab.resolve("r0", installed=record.identity)
    assert isinstance(nothing, Nothing)
    assert nothing.lost == 2
    assert nothing.latest == 2
    target = lab.resolve("r1")
    assert target.record.number == 1, "version 1 is still available from r0"
    assert target.newer_lost == 2
    assert error(lab.resolve("r0", installed=record.identity, at_least=2)) == "VersionGone"


def test_a_lost_version_is_not_final_while_another_is_staging() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    lab.publish("a0", "a1")
    lab.join("r")
    lab.commit("a0", 0, k=2)
    lab.ask(Dead(policy=POLICY, agents=("a1",)))
    waiting = Resolve(policy=POLICY, replica="r", incarnation="r", wait=30.0)
    assert lab.poll(waiting, again=False) is None
    lab.commit("a1", 1, k=2)
    assert lab.poll(waiting).record.number == 2


def test_a_slot_that_is_filled_again_no_longer_offers_the_older_version() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    lab.join("r")
    lab.publish("a0", "a1", k=1)
    lab.resolve("r")  # its lease keeps version 1 in the registry's table
    lab.publish("a0", "a1", k=2)
    offered = {item["number"]: item["available"] for item in lab.view()["versions"]}
    assert offered == {1: True, 2: True}
    lab.commit("a1", 1, k=3, source=source("a1", 1, 3))
    offered = {item["number"]: item["available"] for item in lab.view()["versions"]}
    assert offered == {1: False, 2: True}, "rank 1 has begun to write over its part of version 1"
    assert error(lab.resolve("r", exactly=1)) == "VersionGone"


# ---- leases ----------------------------------------------------------------------------------------------------------


def test_a_slot_is_free_unless_an_older_version_in_it_is_leased() -> None:
    lab = published("r", versions=1)
    lab.resolve("r")
    assert free(lab, 1).leased_by == (), "the newest version's own lease is no obstacle to the other slot"
    ready = lab.publish("a0", k=2)
    assert ready.number == 2
    assert lab.wait(2).leased == (1,)
    assert free(lab, 1).leased_by == ("r",)
    assert free(lab, 0).leased_by == ()
    waiting = AwaitFree(policy=POLICY, source=source("a0", 1), wait=5.0)
    assert lab.poll(waiting) is None
    lab.ack("r", None, state="failed", number=1)
    assert lab.poll(waiting).leased_by == ()
    assert lab.wait(2).leased == ()


def test_asking_again_does_not_lengthen_a_lease_and_it_ends_by_time() -> None:
    lab = published("r")
    assert lab.resolve("r").lease_s == 30.0
    lab.pass_time(12, "a0", "r")
    assert lab.resolve("r").lease_s == 18.0
    lab.publish("a0", k=2)
    lab.pass_time(19, "a0", "r")
    assert free(lab, 1).leased_by == ()


def test_a_poll_for_news_takes_no_lease() -> None:
    lab = published("r")
    assert lab.resolve("r", lease=False).lease_s == 0.0
    lab.publish("a0", k=2)
    assert lab.wait(2).leased == ()


def test_a_lease_ends_with_its_reader() -> None:
    for end in (Dead(policy=POLICY, agents=("r",)), Leave(policy=POLICY, incarnation="r")):
        lab = published("r")
        lab.resolve("r")
        lab.publish("a0", k=2)
        lab.ask(end)
        assert lab.wait(2).leased == ()


def test_a_reader_that_lost_once_gets_leases_at_peers_only() -> None:
    lab = published("slow", "peer")
    assert lab.resolve("slow", lost=1).lease_s == 0.0
    lab.install("peer")
    assert lab.resolve("slow", lost=1).lease_s == 30.0
    lab.publish("a0", k=2)
    assert free(lab, 1).leased_by == (), "the trainer's slot is not held up a second time"
    assert free(lab, 0, agent="peer").leased_by == ("slow",)


def test_a_reader_that_lost_twice_gets_one_hold_of_twice_its_read_time() -> None:
    lab = published("slow", "slower")
    assert lab.resolve("slow", lost=2, read_s=20.0).lease_s == 40.0
    assert lab.resolve("slower", lost=2, read_s=20.0).lease_s == 30.0, "one hold a policy"
    lab.publish("a0", k=2)
    answer = free(lab, 1)
    assert answer.leased_by == ("slow", "slower")
    assert answer.held_for_s == 40.0
    lab.pass_time(35, "a0", "slow", "slower")
    assert free(lab, 1).leased_by == ("slow",)
    assert free(lab, 1).held_for_s == 5.0
    lab.ack("slow", None, state="failed", number=1)
    assert free(lab, 1).leased_by == ()
    assert free(lab, 1).held_for_s == 0.0


def test_a_hold_is_bounded_and_a_reader_that_cannot_end_within_it_is_told_both_figures() -> None:
    lab = published("slow", "hopeless")
    assert lab.resolve("slow", lost=2, read_s=50.0).lease_s == 60.0
    refusal = lab.resolve("hopeless", lost=2, read_s=61.0)
    assert error(refusal) == "VersionGone"
    assert refusal.fields["read_s"] == 61.0
    assert refusal.fields["grace_max_s"] == 60.0


def test_asking_again_does_not_lengthen_a_hold() -> None:
    lab = published("slow")
    lab.resolve("slow", lost=2, read_s=20.0)
    lab.pass_time(30, "a0", "slow")
    assert lab.resolve("slow", lost=2, read_s=20.0).lease_s == 10.0
    assert lab.view()["hold"]["left_s"] == 10.0


# ---- acknowledgements ------------------------------------------------------------------------------------------------


def test_waiting_for_installs_counts_this_version_or_a_newer_one() -> None:
    lab = published("r0", "r1")
    waiting = AwaitInstalled(policy=POLICY, number=1, wait=9.0)
    lab.install("r0")
    assert lab.poll(waiting) is None
    assert installs(lab, 1).missing == ("r1",)
    lab.publish("a0", k=2)
    lab.install("r1")
    done = lab.poll(waiting)
    assert done.ready
    assert done.installed == ("r0", "r1")
    assert done.missing == ()


def test_later_joiners_are_not_awaited_leavers_are_dropped_and_failures_have_reasons() -> None:
    lab = published("good", "leaver", "failing")
    lab.join("later")
    lab.install("good")
    lab.ask(Leave(policy=POLICY, incarnation="leaver"))
    lab.ack("failing", None, state="failed", number=1, reason="digest differs")
    done = lab.poll(AwaitInstalled(policy=POLICY, number=1, wait=9.0))
    assert done.installed == ("good",)
    assert done.failed == {"failing": "digest differs"}
    assert done.missing == ()
    lab.install("failing")
    assert installs(lab, 1).failed == {}, "a later success heals it"


def test_a_replica_that_fell_silent_ends_the_wait_as_failed() -> None:
    lab = published("r0", "silent")
    lab.install("r0")
    waiting = AwaitInstalled(policy=POLICY, number=1, wait=99.0)
    assert lab.poll(waiting) is None
    lab.pass_time(33, "a0", "r0")
    assert "silent" in lab.poll(waiting).failed


def test_a_number_of_replicas_may_be_asked_for() -> None:
    lab = published("r0", "r1")
    assert lab.poll(AwaitInstalled(policy=POLICY, number=1, replicas=0, wait=9.0)).ready
    waiting = AwaitInstalled(policy=POLICY, number=1, replicas=1, wait=9.0)
    assert lab.poll(waiting) is None
    lab.install("r1")
    assert lab.poll(waiting).installed == ("r1",)
    assert lab.poll(AwaitInstalled(policy=POLICY, number=2, replicas=0, wait=9.0)) is None


def test_an_acknowledgement_that_comes_late_changes_nothing() -> None:
    lab = published("r")
    first = lab.install("r")
    lab.publish("a0", k=2)
    second = lab.install("r")
    assert lab.ack("r", first, held=(source("r", 0, 1),)) == Ok()
    view = lab.view()["replicas"][0]
    assert view["version"] == second.number
    assert view["ready"]


def test_a_tainted_replica_is_not_ready_not_a_source_and_healed_by_a_full_round() -> None:
    lab = published("r")
    record = lab.install("r")
    lab.ack("r", None, state="tainted", number=1, reason="killed in mid-install")
    view = lab.view()["replicas"][0]
    assert not view["ready"]
    assert not view["serves"]
    assert view["reason"] == "killed in mid-install"
    assert installs(lab, 1).failed == {"r": "killed in mid-install"}
    assert lab.install("r", force=True, installed=record.identity).number == 1
    assert lab.view()["replicas"][0]["ready"]


def test_an_acknowledgement_that_was_overtaken_changes_nothing() -> None:
    lab = published("r")
    record = lab.install("r")
    lab.ack("r", record, state="installed", number=1, seq=3)
    lab.ack("r", record, state="tainted", number=1, reason="on its way for long", seq=2)
    assert lab.view()["replicas"][0]["ready"], "what healed it was said later and came first"
    lab.ack("r", record, state="tainted", number=1, reason="news", seq=4)
    assert not lab.view()["replicas"][0]["ready"]
    lab.ask(Dead(policy=POLICY, agents=("r",)))
    lab.join("r", incarnation="r2")
    lab.ack("r", record, state="installed", number=1, incarnation="r2", seq=1)
    assert lab.view()["replicas"][0]["ready"], "another incarnation counts anew"


def test_a_version_that_was_read_whole_and_waits_holds_no_lease_and_what_lay_there_is_served_no_more() -> None:
    lab = published("r", versions=1)
    record = lab.install("r")
    second = lab.publish("a0", k=2)
    assert isinstance(lab.resolve("r", installed=record.identity), Target)
    lab.ack("r", record, state="staged", number=second.number)
    view = lab.view()["replicas"][0]
    assert view["ready"]
    assert view["version"] == record.number
    assert not view["serves"]
    third = lab.publish("a0", k=3)
    assert third.number > second.number
    assert free(lab, 0).leased_by == free(lab, 1).leased_by == ()


# ---- time and garbage ------------------------------------------------------------------------------------------------


def test_a_silent_replica_is_dropped_after_its_lease_and_known_again_when_it_joins() -> None:
    lab = published("r")
    lab.install("r")
    lab.pass_time(33, "a0")
    assert lab.view()["replicas"] == []
    assert "r" in lab.view()["gone"]
    lab.beat("r")
    assert lab.last is not None
    assert not lab.last.known
    lab.join("r")
    assert lab.view()["gone"] == {}


def test_a_stopped_trainer_that_continues_keeps_its_seat_if_nobody_took_it() -> None:
    lab = published("r")
    lab.pass_time(40, "r")
    assert error(lab.resolve("r")) == "VersionGone"
    lab.beat("a0")
    assert lab.last is not None
    assert lab.last.known
    assert lab.resolve("r").trainer
    assert lab.commit("a0", k=2).state == "ready"


def test_blobs_live_while_a_member_or_a_version_refers_to_them() -> None:
    lab = published("r")
    for key, owner in (("W", "a0"), ("R", "r"), ("junk", "r"), ("r", "r")):
        assert lab.ask(PutBlob(policy=POLICY, key=key, data=key.encode() * 3, owner=owner)) == Ok()
    assert lab.ask(GetBlobs(policy=POLICY, keys=("W", "no"))).blobs == {"W": b"WWW"}
    lab.install("r")
    lab.pass_time(40, "r")
    assert set(lab.ask(GetBlobs(policy=POLICY, keys=("W", "R", "junk", "r"))).blobs) == {"W", "R", "junk", "r"}
    lab.ask(Leave(policy=POLICY, incarnation="r"))
    lab.pass_time(3)
    assert set(lab.ask(GetBlobs(policy=POLICY, keys=("R", "junk", "r"))).blobs) == set()


def test_a_blob_is_immutable() -> None:
    lab = StateLab()
    lab.ask(PutBlob(policy=POLICY, key="k", data=b"one", owner="r"))
    assert lab.ask(PutBlob(policy=POLICY, key="k", data=b"one", owner="s")) == Ok()
    assert error(lab.ask(PutBlob(policy=POLICY, key="k", data=b"two", owner="r"))) == "InvalidArgument"


def test_waiting_for_blobs_ends_when_all_are_there() -> None:
    lab = StateLab()
    waiting = GetBlobs(policy=POLICY, keys=("a", "b"), wait=5.0)
    lab.ask(PutBlob(policy=POLICY, key="a", data=b"1", owner="r"))
    assert lab.poll(waiting) is None
    lab.ask(PutBlob(policy=POLICY, key="b", data=b"2", owner="r"))
    assert lab.poll(waiting).blobs == {"a": b"1", "b": b"2"}


def test_an_empty_policy_is_forgotten_but_its_floor_stays() -> None:
    lab = published("r", versions=3)
    lab.ask(Leave(policy=POLICY, incarnation="a0"))
    lab.ask(Leave(policy=POLICY, incarnation="r"))
    lab.pass_time(400)
    assert POLICY not in lab.state.policies
    assert lab.view()["floor"] == 3
    lab.launch("b0", world="v")
    assert lab.publish("b0", world="v").number == 4


def test_a_policy_needs_a_name_of_bounded_length() -> None:
    lab = StateLab()
    lab.policy = ""
    assert error(lab.claim("a0")) == "InvalidArgument"
    lab.policy = "x" * 300
    assert error(lab.claim("a0")) == "InvalidArgument"
