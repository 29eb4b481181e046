"""Views of a registry and findings of the doctor as text for people."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from mx_rl.doctor import Finding

_MARKS = {"ok": "ok  ", "note": "note", "warn": "WARN", "fail": "FAIL"}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, indent: str = "  ") -> str:
    """Columns as wide as their widest cell, two spaces apart."""
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *rows)]
    return "\n".join(indent + line.rstrip() for line in lines)


def amount(nbytes: float) -> str:
    """Decimal units, as rates are given in GB/s."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def policies_text(views: Sequence[Mapping[str, Any]]) -> str:
    """One line a policy."""
    rows = [
        (
            view["policy"],
            _number(view["latest"]),
            _epoch(view["epoch"]),
            f"{sum(seat['alive'] for seat in _seats(view))}/{len(_seats(view))}",
            f"{sum(one['ready'] for one in view['replicas'])}/{len(view['replicas'])}",
            _lag(view),
            str(len(view["leases"])),
        )
        for view in views
    ]
    return table(("POLICY", "LATEST", "EPOCH", "TRAINER", "READY", "BEHIND", "LEASES"), rows, indent="")


def policy_text(view: Mapping[str, Any]) -> str:
    """Everything about one policy, problems in words."""
    parts = [f"policy {view['policy']}", _heading(view), _world(view)]
    parts += [_staging(item) for item in view["staging"]]
    parts += [_versions(view["versions"]), _replicas(view), _leases(view)]
    counts = view["counts"]
    parts.append(f"  registry: {counts['members']} members, {counts['blobs']} blobs ({amount(counts['blob_bytes'])})")
    return "\n".join(part for part in parts if part)


def findings_text(findings: Sequence[Finding]) -> str:
    """One line each, its cure below where there is one, and a verdict."""
    width = max(len(one.name) for one in findings)
    lines = []
    for one in findings:
        lines += _hang(f"{_MARKS[one.state]}  {one.name.ljust(width)}  ", one.found)
        if one.cure:
            lines += _hang(" " * (width + 8) + "-> ", one.cure)
    failed = [one.name for one in findings if one.state == "fail"]
    warned = [one.name for one in findings if one.state == "warn"]
    lines.append("")
    if failed:
        lines.append(f"mx-rl cannot work here yet: {', '.join(failed)}")
    else:
        lines.append("everything needed works" + (f"; slower or weaker for {', '.join(warned)}" if warned else ""))
    return "\n".join(lines)


def _hang(lead: str, text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False)


def _seats(view: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(view["epoch"]["seats"]) if view["epoch"] else []


def _number(value: int | None) -> str:
    return str(value) if value else "-"


def _epoch(epoch: Mapping[str, Any] | None) -> str:
    return str(epoch["number"]) if epoch else "-"


def _lag(view: Mapping[str, Any]) -> str:
    """By how many numbers the slowest ready replica is behind."""
    numbers = [one["version"] for one in view["replicas"] if one["ready"] and one["version"] is not None]
    return str(view["latest"] - min(numbers)) if numbers else "-"


def _heading(view: Mapping[str, Any]) -> str:
    return f"  latest {_number(view['latest'])}, floor {view['floor']}"


def _world(view: Mapping[str, Any]) -> str:
    epoch = view["epoch"]
    lines = []
    if epoch is None:
        lines.append("  trainer: none has claimed this policy yet")
    else:
        dead = [seat["rank"] for seat in epoch["seats"] if not seat["alive"]]
        state = f"rank {_listed(dead)} dead or silent" if dead else "all ranks alive"
        if epoch["superseded"]:
            state += ", superseded by a newer claim"
        lines.append(
            f"  trainer: epoch {epoch['number']}, world {epoch['world']}, {len(epoch['seats'])} rank(s), {state}"
        )
    for name, world in view["pending"].items():
        lines.append(f"  pending: world {name} has {len(world['claimed'])} of {world['size']} ranks")
    if view["unclaimed"]:
        lines.append(f"  waiting for trainer rank {_listed(view['unclaimed'])} to claim its seat")
    return "\n".join(lines)


def _staging(item: Mapping[str, Any]) -> str:
    return f"  staging: version {item['version']} waits for trainer rank {_listed(item['missing'])}"


def _versions(versions: Sequence[Mapping[str, Any]]) -> str:
    if not versions:
        return "  no version is known"
    rows = [
        (
            str(one["number"]),
            str(one["step"]) if one["step"] is not None else "-",
            one["kind"],
            amount(one["wire_bytes"]),
            "yes" if one["available"] else "no" if one["offered"] else "withdrawn",
            "yes" if one["trainer"] else "no",
            _few(one["holders"]),
        )
        for one in sorted(versions, key=lambda one: -one["number"])
    ]
    return "\n" + table(("VERSION", "STEP", "KIND", "BYTES", "AVAILABLE", "TRAINER", "REPLICAS THAT HOLD IT"), rows)


def _replicas(view: Mapping[str, Any]) -> str:
    if not view["replicas"]:
        return "\n  no replicas"
    rows = [
        (
            one["replica"],
            _number(one["version"]),
            "yes" if one["ready"] else "NO",
            one["state"] or "-",
            str(len(one["incarnations"])),
            "yes" if one["serves"] else "no",
            f"{one['lease_left_s']:.0f} s",
            one["reason"] or "",
        )
        for one in view["replicas"]
    ]
    return "\n" + table(("REPLICA", "VERSION", "READY", "STATE", "RANKS", "SERVES", "LEASE", "REASON"), rows)


def _leases(view: Mapping[str, Any]) -> str:
    lines = [
        f"  reading: {one['replica']} version {one['version']} from "
        f"{' and '.join([*(['the trainer'] if one['trainer'] else []), *one['from']]) or 'nobody'}, "
        f"{one['left_s']:.0f} s left"
        for one in view["leases"]
    ]
    hold = view["hold"]
    if hold is not None:
        lines.append(
            f"  held: version {hold['version']} for {hold['replica']}, which lost two running; {hold['left_s']:.0f} s left"
        )
    return "\n" + "\n".join(lines) if lines else ""


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "(none)"


def _few(names: Sequence[str]) -> str:
    if not names:
        return "-"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
