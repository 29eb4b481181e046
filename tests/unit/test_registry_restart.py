"""A registry that forgot, and members that tell it again what they hold."""

from __future__ import annotations

import msgspec

from mx_rl.records import AwaitInstalled, Dead, Nothing, Refused, Target, VersionRecord
from mx_rl.registry.state import State
from tests.support.registry_lab import POLICY, StateLab, error, source


def record(number: int, *, epoch: int, nonce: int = 1, agent: str = "gone") -> VersionRecord:
    return VersionRecord(
        policy=POLICY,
        number=number,
        epoch=epoch,
        nonce=nonce,
        step=None,
        kind="full",
        layout="W",
        window_bytes=4096,
        sources=(source(agent),),
        wire_bytes=100,
    )


def test_every_answer_carries_boot_and_floor() -> None:
    lab = StateLab()
    lab.launch("a0")
    lab.publish("a0")
    lab.beat("a0")
    assert lab.last is not None
    assert lab.last.boot == 1
    assert lab.last.floor in (0, 1)
    lab.commit("a0")
    assert lab.last.floor == 1
    assert lab.restart().state.boot == 2


def test_the_floor_is_reported_to_be_saved_with_the_answer_that_raises_it() -> None:
    lab = StateLab()
    lab.launch("a0")
    lab.publish("a0")
    assert lab.state.unsaved[POLICY].floor == 1
    lab.state.unsaved.clear()
    lab.beat("a0")
    assert not lab.state.unsaved


def test_a_new_claim_after_a_restart_goes_above_the_saved_floor() -> None:
    lab = StateLab()
    lab.launch("a0")
    for k in range(1, 58):
        lab.publish("a0", k=k)
    again = lab.restart()
    again.launch("b0", world="v")
    assert again.publish("b0", world="v").number == 58


def test_the_same_incarnations_get_the_same_epoch_and_their_version_back() -> None:
    lab = StateLab()
    seat = lab.launch("a0", "a1")
    held = lab.publish("a0", "a1")
    lab.join("r")
    for again in (lab.restart(), lab.restart(saved=False)):
        lab.clock.now += 1
        asked = {"epoch": seat.epoch, "nonce": seat.nonce, "base": seat.base, "k": 1, "held": held}
        refusal = again.commit("a0", 0, k=2, seat=seat)
        assert error(refusal) == "IncompleteVersion"
        assert refusal.fields["claim_again"]
        assert again.last is not None
        assert not again.last.known
        assert again.claim("a0", 0, 2, **asked).missing == (1,)
        assert again.claim("a1", 1, 2, **asked) == seat
        again.join("r")
        target = again.resolve("r")
        assert target.record == held
        assert target.trainer
        assert again.commit("a0", 0, k=1).state == "ready", "it was READY before the registry forgot"
        again.commit("a0", 0, k=2)
        assert not again.commit("a1", 1, k=2).declared, "layouts are told again"
        again.declare("a0", 2)
        assert again.wait(2).number == 2


def test_a_commit_cut_short_by_the_restart_is_committed_again_under_a_number_above_the_floor() -> None:
    lab = StateLab()
    seat = lab.launch("a0", "a1")
    first = lab.publish("a0", "a1")
    lab.publish("a0", "a1", k=2)  # READY and saved, but the answer is lost with the registry
    again = lab.restart()
    asked = {"epoch": seat.epoch, "nonce": seat.nonce, "base": 0, "k": 2, "held": first}
    again.claim("a0", 0, 2, **asked)
    again.claim("a1", 1, 2, **asked)
    again.declare("a0", 2)
    again.commit("a0", 0, k=2)
    ready = again.commit("a1", 1, k=2)
    assert ready.state == "ready"
    assert ready.number == 3
    assert again.publish("a0", "a1", k=3).number == 4


