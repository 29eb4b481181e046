"""Layouts: which boxes of which global tensors one rank holds (RankLayout), and all ranks of a world (WorldLayout).

A rank's arena packs its boxes in natural name order, each compact in C order and beginning at a multiple of 64 bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from mx_rl.columns import Flags, Ints, Packer, Unpacker, expand, groups, ints, starts_of
from mx_rl.errors import InvalidArgument, layout_mismatch
from mx_rl.patterns import Patterns, find_patterns
from mx_rl.table import ALIGN, DTYPE_CODES, DTYPE_NAMES, Boxes, Table, align, check, check_inside, widen, within
from mx_rl.tensors import DTYPES, MAX_TENSOR_BYTES, Shard, matches, natural_key

MAX_ARENA_BYTES = 1 << 60
MAX_RANKS = 1 << 20

WireDtype: TypeAlias = "torch.dtype | str | Mapping[str, torch.dtype | str] | None"


class Packed(NamedTuple):
    """Where one box lies in its rank's arena."""

    name: str
    box: int  # index among the boxes of this name
    offset: int  # bytes
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class RankLayout:
    """Which boxes of which global tensors one rank holds: a trainer's in its wire dtype, a rollout's in its own."""

    table: Table
    counts: Ints  # boxes of each tensor, empty ones included
    boxes: Boxes

    @classmethod
    def of(cls, resolved: Mapping[str, Sequence[Shard]], *, wire_dtype: WireDtype = None) -> RankLayout:
        """The layout of resolved tensors.

        ``wire_dtype``: what floating-point tensors are cast to, a dtype or {name pattern: dtype}, first match wins.
        Integers, bools, complex and 1-byte floats keep their dtype. Equal memory under two names is one tensor with an alias.
        """
        cast = wire_caster(wire_dtype)
        kept: list[str] = []
        dtypes: list[int] = []
        aliases: dict[str, str] = {}
        seen: dict[Any, str] = {}
        for name in sorted(resolved, key=natural_key):
            parts = resolved[name]
            dtype = DTYPE_CODES[str(cast(name, parts[0].tensor.dtype)).removeprefix("torch.")]
            canonical = seen.setdefault((dtype, *map(_identity, parts)), name)
            if canonical != name:
                aliases[name] = canonical
                continue
            if math.prod(parts[0].global_shape) * 16 > MAX_TENSOR_BYTES:
                raise InvalidArgument(f"{name!r} has the global shape {parts[0].global_shape}: too large to address")
            kept.append(name)
            dtypes.append(dtype)
        shapes = [resolved[name][0].global_shape for name in kept]
        width = max(1, *map(len, shapes)) if shapes else 1
        found = [part for name in kept for part in resolved[name]]
        table = Table(
            names=tuple(kept),
            ndim=ints([len(shape) for shape in shapes]),
            shape=_matrix(shapes, width, 1),
            dtype=ints(dtypes),
            aliases=aliases,
        )
        counts = ints([len(resolved[name]) for name in kept])
        lo, size = _matrix([p.lo for p in found], width, 0), _matrix([p.box for p in found], width, 1)
        return cls._packed(table, counts, lo, size)

    @classmethod
    def _packed(cls, table: Table, counts: Ints, lo: Ints, size: Ints) -> RankLayout:
        tensor, _ = expand(counts)
        nbytes = size.prod(axis=1) * table.itemsize[tensor]
        offset = starts_of(align(nbytes))[:-1]
        return cls(table, counts, Boxes(tensor=tensor, lo=lo, size=size, offset=offset, nbytes=nbytes))

    def only(self, kept: Flags) -> RankLayout:
        """This layout with every box but those ``kept`` made empty: names, aliases and the number of boxes stay."""
        return self._packed(self.table, self.counts, self.boxes.lo, np.where(kept[:, None], self.boxes.size, 0))

    @property
    def names(self) -> tuple[str, ...]:
        return self.table.names

    @property
    def aliases(self) -> dict[str, str]:
        return self.table.aliases

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Global shapes, by name."""
        return tuple(map(self.table.shape_of, range(len(self.names))))

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Torch dtype names such as "bfloat16", by name."""
        return tuple(DTYPE_NAMES[code] for code in self.table.dtype.tolist())

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the arena: up to the end of the last box."""
        return int((self.boxes.offset + self.boxes.nbytes).max()) if len(self.boxes) else 0

    @cached_property
    def starts(self) -> Ints:
        """First box row of each tensor, and the end."""
        return starts_of(self.counts)

    def packing(self) -> list[Packed]:
        """Every box with its place in the arena, in arena order; empty boxes too."""
        tensors, boxes = self.boxes.tensor.tolist(), expand(self.counts)[1].tolist()
        offsets, sizes = self.boxes.offset.tolist(), self.boxes.nbytes.tolist()
        shapes, ndim = self.boxes.size.tolist(), self.table.ndim.tolist()
        return [
            Packed(self.names[t], box, offset, nbytes, tuple(shape[: ndim[t]]), self.dtypes[t])
            for t, box, offset, nbytes, shape in zip(tensors, boxes, offsets, sizes, shapes, strict=True)
        ]

    @cached_property
    def hash(self) -> str:
        """Of the content: equal layouts have equal hashes on every host. 32 hexadecimal digits."""
        return self._pack().digest()

    def encode(self) -> bytes:
        return self._pack().bytes()

    def _pack(self) -> Packer:
        packer = Packer(b"MXR1", len(self.names), self.table.shape.shape[1], len(self.boxes))
        self.table.pack(packer)
        return packer.column(self.counts).column(self.boxes.lo).column(self.boxes.size)

    @classmethod
    def decode(cls, data: bytes) -> RankLayout:
        """Raises CorruptRecord for anything that ``encode`` of this release could not have written."""
        unpacker = Unpacker(b"MXR1", data, 3)
        num_tensors, width, num_boxes = unpacker.counts
        table = Table.unpack(unpacker, num_tensors, width)
        counts = unpacker.column(num_tensors)
        check(within(counts, 1, num_boxes + 1) and int(counts.sum()) == num_boxes, "box counts")
        lo, size = unpacker.matrix(num_boxes, width), unpacker.matrix(num_boxes, width)
        unpacker.finish()
        check_inside(table.shape[expand(counts)[0]], lo, size)
        layout = cls._packed(table, counts, lo, size)
        check(float(layout.boxes.nbytes.astype(np.float64).sum()) <= MAX_ARENA_BYTES, "arena bytes")
        return layout


@dataclass(frozen=True, eq=False, kw_only=True)
class WorldBoxes(Boxes):
    """Every box that a world holds, by tensor, then rank."""

    rank: Ints
    owner: Ints  # the lowest rank that holds an equal box


@dataclass(frozen=True, eq=False)
class WorldLayout:
    """Which rank holds which boxes, and where in its arena. Made by ``merge``, on every rank alike."""

    table: Table
    rank_bytes: Ints  # arena bytes of each rank
    pattern_of: Ints  # [tensors]
    patterns: Patterns
    offsets: Ints  # arena offset of every box: by tensor, then by row of its pattern

    @classmethod
    def merge(cls, rank_layouts: Sequence[RankLayout]) -> WorldLayout:
        """Rank layouts, by rank, as one.

        Raises a LayoutMismatch with every problem: shapes, dtypes or aliases on which ranks disagree, boxes that
        overlap without being equal, tensors that are not covered whole. A rank without tensors is fine.
        """
        if not 1 <= len(rank_layouts) <= MAX_RANKS:
            raise InvalidArgument(f"a world of {len(rank_layouts)} ranks: takes 1 to {MAX_RANKS}")
        canonical, alias_lines = _aliases(rank_layouts)
        present = dict.fromkeys(layout.names for layout in rank_layouts)
        union = {canonical.get(name, name) for names in present for name in names}
        names = next(iter(present)) if len(present) == 1 and not canonical else tuple(sorted(union, key=natural_key))
        row = {name: i for i, name in enumerate(names)}
        rows_of = {these: ints([row[canonical.get(name, name)] for name in these]) for these in present}
        rows = [rows_of[layout.names] for layout in rank_layouts]
        aliases = {name: canonical[name] for name in sorted(canonical, key=natural_key) if canonical[name] != name}
        table, shapes, dtypes = _agree(names, aliases, rank_layouts, rows)
        world = cls._of_boxes(table, rank_layouts, rows)
        overlaps, holes = world.patterns.problems()
        pattern_of = list(enumerate(world.pattern_of.tolist()))
        lines = {
            "shapes": list(shapes.values()),
            "dtypes": list(dtypes.values()),
            "aliases": alias_lines,
            "overlaps": [f"{names[i]}: {overlaps[p]}" for i, p in pattern_of if p in overlaps and i not in shapes],
            "uncovered": [f"{names[i]}: {holes[p]}" for i, p in pattern_of if p in holes and i not in shapes],
        }
        if any(lines.values()):
            raise layout_mismatch(
                f"the {len(rank_layouts)} ranks of this world do not fit together",
                "All ranks must give the same tensors, cut into equal or disjoint boxes that cover each of them",
                **lines,
            )
        return world

    @classmethod
    def _of_boxes(cls, table: Table, layouts: Sequence[RankLayout], rows: Sequence[Ints]) -> WorldLayout:
        width = table.shape.shape[1]
        held = [np.flatnonzero(layout.boxes.nbytes) for layout in layouts]
        tensor = np.concatenate([r[x.boxes.tensor[h]] for x, r, h in zip(layouts, rows, held, strict=True)])
        order = np.argsort(tensor, kind="stable")  # by tensor, then rank, then place in the arena
        pairs = list(zip(layouts, held, strict=True))
        lo = np.concatenate([widen(x.boxes.lo[h], width, 0) for x, h in pairs])[order]
        size = np.concatenate([widen(x.boxes.size[h], width, 1) for x, h in pairs])[order]
        offsets = np.concatenate([x.boxes.offset[h] for x, h in pairs])[order]
        rank = np.repeat(np.arange(len(layouts), dtype=np.int64), [len(h) for h in held])[order]
        pattern_of, patterns = find_patterns(table, np.bincount(tensor, minlength=len(table.names)), rank, lo, size)
        return cls(table, ints([layout.nbytes for layout in layouts]), pattern_of, patterns, offsets)

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names, in natural order."""
        return self.table.names

    @property
    def aliases(self) -> dict[str, str]:
        return self.table.aliases

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(self.table.shape_of, range(len(self.names))))

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(DTYPE_NAMES[code] for code in self.table.dtype.tolist())

    @property
    def world_size(self) -> int:
        return len(self.rank_bytes)

    def rank_nbytes(self, rank: int) -> int:
        """Bytes of one rank's arena."""
        return int(self.rank_bytes[rank])

    @cached_property
    def model_bytes(self) -> int:
        """Bytes of all tensors, each once."""
        return int(self.table.nbytes.sum())

    @cached_property
    def box_starts(self) -> Ints:
        """First box of each tensor in ``boxes`` and ``offsets``, and the end."""
        return starts_of(self.patterns.counts[self.pattern_of])

    @property
    def copy_sets(self) -> tuple[tuple[int, ...], ...]:
        """The distinct sets of ranks that hold one and the same box: all elements are there while a rank of each lives."""
        return self.patterns.copy_sets

    @property
    def replicated(self) -> bool:
        """Some box is held by several ranks."""
        return any(len(ranks) > 1 for ranks in self.copy_sets)

    def box_at(self, tensor: Ints, row: Ints) -> Ints:
        """Numbers of boxes (entries of ``boxes`` and ``offsets``): by tensor and row of its pattern."""
        found: Ints = self.box_starts[tensor] + row - self.patterns.starts[self.pattern_of[tensor]]
        return found

    def row_of(self, tensor: Ints, box: Ints) -> Ints:
        """The rows of their patterns of boxes given by number."""
        found: Ints = box - self.box_starts[tensor] + self.patterns.starts[self.pattern_of[tensor]]
        return found

    def box_elements(self, box: Ints) -> Ints:
        """How many elements boxes have, by number."""
        tensor = np.searchsorted(self.box_starts, box, side="right") - 1
        found: Ints = self.patterns.size[self.row_of(tensor, box)].prod(axis=1)
        return found

    def boxes_of(self, rank: int) -> Ints:
        """Numbers of the boxes that one rank holds."""
        rows = np.flatnonzero(self.patterns.rank == rank)
        starts = np.searchsorted(rows, self.patterns.starts).astype(np.int64)
        tensor, position = expand(np.diff(starts)[self.pattern_of])
        return self.box_at(tensor, rows[starts[self.pattern_of[tensor]] + position])

    def offset_at(self, tensor: Ints, row: Ints) -> Ints:
        """Where boxes lie in their rank's arena: by tensor and row of its pattern."""
        found: Ints = self.offsets[self.box_at(tensor, row)]
        return found

    @cached_property
    def boxes(self) -> WorldBoxes:
        """All boxes, expanded: 8 x (5 + 2 D) bytes each."""
        tensor, row = self._rows()
        size = self.patterns.size[row]
        return WorldBoxes(
            tensor=tensor,
            lo=self.patterns.lo[row],
            size=size,
            offset=self.offsets,
            nbytes=size.prod(axis=1) * self.table.itemsize[tensor],
            rank=self.patterns.rank[row],
            owner=self.patterns.rank[self.patterns.owner_row[row]],
        )

    def _rows(self) -> tuple[Ints, Ints]:
        """For every box: its tensor, and its row in the patterns."""
        tensor, within_tensor = expand(self.patterns.counts[self.pattern_of])
        return tensor, self.patterns.starts[self.pattern_of[tensor]] + within_tensor

    @cached_property
    def hash(self) -> str:
        """Of the content; the same on every rank that merged the same layouts. 32 hexadecimal digits."""
        return self._pack().digest()

    def encode(self) -> bytes:
        return self._pack().bytes()

    def _pack(self) -> Packer:
        found = self.patterns
        width = self.table.shape.shape[1]
        packer = Packer(b"MXW1", len(self.names), width, self.world_size, len(found.counts), len(found.rank))
        self.table.pack(packer)
        packer.column(self.rank_bytes).column(self.pattern_of).column(found.counts)
        packer.column(found.rank).column(found.lo).column(found.size)
        return packer.column(np.diff(self.offsets, prepend=0))

    @classmethod
    def decode(cls, data: bytes) -> WorldLayout:
        """Raises CorruptRecord for anything that ``encode`` of this release could not have written."""
        unpacker = Unpacker(b"MXW1", data, 5)
        num_tensors, width, world_size, num_patterns, num_rows = unpacker.counts
        check(
            1 <= world_size <= MAX_RANKS and num_patterns <= num_tensors, f"{world_size} ranks, {num_patterns} patterns"
        )
        table = Table.unpack(unpacker, num_tensors, width)
        rank_bytes, pattern_of = unpacker.column(world_size), unpacker.column(num_tensors)
        counts, rank = unpacker.column(num_patterns), unpacker.column(num_rows)
        lo, size = unpacker.matrix(num_rows, width), unpacker.matrix(num_rows, width)
        check(within(rank_bytes, 0, MAX_ARENA_BYTES), "arena bytes")
        check(within(counts, 0, num_rows + 1) and int(counts.sum()) == num_rows, "box counts")
        check(within(pattern_of, 0, num_patterns) and len(np.unique(pattern_of)) == num_patterns, "patterns")
        check(within(rank, 0, world_size) and within(size, 1, 1 << 62), "boxes")
        offsets = np.cumsum(unpacker.column(int(counts[pattern_of].sum())))
        unpacker.finish()
        shape = np.ones((num_patterns, width), np.int64)
        shape[pattern_of] = table.shape
        check(bool((shape[pattern_of] == table.shape).all()), "shapes")
        patterns = Patterns(shape=shape, counts=counts, rank=rank, lo=lo, size=size)
        check_inside(shape[patterns.of_row], lo, size)
        same = ~groups(patterns.of_row)
        check(bool((np.diff(rank, prepend=0)[same] >= 0).all()), "box order")
        check(not any(patterns.problems()), "boxes that overlap, or tensors that are not covered")
        world = cls(table, rank_bytes, pattern_of, patterns, offsets)
        tensor, row = world._rows()
        ends = offsets + size.prod(axis=1)[row] * table.itemsize[tensor]
        fits = (offsets >= 0) & (offsets % ALIGN == 0) & (ends <= rank_bytes[rank[row]])
        check(bool(fits.all()), "arena offsets")
        return world


