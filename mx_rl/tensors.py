"""Tensors as boxes of global tensors: their names, where their elements belong, whether their memory is there.

Sources are modules, mappings of names to tensors, DTensors or Shards, or callables that return one of these.
"""

from __future__ import annotations

import itertools
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mx_rl.errors import InvalidArgument, NameCollision, ShapeMismatch, TensorUnavailable

MAX_DIMS = 32
MAX_TENSOR_BYTES = 1 << 56
WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Path components that DDP, torch.compile, activation checkpointing and FSDP put into names."""

DTYPES: dict[str, torch.dtype] = {
    name: dtype
    for name, dtype in sorted({str(d).removeprefix("torch."): d for d in vars(torch).values()}.items())
    if isinstance(dtype, torch.dtype) and not re.match(r"q|bits|u?int[1-7]$", name)
}
"""Every dtype that travels, by name. Quantised ones do not (their scale lies outside the bytes), nor those of less than
a byte, which torch itself cannot copy: they travel as the integers that hold them."""

_TRAVELLING = frozenset(DTYPES.values())

Names: TypeAlias = "str | Sequence[str] | None"
Rename: TypeAlias = "Mapping[str, str] | Callable[[str], str] | Sequence[tuple[str, str]] | None"
Tensors: TypeAlias = "torch.nn.Module | Mapping[str, Any] | Callable[[], Any]"
Box: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"


@dataclass(frozen=True, eq=False)
class Shard:
    """A box of a global tensor and the memory that holds it.

    ``tensor`` has the box's shape, any strides. ``shape`` is the global tensor's (default: the tensor is the whole),
    ``offset`` where the box begins in it (default: at 0). Raises InvalidArgument for a box that is not inside.
    """

    tensor: Tensor
    _: KW_ONLY
    shape: Sequence[int] | None = None
    offset: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor):
            raise InvalidArgument(f"Shard takes a torch.Tensor, got {type(self.tensor).__name__}")
        box = tuple(self.tensor.shape)
        if self.shape is None and self.offset is None and len(box) <= MAX_DIMS:
            object.__setattr__(self, "shape", box)
            object.__setattr__(self, "offset", (0,) * len(box))
            return
        shape = box if self.shape is None else _ints("shape", self.shape)
        offset = (0,) * len(box) if self.offset is None else _ints("offset", self.offset)
        if not len(shape) == len(offset) == len(box) <= MAX_DIMS:
            raise InvalidArgument(
                f"Shard of a tensor of shape {box} got shape={shape}, offset={offset}: all need the same number of"
                f" dimensions, at most {MAX_DIMS}"
            )
        if any(lo + size > whole for lo, size, whole in zip(offset, box, shape, strict=True)):
            raise InvalidArgument(f"Shard of shape {box} at offset {offset} reaches beyond the global shape {shape}")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "offset", offset)

    @property
    def lo(self) -> tuple[int, ...]:
        """Where the box begins in the global tensor."""
        return self.offset  # type: ignore[return-value]  # a tuple since __post_init__

    @property
    def box(self) -> tuple[int, ...]:
        """The box's sizes: the local tensor's shape."""
        return tuple(self.tensor.shape)

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.shape  # type: ignore[return-value]  # a tuple since __post_init__


def shards(
    source: Tensors, *, rename: Rename = None, include: Names = None, exclude: Names = None
) -> dict[str, Shard | tuple[Shard, ...]]:
    """The boxes that this process holds, by name, in the source's order.

    A module gives its ``state_dict()`` (parameters and persistent buffers; an FSDP2 module left unsharded by a forward
    is resharded by that). DTensors give their local boxes. Wrapper prefixes (``module.``, ``_orig_mod.`` ...) are
    stripped, then ``rename`` maps names (a dict of exact names, a callable, or (regex, replacement) pairs applied in
    order), then names must match one of ``include`` and none of ``exclude`` (fnmatch patterns).

    Raises NameCollision where two tensors get one name, InvalidArgument for what is no tensor or cannot travel.
    """
    renamed = _renamer(rename)
    wanted, unwanted = patterns("include", include), patterns("exclude", exclude)
    found: dict[str, Shard | tuple[Shard, ...]] = {}
    origin: dict[str, str] = {}
    clashes: dict[str, list[str]] = {}
    for given, value in _items(source):
        name = renamed(strip_wrappers(given))
        if (include is not None and not matches(name, wanted)) or matches(name, unwanted):
            continue
        if name in origin:
            clashes.setdefault(name, [origin[name]]).append(given)
            continue
        origin[name] = given
        boxes = _boxes_of(given, value)
        if boxes:
            found[name] = boxes if len(boxes) > 1 or isinstance(value, (tuple, list)) else boxes[0]
    if clashes:
        lines = [f"{name!r} from {' and '.join(map(repr, givens))}" for name, givens in clashes.items()]
        more = f" and {len(lines) - 10} more" if len(lines) > 10 else ""
        raise NameCollision(
            f"two tensors map to one name: {'; '.join(lines[:10])}{more}. Rename or exclude one", names=list(clashes)
        )
    return found


def only_declared(tensors: Tensors | None) -> bool:
    """There is no memory to copy from or to: None, or all elements are on the meta device."""
    if tensors is None:
        return True
    boxes = [box for value in shards(tensors).values() for box in (value if isinstance(value, tuple) else (value,))]
    full = [box.tensor for box in boxes if box.tensor.numel()]
    return bool(full) and all(tensor.is_meta for tensor in full)


def layout_tensors(tensors: Tensors) -> dict[str, tuple[Shard, ...]]:
    """What ``shards`` gives, always as tuples: for a layout alone, since memory is not looked at."""
    return {name: box if isinstance(box, tuple) else (box,) for name, box in shards(tensors).items()}


def resolve(tensors: Tensors) -> dict[str, tuple[Shard, ...]]:
    """What ``shards`` gives, ready to be copied: always tuples, in natural name order, detached, memory checked.

    Raises TensorUnavailable, with every name, where a tensor with elements is on the meta device or its storage is
    freed or resized away. Strides, views and requires_grad do not matter.
    """
    found = shards(tensors)
    resolved: dict[str, tuple[Shard, ...]] = {}
    detached: dict[int, Tensor] = {}  # by id: one object stays one object, which is how empty shards show an alias
    lost: dict[str, str] = {}
    for name in sorted(found, key=natural_key):
        value = found[name]
        boxes = value if isinstance(value, tuple) else (value,)
        reason = next(filter(None, (unavailable(box.tensor) for box in boxes)), None)
        if reason is not None:
            lost[name] = reason
            continue
        resolved[name] = tuple(_detach(box, detached) for box in boxes)
    if lost:
        lines = [f"{name} ({reason})" for name, reason in lost.items()]
        more = f" and {len(lines) - 10} more" if len(lines) > 10 else ""
        raise TensorUnavailable(
            f"{len(lost)} tensors have no memory to read or write: {'; '.join(lines[:10])}{more}. Bring them back"
            " (reload, onload, wake up) before this call",
            names=list(lost),
        )
    return resolved


@lru_cache(maxsize=1 << 18)  # names are sorted again at every publish
def natural_key(name: str) -> tuple[Any, ...]:
    """Sort key in which digits count as numbers: ``layers.2`` before ``layers.10``."""
    parts = re.split(r"([0-9]+)", name)
    stripped = (part.lstrip("0") for part in parts[1::2])
    numbers = [(len(digits), digits) for digits in stripped]  # not int(): a hostile name may have a million digits
    return (*itertools.chain.from_iterable(zip(parts[::2], [*numbers, (-1, "")], strict=True)), name)


@lru_cache(maxsize=1 << 18)
def strip_wrappers(name: str) -> str:
    """Drop wrapper components anywhere but at the end: there it is the tensor's own name."""
    *path, leaf = name.split(".")
    return ".".join([*(part for part in path if part not in WRAPPERS), leaf])


