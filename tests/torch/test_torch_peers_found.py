"""States of other optimizers are found by name and in checkpoints, schedules go on, and ours go back to torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tolerances import CONTINUED  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.errors import StateError  # noqa: E402
from thalweg.torch import Adafactor, AdamW, export_peer, import_peer  # noqa: E402

SHAPES = {"a": (6, 4), "b": (4, 6), "c": (5,)}


def tensors(names: str = "abc") -> dict[str, Any]:
    """Each depends on its name alone."""
    found = {name: torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(ord(name))) for name in names}
    return {name: torch.nn.Parameter(p.double()) for name, p in found.items()}


def train(params: dict[str, Any], optimizer: Any, first: int, last: int, scheduler: Any = None) -> None:
    for t in range(first, last):
        for p in params.values():
            p.grad = torch.cos(p.detach() * (3 + t))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def close(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(torch.allclose(first[name], second[name], rtol=CONTINUED["float64"], atol=0.0) for name in first)


@pytest.fixture
def started() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Parameters after three steps of torch's AdamW, its state then, and the parameters after six."""
    params = tensors()
    optimizer = torch.optim.AdamW(params.items())
    train(params, optimizer, 0, 3)
    middle, saved = copy.deepcopy((params, optimizer.state_dict()))
    train(params, optimizer, 3, 6)
    return middle, saved, params


@pytest.mark.parametrize(
    "held",
    [
        "path",
        "Lightning",
        "script",
        "names as keys",
        "other order",
        "renamed",
        "renamed by mapping",
        "wrapped",
        "unnamed",
    ],
)
def test_where_a_state_is_found(held: str, started: Any, tmp_path: Path) -> None:
    middle, saved, end = started
    names, given, rename = list(middle), saved, None
    if held == "path":
        given = tmp_path / "optimizer.pt"
        torch.save(saved, given)
    elif held == "Lightning":
        given = str(tmp_path / "last.ckpt")
        torch.save({"epoch": 3, "state_dict": {}, "optimizer_states": [saved], "lr_schedulers": []}, given)
    elif held == "script":
        given = {"model": {}, "optimizer": saved}
    elif held == "names as keys":  # as torch.distributed.checkpoint has them
        (group,) = saved["param_groups"]
        state = {name: saved["state"][place] for place, name in enumerate(group["param_names"])}
        given = {"state": state, "param_groups": [{**group, "params": group.pop("param_names")}]}
    elif held == "other order":
        names = names[::-1]
    elif held == "renamed":
        rename = lambda name: f"net.{name}"  # noqa: E731
    elif held == "renamed by mapping":
        rename = {"a": "first"}
    elif held == "wrapped":
        saved["param_groups"][0]["param_names"] = [f"module._orig_mod.{name}" for name in names]
    own = {"renamed": "net.{}".format, "renamed by mapping": lambda name: {"a": "first"}.get(name, name)}
    pairs = [(own.get(held, str)(name), middle[name]) for name in names]
    mine = AdamW([p for _, p in pairs] if held == "unnamed" else pairs)
    assert import_peer(mine, given, rename=rename).steps == 3
    train(middle, mine, 3, 6)
    assert close(middle, end)


class Schedule:
    """What weights_only refuses to load."""


def test_a_file_of_more_than_tensors_is_refused(started: Any, tmp_path: Path) -> None:
    middle, saved, _ = started
    saved["param_groups"][0]["schedule"] = Schedule()
    torch.save(saved, tmp_path / "optimizer.pt")
    with pytest.raises(StateError, match=r"optimizer\.pt holds more than tensors and numbers: if you trust it"):
        import_peer(AdamW(middle.items()), tmp_path / "optimizer.pt")


def test_a_cycle_of_rates_and_momenta_goes_on() -> None:
    def scheduler_of(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12)

    whole = tensors()
    theirs = torch.optim.AdamW(whole.items())
    schedule = scheduler_of(theirs)
    train(whole, theirs, 0, 5, schedule)
    parted, saved, plan = copy.deepcopy((whole, theirs.state_dict(), schedule.state_dict()))
    train(whole, theirs, 5, 10, schedule)
    mine = AdamW(parted.items())
    resumed = scheduler_of(mine)
    import_peer(mine, saved)
    resumed.load_state_dict(plan)
    assert mine.param_groups[0]["betas"] == saved["param_groups"][0]["betas"]
    train(parted, mine, 5, 10, resumed)
    assert close(parted, whole)


def test_a_rate_in_a_tensor_and_a_parameter_without_state(started: Any) -> None:
    middle, saved, _ = started
    del saved["state"][1]
    saved["param_groups"][0].update(lr=torch.tensor(0.5), initial_lr=2.0)
    mine = AdamW(middle.items(), lr=torch.tensor(0.1))
    report = import_peer(mine, saved)
    assert (report.parameters, mine.state.get(middle["b"])) == (2, None)
    assert torch.equal(mine.param_groups[0]["lr"], torch.tensor(0.5))
    assert mine.param_groups[0]["initial_lr"] == 2.0


