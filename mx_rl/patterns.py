"""Patterns: the ways in which tensors are cut into boxes, each kept once, with the checks for overlap and coverage.

60,000 tensors over 64 ranks are a few dozen patterns, so what is checked or intersected per pattern costs little.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mx_rl.columns import Ints, chunks, expand, groups, ints, starts_of
from mx_rl.table import Table


@dataclass(frozen=True, eq=False, kw_only=True)
class Patterns:
    """Ways in which tensors are cut, box by box: rows of one pattern lie together, by rank. No box is empty."""

    shape: Ints  # [patterns, D] of the global tensor
    counts: Ints  # rows of each pattern
    rank: Ints
    lo: Ints
    size: Ints

    @cached_property
    def starts(self) -> Ints:
        return starts_of(self.counts)

    @cached_property
    def of_row(self) -> Ints:
        return expand(self.counts)[0]

    @cached_property
    def owner_row(self) -> Ints:
        """For every row, the first row of its pattern with an equal box: the lowest rank's."""
        order = np.lexsort((*self.size.T, *self.lo.T, self.of_row))
        new = groups(self.of_row[order], self.lo[order], self.size[order])
        found = np.empty(len(order), np.int64)
        found[order] = order[new][np.cumsum(new) - 1]
        return found

    @cached_property
    def owned(self) -> Ints:
        """The rows of owners, ascending: every distinct box once."""
        return np.flatnonzero(self.owner_row == np.arange(len(self.rank)))

    @cached_property
    def owned_starts(self) -> Ints:
        """Per pattern, where its rows begin in ``owned``, and the end."""
        return np.searchsorted(self.owned, self.starts).astype(np.int64)

    @cached_property
    def copy_sets(self) -> tuple[tuple[int, ...], ...]:
        """The distinct sets of ranks that hold one and the same box, each ascending, in ascending order."""
        return tuple(sorted(set(self._holders.values())))

    @cached_property
    def copy_set(self) -> Ints:
        """For every row, its box's entry in ``copy_sets``."""
        index = {ranks: i for i, ranks in enumerate(self.copy_sets)}
        found = np.zeros(len(self.rank), np.int64)
        for owner, ranks in self._holders.items():
            found[owner] = index[ranks]
        return found[self.owner_row]

    @cached_property
    def _by_owner(self) -> Ints:
        """Rows by box, the boxes by their owner's row, and then by rank."""
        return np.lexsort((self.rank, self.owner_row))

    @cached_property
    def _holders(self) -> dict[int, tuple[int, ...]]:
        """By owner's row, the ranks that hold the box."""
        owner, ranks = self.owner_row[self._by_owner], self.rank[self._by_owner].tolist()
        edges = [*np.flatnonzero(groups(owner)).tolist(), len(ranks)]
        return {
            int(owner[a]): (ranks[a],) if b - a == 1 else tuple(dict.fromkeys(ranks[a:b]))
            for a, b in itertools.pairwise(edges)
        }

    def rows_at(self, rows: Ints, rank: int) -> Ints:
        """The rows of boxes equal to those of ``rows`` that ``rank`` holds; it must hold each."""
        return self._by_owner[np.searchsorted(self._keys, self.owner_row[rows] * self._span + rank)]

    @cached_property
    def _span(self) -> int:
        return int(self.rank.max(initial=0)) + 1

    @cached_property
    def _keys(self) -> Ints:
        return self.owner_row[self._by_owner] * self._span + self.rank[self._by_owner]

    def problems(self) -> tuple[dict[int, str], dict[int, str]]:
        """By pattern: an overlap, or elements that no box covers, in words."""
        rows = self.owned
        found = {
            pattern: " and ".join(
                f"{_box(self.lo[rows[i]], self.size[rows[i]])} on rank {self.rank[rows[i]]}" for i in pair
            )
            for pattern, pair in overlaps(self.of_row[rows], self.lo[rows], self.lo[rows] + self.size[rows]).items()
        }
        sums = starts_of(self.size[rows].prod(axis=1))
        covered = sums[self.owned_starts[1:]] - sums[self.owned_starts[:-1]]
        whole = self.shape.prod(axis=1)
        holes = {
            int(pattern): f"{covered[pattern]} of {whole[pattern]} elements are held"
            for pattern in np.flatnonzero(covered != whole)
            if int(pattern) not in found
        }
        return found, holes


def find_patterns(table: Table, counts: Ints, rank: Ints, lo: Ints, size: Ints) -> tuple[Ints, Patterns]:
    """(each tensor's pattern, the patterns in the order of their first tensor)."""
    starts = starts_of(counts).tolist()
    rows = np.concatenate([rank[:, None], lo, size], axis=1)
    seen: dict[bytes, int] = {}
    firsts: list[int] = []
    pattern_of = np.empty(len(counts), np.int64)
    for tensor in range(len(counts)):
        key = table.shape[tensor].tobytes() + rows[starts[tensor] : starts[tensor + 1]].tobytes()
        pattern_of[tensor] = pattern = seen.setdefault(key, len(firsts))
        if pattern == len(firsts):
            firsts.append(tensor)
    chosen = ints(firsts)
    group, position = expand(counts[chosen])
    picked = ints(starts)[chosen][group] + position
    return pattern_of, Patterns(
        shape=table.shape[chosen], counts=counts[chosen], rank=rank[picked], lo=lo[picked], size=size[picked]
    )


def overlaps(pattern: Ints, lo: Ints, hi: Ints) -> dict[int, tuple[int, int]]:
    """By pattern, two rows whose boxes overlap. A sweep along the dimension in which the fewest boxes meet."""
    orders, meets = [], []
    for d in range(lo.shape[1]):
        values = np.unique(np.concatenate([lo[:, d], hi[:, d]]))
        span = len(values) + 1
        order = np.lexsort((lo[:, d], pattern))
        begin = (pattern * span + np.searchsorted(values, lo[:, d]))[order]
        end = (pattern * span + np.searchsorted(values, hi[:, d]))[order]
        orders.append(order)
        meets.append(np.searchsorted(begin, end) - np.arange(len(order)) - 1)
    if not len(pattern):
        return {}
    total = np.stack([np.bincount(pattern[order], meet) for order, meet in zip(orders, meets, strict=True)])
    best = total.argmin(axis=0)
    found: dict[int, tuple[int, int]] = {}
    for d, (order, meet) in enumerate(zip(orders, meets, strict=True)):
        chosen = np.flatnonzero((best[pattern[order]] == d) & (meet > 0))
        for part in chunks(meet[chosen]):
            rows = chosen[part]
            group, position = expand(meet[rows])
            a, b = order[rows[group]], order[rows[group] + 1 + position]
            both = np.flatnonzero(((lo[a] < hi[b]) & (lo[b] < hi[a])).all(axis=1))
            patterns, firsts = np.unique(pattern[a[both]], return_index=True)
            for p, i in zip(patterns.tolist(), both[firsts].tolist(), strict=True):
                found.setdefault(p, (int(a[i]), int(b[i])))
    return found


def _box(lo: Ints, size: Ints) -> str:
    return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(lo.tolist(), size.tolist(), strict=True)) + "]"
