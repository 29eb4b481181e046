"""Peak resident bytes of a publisher or subscriber in a fresh process: ``python -m tests.support.measured JSON``."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch

from mx_rl import Options, Publisher, Subscriber
from mx_rl.digest import warm
from mx_rl.registry.memory import MemoryRegistry

OPTIONS = Options(transport="memory")


def resident(field: str) -> int:
    """ "VmRSS" or "VmHWM" of this process, in bytes."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(f"{field}:")]
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def model(rows: int) -> torch.nn.Module:
    """Eleven parameters of ``rows`` x 4096 bytes and an odd one."""
    module = torch.nn.Module()
    for index in range(11):
        module.register_parameter(f"w{index}", torch.nn.Parameter(torch.full((rows, 1024), float(index))))
    module.register_parameter("odd", torch.nn.Parameter(torch.ones(12345)))
    return module


def cycle(rows: int, mode: dict[str, Any]) -> dict[str, Any]:
    """Two versions; what is held, and what the reports say."""
    registry = MemoryRegistry()
    source = model(rows)
    mode = dict(mode)
    with Publisher("p", source, registry=registry, slots=mode.pop("slots", 2), options=OPTIONS) as pub:
        if "publisher" in mode:
            for _ in range(2):
                assert pub.wait(pub.publish(), replicas=0).ready
            return {"publisher": pub.memory.as_dict(), "peak": resident("VmHWM")}
        live = model(rows)
        with Subscriber("p", live, registry=registry, options=OPTIONS, **mode) as sub:
            for _ in range(2):
                sub.sync(at_least=pub.publish().number, timeout=60)
            return {"publisher": pub.memory.as_dict(), "subscriber": sub.memory.as_dict(), "peak": resident("VmHWM")}


def main() -> None:
    torch.set_num_threads(1)
    mode = json.loads(sys.argv[2])
    warm(1 << 30)  # what sums a large model is loaded with the first
    cycle(64, mode)
    gc.collect()
    forget_peak()
    base = resident("VmRSS")
    sys.stdout.write(json.dumps(cycle(int(sys.argv[1]), mode) | {"base": base}) + "\n")


if __name__ == "__main__":
    main()
