"""SOAP is Adam in the eigenbases of averages of G G^T and G^T G, as published."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tolerances import FLOAT32, FLOAT64

import thalweg.numpy
from thalweg.rules import SOAP, Kron
from thalweg.spaces import numpy as xp

LR, STEPS = 0.01, 36
#: Whose first gradients have products of full rank: of others, published code takes whatever eigenvectors it is given.
SHAPES = [(6, 6), (3, 4, 5)]


def drawn(shape: tuple[int, ...], seed: int = 0) -> tuple[Any, list[Any]]:
    rng = np.random.default_rng(seed)
    scale = np.linspace(0.2, 3.0, shape[-1])  # eigenvalues that differ
    return rng.standard_normal(shape), [rng.standard_normal(shape) * scale for _ in range(STEPS)]


def displacement(p: Any, grads: list[Any], **options: Any) -> Any:
    optimizer, stepped = thalweg.numpy.SOAP(lr=LR, **options), p.copy()
    for g in grads:
        optimizer.update("p", stepped, g)
    return stepped - p


def error(found: Any, wanted: Any) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def in_bases(x: Any, bases: list[Any], *, back: bool = False) -> Any:
    for q in bases:
        x = x if q is None else np.tensordot(x, q, axes=[[0], [1 if back else 0]])
        x = np.moveaxis(x, 0, -1) if q is None else x
    return x


def loop(
    p: Any,
    grads: list[Any],
    *,
    turned: tuple[int, ...],
    betas: tuple[float, float] = (0.95, 0.95),
    shampoo_beta: float = 0.95,
    eps: float = 1e-8,
    decay: float = 0.01,
    every: int = 10,
    corrected: bool = True,
) -> Any:
    """Algorithm 3 of the paper, and the order of its authors' code: bases are of the gradients before."""
    p, start, axes = p.copy(), p, range(p.ndim)
    m, v = np.zeros_like(p), np.zeros_like(p)
    products: list[Any] = [np.zeros((n, n)) if i in turned else None for i, n in enumerate(p.shape)]
    bases: list[Any] = []
    for k, g in enumerate(grads):
        if k:
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * in_bases(g, bases) ** 2
            u = in_bases(in_bases(m, bases) / (np.sqrt(v) + eps), bases, back=True)
            bias = np.sqrt(1 - betas[1] ** k) / (1 - betas[0] ** k) if corrected else 1.0
            p = (p - LR * bias * u) * (1 - LR * decay)
        for i in turned:
            others = [axis for axis in axes if axis != i]
            product = np.tensordot(g, g, axes=[others, others])
            products[i] = shampoo_beta * products[i] + (1 - shampoo_beta) * product
        if not k:
            bases = [None if x is None else np.linalg.eigh(x)[1][:, ::-1] for x in products]
        elif k % every == 0:
            for i in turned:
                order = np.argsort(-np.diag(bases[i].T @ products[i] @ bases[i]))
                v = np.take(v, order, axis=i)
                bases[i] = np.linalg.qr(products[i] @ bases[i][:, order])[0]
    return p - start


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("every", [1, 3, 10])
def test_it_is_the_loop_of_the_paper(shape: tuple[int, ...], every: int) -> None:
    p, grads = drawn(shape)
    wanted = loop(p, grads, turned=tuple(range(len(shape))), every=every)
    assert error(displacement(p, grads, precondition_frequency=every), wanted) < FLOAT64


@pytest.mark.parametrize(
    ("shape", "turned", "options", "theirs"),
    [
        ((7,), (), {}, {}),
        ((6, 4), (1,), dict(one_sided=True), {}),
        (
            (4, 6),
            (0,),
            dict(one_sided=True, shampoo_beta=0.8, betas=(0.9, 0.7)),
            dict(betas=(0.9, 0.7), shampoo_beta=0.8),
        ),
        ((9, 4), (1,), dict(max_precond_dim=8, eps=1e-3), dict(eps=1e-3)),
        ((5, 5), (0, 1), dict(bias_correction=False, weight_decay=0.0), dict(corrected=False, decay=0.0)),
        ((3, 4, 1), (0, 1), dict(merge="squeeze", one_sided=False, max_precond_dim=3), {}),
    ],
    ids=str,
)
def test_options(shape: tuple[int, ...], turned: tuple[int, ...], options: Any, theirs: Any) -> None:
    p, grads = drawn(shape)
    turned = tuple(i for i in turned if shape[i] <= options.get("max_precond_dim", 100))
    assert error(displacement(p, grads, **options), loop(p, grads, turned=turned, **theirs)) < FLOAT64


