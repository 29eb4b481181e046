"""Claims, epochs and fences of the registry's state machine."""

from __future__ import annotations

from mx_rl.records import Claim, Dead, Leave, Seat
from tests.support.registry_lab import POLICY, StateLab, error


def test_an_epoch_opens_when_every_seat_is_claimed_and_says_who_is_missing() -> None:
    lab = StateLab()
    assert lab.claim("a0", 0, 3).missing == (1, 2)
    assert lab.claim("a2", 2, 3).missing == (1,)
    seat = lab.claim("a1", 1, 3, nonce=77)
    assert seat.open
    assert seat.missing == ()
    assert not seat.rejoined
    assert seat.epoch == int(lab.clock.now * 1000), "an epoch is the registry's clock in ms"
    assert seat.nonce == 77, "with the nonce of the claimer that completed it"


def test_a_claim_that_waits_is_answered_when_the_last_seat_is_taken() -> None:
    lab = StateLab()
    waiting = Claim(policy=POLICY, world="w", rank=0, world_size=2, incarnation="a0", nonce=1, wait=5.0)
    assert lab.poll(waiting, again=False) is None
    before = lab.state.changes(POLICY)
    seat = lab.claim("a1", 1, 2)
    assert lab.state.changes(POLICY) != before, "nobody would wake the first rank"
    assert lab.poll(waiting) == seat


def test_repeating_a_claim_gives_the_same_epoch() -> None:
    lab = StateLab()
    seat = lab.launch("a0", "a1")
    lab.clock.now += 5
    assert lab.claim("a0", 0, 2) == seat
    assert lab.claim("a1", 1, 2) == seat


def test_an_epoch_begins_above_the_floor_and_every_start_after() -> None:
    lab = StateLab()
    lab.launch("a0")
    lab.publish("a0")
    assert lab.launch("b0", world="v", start_after=40).base == 40
    assert lab.publish("b0", world="v").number == 41
    assert lab.launch("c0", world="u", start_after=7).base == 41


def test_a_second_living_process_on_a_seat_is_refused() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    taken = lab.claim("b1", 1, 2)
    assert error(taken) == "SeatTaken"
    assert taken.fields["holder"] == "a1"
    assert lab.claim("a1", 1, 2).open, "the holder was not disturbed"


def test_a_seat_that_is_being_claimed_is_taken_too() -> None:
    lab = StateLab()
    lab.claim("a0", 0, 2)
    assert error(lab.claim("b0", 0, 2)) == "SeatTaken"


def test_the_seat_of_a_dead_rank_changes_hands_and_survivors_rejoin() -> None:
    lab = StateLab()
    old = lab.launch("a0", "a1")
    lab.ask(Dead(policy=POLICY, agents=("a1",)))
    assert lab.claim("b1", 1, 2).missing == (0,), "the survivor has to claim again"
    seat = lab.claim("a0", 0, 2)
    assert seat.open
    assert seat.rejoined
    assert seat.epoch > old.epoch
    assert lab.claim("b1", 1, 2) == seat
    assert error(lab.claim("a1", 1, 2)) == "Fenced", "a rank that lost its seat is fenced for good"


def test_a_seat_is_free_once_its_lease_ran_out_without_any_report() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    lab.pass_time(31, "a0")
    assert not error(lab.claim("b1", 1, 2))
    assert lab.claim("a0", 0, 2).rejoined


def test_suspicion_is_withdrawn_by_the_next_word_of_the_accused() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    lab.ask(Dead(policy=POLICY, agents=("a1",)))
    lab.beat("a1")
    assert error(lab.claim("b1", 1, 2)) == "SeatTaken"


def test_another_world_waits_for_all_its_ranks_and_then_fences_the_old_one() -> None:
    lab = StateLab()
    old = lab.launch("a0", "a1")
    lab.claim("b0", 0, 2, world="v")
    assert lab.publish("a0", "a1").number == 1, "an incomplete world fences nobody"
    seat = lab.claim("b1", 1, 2, world="v")
    assert seat.open
    assert seat.base == 1
    assert not seat.rejoined
    assert seat.epoch > old.epoch
    for rank, incarnation in enumerate(("a0", "a1")):
        assert error(lab.commit(incarnation, rank, k=2, seat=old)) == "Fenced"
        refusal = lab.claim(incarnation, rank, 2)
        assert error(refusal) == "Fenced"
        assert refusal.fields["epoch"] == seat.epoch
    assert lab.claim("b0", 0, 2, world="v") == seat


