"""Muon on GPUs: fused kernels before and after its products have the numbers of the rule."""

from __future__ import annotations

from typing import Any

import pytest
from lanes import one_in
from on_device import DEVICE, agree, gradients, parameters, train
from tolerances import BFLOAT16_PRODUCTS

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg.errors import OptionError  # noqa: E402
from thalweg.kernels.chunks import WHOLE_CHUNK  # noqa: E402

pytestmark = pytest.mark.slow  # programs are interpreted

#: Three of one shape, turned ones, and one of more axes.
SHAPES = {"a": (34, 20), "b": (34, 20), "c": (34, 20), "wide": (20, 34), "conv": (5, 4, 3, 2)}
#: Where products are symmetric or have an addend, tiles of both sizes.
LARGE = {"tall": (1536, 768), "wide": (768, 1536), "square": (1024, 1024)}
OPTIONS: dict[str, Any] = dict(weight_decay=0.1, ns_dtype=None)


def make(named: Any, engine: str, **options: Any) -> Any:
    return thalweg.torch.Muon(named, engine=engine, **options)


def both(steps: int, dtype: str = "float32", *, most: int = WHOLE_CHUNK, **options: Any) -> tuple[Any, Any, Any, Any]:
    """most: elements of a stack."""
    ours, theirs = (parameters(dtype, SHAPES) for _ in range(2))
    fused, lists = make(ours, "fused", **options), make(theirs, "reference", **options)
    fused._engines["triton"].room.most = most
    train(fused, ours, gradients(steps, dtype, SHAPES))
    train(lists, theirs, gradients(steps, dtype, SHAPES))
    assert fused.engine == "fused"
    return fused, ours, lists, theirs


@pytest.mark.parametrize(
    "options",
    one_in(
        8,
        [
            dict(ns_method="gram", cautious_decay=True),
            {},
            dict(bias_correction=True, maximize=True),
            dict(momentum_mode="sum", scaling="match_rms_adamw", max_grad_norm=0.5),
            dict(split=2, weight_decay=0.0, nesterov=False),
            dict(
                overrides=[
                    ("[abc]", dict(split=(20, 8, 6))),
                    ("wide", dict(split=(30, 4), split_axis=1, transposed=True)),
                ]
            ),
            dict(stacked_axes=1, vectors="row"),
            dict(normalize="rows"),
        ],
    ),
    ids=str,
)
def test_numbers_are_those_of_the_rule(options: dict[str, Any]) -> None:
    given = {**OPTIONS, **options}
    if options.get("split"):
        given["overrides"] = [("conv", dict(split=1))]
    agree(*both(3, **given))


@pytest.mark.nightly
def test_gradients_are_read_where_they_are() -> None:
    """In steps like the last one, and after one whose gradients begin at odd places."""
    ours, theirs = (parameters("float32", SHAPES) for _ in range(2))
    fused, lists = make(ours, "fused", **OPTIONS), make(theirs, "reference", **OPTIONS)
    steps = gradients(6, "float32", SHAPES)
    steps[3] = {name: torch.cat([g.new_zeros(1), g.reshape(-1)])[1:].view(g.shape) for name, g in steps[3].items()}
    for optimizer, named in ((fused, ours), (lists, theirs)):
        train(optimizer, named, steps)
    agree(fused, ours, lists, theirs)


@pytest.mark.nightly
def test_other_rules_between() -> None:
    shapes = {"a": (12, 9), "bias": (5,), "wide": (9, 12)}
    ours, theirs = (parameters("float32", shapes) for _ in range(2))
    muon, adamw = thalweg.torch.Muon.options(**OPTIONS), thalweg.torch.AdamW.options(lr=0.01)
    entries = [("a", muon), ("bias", adamw), ("*", thalweg.torch.Muon.options(momentum=0.8, **OPTIONS))]
    fused, lists = (
        thalweg.torch.Mixture(named, entries, engine=engine)
        for named, engine in ((ours, "fused"), (theirs, "reference"))
    )
    for optimizer, named in ((fused, ours), (lists, theirs)):
        train(optimizer, named, gradients(5, "float32", shapes))
    agree(fused, ours, lists, theirs)


@pytest.mark.parametrize("method", one_in(2, ["plain", "gram"]))
def test_products_in_bfloat16(method: str) -> None:
    _, ours, _, theirs = both(3, ns_method=method)
    for (_, p), (_, q) in zip(ours, theirs, strict=True):
        assert (p - q).abs().max() < BFLOAT16_PRODUCTS * 3 * 0.02


