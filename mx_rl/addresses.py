"""Run tables: where the bytes of a plan's stage, or of a rank's packing, lie in memory that is laid out otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mx_rl.columns import Ints, Packer, Unpacker, ints
from mx_rl.errors import CorruptRecord, InvalidArgument
from mx_rl.layout import RankLayout
from mx_rl.plan import Plan
from mx_rl.runs import in_order, strided
from mx_rl.tensors import Shard, Tensors, shards
from mx_rl.transport.base import Region

Targets = Mapping[str, tuple[Shard, ...]]
Signature = tuple[tuple[int, tuple[int, ...]], ...]

MAX_ROWS = 1 << 20
"""Of a run table: beyond it moves take longer than a copy would."""

_KIND = b"MXT1"


@dataclass(frozen=True, eq=False)
class RunTable:
    """``rows``: int64 [n, 3], (stage offset, address, nbytes), in order and disjoint. ``copies``: (target, source) pairs of
    views, for bytes that are wanted in more than one place: made after the rows have been filled."""

    rows: Ints
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return int(self.rows[:, 2].sum())


def destination_table(plan: Plan, targets: Targets) -> RunTable:
    """Where each piece goes; pieces that are only compared are left out.

    Raises InvalidArgument where a target's layout is not the plan's, or its memory is so scattered that moving it in place
    makes no sense.
    """
    found: list[Ints] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for piece in plan.pieces:
        views = [_place(targets, place.name, place.box, place.start, piece.shape) for place in piece.destinations]
        if views:
            found.append(_rows(piece.offset, piece.shape, views[0]))
            copies += [(view, views[0]) for view in views[1:]]
    return RunTable(_gather(found), copies)


def compared_rows(plan: Plan, targets: Targets) -> Ints:
    """Rows of the pieces that are only compared: they are equal to what their alias holds, and are read from there."""
    found: list[Ints] = []
    for check in plan.alias_checks:
        left, right = plan.pieces[check.left], plan.pieces[check.right]
        if right.destinations or not left.destinations:
            continue
        place = left.destinations[0]
        view = narrowed(_place(targets, place.name, place.box, place.start, left.shape), check.left_start, check.shape)
        compact = _compact(right.shape, view.element_size())
        begin = right.offset + sum(at * stride for at, stride in zip(check.right_start, compact, strict=True))
        found.append(_strided(begin, compact, view))
    rows = _gather(found)
    return rows[np.concatenate([[True], rows[1:, 0] != rows[:-1, 0]])] if len(rows) else rows  # compared twice


def trailer_rows(plan: Plan, address: int) -> Ints:
    """One row that puts the trailers at ``address``; none where there are none."""
    rows = ints([[plan.trailer_begin, address, plan.landing_nbytes - plan.trailer_begin]])
    return rows[rows[:, 2] > 0]


def trailer_room(plan: Plan) -> int:
    """Bytes that the trailers take."""
    return int(trailer_rows(plan, 0)[:, 2].sum())


def spare_rows(plan: Plan, address: int) -> tuple[Ints, int]:
    """(rows that put the pieces which are only compared, and the trailers, at ``address`` and after it, bytes that they take
    there)."""
    pieces = plan.pieces
    lonely = np.flatnonzero(np.diff(pieces.dest_starts) == 0)
    room = -(-pieces.nbytes[lonely] // 64) * 64
    at = np.cumsum(room) - room
    compared = np.stack([pieces.offset[lonely], address + at, pieces.nbytes[lonely]], axis=1)
    total = int(room.sum())
    return np.concatenate([compared, trailer_rows(plan, address + total)]), total + trailer_room(plan)


def packing_rows(layout: RankLayout, targets: Targets) -> Ints:
    """Where the boxes of a rank's packing lie: rows (offset in its arena, address, nbytes)."""
    return _gather(
        [_rows(box.offset, box.shape, targets[box.name][box.box].tensor) for box in layout.packing() if box.nbytes]
    )


def payload_rows(plan: Plan) -> Ints:
    """The pieces and trailers of a stage as rows that change nothing: composed with them, runs lose what lies between."""
    pieces = np.stack([plan.pieces.offset, plan.pieces.offset, plan.pieces.nbytes], axis=1)
    return np.concatenate([pieces, trailer_rows(plan, plan.trailer_begin)])


