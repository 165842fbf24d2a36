"""State follows its parameter, is looked at again when it is replaced, and goes with parameters that leave."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from tolerances import FLOAT64

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg.check.problem import train, weights  # noqa: E402
from thalweg.errors import StateError  # noqa: E402

ENGINES = pytest.mark.parametrize("engine", ["auto", "foreach", "reference"])


def two_alike(rule: str, engine: str, dtype: Any = torch.float64) -> list[tuple[Any, Any]]:
    """Two optimizers after one step each, with equal parameters and state; the second is stepped by the reference."""
    pairs = []
    for one in (engine, "reference"):
        (p,) = weights([(6, 6)], dtype)
        pairs.append((getattr(thalweg.torch, rule)([p], lr=0.1, engine=one), p))
        train(pairs[-1][0], [p], 1)
    pairs[1][1].data.copy_(pairs[0][1].data)
    for key, entry in pairs[0][0].state[pairs[0][1]].items():
        pairs[1][0].state[pairs[1][1]][key].copy_(entry)
    return pairs


@ENGINES
@pytest.mark.parametrize("rule", ["AdamW", "LAMB", "Kron"])
def test_replaced_state_of_other_strides_is_read_as_what_it_is(rule: str, engine: str) -> None:
    (optimizer, p), (other, twin) = two_alike(rule, engine)
    state = optimizer.state[p]
    key = next(key for key, entry in state.items() if entry.shape == (6, 6))
    state[key] = state[key].t().contiguous().t()  # the same numbers in another order of memory
    train(other, [twin], 1, first=1)
    train(optimizer, [p], 1, first=1)
    assert (p - twin).abs().max() <= FLOAT64 * p.abs().max()


@ENGINES
def test_replaced_state_of_another_dtype_is_read_as_what_it_is(engine: str) -> None:
    pairs = two_alike("AdamW", engine, torch.float32)
    for optimizer, p in pairs:
        optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].bfloat16()
        train(optimizer, [p], 2, first=1)
    (optimizer, p), (other, twin) = pairs
    assert torch.allclose(p, twin, rtol=1e-5, atol=1e-6)
    assert optimizer.state[p]["exp_avg"].dtype == other.state[twin]["exp_avg"].dtype == torch.bfloat16


def test_state_without_memory_is_refused_by_name() -> None:
    model = torch.nn.Linear(3, 2, device="meta")
    optimizer = thalweg.torch.AdamW(model.named_parameters(), lr=0.1)
    optimizer.make_state()
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer.param_groups[0]["params"][0] = weight
    optimizer.state[weight] = optimizer.state.pop(model.weight)
    weight.grad = torch.ones(2, 3)
    with pytest.raises(StateError, match=r"'weight' is on cpu, and its state 'exp_avg' on meta, without memory"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(2, 3))


@ENGINES
@pytest.mark.parametrize("rule", ["SGD", "AdamW", "LAMB", "Adafactor", "Muon", "Kron", "SOAP"])
def test_nothing_keeps_parameters_that_have_left(rule: str, engine: str) -> None:
    (stays,), leaves = weights([(8, 4)]), weights([(8, 4)])
    optimizer = getattr(thalweg.torch, rule)([{"params": [stays]}, {"params": leaves}], lr=0.1, engine=engine)
    train(optimizer, [stays, *leaves], 3)
    optimizer.stats()
    gone = [weakref.ref(leaves[0]), *(weakref.ref(entry) for entry in optimizer.state[leaves[0]].values())]
    del optimizer.param_groups[1], optimizer.state[leaves[0]]
    leaves.clear()
    train(optimizer, [stays], 1, first=3)
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
    assert optimizer.stats().keys() == {optimizer.explain().rows[0].name}
