"""States of other optimizers that do not fit are refused whole, with words that say what would be right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from thalweg.errors import StateError  # noqa: E402
from thalweg.torch import LAMB, SGD, Adafactor, AdamW, Mixture, Muon, import_peer  # noqa: E402

SHAPES = {"a": (6, 4), "b": (5,)}


def tensors(**shapes: Any) -> list[tuple[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in (shapes or SHAPES).items()}
    return [(name, torch.nn.Parameter(x)) for name, x in drawn.items()]


def stepped(kind: Any, named: bool = True, **options: Any) -> Any:
    """An optimizer after some steps."""
    params = tensors()
    optimizer = kind(params if named else [p for _, p in params], **options)
    for t in range(3):
        for _, p in params:
            p.grad = torch.cos(p.detach() * (3 + t))
        optimizer.step()
    return optimizer


def adamw(**options: Any) -> dict[str, Any]:
    return stepped(torch.optim.AdamW, **options).state_dict()


def changed(saved: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A state with other options in its groups; None takes one away."""
    for group in saved["param_groups"]:
        group.update(options)
        for name in [name for name, value in options.items() if value is None]:
            del group[name]
    return saved


def without(key: str) -> dict[str, Any]:
    saved = adamw()
    del saved["state"][1][key]
    return saved


def by_rates() -> Any:
    """A group for each parameter."""

    def make(params: Any) -> Any:
        return torch.optim.AdamW([{"params": [pair], "lr": 1 / (i + 1)} for i, pair in enumerate(params)])

    return stepped(make).state_dict()


def two_rules() -> Any:
    return Mixture(tensors(), [("a", Muon.options(lr=0.02)), ("*", AdamW.options(lr=0.5))])


def snapshot(optimizer: Any) -> Any:
    saved = optimizer.state_dict()
    return [group["lr"] for group in saved["param_groups"]], str(saved)


@dataclass(frozen=True)
class Refused:
    words: str
    saved: Callable[[], Any] = adamw
    ours: Callable[[], Any] = field(default=lambda: AdamW(tensors()))
    how: Mapping[str, Any] = field(default_factory=dict)


