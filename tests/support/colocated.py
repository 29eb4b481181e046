"""A trainer rank and a rollout rank in one process."""

from __future__ import annotations

import time
from typing import Any

import torch

from mx_rl import Publisher, Subscriber
from tests.support.actors import options
from tests.support.socket_registry import SocketRegistry


class Colocated:
    def __init__(self, path: str, count: int) -> None:
        self.source, self.target = {"w": torch.zeros(count)}, {"w": torch.zeros(count)}
        named: dict[str, Any] = {"registry": SocketRegistry(path), "options": options()}
        self.pub = Publisher("p", self.source, **named)
        begun = time.monotonic()
        self.sub = Subscriber("p", self.target, **named)
        self.opened_s = time.monotonic() - begun

    def cycle(self, value: float) -> Any:
        self.source["w"].fill_(value)
        report = self.sub.sync(at_least=self.pub.publish(), timeout=30)
        assert torch.equal(self.source["w"], self.target["w"])
        return report

    def has_wire(self) -> bool:
        """Whether the rollout made an agent that reads from other processes."""
        staging = self.sub._staging
        assert staging is not None
        return staging.landing._receiver._wire is not None  # type: ignore[attr-defined]

    def publish(self, value: float) -> int:
        self.source["w"].fill_(value)
        return self.pub.publish().number

    def close(self) -> None:
        self.sub.close()
        self.pub.close()