def test_two_worlds_cannot_take_turns() -> None:
    lab = StateLab()
    lab.launch("a0")
    lab.launch("b0", world="v")
    for _ in range(3):
        assert error(lab.claim("a0")) == "Fenced"
        assert lab.claim("b0", world="v").open


def test_a_process_that_was_fenced_may_launch_a_world_of_another_name() -> None:
    lab = StateLab()
    lab.launch("a0")
    lab.launch("b0", world="v")
    assert lab.claim("a0", world="w2").open


def test_an_epoch_never_opens_over_a_claimer_that_died() -> None:
    lab = StateLab()
    lab.launch("a0")
    lab.claim("b0", 0, 2, world="v")
    lab.pass_time(40, "a0")
    assert lab.claim("b1", 1, 2, world="v").missing == (0,), "b0 has been silent for longer than its lease"
    assert not error(lab.commit("a0"))
    lab.ask(Dead(policy=POLICY, agents=("b1",)))
    assert lab.claim("b0", 0, 2, world="v").missing == (1,), "nor over one that is reported dead"


def test_epoch_numbers_grow_even_if_the_clock_does_not() -> None:
    lab = StateLab()
    first = lab.launch("a0")
    lab.clock.now -= 500
    assert lab.launch("b0", world="v").epoch == first.epoch + 1


def test_one_world_has_one_size_while_anybody_of_it_lives() -> None:
    lab = StateLab()
    lab.claim("a0", 0, 2)
    refusal = lab.claim("a1", 1, 3)
    assert error(refusal) == "InvalidArgument"
    assert "2" in refusal.message
    assert "3" in refusal.message
    lab.clock.now += 31
    assert lab.claim("b0", 0, 3).missing == (1, 2)


def test_a_single_rank_that_was_restarted_continues_without_a_step() -> None:
    lab = StateLab()
    lab.launch("a0")
    lab.publish("a0")
    lab.ask(Dead(policy=POLICY, agents=("a0",)))
    assert not lab.launch("b0").rejoined, "there is no survivor whose step could differ"
    assert lab.publish("b0").number == 2


def test_a_rank_that_closed_frees_its_seat_at_once_even_for_the_same_process() -> None:
    lab = StateLab()
    first = lab.launch("a0")
    lab.publish("a0")
    lab.ask(Leave(policy=POLICY, incarnation="a0"))
    again = lab.launch("a0")
    assert again.epoch > first.epoch, "its publishes count from 1 again, so that the epoch must be another"
    assert lab.publish("a0").number == 2


def test_leaving_one_world_leaves_the_replica_of_the_same_process_alone() -> None:
    lab = StateLab()
    lab.launch("a0")
    lab.join("r", incarnation="a0")
    lab.ask(Leave(policy=POLICY, incarnation="a0", world="w"))
    assert lab.beat("a0") is not None
    assert lab.last is not None
    assert lab.last.known
    assert [item["replica"] for item in lab.view()["replicas"]] == ["r"]
    assert lab.view()["epoch"]["superseded"]
    lab.ask(Leave(policy=POLICY, incarnation="a0", replica="r"))
    assert lab.view()["replicas"] == []
    assert lab.view()["counts"]["members"] == 0


def test_the_memory_of_fenced_incarnations_is_bounded_and_the_forgotten_stay_fenced() -> None:
    lab = StateLab()
    first = lab.launch("i0")
    for number in range(1, 4300):
        lab.clock.now += 0.01
        assert isinstance(lab.claim(f"i{number}", world=f"w{number}"), Seat)
    assert lab.view()["counts"]["fenced"] <= 4096
    assert error(lab.commit("i0", seat=first)) == "Fenced"
    assert error(lab.claim("i0", epoch=first.epoch)) == "Fenced"
