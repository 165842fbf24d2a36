"""What all gradients of a step decide together, and what a GradScaler leaves to it: its scale and what it has found."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from tolerances import FLOAT64

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg import Spikes  # noqa: E402

ENGINES = pytest.mark.parametrize("engine", ["auto", "foreach", "reference"])
SHAPES = {"w": (4, 3), "b": (5,), "none": (0, 3)}


def model(dtype: Any = torch.float64) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(s, generator=random).to(dtype)) for name, s in SHAPES.items()}


def give_gradients(params: dict[str, Any], t: int, scale: float = 1.0) -> None:
    random = torch.Generator().manual_seed(100 + t)
    for p in params.values():
        p.grad = scale * torch.randn(p.shape, generator=random, dtype=torch.float64).to(p.dtype)


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name, p in first.items():
        torch.testing.assert_close(p, second[name], rtol=FLOAT64, atol=FLOAT64)


@ENGINES
@pytest.mark.parametrize(
    "options",
    [{}, dict(max_grad_norm=0.5), dict(on_nonfinite="skip"), dict(spikes=Spikes(window=2, quantile=0.5))],
    ids=str,
)
def test_a_scaler_leaves_scale_and_infinities_to_the_step(options: dict[str, Any], engine: str) -> None:
    """Norms are those of gradients without the scale; a step that it has found infinite changes and counts nothing."""
    params, others = model(), model()
    scaled, plain = (thalweg.torch.LAMB(each.items(), lr=0.1, engine=engine, **options) for each in (params, others))
    for t, overflows in enumerate((False, False, True, False, False)):
        give_gradients(params, t, 1024.0)
        params["w"].grad[0, 0] *= float("inf") if overflows else 1.0
        scaled.grad_scale, scaled.found_inf = torch.tensor(1024.0), torch.tensor(float(overflows))
        scaled.step()
        if not overflows:
            give_gradients(others, t)
            plain.step()
        assert_same(params, others)
        assert [int(state["step"]) for state in scaled.state.values()] == [
            int(state["step"]) for state in plain.state.values()
        ]


@ENGINES
def test_a_norm_within_its_limit_changes_no_bit_and_one_above_is_that_of_torch(engine: str) -> None:
    ends = []
    for limit in (None, 1e3, 0.5):
        params = model()
        optimizer = thalweg.torch.SGD(params.items(), lr=0.1, momentum=0.9, max_grad_norm=limit, engine=engine)
        for t in range(3):
            give_gradients(params, t)
            optimizer.step()
        ends.append(params)
    by_torch = model()
    optimizer = thalweg.torch.SGD(by_torch.items(), lr=0.1, momentum=0.9, engine=engine)
    for t in range(3):
        give_gradients(by_torch, t)
        norm = torch.cat([p.grad.flatten() for p in by_torch.values()]).norm()
        for p in by_torch.values():
            p.grad *= 0.5 / norm
        optimizer.step()
    assert all(torch.equal(p, ends[1][name]) for name, p in ends[0].items())
    assert_same(ends[2], by_torch)


@ENGINES
@pytest.mark.parametrize("policy", ["propagate", "skip", "raise"])
def test_parameters_without_elements_are_finite(policy: str, engine: str) -> None:
    params = model()
    optimizer = thalweg.torch.LAMB(params.items(), lr=0.1, engine=engine, on_nonfinite=policy)
    before = params["w"].detach().clone()
    give_gradients(params, 0)
    optimizer.step()
    assert not torch.equal(params["w"], before)
    assert optimizer.skipped == 0


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no products of bfloat16")
@pytest.mark.parametrize("engine", ["auto", "foreach", "reference"])
@pytest.mark.parametrize("rule", ["Muon", "Kron", "SOAP"])
def test_autocast_does_not_reach_the_products_of_a_step(rule: str, engine: str) -> None:
    ends = []
    for lowered in (False, True):
        options: dict[str, Any] = dict(ns_dtype=None) if rule == "Muon" else {}
        p = torch.nn.Parameter(model(torch.float32)["w"].detach())
        optimizer = getattr(thalweg.torch, rule)([p], lr=0.1, engine=engine, **options)
        for t in range(3):
            give_gradients({"w": p}, t)
            with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
                optimizer.step()
        ends.append(p)
    assert torch.equal(*ends)


@ENGINES
@pytest.mark.parametrize("rule", ["LAMB", "Muon", "Kron"])
def test_loading_leaves_nothing_of_before(rule: str, engine: str) -> None:
    """Neither statistics nor the memory of its state."""
    p = model(torch.float32)["w"]
    optimizer = getattr(thalweg.torch, rule)([p], lr=0.1, engine=engine)
    for t in range(3):
        give_gradients({"w": p}, t)
        optimizer.step()
    before = [weakref.ref(entry) for entry in optimizer.state[p].values()]
    saved = optimizer.state_dict()
    saved["state"] = {0: {key: entry.clone() for key, entry in saved["state"][0].items()}}
    optimizer.load_state_dict(saved)
    gc.collect()
    assert optimizer.stats() == {}
    assert [entry() for entry in before] == [None] * len(before)
