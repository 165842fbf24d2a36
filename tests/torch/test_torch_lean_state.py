"""Torch tensors whose state is kept in eight bits: engines, checkpoints, and options that change."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg.check.problem import train, weights  # noqa: E402
from thalweg.errors import NonFiniteError, OptionError, ResumeWarning, StateError  # noqa: E402

#: Two that are stepped as one list, one that is grouped otherwise, and one that stays in float32.
SHAPES = {"first": (64, 128), "filter": (64, 64, 3, 3), "thin": (64, 96), "bias": (64,)}


def make(steps: int = 2, dtype: Any = torch.float32, **options: Any) -> tuple[dict[str, Any], Any]:
    params = dict(zip(SHAPES, weights([*SHAPES.values()], dtype), strict=True))
    optimizer = thalweg.torch.LAMB(params.items(), lr=0.01, **{"state_dtype": "int8", **options})
    train(optimizer, [*params.values()], steps)
    return params, optimizer


def test_a_filter_of_other_strides() -> None:
    params, optimizer = make(steps=0)
    wanted, other = make()
    params["filter"].data = params["filter"].data.to(memory_format=torch.channels_last)
    train(optimizer, [*params.values()], 2)
    for key in ("exp_avg", "exp_avg_scale", "exp_avg_sq"):
        assert torch.equal(optimizer.state[params["filter"]][key], other.state[wanted["filter"]][key])


def test_options_that_change_convert_state_once_and_tell_it_once() -> None:
    params, optimizer = make()
    assert optimizer.state[params["first"]]["exp_avg_sq"].dtype == torch.uint8
    optimizer.param_groups[0].update(state_dtype=None, momentum_dtype="int8")
    with pytest.warns(ResumeWarning, match="no longer exp_avg_sq_scale") as told:
        train(optimizer, [*params.values()], 1, first=2)
    assert len(told) == 1
    dtypes = {key: str(entry.dtype)[6:] for key, entry in optimizer.state[params["first"]].items() if key != "step"}
    assert dtypes == {"exp_avg": "int8", "exp_avg_scale": "float32", "exp_avg_sq": "float32"}
    train(optimizer, [*params.values()], 1, first=3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.update(exp_avg_scale=s["exp_avg_scale"] * float("inf")), "must be finite and not negative"),
        (lambda s: s.update(exp_avg_sq_scale=s["exp_avg_sq_scale"] - 1e9), "must be finite and not negative"),
        (lambda s: s["exp_avg_scale"].zero_(), "'exp_avg_scale' has a 0 for codes of 'exp_avg'"),
        (lambda s: s.update(exp_avg_scale=s["exp_avg_scale"].half()), "must be float32 .* it is float16"),
        (lambda s: s.update(exp_avg=s["exp_avg"].float()), "'exp_avg' is float32, and must be int8"),
        (lambda s: s.update(exp_avg_sq=s["exp_avg_sq"].char()), "'exp_avg_sq' is int8, and must be uint8"),
        (lambda s: s.pop("exp_avg_scale"), "does not fit its options: .* restore the options that it was made with"),
        (lambda s: s.update(exp_avg_scale=s["exp_avg_scale"].t()), "does not fit"),
    ],
)
def test_damaged_scales_are_refused_and_nothing_is_loaded(damage: Any, message: str) -> None:
    params, optimizer = make()
    saved = copy.deepcopy(optimizer.state_dict())
    before = {name: optimizer.state[p]["exp_avg_scale"] for name, p in params.items() if name != "bias"}
    damage(saved["state"][0])
    with pytest.raises(StateError, match=message):
        optimizer.load_state_dict(saved)
    assert all(optimizer.state[params[name]]["exp_avg_scale"] is entry for name, entry in before.items())


@pytest.mark.parametrize("engine", ["foreach", "auto"])
@pytest.mark.parametrize("what", ["skip", "raise"])
def test_what_is_not_finite_leaves_codes_and_record_as_they_were(engine: str, what: str) -> None:
    params, optimizer = make(engine=engine, dtype=torch.bfloat16, rounding="compensated", on_nonfinite=what)
    p = params["first"]
    before = {"p": p.detach().clone(), **{key: entry.clone() for key, entry in optimizer.state[p].items()}}
    assert before["rounding_error"].any()
    p.grad[5, 7] = torch.inf
    if what == "raise":
        with pytest.raises(NonFiniteError, match="first"):
            optimizer.step()
    else:
        optimizer.step()
        assert optimizer.skipped == 1
    after = {"p": p.detach(), **optimizer.state[p]}
    assert all(torch.equal(entry, after[key]) for key, entry in before.items())


def test_unknown_codes_are_refused_also_in_a_group() -> None:
    params, optimizer = make()
    with pytest.raises(OptionError, match=r"state_dtype must be one of .*'int8', None, got 'int4'"):
        make(state_dtype="int4")
    optimizer.param_groups[0]["state_dtype"] = "uint8"
    before = params["first"].detach().clone()
    with pytest.raises(OptionError, match=r"state_dtype must be one of .*'int8', None, got 'uint8'"):
        optimizer.step()
    assert torch.equal(params["first"], before)


def test_explain_says_what_cannot_be_grouped() -> None:
    """Its bytes are those allocated: test_torch_conveniences.py."""
    params = zip(("grouped", "odd"), weights([(64, 128), (100, 125)]), strict=True)
    (warning,) = thalweg.torch.LAMB(params, state_dtype="int8").explain().warnings
    assert "stays in float32" in warning
    assert "odd" in warning