def test_a_newcomer_does_not_take_the_seat_of_a_rank_that_has_not_spoken_since_the_restart() -> None:
    lab = StateLab()
    seat = lab.launch("a0", "a1")
    again = lab.restart()
    again.claim("b1", 1, 2)
    asked = {"epoch": seat.epoch, "nonce": seat.nonce}
    again.claim("a1", 1, 2, **asked)
    assert again.claim("a0", 0, 2, **asked) == seat
    assert error(again.claim("b1", 1, 2)) == "Fenced"


def test_a_fenced_world_that_speaks_first_after_a_restart_stays_fenced() -> None:
    lab = StateLab()
    old = lab.launch("a0")
    lab.publish("a0")
    new = lab.launch("b0", world="v")
    again = lab.restart()
    assert error(again.claim("a0", epoch=old.epoch, nonce=old.nonce)) == "Fenced"
    assert again.claim("b0", world="v", epoch=new.epoch, nonce=new.nonce, base=new.base) == new


def test_a_replaced_rank_that_speaks_first_after_a_restart_loses_to_its_successor() -> None:
    lab = StateLab()
    old = lab.launch("a0", "a1")
    lab.ask(Dead(policy=POLICY, agents=("a1",)))
    lab.claim("b1", 1, 2)
    new = lab.claim("a0", 0, 2)
    again = lab.restart()
    again.claim("a1", 1, 2, epoch=old.epoch, nonce=old.nonce)
    again.claim("b1", 1, 2, epoch=new.epoch, nonce=new.nonce, rejoined=True)
    assert again.claim("a0", 0, 2, epoch=new.epoch, nonce=new.nonce, rejoined=True) == new
    assert new.rejoined, "the rule about steps outlives the registry"
    assert error(again.claim("a1", 1, 2, epoch=old.epoch, nonce=old.nonce)) == "Fenced"


def test_subscribers_alone_restore_a_version_whose_publisher_is_gone() -> None:
    lab = StateLab()
    lab.launch("a0")
    lab.join("r0")
    held = lab.publish("a0")
    lab.install("r0")
    again = lab.restart(saved=False)
    again.join("r0")
    again.ack("r0", held, held=(source("r0", 0, 1),))
    assert again.view()["floor"] == 1
    assert again.view()["replicas"][0]["ready"]
    again.join("new")
    target = again.resolve("new")
    assert target.record == held
    assert not target.trainer
    assert [holder.replica for holder in target.holders] == ["r0"]
    again.launch("b0", world="v")
    assert again.publish("b0", world="v").number == 2


def test_awaiting_installs_survives_a_restart() -> None:
    lab = StateLab()
    lab.launch("a0")
    lab.join("r0")
    held = lab.publish("a0")
    again = lab.restart()
    again.join("r0")
    assert again.ask(AwaitInstalled(policy=POLICY, number=1)).missing == ("r0",)
    again.ack("r0", held)
    assert again.ask(AwaitInstalled(policy=POLICY, number=1)).installed == ("r0",)


def test_a_version_of_a_dead_run_told_late_raises_the_floor_and_the_living_one_is_reissued_above_it() -> None:
    """Registry and publisher were reborn while one subscriber was cut off; it comes back with 57 > 3."""
    lab = StateLab()
    lab.launch("b0", world="v")
    for k in (1, 2, 3):
        lab.publish("b0", k=k, world="v")
    lab.join("fleet")
    lab.install("fleet")
    old = record(57, epoch=5)
    lab.join("cut off")
    lab.ack("cut off", old, held=(source("cut off"),))
    view = lab.view()
    assert view["floor"] == 58
    assert [item["number"] for item in view["versions"] if item["offered"]] == [58]
    target = lab.resolve("fleet", installed=(lab.seats["v"].epoch, lab.seats["v"].nonce, 3))
    assert target.record.number == 58
    assert target.record.sources == (source("b0", 1, 3),)
    healed = lab.resolve("cut off", installed=old.identity)
    assert healed.record.number == 58
    assert lab.publish("b0", k=4, world="v").number == 59


def test_the_same_told_by_a_resolve_alone() -> None:
    lab = StateLab()
    lab.launch("b0")
    lab.publish("b0")
    lab.join("cut off")
    target = lab.resolve("cut off", installed=(5, 1, 57))
    assert isinstance(target, Target)
    assert target.record.number == 58


