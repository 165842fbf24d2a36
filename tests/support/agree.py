"""An engine steps as the reference does: one function for all engines, rules, options, shapes and dtypes.

The reference is ``thalweg.numpy`` without native code, which other tests hold against formulas on paper and published
optimizers. After each step parameters, all of the state and all figures are compared, and the engine goes on from the
reference's numbers: so roundings do not add up, and one bound serves runs of any length. An engine is a row of
:data:`ENGINES`; everything it needs is three functions.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import pytest

import thalweg.numpy
from thalweg.boundary import recorded_unit, seen
from thalweg.codecs import CODECS, scale_key
from thalweg.dtypes import DTYPES, NARROW
from thalweg.errors import NonFiniteError, refusal
from thalweg.kernels.cpu.library import load
from thalweg.rules import RULES, Rule
from thalweg.rules.muon import MEANS
from thalweg.spaces import numpy as space
from thalweg.storage import RECORD, SPIKES

Arrays = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

#: How far results may be apart, in units of the last place of the arithmetic, relative to the largest number of an
#: array: a step is some ten operations for an element, each off by half a unit at most, on either side.
UNITS = 16
#: The same for rules that multiply matrices and decompose them: sums of dozens of products.
UNITS_OF_PRODUCTS = 1024
#: For a basis of n eigenvectors times n**2: their errors are divided by how far two eigenvalues are apart, and of n
#: that lie anywhere in an interval, the two closest are one n**2-th of it apart.
UNITS_OF_BASES = UNITS
#: Relative error where products of matrices are of bfloat16, whatever the arithmetic: one unit of it for each of five
#: iterations, whose roundings may fall on the other neighbour.
OF_BFLOAT16 = 5 * DTYPES["bfloat16"].rounding
#: The same for means of squares along a row. A number is off by a share r of the largest, which is taken for at most
#: twice the root of the row's mean square; so that mean is off by (1 + 2r)**2 - 1, as averages of it are.
SQUARES_OF_BFLOAT16 = (1 + 2 * OF_BFLOAT16) ** 2 - 1
#: Share of results of few bits that may be rounded to another neighbour: results that are UNITS apart lie on two sides
#: of the middle between two neighbours, which in float16 are 2**13 units apart.
OTHER_NEIGHBOUR = 2 * UNITS / 2**13
#: The same where gradients have few bits too: by a decay of 0.9, ten times an average of two such numbers is a whole
#: number of units of their last place, so that one in ten lies in the very middle.
IN_THE_MIDDLE = 1 / 10


class Run(NamedTuple):
    """An optimizer over parameters of its own."""

    #: Step with these gradients, by name; a name that is missing has none.
    step: Callable[[Arrays], None]
    #: Parameters, state and figures, by name, as arrays of numpy.
    read: Callable[[], tuple[Arrays, dict[str, Arrays], dict[str, Arrays]]]
    #: Put parameters and state in place.
    write: Callable[[Arrays, Mapping[str, Arrays]], None]


class Engine(NamedTuple):
    start: Callable[..., Run]
    #: Why it cannot run here; "" if it can.
    reason: Callable[[], str] = lambda: ""
    #: What has to hold while it runs.
    within: Callable[[], Any] = nullcontext
    #: Whether gradients may have another dtype than their parameters.
    mixes_dtypes: bool = False
    #: The engine to ask for where it has to serve all, and may leave nothing to another.
    strictly: str = "fused"
    #: Relative error of products of matrices on tensor cores, which cut float32 to 11 binary digits: one unit of them
    #: for each of five products that follow from one another.
    tensor_cores: float = 0.0


def dtype_of(name: str) -> Any:
    """A dtype of numpy; a test is skipped where bfloat16 is not known."""
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


# ---- engines


def start_numpy(rule: type[Rule], params: Arrays, *, engine: str, **options: Any) -> Run:
    optimizer = thalweg.numpy.optimizer(rule)(**options, engine=engine)
    current = {name: p.copy() for name, p in params.items()}

    def read() -> Any:
        state = {name: dict(entries) for name, entries in optimizer.state.items()}
        return current, state, optimizer.stats()

    turns = itertools.cycle((False, True))

    def write(params: Arrays, state: Mapping[str, Arrays]) -> None:
        """Every other time into other memory."""
        moves = next(turns)
        for name, p in params.items():
            current[name] = current[name].copy(order="K") if moves else current[name]
            current[name][...] = p
            for key, entry in state.get(name, {}).items():
                if key != "step":
                    optimizer.state[name][key][...] = entry

    return Run(lambda grads: optimizer.step(current, grads), read, write)


def start_torch(rule: type[Rule], params: Arrays, *, engine: str, device: str = "cpu", **options: Any) -> Run:
    import torch

    import thalweg.torch
    from thalweg.torch.exchange import to_numpy, to_tensor

    def place(x: Any) -> Any:
        """A tensor on the device, of which elements lie as those of the array do."""
        values = to_tensor(np.ascontiguousarray(x)).reshape(x.shape)
        strides = [stride // x.itemsize for stride in x.strides]
        return torch.empty_strided(x.shape, strides, dtype=values.dtype, device=device).copy_(values)

    named = [(name, torch.nn.Parameter(place(p))) for name, p in params.items()]
    optimizer = thalweg.torch.optimizer(rule)(named, **options, engine=engine)
    by_name = dict(named)

    def step(grads: Arrays) -> None:
        for name, p in named:
            p.grad = place(grads[name]) if name in grads else None
        optimizer.step()

    def read() -> Any:
        state = {name: {key: to_numpy(x) for key, x in optimizer.state[p].items()} for name, p in named}
        figures = {name: {k: np.asarray(v) for k, v in own.items()} for name, own in optimizer.stats().items()}
        return {name: to_numpy(p) for name, p in named}, state, figures

    def write(params: Arrays, state: Mapping[str, Arrays]) -> None:
        with torch.no_grad():
            for name, p in params.items():
                by_name[name].copy_(to_tensor(p))
                for key, entry in state.get(name, {}).items():
                    if key != "step":
                        optimizer.state[by_name[name]][key].copy_(to_tensor(entry))

    return Run(step, read, write)


def start_optax(rule: type[Rule], params: Arrays, *, engine: str, lr: Any, applied: bool = True, **options: Any) -> Run:
    """applied: by ``make_step``, else by ``update`` and optax's ``apply_updates``. Schedules count from 0 there."""
    import jax
    import jax.numpy as jnp
    import optax

    from thalweg.optax import export_state, import_state, make_step, transformation

    # in one program, XLA leaves out roundings to bfloat16 between products: it is more exact than the rule, by as much
    # as those of all iterations make. That is well for users, and hides what is compared here
    rounds = dtype_of_products(rule, options, "") == "bfloat16"
    given = {name: from_0(value) if callable(value) else value for name, value in {"lr": lr, **options}.items()}
    solver = transformation(rule, given.pop("lr"), **given, engine=engine)
    run: dict[str, Any] = {"params": {name: jnp.asarray(p) for name, p in params.items()}}
    run["state"] = jax.jit(solver.init)(run["params"])  # at once: else each operation of it is compiled by itself

    def update(params: Any, state: Any, grads: Any) -> Any:
        """Updates have the widest dtype of parameter and gradient: in 16 bits they would be rounded once more."""
        wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, "float32")), grads)
        updates, state = solver.update(wide, state, params)
        return optax.apply_updates(params, updates), state

    as_written = {"xla_allow_excess_precision": False} if rounds else None
    compiled = jax.jit(make_step(solver) if applied else update, compiler_options=as_written)

    def step(grads: Arrays) -> None:
        given = {name: jnp.asarray(g) for name, g in grads.items()}
        run["params"], run["state"] = compiled(run["params"], run["state"], given)

    def read() -> Any:
        params = {name: np.asarray(p) for name, p in run["params"].items()}
        return params, export_state(run["state"], run["params"])["state"], {}

    def write(params: Arrays, state: Mapping[str, Arrays]) -> None:
        exported = export_state(run["state"], run["params"])
        run["params"] = {name: jnp.asarray(p) for name, p in params.items()}
        run["state"] = import_state(run["state"], run["params"], {**exported, "state": state})

    return Run(step, read, write)


