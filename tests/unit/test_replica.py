"""The round's book: one decision, a full house or nothing, whatever is repeated, dropped or reordered."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx_rl.records import Decision, Finished, Hello, Installed, Moved, Ready, Round, Shut, VersionRecord, Vote
from mx_rl.replica import Follower, Leader


def _round(number: int) -> Round:
    return Round(round=number, record=None)


def _version(number: int, *, ahead: bool = False) -> Round:
    record = VersionRecord(
        policy="p",
        number=number,
        epoch=1,
        nonce=1,
        step=None,
        kind="full",
        layout="",
        window_bytes=4096,
        sources=(),
        wire_bytes=0,
    )
    return Round(round=number, record=record, ahead=ahead)


def test_holds_are_shut_only_when_every_rank_is_ready():
    leader = Leader(3)
    number = leader.begin()
    leader.receive(Ready(round=number, rank=0))
    reply = leader.receive(Ready(round=number, rank=1))
    assert reply == Moved(round=number, rank=0, windows=0), "not yet: how far the others are"
    assert leader.not_ready == [2]
    with pytest.raises(AssertionError):
        leader.call_shut()
    leader.receive(Ready(round=number, rank=2))
    assert leader.call_shut() == Shut(round=number)
    assert leader.receive(Ready(round=number, rank=1)) == Shut(round=number), "told again to whoever asks again"
    leader.begin()
    assert isinstance(leader.receive(Ready(round=number, rank=1)), Decision), "of a round that is over"
    assert leader.not_ready == [0, 1, 2], "a new round begins anew"


def test_progress_of_any_rank_is_told_to_those_who_wait():
    leader, follower = Leader(3), Follower()
    number = leader.begin()
    leader.receive(Moved(round=number, rank=0, windows=3))
    leader.receive(Moved(round=number, rank=2, windows=5))
    leader.receive(Moved(round=number, rank=2, windows=4))
    reply = leader.receive(Ready(round=number, rank=1))
    assert reply == Moved(round=number, rank=0, windows=8)
    follower.receive(_version(number))
    follower.take()
    follower.receive(reply)
    assert follower.windows == 8
    assert leader.missing_parts == [0, 2]
    leader.receive(Moved(round=number, rank=2, windows=9, whole=True))
    assert leader.missing_parts == [0]


def test_a_prefetch_takes_versions_only_and_a_call_answers_nothing_newer_first():
    follower = Follower()
    follower.receive(_round(1))
    assert follower.next_part is None, "nothing newer is left for a call"
    follower.receive(_version(2, ahead=True))
    assert follower.next_round.round == 1
    assert follower.take_part().round == 2
    assert follower.next_round.round == 1, "rank 0 answered its call so, though it has fetched ahead since"
    assert follower.take().round == 1
    assert follower.taken == 2, "the version that waits is still the one taken"
    assert follower.next_round is None


def test_a_call_that_was_missed_is_not_answered_once_rank_0_calls_for_what_it_fetched_ahead():
    follower = Follower()
    follower.receive(_round(1))
    follower.receive(_version(2, ahead=True))
    follower.take_part()
    follower.receive(_version(2))
    assert follower.nothing is None
    assert follower.next_round is None
    assert not follower.superseded(2)
    follower.receive(_version(3))
    assert follower.superseded(2)


def test_a_round_commits_only_when_every_rank_agreed():
    leader = Leader(3)
    number = leader.begin()
    for rank in (0, 1):
        leader.receive(Vote(round=number, rank=rank, agree=True))
    assert leader.missing_votes == [2]
    assert not leader.voted
    assert leader.decide(True).commit is False, "a missing vote can never commit"


def test_one_refusal_ends_the_wait_and_the_round():
    leader = Leader(3)
    number = leader.begin()
    leader.receive(Vote(round=number, rank=1, agree=False, reason="VersionGone: slot reused"))
    assert leader.voted
    assert leader.refusals == {1: "VersionGone: slot reused"}
    assert leader.decide(True).commit is False


def test_a_decision_is_made_once_and_told_again_to_whoever_asks_late():
    leader = Leader(2)
    number = leader.begin()
    leader.receive(Vote(round=number, rank=0, agree=True))
    leader.receive(Vote(round=number, rank=1, agree=True))
    decision = leader.decide(True)
    assert decision.commit
    assert leader.decide(False) is decision
    assert leader.receive(Vote(round=number, rank=1, agree=True)) is decision
    leader.begin()
    assert leader.receive(Vote(round=number, rank=1, agree=True)) == decision, "of a round that is over"


def test_a_vote_of_a_former_round_does_not_count_in_the_next():
    # One barrier key for two rounds lets the second through at once (MoonshotAI/checkpoint-engine#106).
    leader = Leader(2)
    first = leader.begin()
    second = leader.begin()
    assert second > first
    leader.receive(Vote(round=second, rank=0, agree=True))
    reply = leader.receive(Vote(round=first, rank=1, agree=True))
    assert reply == Decision(round=first, commit=False, reason="rank 0 began another round")
    assert leader.missing_votes == [1]


def test_a_rank_that_failed_to_install_or_never_answered_breaks_the_round():
    leader = Leader(3)
    number = leader.begin()
    for rank in range(3):
        leader.receive(Vote(round=number, rank=rank, agree=True))
    leader.decide(True)
    leader.receive(Installed(round=number, rank=0, agree=True))
    leader.receive(Installed(round=number, rank=1, agree=False, reason="RuntimeError: after_install"))
    finished = leader.finish()
    assert not finished.agree
    assert "rank 1: RuntimeError" in finished.reason
    assert "rank 2: did not answer" in finished.reason


def test_a_newcomer_is_noted_in_any_round():
    leader = Leader(2)
    leader.receive(Hello(round=0, rank=1, agent="a"))
    assert leader.greeted[1].agent == "a"


def test_a_follower_takes_each_round_once_and_skips_those_called_off():
    follower = Follower()
    follower.receive(_round(1))
    follower.receive(_round(1))
    assert follower.take().round == 1
    assert follower.next_round is None
    follower.receive(_round(2))
    follower.receive(Decision(round=2, commit=False))
    assert follower.next_round is None
    follower.receive(_round(3))
    assert follower.take().round == 3


def test_a_decision_of_another_round_does_not_reach_the_one_taken():
    follower = Follower()
    follower.receive(_round(4))
    follower.take()
    follower.receive(Decision(round=3, commit=True))
    follower.receive(Finished(round=3, agree=True))
    assert follower.decision is None
    assert follower.finished is None
    follower.receive(Decision(round=4, commit=True))
    assert follower.decision == Decision(round=4, commit=True)


@given(st.data())
def test_ranks_never_disagree_about_a_round_whatever_happens_to_messages(data):
    ranks = data.draw(st.integers(2, 4))
    leader, followers = Leader(ranks), [Follower() for _ in range(ranks)]
    wires: list[tuple[int, object]] = []  # (to, message); rank 0 is the leader
    committed: dict[int, bool] = {}
    learned: dict[int, set[bool]] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["begin", "vote", "decide", "deliver", "drop", "repeat"]))
        if action == "begin":
            number = leader.begin()
            wires += [(rank, _round(number)) for rank in range(1, ranks)]
            leader.receive(Vote(round=number, rank=0, agree=data.draw(st.booleans())))
        elif action == "vote":
            rank = data.draw(st.integers(1, ranks - 1))
            if followers[rank].next_round is not None:
                told = followers[rank].take()
                wires.append((0, Vote(round=told.round, rank=rank, agree=data.draw(st.booleans()))))
        elif action == "decide" and leader.round:
            decision = leader.decide(data.draw(st.booleans()))
            assert committed.setdefault(decision.round, decision.commit) == decision.commit
            if decision.commit:
                assert set(leader.votes) == set(range(ranks))
                assert not leader.refusals
            wires += [(rank, decision) for rank in range(1, ranks)]
        elif wires:
            index = data.draw(st.integers(0, len(wires) - 1))
            to, message = wires[index] if action == "repeat" else wires.pop(index)
            if action == "drop":
                continue
            if to == 0:
                reply = leader.receive(message)
                if reply is not None:
                    wires.append((message.rank, reply))
            else:
                followers[to].receive(message)
                decision = followers[to].decision
                if decision is not None:
                    learned.setdefault(decision.round, set()).add(decision.commit)
    for number, answers in learned.items():
        assert len(answers) == 1, f"round {number} was told both ways"