def test_an_old_record_before_the_new_epochs_first_version_is_available_again() -> None:
    lab = StateLab()
    lab.launch("b0")
    lab.join("r0")
    lab.ack("r0", record(57, epoch=5), held=(source("r0"),))
    lab.join("new")
    assert lab.resolve("new").record.number == 57
    assert lab.publish("b0").number == 58


def test_a_living_publisher_that_tells_its_version_after_a_dead_runs_is_reissued_too() -> None:
    lab = StateLab()
    seat = lab.launch("b0")
    held = lab.publish("b0")
    again = lab.restart(saved=False)
    again.join("cut off")
    again.ack("cut off", record(57, epoch=5), held=(source("cut off"),))
    again.claim("b0", epoch=seat.epoch, nonce=seat.nonce, base=0, k=1, held=held)
    offered = [item for item in again.view()["versions"] if item["offered"]]
    assert [(item["number"], item["epoch"]) for item in offered] == [(58, seat.epoch)]


def test_one_number_of_two_runs_is_never_two_versions() -> None:
    lab = StateLab()
    seat = lab.launch("b0")
    held = lab.publish("b0")
    again = lab.restart(saved=False)
    again.join("r")
    again.ack("r", msgspec.structs.replace(record(1, epoch=5), nonce=9), held=(source("r"),))
    again.claim("b0", epoch=seat.epoch, nonce=seat.nonce, base=0, k=1, held=held)
    target = again.resolve("r", installed=(5, 9, 1))
    assert target.record.number == 2
    assert target.record.epoch == seat.epoch


def test_a_number_told_while_a_version_is_staging_lifts_it_above() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    lab.declare("a0", 2)
    assert lab.commit("a0", 0).number == 1
    lab.join("r")
    lab.resolve("r", installed=(5, 1, 57))
    ready = lab.commit("a1", 1)
    assert ready.number == 58
    assert lab.publish("a0", "a1", k=2).number == 59


def test_a_registry_that_may_have_forgotten_waits_before_it_opens_or_gives_up() -> None:
    state = State(1, settle_s=6.0)
    lab = StateLab(state)
    assert not lab.claim("a0").open, "members may yet tell a floor"
    lab.join("r")
    lab.join("s")
    lab.ack("r", record(57, epoch=5))
    assert isinstance(lab.resolve("s"), Nothing), "its publisher may only not have spoken yet"
    assert lab.claim("a0").open, "a floor is known now"
    lab.pass_time(7, "a0", "r", "s")
    refusal = lab.resolve("s")
    assert isinstance(refusal, Refused)
    assert refusal.error == "VersionGone"
    assert lab.claim("a0").base == 57


def test_a_dead_runs_version_is_not_offered_even_while_the_living_publisher_cannot_be_reached() -> None:
    lab = StateLab()
    lab.launch("b0")
    lab.publish("b0")
    lab.join("fleet")
    mine = lab.install("fleet")
    lab.ask(Dead(policy=POLICY, agents=("b0",)))
    lab.join("cut off")
    lab.ack("cut off", record(57, epoch=5), held=(source("cut off"),))
    assert lab.view()["floor"] == 57
    nothing = lab.resolve("fleet", installed=mine.identity)
    assert isinstance(nothing, Nothing), "57 of the dead run would roll the fleet back"
    lab.pass_time(2, "b0", "fleet", step=1.0)
    assert lab.resolve("fleet", installed=mine.identity).record.number == 58


def test_a_number_given_above_a_told_floor_and_aborted_is_burnt() -> None:
    lab = StateLab()
    lab.launch("a0", "a1")
    lab.join("r")
    lab.resolve("r", installed=(5, 1, 57))
    assert lab.commit("a0", 0).number == 58
    assert lab.commit("a1", 1, error="oom").state == "aborted"
    assert lab.commit("a0", 0, k=2).number == 59