def from_0(schedule: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda count: schedule(count + 1)


def missing(*modules: str) -> str:
    """Which of these packages is not installed."""
    return ", ".join(module for module in modules if importlib.util.find_spec(module) is None)


def missing_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "no GPU"


def compiles_kernels() -> str:
    from thalweg.kernels.triton.numbers import INTERPRETED

    return "" if INTERPRETED.value else "kernels are compiled here, and not interpreted"


@contextmanager
def interpreted() -> Iterator[None]:
    """Within: Triton's kernels step tensors of CPUs, by its interpreter."""
    from interpreter import serving

    with serving():
        yield


def row(start: Callable[..., Run], **beside: Any) -> Callable[..., Run]:
    return lambda rule, params, **options: start(rule, params, **{**beside, **options})


ENGINES: dict[str, Engine] = {
    "numpy native": Engine(row(start_numpy, engine="auto"), lambda: refusal(load), mixes_dtypes=True),
    "torch reference": Engine(row(start_torch, engine="reference"), lambda: missing("torch"), strictly="reference"),
    "torch lists": Engine(row(start_torch, engine="foreach"), lambda: missing("torch"), strictly="foreach"),
    "torch native": Engine(row(start_torch, engine="auto"), lambda: missing("torch") or refusal(load)),
    "torch triton": Engine(
        row(start_torch, engine="auto"), lambda: missing("torch", "triton") or compiles_kernels(), interpreted
    ),
    "torch cuda": Engine(
        row(start_torch, engine="auto", device="cuda"),
        lambda: missing("torch", "triton") or missing_gpu(),
        tensor_cores=5 * 2.0**-10,
    ),
    "optax xla": Engine(
        row(start_optax, engine="xla"), lambda: missing("jax", "optax"), mixes_dtypes=True, strictly="xla"
    ),
    "optax update": Engine(
        row(start_optax, engine="xla", applied=False),
        lambda: missing("jax", "optax"),
        mixes_dtypes=True,
        strictly="xla",
    ),
    "optax native": Engine(
        row(start_optax, engine="auto"), lambda: missing("jax", "optax") or refusal(load), strictly="native"
    ),
}


def engine_params() -> list[Any]:
    """Engines as parameters of a test; what needs a GPU is marked so."""
    return [pytest.param(name, marks=pytest.mark.gpu if name == "torch cuda" else ()) for name in ENGINES]


# ---- numbers


def draw(shapes: Shapes, dtype: str, seed: int = 0, scale: float = 1.0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        name: np.asarray(rng.standard_normal(shape) * scale).astype(dtype_of(dtype)) for name, shape in shapes.items()
    }


def draw_gradients(shapes: Shapes, dtype: str, steps: int, seed: int = 100, scale: float = 1.0) -> list[Arrays]:
    """Gradients for each step, of a size that varies from step to step.

    Those of a few numbers are positive: averages of so few might cancel, and errors are measured by their size.
    """
    drawn = [draw(shapes, dtype, seed + t, scale * (3 - t % 3)) for t in range(steps)]
    return [{name: np.asarray(np.abs(g)) if g.size <= 3 else g for name, g in grads.items()} for grads in drawn]


# ---- agreement


def agree(
    engine: str,
    rule: type[Rule] | str,
    shapes: Shapes,
    dtype: str = "float32",
    *,
    steps: int = 3,
    drawn: int = 0,
    scale: float = 1.0,
    gradients: str | Sequence[Arrays] | None = None,
    spoil: Callable[[Arrays, list[Arrays]], None] = lambda params, grads: None,
    moves: bool = True,
    strict: bool = False,
    **options: Any,
) -> None:
    """Step parameters by an engine and by the reference, and compare after each step.

    drawn: a seed of the numbers. gradients: their dtype, or the gradients of each step. spoil: changes the first
    parameters and the gradients before anything is stepped: their numbers, how they lie in memory, which are there.
    moves: whether something must move. strict: whether the engine has to serve all of it, and may leave nothing to
    another. A step that one refuses because it is not finite the other has to refuse.
    """
    rule = RULES[rule] if isinstance(rule, str) else rule
    row = ENGINES[engine]
    if reason := row.reason():
        pytest.skip(reason)
    precision = "float64" if dtype == "float64" else "float32"
    units = units_of(rule, options, precision)
    if rule.needs_whole and precision == "float32":
        units = max(units, row.tensor_cores / DTYPES[precision].rounding)
    params = draw(shapes, dtype, drawn)
    if gradients is None or isinstance(gradients, str):
        gradients = draw_gradients(shapes, gradients or dtype, steps, drawn + 100, scale)
    grads = [{name: g.copy() for name, g in each.items()} for each in gradients]
    spoil(params, grads)
    expected = start_numpy(rule, params, engine="reference", **options)
    moved, taken = False, 0
    with row.within(), np.errstate(all="ignore"):
        run = row.start(rule, params, **options, **({"engine": row.strictly} if strict else {}))
        for step in grads:
            refused = refuses(expected, step)
            assert refuses(run, step) == refused
            wanted, found = expected.read(), run.read()
            moved = moved or any(not np.array_equal(p, params[name], equal_nan=True) for name, p in wanted[0].items())
            before, taken = taken, sum(int(own["step"]) for own in wanted[1].values())
            stood = refused or ("spikes" in options and taken == before)  # figures are then of no step in particular
            share = IN_THE_MIDDLE if any(g.dtype.name in NARROW for g in step.values()) else OTHER_NEIGHBOUR
            assert_alike(found, (*wanted[:2], {} if stood else wanted[2]), units, share)
            run.write(wanted[0], wanted[1])
    assert moved or not moves, "nothing moved: comparing would prove nothing"


def refuses(run: Run, grads: Arrays) -> bool:
    """Whether a step is refused because it is not finite. Else it is taken."""
    try:
        run.step(grads)
    except NonFiniteError:
        return True
    return False


def units_of(rule: type[Rule], options: Mapping[str, Any], precision: str) -> float:
    """How far results of a rule may be apart, in units of this precision."""
    products = dtype_of_products(rule, options, precision)
    if products == "bfloat16":
        return OF_BFLOAT16 / DTYPES[precision].rounding
    if not rule.needs_whole:
        return UNITS
    return UNITS_OF_PRODUCTS * max(1.0, DTYPES[products].rounding / DTYPES[precision].rounding)


def dtype_of_products(rule: type[Rule], options: Mapping[str, Any], precision: str) -> str:
    """What products of matrices are rounded to."""
    defaults = {f.name: f.default for f in fields(rule)}
    return options.get("ns_dtype", defaults.get("ns_dtype")) or precision


def assert_alike(found: Any, expected: Any, units: float = UNITS, share: float = OTHER_NEIGHBOUR) -> None:
    """Parameters, state and figures are equal, to rounding. Figures: those that both have."""
    for name, wanted in expected[0].items():
        precision = "float64" if wanted.dtype == "float64" else "float32"
        assert_close(name, found[0][name], wanted, precision, units)
        assert_states(name, found[1].get(name, {}), expected[1].get(name, {}), precision, units, share)
        if RECORD in expected[1].get(name, {}):
            assert_records(name, *((each[0][name], each[1][name]) for each in (found, expected)), units)
        for key, figure in expected[2].get(name, {}).items() if found[2] else ():
            a, b = np.broadcast_arrays(np.asarray(found[2][name][key], "float64"), np.asarray(figure, "float64"))
            assert_close(f"{name}, {key}", a, b, precision, units)


def assert_states(
    name: str, found: Arrays, expected: Arrays, precision: str, units: float = UNITS, share: float = OTHER_NEIGHBOUR
) -> None:
    assert set(found) == set(expected), name
    for key, entry in expected.items():
        a, b = np.asarray(found[key]), np.asarray(entry)
        if key == "step":
            assert int(a) == int(b), name
        elif b.dtype.name in CODECS and scale_key(key) in expected:
            assert_codes(f"{name}, {key}", *((s[key], s[scale_key(key)]) for s in (found, expected)))
        elif key == SPIKES:  # in JAX they are float32 unless a parameter is wider
            assert_close(f"{name}, {key}", a.astype(b.dtype), b, precision, units)
        elif key == MEANS and units >= OF_BFLOAT16 / DTYPES[precision].rounding:
            assert_close(f"{name}, {key}", a, b, precision, SQUARES_OF_BFLOAT16 / DTYPES[precision].rounding)
        elif key != RECORD:
            turned = key.startswith("Q_") and key.replace("Q_", "GG_") in expected
            own = max(units, UNITS_OF_BASES * b.shape[-1] ** 2) if turned else units
            assert_close(f"{name}, {key}", a, b, precision, own, share)


def assert_close(
    what: str, found: Any, expected: Any, precision: str, units: float = UNITS, share: float = OTHER_NEIGHBOUR
) -> None:
    """Two arrays are equal to some units of the precision in which they were computed.

    share: of numbers of few bits, how many may be rounded to another neighbour.
    """
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    a, b = found.astype("float64"), expected.astype("float64")
    finite = np.isfinite(b)
    assert np.array_equal(np.isfinite(a), finite), what
    assert np.array_equal(a[~finite], b[~finite], equal_nan=True), what
    size = np.abs(b[finite]).max(initial=0)
    bound = units * DTYPES["float32" if expected.dtype == "float32" else precision].rounding * size
    error = np.abs(a[finite] - b[finite])
    if expected.dtype.name not in NARROW:
        assert error.max(initial=0) <= bound, (
            f"{what}: off by {error.max():.3g}, {error.max() / bound * units:.3g} units"
        )
        return
    near = error <= bound  # next to zero, neighbours are closer than the arithmetic can tell
    apart = np.abs(places(found) - places(expected))[finite]
    assert_few_apart(what, np.where(near, 0, apart), np.zeros_like(apart), share=units / UNITS * share)


def places(x: Any) -> Any:
    """Numbers of 16 bits as integers, neighbours next to one another and both zeros the same."""
    bits = np.ascontiguousarray(x).view(np.int16).astype(np.int32)
    return np.where(bits >= 0, bits, -(bits & 0x7FFF))


def assert_few_apart(what: str, found: Any, expected: Any, most: int = 1, share: float = OTHER_NEIGHBOUR) -> None:
    """Whole numbers are equal but for a few, which are at most so many apart."""
    apart = np.abs(found - expected)
    assert apart.max(initial=0) <= most, f"{what}: {apart.max()} neighbours apart"
    count = int((apart > 0).sum())
    assert count <= 1 + share * apart.size, f"{what}: {count} of {apart.size} are rounded to another neighbour"


def assert_records(what: str, found: tuple[Any, Arrays], expected: tuple[Any, Arrays], units: float) -> None:
    """Weights of 16 bits, with what rounding has cost them, stand for the same numbers. Each: a parameter, its state.

    A record counts 2**-8 of the distance to the next weight, so that 2**8 times as many records as weights are rounded
    to another neighbour: in float16 all may be, by one; in bfloat16, whose numbers are 8 times as far apart, an eighth.
    """
    dtype = DTYPES[expected[0].dtype.name]
    a, b = (seen(space, p, s).astype("float64") for p, s in (found, expected))
    finite = np.isfinite(b)
    bound = units * DTYPES["float32"].rounding * np.abs(b[finite]).max(initial=0)
    unit = recorded_unit(space, expected[0].astype("float32"), expected[0].dtype.name)[finite]
    records = [s[RECORD][finite].astype(int) for _, s in (found, expected)]
    ends = np.maximum(*map(np.abs, records)) == 127  # 128 of these units are told as 127
    error = np.abs(a[finite] - b[finite])
    assert np.all(error <= bound + unit * (1 + ends)), f"{what}: off by {(error / unit).max():.3g} units of its record"
    count, share = int((error > bound + unit / 2).sum()), units / UNITS * OTHER_NEIGHBOUR * 2.0 ** (dtype.digits - 3)
    assert count <= 1 + share * error.size, f"{what}: {count} of {error.size} records are rounded to another neighbour"


def assert_codes(what: str, found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Codes stand for the same numbers, but for a few that are one code apart."""
    assert_close(f"{what}, scales", found[1], expected[1], "float32")
    assert_few_apart(what, found[0].astype(int), expected[0].astype(int))
