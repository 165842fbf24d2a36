"""Fused kernels on a real card: what an interpreter cannot show."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from on_device import on_another_stream

import thalweg.torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RULES: dict[str, dict[str, Any]] = {
    "LARS": dict(lr=0.1, weight_decay=0.01),
    "LAMB": dict(lr=0.01, weight_decay=0.01),
    "Adafactor": dict(lr=0.01),
}
every_rule = pytest.mark.parametrize("rule", RULES)


def model(shapes: Any, dtype: Any = None) -> list[Any]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, device="cuda").to(dtype or torch.float32)) for shape in shapes]


def stepped(rule: str, params: list[Any], steps: int = 3, engine: str = "auto", **options: Any) -> Any:
    optimizer = getattr(thalweg.torch, rule)(params, engine=engine, **{**RULES[rule], **options})
    torch.manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer


@every_rule
def test_the_same_bits_twice_on_large_tensors(rule: str) -> None:
    shapes = [(3000, 2000), (5_000_000,), (257, 511), (64, 32, 3, 3)]
    runs = []
    for _ in range(2):
        params = model(shapes)
        optimizer = stepped(rule, params)
        runs.append([x for p in params for x in (p, *optimizer.state[p].values())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


#: With rates at which a step is seen in 8 binary digits.
HUGE = [("LARS", 50.0, {}), ("LAMB", 0.5, {}), *[("Adafactor", 0.1, dict(factored=own)) for own in (True, False)]]


@pytest.mark.parametrize(("rule", "lr", "more"), HUGE)
def test_more_elements_than_32_bits_can_count(rule: str, lr: float, more: dict[str, Any]) -> None:
    """2**31 and some more, of bfloat16; the end of it moves as the same numbers elsewhere do."""
    size, columns = 2**31 + 4096, 4096
    p = torch.nn.Parameter(torch.full((size // columns, columns), 0.5, device="cuda", dtype=torch.bfloat16))
    p.grad = torch.full_like(p, 0.25)
    before = p[-1, -8:].clone()
    stepped_once = getattr(thalweg.torch, rule)([p], **{**RULES[rule], "lr": lr, **more}, state_dtype="bfloat16")
    stepped_once.step()
    assert stepped_once.engine == "fused"
    assert not torch.equal(p[-1, -8:], before)
    assert torch.equal(p[-1, -8:], p[0, :8]), "all elements are alike, and so are their steps"
    del p.grad, p, stepped_once
    torch.cuda.empty_cache()


def test_a_million_tiny_tensors() -> None:
    count = 1_000_000
    memory = torch.randn(4 * count, device="cuda")
    grads = torch.randn(4 * count, device="cuda")
    before = memory.clone()
    params = [torch.nn.Parameter(p) for p in memory.split(4)]
    for p, g in zip(params, grads.split(4), strict=True):
        p.grad = g
    optimizer = thalweg.torch.LARS(params, lr=0.1, momentum=0.0, trust=False)
    optimizer.step()
    assert optimizer.engine == "fused"
    torch.testing.assert_close(memory, before - 0.1 * grads)


@every_rule
def test_little_extra_memory(rule: str) -> None:
    gc.collect()  # what earlier tests have left behind must not go away in between
    kept = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
    params = model([(4096, 4096)] * 12 + [(4096,)] * 24)
    optimizer = stepped(rule, params, 1)
    torch.cuda.synchronize()
    kept += sum(p.numel() * p.element_size() * 2 for p in params)
    kept += sum(e.numel() * e.element_size() for s in optimizer.state.values() for e in s.values())
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    extra = torch.cuda.memory_stats()["requested_bytes.all.peak"] - kept
    assert extra < 0.01 * sum(p.numel() * 4 for p in params), f"{extra / 2**20:.1f} MiB"


@every_rule
def test_a_captured_step_follows_lr_and_step(rule: str) -> None:
    """lr is a tensor that changes between replays; the count of steps goes on by itself."""
    results = []
    for is_captured in (False, True):
        params, lr = model([(300, 200), (1000,), (40, 30, 3, 3)]), torch.tensor(0.3, device="cuda")
        optimizer = getattr(thalweg.torch, rule)(params, **{**RULES[rule], "lr": lr}, capturable=True)
        for p in params:
            p.grad = torch.ones_like(p)
        with on_another_stream():
            optimizer.step()
            optimizer.step()
        run: Callable[[], object] = optimizer.step
        if is_captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            run = graph.replay
        for rate in (0.3, 0.2, 0.1):
            lr.fill_(rate)
            for p in params:
                p.grad.mul_(-0.5)
            run()
        torch.cuda.synchronize()
        results.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert {float(s["step"]) for s in optimizer.state.values()} == {5.0}


@every_rule
def test_gradients_that_move_after_a_capture(rule: str) -> None:
    """Eager steps may follow: tables that a graph reads are its own."""
    params = model([(300, 200), (1000,)])
    other = model([(300, 200), (1000,)])
    static = [torch.randn_like(p) for p in params]
    make = getattr(thalweg.torch, rule)
    captured, eager = (make(ps, **RULES[rule], capturable=True) for ps in (params, other))
    for ps in (params, other):
        for p, g in zip(ps, static, strict=True):
            p.grad = g.clone()
    with on_another_stream():
        captured.step()
    eager.step()
    for p, g in zip(params, static, strict=True):
        p.grad = g  # which lie elsewhere than those of the first step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    graph.replay()
    eager.step()
    for p in params:
        p.grad = p.grad.clone()
    captured.step()
    eager.step()
    graph.replay()
    eager.step()
    torch.cuda.synchronize()
    for a, b in zip(params, other, strict=True):
        assert torch.equal(a, b)


START = """
import torch, thalweg.torch
params = [torch.nn.Parameter(torch.randn(s, device="cuda")) for s in [(3000, 768), (768,), (64, 64, 3, 3), (512, 512)]]
for p in params:
    p.grad = torch.randn_like(p)
getattr(thalweg.torch, RULE)(params, lr=0.01).step()
torch.cuda.synchronize()
"""


#: Each kernel once for every kind of tensor.
COMPILED = {"SGD": 4, "AdamW": 4, "LAMB": 9, "Adafactor": 12, "Kron": 50}


@pytest.mark.parametrize("rule", COMPILED)
def test_the_first_step_of_all_compiles_what_it_needs(rule: str, tmp_path: Path) -> None:
    """Nothing is compiled yet, and no block sizes are tried."""
    environment, code = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}, START.replace("RULE", repr(rule))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 < len(list(tmp_path.rglob("*.cubin"))) <= COMPILED[rule]
