"""On a GPU, where there is one: the same steps, state that moves between devices, CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter

from thalweg.check.problem import assert_close, assert_usual, begin, copy_state, draw, leaves, values, weights
from thalweg.check.registry import Failed, NotOffered, holds
from thalweg.check.subject import Subject

GRADIENTS = 3
#: How far a way may be from that on the CPU, as a share of it: GPUs may multiply matrices of float32 on tensor cores,
#: which keep 11 binary digits of each factor.
TENSOR_CORES = 5e-3


def on_gpu(tensors: Any) -> list[Parameter]:
    """Copies of parameters on the GPU; not offered where there is none."""
    if not torch.cuda.is_available():
        raise NotOffered("there is no GPU here")
    return [Parameter(p.detach().to("cuda")) for p in tensors]


def train_there(optimizer: Any, params: list[Parameter], steps: int, first: int = 0) -> list[torch.Tensor]:
    """The steps that ``problem.train`` makes, with parameters elsewhere."""
    for t in range(first, first + steps):
        for place, p in enumerate(params):
            p.grad = gradient(p, place, t)
        optimizer.step()
    return [p.cpu() for p in values(params)]


def gradient(p: torch.Tensor, place: int, t: int) -> torch.Tensor:
    return (0.1 * draw(p.shape, 1, place, t)).to(p)


@holds("devices")
def gpu_steps_as_cpu(s: Subject) -> None:
    """Steps on a GPU go the way of those on the CPU."""
    params = on_gpu(weights(s))
    assert_usual(s, train_there(s.make(params), params, 4), 4, "on the GPU and on the CPU", TENSOR_CORES)


@holds("devices")
def state_moves_to_another_device(s: Subject) -> None:
    """A run begun on the CPU continues on a GPU, with its state there: models are moved between stages."""
    params, optimizer = begin(s)
    others = on_gpu(params)
    other = s.make(others)
    other.load_state_dict(copy_state(optimizer))
    for path, leaf in leaves(other.state_dict()["state"]):
        if isinstance(leaf, torch.Tensor) and leaf.numel() > 1 and not leaf.is_cuda:
            raise Failed(f"{path} is on {leaf.device} after loading for parameters on the GPU")
    found = train_there(other, others, 3, first=3)
    assert_usual(s, found, 6, "continued on the GPU and on the CPU", TENSOR_CORES)


@holds("devices")
def cuda_graphs(s: Subject) -> None:
    """A step that is captured in a CUDA graph, with capturable=True where there is such an option, replays the same."""
    params, others = on_gpu(weights(s)), on_gpu(weights(s))
    more = {"capturable": True} if "capturable" in s.make(params).param_groups[0] else {}
    captured, plain = s.make(params, **more), s.make(others, **more)
    expected = train_there(plain, others, 6)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        train_there(captured, params, GRADIENTS)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    before = values(params)
    try:
        with torch.cuda.graph(graph):
            captured.step()
    except Exception as error:
        raise NotOffered(f"steps cannot be captured: {type(error).__name__}") from error
    if not all(map(torch.equal, values(params), before)):
        raise Failed("capturing a step changed parameters")
    for t in range(GRADIENTS, 6):
        for place, p in enumerate(params):
            assert p.grad is not None
            p.grad.copy_(gradient(p, place, t))
        graph.replay()
    assert_close([p.cpu() for p in params], expected, weights(s), "replayed and not captured", 1e-4)
