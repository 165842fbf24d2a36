"""Runs that optimizers of torch, transformers and timm have started go on as they would have gone on there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from published_runs import peer
from tolerances import CONTINUED

import thalweg.torch
from thalweg.check.problem import weights
from thalweg.errors import ResumeWarning, StateError
from thalweg.torch import SGD, Adafactor, AdamW, Mixture, Muon, import_peer
from thalweg.torch.peers import TABLE

#: Steps of the source, and steps in all.
BEFORE, IN_ALL = 5, 15
SHAPES = {"p0": (20, 18), "p1": (18, 24), "p2": (18, 17, 3, 2), "p3": (17,)}
MATRICES = {"p0": (20, 18), "p1": (18, 24), "p2": (16, 16), "p3": (1, 9)}


@dataclass(frozen=True)
class Run:
    """A published optimizer with its options, and ours as it is constructed."""

    source: str
    theirs: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    lr: float | None = 0.02


LAMB = dict(betas=(0.8, 0.95), weight_decay=0.1, trust_clip=True, always_adapt=True, decoupled_decay=True)
RUNS = {
    "SGD": Run("torch.SGD", dict(momentum=0.9, dampening=0.5, weight_decay=0.1)),
    "SGD with nesterov": Run("torch.SGD", dict(momentum=0.9, nesterov=True, maximize=True)),
    "SGD without momentum": Run("torch.SGD", dict(weight_decay=0.1)),
    "Adam": Run("torch.Adam", dict(betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, amsgrad=True)),
    "AdamW": Run("torch.AdamW", dict(betas=(0.8, 0.9), weight_decay=0.1)),
    "AdamW with amsgrad": Run("torch.AdamW", dict(amsgrad=True, maximize=True), dict(betas=(0.5, 0.6))),
    "torch's Adafactor": Run("torch.Adafactor", dict(weight_decay=0.1, d=1.5, beta2_decay=-0.7)),
    "Muon": Run("torch.Muon", dict(adjust_lr_fn="match_rms_adamw", weight_decay=0.2), shapes=MATRICES),
    "transformers' Adafactor": Run("transformers.Adafactor", dict(weight_decay=0.1, relative_step=False, beta1=0.9)),
    "transformers' Adafactor without lr": Run("transformers.Adafactor", dict(warmup_init=True), lr=None),
    "Lamb": Run("timm.Lamb", LAMB),
    "Lamb by default": Run("timm.Lamb"),
    "Lars": Run("timm.Lars", dict(momentum=0.9, weight_decay=0.1, nesterov=True, trust_clip=True)),
}
MODULES = {"torch": "torch.optim", "transformers": "transformers.optimization"}


def parameters(run: Run, dtype: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in run.shapes.items()}
    return {name: torch.nn.Parameter(x.to(getattr(torch, dtype))) for name, x in drawn.items()}


def two_groups(run: Run, params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first two parameters, and the others at half of the rate."""
    named = list(params.items())
    return [{"params": named[:2]}, {"params": named[2:], **({} if run.lr is None else {"lr": run.lr / 2})}]


def published(run: Run, params: Any) -> Any:
    package, _, kind = run.source.partition(".")
    module = peer(MODULES.get(package, f"timm.optim.{kind.lower()}"))
    return getattr(module, kind)(params, **{"lr": run.lr, **run.theirs})


def ours(run: Run, params: Any) -> Any:
    rule = next(source.rule for source in TABLE if source.name == run.source)
    return getattr(thalweg.torch, rule.__name__)(params, run.lr, **run.ours)


def train(params: Mapping[str, Any], optimizer: Any, scheduler: Any, first: int, last: int) -> None:
    """With gradients that depend on the step alone."""
    for t in range(first, last):
        generator = torch.Generator().manual_seed(t)
        for p in params.values():
            p.grad = (torch.randn(p.shape, generator=generator) * (1 + t % 3)).to(p.dtype)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def scheduler_of(run: Run, optimizer: Any) -> Any:
    falling = torch.optim.lr_scheduler.LambdaLR
    return None if run.lr is None else falling(optimizer, lambda epoch: 1 / (1 + epoch))


