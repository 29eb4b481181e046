"""One rank under torchrun: a Publisher with default arguments. Writes what it published to ``<out>/<rank>``."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mx_rl import Options, Publisher, Shard
from tests.support.socket_registry import SocketRegistry

ROWS = 4


def main(path: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shard = Shard(torch.full((ROWS, 8), float(rank)), shape=(ROWS * world_size, 8), offset=(ROWS * rank, 0))
    options = Options(window_bytes=1 << 20)
    with Publisher("p", {"w": shard}, registry=SocketRegistry(path), options=options) as pub:
        versions = [pub.publish(step=step) for step in (1, 2)]
        ready = pub.wait(versions[-1], replicas=0, timeout=60).ready
        (Path(out) / str(rank)).write_text(
            json.dumps({"numbers": [v.number for v in versions], "epochs": [v.epoch for v in versions], "ready": ready})
        )
        dist.barrier()
        if rank == 0:
            pub.wait(versions[-1], replicas=1, timeout=60)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