@pytest.mark.skipif(DEVICE == "cpu", reason="matrices that are large enough for kernels of their own")
@pytest.mark.parametrize("method", ["plain", "auto"])
def test_products_by_kernels(method: str) -> None:
    """As near to exact steps as the library's products in bfloat16 are."""
    shapes = {f"{kind} {i}": shape for kind, shape in LARGE.items() for i in range(8)}
    starts, found = [p.detach().clone() for _, p in parameters("float32", shapes)], {}
    for name, engine, options in (
        ("exact", "reference", dict(ns_dtype=None)),
        ("library", "reference", {}),
        ("kernels", "fused", dict(ns_method=method)),
    ):
        named = parameters("float32", shapes)
        train(make(named, engine, **options), named, gradients(5, "float32", shapes))
        found[name] = [p.detach() for _, p in named]
    for exact, library, kernels, start in zip(*found.values(), starts, strict=True):
        assert (kernels - exact).norm() < 1.1 * (library - exact).norm() + 1e-3 * (exact - start).norm()


@pytest.mark.skipif(DEVICE == "cpu", reason="steps are recorded on GPUs")
def test_recorded_steps_follow_the_precision_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, found = {f"{i}": (1024, 1024) for i in range(8)}, []
    before = torch.get_float32_matmul_precision()
    try:
        for replays, last in (("1", "highest"), ("0", "highest"), ("0", "high")):
            monkeypatch.setenv("THALWEG_REPLAY", replays)
            named, steps = parameters("float32", shapes), gradients(7, "float32", shapes)
            optimizer = make(named, "fused", ns_dtype="float32")
            for precision, given in (("high", steps[:6]), (last, steps[6:])):
                torch.set_float32_matmul_precision(precision)
                train(optimizer, named, given)
            found.append(torch.stack([p.detach() for _, p in named]))
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


@pytest.mark.nightly
def test_lists_that_are_larger_than_one_stack() -> None:
    agree(*both(3, most=2 * 34 * 20, **OPTIONS))


def test_parameters_of_sixteen_bits_are_rounded_by_chance() -> None:
    fused, ours, _, theirs = both(2, "bfloat16", **OPTIONS, rounding="stochastic", seed=3)
    for (name, p), (_, q) in zip(ours, theirs, strict=True):
        assert (p != q).float().mean() < 0.05, name
    assert all(fused.state[p]["momentum_buffer"].dtype == torch.float32 for _, p in ours)


def test_what_is_not_served_goes_as_lists() -> None:
    named = parameters("float32", SHAPES)
    with pytest.raises(OptionError, match="there is no fused kernel of Muon for on_nonfinite='skip'"):
        train(make(named, "fused", on_nonfinite="skip"), named, gradients(1, "float32", SHAPES))
    optimizer = make(named, "auto", on_nonfinite="skip")
    train(optimizer, named, gradients(1, "float32", SHAPES))
    assert optimizer.engine == "foreach + reference"


def test_parameters_that_lie_by_columns_go_as_lists() -> None:
    """Kernels would take them in the order of memory, which is that of another matrix."""
    found = []
    for engine in ("auto", "reference"):
        named = [(name, torch.nn.Parameter(p.detach().t())) for name, p in parameters("float32", {"a": (34, 20)})]
        optimizer = make(named, engine, **OPTIONS)
        named[0][1].grad = torch.arange(680.0).reshape(20, 34).sin().to(named[0][1].device)
        optimizer.step()
        assert optimizer.engine == "reference"
        found.append(named[0][1].detach())
    assert torch.equal(*found)
    with pytest.raises(OptionError, match="is not contiguous in memory"):
        train(make(named, "fused"), named, [{"a": torch.ones_like(named[0][1])}])


def test_the_code_that_is_made_is_shown() -> None:
    shown = str(make(parameters("float32", SHAPES), "auto").explain(code=True))
    assert "read p, g and write p, shown" in shown
    assert "between them: matrix products by library calls" in shown


@pytest.mark.nightly
def test_gradients_elsewhere_and_parameters_that_come_later() -> None:
    """A larger stack that comes later moves the memory that all share."""
    first, second = (parameters("float32", SHAPES) for _ in range(2))
    steps = gradients(4, "float32", SHAPES)
    found = []
    for named, engine in ((first, "fused"), (second, "reference")):
        optimizer = make(named, engine, **OPTIONS)
        for t, step in enumerate(steps):
            for name, p in named:
                p.grad = None if t < 2 and name in ("a", "b", "c") else step[name].clone()
            optimizer.step()
        found.append(optimizer)
    agree(found[0], first, found[1], second)
