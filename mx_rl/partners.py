"""What a trainer rank knows of the others: its share of the replicated boxes, and with whom it must agree about them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from mx_rl.columns import Ints
from mx_rl.digest import Sums, box_sum
from mx_rl.endpoint import Member
from mx_rl.errors import MxRLError, RegistryLost
from mx_rl.kernels.reference import weights
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.records import Commit, Outcome
from mx_rl.shares import Share, Shares
from mx_rl.tensors import DTYPES, Shard

log = logging.getLogger("mx_rl")

_PIECE_BYTES = 16 << 20

_SIDE = 64
"""Sums of a partner travel as the sums of rows and columns of a table of at most so many of each, 1 KiB together."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Known:
    """Told by a version of ``epoch`` for which every rank had snapshotted all that it held."""

    epoch: int
    basis: str
    holds: str  # hash of what this rank held
    share: Share
    shares: Shares


@dataclass(frozen=True, eq=False, kw_only=True)
class Snapshot:
    """What was snapshotted: ``layout``; ``known`` where that is a share of ``holds``. ``seal`` makes the sums of its boxes, by
    row, and their proof. ``checked``: by number, the sums of boxes of which this rank keeps no copy."""

    holds: RankLayout
    layout: RankLayout
    seal: Callable[[], tuple[Sums, bytes]]
    known: Known | None
    checked: dict[int, int]


