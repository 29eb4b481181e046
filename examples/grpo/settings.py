"""Everything that a run is made of: the two presets, and what the command line changes in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Settings:
    """``quick`` presets train a random model of a few thousand parameters; the other one SmolLM2-135M-Instruct."""

    quick: bool
    steps: int
    num_prompts: int
    """Prompts a step."""
    num_samples: int
    """Completions a prompt: the group whose mean reward is the baseline."""
    num_tokens: int
    """Tokens a completion, at most."""
    lr: float
    temperature: float = 1.0
    clip: float = 2.0
    """The largest weight of a token whose probability has grown since the rollout sampled it."""
    autocast: bool = False
    """Multiply in bfloat16 while training; master weights and optimizer stay float32."""
    seed: int = 0
    world_size: int = 1
    replicas: int = 2
    checkpoint: Path | None = None
    trainer_threads: int = 1
    rollout_threads: int = 1


SMOLLM2 = Settings(quick=False, steps=60, num_prompts=8, num_samples=8, num_tokens=4, lr=1e-5, autocast=True)
TINY = Settings(quick=True, steps=60, num_prompts=8, num_samples=16, num_tokens=6, lr=3e-3)
