"""``swap=True``: two arenas in the rank's own packing take turns; an install points the module at the one just filled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from mx_rl.addresses import RunTable, destination_table, narrowed, spare_rows
from mx_rl.copies import copy_all
from mx_rl.errors import InvalidArgument
from mx_rl.install import Work, check_aliases
from mx_rl.landing import Landing
from mx_rl.layout import Packed, RankLayout
from mx_rl.movable import module_of, movable, repoint
from mx_rl.plan import Plan
from mx_rl.runs import in_order
from mx_rl.stage import Quarantine, Stage, roomy
from mx_rl.table import ALIGN
from mx_rl.tensors import Shard, Tensors, resolve


class _Aim(NamedTuple):
    """What is prepared for one plan in one landing."""

    plan: Plan
    landing: Landing
    table: RunTable
    views: dict[str, tuple[Shard, ...]]
    spare: int  # offset of the bytes that are only compared, and of the trailers


class SwapStage(Stage):
    """``open_landing`` takes a size in bytes. At construction the module's tensors move into the first arena, and their
    former storage is freed. Whatever may not move is copied at each install, which finds out anew."""

    def __init__(self, open_landing: Callable[[int], Landing], layout: RankLayout, tensors: Tensors) -> None:
        self._open = open_landing
        self._tensors = tensors
        self._layout = layout
        self._quarantine = Quarantine()
        self._aims: list[_Aim] = []
        self._live = open_landing(roomy(layout.nbytes))
        self._lent: list[tuple[weakref.ref[Any], int, int]] = []  # the memory behind what was pointed at an arena
        try:
            self._repoint(layout, self._live, copy=True)
            # Not before the module's former storage is gone: construction never takes more than two models.
            self.landing = open_landing(roomy(layout.nbytes))
        except BaseException:
            self._live.abandon(self._live_in(self._live))
            raise

    @property
    def landings(self) -> tuple[Landing, ...]:
        return (self.landing, self._live)

    @property
    def quarantine(self) -> tuple[Landing, ...]:
        return self._quarantine.landings

    def landing_for(self, plan: Plan) -> Landing:
        self._quarantine.sweep()
        packed, spare = plan.pieces.target.nbytes, spare_rows(plan, 0)[1]
        need = _aligned(packed) + spare if spare else packed
        kept = self._live_in(self.landing)
        if kept or self.landing.nbytes < need:
            old, self.landing = self.landing, self._open(max(need, roomy(self._layout.nbytes)))
            old.abandon(kept)
        self._layout = plan.pieces.target
        self._aim(plan, self.landing)
        return self.landing

    def replace(self, landing: Landing) -> Landing:
        plan = next(aim.plan for aim in self._aims if aim.landing is landing)
        self.landing = self._open(landing.nbytes)
        self._quarantine.take(landing)
        self._aim(plan, self.landing)
        return self.landing

    def prepare(self, plan: Plan, landing: Landing) -> Work:
        aim = next(aim for aim in self._aims if aim.landing is landing)
        copy_all(aim.table.copies)
        self._check_aliases(aim)
        targets = resolve(self._tensors)
        for name, boxes in aim.views.items():
            found = targets.get(name, ())
            if [box.tensor.shape for box in found] != [box.tensor.shape for box in boxes]:
                raise InvalidArgument(f"{name} changed its layout while the version was staged: sync again")
        return _Swap(self, plan.pieces.target, landing)

    def swap(self, layout: RankLayout, landing: Landing) -> None:
        """Point what may move at the arena just filled, copy the rest, and let the other arena be filled next."""
        moved = self._repoint(layout, landing, copy=False)
        views = _views(layout, landing)
        rest = [name for name in views if name not in moved]
        if rest:
            targets = resolve(self._tensors)
            copy_all(
                (target.tensor, view.tensor)
                for name in rest
                for target, view in zip(targets[name], views[name], strict=True)
            )
        self.landing, self._live = self._live, self.landing

    def _repoint(self, layout: RankLayout, landing: Landing, *, copy: bool) -> set[str]:
        """Point what may move at its place in the arena, with ``copy`` its present values first. Returns the names."""
        module = module_of(self._tensors)
        free = movable(module) if module is not None else {}
        moved: set[str] = set()
        self.swapped_bytes = 0
        for box, part in _parts(layout, landing):
            tensors = free.get(box.name, [])
            view = _view(part, box)
            if box.box or not tensors or (tensors[0].dtype, tensors[0].shape) != (view.dtype, view.shape):
                continue
            if copy:
                copy_all([(view, tensors[0].detach())])
            repoint(tensors, view)
            self._lent.append((weakref.ref(part), int(part.ctypes.data), part.nbytes))
            self.swapped_bytes += part.nbytes
            moved.add(box.name)
        return moved

    def _live_in(self, landing: Landing) -> list[tuple[int, int]]:
        """Memory of this arena that somebody still holds, as a live tensor that an earlier install could not swap out or
        as a view of one: filled again it would be torn."""
        self._lent = [entry for entry in self._lent if entry[0]() is not None]
        return [(address, nbytes) for _, address, nbytes in self._lent if landing.owns(address)]

    def _aim(self, plan: Plan, landing: Landing) -> None:
        for aim in self._aims:
            if aim.plan is plan and aim.landing is landing:
                return
        views = _views(plan.pieces.target, landing)
        spare = _aligned(plan.pieces.target.nbytes)
        table = destination_table(plan, views)
        rows = np.concatenate([table.rows, spare_rows(plan, landing.address + spare)[0]])
        table = RunTable(in_order(rows), table.copies)
        others = [aim for aim in self._aims if aim.landing in self.landings and aim.landing is not landing]
        self._aims = [*others, _Aim(plan, landing, table, views, spare)]
        landing.aim(table.rows)

    def _check_aliases(self, aim: _Aim) -> None:
        if not aim.plan.alias_checks:
            return
        begins = {int(offset): int(address) for offset, address, _ in aim.table.rows.tolist()}

        def piece(index: int) -> torch.Tensor:
            one = aim.plan.pieces[index]
            if one.destinations:
                place = one.destinations[0]
                return narrowed(aim.views[place.name][place.box].tensor, place.start, one.shape)
            at = begins[one.offset] - aim.landing.address
            return aim.landing.block[at : at + one.nbytes].view(getattr(torch, one.dtype)).view(one.shape)

        check_aliases(aim.plan, piece)


class _Swap(Work):
    def __init__(self, stage: SwapStage, layout: RankLayout, landing: Landing) -> None:
        self._stage = stage
        self._layout = layout
        self._landing = landing

    def run(self) -> None:
        self._stage.swap(self._layout, self._landing)


def _parts(layout: RankLayout, landing: Landing) -> Iterator[tuple[Packed, np.ndarray]]:
    """The boxes of a rank in an arena, each as an array of its own: storage made of it ends with its last holder."""
    memory = landing.block.numpy()
    for box in layout.packing():
        yield box, memory[box.offset : box.offset + box.nbytes]


def _view(part: np.ndarray, box: Packed) -> torch.Tensor:
    return torch.from_numpy(part).view(getattr(torch, box.dtype)).view(box.shape)


def _views(layout: RankLayout, landing: Landing) -> dict[str, tuple[Shard, ...]]:
    found: dict[str, list[Shard]] = {}
    for box, part in _parts(layout, landing):
        found.setdefault(box.name, []).append(Shard(_view(part, box)))
    return {name: tuple(boxes) for name, boxes in found.items()}


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
