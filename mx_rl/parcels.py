"""What a stream gives: by name, the boxes that a target wants, and where their bytes lie in its stage. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from mx_rl.copies import copy_all
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.plan import Plan
from mx_rl.table import ALIGN
from mx_rl.tensors import Shard


class Part(NamedTuple):
    """Bytes of a box as they lie in a stage, compact in C order."""

    offset: int  # bytes from the start of the stage
    nbytes: int
    shape: tuple[int, ...]
    start: tuple[int, ...]  # where it begins in the box


@dataclass(frozen=True)
class Box:
    """One tensor to be given. Made of one part it is a view of the stage, made of several a copy into one buffer."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]

    @cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def whole(self) -> bool:
        return len(self.parts) == 1 and self.parts[0].shape == self.shape

    def stretch(self, part: Part) -> int | None:
        """Where the part's bytes lie in the compact box, or None where they are not one stretch of it."""
        inner = len(self.shape)
        while inner and part.shape[inner - 1] == self.shape[inner - 1]:
            inner -= 1
        if any(size != 1 for size in part.shape[: max(inner - 1, 0)]):
            return None
        at = 0
        for begin, size in zip(part.start, self.shape, strict=True):
            at = at * size + begin
        return at * self.torch_dtype.itemsize

    def tensor(self, stage: Tensor, scratch: Tensor) -> Tensor:
        """The box out of the stage; ``scratch`` (uint8, at least nbytes) takes it where it lies in several parts."""
        if self.whole:
            return _view(stage, self.parts[0].offset, self.nbytes, self.torch_dtype, self.shape)
        target = _view(scratch, 0, self.nbytes, self.torch_dtype, self.shape)
        pairs = []
        for part in self.parts:
            place = target
            for dim, (begin, size) in enumerate(zip(part.start, part.shape, strict=True)):
                place = place.narrow(dim, begin, size)
            pairs.append((place, _view(stage, part.offset, part.nbytes, self.torch_dtype, part.shape)))
        copy_all(pairs)
        return target


@dataclass(frozen=True)
class Parcel:
    """What one turn of the loop gets: one tensor, or the boxes of one name. Tied names share a parcel."""

    names: tuple[str, ...]
    boxes: tuple[Box, ...]
    several: bool  # given as a tuple

    @cached_property
    def scratch_nbytes(self) -> int:
        return sum(align(box.nbytes) for box in self.boxes if not box.whole)

    def give(self, stage: Tensor, scratch: Tensor) -> Tensor | tuple[Tensor, ...]:
        found, at = [], 0
        for box in self.boxes:
            found.append(box.tensor(stage, scratch[at:]))
            at += 0 if box.whole else align(box.nbytes)
        return tuple(found) if self.several else found[0]

    def pack(self) -> tuple[Parcel, list[tuple[int, int, int]], int]:
        """The parcel alone in a buffer: (as it lies there, runs (buffer offset, stage offset, nbytes), the buffer's bytes).
        A box whose parts are stretches of it comes to lie whole."""
        boxes, runs, end = [], [], 0
        for box in self.boxes:
            stretches = [box.stretch(part) for part in box.parts]
            if None not in stretches:
                parts = [Part(end, box.nbytes, box.shape, (0,) * len(box.shape))] if box.parts else []
                runs += [
                    (end + (at or 0), part.offset, part.nbytes) for at, part in zip(stretches, box.parts, strict=True)
                ]
                end = align(end + box.nbytes)
            else:
                parts = []
                for part in box.parts:
                    parts.append(part._replace(offset=end))
                    runs.append((end, part.offset, part.nbytes))
                    end = align(end + part.nbytes)
            boxes.append(Box(box.shape, box.dtype, tuple(parts)))
        return Parcel(self.names, tuple(boxes), self.several), runs, end


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def everything(world: WorldLayout) -> RankLayout:
    """The layout of who takes every tensor of a world, whole."""
    meta = {
        name: (Shard(torch.empty(shape, dtype=getattr(torch, dtype), device="meta")),)
        for name, shape, dtype in zip(world.names, world.shapes, world.dtypes, strict=True)
    }
    return RankLayout.of(meta)


def make_parcels(plan: Plan, *, aliases: bool) -> list[Parcel]:
    """By name, in natural order, tied names too; ``aliases``: also those that only the world has. Names that the world
    lacks are left out."""
    world, target = plan.pieces.world, plan.pieces.target
    parts: dict[tuple[str, int], list[Part]] = defaultdict(list)
    for piece in plan.pieces:
        for name, box, start in piece.destinations:
            parts[name, box].append(Part(piece.offset, piece.nbytes, piece.shape, start))
    tied: dict[str, list[str]] = defaultdict(list)
    for table in (target.aliases, world.aliases) if aliases else (target.aliases,):
        for alias, name in table.items():
            tied[name].append(alias)
    boxes: dict[str, list[Box]] = defaultdict(list)
    for packed in target.packing():
        boxes[packed.name].append(Box(packed.shape, packed.dtype, tuple(parts[packed.name, packed.box])))
    return [
        Parcel((name, *tied[name]), tuple(found), several=len(found) > 1)
        for name, found in boxes.items()
        if any(known in world.table.index for known in (name, *tied[name]))
    ]


def _view(block: Tensor, offset: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return block[offset : offset + nbytes].view(dtype).view(shape)
