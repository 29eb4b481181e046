"""FleetReport: what became of one version in every replica of a fleet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mx_rl.reports import SyncReport


@dataclass(frozen=True, kw_only=True)
class FleetReport:
    """The end of one ``RolloutFleet.sync``. Every replica is in exactly one of the three."""

    version: int
    """The target that was fixed for all; a replica that had the chance installed a newer one."""
    installed: tuple[str, ...]
    """Replicas whose ranks all run the target or a newer version."""
    failed: dict[str, str] = field(default_factory=dict)
    """Replica to reason: it runs what it ran before, or it is gone and being replaced."""
    missing: tuple[str, ...] = ()
    """Replicas that did not answer in time, those that are still starting among them."""
    reports: dict[str, SyncReport] = field(default_factory=dict)
    """Replica to its rank 0's report, for those installed."""

    @property
    def ok(self) -> bool:
        return not self.failed and not self.missing

    def as_dict(self) -> dict[str, Any]:
        """Flat numbers for loggers."""
        return {
            "version": self.version,
            "num_installed": len(self.installed),
            "num_failed": len(self.failed),
            "num_missing": len(self.missing),
            "wire_bytes": sum(report.wire_bytes for report in self.reports.values()),
        }
