"""Small models under FSDP2 and tensor parallelism themselves, with forward and backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thalweg.check.problem import WEIGHT, TorchSubject, assert_close, draw, values
from thalweg.check.sharded import tolerance_for, whole_of

WIDTH = 6


def model_for(s: TorchSubject) -> nn.Sequential:
    """Two layers, the same on every rank; with biases where vectors are taken."""
    bias, hidden = not s.facts.needs_matrices, 2 * dist.get_world_size()  # which tensor parallelism must share evenly
    model = nn.Sequential(nn.Linear(WIDTH, hidden, bias=bias), nn.Tanh(), nn.Linear(hidden, 5, bias=bias))
    with torch.no_grad():
        for place, p in enumerate(model.parameters()):
            p.copy_(3 * WEIGHT * draw(p.shape, 0, place))
    return model


def batch(t: int) -> Tensor:
    """Rows for every rank, the same number for each."""
    return draw((4 * dist.get_world_size(), WIDTH), 3, t).float()


def assert_trains_as_one_process(s: TorchSubject, model: nn.Module, where: str, *, share: bool = False) -> None:
    """Fail unless a model over ranks and a whole one step alike. share: each rank gets its part of every batch."""
    whole = model_for(s)
    start = values(list(whole.parameters()))
    runs = []
    for each in (whole, model):
        optimizer = s.make(each.parameters())
        for t in range(4):
            given = batch(t)
            if share and each is model:
                given = given.chunk(dist.get_world_size())[dist.get_rank()]
            optimizer.zero_grad()
            each(given).square().mean().backward()
            optimizer.step()
        runs.append(whole_of(list(each.parameters())))
    assert_close(runs[1], runs[0], start, f"{where} and in one process", tolerance_for(s))
