"""A trainer rank and a rollout rank in one process."""

from __future__ import annotations

import gc
from typing import Any

import torch

from mx_rl import Publisher, Subscriber
from mx_rl.transport.near import NearReceiver
from tests.support.actors import options
from tests.support.socket_registry import SocketRegistry


class Colocated:
    def __init__(self, path: str, count: int, slots: int = 2, mode: dict[str, Any] | None = None) -> None:
        self.source, self.target = {"w": torch.zeros(count)}, {"w": torch.zeros(count)}
        named: dict[str, Any] = {"registry": SocketRegistry(path), "options": options()}
        self.pub = Publisher("p", self.source, slots=slots, **named)
        self.sub = Subscriber("p", self.target, **named, **(mode or {}))

    def cycle(self, value: float) -> Any:
        number = self.publish(value)
        report = self.sub.sync(at_least=number, timeout=30)
        assert torch.equal(self.source["w"], self.target["w"])
        return report

    def has_wire(self) -> bool:
        """Whether the rollout made an agent that reads from other processes."""
        return any(thing._wire is not None for thing in gc.get_objects() if isinstance(thing, NearReceiver))

    def publish(self, value: float) -> int:
        with self.pub.mutating():
            self.source["w"].fill_(value)
        return self.pub.publish().number

    def memory(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.pub.memory.as_dict(), self.sub.memory.as_dict()

    def close(self) -> None:
        self.sub.close()
        self.pub.close()
