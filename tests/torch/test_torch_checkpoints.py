"""State is saved and comes back to the last bit, in its own dtype; what does not fit is refused whole.

Of every rule with its defaults: tests/check/test_ours.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thalweg.torch
from thalweg.check.expect import same
from thalweg.check.problem import copy_state, train, weights
from thalweg.check.state import through_a_file
from thalweg.errors import OptimError, ResumeWarning

ENGINES = pytest.mark.parametrize("engine", ["reference", "foreach"])
SHAPES = [(6, 4), (6, 4), (5,), (3, 4, 2), ()]


def make(rule: str, params: Any, **options: Any) -> Any:
    return getattr(thalweg.torch, rule)(params, **{"lr": 0.02, "engine": "reference", **options})


def begin(rule: str, shapes: Any = SHAPES, dtype: Any = torch.float32, **options: Any) -> tuple[Any, Any]:
    """Parameters and their optimizer after two steps."""
    params = weights(shapes, dtype)
    optimizer = make(rule, params, **options)
    train(optimizer, params, 2)
    return params, optimizer


def snapshot(params: list[Any], optimizer: Any) -> Any:
    return copy.deepcopy(([p.detach() for p in params], optimizer.state_dict()))


@ENGINES
@pytest.mark.parametrize(
    ("rule", "options", "dtype", "expected"),
    [
        ("LARS", dict(momentum_dtype="bfloat16"), None, {"momentum_buffer": torch.bfloat16}),
        ("LAMB", dict(momentum_dtype="float16"), None, {"exp_avg": torch.float16, "exp_avg_sq": torch.float32}),
        ("LAMB", dict(state_dtype="float64"), None, {"exp_avg": torch.float64, "exp_avg_sq": torch.float64}),
        ("Adafactor", dict(momentum=0.9, momentum_dtype="bfloat16"), None, {"exp_avg": torch.bfloat16}),
        ("Kron", dict(precond_dtype="bfloat16"), None, {"Q_0": torch.bfloat16, "momentum_buffer": torch.float32}),
        ("AdamW", dict(rounding="stochastic", max_grad_norm=3.0), torch.float16, {"exp_avg": torch.float32}),
        ("SOAP", dict(on_nonfinite="skip"), torch.float64, {"exp_avg": torch.float64}),
        ("LAMB", dict(state_dtype="int8", rounding="compensated"), torch.bfloat16, {"rounding_error": torch.int8}),
        # options that shape the state
        ("Adafactor", dict(min_dim_size_to_factor=2), None, {}),
        ("LARS", dict(momentum=0.0), None, {}),
        ("Kron", dict(max_skew=None), None, {}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_options_and_dtypes_come_with_the_state(
    rule: str, options: dict, dtype: Any, expected: dict, engine: str
) -> None:
    """As in torch, where SGD without momentum loads the state of SGD with momentum."""
    params, optimizer = begin(rule, dtype=dtype or torch.float32, engine=engine, **options)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = make(rule, others, engine=engine)
    saved = optimizer.state_dict()  # whose memory is the optimizer's, which goes on first
    other.load_state_dict(through_a_file(saved, weights_only=True) if engine == "foreach" else saved)
    train(optimizer, params, 3, first=2)
    train(other, others, 3, first=2)
    same(snapshot(others, other), snapshot(params, optimizer), "resumed")
    for state in other.state.values():
        assert {key: state[key].dtype for key in expected} == expected


# ---- what does not fit


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], Any]:
    def save(rule: str) -> Any:
        saved = copy_state(begin(rule)[1])
        change(saved)
        return saved

    return save


def with_option(**options: Any) -> Callable[[str], Any]:
    return changed(lambda saved: saved["param_groups"][0].update(options))


def with_shapes(*shapes: tuple[int, ...]) -> Callable[[str], Any]:
    return lambda rule: begin(rule, shapes)[1].state_dict()


def round_entries(saved: dict[str, Any]) -> None:
    saved["state"][0].update({key: x.bfloat16() for key, x in saved["state"][0].items() if key != "step"})


def save_adam(_: str) -> Any:
    params = weights(SHAPES)
    optimizer = torch.optim.Adam(params)
    train(optimizer, params, 2)
    return optimizer.state_dict()


#: What is loaded, made for a rule, and what is said of it.
MISFITS: dict[str, tuple[Callable[[str], Any], str]] = {
    "another optimizer": (lambda _: begin("AdamW")[1].state_dict(), "state of .* cannot be loaded into"),
    "other shapes": (with_shapes((5, 4), *SHAPES[1:]), "'0' does not fit"),
    "fewer parameters": (with_shapes(*SHAPES[:3]), r"groups of sizes \[3\], and this optimizer of sizes \[5\]"),
    "more parameters": (with_shapes(*SHAPES, (2,)), r"groups of sizes \[6\], and this optimizer of sizes \[5\]"),
    "a newer layout": (with_option(layout=999), "layout 999"),
    "an impossible option": (with_option(weight_decay=-1.0), "weight_decay"),
    "an option that is gone": (
        with_option(accumulate=4),
        "saved with accumulate=4, which is gone since .*: divide the loss by n",
    ),
    "an impossible rate": (with_option(lr=-1.0), "lr"),
    "an impossible dtype": (with_option(state_dtype="uint8"), "state_dtype"),
    **{f"{no!r}": (lambda _, no=no: no, "this is not a state_dict") for no in (None, 3, [], "state.pt")},  # type: ignore[misc]
    "no step": (changed(lambda saved: saved["state"][0].pop("step")), r"state\['step'\] of '0' must be a whole number"),
    "entries that a loader has rounded": (
        changed(round_entries),
        "state of '0' does not fit: .* in torch.float32, and read into torch.bfloat16; .*saved options",
    ),
    "Adam": (save_adam, "not a state of thalweg.torch"),
    "no state dict": (lambda _: {"model": 1}, "not a state_dict"),
    "SGD before its first step": (
        lambda _: torch.optim.SGD(weights(SHAPES), lr=0.5).state_dict(),
        "not a state of thalweg.torch",
    ),
}


@pytest.mark.parametrize("rule", ["LAMB", "SOAP"])
@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused_and_changes_nothing(rule: str, misfit: str) -> None:
    save, told = MISFITS[misfit]
    params, optimizer = begin(rule, weight_decay=0.125)
    before = snapshot(params, optimizer)
    with pytest.raises(OptimError, match=told):
        optimizer.load_state_dict(save(rule))
    same(snapshot(params, optimizer), before, "after a state that was refused")
    train(optimizer, params, 1, first=2)


@ENGINES
@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        ("LARS", dict(momentum=0.0), dict(momentum=0.9)),
        ("Adafactor", {}, dict(momentum=0.9)),
        ("Kron", {}, dict(max_skew=None)),
        ("Adafactor", {}, dict(min_dim_size_to_factor=2)),
    ],
    ids=str,
)
def test_an_option_that_no_longer_fits_the_state(rule: str, before: dict, after: dict, engine: str) -> None:
    """Said by name, before anything is stepped; numpy says it in the same way."""
    params, optimizer = begin(rule, engine=engine, **before)
    kept = snapshot(params, optimizer)
    optimizer.param_groups[0].update(after)
    with pytest.raises(OptimError, match=r"'0'"):
        train(optimizer, params, 1, first=2)
    same(snapshot(params, optimizer)[0], kept[0], "after a step that was refused")


def test_state_that_is_older_than_its_option_keeps_its_dtype() -> None:
    """Options that are set later are for state that is made later: saving and loading rounds nothing."""
    _, optimizer = begin("AdamW")
    other = make("AdamW", weights(SHAPES))
    optimizer.param_groups[0]["state_dtype"] = "bfloat16"
    before = copy_state(optimizer)["state"]
    other.load_state_dict(through_a_file(optimizer.state_dict(), weights_only=True))
    same(other.state_dict()["state"], before, "loaded")
    assert before[0]["exp_avg"].dtype == torch.float32


# ---- state in eight bits


#: Two that are stepped as one list, one that is grouped otherwise, and one that stays in float32.
CODED = [(64, 128), (64, 64, 3, 3), (64, 96), (64,)]


def begin_coded(**options: Any) -> tuple[Any, Any]:
    return begin("LAMB", CODED, **{"engine": "auto", "state_dtype": "int8", **options})


def test_a_filter_of_other_strides() -> None:
    wanted, other = begin_coded()
    params = weights(CODED)
    optimizer = make("LAMB", params, engine="auto", state_dtype="int8")
    params[1].data = params[1].data.to(memory_format=torch.channels_last)
    train(optimizer, params, 2)
    for key in ("exp_avg", "exp_avg_scale", "exp_avg_sq"):
        assert torch.equal(optimizer.state[params[1]][key], other.state[wanted[1]][key])


def test_options_that_change_convert_state_once_and_tell_it_once() -> None:
    params, optimizer = begin_coded()
    assert optimizer.state[params[0]]["exp_avg_sq"].dtype == torch.uint8
    optimizer.param_groups[0].update(state_dtype=None, momentum_dtype="int8")
    with pytest.warns(ResumeWarning, match="no longer exp_avg_sq_scale") as told:
        train(optimizer, params, 1, first=2)
    assert len(told) == 1
    dtypes = {key: str(entry.dtype)[6:] for key, entry in optimizer.state[params[0]].items() if key != "step"}
    assert dtypes == {"exp_avg": "int8", "exp_avg_scale": "float32", "exp_avg_sq": "float32"}
    train(optimizer, params, 1, first=3)


def test_explain_says_what_cannot_be_grouped() -> None:
    """Its bytes are those allocated: test_torch_conveniences.py."""
    params = zip(("grouped", "odd"), weights([(64, 128), (100, 125)]), strict=True)
    (warning,) = thalweg.torch.LAMB(params, state_dtype="int8").explain().warnings
    assert "stays in float32" in warning
    assert "odd" in warning