LAMB_OF_TIMM = dict(bias_correction=True, grad_averaging=True, max_grad_norm=1.0, trust_clip=False, always_adapt=False)
RECTIFIED = dict(weight_decouple=True, fixed_decay=False, rectify=False, grad_averaging=True, adam=False, step=3)
REFUSED = {
    "an option": Refused(
        r"torch\.AdamW stepped 'a' with what is weight_decay=0\.1 here, and this optimizer has weight_decay=0\.01: "
        r"to continue the run, construct AdamW\(\.\.\., lr=0\.5, weight_decay=0\.1\)",
        lambda: adamw(lr=0.5, weight_decay=0.1),
    ),
    "an option for one parameter": Refused(
        r"stepped 'b' with what is weight_decay=0\.01 here, and this optimizer has weight_decay=0\.0",
        ours=lambda: AdamW(tensors(), overrides=[("b", dict(weight_decay=0.0))]),
    ),
    "an option in a mixture": Refused("this optimizer has betas=", lambda: adamw(betas=(0.8, 0.9)), ours=two_rules),
    "a scaled rate": Refused(
        "lr_scale=1.0 here, and this optimizer has lr_scale=0.5",
        ours=lambda: AdamW(tensors(), overrides=[("b", dict(lr_scale=0.5))]),
    ),
    "an option that we lack": Refused(
        "caution=True, which has no counterpart here",
        lambda: changed(adamw(), caution=True, step=3, **LAMB_OF_TIMM),
        ours=lambda: LAMB(tensors()),
        how=dict(source="timm.Lamb"),
    ),
    "an option that another rule lacks": Refused(
        "amsgrad=True, which has no counterpart here",
        lambda: adamw(amsgrad=True),
        ours=lambda: LAMB(tensors(), trust=False, eps=1e-8, weight_decay=0.01),
    ),
    "an option that is not valid here": Refused(
        r"SGD cannot continue this run of torch\.SGD: momentum must be a finite number >= 0 and < 1, got 1\.5",
        lambda: stepped(torch.optim.SGD, momentum=1.5).state_dict(),
        ours=lambda: SGD(tensors(), momentum=0.9),
    ),
    "two candidates": Refused(
        r"which optimizer made it: pass source='torch\.Adam' or source='torch\.AdamW'",
        lambda: changed(adamw(), decoupled_weight_decay=None),
    ),
    "nothing known": Refused(
        r"not those of an optimizer that is known: torch\.SGD, torch\.Adam, ",
        lambda: stepped(torch.optim.RMSprop).state_dict(),
    ),
    "an unknown source": Refused(
        "source='torch.Adamw' is not known: did you mean 'torch.AdamW'", how=dict(source="torch.Adamw")
    ),
    "another source": Refused(
        "this is no state of torch.SGD: its groups lack 'dampening', 'momentum', 'nesterov'",
        how=dict(source="torch.SGD"),
    ),
    "another source, by a value": Refused(
        "this is no state of torch.Adam: its groups have decoupled_weight_decay=True", how=dict(source="torch.Adam")
    ),
    "another rule": Refused(
        "SGD does not have the mathematics of torch.AdamW: import its state into AdamW or LAMB",
        ours=lambda: SGD(tensors()),
    ),
    "a mixture of other rules": Refused(
        r"Muon and AdamW do not have the mathematics of torch.SGD",
        lambda: stepped(torch.optim.SGD, momentum=0.9).state_dict(),
        ours=two_rules,
    ),
    "a mixture without names": Refused(
        "pass names=, their names in the order", lambda: adamw(named=False), ours=two_rules
    ),
    "a mixture with too few names": Refused(
        "names= has 1 names, and this state has 2 parameters",
        lambda: adamw(named=False),
        ours=two_rules,
        how=dict(names=["a"]),
    ),
    "sizes": Refused(
        r"groups of sizes \[2\], and this optimizer of sizes \[4\]",
        ours=lambda: AdamW([p for _, p in tensors() + tensors()]),
    ),
    "names": Refused(
        "the source lacks 'c', and this optimizer lacks 'b'; rename= takes",
        ours=lambda: AdamW(tensors(a=(6, 4), c=(5,))),
    ),
    "two of one name": Refused(
        "two parameters of the source would be named 'a' here", how=dict(rename=lambda name: "a")
    ),
    "no names to change": Refused("rename= needs names", lambda: adamw(named=False), how=dict(rename={"x": "a"})),
    "a transposed parameter": Refused(
        r"the state of 'a' does not fit: the saved entries are {'exp_avg': \(6, 4\)",
        ours=lambda: AdamW(tensors(a=(4, 6), b=(5,))),
    ),
    "an entry that is missing": Refused(
        "the state of 'b' does not fit: the saved entries are {'exp_avg'", lambda: without("exp_avg_sq")
    ),
    "no count of steps": Refused(
        "the state of 'b' has no count of steps where torch.AdamW keeps it", lambda: without("step")
    ),
    "an entry of no parameter": Refused(
        "it has entries for 7, which is in none of its groups",
        lambda: (lambda saved: {**saved, "state": {**saved["state"], 7: {}}})(adamw()),
    ),
    "two rates for one group": Refused("several groups of torch.AdamW, whose learning rates are 1.0, 0.5", by_rates),
    "an lr where there is none": Refused(
        "torch.Adafactor was run with lr=0.01, and parameter group 0 has none: construct the optimizer with lr=0.01",
        lambda: stepped(torch.optim.Adafactor).state_dict(),
        ours=lambda: Adafactor(tensors(), variant="torch"),
    ),
    "factored otherwise": Refused(
        r"torch\.Adafactor has 'a' of shape \(6, 4\) factored over axes 0 and 1, and here it is unfactored: set",
        lambda: stepped(torch.optim.Adafactor).state_dict(),
        ours=lambda: Adafactor(tensors(), variant="torch", lr=0.01, min_dim_size_to_factor=128),
    ),
    "a state of ours": Refused(
        "this is a state of thalweg.torch: load_state_dict takes it", lambda: stepped(AdamW).state_dict()
    ),
    "no state": Refused("this is no state dict of an optimizer", lambda: {"model": {}}),
    "two states": Refused(
        r"the states of 2 optimizers: pass one, as in checkpoint\['optimizer_states'\]\[0\]",
        lambda: {"optimizer_states": [adamw(), adamw()]},
    ),
    "a debiased rate": Refused(
        "only runs with adam_debias=True, or of so many steps",
        lambda: changed(adamw(weight_decay=0.0), **RECTIFIED),
        ours=lambda: LAMB(tensors(), bias_correction=False, phi=(0.0, 10.0)),
        how=dict(source="pytorch_optimizer.Lamb"),
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused_whole(case: Refused) -> None:
    mine, state = case.ours(), case.saved()
    before = snapshot(mine)
    with pytest.raises(StateError, match=case.words):
        import_peer(mine, state, **case.how)
    assert snapshot(mine) == before


def test_an_optimizer_of_another_library_is_refused() -> None:
    with pytest.raises(StateError, match=r"an optimizer of thalweg\.torch, got torch\.optim\.adamw\.AdamW"):
        import_peer(stepped(torch.optim.AdamW), adamw())
