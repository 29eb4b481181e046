"""The picture of a run: what was learnt above, how long the weights took below."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from examples.grpo.log import Log


def draw(log: Log, path: Path) -> None:
    """Write a PNG."""
    at = [step.step for step in log.steps]
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    above.plot(at, [step.reward for step in log.steps], color="tab:blue", alpha=0.3, label="reward of the step")
    above.plot(at, [step.smoothed for step in log.steps], color="tab:blue", label="smoothed")
    above.set_ylabel("reward")
    above.set_ylim(0, 1.02)
    below.plot(at, [step.sync_s * 1e3 for step in log.steps], color="tab:green", label="sync, all rollouts")
    below.plot(at, [step.publish_s * 1e3 for step in log.steps], color="tab:olive", label="publish")
    below.set_ylabel("ms")
    below.set_ylim(bottom=0)
    below.set_xlabel("step")
    for axes in (above, below):
        for step, _ in log.events:
            axes.axvline(step, color="tab:red", linestyle=":", linewidth=1)
        axes.legend(loc="best")
    above.set_title("\n".join(f"step {step}: {text}" for step, text in log.events), fontsize=8, color="tab:red")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
