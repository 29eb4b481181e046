"""What a run writes while it goes on: one line a step for people, one JSON object a step for programs."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm


@dataclass(frozen=True, kw_only=True)
class Step:
    step: int
    version: int
    reward: float
    """Mean over the samples of this step."""
    smoothed: float
    staleness: int
    """Versions by which the oldest sample was behind the trainer's weights."""
    rollouts: int
    wire_bytes: int
    """Received by all rollouts together."""
    publish_s: float
    sync_s: float
    """From the request until every rollout had installed the version."""
    generate_s: float
    train_s: float

    @property
    def rate_gbps(self) -> float:
        """GB/s into all rollouts together."""
        return self.wire_bytes / self.sync_s / 1e9 if self.sync_s else 0.0


@dataclass
class Log:
    """Steps and events, kept for the summary, shown on stdout and appended to ``log.jsonl``."""

    folder: Path
    total: int
    steps: list[Step] = field(default_factory=list)
    events: list[tuple[int, str]] = field(default_factory=list)

    def __enter__(self) -> Log:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / "log.jsonl").open("w", encoding="utf-8")
        self._bar = tqdm(total=self.total, unit="step", disable=not sys.stdout.isatty(), file=sys.stdout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._file.close()

    def step(self, step: Step) -> None:
        self.steps.append(step)
        self._write({**asdict(step), "rate_gbps": step.rate_gbps})
        self.say(
            f"step {step.step:3d}  version {step.version:3d}  reward {step.reward:.3f} (smoothed {step.smoothed:.3f})  "
            f"stale {step.staleness}  rollouts {step.rollouts}  {step.wire_bytes / 1e6:.1f} MB  "
            f"publish {step.publish_s:.3f} s  sync {step.sync_s:.3f} s  {step.rate_gbps:.2f} GB/s  "
            f"generate {step.generate_s:.2f} s  train {step.train_s:.2f} s"
        )
        self._bar.update()

    def event(self, text: str) -> None:
        """Something that happened between steps; the plot marks it."""
        at = self.steps[-1].step + 1 if self.steps else 0
        self.events.append((at, text))
        self._write({"event": text, "step": at})
        self.say(f"---- {text}")

    def say(self, text: str) -> None:
        self._bar.write(text) if sys.stdout.isatty() else print(text, flush=True)

    def medians(self) -> dict[str, float]:
        """Over steps that moved bytes."""
        moved = [step for step in self.steps if step.wire_bytes]
        names = ("wire_bytes", "publish_s", "sync_s", "rate_gbps", "generate_s", "train_s")
        return {name: statistics.median(getattr(step, name) for step in moved) for name in names} if moved else {}

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
