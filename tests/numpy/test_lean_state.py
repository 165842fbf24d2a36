"""Arrays whose state is kept in eight bits, rounded at random, or beside a record of what rounding has cost."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
from raw_arrays import bfloat16

from thalweg.errors import OptionError, ResumeWarning, StateError
from thalweg.numpy import LAMB, LARS, Adafactor, AdamW, Kron, Optimizer

SHAPES = {"matrix": (64, 128), "filter": (32, 16, 3, 3), "vector": (64,)}


def model(dtype: Any = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


@cache
def gradients(t: int) -> dict[str, Any]:
    """With scales that differ by row and by column, as those of networks do."""
    rng, found = np.random.default_rng(1), {}
    for name, shape in SHAPES.items():
        scale = np.exp(rng.standard_normal(shape[:1])).reshape(-1, *[1] * (len(shape) - 1)) * np.exp(
            rng.standard_normal(shape[1:])
        )
        found[name] = np.random.default_rng([t, len(shape)]).standard_t(5, shape).astype("float32") * scale
    return {name: x.astype("float32") for name, x in found.items()}


def trained(optimizer: Optimizer, steps: int = 10, params: Any = None, first: int = 0) -> dict[str, Any]:
    params = model() if params is None else params
    for t in range(first, first + steps):
        optimizer.step(params, gradients(t))
    return params


def dtypes(optimizer: Optimizer, name: str = "matrix") -> dict[str, str]:
    return {key: entry.dtype.name for key, entry in optimizer.state[name].items() if key != "step"}


WIDE = {"L_0": "float32", "refresh": "float32"}
CODED = {"exp_avg": "int8", "exp_avg_scale": "float32"}
FACTORED: dict[str, Any] = dict(momentum=0.9, min_dim_size_to_factor=32)
#: Options, and the dtype of each entry of the matrix, or of some of them.
STORED: list[tuple[Any, dict[str, Any], dict[str, str]]] = [
    (LAMB, {}, {"exp_avg": "float32", "exp_avg_sq": "float32"}),
    (LAMB, dict(momentum_dtype="float64"), {"exp_avg": "float64", "exp_avg_sq": "float32"}),
    (LAMB, dict(momentum_dtype="float16", state_dtype="float64"), {"exp_avg": "float16", "exp_avg_sq": "float64"}),
    (LAMB, dict(state_dtype="int8"), {**CODED, "exp_avg_sq": "uint8", "exp_avg_sq_scale": "float32"}),
    (AdamW, dict(momentum_dtype="int8", state_dtype="float16"), {**CODED, "exp_avg_sq": "float16"}),
    (Adafactor, dict(FACTORED, state_dtype="int8"), {**CODED, "row_var": "float32", "col_var": "float32"}),
    (Adafactor, dict(FACTORED, state_dtype="float16"), dict.fromkeys(("exp_avg", "row_var", "col_var"), "float16")),
    (Kron, dict(state_dtype="int8"), {**WIDE, "Q_0": "float32", "Q_1": "float32", "momentum_buffer": "int8"}),
    (Kron, dict(state_dtype="float16"), {**WIDE, "Q_0": "float16", "momentum_buffer": "float16"}),
    (Kron, dict(momentum_dtype="float16"), {**WIDE, "Q_0": "float32", "momentum_buffer": "float16"}),
    (Kron, dict(precond_dtype="float16", state_dtype="float64"), {**WIDE, "Q_0": "float16"}),
]


@pytest.mark.parametrize(("make", "options", "stored"), STORED, ids=str)
def test_the_role_of_an_entry_decides_where_it_is_stored(make: Any, options: Any, stored: dict[str, str]) -> None:
    optimizer = make(0.01, **options)
    trained(optimizer, 1)
    found = dtypes(optimizer)
    assert {key: found[key] for key in (stored if make is Kron else found)} == stored


def test_groups_lie_within_filters_and_small_parameters_have_none() -> None:
    optimizer = LAMB(0.01, state_dtype="int8")
    trained(optimizer, 1)
    assert dtypes(optimizer, "filter") == dtypes(optimizer)
    assert dtypes(optimizer, "vector") == {"exp_avg": "float32", "exp_avg_sq": "float32"}
    assert optimizer.state["filter"]["exp_avg_scale"].shape == (32, 9 * 16 // 16)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Kron, dict(precond_dtype="int8"), r"precond_dtype='int8': factors .* use 'bfloat16'"),
        (LAMB, dict(overrides=[("w", dict(state_dtype="fp8"))]), r"entry 'w': state_dtype must be one of"),
        (Adafactor, dict(momentum_dtype="int8"), r"momentum_dtype='int8' has no effect here: it needs a momentum"),
    ],
)
def test_codes_that_there_are_not_and_for_what_cannot_have_them_are_refused(
    make: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        make(0.01, **options)


@pytest.mark.parametrize(("make", "most"), [(LAMB, 0.06), (AdamW, 0.06), (LARS, 0.02), (Kron, 0.05)])
def test_training_follows_that_with_float32_state(make: Any, most: float) -> None:
    start, wanted = model(), trained(make(0.01, engine="reference"))
    for options in ({"state_dtype": "int8"}, {"state_dtype": "int8", "state_rounding": "stochastic"}):
        found = trained(make(0.01, engine="reference", **options))
        for name in ("matrix", "filter"):
            moved = np.linalg.norm(wanted[name] - start[name])
            assert 0 < np.linalg.norm(found[name] - wanted[name]) < most * moved
        assert np.array_equal(found["vector"], wanted["vector"])


def test_trust_ratios_come_from_what_was_not_rounded() -> None:
    """In the first step nothing has been rounded yet that the ratio depends on."""
    lean, plain = (LAMB(0.01, state_dtype=dtype, engine="reference") for dtype in ("int8", None))
    assert all(np.array_equal(x, y) for x, y in zip(trained(lean, 1).values(), trained(plain, 1).values(), strict=True))
    assert lean.stats() == plain.stats()


def test_state_is_converted_once_to_what_the_options_keep_and_that_is_told_once() -> None:
    lean, plain, half = (LAMB(0.01, state_dtype=dtype) for dtype in ("int8", None, "float16"))
    params = trained(lean, 3)
    plain.load_state_dict(lean.state_dict())
    with pytest.warns(ResumeWarning, match="exp_avg_scale, exp_avg_sq_scale") as told:
        trained(plain, 1, copy.deepcopy(params), 3)
    assert len(told) == 1
    assert dtypes(plain) == {"exp_avg": "float32", "exp_avg_sq": "float32"}
    trained(plain, 1, copy.deepcopy(params), 4)
    lean.load_state_dict(plain.state_dict())  # also into one that has been stepped
    with pytest.warns(ResumeWarning):
        trained(lean, 1, params, 5)
    assert dtypes(lean)["exp_avg"] == "int8"
    half.load_state_dict(lean.state_dict())
    with pytest.warns(ResumeWarning):
        trained(half, 1, params, 6)
    assert dtypes(half)["exp_avg"] == "float16"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.pop("exp_avg_scale"), "there is no 'exp_avg_scale'"),
        (lambda s: s.update(exp_avg_scale=s["exp_avg_scale"] * np.float32(np.nan)), "must be finite and not negative"),
        (lambda s: s.update(exp_avg_sq_scale=-s["exp_avg_sq_scale"]), "must be finite and not negative"),
        (lambda s: s.update(exp_avg_scale=s["exp_avg_scale"][:-1]), "must be float32 with a number for each group"),
        (lambda s: s.update(exp_avg_scale=s["exp_avg_scale"].astype("float64")), "it is float64"),
        (lambda s: s["exp_avg_sq_scale"].__setitem__((3, 0), 0), "'exp_avg_sq_scale' has a 0 for codes"),
        (lambda s: s.update(exp_avg=s["exp_avg"].astype("int16")), "must be arrays of floating point: 'exp_avg'"),
    ],
)
def test_damaged_scales_are_refused_and_nothing_is_loaded(damage: Any, message: str) -> None:
    optimizer = LAMB(0.01, state_dtype="int8")
    trained(optimizer, 2)
    before, saved = optimizer.state_dict(), optimizer.state_dict()
    damage(saved["state"]["matrix"])
    with pytest.raises(StateError, match=message):
        optimizer.load_state_dict(saved)
    for name, entries in before["state"].items():
        assert all(np.array_equal(entry, optimizer.state[name][key]) for key, entry in entries.items())


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (dict(exp_avg_scale=np.ones((64, 4), "float32")), "'matrix' does not fit"),
        (dict(exp_avg=np.ones((64, 128), "float32")), "'matrix' does not fit"),
        (dict(exp_avg_sq=np.ones((64, 128), "int8")), "'exp_avg_sq' is int8, and must be uint8"),
        (dict(rounding_error=np.ones((64, 128), "float32")), "'rounding_error' is float32, and must be int8"),
    ],
)
def test_what_does_not_fit_its_parameter_is_refused_when_that_is_known(entries: Any, message: str) -> None:
    """Scales of other groups, scales without codes, codes of another kind, a record that is none."""
    optimizer = LAMB(0.01, state_dtype="int8")
    params = trained(optimizer, 2)
    saved = optimizer.state_dict()
    saved["state"]["matrix"].update(entries)
    other, before = LAMB(0.01, state_dtype="int8"), copy.deepcopy(params)
    other.load_state_dict(saved)
    with pytest.raises(StateError, match=message):
        trained(other, 1, params)
    assert all(np.array_equal(params[name], before[name]) for name in params)


def test_factors_in_codes_are_refused() -> None:
    params, optimizer = {"w": np.ones((64, 64), "float32")}, Kron(0.01)
    optimizer.step(params, {"w": np.ones((64, 64), "float32")})
    saved = optimizer.state_dict()
    saved["state"]["w"].update(Q_0=np.ones((64, 64), "int8"), Q_0_scale=np.ones((64, 1), "float32"))
    with pytest.raises(StateError, match="'Q_0' is int8, and must be floating point"):
        optimizer.load_state_dict(saved)


def test_a_second_moment_of_16_bits_moves_only_if_it_is_rounded_at_random() -> None:
    """A change of 0.1 percent is below half the distance between neighbours."""
    found = {}
    for rounding in ("nearest", "stochastic"):
        optimizer = AdamW(0.0, state_dtype="float16", state_rounding=rounding, weight_decay=0.0)
        weights = np.ones((64, 64), "float32")
        optimizer.update("w", weights, np.full((64, 64), 1.0, "float32"))
        for _ in range(100):
            optimizer.update("w", weights, np.full((64, 64), 0.5, "float32"))
        found[rounding] = optimizer.state["w"]["exp_avg_sq"].astype("float64").mean()
    exact = 0.999**100 * 0.001 + (1 - 0.999**100) * 0.25
    assert abs(found["stochastic"] / exact - 1) < 1e-3 < abs(found["nearest"] / exact - 1)


def test_weights_of_16_bits_with_a_record_follow_those_of_32() -> None:
    start = {name: x.astype(bfloat16()).astype("float32") for name, x in model().items()}
    narrow = {name: {n: x.astype(bfloat16()) for n, x in start.items()} for name in ("nearest", "compensated")}
    wide = copy.deepcopy(start)
    plain = AdamW(1e-4)
    made = {rounding: AdamW(1e-4, rounding=rounding) for rounding in narrow}
    for t in range(60):
        plain.step(wide, gradients(t))
        for rounding, optimizer in made.items():
            optimizer.step(narrow[rounding], gradients(t))
    record = made["compensated"].state["matrix"]["rounding_error"]
    assert record.dtype == np.int8
    assert record.shape == (64, 128)
    off = {}
    for rounding, params in narrow.items():
        x = params["matrix"].astype("float32")
        if rounding == "compensated":
            unit = np.exp2(np.frexp(x)[1] - 16.0)
            x = x + record * unit
        off[rounding] = np.linalg.norm(x - wide["matrix"]) / np.linalg.norm(wide["matrix"] - start["matrix"])
    assert off["compensated"] < 0.1 < 0.3 < off["nearest"]
