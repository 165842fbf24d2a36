"""torch tensors stepped by native code: the bits of arrays of numpy, which layouts it serves, and what is put in place.

That other layouts, mixed dtypes, empty tensors and missing gradients give the same steps, `thalweg check` asks of every
rule; that tensors are replaced between steps, tests/torch/test_torch_remembered.py.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from cases import FUSED_RULES
from lanes import by_turns
from own_rules import Signed
from side_by_side import DTYPES, draw, draw_gradients, every_rule, needs_core

torch = pytest.importorskip("torch")

from side_by_side_torch import FULL, SHAPES, agree, array_of, gradients, make, parameters, side_by_side, train  # noqa: E402

import thalweg.numpy  # noqa: E402
import thalweg.torch  # noqa: E402
from thalweg import OptionError, StateError  # noqa: E402
from thalweg.errors import ResumeWarning  # noqa: E402
from thalweg.kernels.cpu import compiled  # noqa: E402
from thalweg.torch import LAMB, LARS  # noqa: E402

pytestmark = needs_core

#: Axes that may be stacked, single numbers in two of them among others.
STACKED = {"matrices": (2, 3, 5, 6), "vectors": (3, 2, 7), "numbers": (5, 6)}
#: What surrounds a rule.
HANDLING: list[dict[str, Any]] = [
    {},
    dict(maximize=True),
    dict(max_grad_norm=0.5),
    dict(on_nonfinite="raise"),
    dict(max_grad_norm=0.5, on_nonfinite="skip"),
    dict(rounding="stochastic"),
    dict(state_dtype="bfloat16"),
    dict(momentum_dtype="float16"),
    dict(stacked_axes=1),
    dict(stacked_axes=2),
]


@by_turns("options", "dtype")
@every_rule
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", HANDLING, ids=str)
def test_numpy_and_torch_give_the_same_bits(rule: str, dtype: str, options: dict[str, Any]) -> None:
    shapes = STACKED if "stacked_axes" in options else SHAPES
    options = {**FULL[rule], "weight_decay": 0.1, **options}
    arrays, named = draw(shapes, dtype), parameters(dtype, shapes)
    plain = getattr(thalweg.numpy, rule)(lr=FUSED_RULES[rule].lr, engine="fused", **options)
    optimizer = make(rule, named, **options)
    for step in draw_gradients(shapes, dtype, 3):
        plain.step(arrays, step)
    train(optimizer, named, gradients(3, dtype, shapes))
    assert optimizer.engine == plain.engine == "fused"
    # torch and numpy may add the squares of several tensors in another order: the joint norm is rounded otherwise
    rounded = 2**4 * float(np.finfo(dtype).eps) if "max_grad_norm" in options and dtype == "float64" else 0.0
    for name, p in named:
        kept = {key: array_of(optimizer.state[p][key]) for key in plain.state[name] if key != "step"}
        for key, entry in {**kept, "parameter": array_of(p)}.items():
            other = arrays[name] if key == "parameter" else plain.state[name][key]
            same = entry.tobytes() == other.tobytes()
            assert same or np.abs(entry - other).max() <= rounded * np.abs(other).max(), (name, key)
        assert array_of(p).tobytes() != draw(shapes, dtype)[name].tobytes(), name


@by_turns()
@every_rule
@pytest.mark.parametrize("lr", ["float32", "float64", "one element"])
def test_a_learning_rate_that_is_a_tensor(rule: str, lr: str) -> None:
    value = torch.tensor([0.25]) if lr == "one element" else torch.tensor(0.25, dtype=getattr(torch, lr))
    _, ours = side_by_side(rule, gradients(3), lr=value, **FULL[rule])
    named = parameters()
    train(make(rule, named, lr=0.25, **FULL[rule]), named, gradients(3))
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(ours, named, strict=True))


@every_rule
def test_groups_with_options_of_their_own_and_overrides(rule: str) -> None:
    both = []
    for engine in ("fused", "reference"):
        named = parameters("float64")
        groups: list[dict[str, Any]] = [
            dict(params=named[:2], lr=0.5, weight_decay=0.3),
            dict(params=named[2:], lr=0.01, weight_decay=0.0),
        ]
        overrides = [("conv", dict(lr_scale=0.1, weight_decay=0.2)), ("vector", dict(lr_scale=3.0))]
        optimizer = make(rule, groups, engine, overrides=overrides, **FULL[rule])
        for t, step in enumerate(gradients(5, "float64")):
            train(optimizer, named, [step])
            optimizer.param_groups[0]["lr"] *= 0.5
            if t == 2:
                optimizer.param_groups[1]["weight_decay"] = 0.05
        both.append((optimizer, named))
    assert both[0][0].engine == "fused"
    agree(*both[0], *both[1])


def test_stats_have_the_rate_and_the_figures() -> None:
    named: Any = parameters()
    optimizer = make("LAMB", named, lr=0.5, overrides=[("matrix", dict(lr_scale=0.5))])
    train(optimizer, named, gradients(1))
    stats = optimizer.stats()
    assert list(stats["matrix"]) == ["lr", "trust_ratio", "param_norm", "update_norm", "grad_norm"]
    assert (stats["matrix"]["lr"], stats["vector"]["lr"]) == (0.25, 0.5)


def test_kron_as_it_comes_has_its_noise_from_native_code() -> None:
    """A probability that is annealed is known to the host as a number is."""
    weights = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = thalweg.torch.Kron([weights], lr=0.01)
    stepped(optimizer, weights)
    assert optimizer.engine == "fused"


# ---- layouts

IMAGES = {"conv": (8, 6, 3, 5), "other": (4, 3, 2, 2)}
MATRICES = {"w": (40, 33), "square": (20, 20)}


def channels_last(p: Any) -> Any:
    return torch.nn.Parameter(p.detach().contiguous(memory_format=torch.channels_last))


def transposed(p: Any) -> Any:
    return torch.nn.Parameter(p.detach().t().contiguous().t())


def gap(p: Any) -> Any:
    return torch.nn.Parameter(torch.repeat_interleave(p.detach(), 2, dim=1)[:, ::2])


UNFACTORED = {"LARS": {}, "LAMB": {}, "Adafactor": dict(factored=False, momentum=0.9)}
STOCHASTIC, BY_SLICES = dict(rounding="stochastic"), dict(stacked_axes=1)
#: Where native code serves a layout: elementwise rules do not mind the order of elements, factors and chance do.
LAYOUTS = {
    "channels last": (channels_last, IMAGES, UNFACTORED, {}, True),
    "channels last, factored": (channels_last, IMAGES, FULL, {}, "not factored"),
    "channels last, stacked": (channels_last, IMAGES, UNFACTORED, BY_SLICES, False),
    "channels last, rounded by chance": (channels_last, IMAGES, UNFACTORED, STOCHASTIC, False),
    "transposed": (transposed, MATRICES, FULL, {}, "not factored"),
    "with gaps": (gap, MATRICES, FULL, {}, False),
}


@by_turns("name")
@every_rule
@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_in_any_layout(rule: str, name: str) -> None:
    prepare, shapes, options, more, served = LAYOUTS[name]
    given: dict[str, Any] = dict(engine="auto", prepare=prepare, **options[rule], **more)
    fused, ours = side_by_side(rule, gradients(3, "float64", shapes), "float64", shapes, **given)
    served = rule != "Adafactor" if served == "not factored" else served
    assert (fused.engine == "fused") == served
    assert all(p.stride() == prepare(p).stride() for _, p in ours)


GRADIENTS = {
    "transposed": lambda g: g.t().contiguous().t(),
    "a slice": lambda g: torch.nn.functional.pad(g, (2, 3, 1, 1))[1:-1, 2:-3],
    "offset": lambda g: torch.cat([g.new_zeros(1), g.reshape(-1)])[1:].view(g.shape),
    "expanded": lambda g: g[:1, :1].expand(g.shape),
}


@by_turns("layout", "options")
@every_rule
@pytest.mark.parametrize("layout", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("options", [dict(max_grad_norm=0.5), dict(on_nonfinite="skip")], ids=str)
def test_gradients_in_any_layout_reach_norms_and_guards(rule: str, layout: Any, options: dict[str, Any]) -> None:
    steps = [{name: layout(g) for name, g in step.items()} for step in gradients(3, "float64", MATRICES)]
    side_by_side(rule, steps, "float64", MATRICES, **options, **FULL[rule])


def test_who_insists_is_told_which_parameter_and_why() -> None:
    named = [("fine", torch.nn.Parameter(torch.ones(3, 4))), ("with gaps", gap(torch.ones(3, 4)))]
    optimizer = make("LAMB", named)
    with pytest.raises(OptionError, match=r"engine='fused' cannot run .*'with gaps'.*strides"):
        train(optimizer, named, [{name: torch.ones(3, 4) for name, _ in named}])
    assert all((p == 1).all() for _, p in named)
    assert not optimizer.state


@every_rule
def test_state_in_another_order_than_its_parameter(rule: str) -> None:
    """A checkpoint that was made contiguous on its way is loaded for a parameter in channels last."""
    both = []
    for engine in ("auto", "reference"):
        named = [(name, channels_last(p)) for name, p in parameters("float64", IMAGES)]
        optimizer = make(rule, named, engine, **UNFACTORED[rule])
        steps = gradients(4, "float64", IMAGES)
        train(optimizer, named, steps[:2])
        saved = optimizer.state_dict()
        for entries in saved["state"].values():
            for key, entry in entries.items():
                entries[key] = entry.contiguous()
        optimizer.load_state_dict(saved)
        train(optimizer, named, steps[2:])
        both.append((optimizer, named))
    agree(*both[0], *both[1])


# ---- what is put in the place of a gradient or a state


def stepped(optimizer: Any, p: Any) -> None:
    p.grad = torch.ones_like(p)
    optimizer.step()


class Marked(torch.Tensor):
    """A subclass, whose memory may be anywhere."""


def test_a_gradient_of_another_class_is_left_to_other_engines() -> None:
    p = torch.nn.Parameter(torch.ones(8))
    p.grad = torch.ones(8).as_subclass(Marked)
    optimizer = LARS([p], lr=0.1)
    optimizer.step()
    assert optimizer.engine == "reference"
    with pytest.raises(OptionError, match="a gradient of type Marked"):
        LARS([p], lr=0.1, engine="fused").step()


def test_a_state_that_is_stretched_over_one_number_is_refused() -> None:
    p = torch.nn.Parameter(torch.ones(8))
    optimizer = LARS([p], lr=0.1)
    stepped(optimizer, p)
    before = p.detach().clone()
    optimizer.state[p]["momentum_buffer"] = torch.zeros(1).expand(8)
    with pytest.raises(StateError, match="'momentum_buffer' of '0' has one number in memory for several elements"):
        stepped(optimizer, p)
    assert torch.equal(p, before)


def test_a_state_of_another_dtype_is_stepped_as_what_it_is() -> None:
    p = torch.nn.Parameter(torch.ones(64))
    optimizer = LARS([p], lr=0.1)
    stepped(optimizer, p)
    optimizer.state[p]["momentum_buffer"] = optimizer.state[p]["momentum_buffer"].bfloat16()
    stepped(optimizer, p)
    assert optimizer.state[p]["momentum_buffer"].dtype == torch.bfloat16
    assert torch.isfinite(p).all()
    assert (p < 1).all()


def test_a_parameter_that_grew_is_refused() -> None:
    memory = torch.ones(1000)
    p = torch.nn.Parameter(memory[:10])
    optimizer = LAMB([p], lr=0.1)
    stepped(optimizer, p)
    p.grad = None
    p.data = memory
    with pytest.raises(StateError, match="does not fit"):
        stepped(optimizer, p)


# ---- saving and resuming, float16 that overflows


@by_turns("first")
@every_rule
@pytest.mark.parametrize(("first", "second"), [("fused", "reference"), ("reference", "fused"), ("fused", "foreach")])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_saved_under_one_engine_and_resumed_under_another(rule: str, first: str, second: str, dtype: str) -> None:
    steps, steady = gradients(6, dtype), parameters(dtype)
    reference = make(rule, steady, "reference", **FULL[rule])
    train(reference, steady, steps)
    named = parameters(dtype)
    optimizer = make(rule, named, first, **FULL[rule])
    train(optimizer, named, steps[:3])
    resumed = make(rule, named, second, **FULL[rule])
    with pytest.warns(ResumeWarning, match=f"saved with engine='{first}'"):
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(resumed, named, steps[3:])
    assert resumed.engine == second
    agree(resumed, named, reference, steady)


@every_rule
def test_float16_that_would_overflow_is_skipped_alone(rule: str) -> None:
    """Its gradient is fine, so the others go on: as the reference engine has it."""
    both = []
    for engine in ("fused", "reference"):
        named = [("large", torch.nn.Parameter(torch.full((40,), 65_000.0).half())), ("fine", parameters()[1][1])]
        options = dict(trust=False) if rule != "Adafactor" else {}
        optimizer = make(rule, named, engine, lr=1e4, on_nonfinite="skip", **options)
        train(optimizer, named, [{name: -torch.ones_like(p) for name, p in named}])
        assert (named[0][1] == 65_000).all()
        assert optimizer.state[named[0][1]]["step"] == 0
        both.append((optimizer, named))
    agree(*both[0], *both[1])


@pytest.mark.parametrize("engine", ["reference", "foreach"])
def test_engines_of_lists_compile_nothing(engine: Any) -> None:
    class Unseen(Signed):
        pass

    before = compiled.compile_kind.cache_info().misses
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    thalweg.torch.optimizer(Unseen)([p], lr=0.1, engine=engine).step()
    assert p[0] != 1
    assert compiled.compile_kind.cache_info().misses == before
