"""What checks of ranks are made of: parameters over meshes, gradients to go with them, and whole tensors to compare."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from thalweg.check import expect
from thalweg.check.problem import WEIGHT, Place, Shapes, TorchSubject, draw, unless_refused, values

#: How near shards come to one process, as a share of the way, where steps are computed in 32 bits or in 16: sums are
#: taken in another order.
NEAR, NEAR_IN_16_BITS = 1e-4, 0.1
#: Rows and columns that two or four ranks share evenly.
MATRICES: Shapes = [(8, 4), (8, 4), (4, 8)]
#: Inputs of a model.
WIDTH = 6


class Outputs(TorchDispatchMode):
    """Whether something is computed in 16 bits within it."""

    in_16_bits = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype in (torch.bfloat16, torch.float16):
            self.in_16_bits = True
        return result


@functools.lru_cache(maxsize=1)
def tolerance_for(s: TorchSubject) -> float:
    """How near shards of float32 parameters must come to one process."""
    with Outputs() as seen:
        s.run_steps([(4, 3)])
    return NEAR_IN_16_BITS if seen.in_16_bits else NEAR


@functools.cache
def line() -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


@functools.cache
def grid() -> DeviceMesh:
    """All ranks, two in each row."""
    if dist.get_world_size() % 2:
        pytest.skip(f"{dist.get_world_size()} ranks make no grid")
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("rows", "columns"))


@functools.cache
def halves() -> tuple[DeviceMesh, DeviceMesh]:
    """The first ranks and the others, each with a group of its own. Every rank makes both."""
    size = dist.get_world_size()
    first, second = range(size // 2), range(size // 2, size)
    return DeviceMesh("cpu", list(first)), DeviceMesh("cpu", list(second))


def split(tensor: Tensor, mesh: DeviceMesh, *placements: Placement) -> Tensor:
    """A DTensor of what every rank has as a whole; nothing is sent."""
    return distribute_tensor(tensor.detach(), mesh, placements, src_data_rank=None)


def by_rows(tensor: Tensor, _: int = 0) -> Tensor:
    """As FSDP2 does it."""
    return split(tensor, line(), Shard(0))


@functools.lru_cache(maxsize=1)
def require_rows(s: TorchSubject) -> None:
    """Skip the check where shards of rows, which have checks of their own, raise an error."""
    with unless_refused("shards of rows"):
        replace(s, place=by_rows).run_steps()


def spread(s: TorchSubject, place: Place = by_rows) -> TorchSubject:
    """The same optimizer, of parameters over ranks; not offered where shards of rows raise an error."""
    require_rows(s)
    return replace(s, place=place)


def assert_equals_one_process(
    s: TorchSubject, place: Place, shapes: Shapes | None = None, where: str = "sharded"
) -> None:
    """Fail unless sharded parameters step as those of one process do."""
    reached = spread(s, place).run_steps(shapes, 3)
    expect.usual(s, reached, 3, f"{where} and in one process", tolerance_for(s), shapes=shapes)


def assert_same_on_all_ranks(tensors: dict[str, Tensor], where: str) -> None:
    """Fail unless all ranks have the same bits."""
    for name, mine in tensors.items():
        every = [torch.empty_like(mine).contiguous() for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine.contiguous())
        if not all(torch.equal(other, every[0]) for other in every):
            apart = max(float((other.double() - every[0].double()).abs().max()) for other in every)
            pytest.fail(f"{where}: {name} differs by {apart:.3g} between ranks")


# ---- small models, with forward and backward


def model_for(s: TorchSubject) -> nn.Sequential:
    """Two layers, the same on every rank; with biases where vectors are taken."""
    bias, hidden = not s.facts.needs_matrices, 2 * dist.get_world_size()  # which tensor parallelism must share evenly
    model = nn.Sequential(nn.Linear(WIDTH, hidden, bias=bias), nn.Tanh(), nn.Linear(hidden, 5, bias=bias))
    with torch.no_grad():
        for place, p in enumerate(model.parameters()):
            p.copy_(3 * WEIGHT * draw(p.shape, 0, place))
    return model


def assert_trains_as_one_process(s: TorchSubject, model: nn.Module, where: str, *, share: bool = False) -> None:
    """Fail unless a model over ranks and a whole one step alike. share: each rank gets its part of every batch."""
    whole = model_for(s)
    start = values(list(whole.parameters()))
    runs = []
    for one in (whole, model):
        optimizer = s.make(one.parameters())
        for t in range(4):
            given = draw((4 * dist.get_world_size(), WIDTH), 3, t).float()
            if share and one is model:
                given = given.chunk(dist.get_world_size())[dist.get_rank()]
            optimizer.zero_grad()
            one(given).square().mean().backward()
            optimizer.step()
        runs.append(values(list(one.parameters())))
    expect.close(runs[1], runs[0], start, f"{where} and in one process", tolerance_for(s))