def test_it_is_the_published_optimizer() -> None:
    """pytorch_optimizer decomposes in float32, and bases differ by so much."""
    torch, peers = pytest.importorskip("torch"), pytest.importorskip("pytorch_optimizer")
    for shape in [*SHAPES, (7,), ()]:
        p, grads = drawn(shape) if shape else (np.float64(1.0), list(np.linspace(-1, 2, STEPS)))
        parameter = torch.nn.Parameter(torch.tensor(p, dtype=torch.float64))
        theirs = peers.SOAP([parameter], lr=LR, precondition_frequency=5, weight_decay=0.1)
        for g in grads:
            parameter.grad = torch.tensor(g, dtype=torch.float64)
            theirs.step()
        found = displacement(np.array(p), grads, precondition_frequency=5, weight_decay=0.1)
        bound = STEPS * p.size * 2.0**-24 if p.ndim > 1 else FLOAT64
        assert error(found, parameter.detach().numpy() - p) < bound, shape


def test_the_first_step_makes_bases_and_nothing_else() -> None:
    p, (g, *_) = drawn((6, 6))
    optimizer, stepped = thalweg.numpy.SOAP(lr=LR, weight_decay=0.5), p.copy()
    optimizer.update("p", stepped, g)
    state = optimizer.state["p"]
    assert (stepped == p).all()
    assert not any(state[key].any() for key in ("exp_avg", "exp_avg_sq"))
    assert np.abs(state["Q_0"].T @ state["Q_0"] - np.eye(6)).max() < FLOAT64
    turned = state["Q_0"].T @ g @ g.T @ state["Q_0"]
    assert np.abs(turned - np.diag(np.diag(turned))).max() < FLOAT64 * turned.max()
    assert (np.diff(np.diag(turned)) < 0).all()


def test_rows_without_a_gradient_keep_their_axes() -> None:
    """tests/engines/test_pinned.py has that no library chooses among eigenvectors of equal eigenvalues."""
    optimizer, g = thalweg.numpy.SOAP(lr=LR), np.zeros((8, 3), "float32")
    g[2:6] = drawn((4, 3))[0]
    optimizer.update("p", np.zeros_like(g), g)
    unused = np.sort(np.abs(optimizer.state["p"]["Q_0"][[0, 1, 6, 7]]), axis=1)
    assert np.abs(unused - np.eye(8)[-1]).max() <= FLOAT64


@pytest.mark.parametrize("every", [2, 6])
def test_directions_that_products_do_not_see_stay(every: int) -> None:
    """Along the longer side of a matrix, few gradients have no products of full rank."""
    p, grads = drawn((2, 9))
    runs = [
        displacement(
            p.astype(dtype), [g.astype("float32").astype(dtype) for g in grads[:12]], precondition_frequency=every
        )
        for dtype in ("float32", "float64")
    ]
    assert error(*runs) < FLOAT32


@pytest.mark.parametrize(("shape", "side"), [((8, 8), 4), ((7, 7), 4), ((4, 4, 4), 3)], ids=str)
def test_each_block_is_a_matrix_of_its_own(shape: tuple[int, ...], side: int) -> None:
    """Of full rank: blocks at the edges have one side that is shorter, and only that one a basis here."""
    p, grads = drawn(shape)
    options: Any = dict(one_sided=True) if len(shape) == 2 else dict(max_precond_dim=None)
    whole = displacement(p, grads, block_size=side, **options)
    along = [[slice(i, min(i + side, n)) for i in range(0, n, side)] for n in shape]
    cut = along if len(shape) > 2 else [along[0], [slice(None)]]
    for block in itertools.product(*cut):
        alone = displacement(p[block], [g[block] for g in grads], **options)
        assert error(whole[block], alone) < FLOAT64


