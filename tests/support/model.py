"""A small decoder-like model whose sizes divide by nothing, a trainer of it under FSDP2, and rollouts with other layouts."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from mx_rl import Publisher, Shard, Subscriber
from tests.support.actors import options
from tests.support.socket_registry import SocketRegistry

HIDDEN, HEADS, KV, HEAD_DIM, INNER, VOCAB, LAYERS = 20, 4, 2, 6, 26, 37, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(HIDDEN, KV * HEAD_DIM, bias=False)
        self.v = nn.Linear(HIDDEN, KV * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, INNER, bias=False)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.norm = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.norm
        kv = torch.cat([self.k(x) + self.v(x)] * (HEADS // KV), dim=-1)
        return x + self.o(self.q(x) + kv) + self.down(self.gate(x) * self.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.register_buffer("steps", torch.arange(5))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("temperature", torch.tensor(0.7))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def digest(tensor: torch.Tensor) -> str:
    """Of dtype, shape and bits."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + data).hexdigest()[:16]


class FsdpRank:
    """One FSDP2 rank; ``mesh`` (2,) or (2, 2). Without ``dims`` a second dimension is that of hybrid sharding, whose first
    one replicates; with ``dims`` both shard. ``plain`` keeps the norms out of FSDP: every rank has them whole."""

    def __init__(
        self,
        path: str,
        store: str,
        rank: int,
        world_size: int,
        mesh: tuple[int, ...],
        dims: tuple[int, ...],
        plain: bool = False,
    ) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        torch.manual_seed(0)
        self.model = Model()
        self.rank = rank
        if not dims:
            self.mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
            kept = {layer.norm for layer in self.model.layers} if plain else set()
            for layer in self.model.layers:
                fully_shard(layer, mesh=self.mesh, ignored_params=kept)
            fully_shard(self.model, mesh=self.mesh, ignored_params=kept)
        else:
            self._distribute(init_device_mesh("cpu", mesh, mesh_dim_names=("one", "two")), dims)
        self.pub = Publisher("p", self.model, registry=SocketRegistry(path), options=options(window_bytes=4096))

    def _distribute(self, mesh: Any, dims: tuple[int, ...]) -> None:
        """Every matrix on both mesh dimensions, by ``dims``: the first mesh dimension shards ``dims[0]`` and so on."""
        from torch.distributed.tensor import Replicate, distribute_tensor
        from torch.distributed.tensor import Shard as Placed

        for module in self.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                placed = [Placed(dim) if parameter.dim() > dim else Replicate() for dim in dims]
                setattr(module, name, nn.Parameter(distribute_tensor(parameter.data, mesh, placed)))

    def randomize(self, seed: int) -> None:
        """The same new values on every layout."""
        from torch.distributed.tensor import distribute_tensor

        torch.manual_seed(seed)
        with torch.no_grad():
            for _, parameter in sorted(self.model.named_parameters()):
                whole = torch.randn(parameter.shape, dtype=parameter.dtype)
                if hasattr(parameter, "placements"):
                    whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                parameter.copy_(whole)

    def drift(self, name: str) -> None:
        """Change one element on this rank alone."""
        tensor = dict(self.model.named_parameters())[name].detach()
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local.view(-1)[0] += 1.0

    def slot_bytes(self) -> tuple[int, int]:
        """(of a slot, of all that this rank holds)."""
        from mx_rl.layout import RankLayout
        from mx_rl.tensors import resolve

        return self.pub._ring.layout.nbytes, RankLayout.of(resolve(self.model)).nbytes

    def wait(self, number: int) -> Any:
        return self.pub.wait(number, replicas=0, timeout=30)

    def forward(self) -> None:
        with torch.no_grad():
            self.model(torch.arange(7)[None])

    def offload_and_reload(self) -> None:
        """New storage for every local shard, as an offload round trip leaves it."""
        self.model.to(dtype=torch.float64).to(dtype=torch.float32)

    def replace_data(self) -> None:
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone() * 2

    def publish(self, step: int) -> int:
        return self.pub.publish(step=step).number

    def digests(self) -> dict[str, str]:
        """Of the full tensors; every rank must call."""
        found = {}
        for name, tensor in self.model.state_dict().items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found[name] = digest(whole)
        return found

    def close(self) -> None:
        import torch.distributed as dist

        self.pub.close()
        dist.destroy_process_group()


