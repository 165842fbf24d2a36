"""What is around a rule, in torch: by every engine, in groups and mixtures, in checkpoints; averages in place."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import numpy as np
import pytest
from lanes import by_day, by_turns, one_in

pytest.importorskip("torch")

import torch
from composed import RULES, STEPS, Damped, case_of, damped, draw, pairs, take_steps
from tolerances import FLOAT64, FUSED_FLIPPED

import thalweg.torch
from thalweg import OptionError, ResumeWarning
from thalweg.rules import around

ENGINES = ("reference", "foreach", "auto")
#: In the day, each rule with something, by one engine after the other; at night all of them.
DAY = [("AdamW", "averaged"), ("AdamW", "both"), ("Kron", "mean"), ("LAMB", "cautious")]
DAY += [("Adafactor", "schedule-free"), ("SGD", "grafted")]
DAY += [(name, what) for name in ("Muon", "Kron", "SOAP") for what in ("cautious", "averaged", "grafted")]
CASES = by_day(
    ((*pair, ENGINES[place % 3]) for place, pair in enumerate(DAY)),
    ((*pair, engine) for pair in pairs() for engine in ENGINES),
)


def error(found: Any, wanted: Any) -> float:
    return float(np.max(np.abs(found.detach().numpy() - wanted)) / np.max(np.abs(wanted - draw(0))))


def model(count: int = 1) -> list[tuple[str, Any]]:
    return [(f"w{i}", torch.nn.Parameter(torch.from_numpy(draw(0)))) for i in range(count)]


def train(optimizer: Any, named: Any, steps: range = range(1, STEPS + 1)) -> None:
    for t in steps:
        for _, p in named:
            p.grad = torch.from_numpy(draw(t)).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize(("name", "what", "engine"), CASES)
def test_every_engine_is_a_plain_loop(name: str, what: str, engine: Any) -> None:
    rule, lr, options, wanted = case_of(name, what)
    named = model(2)  # which go as one stack, where a rule has stacks
    optimizer = thalweg.torch.optimizer(type(rule))(named, lr=lr, engine=engine, **options)
    train(optimizer, named)
    for _, p in named:
        assert error(p, wanted["p"]) < FLOAT64
    if evaluated := wanted.keys() & {"average", "x"}:
        before = [p.detach().clone() for _, p in named]
        with optimizer.averaged():
            assert error(named[0][1], wanted[evaluated.pop()]) < FLOAT64
        assert all(torch.equal(p, own) for (_, p), own in zip(named, before, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_averages_are_put_in_place_and_taken_out_to_the_bit(dtype: str) -> None:
    named = [(name, torch.nn.Parameter(p.detach().to(getattr(torch, dtype)))) for name, p in model(2)]
    optimizer = thalweg.torch.AdamW(
        named, lr=0.1, averaged=0.9, rounding="compensated", overrides=[("w1", dict(averaged=None))]
    )
    with optimizer.averaged():  # before the first step, the average is the parameter
        pass
    train(optimizer, named)
    before = [p.detach().clone() for _, p in named]
    version, record = named[0][1].data_ptr(), optimizer.state[named[0][1]].get("rounding_error")
    record = None if record is None else record.clone()
    with contextlib.suppress(ZeroDivisionError), optimizer.averaged():
        assert optimizer.state[named[0][1]]["average"].dtype is torch.float32
        assert not torch.equal(named[0][1], before[0])
        assert torch.equal(named[1][1], before[1])
        with pytest.raises(OptionError, match="a step in eval mode"):
            optimizer.step()
        raise ZeroDivisionError
    assert all(torch.equal(p, own) for (_, p), own in zip(named, before, strict=True))
    assert named[0][1].data_ptr() == version
    assert record is None or torch.equal(record, optimizer.state[named[0][1]]["rounding_error"])
    optimizer.step()


def test_a_model_of_averages_is_exported() -> None:
    layer = torch.nn.Linear(4, 6)
    first = layer.weight.detach().clone()
    optimizer = thalweg.torch.AdamW(layer.named_parameters(), lr=0.1, averaged=0.5)
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved, before = optimizer.averaged_state_dict(layer), copy.deepcopy(layer.state_dict())
    assert torch.allclose(saved["weight"], 0.5 * (first + layer.weight), rtol=1e-6)
    assert torch.equal(layer.weight, before["weight"])
    with pytest.raises(OptionError, match="no parameter has an average"):
        thalweg.torch.AdamW(layer.parameters(), lr=0.1).averaged_state_dict(layer)


@by_turns()
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["AdamW", "Muon", "Kron"])
def test_one_of_ones_own(name: str, engine: Any) -> None:
    (rule, lr), named = RULES[name], model(2)
    options = {key: value for key, value in vars(rule).items() if value != vars(type(rule)())[key]}
    made = thalweg.torch.optimizer(around(type(rule), Damped))
    optimizer = made(named, lr=lr, memory=0.8, engine=engine, **options)
    train(optimizer, named)
    assert error(named[0][1], take_steps(rule, lr, damped(0.8))["p"]) < FLOAT64
    again = copy.deepcopy(optimizer)
    assert type(again) is made


# ---- groups, mixtures, checkpoints


def test_groups_and_mixtures_have_their_own() -> None:
    named = model(2)
    groups = [dict(params=[named[0]], cautious=True), dict(params=[named[1]])]
    optimizer = thalweg.torch.AdamW(groups, lr=0.05, weight_decay=0.1)
    assert optimizer.param_groups[0]["cautious"] is True
    assert "cautious" not in optimizer.param_groups[1]
    train(optimizer, named)
    assert error(named[0][1], case_of("AdamW", "cautious")[3]["p"]) < FLOAT64
    mixed = model(2)
    averaged = thalweg.torch.AdamW.options(lr=0.05, weight_decay=0.1, averaged=0.7)
    entries = [("w0", averaged), ("*", thalweg.torch.SGD.options(lr=0.1))]
    mixture = thalweg.torch.Mixture(mixed, entries)
    train(mixture, mixed)
    with mixture.averaged():
        assert error(mixed[0][1], case_of("AdamW", "averaged")[3]["average"]) < FLOAT64
    assert "average" not in mixture.state[mixed[1][1]]


def through_a_file(optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("what", one_in(2, ["averaged", "cautious", "grafted", "schedule-free"]))
def test_checkpoints_carry_it(what: str) -> None:
    _, lr, options, wanted = case_of("AdamW", what)
    named = model()
    optimizer = thalweg.torch.AdamW(named, lr=lr, **options)
    train(optimizer, named, range(1, 4))
    saved = through_a_file(optimizer)
    again = thalweg.torch.AdamW(named, lr=lr)  # options come with the state, as all do
    again.load_state_dict(saved)
    train(again, named, range(4, STEPS + 1))
    assert error(named[0][1], wanted["p"]) < FLOAT64
    if what == "grafted":
        assert again._groups.make_settings(again.param_groups[0]).base.rule.graft == options["graft"]
    copied = copy.deepcopy(again)
    assert copied.param_groups[0].keys() == again.param_groups[0].keys()


def test_a_run_gains_and_drops_an_average_and_says_so() -> None:
    named = model()
    optimizer = thalweg.torch.AdamW(named, lr=0.05)
    train(optimizer, named, range(1, 4))
    again = thalweg.torch.AdamW(named, lr=0.05, averaged=0.7)
    with pytest.warns(ResumeWarning, match="was saved without averaged, and the run goes on with it"):
        again.load_state_dict(through_a_file(optimizer))
    assert again.param_groups[0]["averaged"] == 0.7
    p = named[0][1]
    before = p.detach().clone()
    with again.averaged():
        assert torch.equal(p, before)
    with pytest.warns(ResumeWarning, match="'average' of 'w0' is new and begins with this step"):
        train(again, named, range(4, 5))
    assert not torch.equal(before, p)
    wanted = 0.7 * before + 0.3 * p.detach()
    with again.averaged():
        assert torch.allclose(p, wanted, rtol=1e-12)
    without = thalweg.torch.AdamW(named, lr=0.05)
    without.load_state_dict(through_a_file(again))
    without.param_groups[0]["averaged"] = None
    with pytest.warns(ResumeWarning, match="'average' of 'w0' is dropped"):
        train(without, named, range(5, 6))
    assert "average" not in without.state[p]
    without.param_groups[0]["averaged"] = 0.9
    train(without, named, range(6, 7))
    assert "average" in without.state[p]


@pytest.mark.parametrize("options", [dict(averaged=0.7), dict(cautious=True)])
def test_runs_of_torch_go_on_with_it(options: Any) -> None:
    named = model()
    theirs = torch.optim.AdamW([p for _, p in named], lr=0.05)
    train(theirs, named, range(1, 3))
    ours = thalweg.torch.AdamW([p for _, p in named], lr=0.05, **options)
    thalweg.torch.import_peer(ours, theirs.state_dict(), "torch.AdamW")
    before = named[0][1].detach().clone()
    with pytest.warns(ResumeWarning, match="is new") if "averaged" in options else contextlib.nullcontext():
        train(ours, named, range(3, 4))
    if "averaged" in options:
        wanted = 0.7 * before + 0.3 * named[0][1].detach()
        with ours.averaged():
            assert torch.allclose(named[0][1], wanted, rtol=1e-12)


HANDLED: dict[str, dict[str, Any]] = {
    "eight bits": dict(state_dtype="int8"),
    "skip": dict(on_nonfinite="skip"),
    "compensated": dict(rounding="compensated"),
    "stochastic": dict(rounding="stochastic", state_dtype="bfloat16", state_rounding="stochastic"),
    "clipped": dict(max_grad_norm=0.5),
}


@by_turns()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("handled", one_in(2, HANDLED))
def test_native_code_handles_it_as_the_reference_does(handled: str, dtype: str) -> None:
    """However state is kept and steps are rounded, skipped or clipped."""
    found = {}
    for engine in ("fused", "reference"):
        generator = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.randn(64, 64, generator=generator).to(getattr(torch, dtype)))
        optimizer = thalweg.torch.AdamW(
            [p], lr=0.01, engine=engine, cautious=True, averaged=0.7, weight_decay=0.1, **HANDLED[handled]
        )
        for t in range(4):
            p.grad = torch.randn(64, 64, generator=generator).to(p.dtype)
            p.grad[3, 3] = float("nan") if handled == "skip" and t == 2 else 1.0
            optimizer.step()
        assert optimizer.skipped == (1 if handled == "skip" else 0)
        found[engine] = p.detach().float(), optimizer.state[p]["average"]
    for ours, wanted in zip(found["fused"], found["reference"], strict=True):
        others = (ours - wanted).abs() > 1e-5 * wanted.abs().max()
        assert others.float().mean() <= FUSED_FLIPPED, "but for what is rounded to the other neighbour"


@pytest.mark.parametrize("options", [{"cautious": True}, {"averaged": 0.9}], ids=str)
def test_blocks_of_fused_weights(options: dict[str, Any]) -> None:
    """Each block has a norm of its own, which is no fault of a rule with something around it."""
    p = torch.nn.Parameter(torch.eye(12, 4))
    p.grad = torch.ones(12, 4) + torch.eye(12, 4)
    optimizer = thalweg.torch.Muon([p], lr=0.1, split=3, **options)
    optimizer.step()
    assert bool(torch.isfinite(p).all())


@pytest.mark.parametrize("change", ["cast", "replaced", "channels_last"])
def test_weights_come_back_whatever_became_of_a_parameter_within(change: str) -> None:
    layer = torch.nn.Conv2d(3, 4, 3)
    optimizer = thalweg.torch.AdamW(layer.named_parameters(), lr=0.1, averaged=0.5)
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = layer.weight.detach().clone()
    with optimizer.averaged():
        if change == "cast":
            layer.bfloat16()
        elif change == "replaced":
            layer.weight.data = torch.zeros(2)
        else:
            layer.to(memory_format=torch.channels_last)
    assert torch.equal(layer.weight, before.to(layer.weight.dtype))
    assert layer.weight.dtype is (torch.bfloat16 if change == "cast" else torch.float32)


def test_autocast_sees_averages_and_weights_again() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    optimizer = thalweg.torch.SGD(layer.named_parameters(), lr=1.0, averaged=0.5)
    layer.weight.grad = torch.ones(4, 4)
    x = torch.eye(4)
    with torch.autocast("cpu", torch.bfloat16):
        optimizer.step()
        outputs = [layer(x)]
        with optimizer.averaged():
            outputs.append(layer(x))
        outputs.append(layer(x))
    assert torch.equal(outputs[0], outputs[2])
    assert torch.allclose(outputs[1].float(), outputs[0].float() + 0.5, atol=0.02)
