"""The loop: generate, reward, train, publish, sync; at half time an ordeal, at the end the comparison bit for bit."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from examples.grpo.faults import Faults, Ordeal
from examples.grpo.log import Log, Step
from examples.grpo.rollout import Group, Request
from examples.grpo.settings import Settings
from examples.grpo.task import Task, chunks
from mx_rl.ray import RolloutFleet, TrainerGroup

SMOOTHING = 0.8
RECOVERY_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Exam:
    """The likeliest answers to the same prompts: their mean reward, and the first of them."""

    reward: float
    question: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    before: Exam
    after: Exam
    ordeal: Ordeal
    trouble: str
    compared: dict[str, list[str]]
    """Replica to the names of tensors that differ from the trainer's."""
    version: int


class Loop:
    def __init__(self, settings: Settings, task: Task, group: TrainerGroup, fleet: RolloutFleet, log: Log) -> None:
        self._settings = settings
        self._task = task
        self._group = group
        self._fleet = fleet
        self._log = log
        self._chance = random.Random(settings.seed)
        self._faults = Faults(fleet, timeout=RECOVERY_S)
        self._version = 0

    def run(self) -> Outcome:
        self._deliver(step=0)
        before = self._examine()
        smoothed: float | None = None
        for step in range(1, self._settings.steps + 1):
            if step == self._settings.steps // 2 + 1:
                self._log.event("SIGKILL to a rollout at work, and one more rollout")
                self._faults.start()
            started = time.monotonic()
            groups = self._generate(step)
            generated = time.monotonic()
            rewards = [[self._task.reward(text, group.prompt.answer) for text in group.texts] for group in groups]
            reward = sum(map(sum, rewards)) / sum(map(len, rewards))
            smoothed = reward if smoothed is None else SMOOTHING * smoothed + (1 - SMOOTHING) * reward
            staleness = self._version - min(group.version for group in groups)
            self._group.call("train_step", groups, rewards)
            trained = time.monotonic()
            rollouts, wire_bytes, published_s, synced_s = self._deliver(step=step)
            self._log.step(
                Step(
                    step=step,
                    version=self._version,
                    reward=reward,
                    smoothed=smoothed,
                    staleness=staleness,
                    rollouts=rollouts,
                    wire_bytes=wire_bytes,
                    publish_s=published_s,
                    sync_s=synced_s,
                    generate_s=generated - started,
                    train_s=trained - generated,
                )
            )
        self._await_recovery()
        return Outcome(
            before=before,
            after=self._examine(),
            ordeal=self._faults.ordeal,
            trouble=self._faults.trouble,
            compared=self._compare(),
            version=self._version,
        )

    def _deliver(self, *, step: int) -> tuple[int, int, float, float]:
        """Publish and sync: rollouts that installed it, bytes moved, seconds of both."""
        started = time.monotonic()
        version = self._group.publish(step=step)
        self._version = version.number
        published = time.monotonic()
        report = self._fleet.sync(at_least=version)
        synced = time.monotonic()
        for replica, reason in report.failed.items():
            self._log.say(f"---- {replica} did not install version {version.number}: {reason}")
        wire_bytes = sum(each.wire_bytes for each in report.reports.values())
        return len(report.installed), wire_bytes, published - started, synced - published

    def _generate(self, step: int) -> list[Group]:
        prompts = self._task.prompts(self._chance, self._settings.num_prompts)
        parts = chunks(prompts, self._num_ready())
        seed = (self._settings.seed * 100_000 + step) * 100
        requests = [Request(prompts=tuple(part), seed=seed + number) for number, part in enumerate(parts)]
        groups = [group for made in self._fleet.map("generate", requests) for group in made]
        if self._faults.note(groups, self._version):
            ordeal = self._faults.ordeal
            self._log.event(
                f"whole again: replacement serves after {ordeal.replacement_s:.1f} s, newcomer after "
                f"{ordeal.newcomer_s:.1f} s"
            )
        return groups

    def _examine(self) -> Exam:
        prompts = self._task.exam()
        answers = [text for part in self._fleet.map("answer", chunks(prompts, self._num_ready())) for text in part]
        rewards = [self._task.reward(text, prompt.answer) for text, prompt in zip(answers, prompts, strict=True)]
        return Exam(reward=sum(rewards) / len(rewards), question=prompts[0].text, answer=answers[0])

    def _num_ready(self) -> int:
        ready: int = self._fleet.status()["num_ready"]
        return ready

    def _await_recovery(self) -> None:
        """A short run may be over before new processes are up: serve on until they take part, without training."""
        until = time.monotonic() + RECOVERY_S
        step = self._settings.steps
        while not (self._faults.ordeal.survived or self._faults.trouble) and time.monotonic() < until:
            step += 1
            self._fleet.sync(at_least=self._version)
            self._generate(step)
        self._faults.close()

    def _compare(self) -> dict[str, list[str]]:
        self._fleet.sync(at_least=self._version)
        mine = self._group.call("digests")[0]
        return {
            replica: sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            for replica, (theirs, *_) in self._fleet.call("digests").items()
        }