def test_every_source_of_the_table_has_a_run() -> None:
    assert {run.source for run in RUNS.values()} == {source.name for source in TABLE}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::thalweg.ResumeWarning")  # options are those of the run, whatever ours had
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_run_is_continued(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two groups, in the middle of a schedule."""
    run = RUNS[name]
    if run.source == "torch.Muon":  # products in full precision: sums in bfloat16 depend on the kind of CPU
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    start = parameters(run, dtype)
    whole, parted = copy.deepcopy(start), copy.deepcopy(start)
    theirs = published(run, two_groups(run, whole))
    schedule = scheduler_of(run, theirs)
    train(whole, theirs, schedule, 0, BEFORE)
    saved = copy.deepcopy((theirs.state_dict(), schedule and schedule.state_dict()))
    for key, p in whole.items():
        parted[key].data.copy_(p.data)
    train(whole, theirs, schedule, BEFORE, IN_ALL)
    mine = ours(run, two_groups(run, parted))
    resumed = scheduler_of(run, mine)
    import_peer(mine, saved[0])
    if resumed:
        resumed.load_state_dict(saved[1])
    if run.source == "torch.Muon":
        for group in mine.param_groups:
            group["ns_dtype"] = None
    train(parted, mine, resumed, BEFORE, IN_ALL)
    for key, p in whole.items():
        wrong = (p - parted[key]).abs().max()
        size = (p - start[key]).abs().max() if dtype == "float64" else p.abs().max()
        assert wrong <= CONTINUED[dtype] * size, key


# ---- what is taken over, and how it is found

SMALL = {"a": (6, 4), "b": (4, 6), "c": (5,)}


def tensors(**shapes: tuple[int, ...]) -> dict[str, Any]:
    shapes = shapes or SMALL
    return dict(zip(shapes, weights([*shapes.values()], torch.float64), strict=True))


def stepped(kind: Any, *args: Any, **options: Any) -> Any:
    """An optimizer after three steps."""
    params = tensors()
    optimizer = kind(params.items(), *args, **options)
    train(params, optimizer, None, 0, 3)
    return optimizer


def adamw(**options: Any) -> dict[str, Any]:
    return stepped(torch.optim.AdamW, **options).state_dict()


@pytest.mark.parametrize("how", ["names", "other order", "wrapped", "unnamed", "file"])
def test_parameters_are_matched_by_name_or_else_by_position(how: str, tmp_path: Path) -> None:
    there, params = stepped(torch.optim.AdamW), tensors()
    moments = {name: there.state[p]["exp_avg"] for name, p in zip(SMALL, there.param_groups[0]["params"], strict=True)}
    saved: Any = there.state_dict()
    if how == "wrapped":
        saved["param_groups"][0]["param_names"] = [f"module._orig_mod.{name}" for name in SMALL]
    elif how == "file":
        torch.save(saved, tmp_path / "optimizer.pt")
        saved = tmp_path / "optimizer.pt"
    pairs = list(params.items())[:: -1 if how == "other order" else 1]
    mine = AdamW([p for _, p in pairs] if how == "unnamed" else pairs)
    import_peer(mine, saved)
    for name, p in params.items():
        assert torch.equal(mine.state[p]["exp_avg"], moments[name])
        assert mine.state[p]["step"] == 3


def test_options_become_those_of_the_run_and_a_warning_tells_which() -> None:
    saved = adamw(lr=0.5, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, amsgrad=True, maximize=True)
    mine = AdamW(tensors().items(), 0.01, betas=(0.8, 0.9), nesterov=True, max_grad_norm=1.0)
    words = "options are now those of the run of torch.AdamW: amsgrad=True (here it was False), eps=0.001 (here it was "
    with pytest.warns(ResumeWarning) as told:
        import_peer(mine, saved)
    assert [str(warning.message) for warning in told] == [
        f"{words}1e-08), maximize=True (here it was False), nesterov=False (here it was True), "
        "weight_decay=0.1 (here it was 0.01)"
    ]
    assert told[0].filename == __file__
    (group,) = mine.param_groups
    assert (group["lr"], group["weight_decay"], group["nesterov"]) == (0.5, 0.1, False)
    assert group["max_grad_norm"] == 1.0  # which the source does not have


@pytest.mark.parametrize("scaling", ["original", "spectral_unclamped"])
def test_scalings_that_this_version_of_torch_may_not_know_yet(scaling: str) -> None:
    params = tensors(a=(4, 8))
    theirs = torch.optim.Muon(params.items(), lr=0.02)
    train(params, theirs, None, 0, 1)
    mine = Muon(params.items(), lr=0.02, variant="torch", scaling="match_rms_adamw")
    with pytest.warns(ResumeWarning, match=f"scaling='{scaling}' .here it was 'match_rms_adamw'"):
        import_peer(mine, changed(theirs.state_dict(), adjust_lr_fn=scaling), "torch.Muon")
    assert mine.param_groups[0]["scaling"] == scaling


#: By source: its options and ours, as the docs write it.
EQUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "torch.SGD": (dict(momentum=0.9), dict(momentum=0.9)),
    "torch.Adam": ({}, dict(weight_decay=0.0, decoupled=False)),
    "torch.AdamW": ({}, {}),
    "torch.Adafactor": (dict(eps=(2.0**-23, 1e-3)), dict(variant="torch")),
    "torch.Muon": ({}, dict(variant="torch")),
    "transformers.Adafactor": (dict(relative_step=False), dict(variant="hf")),
    "timm.Lamb": ({}, dict(variant="apex")),
    "timm.Lars": ({}, dict(variant="timm")),
}


@pytest.mark.parametrize("source", EQUAL)
@pytest.mark.filterwarnings("error::thalweg.ResumeWarning")
def test_no_word_where_ours_was_constructed_equal(source: str) -> None:
    run = Run(source, *EQUAL[source])
    params = {name: p for name, p in tensors().items() if source != "torch.Muon" or p.ndim == 2}
    theirs = published(run, params.items())
    train(params, theirs, None, 0, 3)
    import_peer(ours(run, params.items()), theirs.state_dict())


def test_a_rate_in_a_tensor_and_a_parameter_without_state() -> None:
    saved, params = adamw(), tensors()
    del saved["state"][1]
    saved["param_groups"][0].update(lr=torch.tensor(0.5), initial_lr=2.0)
    mine = AdamW(params.items(), lr=torch.tensor(0.1))
    import_peer(mine, saved)
    assert [p in mine.state for p in params.values()] == [True, False, True]
    assert torch.equal(mine.param_groups[0]["lr"], torch.tensor(0.5))
    assert mine.param_groups[0]["initial_lr"] == 2.0


def test_state_of_16_bits_is_widened_and_codes_are_made_afterwards() -> None:
    params = {"w": torch.nn.Parameter(torch.randn(64, 64).bfloat16())}
    theirs = torch.optim.AdamW(params.items())
    train(params, theirs, None, 0, 3)
    lean = AdamW(params.items(), state_dtype="int8")
    with pytest.raises(StateError, match=r"'w' does not fit its options: .*exp_avg_scale.*state_dtype and"):
        import_peer(lean, theirs.state_dict())
    mine = AdamW(params.items())
    import_peer(mine, theirs.state_dict())
    assert mine.state[params["w"]]["exp_avg"].dtype == torch.float32
    assert torch.equal(mine.state[params["w"]]["exp_avg"], theirs.state[params["w"]]["exp_avg"].float())
    mine.param_groups[0]["state_dtype"] = "int8"
    with pytest.warns(ResumeWarning, match="now has exp_avg_scale"):
        train(params, mine, None, 3, 4)
    assert mine.state[params["w"]]["exp_avg"].dtype == torch.int8


# ---- what is refused, and changes nothing


def changed(saved: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A state with other options in its groups; None takes one away."""
    for group in saved["param_groups"]:
        group.update(options)
        for name in [name for name, value in options.items() if value is None]:
            del group[name]
    return saved


def with_entry(key: str, value: Any) -> dict[str, Any]:
    """A state that has something else, or nothing, under a key of its second parameter."""
    saved = adamw()
    saved["state"][1][key] = value
    if value is None:
        del saved["state"][1][key]
    return saved


def of_peer(source: str, *args: Any, **options: Any) -> dict[str, Any]:
    package, _, kind = source.partition(".")
    module = peer(MODULES.get(package, f"timm.optim.{kind.lower()}"))
    return stepped(getattr(module, kind), *args, **options).state_dict()


def two_dtypes() -> Any:
    params = [("a", torch.nn.Parameter(torch.ones(3, 3))), ("b", torch.nn.Parameter(torch.ones(3, 3).bfloat16()))]
    return params, torch.optim.Adafactor(params).state_dict()


def ours_of(kind: Any = AdamW, *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: kind(tensors().items(), *args, **options)


KNOWN = (
    "known are torch.SGD, torch.Adam (decoupled_weight_decay=False), torch.AdamW (decoupled_weight_decay=True), "
    "torch.Adafactor, torch.Muon, transformers.Adafactor, timm.Lamb (caution=False, corrected_weight_decay=False), "
    "timm.Lars (dampening=0)"
)
UNKNOWN, STEP = f"no state of an optimizer that is known: {KNOWN}", "state['step'] of 'b' must be a whole number"
LIKE_B = torch.zeros(4, 6)


@dataclass(frozen=True)
class Refusal:
    """What was saved, the words of the error, our optimizer."""

    saved: Callable[[], Any]
    words: str
    make: Callable[[], Any] = lambda: AdamW(tensors().items())
    source: str | None = None


REFUSED = {
    "a source that is not in the table": Refusal(lambda: stepped(torch.optim.RMSprop).state_dict(), UNKNOWN),
    "a name that is not in the table": Refusal(adamw, f"no state of apex.LAMB: {KNOWN}", source="apex.LAMB"),
    "another source": Refusal(adamw, "this is no state of torch.SGD: ", ours_of(SGD), "torch.SGD"),
    "another value": Refusal(adamw, "this is no state of torch.Adam: ", source="torch.Adam"),
    "two candidates": Refusal(
        lambda: changed(adamw(), decoupled_weight_decay=None), "pass source=, torch.Adam or torch.AdamW"
    ),
    "an option that the table does not know": Refusal(
        lambda: changed(adamw(), anneal=True),
        "its groups have 'anneal', and of torch.AdamW it is known what betas, eps, weight_decay, amsgrad, maximize, "
        "decoupled_weight_decay are",
    ),
    "caution": Refusal(lambda: of_peer("timm.Lamb", caution=True), UNKNOWN, ours_of(thalweg.torch.LAMB)),
    "dampening": Refusal(
        lambda: of_peer("timm.Lars", dampening=0.5, momentum=0.9), UNKNOWN, ours_of(thalweg.torch.LARS, 0.1)
    ),
    "an option that is not valid here": Refusal(
        lambda: stepped(torch.optim.SGD, momentum=1.5).state_dict(),
        "the options of this state are not valid: momentum must be a finite number >= 0 and < 1, got 1.5",
        ours_of(SGD),
    ),
    "text for a beta": Refusal(lambda: changed(adamw(), betas="x"), "betas must be"),
    "a key of state that the table does not know": Refusal(
        lambda: with_entry("slow", LIKE_B),
        "the state of 'b' does not fit its options: they need {'exp_avg': (4, 6), 'exp_avg_sq': (4, 6)}, and the state "
        "has {'exp_avg': (4, 6), 'exp_avg_sq': (4, 6), 'slow': (4, 6)}",
    ),
    "an entry that is missing": Refusal(lambda: with_entry("exp_avg_sq", None), "the state of 'b' does not fit"),
    "half of amsgrad": Refusal(lambda: with_entry("max_exp_avg_sq", LIKE_B), "the state of 'b' does not fit"),
    "no count of steps": Refusal(lambda: with_entry("step", None), STEP),
    "half a step": Refusal(lambda: with_entry("step", 2.5), STEP),
    "a transposed parameter": Refusal(
        adamw,
        "the state of 'a' does not fit its options: they need {'exp_avg': (4, 6), 'exp_avg_sq': (4, 6)}, and the ",
        lambda: AdamW(tensors(a=(4, 6), b=(4, 6), c=(5,)).items()),
    ),
    "another rule": Refusal(adamw, "SGD cannot continue a run of torch.AdamW: AdamW can", ours_of(SGD)),
    "a mixture": Refusal(
        adamw,
        "this needs an optimizer of thalweg.torch with one rule, got Mixture",
        lambda: Mixture(tensors().items(), [("a", SGD.options()), ("*", AdamW.options())]),
    ),
    "another library's": Refusal(adamw, "with one rule, got AdamW", ours_of(torch.optim.AdamW)),
    "overrides": Refusal(
        adamw,
        "this optimizer has overrides, and the run had none: divide parameters into groups instead",
        ours_of(AdamW, overrides=[("c", dict(weight_decay=0.0))]),
    ),
    "sizes": Refusal(
        lambda: changed(adamw(), param_names=None),
        "groups of sizes [3], and this optimizer of sizes [6]",
        lambda: AdamW([*tensors().values(), *tensors().values()]),
    ),
    "names": Refusal(
        adamw, "the state lacks 'd', and the ", lambda: AdamW(tensors(a=(6, 4), b=(4, 6), d=(5,)).items())
    ),
    "names for numbers": Refusal(lambda: changed(adamw(), params=[*SMALL]), "must number their parameters"),
    "an lr where there is none": Refusal(
        lambda: stepped(torch.optim.Adafactor).state_dict(),
        "torch.Adafactor was run with lr=0.01: construct this optimizer with lr=0.01",
        ours_of(Adafactor, variant="torch"),
    ),
    "an lr where there was none": Refusal(
        lambda: of_peer("transformers.Adafactor"),
        "transformers.Adafactor was run with lr=None: construct this optimizer with lr=None",
        ours_of(Adafactor, 0.01, variant="hf"),
    ),
    "eps of two dtypes": Refusal(
        lambda: two_dtypes()[1], "a group has 2: divide it by dtype", lambda: Adafactor(two_dtypes()[0], 0.01)
    ),
    "a state of ours": Refusal(lambda: stepped(AdamW).state_dict(), "of thalweg.torch: load_state_dict takes it"),
    "a checkpoint around a state": Refusal(
        lambda: {"optimizer_states": [adamw()]},
        "it must have 'state' and 'param_groups', and is a dict with 'optimizer_states'",
    ),
    "no such file": Refusal(lambda: "nowhere.pt", "nowhere.pt cannot be read by torch.load(weights_only=True)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_whole(name: str) -> None:
    refusal = REFUSED[name]
    mine, given = refusal.make(), refusal.saved()
    before = str(mine.state_dict())
    with pytest.raises(StateError) as told:
        import_peer(mine, given, refusal.source)
    assert refusal.words in str(told.value)
    assert str(mine.state_dict()) == before


class Schedule:
    """What weights_only refuses to load."""


def test_a_file_of_more_than_tensors_is_refused(tmp_path: Path) -> None:
    torch.save(changed(adamw(), schedule=Schedule()), tmp_path / "optimizer.pt")
    with pytest.raises(StateError, match=r"optimizer\.pt cannot be read by torch\.load\(weights_only=True\): "):
        import_peer(AdamW(tensors().items()), tmp_path / "optimizer.pt")
