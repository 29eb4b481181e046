"""The round's book: one decision, a full house or nothing, whatever is repeated, dropped or reordered."""

from hypothesis import given
from hypothesis import strategies as st

from mx_rl.records import Decision, Finished, Hello, Installed, Round, Vote
from mx_rl.replica import Follower, Leader


def _round(number: int) -> Round:
    return Round(round=number, record=None)


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
