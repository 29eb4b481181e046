"""``python -m examples.grpo``: train, and say at the end what was learnt, survived and measured."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from examples.grpo.settings import SMOLLM2, TINY, Settings

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Exit status 0 where every rollout ended with the trainer's weights and the faults were survived, else 1."""
    started = time.monotonic()
    arguments = _arguments()
    settings = _settings(arguments)
    folder = arguments.out or ROOT / "runs" / f"grpo-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    if not settings.quick:
        from examples.grpo.checkpoint import prepare

        print("weights: SmolLM2-135M-Instruct, from its package or the cache", flush=True)
        settings = replace(settings, checkpoint=prepare(ROOT / ".cache"))

    import ray
    import torch

    from examples.grpo.log import Log
    from examples.grpo.loop import Loop
    from examples.grpo.plot import draw
    from examples.grpo.rollout import GrpoRollout
    from examples.grpo.summary import facts, text
    from examples.grpo.task import Addition, Echo
    from examples.grpo.trainer import GrpoTrainer
    from mx_rl.ray import RolloutFleet, TrainerGroup

    if "RAY_ADDRESS" not in os.environ:
        # The actors inherit it: a thread that spins at a barrier steals the core that the others wait for.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        seats = settings.world_size + settings.replicas + 2  # the newcomer, and a replacement beside its predecessor
        ray.init(
            address="local",  # not into a cluster that happens to run on this machine
            num_cpus=seats,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    task = Echo(settings.num_tokens) if settings.quick else Addition()
    kwargs = {"settings": settings}
    print(f"starting {settings.world_size} trainer ranks and {settings.replicas} rollouts", flush=True)
    with (
        TrainerGroup(
            GrpoTrainer,
            policy="grpo",
            world_size=settings.world_size,
            kwargs=kwargs,
            registry=arguments.registry,
            publisher={"wire_dtype": torch.bfloat16},
        ) as group,
        RolloutFleet(
            GrpoRollout, policy="grpo", replicas=settings.replicas, kwargs=kwargs, registry=arguments.registry
        ) as fleet,
        Log(folder, settings.steps) as log,
    ):
        outcome = Loop(settings, task, group, fleet, log).run()
    ray.shutdown()
    found = facts(settings, outcome, log, time.monotonic() - started)
    (folder / "summary.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    draw(log, folder / "plot.png")
    print(f"\n{text(found)}\nwritten    {folder}/log.jsonl, summary.json, plot.png", flush=True)
    return 0 if found["passed"] else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.grpo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny random model and a rule that even it learns")
    parser.add_argument("--world-size", type=int, default=1, help="trainer ranks; several shard the model by FSDP2")
    parser.add_argument("--replicas", type=int, default=2, help="rollouts at the start")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the preset's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--registry", help="URL of the registry (default: Ray's)")
    parser.add_argument("--out", type=Path, help="folder for log, summary and plot (default: runs/grpo-<time>)")
    return parser.parse_args()


def _settings(arguments: argparse.Namespace) -> Settings:
    preset = TINY if arguments.quick else SMOLLM2
    if arguments.world_size < 1 or preset.num_prompts % arguments.world_size:
        sys.exit(f"--world-size {arguments.world_size}: ranks share {preset.num_prompts} prompts a step evenly")
    if arguments.replicas < 1:
        sys.exit(f"--replicas {arguments.replicas}: at least 1")
    steps = preset.steps if arguments.steps is None else arguments.steps
    if steps < 2:
        sys.exit(f"--steps {steps}: at least 2, one before the faults and one after")
    cores = os.cpu_count() or 1
    return replace(
        preset,
        steps=steps,
        seed=arguments.seed,
        world_size=arguments.world_size,
        replicas=arguments.replicas,
        trainer_threads=1 if preset.quick else max(1, cores // arguments.world_size),
        rollout_threads=1 if preset.quick else max(1, cores // arguments.replicas),
    )


if __name__ == "__main__":
    sys.exit(main())
