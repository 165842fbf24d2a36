"""Where ours differs from what is published, and is meant to; and what variants mean."""

from __future__ import annotations

import numpy as np
import pytest
from published_runs import SHAPES, error, optax_peer, ours, peer, problem, torch_peer
from tolerances import FLOAT64

from thalweg.numpy import LARS, Adafactor

pytestmark = pytest.mark.slow


def test_the_variant_paper_factors_matrices_only() -> None:
    _, grads = problem(steps=1)
    optimizer = Adafactor(variant="paper")
    params = {str(shape): np.ones(shape) for shape in SHAPES}
    optimizer.step(params, dict(zip(params, grads[0], strict=True)))
    factored = {name for name, entries in optimizer.state.items() if "row_var" in entries}
    assert factored == {"(24, 40)", "(40, 24)", "(1, 30)"}


def test_optax_is_nan_with_a_decay_offset_on_fresh_state() -> None:
    optax = peer("optax")
    params, grads = problem(steps=3)
    assert np.isnan(optax_peer(optax.adafactor(0.01, decay_offset=10), params, grads)[0]).all()
    mine = ours(Adafactor(lr=0.01, variant="optax", decay_offset=10), params, grads)
    # until the offset is passed, every step replaces the squares, as the first one does
    without = ours(Adafactor(lr=0.01, variant="optax", beta2_cap=0.0), params, grads)
    assert error(mine, without, params) < FLOAT64


def test_optax_is_nan_for_a_zero_gradient_in_float16() -> None:
    optax = peer("optax")
    zero, ones = np.zeros((3,), np.float16), np.ones((3,), np.float16)
    assert np.isnan(optax_peer(optax.adafactor(0.01), [ones], [[zero]])[0]).all()
    assert (ours(Adafactor(lr=0.01, variant="optax"), [ones], [[zero]])[0] == ones).all()


def test_torch_takes_eps_from_the_dtype_so_that_bfloat16_hardly_moves() -> None:
    torch = peer("torch")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    start, gradient = np.ones((8, 8), np.float32), np.full((8, 8), 1e-5, np.float32)
    p = torch.nn.Parameter(torch.tensor(start).bfloat16())
    theirs = torch.optim.Adafactor([p], lr=1.0)
    mine, optimizer = start.astype(ml_dtypes.bfloat16), Adafactor(lr=1.0, variant="torch")
    p.grad = torch.tensor(gradient).bfloat16()
    theirs.step()
    optimizer.update("p", mine, gradient)
    assert 1 - p.detach().float().numpy()[0, 0] < 0.01
    assert 1 - mine.astype(np.float32)[0, 0] > 0.9


def test_torch_fails_on_an_empty_tensor() -> None:
    torch = peer("torch")
    with pytest.raises(ZeroDivisionError):
        torch_peer(lambda p: torch.optim.Adafactor(p), [np.zeros((0, 3))], [[np.zeros((0, 3))]])
    assert ours(Adafactor(variant="torch"), [np.zeros((0, 3))], [[np.zeros((0, 3))]])[0].shape == (0, 3)


def test_timm_ignores_scale_parameter_beside_a_manual_lr() -> None:
    timm = peer("timm.optim.adafactor")
    params, grads = problem()
    theirs = torch_peer(lambda p: timm.Adafactor(p, lr=0.01, scale_parameter=True), params, grads)
    scaled = ours(Adafactor(lr=0.01, min_dim_size_to_factor=17, scale_parameter=True), params, grads)
    assert error(scaled, theirs, params) > 1e-3


def test_larc_drops_the_decay_of_a_tensor_without_gradient() -> None:
    """Ours decays it at the zero ratio, like any tensor whose ratio is undefined."""
    p = np.ones(4)
    LARS(lr=0.1, variant="larc", weight_decay=0.1).update("p", p, np.zeros(4))
    assert np.allclose(p, 1 - 0.1 * 0.1)


def test_the_two_momenta_differ_under_a_schedule() -> None:
    """lr enters the momentum (paper) or leaves it (torch's SGD): equal only while lr is constant."""
    params, grads = problem()
    inside, outside = (dict(lr=lambda t: 5.0 / t, momentum_mode=mode) for mode in ("lr_inside", "lr_outside"))
    assert error(ours(LARS(**inside), params, grads), ours(LARS(**outside), params, grads), params) > 0.1
    inside["lr"] = outside["lr"] = 5.0
    assert error(ours(LARS(**inside), params, grads), ours(LARS(**outside), params, grads), params) < FLOAT64
