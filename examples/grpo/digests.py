"""A fingerprint for every tensor, to compare weights of two processes without sending them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def digests(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, str]:
    """SHA-256 of each tensor's bytes in ``dtype``, by name. Sharded ones are gathered: all ranks call this."""
    found = {}
    for name, tensor in state.items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        payload = whole.detach().to(dtype).contiguous().view(torch.uint8)
        found[name] = hashlib.sha256(payload.numpy()).hexdigest()
    return found
