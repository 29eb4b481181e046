"""DTensors and FSDP2 modules in real process groups: their boxes, put together again, are ``full_tensor()``."""

import itertools
import json
import logging
import os
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from mx_rl.errors import InvalidArgument
from mx_rl.layout import RankLayout, WorldLayout
from mx_rl.plan import make_plan
from mx_rl.tensors import DTYPES, resolve, shards

BODIES = {2: [], 3: [], 4: []}


def on(*world_sizes):
    """Run this in every rank of process groups of these sizes: one group each, started once, for all of them."""

    def register(body):
        for world_size in world_sizes:
            BODIES[world_size].append(body)
        return body

    return register


@pytest.fixture(scope="module")
def passes(tmp_path_factory):
    """``passes(world_size, body)`` fails with what any rank raised."""
    outcomes = {}

    def ask(world_size, body):
        if world_size not in outcomes:
            folder = tmp_path_factory.mktemp(f"ranks{world_size}")
            outcomes[world_size] = run_all(world_size, folder)
        for rank, found in enumerate(outcomes[world_size]):
            text = found.get(body.__name__, "did not get there")
            assert not text, f"rank {rank}: {text}"

    return ask


def run_all(world_size, folder):
    context = mp.spawn(enter, (world_size, str(folder)), nprocs=world_size, join=False)
    for process in context.processes:
        process.join(timeout=400)
    for process in context.processes:
        if process.is_alive():
            process.kill()
            process.join()
    files = [folder / f"{rank}.json" for rank in range(world_size)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


class Noted:
    """Writes down what was raised inside, or "": the other bodies are still to run."""

    def __init__(self, outcome, name):
        self.outcome, self.name = outcome, name

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.outcome[self.name] = "".join(traceback.format_exception(error)) if error else ""
        return True


def enter(rank, world_size, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # advice on how to gather faster
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=90),
    )
    outcome = {}
    for body in BODIES[world_size]:
        with Noted(outcome, body.__name__):
            body(rank, world_size)
        (Path(folder) / f"{rank}.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()


def reassemble(tensors):
    """Every rank's boxes, through layouts, arenas and a plan, as whole tensors by name."""
    resolved = resolve(tensors)
    layout = RankLayout.of(resolved)
    arena = np.zeros(layout.nbytes, np.uint8)
    for name, box, offset, nbytes, _, _ in layout.packing():
        data = resolved[name][box].tensor.contiguous().flatten()
        arena[offset : offset + nbytes] = data.view(torch.uint8).numpy() if nbytes else 0
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, (layout.encode(), arena))
    world = WorldLayout.merge([RankLayout.decode(data) for data, _ in told])  # overlap and coverage are checked here
    whole = {
        name: torch.zeros(shape, dtype=DTYPES[dtype])
        for name, shape, dtype in zip(world.names, world.shapes, world.dtypes, strict=True)
    }
    plan = make_plan(world, RankLayout.of(resolve(whole)), window_bytes=4096)
    stage = np.zeros(plan.stage_nbytes, np.uint8)
    for part in plan.parts:
        for at, source, nbytes in part.runs.tolist():
            stage[at : at + nbytes] = told[part.rank][1][source : source + nbytes]
    for piece in plan.pieces:
        data = torch.from_numpy(stage[piece.offset : piece.offset + piece.nbytes]).view(DTYPES[piece.dtype])
        for name, _, start in piece.destinations:
            index = tuple(slice(a, a + n) for a, n in zip(start, piece.shape, strict=True))
            whole[name][index] = data.view(piece.shape)
    return whole, world


def check(tensors, wanted):
    """Boxes hold, and reassembly gives, what was distributed; so does ``full_tensor``, where torch can do it."""
    whole, world = reassemble(tensors)
    for name, tensor in tensors.items():
        want = wanted[name]
        assert whole[name].shape == want.shape, name
        assert whole[name].equal(want), (name, tensor.placements)
        boxes = shards({name: tensor})[name]
        for box in boxes if isinstance(boxes, tuple) else (boxes,):
            index = tuple(slice(a, a + n) for a, n in zip(box.lo, box.box, strict=True))
            assert box.tensor.equal(want[index]), (name, tensor.placements)
        strided = [placement for placement in tensor.placements if isinstance(placement, _StridedShard)]
        # Torch's own gather of strided shards needs every cut to be even.
        if all(tensor.shape[p.dim] % (p.split_factor * world.world_size) == 0 for p in strided):
            assert whole[name].equal(tensor.full_tensor()), (name, tensor.placements)
    return world


