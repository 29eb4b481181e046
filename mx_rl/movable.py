"""Which tensors of a module may be pointed at other storage: those that nobody else holds."""

from __future__ import annotations

import sys
from collections.abc import Iterable

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
    module is its only holder. A view, a tensor of an autograd graph or a storage object held elsewhere is a holder."""
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
    storage = first.untyped_storage()
    whole = all(
        tensor.is_leaf
        and tensor.is_contiguous()
        and not tensor.is_inference()
        and tensor.storage_offset() == 0
        and (tensor.dtype, tensor.shape) == (first.dtype, first.shape)
        for tensor in group
    )
    count = getattr(torch._C, "_storage_Use_Count", None)
    if not whole or storage.nbytes() != first.nbytes or count is None:
        return False
    # One use a tensor and one for the storage object here, which only this frame and the call's argument may hold.
    return bool(count(storage._cdata) == len(group) + 1) and sys.getrefcount(storage) == 2