def _aliases(layouts: Sequence[RankLayout]) -> tuple[dict[str, str], list[str]]:
    """(the canonical name of every name that has an alias anywhere, where ranks disagree).

    A rank whose box of a tensor is empty has no address to compare, so it follows the others.
    """
    parent: dict[str, str] = {}
    told: dict[str, int] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = name = parent[parent[name]]
        return name

    for rank, layout in enumerate(layouts):
        for alias, name in layout.aliases.items():
            told.setdefault(alias, rank)
            parent[root(alias)] = root(name)
    members: dict[str, list[str]] = defaultdict(list)
    for name in sorted(parent, key=natural_key):
        members[root(name)].append(name)
    canonical = {name: found[0] for found in members.values() for name in found}
    lines: dict[tuple[str, ...], str] = {}
    for rank, layout in enumerate(layouts):
        held: dict[str, list[str]] = defaultdict(list)
        for name in filter(canonical.__contains__, layout.names) if canonical else ():
            row = layout.table.index[name]
            if layout.boxes.nbytes[layout.starts[row] : layout.starts[row + 1]].any():
                held[canonical[name]].append(name)
        for name, names in held.items():
            if len(names) > 1:
                other = next(told[member] for member in members[root(name)] if member in told)
                lines.setdefault(
                    tuple(names), f"{' and '.join(names)}: one tensor on rank {other}, several on rank {rank}"
                )
    return canonical, list(lines.values())