@on(2, 3)
def _one_dimensional(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    wanted = {"replicated": torch.arange(5.0), "scalar": torch.tensor(3.0)}
    tensors = {name: distribute_tensor(tensor, mesh, [Replicate()]) for name, tensor in wanted.items()}
    for length, dim in itertools.product((0, 1, 4, 5, 7), (0, 1)):
        name = f"cut.{dim}.{length}"
        wanted[name] = torch.arange(length * 6.0).view((length, 6) if dim == 0 else (6, length))
        tensors[name] = distribute_tensor(wanted[name], mesh, [Cut(dim)])
    world = check(tensors, wanted)
    assert world.shapes[world.table.index["cut.0.5"]] == (5, 6)

    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(InvalidArgument, match=r"'p'.*redistribute"):
        shards({"p": partial})


@pytest.mark.parametrize("world_size", [2, 3])
def test_dtensors_over_one_mesh_dimension(world_size, passes):
    passes(world_size, _one_dimensional)


@on(4)
def _two_dimensional(rank, world_size):
    kinds = [Cut(0), Cut(1), Replicate()]
    placements = list(itertools.product(kinds, repeat=2))
    for factor, dim in itertools.product((2, 3), (0, 1)):
        strided = _StridedShard(dim, split_factor=factor)
        placements += [(strided, Cut(dim)), (strided, Replicate()), (Replicate(), strided), (strided, Cut(1 - dim))]
    for order in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        mesh = DeviceMesh("cpu", order)
        tensors, wanted = {}, {}
        for shape, placed in itertools.product(((8, 8), (5, 7), (1, 3), (3, 2)), placements):
            name = f"{shape}.{placed}"
            wanted[name] = torch.arange(float(shape[0] * shape[1])).view(shape)
            full = DTensor.from_local(wanted[name], mesh, [Replicate(), Replicate()])
            tensors[name] = full.redistribute(mesh, placed)
        check(tensors, wanted)


def test_dtensors_over_two_mesh_dimensions_in_both_orders(passes):
    passes(4, _two_dimensional)


class Block(torch.nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up = torch.nn.Linear(width, hidden)
        self.down = torch.nn.Linear(hidden, width, bias=False)
        self.norm = torch.nn.LayerNorm(width)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.norm(self.down(self.up(x).relu())) * self.scale


@on(4)
def _fsdp_over_tp(rank, world_size):
    for mesh_shape in ((2, 2), (4, 1), (1, 4)):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = Block(6, 20)
        want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        if mesh_shape == (2, 2):
            assert any(isinstance(p, _StridedShard) for t in model.parameters() for p in t.placements)
        whole, _ = reassemble(model)
        assert set(whole) == set(want)
        for name, tensor in want.items():
            assert whole[name].equal(tensor), (mesh_shape, name)


def test_fsdp_over_tensor_parallel_gives_the_original_weights(passes):
    passes(4, _fsdp_over_tp)


@on(3)
def _plain_root_forward(rank, world_size):
    torch.manual_seed(0)
    model = Block(5, 7)
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model)
    model(torch.zeros(1, 5))
    assert not any(isinstance(tensor, DTensor) for tensor in model.parameters())
    whole, world = reassemble(model)
    boxes = world.boxes
    up = world.table.index["up.weight"]
    assert sorted(boxes.rank[boxes.tensor == up].tolist()) == list(range(world_size))  # sharded, not replicated
    for name, tensor in want.items():
        assert whole[name].equal(tensor), name


def test_an_fsdp_root_left_unsharded_by_a_forward_is_resharded(passes):
    passes(3, _plain_root_forward)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(3, 5)
        self.lm_head = torch.nn.Linear(5, 3, bias=False)
        self.lm_head.weight = self.embed.weight


@on(4)
def _tied(rank, world_size):
    torch.manual_seed(0)
    model = Tied()
    want = model.embed.weight.detach().clone()
    fully_shard(model)
    whole, world = reassemble(model)
    assert world.aliases == {"lm_head.weight": "embed.weight"}
    assert world.model_bytes == 60
    assert whole["embed.weight"].equal(want)


def test_tied_weights_under_fsdp_are_one_tensor_even_where_a_rank_is_empty(passes):
    passes(4, _tied)


@on(3)
def _outside_the_mesh(rank, world_size):
    mesh = DeviceMesh("cpu", [0, 2])
    whole, world = reassemble({"w": distribute_tensor(torch.arange(6.0), mesh, [Cut(0)])})
    assert whole["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert world.boxes.rank.tolist() == [0, 2]


def test_a_rank_outside_the_mesh_holds_nothing(passes):
    passes(3, _outside_the_mesh)


@on(4)
def _replicated_and_sharded(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = Block(6, 7)
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model, mesh=mesh)
    whole, world = reassemble(model)
    assert set(world.boxes.owner.tolist()) == {0, 1}
    for name, tensor in want.items():
        assert whole[name].equal(tensor), name


def test_hsdp_copies_are_owned_by_their_lowest_rank(passes):
    passes(4, _replicated_and_sharded)