class WholeRank:
    """A rollout that holds the model unsharded."""

    def __init__(self, path: str) -> None:
        torch.manual_seed(1)
        self.model = Model()
        self.sub = Subscriber("p", self.model, registry=SocketRegistry(path), options=options())

    def sync(self, at_least: int) -> Any:
        return self.sub.sync(at_least=at_least, timeout=60)

    def digests(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self.model.state_dict().items()}

    def close(self) -> None:
        self.sub.close()


class TensorParallelRank:
    """One of two ranks: fused qkv and gate_up cut by rows, o and down by columns, the rest whole."""

    def __init__(self, path: str, rank: int) -> None:
        self.rank = rank
        self.tensors: dict[str, Any] = {
            "steps": torch.zeros(5, dtype=torch.int64),
            "flags": torch.zeros(3, dtype=torch.bool),
            "temperature": torch.tensor(0.0),
            "embed.weight": self._rows(VOCAB, HIDDEN),
            "head.weight": self._rows(VOCAB, HIDDEN),
        }
        for index in range(LAYERS):
            self._layer(f"layers.{index}.")
        self.sub = Subscriber(
            "p", self.tensors, registry=SocketRegistry(path), replica="tp", rank=rank, world_size=2, options=options()
        )

    def _rows(self, rows: int, columns: int) -> Shard:
        first = self.rank * (rows // 2)
        count = rows - first if self.rank else rows // 2
        return Shard(torch.zeros(count, columns), shape=(rows, columns), offset=(first, 0))

    def _columns(self, rows: int, columns: int) -> Shard:
        half = columns // 2
        return Shard(torch.zeros(rows, half), shape=(rows, columns), offset=(0, self.rank * half))

    def _layer(self, prefix: str) -> None:
        q, kv, inner = HEADS * HEAD_DIM // 2, KV * HEAD_DIM // 2, INNER // 2
        qkv, gate_up = torch.zeros(q + 2 * kv, HIDDEN), torch.zeros(2 * inner, HIDDEN)
        at = self.rank
        self.tensors |= {
            prefix + "q.weight": Shard(qkv[:q], shape=(2 * q, HIDDEN), offset=(at * q, 0)),
            prefix + "k.weight": Shard(qkv[q : q + kv], shape=(2 * kv, HIDDEN), offset=(at * kv, 0)),
            prefix + "v.weight": Shard(qkv[q + kv :], shape=(2 * kv, HIDDEN), offset=(at * kv, 0)),
            prefix + "gate.weight": Shard(gate_up[:inner], shape=(INNER, HIDDEN), offset=(at * inner, 0)),
            prefix + "up.weight": Shard(gate_up[inner:], shape=(INNER, HIDDEN), offset=(at * inner, 0)),
            prefix + "o.weight": self._columns(HIDDEN, HEADS * HEAD_DIM),
            prefix + "down.weight": self._columns(HIDDEN, INNER),
            prefix + "norm": torch.zeros(HIDDEN),
        }

    def sync(self, at_least: int) -> Any:
        return self.sub.sync(at_least=at_least, timeout=60)

    def parts(self) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]]:
        found = {}
        for name, value in self.tensors.items():
            shard = value if isinstance(value, Shard) else Shard(value)
            found[name] = (shard.tensor, shard.lo)
        return found

    def close(self) -> None:
        self.sub.close()


def join(ranks: list[dict[str, tuple[torch.Tensor, tuple[int, ...]]]]) -> dict[str, str]:
    """Digests of the tensors that the ranks of a replica hold together."""
    found = {}
    for name in ranks[0]:
        one, two = ranks[0][name], ranks[1][name]
        if one[1] == two[1]:
            assert torch.equal(one[0], two[0]), name
            found[name] = digest(one[0])
        else:
            dim = next(dim for dim, (a, b) in enumerate(zip(one[1], two[1], strict=True)) if a != b)
            found[name] = digest(torch.cat([one[0], two[0]], dim=dim))
    return found