def live_sum(layout: RankLayout, row: int, tensors: Mapping[str, Sequence[Shard]]) -> int:
    """The sum of one box from its live tensor as it would be on the wire, piece by piece."""
    tensor = int(layout.boxes.tensor[row])
    shard = tensors[layout.names[tensor]][row - int(layout.starts[tensor])]
    dtype = DTYPES[layout.dtypes[tensor]]
    live, begin, size = shard.tensor, list(shard.lo), list(shard.box)
    if not size:
        live, begin, size = live.view(1), [0], [1]
    row_bytes = dtype.itemsize * int(np.prod(size[1:]))
    step, total = max(_PIECE_BYTES // max(row_bytes, 1), 1), 0
    for at in range(0, size[0], step):
        piece = live[at : at + step].to("cpu", dtype).contiguous()
        data = piece.reshape(-1).view(torch.uint8).numpy()
        shape = shard.global_shape or (1,)
        total += box_sum(data, shape, [begin[0] + at, *begin[1:]], piece.shape, dtype.itemsize)
    return total % (1 << 64)


@dataclass
class Partners:
    """Written by the thread that commits; whoever publishes reads ``known``."""

    member: Member
    rank: int
    known: Known | None = None
    _told: tuple[int, Outcome] | None = None
    _newest: tuple[int, int] = (0, 0)

    def share_of(self, holds: RankLayout, epoch: int) -> tuple[RankLayout, Known | None]:
        """What to snapshot, and from which knowledge; everything where the present world is not known."""
        known = self.known
        if known is None or known.epoch != epoch or known.holds != holds.hash:
            return holds, None
        return known.share.layout, known

    def knows(self, epoch: int) -> bool:
        return self.known is not None and self.known.epoch == epoch

    def note(self, key: tuple[int, int], outcome: Outcome) -> None:
        """An outcome tells which layouts the ranks have. Others than were known: everything is snapshotted again."""
        if not outcome.basis or key < self._newest:
            return
        self._newest = key
        known = self.known
        if known is not None and (known.epoch, known.basis) != (key[0], outcome.basis):
            self.known = known = None
        if known is None and outcome.state == "ready" and outcome.whole and outcome.record is not None:
            self._told = (key[0], outcome)

    def prove(self, commit: Commit, snapshot: Snapshot) -> Commit:
        """The commit with the proof of its trailer and the sums of what other ranks have snapshotted too."""
        made, proof = snapshot.seal()
        commit = msgspec.structs.replace(commit, proof=proof)
        if self._told is not None:
            self._study(snapshot.holds)
        known = snapshot.known or self.known
        if known is None or known.epoch != commit.epoch or known.holds != snapshot.holds.hash:
            return commit
        return msgspec.structs.replace(commit, basis=known.basis, sums=self._sums(known, snapshot, made, commit.k))

    def check(self, known: Known | None, k: int, tensors: Mapping[str, Sequence[Shard]]) -> dict[int, int]:
        """By number, the sums of the live boxes that this rank keeps no copy of and is drawn to compare in the k-th
        publish."""
        if known is None:
            return {}
        without, _ = known.shares.checks(self.rank, k)
        boxes = [box for found in without.values() for box in found.tolist()]
        return {box: live_sum(known.share.layout, int(known.share.rows[box]), tensors) for box in boxes}

    def suspects(self, outcome: Outcome, k: int) -> list[str]:
        """Names of the tensors that may differ between the first two ranks of ``outcome.differ``: just those that do
        where it is one."""
        known = self.known
        if known is None or len(outcome.differ) < 2 or outcome.basis not in ("", known.basis):
            return []
        one, two = outcome.differ[:2]
        boxes = known.shares.between(min(one, two), max(one, two), k)
        return list(dict.fromkeys(known.shares.names(boxes[chosen(len(boxes), outcome.entries)])))

    def _study(self, holds: RankLayout) -> None:
        assert self._told is not None
        (epoch, outcome), self._told = self._told, None
        assert outcome.record is not None
        if outcome.layouts[self.rank] != holds.hash:
            return  # they have changed since: a later version tells
        try:
            blobs = self.member.blobs([outcome.record.layout])
            if outcome.record.layout not in blobs:
                return
            shares = Shares(WorldLayout.decode(blobs[outcome.record.layout]))
            share = shares.of(self.rank, holds)
        except RegistryLost as exc:
            log.warning("policy %s: the world's layout is asked for again: %s", self.member.policy, exc)
            self._told = (epoch, outcome)
            return
        except MxRLError as exc:
            log.warning(
                "policy %s: everything is snapshotted, the world's layout is not known: %s", self.member.policy, exc
            )
            return
        self.known = Known(epoch=epoch, basis=outcome.basis, holds=holds.hash, share=share, shares=shares)

    def _sums(self, known: Known, snapshot: Snapshot, made: Sums, k: int) -> dict[int, bytes]:
        """By rank, the sums of the boxes that it and this one compare."""
        shares, partners = known.shares, known.share.partners
        without, holding = shares.checks(self.rank, k)
        own = np.concatenate([np.zeros(0, np.int64), *partners.values()])
        sums = dict(zip(own.tolist(), made[known.share.rows[own]].tolist(), strict=True)) | snapshot.checked
        found: dict[int, bytes] = {}
        for other in sorted({*partners, *without, *holding}):
            boxes = shares.between(min(self.rank, other), max(self.rank, other), k).tolist()
            if all(box in sums for box in boxes):  # else this rank was drawn before it knew
                found[other] = pack(np.array([sums[box] for box in boxes], np.uint64))
        return found


def _cells(count: int) -> tuple[Ints, Ints, int, int]:
    """(row and column of each of ``count`` boxes in the table of sums, rows, columns)."""
    rows = min(max(int(np.ceil(np.sqrt(count))), 1), _SIDE)
    width = max(-(-count // rows), 1)
    at = np.arange(count, dtype=np.int64)
    return at // width, at % width % _SIDE, rows, min(width, _SIDE)


def pack(sums: Sums) -> bytes:
    """Sums of boxes as those of the rows and columns of a table: small, and where one box differs its row and its column
    tell which."""
    row, column, rows, columns = _cells(len(sums))
    mixed = weights(sums + weights(np.arange(len(sums), dtype=np.uint64))[0])[0]  # so that an exchange is seen
    found = np.zeros(rows + columns, np.uint64)
    np.add.at(found, row, mixed)
    np.add.at(found, rows + column, mixed)
    return found.astype("<u8").tobytes()


def chosen(count: int, entries: Sequence[int]) -> list[int]:
    """The boxes whose row and column are among the entries of ``pack`` that differ."""
    row, column, rows, _ = _cells(count)
    found: list[int] = np.flatnonzero(np.isin(row, entries) & np.isin(rows + column, entries)).tolist()
    return found
