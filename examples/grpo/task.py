"""What is asked of the policy, and the rules that reward its answers."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Prompt:
    text: str
    answer: str


class Task(ABC):
    """All prompts of a task have one length in tokens, so that they stack without padding."""

    @abstractmethod
    def prompts(self, chance: random.Random, number: int) -> list[Prompt]:
        """Prompts to train on."""

    @abstractmethod
    def exam(self) -> list[Prompt]:
        """The same prompts every time, asked before and after."""

    @abstractmethod
    def reward(self, completion: str, answer: str) -> float:
        """0 to 1."""


class Addition(Task):
    """Sums of two digits, in the chat form of SmolLM2. 0.3 for nothing but a number, 0.7 more for the right one."""

    def prompts(self, chance: random.Random, number: int) -> list[Prompt]:
        # Sums that differ: otherwise one number that pleases many prompts is learnt, and asking ends.
        return [self._prompt_for(total, chance) for total in chance.sample(range(2, 19), number)]

    def exam(self) -> list[Prompt]:
        return [self._prompt(a, b) for a in (3, 1, 6, 8) for b in (4, 2, 7, 9)]

    def reward(self, completion: str, answer: str) -> float:
        text = completion.strip().removesuffix(".")
        return 0.3 * text.isdecimal() + 0.7 * (text == answer)

    def _prompt_for(self, total: int, chance: random.Random) -> Prompt:
        first = chance.randint(max(1, total - 9), min(9, total - 1))
        return self._prompt(first, total - first)

    @staticmethod
    def _prompt(a: int, b: int) -> Prompt:
        question = f"What is {a}+{b}? Answer with the number only."
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return Prompt(text, str(a + b))


class Echo(Task):
    """Say the letter asked for, and nothing else: the share of the completion that is that letter."""

    letters = "abcdefgh"

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def prompts(self, chance: random.Random, number: int) -> list[Prompt]:
        return [self._prompt(letter) for letter in chance.sample(self.letters, number)]

    def exam(self) -> list[Prompt]:
        return [self._prompt(letter) for letter in self.letters]

    def reward(self, completion: str, answer: str) -> float:
        return completion.count(answer) / self._num_tokens

    @staticmethod
    def _prompt(letter: str) -> Prompt:
        return Prompt(f"{letter}:", letter)


def chunks(prompts: Sequence[Prompt], number: int) -> list[list[Prompt]]:
    """Cut into at most ``number`` runs of nearly equal length, none empty."""
    number = max(1, min(number, len(prompts)))
    cuts = [len(prompts) * i // number for i in range(number + 1)]
    return [list(prompts[a:b]) for a, b in pairwise(cuts)]
