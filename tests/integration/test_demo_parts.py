"""The parts of the GRPO example that can be wrong without a visible failure."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch


def test_packed_logits_equal_those_of_each_sequence_alone():
    from examples.grpo.model import make_model
    from examples.grpo.packing import completion_logits
    from examples.grpo.settings import TINY

    torch.manual_seed(0)
    model = make_model(TINY, dtype=torch.float32, weights=True).eval()
    prompts = torch.randint(1, 9, (2, 4))
    completions = torch.randint(1, 9, (2, 3, 5))
    packed = completion_logits(model, prompts, completions)
    for group in range(2):
        for sample in range(3):
            ids = torch.cat([prompts[group], completions[group, sample]])[None]
            alone = model(input_ids=ids).logits[0, 3:-1]
            torch.testing.assert_close(packed[group, sample], alone, atol=1e-5, rtol=1e-5)


def test_the_next_token_is_predicted_as_in_each_sequence_alone():
    from examples.grpo.model import make_model
    from examples.grpo.packing import next_logits
    from examples.grpo.settings import TINY

    torch.manual_seed(0)
    model = make_model(TINY, dtype=torch.float32, weights=True).eval()
    prompts = torch.randint(1, 9, (2, 4))
    for tokens in (0, 1, 3):
        completions = torch.randint(1, 9, (2, 3, tokens))
        packed = next_logits(model, prompts, completions)
        for group in range(2):
            for sample in range(3):
                ids = torch.cat([prompts[group], completions[group, sample]])[None]
                alone = model(input_ids=ids).logits[0, -1]
                torch.testing.assert_close(packed[group, sample], alone, atol=1e-5, rtol=1e-5)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    from examples.grpo.rollout import draw

    torch.manual_seed(0)
    shares = torch.tensor([0.1, 0.2, 0.0, 0.3, 0.4])
    drawn = draw(shares.log().expand(20_000, 5))
    assert drawn.shape == (20_000, 1)
    found = torch.bincount(drawn.flatten(), minlength=5) / 20_000
    torch.testing.assert_close(found, shares, atol=0.02, rtol=0)
    assert found[2] == 0


def test_sums_of_a_step_differ():
    import random

    from examples.grpo.task import Addition

    prompts = Addition().prompts(random.Random(0), 17)
    assert sorted(int(prompt.answer) for prompt in prompts) == list(range(2, 19))


def test_a_group_of_equals_teaches_nothing_and_the_best_gains_most():
    from examples.grpo.grpo import advantages

    found = advantages(torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.5, 1.0]]))
    assert found[0].tolist() == [0.0, 0.0, 0.0]
    assert found[1].argmax() == 2
    assert found[1].sum().abs() < 1e-6


def test_tokens_behind_the_end_do_not_count():
    from examples.grpo.grpo import completed

    assert completed(torch.tensor([[5, 0, 0], [0, 0, 0], [5, 6, 7]]), 0).tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]


def test_the_loss_raises_the_probability_of_the_better_sample():
    from examples.grpo.grpo import completed, policy_loss

    logits = torch.zeros(1, 2, 1, 4, requires_grad=True)
    tokens = torch.tensor([[[1], [2]]])
    sampled = torch.full((1, 2, 1), 0.25).log()
    loss = policy_loss(logits, tokens, sampled, torch.tensor([[1.0, -1.0]]), completed(tokens, 0), clip=2.0)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[0, 0, 0, 1] < 0 < logits.grad[0, 1, 0, 2]


def test_prompts_are_cut_into_runs_that_miss_none():
    from examples.grpo.task import Echo, chunks

    prompts = Echo(6).exam()
    for number in (0, 1, 3, 8, 20):
        parts = chunks(prompts, number)
        assert [prompt for part in parts for prompt in part] == prompts
        assert all(parts)


def test_rewards_follow_the_rules_of_the_task():
    from examples.grpo.task import Addition, Echo

    addition = Addition()
    assert addition.reward("7", "7") == pytest.approx(1.0)
    assert addition.reward("8", "7") == pytest.approx(0.3)
    assert addition.reward("3 + 4 = 7", "7") == 0.0
    assert Echo(6).reward("aaabba", "a") == pytest.approx(4 / 6)


def test_one_changed_bit_changes_a_digest():
    from examples.grpo.digests import digests

    weights = {"w": torch.arange(6, dtype=torch.float32).reshape(2, 3)}
    before = digests(weights, torch.bfloat16)
    weights["w"][1, 2] += 1
    assert digests(weights, torch.bfloat16)["w"] != before["w"]


def test_a_run_whose_weights_differ_does_not_pass(tmp_path):
    from examples.grpo.faults import Ordeal
    from examples.grpo.log import Log, Step
    from examples.grpo.loop import Exam, Outcome
    from examples.grpo.settings import TINY
    from examples.grpo.summary import facts, text

    exam = Exam(reward=0.0, question="a:", answer="b")
    good = Outcome(
        before=exam,
        after=exam,
        ordeal=Ordeal(victim="r0", pid=1, replacement="r2", replacement_s=1.0, newcomer="r3", newcomer_s=1.0),
        trouble="",
        compared={"r1": []},
        version=2,
    )
    step = Step(
        step=1,
        version=2,
        reward=0.1,
        smoothed=0.1,
        staleness=0,
        rollouts=2,
        wire_bytes=10,
        publish_s=0.1,
        sync_s=0.1,
        generate_s=0.1,
        train_s=0.1,
    )
    with Log(tmp_path, 1) as log:
        log.step(step)
    assert facts(TINY, good, log, 1.0)["passed"]
    for bad in (
        replace(good, compared={"r1": ["w"]}),
        replace(good, compared={}),
        replace(good, ordeal=Ordeal()),
        replace(good, trouble="NotReady: nothing"),
    ):
        found = facts(TINY, bad, log, 1.0)
        assert not found["passed"]
        assert text(json.loads(json.dumps(found)))
    assert "DIFFER" in text(facts(TINY, replace(good, compared={"r1": ["w"]}), log, 1.0))
