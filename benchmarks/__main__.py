"""``python -m benchmarks [--quick] [--bytes N] [--rounds R] [--only NAME]``: all contenders in one run, round by round."""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
from pathlib import Path
from typing import Any

import ray

from benchmarks import guide
from benchmarks.contenders import CONTENDERS, Contender, Memcpy, OverTcp, Round
from benchmarks.figures import contenders_table, stages_table
from benchmarks.machine import describe, load
from benchmarks.model import Shapes, smollm2, total_bytes
from benchmarks.process import Process, everywhere

ROOT = Path(__file__).resolve().parents[1]
QUICK_BYTES, QUICK_ROUNDS = 8 << 20, 3
GUIDE = "guide"
WARM_ROUNDS = 3
"""Both slots of a ring, and the pages of the object store, are touched before anything counts."""


def main() -> None:
    options = _arguments()
    nbytes = QUICK_BYTES if options.quick and options.bytes is None else options.bytes
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else 15)
    shapes = smollm2(nbytes)
    size = total_bytes(shapes)
    kinds = [kind for kind in CONTENDERS if kind is Memcpy or not options.only or kind.name in options.only]
    print(describe(size, rounds), flush=True)
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=max(4 * size, 256 << 20),
    )
    try:
        found = _run(kinds, shapes, rounds)
    finally:
        ray.shutdown()
    floor = statistics.median(one.total for one in found[Memcpy])
    print(f"after: {load()}\n")
    print(contenders_table(found, size, floor))
    print()
    print(stages_table(found))
    if not options.only or GUIDE in options.only:
        print()
        guide.measure(shapes, rounds)
        print(f"\nafter: {load()}")


def _run(kinds: list[type[Contender]], shapes: Shapes, rounds: int) -> dict[type[Contender], list[Round]]:
    local = _processes(shapes, rollouts=2, env={})
    over_tcp = _processes(shapes, rollouts=1, env={"UCX_TLS": "tcp"}) if OverTcp in kinds else []
    contenders = []
    for kind in kinds:
        processes = over_tcp if kind is OverTcp else local
        contenders.append(kind(processes[0], processes[1:]))
    for contender in contenders:
        contender.setup()
    found: dict[type[Contender], list[Round]] = {kind: [] for kind in kinds}
    for number in range(-WARM_ROUNDS, rounds):
        order = random.sample(contenders, len(contenders))  # what one leaves in the caches hits another each time
        for contender in order:
            one = contender.round((number + WARM_ROUNDS) % 250 + 1)
            if number >= 0:
                found[type(contender)].append(one)
    everywhere([*local, *over_tcp], "close")
    return found


def _processes(shapes: Shapes, *, rollouts: int, env: dict[str, str]) -> list[Any]:
    """A trainer and its rollouts."""
    kind = ray.remote(Process).options(num_cpus=1, runtime_env={"env_vars": env} if env else None)
    return [kind.remote(shapes, trainer) for trainer in (True, *[False] * rollouts)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--bytes", type=int, metavar="N", help="bytes of the model (default: SmolLM2-135M, 269 MB)")
    parser.add_argument("--rounds", type=int, metavar="R", help="measured rounds (default: 15)")
    names = [*(kind.name for kind in CONTENDERS), GUIDE]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="8 MB and 3 rounds: for CI, whose figures mean nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
