"""The two policies and their tokens: SmolLM2 from a folder, and a tiny random one that needs no file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from examples.grpo.settings import Settings


class Tokens(ABC):
    """Text to token numbers and back."""

    end: int
    """The token that ends a completion."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> Tensor:
        """int64 [texts, length]. Raises ValueError where the lengths differ."""

    @abstractmethod
    def decode(self, numbers: Sequence[int]) -> str:
        """The text before the end token."""


class FileTokens(Tokens):
    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.end = self._tokenizer.eos_token_id

    def encode(self, texts: Sequence[str]) -> Tensor:
        return torch.tensor(self._tokenizer(list(texts)).input_ids)

    def decode(self, numbers: Sequence[int]) -> str:
        return str(self._tokenizer.decode(before(numbers, self.end)))


class LetterTokens(Tokens):
    alphabet = "\0abcdefgh:"
    end = 0

    def encode(self, texts: Sequence[str]) -> Tensor:
        return torch.tensor([[self.alphabet.index(letter) for letter in text] for text in texts])

    def decode(self, numbers: Sequence[int]) -> str:
        return "".join(self.alphabet[number] for number in before(numbers, self.end))


def before(numbers: Sequence[int], end: int) -> list[int]:
    """``numbers`` up to the first ``end``."""
    numbers = list(numbers)
    return numbers[: numbers.index(end)] if end in numbers else numbers


def make_tokens(settings: Settings) -> Tokens:
    return LetterTokens() if settings.checkpoint is None else FileTokens(settings.checkpoint)


def make_model(settings: Settings, *, dtype: torch.dtype, weights: bool) -> nn.Module:
    """A causal language model of transformers. Without ``weights`` they are random: a rollout's come over mx-rl."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Plain attention: sequences are a hundred tokens at most, and the fused kernel's backward pass is slower on a CPU.
    options = {"dtype": dtype, "attn_implementation": "eager"}
    if settings.checkpoint is not None and weights:
        stored: nn.Module = AutoModelForCausalLM.from_pretrained(settings.checkpoint, **options)
        return stored
    if settings.checkpoint is not None:
        config = AutoConfig.from_pretrained(settings.checkpoint)
    else:
        config = LlamaConfig(
            vocab_size=len(LetterTokens.alphabet),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=LetterTokens.end,
            pad_token_id=LetterTokens.end,
        )
    random: nn.Module = AutoModelForCausalLM.from_config(config, **options)
    return random