def patterns(argument: str, given: Names) -> tuple[str, ...]:
    """A pattern or a sequence of them as a tuple. Raises InvalidArgument for what is no string."""
    found = (given,) if isinstance(given, str) else tuple(given or ())
    if not all(isinstance(pattern, str) for pattern in found):
        raise InvalidArgument(f"{argument}={given!r}: takes a name pattern or a sequence of them")
    return found


def matches(name: str, given: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in given)


def _ints(argument: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        found = tuple(operator.index(value) for value in values)
    except TypeError:
        raise InvalidArgument(f"Shard {argument}={values!r}: takes a sequence of integers") from None
    if any(value < 0 or value >= 1 << 62 for value in found):
        raise InvalidArgument(f"Shard {argument}={found}: every entry must be at least 0 and below 2**62")
    return found


def _renamer(rename: Rename) -> Callable[[str], str]:
    if rename is None:
        return lambda name: name
    if isinstance(rename, Mapping):
        return lambda name: _text(rename.get(name, name), name)
    if callable(rename):
        return lambda name: _text(rename(name), name)
    try:
        rules = [(re.compile(pattern), replacement) for pattern, replacement in rename]
    except (re.error, TypeError, ValueError) as exc:
        raise InvalidArgument(
            f"rename={rename!r}: takes a dict, a callable, or (regex, replacement) pairs: {exc}"
        ) from exc

    def apply(name: str) -> str:
        for pattern, replacement in rules:
            name = pattern.sub(replacement, name)
        return name

    return apply


def _text(renamed: object, name: str) -> str:
    if not isinstance(renamed, str):
        raise InvalidArgument(f"rename gave {renamed!r} for {name!r}: a name is a string; drop names with exclude=")
    return renamed


def _items(source: Any) -> Iterator[tuple[str, Any]]:
    if callable(source) and not isinstance(source, torch.nn.Module):
        source = source()
    if isinstance(source, torch.nn.Module):
        # keep_vars: tied parameters stay one object. Extra state is a module's private notes, by torch's definition
        # neither parameter nor buffer.
        state = source.state_dict(keep_vars=True)
        yield from (item for item in state.items() if not item[0].endswith("_extra_state"))
    elif isinstance(source, Mapping):
        for name, value in source.items():
            if not isinstance(name, str):
                raise InvalidArgument(f"tensor name {name!r} is no string")
            yield name, value
    else:
        raise InvalidArgument(
            f"tensors: takes a module, a mapping of names to tensors, or a callable that returns one, got"
            f" {type(source).__name__}"
        )


def _boxes_of(name: str, value: Any) -> tuple[Shard, ...]:
    """The boxes of one name: none where this rank is outside the DTensor's mesh."""
    dtensor = sys.modules.get("torch.distributed.tensor")  # no DTensor exists before its module is imported
    if dtensor is not None and isinstance(value, dtensor.DTensor):
        boxes = _local_boxes(name, value)
    elif isinstance(value, Tensor):
        boxes = (Shard(value),)
    elif isinstance(value, Shard):
        boxes = (value,)
    elif isinstance(value, (tuple, list)) and value and all(isinstance(box, Shard) for box in value):
        boxes = tuple(value)
    else:
        raise InvalidArgument(
            f"{name!r}: takes a tensor, a DTensor, a Shard or a tuple of Shards, got {type(value).__name__}"
        )
    for box in boxes:
        tensor = box.tensor
        check_travels(name, tensor)
        if box is not boxes[0] and (box.shape, tensor.dtype) != (boxes[0].shape, boxes[0].tensor.dtype):
            raise ShapeMismatch(
                f"the boxes of {name!r} disagree: {boxes[0].global_shape} {boxes[0].tensor.dtype} and"
                f" {box.global_shape} {tensor.dtype}",
                shapes=[name],
            )
    return boxes


def check_travels(name: str, tensor: Tensor) -> None:
    """Raises InvalidArgument, by name, for a tensor without plain memory or of a dtype that does not travel."""
    if tensor.layout != torch.strided or hasattr(type(tensor), "__tensor_flatten__"):
        raise InvalidArgument(f"{name!r} is a {type(tensor).__name__} without plain memory: give its inner tensors")
    if tensor.dtype not in _TRAVELLING:
        raise InvalidArgument(f"{name!r} has dtype {tensor.dtype}, which cannot travel")


def _local_boxes(name: str, tensor: Any) -> tuple[Shard, ...]:
    """A DTensor's local boxes: views of its local tensor, several where strided sharding scatters them."""
    mesh, placements, shape = tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape)
    for placement in placements:
        if not (placement.is_replicate() or hasattr(placement, "dim")):
            raise InvalidArgument(f"DTensor {name!r} is {placement}: redistribute it to shards or replicas first")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    with torch.no_grad():
        local = tensor.to_local()
    if hasattr(local, "trigger_wait"):  # the result of a collective that is still under way
        local = local.trigger_wait()
    cuts = tuple((p.dim, getattr(p, "split_factor", 0)) if hasattr(p, "dim") else None for p in placements)
    boxes = sharded_boxes(shape, tuple(mesh.shape), tuple(coordinate), cuts)
    if len(boxes) == 1:
        (lo, size), _ = boxes[0]
        if size != tuple(local.shape):
            raise InvalidArgument(f"DTensor {name!r} of {shape} as {placements} holds {tuple(local.shape)}, not {size}")
        return (Shard(local, shape=shape, offset=lo),)
    held = sum(torch.Size(size).numel() for (_, size), _ in boxes)
    if held != local.numel():
        raise InvalidArgument(f"DTensor {name!r} of {shape} as {placements} holds {tuple(local.shape)}, not {boxes}")
    return tuple(
        Shard(local[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))], shape=shape, offset=lo)
        for (lo, size), start in boxes
    )


