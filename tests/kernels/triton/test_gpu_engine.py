"""The GPU engine in the torch front end: what is given to it between steps, and what it leaves alone.

Its numbers are held in tests/engines, what users rely on in test_gpu_checks.py.
"""

from __future__ import annotations

import copy
import io
import warnings
import weakref
from typing import Any

import pytest
import torch
from day import BY_DAY
from on_device import DEVICE, FEW, agree, agree_in_products, gradients, make, parameters, train
from side_by_side import RATES
from tolerances import TENSOR_CORES

import thalweg.torch
from thalweg.kernels import triton as kernels
from thalweg.torch import LAMB, AdamW, Kron, Mixture

pytestmark = pytest.mark.slow  # programs are interpreted

#: Three matrices of one shape, turned ones, and one of more axes; and such that products of them are kernels' too,
#: symmetric or with an addend, by tiles of both sizes.
LARGE = {"tall": (1536, 768), "wide": (768, 1536), "square": (1024, 1024)}
OF_KRON = {"a": (24, 12), "b": (24, 12), "c": (40,), "d": (50, 8)}
#: So that kernels do what goes element by element, and stacks of tensors the rest.
IN_PARTS: dict[str, Any] = dict(precond_precision="float32", precond_update_probability=0.3)
MIXED = {"vector": (70,), "matrix": (12, 10), "conv": (5, 4, 3)}
every_rule = pytest.mark.parametrize("rule", RATES)
FACTORED: dict[str, Any] = dict(min_dim_size_to_factor=2, momentum=0.9)


def options_of(rule: str) -> dict[str, Any]:
    return FACTORED if rule == "Adafactor" else dict(weight_decay=0.1)


@pytest.mark.parametrize("options", [{}, dict(max_grad_norm=1.0, on_nonfinite="skip")], ids=["plain", "guarded"])
def test_no_gradient_outlives_a_step(options: dict[str, Any]) -> None:
    params = [torch.nn.Parameter(torch.ones(16, 8, device=DEVICE)) for _ in range(2)]
    optimizer, gone = thalweg.torch.Muon([("a", params[0]), ("b", params[1])], lr=0.1, **options), list[Any]()
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
            gone.append(weakref.ref(p.grad))
        optimizer.step()
        optimizer.zero_grad()
    assert not [grad for grad in gone if grad() is not None]


@pytest.mark.parametrize("rule", ["Kron", "SOAP"])
def test_a_saved_state_carries_stacks_once(rule: str) -> None:
    """State of equal shapes lies in one memory, of which each entry is a part."""
    params = [torch.nn.Parameter(torch.randn(16, 16, device=DEVICE)) for _ in range(12)]
    optimizer = getattr(thalweg.torch, rule)(params, lr=0.1, engine="fused")
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    entries = [x for state in optimizer.state_dict()["state"].values() for x in state.values() if x.ndim]
    assert len({x.untyped_storage().data_ptr() for x in entries}) < len(entries)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    # of each entry, the file has at most a kilobyte beside its numbers
    assert file.tell() < sum(x.nbytes for x in entries) + 1024 * len(entries)


def test_a_first_step_that_is_refused_shows_no_figures_of_old_memory() -> None:
    p = torch.nn.Parameter(torch.ones(16, 8, device=DEVICE))
    p.grad = torch.ones_like(p)
    optimizer: Any = thalweg.torch.SGD([("p", p)], lr=0.1, max_grad_norm=0.5)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor([8.0, 1.0], device=DEVICE).unbind()
    torch.use_deterministic_algorithms(True)  # which fills what is not initialized with NaN
    try:
        optimizer.step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert optimizer.stats()["p"]["grad_norm"] == 0
    assert torch.equal(p, torch.ones_like(p))


def test_without_triton_lists_serve_and_one_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_here", lambda: False)
    kernels.warn_once.cache_clear()
    named = parameters()
    try:
        optimizer = make("LAMB", named, "auto")
        with pytest.warns(thalweg.errors.FallbackWarning, match="fused GPU kernels are not available") as caught:
            train(optimizer, named, gradients(1))
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(optimizer, named, gradients(1))
        assert optimizer.engine == "foreach"
    finally:
        kernels.warn_once.cache_clear()