def test_a_vector_has_a_basis_if_it_is_asked_for() -> None:
    p, (g, *_) = drawn((5,))
    optimizer = thalweg.numpy.SOAP(lr=LR, precondition_1d=True)
    optimizer.update("p", p, g)
    assert abs(optimizer.state["p"]["Q_0"][:, 0] @ g) == pytest.approx(np.linalg.norm(g))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_with_its_parameter(bad: float) -> None:
    """Small arrays of equal shape are stepped as one stack."""
    p, grads = drawn((5, 5))
    optimizer = thalweg.numpy.SOAP(lr=LR)
    arrays = {name: p.copy() for name in ("good", "spoilt")}
    for i, g in enumerate(grads):
        optimizer.step(arrays, {"good": g, "spoilt": np.full_like(g, bad) if i == 0 else g})
    assert np.isnan(arrays["spoilt"]).all()
    assert error(arrays["good"] - p, displacement(p, grads)) < FLOAT64


def test_how_parameters_are_treated() -> None:
    assert SOAP().treatment((768, 3072)) == "eigenbases of 768 and 3072"
    assert SOAP(one_sided=True).treatment((768, 3072)) == "eigenbases of 768"
    assert SOAP().treatment((50257, 768)) == "eigenbases of 768"
    assert SOAP().treatment((768,)) == "elementwise"
    assert SOAP(block_size=256).treatment((768, 3072)) == "36 blocks, eigenbases of 256 and 256"


def test_an_embedding_of_which_few_rows_are_used() -> None:
    """In float32, libraries may find no eigenvectors of a matrix that is mostly 0."""
    torch = pytest.importorskip("torch")
    import thalweg.torch

    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(256, 16, generator=generator))
    weight.grad = torch.zeros(256, 16)
    used = torch.randperm(256, generator=generator)[:30]
    weight.grad[used] = 1e-4 * torch.randn(30, 16, generator=generator)
    before, optimizer = weight.detach().clone(), thalweg.torch.SOAP([weight], lr=1e-2)
    for _ in range(3):
        optimizer.step()
    moved = (weight.detach() - before).abs()
    assert bool(torch.isfinite(moved).all())
    assert float(moved[used].mean()) > 1e-3


@pytest.mark.parametrize("block_size", [None, 3])
def test_bases_are_the_same_however_many_are_refreshed_at_a_time(block_size: int | None) -> None:
    rule, shapes = SOAP(block_size=block_size, precondition_frequency=1), [(6, 4), (4, 6), (7,), (6, 6), (2, 3, 4)]
    states: list[Any] = []
    for shape in shapes:
        optimizer, p = thalweg.numpy.SOAP(block_size=block_size, precondition_frequency=4), np.zeros(shape)
        for g in drawn(shape)[1][:3]:
            optimizer.update("p", p, g)
        states.append(optimizer.state["p"])

    def refreshed(which: list[int], most: float) -> dict[tuple[int, str], Any]:
        found = rule.refresh(xp, [states[i] for i in which], [shapes[i] for i in which], most)
        return {(which[i], key): x for i, entries in found for key, x in entries.items()}

    alone: dict[tuple[int, str], Any] = {}
    for i in range(len(shapes)):
        alone |= refreshed([i], np.inf)
    assert {i for i, _ in alone} == {0, 1, 3, 4}, "a vector has no basis"
    for most in (1, 40, np.inf):
        together = refreshed(list(range(len(shapes))), most)
        assert together.keys() == alone.keys()
        for key, x in together.items():
            np.testing.assert_allclose(x, alone[key], rtol=FLOAT64, atol=FLOAT64)


def test_a_subclass_with_another_transform_is_not_refreshed_by_soap() -> None:
    class Other(SOAP):
        def transform(self, *given: Any, **options: Any) -> Any:
            return super().transform(*given, **options)

    class Same(SOAP):
        pass

    assert [kind.refreshes_apart() for kind in (SOAP, Same, Other, Kron)] == [True, True, False, False]