@lru_cache(maxsize=65536)
def sharded_boxes(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    cuts: tuple[tuple[int, int] | None, ...],
) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """The boxes ((offset, size), start inside the local tensor) that one mesh coordinate holds, in local order.

    ``cuts``: per mesh dimension None (replicated) or (tensor dimension, split factor), factor 0 for plain sharding.
    Torch's ``compute_local_shape_and_global_offset`` gives the first offset only, where FSDP over TP leaves several
    stretches of one dimension on a rank.
    """
    stretches = [[(0, size)] for size in shape]
    for cut, parts, index in zip(cuts, mesh, coordinate, strict=True):
        if cut is None:
            continue
        dim, factor = cut
        outer = [_chunk(stretches[dim], factor, j) for j in range(factor)] if factor else [stretches[dim]]
        stretches[dim] = _join(stretch for piece in outer for stretch in _chunk(piece, parts, index))
    axes = []
    for found in stretches:
        starts = itertools.accumulate((size for _, size in found), initial=0)
        axes.append([(lo, size, start) for (lo, size), start in zip(found or [(0, 0)], starts, strict=False)])
    return tuple(
        ((tuple(lo for lo, _, _ in axis), tuple(size for _, size, _ in axis)), tuple(start for _, _, start in axis))
        for axis in itertools.product(*axes)
    )