@every_rule
def test_one_parameter_after_the_other(rule: str) -> None:
    """As in a backward pass."""
    results = []
    for engine in ("fused", "reference"):
        named = parameters()
        optimizer = make(rule, named, engine, **options_of(rule))
        for step in gradients(2):
            for name, p in named:
                p.grad = step[name]
                optimizer.step_parameter(p)
        results += [optimizer, named]
    agree(*results)


@pytest.mark.parametrize("options", [FACTORED, *([] if BY_DAY else [dict(factored=False)])], ids=str)
@pytest.mark.parametrize("rates", [(0.3, None, 0.2), (None, 0.5, 0.0)], ids=str)
def test_adafactor_whose_lr_is_taken_away(options: dict[str, Any], rates: Any) -> None:
    """Then the step size follows from the step; where there never was one, a rate scales it."""
    results = []
    for engine in ("fused", "reference"):
        named = parameters(shapes=FEW)
        optimizer = make("Adafactor", named, engine, lr=rates[0], **options)
        for t, (lr, step) in enumerate(zip(rates, gradients(3, shapes=FEW), strict=True)):
            if t:
                optimizer.param_groups[0]["lr"] = lr
            train(optimizer, named, [step])
        results += [optimizer, named]
    agree(*results)


@pytest.mark.parametrize(("rule", "options"), [("Adafactor", FACTORED), ("AdamW", {}), ("Muon", dict(ns_dtype=None))])
def test_gradients_are_read_where_they_are(rule: str, options: dict[str, Any]) -> None:
    """In steps like the last one, after one whose gradients begin where the widest loads cannot, and after the first
    whose options are others."""
    shapes, results = {"a": (24, 64), "b": (24, 64)}, []
    steps = gradients(5, shapes=shapes)
    steps[3] = {name: torch.cat([g.new_zeros(1), g.reshape(-1)])[1:].view(g.shape) for name, g in steps[3].items()}
    for engine in ("fused", "reference"):
        named = parameters(shapes=shapes)
        optimizer = getattr(thalweg.torch, rule)(named, lr=0.02, engine=engine, **options)
        train(optimizer, named, steps[:4])
        optimizer.param_groups[0]["maximize"] = True
        train(optimizer, named, steps[4:])
        assert optimizer.engine == engine
        results += [optimizer, named]
    if rule == "Muon":
        agree_in_products(*results)
    else:
        agree(*results)


# ---- what all gradients decide together, where kernels measure them


def test_all_at_once_with_a_scaler_and_gradients_of_two_dtypes() -> None:
    """What a GradScaler leaves to a step comes first; a gradient lies across memory; two have 16 bits."""
    runs = []
    for engine in ("fused", "reference"):
        named = parameters(shapes=FEW)
        optimizer = make("AdamW", named, engine, lr=0.01, max_grad_norm=0.5, on_nonfinite="skip")
        for t, step in enumerate(gradients(4, shapes=FEW)):
            for name, p in named:
                p.grad_dtype = None
                g = step[name] * 8
                p.grad = g.mT.contiguous().mT if name == "matrix" else g.bfloat16()
            optimizer.grad_scale = torch.full((), 8.0, device=DEVICE)
            optimizer.found_inf = torch.full((), float(t == 2), device=DEVICE)
            optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        runs.append((optimizer, named))
    (fused, ours), (reference, theirs) = runs
    assert fused.skipped == reference.skipped == 1
    agree(fused, ours, reference, theirs)


def test_a_bound_that_changes_from_step_to_step() -> None:
    runs = []
    for engine in ("fused", "reference"):
        named = parameters(shapes=FEW)
        optimizer = make("AdamW", named, engine, lr=0.01, max_grad_norm=0.5)
        for limit, step in zip((0.5, 0.1, None, 2.0), gradients(4, shapes=FEW), strict=True):
            optimizer.param_groups[0]["max_grad_norm"] = limit
            train(optimizer, named, [step])
        runs += [optimizer, named]
    agree(*runs)


# ---- what is made of factors and kept from step to step


