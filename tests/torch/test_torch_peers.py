"""Runs that optimizers of torch, transformers and timm have started go on as they would have gone on there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lanes import by_turns  # noqa: E402
from published_runs import peer  # noqa: E402
from tolerances import CONTINUED  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.errors import ResumeWarning, StateError  # noqa: E402
from thalweg.torch import SGD, Adafactor, AdamW, Mixture, import_peer  # noqa: E402
from thalweg.torch.peers import TABLE  # noqa: E402

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


@by_turns("name")
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
    report = import_peer(mine, saved[0])
    assert report.source == run.source
    assert report.steps in (0, BEFORE)
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


def tensors(**shapes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in (shapes or SMALL).items()}
    return {name: torch.nn.Parameter(x.double()) for name, x in drawn.items()}


def stepped(kind: Any, *, named: bool = True, **options: Any) -> Any:
    """An optimizer after three steps."""
    params = tensors()
    optimizer = kind(params.items() if named else params.values(), **options)
    train(params, optimizer, None, 0, 3)
    return optimizer


def adamw(*, named: bool = True, **options: Any) -> dict[str, Any]:
    return stepped(torch.optim.AdamW, named=named, **options).state_dict()


@pytest.mark.parametrize("how", ["names", "other order", "renamed", "renamed by mapping", "wrapped", "unnamed", "file"])
def test_parameters_are_matched_by_name_or_else_by_position(how: str, tmp_path: Path) -> None:
    there = stepped(torch.optim.AdamW)
    moments = {name: there.state[p]["exp_avg"] for name, p in zip(SMALL, there.param_groups[0]["params"], strict=True)}
    saved, rename = there.state_dict(), None
    if how == "renamed":
        rename = lambda name: f"net.{name}"  # noqa: E731
    elif how == "renamed by mapping":
        rename = {"a": "first"}
    elif how == "wrapped":
        saved["param_groups"][0]["param_names"] = [f"module._orig_mod.{name}" for name in SMALL]
    elif how == "file":
        torch.save(saved, tmp_path / "optimizer.pt")
        saved = tmp_path / "optimizer.pt"
    here = {"renamed": "net.{}".format, "renamed by mapping": lambda name: {"a": "first"}.get(name, name)}
    params = tensors()
    pairs = [
        (here.get(how, str)(name), params[name]) for name in (reversed(params) if how == "other order" else params)
    ]
    mine = AdamW([p for _, p in pairs] if how == "unnamed" else pairs)
    report = import_peer(mine, saved, rename=rename)
    assert str(report) == "AdamW continues a run of torch.AdamW: 3 parameters after 3 steps"
    for name, p in params.items():
        assert torch.equal(mine.state[p]["exp_avg"], moments[name])


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
    (group,) = mine.param_groups
    assert (group["lr"], group["weight_decay"], group["nesterov"]) == (0.5, 0.1, False)
    assert group["max_grad_norm"] == 1.0  # which the source does not have


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        (lambda ps: torch.optim.Adam(ps), lambda ps: AdamW(ps, weight_decay=0.0)),
        (lambda ps: torch.optim.SGD(ps, momentum=0.9), lambda ps: SGD(ps, momentum=0.9)),
        (lambda ps: torch.optim.Adafactor(ps, eps=(2.0**-23, 1e-3)), lambda ps: Adafactor(ps, 0.01, variant="torch")),
        (lambda ps: torch.optim.Muon(ps[:2]), lambda ps: thalweg.torch.Muon(ps[:2], variant="torch")),
        (
            lambda ps: peer("transformers.optimization").Adafactor(ps, 0.01, relative_step=False),
            lambda ps: Adafactor(ps, 0.01, variant="hf"),
        ),
        (
            lambda ps: peer("transformers.optimization").Adafactor(ps),
            lambda ps: Adafactor(ps, variant="hf"),
        ),
        (lambda ps: peer("timm.optim.lamb").Lamb(ps), lambda ps: thalweg.torch.LAMB(ps, 1e-3, variant="apex")),
        (lambda ps: peer("timm.optim.lars").Lars(ps), lambda ps: thalweg.torch.LARS(ps, 1.0, variant="timm")),
    ],
    ids=["Adam", "SGD", "Adafactor", "Muon", "HF", "HF without lr", "Lamb", "Lars"],
)
@pytest.mark.filterwarnings("error::thalweg.ResumeWarning")
def test_no_word_where_ours_was_constructed_equal(theirs: Callable[[Any], Any], mine: Callable[[Any], Any]) -> None:
    """As the docs write it, for the defaults of each source."""
    pairs = list(tensors().items())
    optimizer = theirs(pairs)
    train({name: p for group in optimizer.param_groups for name, p in pairs}, optimizer, None, 0, 3)
    import_peer(mine(list(tensors().items())), optimizer.state_dict())


def test_a_cycle_of_rates_and_momenta_goes_on() -> None:
    def scheduler_of(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12)

    whole = tensors()
    theirs = torch.optim.AdamW(whole.items())
    schedule = scheduler_of(theirs)
    train(whole, theirs, schedule, 0, 5)
    parted, saved, plan = copy.deepcopy((whole, theirs.state_dict(), schedule.state_dict()))
    train(whole, theirs, schedule, 5, 10)
    mine = AdamW(parted.items())
    resumed = scheduler_of(mine)
    import_peer(mine, saved)
    resumed.load_state_dict(plan)
    assert mine.param_groups[0]["betas"] == saved["param_groups"][0]["betas"]
    train(parted, mine, resumed, 5, 10)
    for name, p in whole.items():
        torch.testing.assert_close(parted[name], p, rtol=CONTINUED["float64"], atol=0.0)


def test_a_rate_in_a_tensor_and_a_parameter_without_state() -> None:
    saved, params = adamw(), tensors()
    del saved["state"][1]
    saved["param_groups"][0].update(lr=torch.tensor(0.5), initial_lr=2.0)
    mine = AdamW(params.items(), lr=torch.tensor(0.1))
    report = import_peer(mine, saved)
    assert (report.parameters, mine.state.get(params["b"])) == (2, None)
    assert torch.equal(mine.param_groups[0]["lr"], torch.tensor(0.5))
    assert mine.param_groups[0]["initial_lr"] == 2.0


def test_state_of_16_bits_is_widened_and_coded_as_this_optimizer_keeps_it() -> None:
    params = {"w": torch.nn.Parameter(torch.randn(64, 64).bfloat16())}
    theirs = torch.optim.AdamW(params.items())
    train(params, theirs, None, 0, 3)
    wide, lean = AdamW(params.items()), AdamW(params.items(), state_dtype="int8")
    import_peer(wide, theirs.state_dict())
    assert wide.state[params["w"]]["exp_avg"].dtype == torch.float32
    assert torch.equal(wide.state[params["w"]]["exp_avg"], theirs.state[params["w"]]["exp_avg"].float())
    import_peer(lean, theirs.state_dict())
    with pytest.warns(ResumeWarning, match="now has exp_avg_scale"):
        train(params, lean, None, 3, 4)
    assert lean.state[params["w"]]["exp_avg"].dtype == torch.int8


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


def lamb(**options: Any) -> dict[str, Any]:
    return stepped(peer("timm.optim.lamb").Lamb, **options).state_dict()


def lars(**options: Any) -> dict[str, Any]:
    return stepped(peer("timm.optim.lars").Lars, **options).state_dict()


def two_dtypes() -> Any:
    params = [("a", torch.nn.Parameter(torch.ones(3, 3))), ("b", torch.nn.Parameter(torch.ones(3, 3).bfloat16()))]
    return params, torch.optim.Adafactor(params).state_dict()


def ours_of(kind: Any = AdamW, *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: kind(tensors().items(), *args, **options)


KNOWN = "torch.SGD, torch.Adam, torch.AdamW, torch.Adafactor, torch.Muon, transformers.Adafactor, timm.Lamb, timm.Lars"
#: What was saved, our optimizer, further arguments, and the words of the error.
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any], str]] = {
    "a source that is not in the table": (
        lambda: stepped(torch.optim.RMSprop).state_dict(),
        ours_of(),
        {},
        f"no state of an optimizer that is known, by its options: known are {KNOWN}",
    ),
    "a name that is not in the table": (adamw, ours_of(), dict(source="apex.FusedLAMB"), f"must be one of {KNOWN}"),
    "another source": (adamw, ours_of(SGD), dict(source="torch.SGD"), "this is no state of torch.SGD, by its options"),
    "another value": (
        adamw,
        ours_of(),
        dict(source="torch.Adam"),
        "only runs with decoupled_weight_decay=False can be",
    ),
    "two candidates": (
        lambda: changed(adamw(), decoupled_weight_decay=None),
        ours_of(),
        {},
        "which optimizer made it: pass source='torch.Adam' or source='torch.AdamW'",
    ),
    "an option that the table does not know": (
        lambda: changed(adamw(), anneal=True),
        ours_of(),
        {},
        "its groups have 'anneal', and of torch.AdamW it is known what betas, eps, weight_decay, amsgrad, maximize, "
        "decoupled_weight_decay are",
    ),
    "an option that has no equal": (
        lambda: lamb(caution=True),
        ours_of(thalweg.torch.LAMB),
        {},
        "timm.Lamb was run with caution=True, which has no equal here: only runs with caution=False can be continued",
    ),
    "dampening of Lars": (
        lambda: lars(dampening=0.5, momentum=0.9),
        ours_of(thalweg.torch.LARS, 0.1),
        {},
        "dampening=0.5",
    ),
    "an option that is not valid here": (
        lambda: stepped(torch.optim.SGD, momentum=1.5).state_dict(),
        ours_of(SGD),
        {},
        "SGD cannot continue this run of torch.SGD: momentum must be a finite number >= 0 and < 1, got 1.5",
    ),
    "a key of state that the table does not know": (
        lambda: with_entry("slow", torch.zeros(4, 6)),
        ours_of(),
        {},
        "the state of 'b' has 'slow', and of torch.AdamW it is known what exp_avg, exp_avg_sq, max_exp_avg_sq are",
    ),
    "an entry that is missing": (
        lambda: with_entry("exp_avg_sq", None),
        ours_of(),
        {},
        "the state of 'b' does not fit: the saved entries are {'exp_avg'",
    ),
    "no count of steps": (
        lambda: with_entry("step", None),
        ours_of(),
        {},
        "the state of 'b' has no count of steps where torch.AdamW keeps it",
    ),
    "half of amsgrad": (
        lambda: with_entry("max_exp_avg_sq", torch.zeros(4, 6)),
        ours_of(),
        {},
        "the state of 'b' does not fit: the saved entries are",
    ),
    "an entry of no parameter": (
        lambda: (lambda saved: {**saved, "state": {**saved["state"], 7: {}}})(adamw()),
        ours_of(),
        {},
        "this state has entries for 7, which is in none of its groups",
    ),
    "another rule": (adamw, ours_of(SGD), {}, "SGD cannot continue a run of torch.AdamW: AdamW can"),
    "a mixture": (
        adamw,
        lambda: Mixture(tensors().items(), [("a", SGD.options()), ("*", AdamW.options())]),
        {},
        "this needs an optimizer of thalweg.torch with one rule, got Mixture",
    ),
    "an optimizer of another library": (
        adamw,
        lambda: torch.optim.AdamW(tensors().items()),
        {},
        "with one rule, got AdamW",
    ),
    "overrides": (
        adamw,
        ours_of(AdamW, overrides=[("c", dict(weight_decay=0.0))]),
        {},
        "this optimizer has overrides, and the run had none: divide parameters into groups instead",
    ),
    "sizes": (
        lambda: adamw(named=False),
        lambda: AdamW([*tensors().values(), *tensors().values()]),
        {},
        "groups of sizes [3], and this optimizer of sizes [6]",
    ),
    "names": (adamw, lambda: AdamW(tensors(a=(6, 4), b=(4, 6), d=(5,)).items()), {}, "the state lacks 'd', and the "),
    "two of one name": (adamw, ours_of(), dict(rename=lambda name: "a"), "the names of this state differ"),
    "no names to change": (lambda: adamw(named=False), ours_of(), dict(rename={"x": "a"}), "rename= needs names"),
    "names for numbers": (
        lambda: (lambda saved: {**saved, "param_groups": [{**saved["param_groups"][0], "params": [*SMALL]}]})(adamw()),
        ours_of(),
        {},
        "must number their parameters",
    ),
    "a transposed parameter": (
        adamw,
        lambda: AdamW(tensors(a=(4, 6), b=(4, 6), c=(5,)).items()),
        {},
        "the state of 'a' does not fit: the saved entries are {'exp_avg': (6, 4)",
    ),
    "an lr where there is none": (
        lambda: stepped(torch.optim.Adafactor).state_dict(),
        ours_of(Adafactor, variant="torch"),
        {},
        "torch.Adafactor was run with lr=0.01: construct this optimizer with lr=0.01",
    ),
    "an lr where there was none": (
        lambda: stepped(peer("transformers.optimization").Adafactor).state_dict(),
        ours_of(Adafactor, 0.01, variant="hf"),
        {},
        "transformers.Adafactor was run with lr=None: construct this optimizer with lr=None",
    ),
    "eps of two dtypes": (
        lambda: two_dtypes()[1],
        lambda: Adafactor(two_dtypes()[0], 0.01),
        {},
        "a group has 2: divide it by dtype",
    ),
    "a state of ours": (
        lambda: stepped(AdamW).state_dict(),
        ours_of(),
        {},
        "this is a state of thalweg.torch: load_state_dict takes it",
    ),
    "a checkpoint around a state": (
        lambda: {"optimizer_states": [adamw()]},
        ours_of(),
        {},
        "this is no state dict of an optimizer, which has 'state' and 'param_groups': of a checkpoint, pass the part",
    ),
    "no groups": (lambda: {"state": {}, "param_groups": []}, ours_of(), {}, "no state of an optimizer that is known"),
    "a number for a group": (
        lambda: {"state": {}, "param_groups": [3]},
        ours_of(),
        {},
        "'param_groups' must be mappings",
    ),
    "text for a beta": (lambda: changed(adamw(), betas="x"), ours_of(), {}, "betas must be"),
    "no such file": (lambda: "nowhere.pt", ours_of(), {}, "nowhere.pt cannot be read by torch.load(weights_only=True)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_whole(name: str) -> None:
    saved, make, more, words = REFUSED[name]
    mine, given = make(), saved()
    before = str(mine.state_dict())
    with pytest.raises(StateError) as told:
        import_peer(mine, given, **more)
    assert words in str(told.value)
    assert str(mine.state_dict()) == before


class Schedule:
    """What weights_only refuses to load."""


def test_a_file_of_more_than_tensors_is_refused(tmp_path: Path) -> None:
    torch.save(changed(adamw(), schedule=Schedule()), tmp_path / "optimizer.pt")
    with pytest.raises(StateError, match=r"optimizer\.pt cannot be read by torch\.load\(weights_only=True\): "):
        import_peer(AdamW(tensors().items()), tmp_path / "optimizer.pt")
