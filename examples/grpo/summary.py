"""The end of a run in facts: as text, as JSON, and whether it counts as passed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from examples.grpo.log import Log
from examples.grpo.loop import Outcome
from examples.grpo.settings import Settings


def facts(settings: Settings, outcome: Outcome, log: Log, seconds: float) -> dict[str, Any]:
    differing = sum(map(len, outcome.compared.values()))
    smoothed = [step.smoothed for step in log.steps]
    return {
        "passed": outcome.ordeal.survived and not outcome.trouble and bool(outcome.compared) and not differing,
        "seconds": seconds,
        "steps": len(log.steps),
        "version": outcome.version,
        "seed": settings.seed,
        "world_size": settings.world_size,
        "reward": {"start": smoothed[0], "end": smoothed[-1], "best": max(smoothed)},
        "exam": {"before": asdict(outcome.before), "after": asdict(outcome.after)},
        "ordeal": {**asdict(outcome.ordeal), "survived": outcome.ordeal.survived},
        "trouble": outcome.trouble,
        "rollouts_compared": len(outcome.compared),
        "differing": {name: tensors for name, tensors in outcome.compared.items() if tensors},
        "staleness_max": max(step.staleness for step in log.steps),
        "wire_bytes": sum(step.wire_bytes for step in log.steps),
        "medians": log.medians(),
    }


def text(found: dict[str, Any]) -> str:
    reward, exam, medians = found["reward"], found["exam"], found["medians"]
    question = exam["before"]["question"].removeprefix("<|im_start|>user\n").split("<|im_end|>")[0]
    lines = [
        f"{found['steps']} steps in {found['seconds']:.0f} s, {found['version']} versions published",
        f"reward     {reward['start']:.3f} at the start, {reward['end']:.3f} at the end, {reward['best']:.3f} at best "
        f"(smoothed); likeliest answers {exam['before']['reward']:.2f} before, {exam['after']['reward']:.2f} after",
        f"example    {question!r}: {exam['before']['answer']!r} before, {exam['after']['answer']!r} after",
    ]
    if medians:
        lines.append(
            f"weights    {medians['wire_bytes'] / 1e6:.1f} MB a step to all rollouts, publish "
            f"{medians['publish_s'] * 1e3:.0f} ms, sync {medians['sync_s'] * 1e3:.0f} ms, {medians['rate_gbps']:.2f} "
            f"GB/s (medians); {found['wire_bytes'] / 1e9:.2f} GB in all, staleness at most {found['staleness_max']}"
        )
    ordeal = found["ordeal"]
    if not ordeal["survived"] or found["trouble"]:
        lines.append(
            f"faults     NOT survived: {found['trouble'] or 'the fleet did not become whole again'} ({ordeal})"
        )
    else:
        lines.append(
            f"faults     survived: pid {ordeal['pid']} killed, its replacement served the current version after "
            f"{ordeal['replacement_s']:.1f} s; a newcomer after {ordeal['newcomer_s']:.1f} s"
        )
    if found["differing"]:
        lines.append(f"weights    DIFFER from the trainer's: {found['differing']}")
    else:
        lines.append(f"weights    of all {found['rollouts_compared']} rollouts equal the trainer's, bit for bit")
    return "\n".join(lines)