@pytest.mark.parametrize(
    "options", [dict(block_size=8), {}, dict(state_dtype="bfloat16")][: 1 if BY_DAY else 3], ids=str
)
def test_factors_that_the_user_writes_are_those_of_the_next_step(options: dict[str, Any]) -> None:
    results: list[Any] = []
    for engine in ("fused", "reference"):
        named = parameters(shapes=OF_KRON)
        optimizer = thalweg.torch.Kron(named, 0.02, engine=engine, **IN_PARTS, **options)
        for t, step in enumerate(gradients(8, shapes=OF_KRON)):
            for name, p in named:
                p.grad = step[name]
            if t == 5:
                with torch.no_grad():
                    optimizer.state[named[0][1]]["Q_0"].mul_(1.5)
            if t == 6:
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        assert optimizer.engine == engine
        results += [optimizer, named]
    agree_in_products(*results)


# ---- mixtures


def mixture(named: Any, engine: str, **arguments: Any) -> Any:
    """Each rule by its own kernels, in one step."""
    entries = [("matrix", Kron.options(lr=0.01)), ("vector", LAMB.options(lr=0.01)), ("*", AdamW.options(lr=0.01))]
    return Mixture(named, entries, engine=engine, **arguments)


@pytest.mark.parametrize("arguments", [{}, dict(max_grad_norm=1.0)], ids=str)
def test_kernels_step_as_the_rules_do(arguments: dict[str, Any]) -> None:
    ours, theirs, steps = parameters(shapes=MIXED), parameters(shapes=MIXED), gradients(3, shapes=MIXED)
    fused, reference = mixture(ours, "fused", **arguments), mixture(theirs, "reference", **arguments)
    train(fused, ours, steps)
    train(reference, theirs, steps)
    assert (fused.engine, reference.engine) == ("fused", "reference")
    if DEVICE == "cuda":  # Kron's products are in TF32 there
        (_, p), (_, q) = (next(pair for pair in some if pair[0] == "matrix") for some in (ours, theirs))
        assert (p - q).abs().max() <= TENSOR_CORES["float32"] * q.abs().max()
        ours, theirs = ([pair for pair in some if pair[0] != "matrix"] for some in (ours, theirs))
    agree(fused, ours, reference, theirs)


# ---- products of matrices between kernels


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
        train(thalweg.torch.Muon(named, engine=engine, **options), named, gradients(5, "float32", shapes))
        found[name] = [p.detach() for _, p in named]
    for exact, library, own, start in zip(*found.values(), starts, strict=True):
        assert (own - exact).norm() < 1.1 * (library - exact).norm() + 1e-3 * (exact - start).norm()


@pytest.mark.skipif(DEVICE == "cpu", reason="steps are recorded on GPUs")
def test_recorded_steps_follow_the_precision_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, found = {f"{i}": (1024, 1024) for i in range(8)}, []
    before = torch.get_float32_matmul_precision()
    try:
        for replays, last in (("1", "highest"), ("0", "highest"), ("0", "high")):
            monkeypatch.setenv("THALWEG_REPLAY", replays)
            named, steps = parameters("float32", shapes), gradients(7, "float32", shapes)
            optimizer = thalweg.torch.Muon(named, engine="fused", ns_dtype="float32")
            for precision, given in (("high", steps[:6]), (last, steps[6:])):
                torch.set_float32_matmul_precision(precision)
                train(optimizer, named, given)
            found.append(torch.stack([p.detach() for _, p in named]))
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


# ---- state of equal shapes is one array


def soap(shapes: dict[str, tuple[int, ...]], steps: int = 2) -> tuple[Any, Any]:
    named = parameters("float32", shapes)
    optimizer = thalweg.torch.SOAP(named, precondition_frequency=2)
    train(optimizer, named, gradients(steps, "float32", shapes))
    return optimizer, named


def go_on(optimizer: Any, named: Any, shapes: Any) -> list[torch.Tensor]:
    train(optimizer, named, gradients(5, "float32", shapes)[2:])
    return [p.detach().clone() for _, p in named]


