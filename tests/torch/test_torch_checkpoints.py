"""State is saved and comes back to the last bit, in its own dtype; what does not fit is refused whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from cases import CASES, Case

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg.check.problem import assert_same, train, weights  # noqa: E402
from thalweg.check.state import through_a_file  # noqa: E402
from thalweg.errors import OptimError  # noqa: E402

ENGINES = pytest.mark.parametrize("engine", ["reference", "foreach"])
SHAPES = [(6, 4), (6, 4), (5,), (3, 4, 2), ()]


def make(case: Case, params: Any, engine: str = "reference", **options: Any) -> Any:
    kept = {"momentum": 0.9} if case.name == "SGD" else {}  # without it SGD has no state
    return getattr(thalweg.torch, case.name)(params, **{"lr": case.lr, "engine": engine, **kept, **options})


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def snapshot(params: list[Any], optimizer: Any) -> Any:
    return copy.deepcopy(([p.detach() for p in params], optimizer.state_dict()))


def resumed(case: Case, engine: str, dtype: Any = None, **options: Any) -> Any:
    """Train 3 + 3 steps through a file, and 6 at once; both must end in the same bits."""
    whole = weights(SHAPES, dtype or torch.float32)
    at_once = make(case, whole, engine, **options)
    middle = train(at_once, whole, 3)
    saved = through_a_file(at_once.state_dict(), weights_only=True)
    train(at_once, whole, 3, first=3)
    halves = [torch.nn.Parameter(p.clone()) for p in middle]
    again = make(case, halves, engine, **options)
    again.load_state_dict(saved)
    train(again, halves, 3, first=3)
    assert_same(snapshot(halves, again), snapshot(whole, at_once), "resumed")
    assert not torch.equal(whole[0], middle[0])
    return again


#: Options by which state is kept otherwise, and dtypes of some of it. With others: tests/check/test_ours.py.
KEPT: list[tuple[str, dict[str, Any], Any, dict[str, Any]]] = [
    ("LARS", dict(momentum_dtype="bfloat16"), None, {"momentum_buffer": torch.bfloat16}),
    ("LAMB", dict(momentum_dtype="float16"), None, {"exp_avg": torch.float16, "exp_avg_sq": torch.float32}),
    ("LAMB", dict(state_dtype="float64"), None, {"exp_avg": torch.float64, "exp_avg_sq": torch.float64}),
    ("Adafactor", dict(momentum=0.9, momentum_dtype="bfloat16"), None, {"exp_avg": torch.bfloat16}),
    ("Kron", dict(precond_dtype="bfloat16"), None, {"Q_0": torch.bfloat16, "momentum_buffer": torch.float32}),
    ("AdamW", dict(rounding="stochastic", max_grad_norm=3.0), torch.float16, {"exp_avg": torch.float32}),
    ("SOAP", dict(on_nonfinite="skip"), torch.float64, {"exp_avg": torch.float64}),
    ("LAMB", dict(state_dtype="int8", rounding="compensated"), torch.bfloat16, {"rounding_error": torch.int8}),
]


@ENGINES
@pytest.mark.parametrize(("name", "options", "dtype", "expected"), KEPT, ids=lambda x: x if isinstance(x, str) else "")
def test_chosen_dtypes_survive(name: str, options: dict, dtype: Any, expected: dict, engine: str) -> None:
    again = resumed(case_of(name), engine, dtype, **options)
    for state in again.state.values():
        assert {key: state[key].dtype for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adafactor", dict(momentum=0.9)),
        ("Adafactor", dict(min_dim_size_to_factor=2)),
        ("LARS", dict(momentum=0.0)),
        ("Kron", dict(max_skew=None)),
    ],
    ids=str,
)
def test_options_that_shape_the_state_come_with_it(name: str, options: dict) -> None:
    """As in torch, where SGD without momentum loads the state of SGD with momentum."""
    case = case_of(name)
    params, others = weights(SHAPES), weights(SHAPES)
    optimizer, other = make(case, params, **options), make(case, others)
    train(optimizer, params, 3)
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    other.load_state_dict(through_a_file(optimizer.state_dict(), weights_only=True))
    train(optimizer, params, 2, first=3)
    train(other, others, 2, first=3)
    assert_same(snapshot(others, other), snapshot(params, optimizer), "with the options of the saved state")


def of_another(case: Case) -> Case:
    return CASES[(CASES.index(case) + 1) % len(CASES)]


def saved_by(case: Case, shapes: Any = SHAPES, **options: Any) -> dict:
    params = weights(shapes)
    optimizer = make(case, params, **options)
    train(optimizer, params, 2)
    return optimizer.state_dict()


def with_option(case: Case, **options: Any) -> dict:
    saved = copy.deepcopy(saved_by(case))
    saved["param_groups"][0].update(options)
    return saved


def with_entries(case: Case, change: Callable[[dict[str, Any]], Any]) -> dict:
    saved = copy.deepcopy(saved_by(case))
    change(saved["state"][0])
    return saved


def round_entries(state: dict[str, Any]) -> None:
    state.update({key: entry.bfloat16() for key, entry in state.items() if key != "step"})


def stepped_adam() -> dict:
    params = weights(SHAPES)
    optimizer = torch.optim.Adam(params)
    train(optimizer, params, 2)
    return optimizer.state_dict()


MISFITS: dict[str, tuple[Callable[[Case], Any], str]] = {
    "another optimizer": (lambda case: saved_by(of_another(case)), "state of .* cannot be loaded into"),
    "other shapes": (lambda case: saved_by(case, [(5, 4), (6, 4), (5,), (3, 4, 2), ()]), "'0' does not fit"),
    "fewer parameters": (
        lambda case: saved_by(case, SHAPES[:3]),
        r"groups of sizes \[3\], and this optimizer of sizes \[5\]",
    ),
    "more parameters": (
        lambda case: saved_by(case, [*SHAPES, (2,)]),
        r"groups of sizes \[6\], and this optimizer of sizes \[5\]",
    ),
    "a newer layout": (lambda case: with_option(case, layout=999), "layout 999"),
    "an impossible option": (lambda case: with_option(case, weight_decay=-1.0), "weight_decay"),
    "an option that is gone": (
        lambda case: with_option(case, accumulate=4),
        "saved with accumulate=4, which is gone since .*: divide the loss by n",
    ),
    "an impossible rate": (lambda case: with_option(case, lr=-1.0), "lr"),
    "an impossible dtype": (lambda case: with_option(case, state_dtype="uint8"), "state_dtype"),
    **{f"{no!r}": (lambda case, no=no: no, "this is not a state_dict") for no in (None, 3, [], "state.pt")},  # type: ignore[misc]
    "no step": (
        lambda case: with_entries(case, lambda state: state.pop("step")),
        r"state\['step'\] of '0' must be a whole number",
    ),
    "entries that a loader has rounded": (
        lambda case: with_entries(case, round_entries),
        "state of '0' does not fit: .* in torch.float32, and read into torch.bfloat16; .*saved options",
    ),
    "Adam": (lambda case: stepped_adam(), "not a state of thalweg.torch"),
    "no state dict": (lambda case: {"model": 1}, "not a state_dict"),
    "SGD before its first step": (
        lambda case: torch.optim.SGD(weights(SHAPES), lr=0.5).state_dict(),
        "not a state of thalweg.torch",
    ),
}


@pytest.mark.parametrize("name", ["LAMB", "SOAP"])
@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused_and_changes_nothing(name: str, misfit: str) -> None:
    case = case_of(name)
    make_saved, told = MISFITS[misfit]
    saved = make_saved(case)
    params = weights(SHAPES)
    optimizer = make(case, params, weight_decay=0.125)
    train(optimizer, params, 2)
    before = snapshot(params, optimizer)
    with pytest.raises(OptimError, match=told):
        optimizer.load_state_dict(saved)
    assert_same(snapshot(params, optimizer), before, "after a state that was refused")
    train(optimizer, params, 1, first=2)


def test_a_state_without_an_option_that_came_later() -> None:
    """A state of an older version lacks the newest options: they keep the values they have."""
    saved = copy.deepcopy(saved_by(CASES[0]))
    saved["param_groups"][0].pop("maximize")
    params = weights(SHAPES)
    optimizer = make(CASES[0], params)
    optimizer.load_state_dict(saved)
    train(optimizer, params, 1, first=2)
    assert optimizer.param_groups[0]["maximize"] is False


@ENGINES
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("LARS", dict(momentum=0.0), dict(momentum=0.9)), ("Adafactor", {}, dict(momentum=0.9)),
     ("Kron", {}, dict(max_skew=None)), ("Adafactor", {}, dict(min_dim_size_to_factor=2))],
    ids=str,
)  # fmt: skip
def test_an_option_that_no_longer_fits_the_state(name: str, before: dict, after: dict, engine: str) -> None:
    """Said by name, before anything is stepped; numpy says it in the same way."""
    case = case_of(name)
    params = weights(SHAPES)
    optimizer = make(case, params, engine, **before)
    train(optimizer, params, 2)
    kept = snapshot(params, optimizer)
    optimizer.param_groups[0].update(after)
    with pytest.raises(OptimError, match=r"'0'"):
        train(optimizer, params, 1, first=2)
    assert_same(snapshot(params, optimizer)[0], kept[0], "after a step that was refused")


def test_state_that_is_older_than_its_option_keeps_its_dtype() -> None:
    """Options that are set later are for state that is made later: saving and loading rounds nothing."""
    params, others = weights(SHAPES), weights(SHAPES)
    optimizer, other = (thalweg.torch.AdamW(each, lr=0.1) for each in (params, others))
    train(optimizer, params, 2)
    optimizer.param_groups[0]["state_dtype"] = "bfloat16"
    before = copy.deepcopy(optimizer.state_dict()["state"])
    other.load_state_dict(through_a_file(optimizer.state_dict(), weights_only=True))
    assert_same(other.state_dict()["state"], before, "loaded")
    assert before[0]["exp_avg"].dtype == torch.float32
