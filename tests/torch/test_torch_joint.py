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
from thalweg.check.problem import give, train, weights  # noqa: E402

ENGINES = pytest.mark.parametrize("engine", ["auto", "foreach", "reference"])
SHAPES = [(4, 3), (5,), (0, 3)]
DOUBLE = torch.float64


def assert_near(first: Any, second: Any) -> None:
    for p, q in zip(first, second, strict=True):
        torch.testing.assert_close(p, q, rtol=FLOAT64, atol=FLOAT64)


@ENGINES
@pytest.mark.parametrize(
    "options",
    [{}, dict(max_grad_norm=0.05), dict(on_nonfinite="skip"), dict(spikes=Spikes(window=2, quantile=0.5))],
    ids=str,
)
def test_a_scaler_leaves_scale_and_infinities_to_the_step(options: dict[str, Any], engine: str) -> None:
    """Norms are those of gradients without the scale; a step that it has found infinite changes and counts nothing."""
    params, others = weights(SHAPES, DOUBLE), weights(SHAPES, DOUBLE)
    scaled, plain = (thalweg.torch.LAMB(each, lr=0.1, engine=engine, **options) for each in (params, others))
    for t, overflows in enumerate((False, False, True, False, False)):
        give(params, t, size=102.4)
        params[0].grad[0, 0] *= float("inf") if overflows else 1.0
        scaled.grad_scale, scaled.found_inf = torch.tensor(1024.0), torch.tensor(float(overflows))
        scaled.step()
        if not overflows:
            train(plain, others, 1, first=t)
        assert_near(params, others)
        assert [int(state["step"]) for state in scaled.state.values()] == [
            int(state["step"]) for state in plain.state.values()
        ]


@ENGINES
def test_a_norm_within_its_limit_changes_no_bit_and_one_above_is_that_of_torch(engine: str) -> None:
    ends = []
    for limit in (None, 1e3, 0.05, "by torch"):
        params, own = weights(SHAPES, DOUBLE), None if limit == "by torch" else limit
        optimizer = thalweg.torch.SGD(params, lr=0.1, momentum=0.9, max_grad_norm=own, engine=engine)
        for t in range(3):
            give(params, t)
            if limit == "by torch":
                norm = torch.cat([p.grad.flatten() for p in params]).norm()
                for p in params:
                    p.grad *= 0.05 / norm
            optimizer.step()
        ends.append(params)
    assert all(map(torch.equal, ends[0], ends[1]))
    assert_near(ends[2], ends[3])


@ENGINES
@pytest.mark.parametrize("rule", ["LAMB", "Muon", "Kron"])
def test_loading_leaves_nothing_of_before(rule: str, engine: str) -> None:
    """Neither statistics nor the memory of its state."""
    (p,) = weights(SHAPES[:1])
    optimizer = getattr(thalweg.torch, rule)([p], lr=0.1, engine=engine)
    train(optimizer, [p], 3)
    before = [weakref.ref(entry) for entry in optimizer.state[p].values()]
    saved = optimizer.state_dict()
    saved["state"] = {0: {key: entry.clone() for key, entry in saved["state"][0].items()}}
    optimizer.load_state_dict(saved)
    gc.collect()
    assert optimizer.stats() == {}
    assert [entry() for entry in before] == [None] * len(before)
