"""The tensor table of a layout and the columns of its boxes, with the checks that bytes from a wire must pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mx_rl.columns import Ints, Packer, Unpacker, ints
from mx_rl.errors import CorruptRecord
from mx_rl.tensors import DTYPES, MAX_DIMS, MAX_TENSOR_BYTES

ALIGN = 64
"""Every box begins at a multiple of it, in arenas and in stages."""

MAX_TENSORS = 1 << 22
DTYPE_NAMES = tuple(DTYPES)
DTYPE_CODES = {name: code for code, name in enumerate(DTYPE_NAMES)}
ITEMSIZES = ints([dtype.itemsize for dtype in DTYPES.values()])


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
        return ints(self.shape.prod(axis=1)) * self.itemsize

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


def check(fine: bool, what: str) -> None:
    if not fine:
        raise CorruptRecord(f"a layout has impossible {what}")


def within(values: Ints, lo: int, hi: int) -> bool:
    """All values are at least ``lo`` and below ``hi``."""
    return values.size == 0 or (lo <= int(values.min()) and int(values.max()) < hi)


def check_inside(shape: Ints, lo: Ints, size: Ints) -> None:
    inside = (lo >= 0) & (size >= 0) & (lo <= shape) & (size <= shape - lo)
    check(bool(inside.all()), "boxes")


def widen(rows: Ints, width: int, fill: int) -> Ints:
    """Add columns of ``fill`` up to ``width``."""
    extra = width - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, extra)), constant_values=fill) if extra else rows
