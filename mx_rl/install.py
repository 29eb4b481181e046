"""The last step of a sync: copy a verified stage into the live tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mx_rl.errors import AliasConflict, InvalidArgument, layout_mismatch
from mx_rl.plan import Plan
from mx_rl.tensors import Shard


@dataclass(frozen=True)
class Work:
    """Pairs of equal-shaped views, stage first; ``run`` may not fail for any reason that was visible before."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]

    @torch.no_grad()
    def run(self) -> None:
        for source, target in self.pairs:
            if target.is_inference():
                with torch.inference_mode():
                    target.copy_(source)
            else:
                target.copy_(source)


class Installer:
    """Keeps the views of the stage between versions; targets are resolved anew each time."""

    def __init__(self) -> None:
        self._key: tuple[int, int] | None = None
        self._views: list[torch.Tensor] = []

    def prepare(self, plan: Plan, stage: torch.Tensor, targets: Mapping[str, tuple[Shard, ...]]) -> Work:
        """Everything that can be refused is refused here, before a live byte changes.

        Raises AliasConflict where one storage would have to hold two different tensors; InvalidArgument where a
        target's layout changed since the version was staged.
        """
        key = (id(plan), stage.data_ptr())
        if self._key != key:
            self._views = [
                stage[piece.offset : piece.offset + piece.nbytes].view(getattr(torch, piece.dtype)).view(piece.shape)
                for piece in plan.pieces
            ]
            self._key = key
        self._check_aliases(plan, stage)
        pairs = []
        for piece, view in zip(plan.pieces, self._views, strict=True):
            for place in piece.destinations:
                shards = targets.get(place.name, ())
                if place.box >= len(shards):
                    raise InvalidArgument(f"{place.name} changed its layout while version was staged: sync again")
                target = shards[place.box].tensor
                for dim, (start, length) in enumerate(zip(place.start, piece.shape, strict=True)):
                    if length != target.shape[dim]:
                        target = target.narrow(dim, start, length)
                pairs.append((view, target))
        return Work(pairs)

    def _check_aliases(self, plan: Plan, stage: torch.Tensor) -> None:
        lines = []
        for check in plan.alias_checks:
            one, two = plan.pieces[check.first], plan.pieces[check.second]
            if not torch.equal(
                stage[one.offset : one.offset + one.nbytes], stage[two.offset : two.offset + two.nbytes]
            ):
                lines.append(f"{check.names[0]} and {check.names[1]} share storage here, and differ at the publisher")
        if lines:
            error = layout_mismatch("install", "untie them here, or tie them at the publisher", aliases=lines)
            assert isinstance(error, AliasConflict)
            raise error
