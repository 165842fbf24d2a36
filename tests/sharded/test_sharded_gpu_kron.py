"""Kron's kernels for GPUs on tensors that are divided over ranks: their owners have the numbers of one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from lanes import one_in
from world import world
from world_kernels import by_owners
from world_messages import EACH, messages
from world_steps import TYPICAL, Run, stepped_errors

pytestmark = pytest.mark.slow

#: A vector, a matrix with two dense factors and one with a dense and a diagonal one: every program is interpreted.
NAMES = ("vector", "matrix", "even")


def run_of(names: tuple[str, ...] = NAMES, dtype: str = "float32", engine: str = "fused", **how: Any) -> Run:
    """Factors are refreshed in the second step of three."""
    options = dict(TYPICAL["Kron"], precond_update_probability=0.5, **how.pop("options", {}))
    given: dict[str, Any] = dict(rates=(1.0, 1.0, 0.5), interpreted=True, **how)
    return Run("Kron", dtype, options, engine, names=names, **given)


def check(run: Run, layout: str = "first axis", size: int = 2, **how: Any) -> None:
    """That no rank finds a difference to one process, and that kernels whitened every tensor."""
    answers = world(size).run(by_owners, run, layout, **how)
    assert [differences for differences, _, _ in answers] == [[]] * size
    assert {name for _, batches, _ in answers for batch in batches for name in batch} == set(run.names)
    assert {engine for _, _, engine in answers} == {"fused"}


@pytest.mark.parametrize(("size", "layout"), one_in(3, [(2, "first axis"), (2, "last axis"), (4, "two axes")]))
def test_layouts_give_the_numbers_of_one_process(size: int, layout: str) -> None:
    check(run_of(engine="auto"), layout, size)


@pytest.mark.parametrize(("size", "layout"), one_in(2, [(2, "plain"), (4, "copies of shards")]))
def test_replicas_that_divide_the_work(size: int, layout: str) -> None:
    check(run_of(engine="auto", replicated=True, options=dict(divide_work=True)), layout, size)


@pytest.mark.parametrize(
    ("names", "options"),
    one_in(
        4,
        [
            (("matrix",), dict(momentum_mode="ema", max_size_dense=6)),
            (("matrix",), dict(momentum_mode="ema", whiten="momentum", clip_mode="rms", seed=3)),
            (("even",), dict(stacked_axes=1, init_scale=None)),
            (("even",), dict(geometry="quad", maximize=True, max_grad_norm=0.5, weight_decay_mode="decoupled")),
        ],
    ),
)
def test_options(names: tuple[str, ...], options: Mapping[str, Any]) -> None:
    check(run_of(names, options=options))


def test_a_step_that_may_not_be_taken() -> None:
    """Nothing of it is left with the owner: the next one refreshes, and finds the factors of everyone."""
    check(
        run_of(
            ("vector", "matrix"), options=dict(on_nonfinite="skip", init_scale=1.0), spoilt=((1, "matrix", math.nan),)
        )
    )


@pytest.mark.nightly
def test_a_number_that_is_not_finite_is_let_through() -> None:
    check(run_of(("matrix",), options=dict(init_scale=1.0), spoilt=((1, "matrix", math.nan),)))


@pytest.mark.nightly
def test_factors_of_16_bits_take_products_of_16_bits() -> None:
    """So these numbers are not the rule's, but those of the same kernels in one process."""
    run = run_of(("matrix",), "bfloat16", options=dict(precond_dtype="bfloat16"))
    check(run, beside_kernels=True)
    with pytest.raises(AssertionError, match=r"matrix\.L_0 differs"):
        check(run)


def test_state_that_was_loaded() -> None:
    check(run_of(("matrix",)), event="state is loaded")


@pytest.mark.parametrize("engine", one_in(2, ["foreach", "fused"]))
def test_a_step_that_a_scaler_refuses(engine: str) -> None:
    """What was refreshed in it is forgotten, by owners too."""
    run = run_of(("matrix",), engine=engine, overrides=(("matrix", dict(precond_update_probability=1.0)),))
    for differences, _, used in world(2).run(by_owners, run, "first axis", event="a step is refused"):
        assert (differences, used) == ([], engine)


@pytest.mark.nightly
def test_tensors_may_be_due_at_different_steps() -> None:
    """One of them has no gradient at first."""
    check(run_of(("vector", "even"), absent={0: ("even",)}))


def test_other_tensors_of_the_same_step_have_no_kernels() -> None:
    run = run_of(("vector", "matrix"), overrides=(("matrix", dict(geometry="eq")),), engine="auto")
    answers = world(2).run(by_owners, run, "first axis")
    assert [differences for differences, _, _ in answers] == [[]] * 2
    assert [batch for _, batches, _ in answers for batch in batches] == [("vector",)]
    assert {engine for _, _, engine in answers} == {"foreach + fused"}


def test_other_engines_have_no_kernels() -> None:
    for engine in ("foreach", "reference"):
        answers = world(2).run(by_owners, run_of(("matrix",), engine=engine), "first axis")
        assert answers == [([], [], engine)] * 2


def test_who_insists_is_told_why_not() -> None:
    run = run_of(("matrix",), options=dict(geometry="eq"))
    (first, *_), _ = world(2).run(stepped_errors, run, "first axis")
    assert first == (
        "OptionError: engine='fused' cannot run for parameter 'matrix': there is no fused kernel for geometry='eq', "
        "which solves triangular systems; use engine='auto', which takes the fastest engine that can run"
    )


@pytest.mark.nightly
def test_messages_of_a_step() -> None:
    heard = world(2).run(messages, run_of(("vector", "even")), "first axis")
    assert all(own[1:] == [EACH["Kron"]] * 2 for own in heard)