def test_one_group_here_for_several_there_of_one_rate() -> None:
    params = tensors()
    named = list(params.items())
    theirs = torch.optim.AdamW([{"params": named[:2]}, {"params": named[2:], "weight_decay": 0.0}])
    train(params, theirs, 0, 3)
    mine = AdamW(params.items(), overrides=[("c", dict(weight_decay=0.0))])
    assert import_peer(mine, theirs.state_dict()).parameters == 3


def test_the_report_tells_what_was_made() -> None:
    params = tensors()
    theirs = torch.optim.SGD(params.items(), momentum=0.9)
    train(params, theirs, 0, 3)
    mine = thalweg.torch.SGD(params.items(), momentum=0.9)
    assert str(import_peer(mine, theirs.state_dict())) == (
        "SGD continues a run of torch.SGD: 3 parameters\n"
        "taken: momentum_buffer\n"
        "made: step (not saved by torch.SGD: from 1 on)"
    )


BACK = {
    "SGD": ("SGD", dict(momentum=0.9, dampening=0.5, weight_decay=0.1), {}),
    "LARS": ("SGD", dict(momentum=0.9, weight_decay=0.1), dict(trust=False, momentum_mode="lr_outside")),
    "AdamW": ("AdamW", dict(betas=(0.8, 0.9), weight_decay=0.1, amsgrad=True), {}),
    "AdamW, l2": ("Adam", dict(weight_decay=0.1), dict(decoupled=False)),
    "LAMB": ("AdamW", dict(weight_decay=0.1), dict(trust=False, exempt=None, eps=1e-8)),
    "LAMB, l2": ("Adam", dict(weight_decay=0.1), dict(trust=False, exempt=None, eps=1e-8, weight_decay_mode="l2")),
    "Adafactor": ("Adafactor", dict(weight_decay=0.1), dict(variant="torch")),
    "Muon": ("Muon", dict(weight_decay=0.1), dict(variant="torch")),
}


@pytest.mark.parametrize(("name", "there", "options", "more"), [(name, *row) for name, row in BACK.items()], ids=BACK)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_the_way_back(name: str, there: str, options: dict[str, Any], more: dict[str, Any]) -> None:
    """Three steps here and three there are six there. torch's optimizer gets its options from the state."""
    whole = tensors("ab" if there == "Muon" else "abc")
    parted, kind = copy.deepcopy(whole), getattr(torch.optim, there)
    groups = [
        [{"params": [pair], "lr": 0.1 / (1 + place)} for place, pair in enumerate(params.items())]
        for params in (whole, parted)
    ]
    train(whole, kind(groups[0], **options), 0, 6)
    mine = getattr(thalweg.torch, name.partition(",")[0])(groups[1], **{**options, **more})
    train(parted, mine, 0, 3)
    back = kind([{"params": group["params"]} for group in mine.param_groups])
    back.load_state_dict(copy.deepcopy(export_peer(mine, "torch")))
    assert [group["lr"] for group in back.param_groups][:2] == [0.1, 0.05]
    train(parted, back, 3, 6)
    assert close(parted, whole)


@pytest.mark.parametrize(
    ("rule", "options", "words"),
    [
        ("AdamW", dict(nesterov=True), "nesterov=True, which 'a' has here, has no counterpart in torch.AdamW"),
        ("AdamW", dict(max_grad_norm=1.0), "max_grad_norm=1.0, which 'a' has here"),
        ("AdamW", dict(on_nonfinite="skip"), "on_nonfinite='skip', which 'a' has here"),
        ("AdamW", dict(overrides=[("c", dict(eps=0.1))]), "eps=0.1, which 'c' has here"),
        ("AdamW", dict(overrides=[("c", dict(lr_scale=0.1))]), "lr_scale=0.1, which 'c' has here"),
        ("LAMB", {}, "trust=True, which 'a' has here, has no counterpart in torch.AdamW"),
        ("LARS", dict(trust=False), "momentum_mode='lr_inside', which 'a' has here, has no counterpart in torch.SGD"),
        ("Adafactor", dict(lr=0.1, momentum=0.9, variant="torch"), "momentum=0.9, which 'a' has here"),
        ("Adafactor", dict(lr=0.1), "relative_step=False, which 'a' has here"),
        ("Adafactor", dict(variant="torch"), "lr=None has no counterpart in torch.Adafactor: lr=0.01 is the same"),
        ("Adafactor", dict(lr=0.1, variant="torch", factored=False), r"torch\.Adafactor has 'a' .* factored over axes"),
        ("Muon", dict(scaling="optax", vectors="row"), "scaling='optax', which 'a' has here"),
        ("Kron", {}, "no optimizer of torch.optim has the mathematics of Kron"),
    ],
)
def test_options_without_counterpart_are_refused_by_name(rule: str, options: dict[str, Any], words: str) -> None:
    mine = getattr(thalweg.torch, rule)(tensors().items(), **options)
    with pytest.raises(StateError, match=words):
        export_peer(mine, "torch")


def test_other_targets_are_refused() -> None:
    with pytest.raises(StateError, match="target='timm' is not known: it must be 'torch'"):
        export_peer(Adafactor(tensors().items()), "timm")
