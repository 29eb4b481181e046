"""A publisher and a subscriber in one process whose main thread gets SIGINT in the middle of a call."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch

from mx_rl import Publisher, Subscriber
from mx_rl.registry.memory import MemoryRegistry
from tests.support.local import FAST

COUNT = 64 * 1024


class Interrupted:
    def __init__(self) -> None:
        self.source, self.target = {"w": torch.zeros(COUNT)}, {"w": torch.zeros(COUNT)}
        self.strike_in = ""
        self.registry = MemoryRegistry()
        self.pub = Publisher("p", self._export, registry=self.registry, options=FAST)
        self.sub = Subscriber(
            "p",
            self.target,
            registry=self.registry,
            options=FAST,
            before_install=lambda old, new: self._strike("before_install"),
            after_install=lambda old, new: self._strike("after_install"),
        )

    def _strike(self, where: str) -> None:
        if self.strike_in == where:
            self.strike_in = ""
            os.kill(os.getpid(), signal.SIGINT)

    def _export(self) -> dict[str, torch.Tensor]:
        self._strike("export")
        return self.source

    def _interrupted(self, call: Callable[[], Any], *, after_s: float | None = None, where: str = "") -> str:
        """Run ``call`` with SIGINT on its way; the name of what it raised, or "nothing"."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = None
        if after_s is not None:
            timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
        self.strike_in = where
        try:
            call()
        except BaseException as exc:
            return type(exc).__name__
        finally:
            self.strike_in = ""
            if timer is not None:
                timer.join()
            signal.signal(signal.SIGINT, before)
        return "nothing"

    def in_publish(self) -> str:
        return self._interrupted(self.pub.publish, where="export")

    def in_publish_of_an_incomplete_world(self) -> tuple[str, bool]:
        """SIGINT while rank 0 waits for rank 1; then both go on, and their calls still match."""
        half = {"w": torch.ones(8)}
        named: dict[str, Any] = {"registry": self.registry, "world_size": 2, "world": "two", "options": FAST}
        with Publisher("q", half, rank=0, **named) as zero:
            raised = self._interrupted(lambda: zero.publish(timeout=20), after_s=0.3)
            with Publisher("q", half, rank=1, **named) as one:
                lost = [one.publish()]  # the call that rank 0 made and gave up
                numbers = [zero.publish().number, one.publish().number]
                ready = zero.wait(numbers[0], replicas=0, timeout=10).ready
                return raised, ready and numbers[0] == numbers[1] == lost[0].number + 1

    def in_wait(self) -> str:
        version = self.pub.publish()
        return self._interrupted(lambda: self.pub.wait(version, replicas=99, timeout=30), after_s=0.3)

    def in_sync_that_waits(self) -> str:
        latest = self.pub.latest or 0
        return self._interrupted(lambda: self.sub.sync(at_least=latest + 50, timeout=30), after_s=0.3)

    def in_hook(self, where: str) -> tuple[str, bool]:
        self.pub.wait(self.pub.publish(), replicas=0, timeout=10)
        raised = self._interrupted(lambda: self.sub.sync(timeout=10), where=where)
        return raised, self.sub.ready

    def in_acknowledgement(self) -> tuple[str, bool]:
        """SIGINT when the version is installed and the registry is about to be told: it hears of it with a beat."""
        self.pub.wait(self.pub.publish(), replicas=0, timeout=10)
        ask = self.sub._member.ask

        def struck(command: Any, *args: Any, **named: Any) -> Any:
            if type(command).__name__ == "Ack":
                self._strike("ack")
            return ask(command, *args, **named)

        self.sub._member.ask = struck  # type: ignore[method-assign]
        try:
            raised = self._interrupted(lambda: self.sub.sync(timeout=10), where="ack")
        finally:
            self.sub._member.ask = ask  # type: ignore[method-assign]
        assert self.sub.version is not None
        return raised, bool(self.pub.wait(self.sub.version, timeout=15).installed)

    def works(self, value: float) -> bool:
        """The same two objects still publish and install."""
        self.source["w"].fill_(value)
        version = self.pub.publish()
        report = self.sub.sync(at_least=version.number, timeout=10)
        return report.version == version.number and bool(self.target["w"].eq(value).all()) and self.sub.ready

    def close(self) -> None:
        self.sub.close()
        self.pub.close()
