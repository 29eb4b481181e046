"""What a rank holds, as columns of boxes: RankLayout, content-hashed and compact on the wire.

A rank's arena packs its boxes in natural name order, each compact in C order and beginning at a multiple of 64 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from mx_rl.columns import Ints, Packer, Unpacker, expand, ints, starts_of
from mx_rl.errors import CorruptRecord, InvalidArgument
from mx_rl.tensors import DTYPES, MAX_DIMS, MAX_TENSOR_BYTES, Shard, matches, natural_key

ALIGN = 64
MAX_TENSORS = 1 << 22
MAX_ARENA_BYTES = 1 << 60

DTYPE_NAMES = tuple(DTYPES)
DTYPE_CODES = {name: code for code, name in enumerate(DTYPE_NAMES)}
ITEMSIZES = ints([dtype.itemsize for dtype in DTYPES.values()])

WireDtype: TypeAlias = "torch.dtype | str | Mapping[str, torch.dtype | str] | None"


def align(nbytes: Ints) -> Ints:
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True, eq=False, kw_only=True)
class Table:
    """Global tensors, one row each; dimensions beyond a tensor's own are 1. ``dtype`` indexes DTYPE_NAMES."""

    names: tuple[str, ...]
    ndim: Ints
    shape: Ints  # [tensors, D], D at least 1
    dtype: Ints
    aliases: dict[str, str]  # other name -> name in ``names``

    @cached_property
    def itemsize(self) -> Ints:
        return ITEMSIZES[self.dtype]

    @cached_property
    def nbytes(self) -> Ints:
        return self.shape.prod(axis=1) * self.itemsize

    @cached_property
    def index(self) -> dict[str, int]:
        """Row of every name, aliases included."""
        found = {name: row for row, name in enumerate(self.names)}
        return found | {alias: found[name] for alias, name in self.aliases.items()}

    def shape_of(self, row: int) -> tuple[int, ...]:
        return tuple(self.shape[row, : self.ndim[row]].tolist())

    def pack(self, packer: Packer) -> None:
        used = sorted({DTYPE_NAMES[code] for code in np.unique(self.dtype).tolist()})
        code_of = np.zeros(len(DTYPE_NAMES), np.int64)
        code_of[[DTYPE_CODES[name] for name in used]] = np.arange(len(used))
        packer.texts(self.names).column(self.ndim).column(self.shape)
        packer.column(ints([len(used)])).texts(used).column(code_of[self.dtype])
        packer.column(ints([len(self.aliases)])).texts(list(self.aliases))
        packer.column(ints([self.index[name] for name in self.aliases.values()]))

    @classmethod
    def unpack(cls, unpacker: Unpacker, num_tensors: int, width: int) -> Table:
        check(num_tensors <= MAX_TENSORS and 1 <= width <= MAX_DIMS, f"{num_tensors} tensors of {width} dimensions")
        names = unpacker.texts(num_tensors)
        ndim, shape = unpacker.column(num_tensors), unpacker.matrix(num_tensors, width)
        used = unpacker.texts(int(unpacker.column(1)[0]))
        check(all(name in DTYPE_CODES for name in used), f"dtypes {used}")
        code = unpacker.column(num_tensors)
        check(within(code, 0, len(used)), "dtype codes")
        num_aliases = int(unpacker.column(1)[0])
        aliases, rows = unpacker.texts(num_aliases), unpacker.column(num_aliases)
        check(within(rows, 0, num_tensors), "alias rows")
        check(len({*names, *aliases}) == num_tensors + num_aliases, "names that repeat")
        check(within(ndim, 0, width + 1) and within(shape, 0, MAX_TENSOR_BYTES), "shapes")
        check(bool((shape[np.arange(width) >= ndim[:, None]] == 1).all()), "shapes")
        dtype = ints([DTYPE_CODES[name] for name in used])[code]
        volume = shape.astype(np.float64).prod(axis=1) * ITEMSIZES[dtype]
        check(bool((volume <= MAX_TENSOR_BYTES).all()), "tensor sizes")
        return cls(
            names=names,
            ndim=ndim,
            shape=shape,
            dtype=dtype,
            aliases={alias: names[row] for alias, row in zip(aliases, rows.tolist(), strict=True)},
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Boxes:
    """Boxes of tensors, one row each: [n] or [n, D] int64 columns."""

    tensor: Ints  # row in the Table
    lo: Ints
    size: Ints
    offset: Ints  # bytes from the start of the rank's arena
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.tensor)


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
        cast = _caster(wire_dtype)
        kept: list[str] = []
        dtypes: list[int] = []
        aliases: dict[str, str] = {}
        seen: dict[Any, str] = {}
        for name in sorted(resolved, key=natural_key):
            parts = resolved[name]
            dtype = cast(name, parts[0].tensor.dtype)
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


def check(fine: bool, what: str) -> None:
    if not fine:
        raise CorruptRecord(f"a layout has impossible {what}")


def within(values: Ints, lo: int, hi: int) -> bool:
    """All values are at least ``lo`` and below ``hi``."""
    return values.size == 0 or (lo <= int(values.min()) and int(values.max()) < hi)


def check_inside(shape: Ints, lo: Ints, size: Ints) -> None:
    inside = (lo >= 0) & (size >= 0) & (lo <= shape) & (size <= shape - lo)
    check(bool(inside.all()), "boxes")


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
        shard.lo,
        shard.global_shape,
    )


def _caster(wire_dtype: WireDtype) -> Callable[[str, torch.dtype], int]:
    """(name, own dtype) -> code of the dtype on the wire."""
    given = wire_dtype if isinstance(wire_dtype, Mapping) else {} if wire_dtype is None else {"*": wire_dtype}
    rules = [(pattern, _wire(dtype)) for pattern, dtype in given.items()]

    def cast(name: str, own: torch.dtype) -> int:
        if own.is_floating_point and own.itemsize > 1:
            for pattern, dtype in rules:
                if matches(name, (pattern,)):
                    own = dtype
                    break
        return DTYPE_CODES[str(own).removeprefix("torch.")]

    return cast


def _wire(dtype: torch.dtype | str) -> torch.dtype:
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None or not found.is_floating_point:
        raise InvalidArgument(f"wire_dtype={dtype!r}: takes a floating-point torch dtype or its name")
    return found