def _chunk(stretches: list[tuple[int, int]], parts: int, index: int) -> list[tuple[int, int]]:
    """The index-th of ``parts`` chunks as torch.chunk cuts them: equal, rounded up, the last ones short or empty."""
    total = sum(size for _, size in stretches)
    step = -(-total // parts)
    begin, end = step * index, min(step * (index + 1), total)
    found = []
    at = 0
    for lo, size in stretches:
        a, b = max(begin, at), min(end, at + size)
        if a < b:
            found.append((lo + a - at, b - a))
        at += size
    return found


def _join(stretches: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for lo, size in stretches:
        if found and sum(found[-1]) == lo:
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append((lo, size))
    return found


def unavailable(tensor: Tensor) -> str | None:
    """Why the memory cannot be read, or None."""
    if tensor.numel() == 0:
        return None
    if tensor.is_meta:
        return "on the meta device"
    try:
        have, address = tensor.untyped_storage().nbytes(), tensor.data_ptr()
    except RuntimeError as exc:
        return f"no storage: {exc}"
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    need = (last + 1) * tensor.itemsize
    if have < need:
        return f"its storage has {have} of {need} bytes"
    return None if address else "no memory behind it"


def _detach(box: Shard, detached: dict[int, Tensor]) -> Shard:
    if not box.tensor.requires_grad:
        return box
    tensor = detached.get(id(box.tensor))
    if tensor is None:
        tensor = detached[id(box.tensor)] = box.tensor.detach()
    found = object.__new__(Shard)  # not Shard(...): the box was checked when it was made
    found.__dict__.update(box.__dict__, tensor=tensor)
    return found
