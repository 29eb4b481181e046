"""Which tensors of a module may be pointed at other storage: those that nobody else holds."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache

import torch

from mx_rl.tensors import Tensors, strip_wrappers

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def module_of(tensors: Tensors) -> torch.nn.Module | None:
    """The module behind ``tensors``; None for a mapping. torch.compile guards on addresses: what it compiled stays put."""
    found = tensors if isinstance(tensors, torch.nn.Module) or not callable(tensors) else tensors()
    if not isinstance(found, torch.nn.Module) or any(map(_is_compiled, found.modules())):
        return None
    return found


def held_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """All parameters and buffers, each object once."""
    found: dict[int, torch.Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        found[id(tensor)] = tensor
    return list(found.values())


def movable(module: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """By name in the state dict (wrapper prefixes stripped): the tensors over one storage, tied ones together, where the
    module is its only holder. A view, an array or a storage object held elsewhere is a holder."""
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in held_tensors(module):
        if type(tensor) in _PLAIN and tensor.numel() and tensor.device.type == "cpu":
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    fine = {id(group[0]): group for group in groups.values() if _may_move(group)}
    owner = {id(tensor): group for group in fine.values() for tensor in group}
    found: dict[str, list[torch.Tensor]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) in owner:
            found[strip_wrappers(name)] = owner[id(value)]
    return found


def repoint(tensors: Iterable[torch.Tensor], to: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.data = to


def _is_compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _may_move(group: list[torch.Tensor]) -> bool:
    first = group[0]
    whole = all(
        tensor.is_leaf
        and tensor.is_contiguous()
        and not tensor.is_inference()
        and tensor.storage_offset() == 0
        and (tensor.dtype, tensor.shape) == (first.dtype, first.shape)
        for tensor in group
    )
    alone = _alone()
    if not whole or alone is None or first.untyped_storage().nbytes() != first.nbytes:
        return False
    tensors, objects = _uses(first)
    return (tensors - len(group) + 1, objects) == alone


def _uses(tensor: torch.Tensor) -> tuple[int, int]:
    """How many tensors of torch's, and how many Python references to the storage object, hold this storage."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)


@cache
def _alone() -> tuple[int, int] | None:
    """What ``_uses`` says of a tensor that is the only holder; None where this torch does not tell, or counts otherwise."""
    if not hasattr(torch._C, "_storage_Use_Count"):
        return None
    probe = torch.zeros(1)
    alone = _uses(probe)
    view = probe[:1]
    shared = _uses(probe)
    del view
    storage = probe.untyped_storage()
    held = _uses(probe)
    del storage
    sees_both = shared[0] == alone[0] + 1 and held[1] == alone[1] + 1
    return alone if sees_both and _uses(probe) == alone else None
