"""The shapes of SmolLM2-135M, filled at random: its weights are not needed to move its bytes."""

from __future__ import annotations

import torch
from torch import Tensor

HIDDEN, LAYERS, VOCABULARY, MIDDLE, KEYS = 576, 30, 49152, 1536, 192
ITEM_BYTES = 2

Shapes = dict[str, tuple[int, ...]]


def smollm2(nbytes: int | None = None) -> Shapes:
    """bf16 shapes by checkpoint name. ``nbytes`` scales the number of layers and the vocabulary, None is the model
    itself (269 MB)."""
    shapes = _shapes(LAYERS, VOCABULARY)
    if nbytes is None:
        return shapes
    share = nbytes / total_bytes(shapes)
    return _shapes(max(round(LAYERS * share), 1), max(round(VOCABULARY * share) // 2 * 2, 2))


def _shapes(layers: int, vocabulary: int) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (HIDDEN,)
        shapes[at + "mlp.down_proj.weight"] = (HIDDEN, MIDDLE)
        shapes[at + "mlp.gate_proj.weight"] = (MIDDLE, HIDDEN)
        shapes[at + "mlp.up_proj.weight"] = (MIDDLE, HIDDEN)
        shapes[at + "post_attention_layernorm.weight"] = (HIDDEN,)
        shapes[at + "self_attn.k_proj.weight"] = (KEYS, HIDDEN)
        shapes[at + "self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[at + "self_attn.q_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[at + "self_attn.v_proj.weight"] = (KEYS, HIDDEN)
    return shapes


def total_bytes(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() * ITEM_BYTES for shape in shapes.values())


def random_weights(shapes: Shapes) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}


def empty_weights(shapes: Shapes) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def stamp(weights: dict[str, Tensor], mark: int) -> None:
    """Write ``mark`` (at most 256, exact in bf16) into both ends of every tensor."""
    for tensor in weights.values():
        flat = tensor.view(-1)
        flat[0] = flat[-1] = mark


def check(weights: dict[str, Tensor], mark: int, *, first: bool = True, last: bool = True) -> None:
    """Raises RuntimeError where a tensor does not carry the mark at the ends asked for."""
    for name, tensor in weights.items():
        flat = tensor.view(-1)
        if (first and float(flat[0]) != mark) or (last and float(flat[-1]) != mark):
            raise RuntimeError(f"{name} did not arrive: {float(flat[0])} .. {float(flat[-1])} where {mark} was sent")
