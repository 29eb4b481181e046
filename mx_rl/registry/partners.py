"""Replicated boxes, as the registry sees them: commits that rely on the same layouts, and copies that must be equal."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from mx_rl.records import Commit
from mx_rl.registry.policy import Round

_ENTRY_BYTES = 8


def basis_of(holds: Sequence[str]) -> str:
    """What the layouts of all that a world's ranks hold, by rank, are called for short. 32 hexadecimal digits."""
    return hashlib.blake2b("\n".join(holds).encode(), digest_size=16).hexdigest()


def disagreement(item: Round, commits: Mapping[int, Commit]) -> str:
    """Why this version can never be READY for the sake of its replicated boxes; "" while it still can.

    A rank that left out what others snapshot must have told its share from the layouts that they really have: else some
    tensor might be at nobody. Sums are compared between ranks that know the same layouts, as soon as both are told.
    """
    stale = [rank for rank, entry in commits.items() if entry.holds and item.basis and entry.basis != item.basis]
    if stale:
        listed = ", ".join(map(str, stale[:10]))
        return (
            f"tensors have changed on some rank since rank(s) {listed} learned which of them others snapshot: the next "
            "publish snapshots everything on every rank"
        )
    pairs = [
        (rank, other)
        for rank, entry in commits.items()
        for other, sums in entry.sums.items()
        if rank < other and other in commits and commits[other].basis == entry.basis
        if commits[other].sums.get(rank, sums) != sums
    ]
    if not pairs:
        return ""
    one, two = pairs[0]
    item.differ = tuple(
        sorted({rank for pair in pairs for rank in pair}, key=lambda rank: (rank not in pairs[0], rank))
    )
    item.entries = _entries(commits[one].sums[two], commits[two].sums[one])
    listed = ", ".join(f"{a} and {b}" for a, b in pairs[:10])
    more = f" and {len(pairs) - 10} more pairs" if len(pairs) > 10 else ""
    return f"ReplicaMismatch: copies of the same boxes differ between ranks {listed}{more}"


def _entries(one: bytes, two: bytes) -> tuple[int, ...]:
    count = max(len(one), len(two)) // _ENTRY_BYTES
    return tuple(
        i
        for i in range(count)
        if one[i * _ENTRY_BYTES : (i + 1) * _ENTRY_BYTES] != two[i * _ENTRY_BYTES : (i + 1) * _ENTRY_BYTES]
    )