def _agree(
    names: tuple[str, ...], aliases: dict[str, str], layouts: Sequence[RankLayout], rows: Sequence[Ints]
) -> tuple[Table, dict[int, str], dict[int, str]]:
    """The table as the first rank that has a tensor tells it; by row, shapes and dtypes in which another differs."""
    width = max(layout.table.shape.shape[1] for layout in layouts)
    table = Table(
        names=names,
        ndim=np.full(len(names), -1, np.int64),
        shape=np.ones((len(names), width), np.int64),
        dtype=np.zeros(len(names), np.int64),
        aliases=aliases,
    )
    first = np.full(len(names), -1, np.int64)
    shapes: dict[int, str] = {}
    dtypes: dict[int, str] = {}
    for rank, (layout, row) in enumerate(zip(layouts, rows, strict=True)):
        shape, ndim, dtype = widen(layout.table.shape, width, 1), layout.table.ndim, layout.table.dtype
        new = first[row] < 0
        table.shape[row[new]], table.ndim[row[new]], table.dtype[row[new]] = shape[new], ndim[new], dtype[new]
        first[row[new]] = rank
        for i in np.flatnonzero((table.shape[row] != shape).any(axis=1) | (table.ndim[row] != ndim)).tolist():
            told, other = table.shape_of(row[i]), layout.table.shape_of(i)
            shapes.setdefault(int(row[i]), f"{names[row[i]]}: {told} on rank {first[row[i]]}, {other} on rank {rank}")
        for i in np.flatnonzero(table.dtype[row] != dtype).tolist():
            told_dtype, other_dtype = DTYPE_NAMES[table.dtype[row[i]]], DTYPE_NAMES[dtype[i]]
            text = f"{names[row[i]]}: {told_dtype} on rank {first[row[i]]}, {other_dtype} on rank {rank}"
            dtypes.setdefault(int(row[i]), text)
    return table, shapes, dtypes


