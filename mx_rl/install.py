"""The last step of a sync: copy a verified stage into the live tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mx_rl.addresses import narrowed
from mx_rl.copies import copy_all
from mx_rl.errors import InvalidArgument, layout_mismatch
from mx_rl.plan import Piece, Plan
from mx_rl.tensors import Shard


class Work(ABC):
    """What is left to do after the vote."""

    @abstractmethod
    def run(self) -> None:
        """Make the version the live one. May not fail for any reason that was visible before."""


@dataclass(frozen=True)
class Copies(Work):
    """Pairs of equal-shaped views, stage first."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]

    def run(self) -> None:
        copy_all((target, source) for source, target in self.pairs)


class Installer:
    """Keeps the pieces of a plan and their views of the stage between versions; targets are resolved anew each time."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._stage = 0
        self._pieces: list[tuple[Piece, torch.Tensor]] = []

    def prepare(self, plan: Plan, stage: torch.Tensor, targets: Mapping[str, tuple[Shard, ...]]) -> Copies:
        """Everything that can be refused is refused here, before a live byte changes.

        Raises AliasConflict where one storage would have to hold two different tensors; InvalidArgument where a target's
        layout changed since the version was staged.
        """
        if self._plan is not plan or self._stage != stage.data_ptr():
            self._pieces = [(piece, _view(stage, piece)) for piece in plan.pieces]
            self._plan, self._stage = plan, stage.data_ptr()
        check_aliases(plan, lambda index: self._pieces[index][1])
        pairs = []
        for piece, view in self._pieces:
            for place in piece.destinations:
                shards = targets.get(place.name, ())
                if place.box >= len(shards):
                    raise InvalidArgument(f"{place.name} changed its layout while the version was staged: sync again")
                pairs.append((view, narrowed(shards[place.box].tensor, place.start, piece.shape)))
        return Copies(pairs)


def check_aliases(plan: Plan, piece: Callable[[int], torch.Tensor]) -> None:
    """``piece(i)`` is the view of the plan's i-th piece. Raises AliasConflict."""
    lines = []
    for check in plan.alias_checks:
        left = narrowed(piece(check.left), check.left_start, check.shape)
        right = narrowed(piece(check.right), check.right_start, check.shape)
        if not torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)):
            one, two = check.names
            lines.append(f"{one} and {two} share storage here, and differ at the publisher")
    if lines:
        raise layout_mismatch("install", "untie them here, or tie them at the publisher", aliases=lines)


def check_stage(plan: Plan, stage: torch.Tensor) -> None:
    """``check_aliases`` of a stage in plan order."""
    check_aliases(plan, lambda index: _view(stage, plan.pieces[index]))


def _view(stage: torch.Tensor, piece: Piece) -> torch.Tensor:
    return stage[piece.offset : piece.offset + piece.nbytes].view(getattr(torch, piece.dtype)).view(piece.shape)
