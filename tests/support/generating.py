"""A rollout rank whose threads compute all the time while versions come, and say what they saw."""

from __future__ import annotations

import threading
from typing import Any

from tests.support.actors import RolloutRank
from tests.support.until import until


class GeneratingRank(RolloutRank):
    """Every element of version n is n."""

    def generate_during(self, versions: int, threads: int = 4) -> dict[str, Any]:
        """Install ``versions`` versions, each call at least one newer, while ``threads`` threads hold and look."""
        stop, faults, outputs = threading.Event(), [], []

        def generate() -> None:
            last = 0
            while not stop.is_set():
                with self.sub.hold(timeout=30) as version:
                    seen = self.values()
                    if seen != {float(version or 0)} or (version or 0) < last:
                        faults.append((version, seen))
                    last = version or 0
                    outputs.append(version)

        self.sub.sync(timeout=30)
        workers = [threading.Thread(target=generate) for _ in range(threads)]
        for worker in workers:
            worker.start()
        installed = []
        try:
            for _ in range(versions):
                installed.append(self.sub.sync(at_least=(self.sub.version or 0) + 1, timeout=30).version)
        finally:
            stop.set()
            for worker in workers:
                worker.join(30)
        return {"faults": faults[:5], "outputs": len(outputs), "installed": installed}

    def await_staged(self, number: int) -> None:
        until(lambda: self.sub.staged == number, timeout=30)

    def staged(self) -> int | None:
        return self.sub.staged
