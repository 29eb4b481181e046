"""One policy with every kind of tensor, for child processes: dtypes, shapes, strides, ties, and interleaved boxes."""

from __future__ import annotations

from typing import Any

import torch

from mx_rl import Publisher, Shard, Subscriber
from tests.support.actors import options
from tests.support.model import digest
from tests.support.socket_registry import SocketRegistry

HEADS, DIM, WIDTH = 4, 3, 10


def values(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    tied = torch.randn(33, 7)
    return {
        "bf16": torch.randn(301, 40).bfloat16(),
        "fp32": torch.tensor([float("nan"), -0.0, 1.5]),
        "fp16": torch.randn(7).half(),
        "int64": torch.arange(1000) * seed,
        "bool": torch.rand(33) > 0.5,
        "fp8": torch.randn(16, 5).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.0 + seed),
        "empty": torch.empty(2, 0, dtype=torch.bfloat16),
        "transposed": torch.randn(14, 13).t(),
        "strided": torch.randn(8, 12)[:, ::2],
        "embed": tied,
        "head": tied,
        "q": torch.randn(HEADS * DIM, WIDTH),
        "k": torch.randn(HEADS * DIM, WIDTH),
        "v": torch.randn(HEADS * DIM, WIDTH),
    }


class KindsTrainer:
    def __init__(self, path: str) -> None:
        self.tensors = values(0)
        self.pub = Publisher(
            "p", lambda: self.tensors, registry=SocketRegistry(path), options=options(window_bytes=4096)
        )

    def publish(self, seed: int) -> int:
        self.tensors = values(seed)
        return self.pub.publish(step=seed).number

    def close(self) -> None:
        self.pub.close()


class KindsRollout:
    """q, k and v are interleaved head by head in one fused weight: each is several boxes."""

    def __init__(self, path: str) -> None:
        self.whole = {
            name: torch.zeros(tensor.shape, dtype=tensor.dtype)
            for name, tensor in values(0).items()
            if name not in ("q", "k", "v")
        }
        self.fused = torch.zeros(HEADS, 3, DIM, WIDTH)
        parts: dict[str, Any] = {
            name: tuple(
                Shard(self.fused[head, place], shape=(HEADS * DIM, WIDTH), offset=(head * DIM, 0))
                for head in range(HEADS)
            )
            for place, name in enumerate("qkv")
        }
        self.sub = Subscriber("p", {**self.whole, **parts}, registry=SocketRegistry(path), options=options())

    def sync(self, at_least: int) -> Any:
        return self.sub.sync(at_least=at_least, timeout=60)

    def digests(self) -> dict[str, str]:
        found = {name: digest(tensor) for name, tensor in self.whole.items()}
        for place, name in enumerate("qkv"):
            found[name] = digest(self.fused[:, place].reshape(HEADS * DIM, WIDTH))
        return found

    def close(self) -> None:
        self.sub.close()