def signature(targets: Targets) -> Signature:
    """Equal where every box lies as before."""
    return tuple(
        (shard.tensor.data_ptr(), tuple(shard.tensor.stride())) for boxes in targets.values() for shard in boxes
    )


def extents(targets: Targets) -> list[Region]:
    """The memory of all boxes, each storage once, neighbours joined: disjoint, by address."""
    spans: dict[tuple[str, int], int] = {}
    for boxes in targets.values():
        for shard in boxes:
            if shard.tensor.numel():
                storage = shard.tensor.untyped_storage()
                key = (str(shard.tensor.device), storage.data_ptr())
                spans[key] = max(spans.get(key, 0), storage.nbytes())
    found: list[Region] = []
    for (device, address), nbytes in sorted(spans.items()):
        last = found[-1] if found else None
        if last is not None and last.device == device and address < last.address + last.nbytes:
            nbytes = max(last.address + last.nbytes, address + nbytes) - last.address
            found[-1] = Region(address=last.address, nbytes=nbytes, device=device)
        else:
            found.append(Region(address=address, nbytes=nbytes, device=device))
    return found


def memory_of(tensors: Tensors) -> list[tuple[int, int]]:
    """(address, nbytes) of every storage behind the tensors, each once; those without memory are left out."""
    found: dict[int, int] = {}
    for value in shards(tensors).values():
        for shard in value if isinstance(value, tuple) else (value,):
            storage = shard.tensor.untyped_storage()
            if not shard.tensor.is_meta and storage.data_ptr():
                found[storage.data_ptr()] = storage.nbytes()
    return list(found.items())


def encode_table(rows: Ints) -> bytes:
    return Packer(_KIND, len(rows)).column(rows).bytes()


def decode_table(data: bytes) -> Ints:
    """Raises CorruptRecord. Whether the addresses are those that a source serves is checked with every route."""
    unpacker = Unpacker(_KIND, data, 1)
    (count,) = unpacker.counts
    if count > 4 * MAX_ROWS:
        raise CorruptRecord(f"a run table of {count} rows is over the limit")
    rows = unpacker.matrix(count, 3)
    unpacker.finish()
    ends = rows[:, 0] + rows[:, 2]
    small = (rows >= 0).all() and (rows < 1 << 62).all() and (rows[:, 2] > 0).all()
    if not small or (rows[1:, 0] < ends[:-1]).any():
        raise CorruptRecord("a run table whose rows are negative, empty or overlap")
    return rows


def narrowed(tensor: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """The box of ``shape`` that begins at ``start``, as a view."""
    for dim, (begin, length) in enumerate(zip(start, shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, length)
    return tensor


def _place(targets: Targets, name: str, box: int, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    shards = targets.get(name, ())
    if box >= len(shards):
        raise InvalidArgument(f"{name} changed its layout while the version was staged: sync again")
    return narrowed(shards[box].tensor, start, shape)


def _rows(offset: int, shape: Sequence[int], view: torch.Tensor) -> Ints:
    if view.is_contiguous():
        return ints([[offset, view.data_ptr(), view.nbytes]])
    return _strided(offset, _compact(shape, view.element_size()), view)


def _strided(offset: int, compact: Sequence[int], view: torch.Tensor) -> Ints:
    size = view.element_size()
    strides = [(left, right * size) for left, right in zip(compact, view.stride(), strict=True)]
    rows = strided(offset, view.data_ptr(), strides, view.shape, size)
    _check_count(len(rows), f"one of {tuple(view.shape)} and strides {view.stride()} alone has {len(rows)}")
    return rows


def _compact(shape: Sequence[int], itemsize: int) -> list[int]:
    found, step = [], itemsize
    for size in reversed(shape):
        found.append(step)
        step *= size
    return found[::-1]


def _gather(found: list[Ints]) -> Ints:
    rows = in_order(np.concatenate([np.zeros((0, 3), np.int64), *found]))
    _check_count(len(rows), f"{len(found)} boxes have {len(rows)}")
    return rows


def _check_count(count: int, text: str) -> None:
    if count > MAX_ROWS:
        raise InvalidArgument(
            f"memory in more than {MAX_ROWS} separate runs is not moved in place ({text}): make those tensors contiguous, or"
            ' use stage="device" and serve="stage"'
        )
