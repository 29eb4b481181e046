"""The last step of a sync: copy a verified stage into the live tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mx_rl.copies import copy_all
from mx_rl.errors import InvalidArgument, layout_mismatch
from mx_rl.plan import Piece, Plan
from mx_rl.tensors import Shard


@dataclass(frozen=True)
class Work:
    """Pairs of equal-shaped views, stage first; ``run`` may not fail for any reason that was visible before."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]

    def run(self) -> None:
        copy_all((target, source) for source, target in self.pairs)


class Installer:
    """Keeps the pieces of a plan and their views of the stage between versions; targets are resolved anew each time."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._stage = 0
        self._pieces: list[tuple[Piece, torch.Tensor]] = []

    def prepare(self, plan: Plan, stage: torch.Tensor, targets: Mapping[str, tuple[Shard, ...]]) -> Work:
        """Everything that can be refused is refused here, before a live byte changes.

        Raises AliasConflict where one storage would have to hold two different tensors; InvalidArgument where a target's
        layout changed since the version was staged.
        """
        self.check_aliases(plan, stage)
        pairs = []
        for piece, view in self._pieces:
            for place in piece.destinations:
                shards = targets.get(place.name, ())
                if place.box >= len(shards):
                    raise InvalidArgument(f"{place.name} changed its layout while the version was staged: sync again")
                pairs.append((view, _part(shards[place.box].tensor, place.start, piece.shape)))
        return Work(pairs)

    def check_aliases(self, plan: Plan, stage: torch.Tensor) -> None:
        """Raises AliasConflict as ``prepare`` does."""
        if self._plan is not plan or self._stage != stage.data_ptr():
            self._pieces = [(piece, _view(stage, piece)) for piece in plan.pieces]
            self._plan, self._stage = plan, stage.data_ptr()
        lines = []
        for check in plan.alias_checks:
            left = _part(self._pieces[check.left][1], check.left_start, check.shape)
            right = _part(self._pieces[check.right][1], check.right_start, check.shape)
            if not torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)):
                one, two = check.names
                lines.append(f"{one} and {two} share storage here, and differ at the publisher")
        if lines:
            raise layout_mismatch("install", "untie them here, or tie them at the publisher", aliases=lines)


def _view(stage: torch.Tensor, piece: Piece) -> torch.Tensor:
    return stage[piece.offset : piece.offset + piece.nbytes].view(getattr(torch, piece.dtype)).view(piece.shape)


def _part(tensor: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    for dim, (begin, length) in enumerate(zip(start, shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, length)
    return tensor
