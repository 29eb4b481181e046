"""A trainer rank that exports its model tensor by tensor, and an engine rank that loads by name, for child processes."""

from __future__ import annotations

import ctypes
import itertools
import resource
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

from mx_rl import Publisher, Shard, Subscriber, digest
from tests.support.actors import options
from tests.support.socket_registry import SocketRegistry

Shapes = dict[str, tuple[int, ...]]

_M_MMAP_THRESHOLD = -3


def tensor_of(index: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Every element differs from its neighbours, from other tensors' and from other seeds'."""
    count = torch.Size(shape).numel()
    return (
        torch.arange(count, dtype=torch.int32).mul_(index + 3).add_(seed * 7919).remainder_(65521).float().view(shape)
    )


def export(shapes: Shapes, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    for index, (name, shape) in enumerate(shapes.items()):
        yield name, tensor_of(index, shape, seed)


async def async_export(shapes: Shapes, seed: int) -> AsyncIterator[tuple[str, torch.Tensor]]:
    for pair in export(shapes, seed):
        yield pair


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Exporter:
    def __init__(self, path: str, shapes: Shapes, rank: int, world_size: int) -> None:
        self.shapes = shapes
        seat = {"rank": rank, "world_size": world_size, "world": "w"}
        self.pub = Publisher("p", None, registry=SocketRegistry(path), options=options(), **seat)

    def warm(self) -> int:
        """Peak resident bytes once a tensor of each shape has been made as the exporter makes them."""
        ctypes.CDLL(None).mallopt(
            _M_MMAP_THRESHOLD, 1 << 20
        )  # what is freed goes back at once: the peak is what is held
        digest.warm(1 << 30)  # the compiled kernel is the process's, not the publisher's
        for _ in export(self.shapes, 0):
            pass
        return peak_bytes()

    def publish(self, seed: int, *, awaited: bool = False, raise_after: int | None = None) -> int:
        if awaited:
            return self.pub.publish(stream=async_export(self.shapes, seed)).number
        if raise_after is not None:
            return self.pub.publish(stream=self._broken(seed, raise_after)).number
        return self.pub.publish(stream=export(self.shapes, seed)).number

    def _broken(self, seed: int, count: int) -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(export(self.shapes, seed)):
            if index == count:
                raise ArithmeticError("the exporter broke")
            yield pair

    def peak(self) -> int:
        return peak_bytes()

    def registered(self) -> int:
        return self.pub.registered_bytes

    def close(self) -> None:
        self.pub.close()


class ByName:
    """``ranks`` over 1: this rank's part of the last dimension where it divides, or with ``whole`` every tensor."""

    def __init__(self, path: str, shapes: Shapes, rank: int = 0, ranks: int = 1, *, whole: bool = True) -> None:
        self.shapes = shapes
        self.boxes: dict[str, Shard] = {}
        for name, shape in shapes.items():
            part = shape[-1] // ranks if shape[-1] % ranks == 0 else shape[-1]
            offset = (*[0] * (len(shape) - 1), rank * part if part < shape[-1] else 0)
            self.boxes[name] = Shard(torch.empty(*shape[:-1], part, device="meta"), shape=shape, offset=offset)
        named: dict[str, Any] = {"replica": f"engine{ranks}{whole}", "rank": rank, "world_size": ranks}
        tensors = None if whole else self.boxes
        self.whole = whole
        self.loop: Any = None
        self.sub = Subscriber("p", tensors, registry=SocketRegistry(path), options=options(), **named)

    def load(self, number: int, seed: int, leave_after: int | None = None) -> dict[str, Any]:
        """Load a version by name, comparing each tensor with what was exported under ``seed``."""
        wrong, loaded = [], 0
        order = {name: index for index, name in enumerate(self.shapes)}
        for name, tensor in self.sub.stream(at_least=number, timeout=60):
            expected = tensor_of(order[name], self.shapes[name], seed)
            if not self.whole:
                box = self.boxes[name]
                index = tuple(slice(lo, lo + size) for lo, size in zip(box.lo, box.box, strict=True))
                expected = expected[index]
            if not torch.equal(tensor, expected):
                wrong.append(name)
            loaded += 1
            if loaded == leave_after:
                break
        report = self.sub.last_report
        return {
            "wrong": wrong,
            "loaded": loaded,
            "version": self.sub.version,
            "ready": self.sub.ready,
            "registered": self.sub.registered_bytes,
            "served_by": dict(report.served_by) if report is not None else {},
        }

    def draw(self, number: int, count: int) -> int:
        """Draw so many tensors of the loop that is open, or of a new one; how many there were."""
        if self.loop is None:
            self.loop = self.sub.stream(at_least=number, timeout=60)
        return len(list(itertools.islice(self.loop, count)))

    def ready(self) -> bool:
        return self.sub.ready

    def close(self) -> None:
        self.sub.close()


class PartByName(ByName):
    def __init__(self, path: str, shapes: Shapes, rank: int, ranks: int) -> None:
        super().__init__(path, shapes, rank, ranks, whole=False)
