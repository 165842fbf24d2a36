"""What one step has from several: gradients that are added up, and norms of the steps before, whose spikes are cut.

By every engine the steps of numpy, in checkpoints and mixtures; what is refused.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from lanes import one_in
from spiked import KINDS, STEPS, draw, factors_by_hand
from tolerances import FLOAT64

import thalweg.numpy
import thalweg.torch
from thalweg import NonFiniteError, OptionError, ParameterError, ResumeWarning, Spikes, StateError

WANTED = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": dict(lr=0.1),
    "LAMB": dict(lr=0.1, exempt=None),
    "Kron": dict(lr=0.01, damping_mode="expected"),
}
ENGINES = pytest.mark.parametrize("engine", ["reference", "foreach", "auto"])


def model() -> list[tuple[str, Any]]:
    return [(name, torch.nn.Parameter(torch.from_numpy(p))) for name, p in draw(0).items()]


def train(optimizer: Any, named: Any, steps: range = range(1, STEPS + 1)) -> None:
    for t in steps:
        for name, p in named:
            p.grad = torch.from_numpy(draw(t)[name]).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()


def train_with_means(optimizer: Any, named: Any, steps: int) -> None:
    """Each step with the mean of so many gradients, in float64."""
    for step in range(steps):
        parts = [draw(WANTED * step + i) for i in range(1, WANTED + 1)]
        for name, p in named:
            p.grad = torch.from_numpy(np.mean([part[name] for part in parts], axis=0))
        optimizer.step()


def train_numpy(optimizer: Any, steps: range = range(1, STEPS + 1)) -> Any:
    params = draw(0)
    for t in steps:
        optimizer.step(params, draw(t))
    return params


def largest_error(named: Any, others: Any) -> float:
    return max(float((p.detach() - q.detach()).abs().max()) for (_, p), (_, q) in zip(named, others, strict=True))


def error_to_numpy(named: Any, params: Any) -> float:
    return max(float(np.max(np.abs(p.detach().numpy() - params[name]))) for name, p in named)


# ---- by every engine


@ENGINES
@pytest.mark.parametrize(("rule", "kind"), [*(("AdamW", kind) for kind in KINDS), ("LAMB", "skip"), ("Kron", "skip")])
def test_spikes_are_those_of_numpy(rule: str, kind: str, engine: Any) -> None:
    wanted = getattr(thalweg.numpy, rule)(**OPTIONS[rule], spikes=KINDS[kind])
    params, named = train_numpy(wanted), model()
    optimizer = getattr(thalweg.torch, rule)(named, engine=engine, spikes=KINDS[kind], **OPTIONS[rule])
    train(optimizer, named)
    assert error_to_numpy(named, params) < FLOAT64
    assert all(optimizer.state[p]["step"] == wanted.state[name]["step"] for name, p in named)
    assert optimizer.skipped == factors_by_hand(KINDS[kind]).count(None)
    found, told = optimizer.stats()["a"], wanted.stats()["a"]
    for key in ("joint_norm", "joint_limit", "spikes"):
        assert found[key] == pytest.approx(told[key], rel=FLOAT64)
    assert len(optimizer._steps) == 1, "the step was laid out once"


@ENGINES
@pytest.mark.parametrize("rule", OPTIONS)
@pytest.mark.parametrize("options", one_in(2, [dict(max_grad_norm=0.5, on_nonfinite="skip"), {}]), ids=str)
def test_accumulated_gradients_are_one_step_with_their_mean(rule: str, engine: Any, options: Any) -> None:
    (named, others), make = (model(), model()), getattr(thalweg.torch, rule)
    optimizer = make(named, engine=engine, accumulate=WANTED, **OPTIONS[rule], **options)
    train(optimizer, named, range(1, WANTED))
    assert largest_error(named, others) == 0, "nothing moves before the last call"
    assert optimizer.state[named[0][1]]["step"] == 0
    train(optimizer, named, range(WANTED, 4 * WANTED + 1))
    train_with_means(make(others, engine="reference", **OPTIONS[rule], **options), others, 4)
    assert largest_error(named, others) < FLOAT64
    assert optimizer.state[named[0][1]]["step"] == 4
    assert len(optimizer._steps) == 1, "the step was laid out once"


def test_accumulated_gradients_are_those_of_numpy() -> None:
    named = model()
    train(thalweg.torch.AdamW(named, lr=0.1, accumulate=3), named, range(1, 10))
    params = train_numpy(thalweg.numpy.AdamW(lr=0.1, accumulate=3), range(1, 10))
    assert error_to_numpy(named, params) < FLOAT64


def test_spikes_are_looked_for_in_the_mean() -> None:
    named, others, spikes = model(), model(), Spikes(window=4, z=2.0, action="clip")
    optimizer = thalweg.torch.AdamW(named, lr=0.1, accumulate=WANTED, spikes=spikes)
    train(optimizer, named, range(1, 8 * WANTED + 1))
    once = thalweg.torch.AdamW(others, lr=0.1, spikes=spikes)
    train_with_means(once, others, 8)
    assert largest_error(named, others) < FLOAT64
    assert optimizer.stats()["a"]["spikes"] == once.stats()["a"]["spikes"] > 0


def test_bfloat16_is_added_up_in_float32() -> None:
    """A gradient of 1 and many that bfloat16 would round away beside it."""
    p = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    optimizer = thalweg.torch.SGD([p], lr=1.0, accumulate=256)
    for call in range(256):
        p.grad = torch.full_like(p, 1.0 if call == 0 else 2.0**-10)
        optimizer.step()
    # (1 + 255 / 1024) / 256 has no more digits than float32, and is rounded once to the parameter
    assert torch.equal(p.detach(), torch.full_like(p, -(1 + 255 / 1024) / 256))
    assert optimizer.state[p]["accumulated"].dtype == torch.float32


def test_calls_between_steps_add_to_the_same_lists() -> None:
    named = model()
    optimizer = thalweg.torch.AdamW(named, lr=0.1, accumulate=WANTED)
    train(optimizer, named, range(1, 3))
    found = optimizer._accumulation.latest
    train(optimizer, named, range(3, 2 * WANTED))
    assert optimizer._accumulation.latest is found is not None, "gradients moved, and nothing else"
    named[0][1].grad = torch.ones_like(named[0][1]).to_sparse()
    waiting = optimizer.state[named[1][1]]["accumulated"].clone()
    with pytest.raises(ParameterError, match="the gradient of 'a' is sparse"):
        optimizer.step()
    assert torch.equal(optimizer.state[named[1][1]]["accumulated"], waiting)


def test_a_parameter_without_a_gradient_counts_as_zero_or_is_left_alone() -> None:
    named = [(name, torch.nn.Parameter(torch.zeros(2))) for name in "abc"]
    optimizer = thalweg.torch.SGD(named, lr=1.0, accumulate=2)
    for present in (("a", "b"), ("a",)):
        for name, p in named:
            p.grad = torch.ones(2) if name in present else None
        optimizer.step()
    assert [p.detach()[0].item() for _, p in named] == [-1.0, -0.5, 0.0]
    assert named[2][1] not in optimizer.state


def test_a_scaler_leaves_its_scale_to_the_step() -> None:
    """As a GradScaler does on GPUs: norms are those without its scale."""
    named, others = model(), model()
    plain, scaled = (thalweg.torch.AdamW(own, lr=0.1, spikes=KINDS["clip"]) for own in (named, others))
    train(plain, named)
    for t in range(1, STEPS + 1):
        for name, p in others:
            p.grad = torch.from_numpy(draw(t)[name]) * 1024
        scaled.grad_scale, scaled.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
        scaled.step()
    assert all(torch.allclose(p, q, rtol=1e-12, atol=0) for (_, p), (_, q) in zip(named, others, strict=True))


@pytest.mark.parametrize(("action", "kind"), [("raise", "clip"), ("skip", "skip")])
def test_steps_that_are_not_finite(action: Any, kind: str) -> None:
    named = model()
    optimizer = thalweg.torch.AdamW(named, lr=0.1, spikes=KINDS[kind], on_nonfinite=action)
    train(optimizer, named, range(1, 10))
    p = named[0][1]
    kept = optimizer.state[p]["spikes"].clone()
    for _, each in named:
        each.grad = torch.full_like(each, float("nan"))
    if action == "raise":
        with pytest.raises(NonFiniteError):
            optimizer.step()
        assert torch.equal(optimizer.state[p]["spikes"], kept)
    else:
        optimizer.step()
        assert optimizer.skipped == 2
        assert optimizer.stats()["a"]["spikes"] == 1
        assert optimizer.state[p]["step"] == 8


@ENGINES
def test_a_spike_that_is_skipped_is_no_step_that_is_not_finite(engine: Any) -> None:
    named = model()
    optimizer = thalweg.torch.AdamW(named, lr=0.1, spikes=KINDS["skip"], on_nonfinite="raise", engine=engine)
    train(optimizer, named)
    assert optimizer.skipped == factors_by_hand(KINDS["skip"]).count(None) == 2
    params = train_numpy(thalweg.numpy.AdamW(lr=0.1, spikes=KINDS["skip"], on_nonfinite="raise"))
    assert error_to_numpy(named, params) < FLOAT64


# ---- checkpoints and mixtures


@pytest.mark.parametrize("options", [dict(accumulate=WANTED), dict(spikes=KINDS["skip"])], ids=["accumulate", "spikes"])
def test_checkpoints_and_copies_go_on_in_the_middle(options: Any) -> None:
    named = model()
    optimizer = thalweg.torch.AdamW(named, lr=0.1, **options)
    train(optimizer, named, range(1, 8))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = [(name, torch.nn.Parameter(p.detach().clone())) for name, p in named]
    loaded = thalweg.torch.AdamW(others, lr=0.1)  # options come with the state
    loaded.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy(optimizer)
    again = list(zip("ab", copied.parameters(), strict=True))
    for each, own in ((optimizer, named), (loaded, others), (copied, again)):
        train(each, own, range(8, STEPS))
    assert largest_error(named, others) == largest_error(named, again) == 0
    if "spikes" in options:
        assert loaded.stats()["a"]["spikes"] == optimizer.skipped > 0
    else:
        assert loaded.param_groups[0]["accumulated"] == (STEPS - 1) % WANTED > 0
        with pytest.raises(StateError, match="gradients of 3 steps wait for others"):
            thalweg.torch.export_state(optimizer)


def test_state_goes_to_other_front_ends_and_comes_back() -> None:
    named = model()
    optimizer = thalweg.torch.AdamW(named, lr=0.1, spikes=KINDS["clip"])
    train(optimizer, named, range(1, 9))
    arrays = thalweg.numpy.AdamW(lr=0.1, spikes=KINDS["clip"])
    arrays.load_state_dict(thalweg.torch.export_state(optimizer))
    arrays.step({name: p.detach().numpy().copy() for name, p in named}, draw(9))
    thalweg.torch.import_state(optimizer, arrays.state_dict())
    assert np.array_equal(optimizer.state[named[0][1]]["spikes"].numpy(), arrays.state["a"]["spikes"])


def test_a_run_gains_and_drops_spikes() -> None:
    named = model()
    before = thalweg.torch.AdamW(named, lr=0.1)
    train(before, named, range(1, 3))
    optimizer = thalweg.torch.AdamW(named, lr=0.1, spikes=KINDS["skip"])
    optimizer.load_state_dict(before.state_dict())
    with pytest.warns(ResumeWarning, match="'spikes' of 'a' is new"):
        train(optimizer, named, range(3, 4))
    after = thalweg.torch.AdamW(named, lr=0.1)
    after.load_state_dict(optimizer.state_dict())
    after.param_groups[0]["spikes"] = False
    with pytest.warns(ResumeWarning, match="'spikes' of 'a' is dropped"):
        train(after, named, range(4, 5))
    assert "spikes" not in after.state[named[0][1]]


def test_what_waits_is_dropped_with_the_option() -> None:
    named, others = model(), model()
    optimizer, plain = thalweg.torch.SGD(named, lr=0.1, accumulate=WANTED), thalweg.torch.SGD(others, lr=0.1)
    train(optimizer, named, range(1, 3))
    optimizer.param_groups[0]["accumulate"] = None
    with pytest.warns(ResumeWarning, match="'accumulated' of 'a' is dropped"):
        train(optimizer, named, range(3, 4))
    train(plain, others, range(3, 4))
    assert largest_error(named, others) == 0


def test_a_mixture_has_one_norm() -> None:
    entries = [("a", thalweg.torch.SGD.options(lr=0.1)), ("b", thalweg.torch.AdamW.options(lr=0.1))]
    named = model()
    optimizer = thalweg.torch.Mixture(named, entries, spikes=KINDS["skip"])
    optimizer.add_param_group({"params": [("c", torch.nn.Parameter(torch.ones(2)))], "rule": "SGD"})
    train(optimizer, named)
    params, factors = draw(0), factors_by_hand(KINDS["skip"])
    apart = {"a": thalweg.numpy.SGD(lr=0.1), "b": thalweg.numpy.AdamW(lr=0.1)}
    for t, factor in enumerate(factors, 1):
        for name, arrays in apart.items() if factor is not None else ():
            arrays.step({name: params[name]}, {name: draw(t)[name]})
    assert optimizer.skipped == factors.count(None) == 2
    assert error_to_numpy(named, params) < FLOAT64
    with pytest.raises(OptionError, match="spikes concerns the whole step: give it to the mixture"):
        thalweg.torch.SGD.options(lr=0.1, spikes=True)


@pytest.mark.parametrize(
    ("options", "by_step", "in_backward"),
    [
        (
            dict(accumulate=2),
            "accumulate counts steps of all parameters",
            "accumulate adds up gradients that step_in_ba",
        ),
        *(
            (dict(spikes=Spikes(action=each)), *["spikes needs all gradients of a step at once"] * 2)
            for each in ("skip", "clip")
        ),
    ],
    ids=["accumulate", "skip", "clip"],
)
def test_what_needs_all_gradients_is_refused_one_by_one(options: Any, by_step: str, in_backward: str) -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = thalweg.torch.AdamW(layer.named_parameters(), lr=0.1, **options)
    layer.weight.grad = torch.ones(2, 2)
    with pytest.raises(OptionError, match=by_step):
        optimizer.step_parameter(layer.weight)
    with pytest.raises(OptionError, match=in_backward):
        thalweg.torch.step_in_backward(layer, optimizer)


def test_what_is_refused() -> None:
    layer = torch.nn.Linear(2, 2)
    groups = [{"params": [layer.weight]}, {"params": [layer.bias], "spikes": False}]
    with pytest.raises(OptionError, match="spikes concerns the whole step"):
        thalweg.torch.AdamW(groups, lr=0.1, spikes=True)
    for bad in (0, -1, 1.5, "2"):
        with pytest.raises(OptionError, match="accumulate"):
            thalweg.torch.AdamW(layer.parameters(), lr=0.1, accumulate=bad)
    assert not thalweg.torch.AdamW(layer.parameters(), lr=0.1, accumulate=2)._step_supports_amp_scaling