def _matrix(rows: Sequence[tuple[int, ...]], width: int, fill: int) -> Ints:
    return ints([row + (fill,) * (width - len(row)) for row in rows]).reshape(len(rows), width)


def _identity(shard: Shard) -> tuple[Any, ...]:
    """Equal for the same memory seen as the same box; an empty tensor has no address, so there the object decides."""
    tensor = shard.tensor
    memory = 0 if tensor.is_meta or tensor.numel() == 0 else tensor.data_ptr()
    return (
        memory or ("object", id(tensor)),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.device,
        shard.offset,
        shard.shape,
    )


def wire_caster(wire_dtype: WireDtype) -> Callable[[str, torch.dtype], torch.dtype]:
    """(name, own dtype) -> the dtype on the wire. Raises InvalidArgument for what is no floating-point dtype."""
    given = wire_dtype if isinstance(wire_dtype, Mapping) else {} if wire_dtype is None else {"*": wire_dtype}
    rules = [(pattern, _wire(dtype)) for pattern, dtype in given.items()]

    def cast(name: str, own: torch.dtype) -> torch.dtype:
        if own.is_floating_point and own.itemsize > 1:
            for pattern, dtype in rules:
                if matches(name, (pattern,)):
                    return dtype
        return own

    return cast


def _wire(dtype: torch.dtype | str) -> torch.dtype:
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None or not found.is_floating_point:
        raise InvalidArgument(f"wire_dtype={dtype!r}: takes a floating-point torch dtype or its name")
    return found
