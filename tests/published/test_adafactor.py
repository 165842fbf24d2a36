"""Adafactor equals optax, torch, transformers and timm under the settings that the docs name."""

from __future__ import annotations

import numpy as np
import pytest
from lanes import one_in
from published_runs import SHAPES, error, optax_peer, ours, peer, problem, torch_peer
from tolerances import FLOAT64, OPTAX_ADAFACTOR

from thalweg.numpy import Adafactor

pytestmark = pytest.mark.slow

EPS64 = float(np.finfo(np.float64).eps)

OPTAX = [
    pytest.param(dict(lr=0.01), dict(learning_rate=0.01), id="defaults"),
    pytest.param(dict(lr=None), dict(learning_rate=None), id="lr=None is a step of 1"),
    pytest.param(dict(lr=lambda t: 0.1 / t), dict(learning_rate=lambda count: 0.1 / (count + 1)), id="schedule"),
    pytest.param(
        dict(lr=0.01, min_dim_size_to_factor=16), dict(learning_rate=0.01, min_dim_size_to_factor=16), id="factored"
    ),
    pytest.param(
        dict(lr=0.01, min_dim_size_to_factor=1),
        dict(learning_rate=0.01, min_dim_size_to_factor=1),
        id="factored whatever the size",
    ),
    pytest.param(dict(lr=0.01, factored=False), dict(learning_rate=0.01, factored=False), id="not factored"),
    pytest.param(dict(lr=0.01, beta2_decay=0.6), dict(learning_rate=0.01, decay_rate=0.6), id="decay_rate"),
    pytest.param(
        dict(lr=0.01, scale_parameter=False),
        dict(learning_rate=0.01, multiply_by_parameter_scale=False),
        id="absolute steps",
    ),
    pytest.param(dict(lr=0.01, clip_threshold=2.0), dict(learning_rate=0.01, clipping_threshold=2.0), id="clip 2"),
    pytest.param(dict(lr=0.01, clip_threshold=None), dict(learning_rate=0.01, clipping_threshold=None), id="no clip"),
    pytest.param(
        dict(lr=0.01, momentum=0.9), dict(learning_rate=0.01, momentum=0.9, dtype_momentum="float64"), id="momentum"
    ),
    pytest.param(dict(lr=0.01, weight_decay=0.01), dict(learning_rate=0.01, weight_decay_rate=0.01), id="weight decay"),
    pytest.param(
        dict(lr=0.01, weight_decay=lambda t: 0.1 / t),
        dict(learning_rate=0.01, weight_decay_rate=lambda count: 0.1 / (count + 1)),
        id="weight decay schedule",
    ),
    pytest.param(
        dict(lr=0.01, weight_decay=0.01, overrides=[("p3", dict(weight_decay=0.0))]),
        dict(learning_rate=0.01, weight_decay_rate=0.01, weight_decay_mask=[True, True, True, False, True]),
        id="weight decay mask",
    ),
    pytest.param(dict(lr=0.01, eps=(1e-4, 1e-3)), dict(learning_rate=0.01, eps=1e-4), id="eps"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("options", "published"), one_in(4, OPTAX))
def test_equals_optax(options: dict, published: dict) -> None:
    optax = peer("optax")
    params, grads = problem()
    theirs = optax_peer(optax.adafactor(**published), params, grads)
    assert error(ours(Adafactor(variant="optax", **options), params, grads), theirs, params) < OPTAX_ADAFACTOR


TORCH = [
    pytest.param({}, {}, id="defaults"),
    pytest.param(dict(lr=0.3), dict(lr=0.3), id="lr as the cap of the relative step"),
    pytest.param(dict(beta2_decay=-0.5), dict(beta2_decay=-0.5), id="beta2_decay"),
    pytest.param(dict(weight_decay=0.1), dict(weight_decay=0.1), id="weight decay"),
    pytest.param(dict(clip_threshold=2.5), dict(d=2.5), id="d"),
    pytest.param(dict(eps=(1e-2, 0.5)), dict(eps=(1e-2, 0.5)), id="eps"),
    pytest.param(dict(maximize=True), dict(maximize=True), id="maximize"),
]


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize(("options", "published"), TORCH)
def test_equals_torch(options: dict, published: dict, foreach: bool) -> None:
    torch = peer("torch")
    params, grads = problem()
    theirs = torch_peer(lambda p: torch.optim.Adafactor(p, foreach=foreach, **published), params, grads)
    options = {"eps": (EPS64, 1e-3), **options}  # torch takes the eps of the first parameter's dtype
    assert error(ours(Adafactor(variant="torch", **options), params, grads), theirs, params) < FLOAT64


TRANSFORMERS = [
    pytest.param({}, {}, id="relative step"),
    pytest.param(dict(warmup_init=True), dict(warmup_init=True), id="warmup_init"),
    pytest.param(dict(lr=0.01), dict(lr=0.01, relative_step=False), id="manual"),
    pytest.param(
        dict(lr=0.01, scale_parameter=False),
        dict(lr=0.01, relative_step=False, scale_parameter=False),
        id="manual, absolute",
    ),
    pytest.param(dict(momentum=0.9), dict(beta1=0.9), id="beta1"),
    pytest.param(dict(weight_decay=0.1), dict(weight_decay=0.1), id="weight decay"),
    pytest.param(
        dict(clip_threshold=0.7, beta2_decay=-0.6, eps=(1e-8, 0.1)),
        dict(clip_threshold=0.7, decay_rate=-0.6, eps=(1e-8, 0.1)),
        id="numbers",
    ),
]


@pytest.mark.parametrize(("options", "published"), TRANSFORMERS)
def test_equals_transformers(options: dict, published: dict) -> None:
    transformers = peer("transformers.optimization")
    params, grads = problem()
    theirs = torch_peer(lambda p: transformers.Adafactor(p, **published), params, grads)
    assert error(ours(Adafactor(variant="hf", **options), params, grads), theirs, params) < FLOAT64


TIMM = [
    pytest.param({}, {}, id="relative step"),
    pytest.param(dict(lr=0.01), dict(lr=0.01), id="manual"),
    pytest.param(dict(lr=0.01, momentum=0.9), dict(lr=0.01, betas=(0.9, 0.999)), id="momentum"),
    pytest.param(dict(lr=0.01, weight_decay=0.1), dict(lr=0.01, weight_decay=0.1), id="weight decay"),
    pytest.param(dict(warmup_init=True), dict(warmup_init=True), id="warmup_init"),
]


@pytest.mark.parametrize(("options", "published"), TIMM)
def test_equals_timm(options: dict, published: dict) -> None:
    """timm factors sizes above 16, and scales by RMS(p) only beside the relative step."""
    timm = peer("timm.optim.adafactor")
    params, grads = problem()
    theirs = torch_peer(lambda p: timm.Adafactor(p, **published), params, grads)
    optimizer = Adafactor(min_dim_size_to_factor=17, scale_parameter="relative", **options)
    assert error(ours(optimizer, params, grads), theirs, params) < FLOAT64


def test_equals_big_vision_made_of_optax_parts() -> None:
    """big_vision's Adafactor as a chain of optax parts: capped decay, average before lr, bare decay."""
    optax = peer("optax")
    params, grads = problem()

    def capped(count: object, exponent: object) -> object:
        import jax.numpy as jnp

        return jnp.minimum(0.999, 1.0 - jnp.asarray(count + 1, jnp.float32) ** -exponent)

    theirs = optax_peer(
        optax.chain(
            optax.scale_by_factored_rms(min_dim_size_to_factor=20, decay_rate_fn=capped),
            optax.ema(0.9, debias=False, accumulator_dtype="float64"),
            optax.scale_by_learning_rate(0.01),
            optax.add_decayed_weights(-1e-3),
        ),
        params,
        grads,
    )
    optimizer = Adafactor(
        lr=0.01, variant="big_vision", min_dim_size_to_factor=20, momentum_dtype="float64", weight_decay=1e-3
    )
    assert error(ours(optimizer, params, grads), theirs, params) < OPTAX_ADAFACTOR


def test_the_variant_paper_factors_matrices_only() -> None:
    _, grads = problem()
    optimizer = Adafactor(variant="paper")
    params = {str(shape): np.ones(shape) for shape in SHAPES}
    optimizer.step(params, dict(zip(params, grads[0], strict=True)))
    factored = {name for name, entries in optimizer.state.items() if "row_var" in entries}
    assert factored == {"(24, 40)", "(40, 24)", "(1, 30)"}


class TestIntendedDifferences:
    """Each is a defect of the peer that we do not share."""

    def test_optax_is_nan_with_a_decay_offset_on_fresh_state(self) -> None:
        optax = peer("optax")
        params, grads = problem(steps=3)
        assert np.isnan(optax_peer(optax.adafactor(0.01, decay_offset=10), params, grads)[0]).all()
        mine = ours(Adafactor(lr=0.01, variant="optax", decay_offset=10), params, grads)
        # until the offset is passed, every step replaces the squares, as the first one does
        without = ours(Adafactor(lr=0.01, variant="optax", beta2_cap=0.0), params, grads)
        assert error(mine, without, params) < FLOAT64

    def test_optax_is_nan_for_a_zero_gradient_in_float16(self) -> None:
        optax = peer("optax")
        zero, ones = np.zeros((3,), np.float16), np.ones((3,), np.float16)
        assert np.isnan(optax_peer(optax.adafactor(0.01), [ones], [[zero]])[0]).all()
        assert (ours(Adafactor(lr=0.01, variant="optax"), [ones], [[zero]])[0] == ones).all()

    def test_torch_takes_eps_from_the_dtype_so_that_bfloat16_hardly_moves(self) -> None:
        torch = peer("torch")
        ml_dtypes = pytest.importorskip("ml_dtypes")
        start, gradient = np.ones((8, 8), np.float32), np.full((8, 8), 1e-5, np.float32)
        p = torch.nn.Parameter(torch.tensor(start).bfloat16())
        theirs = torch.optim.Adafactor([p], lr=1.0)
        mine, optimizer = start.astype(ml_dtypes.bfloat16), Adafactor(lr=1.0, variant="torch")
        p.grad = torch.tensor(gradient).bfloat16()
        theirs.step()
        optimizer.update("p", mine, gradient)
        moved, should = 1 - p.detach().float().numpy()[0, 0], 1 - mine.astype(np.float32)[0, 0]
        assert moved < 0.01
        assert should > 0.9

    def test_torch_fails_on_an_empty_tensor(self) -> None:
        torch = peer("torch")
        with pytest.raises(ZeroDivisionError):
            torch_peer(lambda p: torch.optim.Adafactor(p), [np.zeros((0, 3))], [[np.zeros((0, 3))]])
        assert ours(Adafactor(variant="torch"), [np.zeros((0, 3))], [[np.zeros((0, 3))]])[0].shape == (0, 3)

    def test_timm_ignores_scale_parameter_beside_a_manual_lr(self) -> None:
        timm = peer("timm.optim.adafactor")
        params, grads = problem()
        theirs = torch_peer(lambda p: timm.Adafactor(p, lr=0.01, scale_parameter=True), params, grads)
        scaled = ours(Adafactor(lr=0.01, min_dim_size_to_factor=17, scale_parameter=True), params, grads)
        assert error(scaled, theirs, params) > 1e-3
