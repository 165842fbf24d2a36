"""On a GPU, where there is one: the same steps, state that moves between devices, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from thalweg.check import expect
from thalweg.check.problem import TorchSubject, copy_state, give, leaves, train, unless_refused, values
from thalweg.check.state import restore

GRADIENTS = 3
#: How far a way may be from that on the CPU, as a share of it: GPUs may multiply matrices of float32 on tensor cores,
#: which keep 11 binary digits of each factor.
TENSOR_CORES = 5e-3


def on_gpu(s: TorchSubject) -> TorchSubject:
    """The same optimizer, of parameters on the GPU; not offered where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    return replace(s, place=lambda p, _: p.to("cuda"))


def test_gpu_steps_as_cpu(s: TorchSubject) -> None:
    """Steps on a GPU go the way of those on the CPU."""
    expect.usual(s, on_gpu(s).run_steps(steps=4), 4, "on the GPU and on the CPU", TENSOR_CORES)


def test_state_moves_to_another_device(s: TorchSubject) -> None:
    """A run begun on the CPU continues on a GPU, with its state there: models are moved between stages."""
    params, optimizer = s.begin()
    others, other = restore(on_gpu(s), params, copy_state(optimizer))
    for path, leaf in leaves(other.state_dict()["state"]):
        if isinstance(leaf, torch.Tensor) and leaf.numel() > 1 and not leaf.is_cuda:
            pytest.fail(f"{path} is on {leaf.device} after loading for parameters on the GPU")
    reached = train(other, others, 3, first=3)
    expect.usual(s, reached, 6, "continued on the GPU and on the CPU", TENSOR_CORES)


def test_cuda_graphs(s: TorchSubject) -> None:
    """A step that is captured in a CUDA graph, with capturable=True where there is such an option, replays the same."""
    params, there = s.weights(), on_gpu(s)
    more: dict[str, Any] = {"capturable": True} if "capturable" in s.make(params).param_groups[0] else {}
    wanted = there.run_steps(steps=6, **more)
    params, captured = there.make_fresh(**more)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        train(captured, params, GRADIENTS)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    before = values(params)
    with unless_refused("capturing steps"), torch.cuda.graph(graph):
        captured.step()
    if not all(map(torch.equal, values(params), before)):
        pytest.fail("capturing a step changed parameters")
    given = [p.grad for p in params if p.grad is not None]  # from which the graph reads
    for t in range(GRADIENTS, 6):
        give(params, t)
        torch._foreach_copy_(given, [p.grad for p in params if p.grad is not None])
        graph.replay()
    expect.close(params, wanted, s.weights(), "replayed and not captured", 1e-4)