def renewed(optimizer: Any, shapes: Any, state: Any) -> tuple[Any, Any]:
    """Another optimizer with the parameters of one, and this state."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    named = [(n, torch.nn.Parameter(p.detach().clone())) for n, p in zip(shapes, held, strict=True)]
    other = thalweg.torch.SOAP(named, precondition_frequency=2)
    other.load_state_dict(state)
    return other, named


@pytest.mark.parametrize(
    "options", [dict(block_size=8, merge="matrix"), {}, dict(precondition_1d=True)][: 1 if BY_DAY else 3], ids=str
)
def test_bases_that_are_refreshed_together(options: dict[str, Any]) -> None:
    shapes = {"a": (20, 12), "b": (20, 12), "turned": (12, 20), "vector": (12,), "conv": (10, 4, 3, 3)}
    results = []
    for engine in ("reference", "fused"):
        named = parameters("float32", shapes)
        optimizer = thalweg.torch.SOAP(named, engine=engine, precondition_frequency=2, weight_decay=5.0, **options)
        steps = gradients(7, "float32", shapes)
        train(optimizer, named, steps[:5])
        for state in optimizer.state.values():
            state["basis_age"].zero_()  # bases are made again, in a step without decay
        train(optimizer, named, steps[5:])
        results += [optimizer, named]
    reference, theirs, fused, ours = results
    assert (reference.engine, fused.engine) == ("reference", "fused")
    starts = parameters("float32", shapes)
    for (name, p), (_, q), (_, start) in zip(ours, theirs, starts, strict=True):
        assert_moved_alike(p - start, q - start, name)


def assert_moved_alike(moved: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    """Bases enlarge rounding by how near two eigenvalues are, so a hundredth of what a tensor has moved is allowed."""
    assert (moved - wanted).abs().max() <= 0.01 * wanted.abs().max(), name


def test_state_of_equal_shapes_is_one_array_and_goes_where_its_parameter_goes() -> None:
    shapes = {"a": (20, 12), "b": (20, 12), "c": (20, 12)}
    optimizer, named = soap(shapes)
    bases = [optimizer.state[p]["Q_0"] for _, p in named]
    assert [x.data_ptr() - bases[0].data_ptr() for x in bases] == [0, bases[0].nbytes, 2 * bases[0].nbytes]

    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    size = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    assert size < saved.tell() < size + 20_000
    saved.seek(0)
    copied = copy.deepcopy(optimizer.state_dict())
    loaded = torch.load(saved, weights_only=True)
    others = [renewed(optimizer, shapes, state) for state in (copied, loaded)]

    # an entry that a user has replaced, by what it was, or written to
    optimizer.state[named[1][1]]["Q_0"] = bases[1].clone()
    optimizer.state[named[2][1]]["GG_0"].mul_(1.0)
    expected = go_on(optimizer, named, shapes)
    for other, params in others:
        for a, b in zip(go_on(other, params, shapes), expected, strict=True):
            assert torch.equal(a, b)


def test_what_a_user_writes_into_one_entry_reaches_that_parameter_alone() -> None:
    shapes = {"a": (20, 12), "b": (20, 12)}
    (plain, theirs), (edited, named) = soap(shapes), soap(shapes)
    edited.state[named[0][1]]["exp_avg_sq"].mul_(4.0)
    (a, b), (c, d) = go_on(plain, theirs, shapes), go_on(edited, named, shapes)
    assert not torch.equal(a, c)
    assert torch.equal(b, d)


def test_parameters_without_a_gradient_leave_the_others_as_they_are() -> None:
    shapes = {"a": (20, 12), "b": (20, 12), "c": (20, 12)}
    (plain, theirs), (some, named) = soap(shapes), soap(shapes)
    starts, steps = parameters("float32", shapes), gradients(5, "float32", shapes)[2:]
    train(plain, theirs, steps)
    before = named[1][1].detach().clone()
    for step in steps:
        for name, p in named:
            p.grad = None if name == "b" else step[name].clone()
        some.step()
    assert torch.equal(named[1][1], before)
    for i in (0, 2):
        start = starts[i][1]
        assert_moved_alike(named[i][1] - start, theirs[i][1] - start, named[i][0])
