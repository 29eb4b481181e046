"""A rollout in any memory mode, that syncs in a loop and checks each version it gets."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from typing import Any

import torch

from mx_rl import Subscriber
from mx_rl.errors import MxRLError, NotReady, PeerLost, Tainted, VersionGone
from tests.support.actors import RolloutRank, options
from tests.support.socket_registry import SocketRegistry


class KillingRollout(RolloutRank):
    """A rank that kills its source in the middle of its own move."""

    def sync_and_kill(self, number: int, pid: int, timeout: float) -> str:
        staging, killed = self.sub._staging, threading.Event()

        def watch() -> None:
            while not killed.is_set():
                progress = staging._progress
                if progress is not None and len(progress.confirmed) >= 3:
                    os.kill(pid, signal.SIGKILL)
                    killed.set()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            return self.try_sync(number, timeout)
        finally:
            assert killed.is_set()
            watcher.join(10)

    def try_sync(self, number: int, timeout: float) -> str:
        """The kind of the report, or of the error."""
        try:
            return str(self.sync(number, timeout).kind)
        except MxRLError as exc:
            return type(exc).__name__


class ModuleRollout:
    """Holds every tensor whole, as parameters of a module, so that they may be swapped."""

    def __init__(self, path: str, shapes: dict[str, tuple[int, ...]], **mode: Any) -> None:
        self.module = torch.nn.Module()
        for name, shape in shapes.items():
            self.module.register_parameter(name, torch.nn.Parameter(torch.full(shape, -1.0)))
        opts = options(**mode.pop("options", {}))
        self.sub = Subscriber("p", self.module, registry=SocketRegistry(path), options=opts, **mode)

    def name(self) -> str:
        return self.sub.replica

    def sync(self, at_least: int | None = None, timeout: float = 30.0) -> Any:
        return self.sub.sync(at_least=at_least, timeout=timeout)

    def values(self) -> set[float]:
        found: set[float] = set()
        for tensor in self.module.parameters():
            found.update(tensor.detach().unique().tolist())
        return found

    def ready(self) -> bool:
        return self.sub.ready

    def sync_for(self, seconds: float) -> dict[str, Any]:
        """Every version that is installed must be uniform, equal its number and newer than the last; one that failed must
        leave the rollout not ready."""
        end = time.monotonic() + seconds
        found: Counter[str] = Counter()
        served: Counter[str] = Counter()
        last = 0
        limit = end + 40
        while time.monotonic() < (end if self.sub.ready else limit):
            try:
                report = self.sub.sync(timeout=2)
            except Tainted:
                found["tainted"] += 1
                found["ready while tainted"] += self.sub.ready
                continue
            except (PeerLost, VersionGone, NotReady):  # the publisher was faster than the only peer
                found["missed"] += 1
                continue
            if report.kind == "none":
                continue
            found["installed"] += 1
            found["fell"] += report.version < last
            last = report.version
            found["torn"] += self.values() != {float(report.version % 65536)}
            served.update({source.partition(":")[0]: nbytes for source, nbytes in report.served_by.items()})
        return dict(found) | {"served_" + kind: nbytes for kind, nbytes in served.items()}

    def close(self) -> None:
        self.sub.close()
