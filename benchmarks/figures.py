"""Medians, spreads and Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.contenders import Contender, Round


def spread(values: Sequence[float]) -> str:
    """Median and least..most in milliseconds."""
    return f"{_ms(statistics.median(values))} ({_ms(min(values))}..{_ms(max(values))})"


def milliseconds(values: Sequence[float]) -> str:
    """Median in milliseconds."""
    return _ms(statistics.median(values))


def quartiles(values: Sequence[float]) -> str:
    """Distance between the quartiles in milliseconds."""
    if len(values) < 2:
        return "-"
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return _ms(high - low)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def contenders_table(found: dict[type[Contender], list[Round]], nbytes: int, floor: float) -> str:
    """``floor``: the memcpy's median in seconds."""
    rows = [
        "| what | trainer stands still, ms | slowest reader, ms | together, ms (least..most) | IQR, ms | GB/s | x memcpy |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind, rounds in found.items():
        totals = [one.total for one in rounds]
        middle = statistics.median(totals)
        give = statistics.median(one.give for one in rounds)
        take = statistics.median(one.take for one in rounds)
        lane = f" ({rounds[-1].note})" if rounds[-1].note else ""
        rows.append(
            f"| {kind.title}{lane} | {_ms(give) if give else '-'} | {_ms(take)} | {spread(totals)} | {quartiles(totals)} "
            f"| {nbytes / middle / 1e9:.1f} | {middle / floor:.2f} |"
        )
    return "\n".join(rows)


def stages_table(found: dict[type[Contender], list[Round]]) -> str:
    """Where mx-rl's time goes: medians, of the slowest reader."""
    staged = {kind: rounds for kind, rounds in found.items() if rounds[0].stages}
    names = [name for rounds in staged.values() for name in rounds[0].stages]
    names = list(dict.fromkeys(names))
    rows = ["| stage, ms | " + " | ".join(kind.name for kind in staged) + " |", "| --- |" + " ---: |" * len(staged)]
    for name in names:
        cells = [_ms(statistics.median(one.stages.get(name, 0.0) for one in rounds)) for rounds in staged.values()]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows) if staged else ""
