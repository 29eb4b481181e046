"""A rollout rank that stops its source when an exact number of windows has arrived from it."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Sequence
from typing import Any

from mx_rl.fetch import Fetch, Supplier
from tests.support.actors import RolloutRank


class StoppingReader(RolloutRank):
    def sync_and_stop(self, pid: int, label: str, windows: int, at_least: int, how: int = signal.SIGSTOP) -> Any:
        """Send the signal ``how`` to ``pid`` once ``windows`` windows of the supplier ``label`` are confirmed in this sync."""
        confirm, left = Fetch._confirm, [windows]

        def confirmed(fetch: Fetch, supplier: Supplier, local: Sequence[int]) -> None:
            confirm(fetch, supplier, local)
            if supplier.label == label and left[0] > 0:
                left[0] -= len(local)
                if left[0] <= 0:
                    os.kill(pid, how)

        Fetch._confirm = confirmed  # type: ignore[method-assign]
        try:
            return self.sub.sync(at_least=at_least, timeout=60)
        finally:
            Fetch._confirm = confirm  # type: ignore[method-assign]

    def stage_digest(self) -> str:
        """Of every byte that peers may read, and that the next install would be copied from."""
        staging = self.sub._staging
        assert staging is not None
        return hashlib.blake2b(staging.landing.block.numpy()).hexdigest()

    def registered_bytes(self) -> int:
        return self.sub.registered_bytes
