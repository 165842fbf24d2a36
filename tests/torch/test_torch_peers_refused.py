"""States of other optimizers that do not fit are refused whole, with words that say what would be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg.errors import StateError  # noqa: E402
from thalweg.torch import Adafactor, AdamW, Mixture, import_peer  # noqa: E402

SHAPES = {"a": (6, 4), "b": (5,)}


def tensors(shapes: dict[str, Any] = SHAPES) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def stepped(kind: Any, params: dict[str, Any] | None = None, named: bool = True, steps: int = 3, **options: Any) -> Any:
    """An optimizer after some steps."""
    params = tensors() if params is None else params
    optimizer = kind(params.items() if named else params.values(), **options)
    train(params, optimizer, 0, steps)
    return optimizer


def train(params: dict[str, Any], optimizer: Any, first: int, last: int) -> None:
    for t in range(first, last):
        for p in params.values():
            p.grad = torch.cos(p.detach() * (3 + t))
        optimizer.step()


def adamw(**options: Any) -> dict[str, Any]:
    return stepped(torch.optim.AdamW, **options).state_dict()


def changed(saved: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A state with other options in its groups; None takes one away."""
    for group in saved["param_groups"]:
        group.update(options)
        for name in [name for name, value in options.items() if value is None]:
            del group[name]
    return saved


def snapshot(optimizer: Any) -> Any:
    saved = optimizer.state_dict()
    return [group["lr"] for group in saved["param_groups"]], str(saved)


LAMB = dict(bias_correction=True, grad_averaging=True, max_grad_norm=1.0, trust_clip=False, always_adapt=False)
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any], str]] = {
    "an option": (
        lambda: AdamW(tensors().items()),
        lambda: adamw(lr=0.5, weight_decay=0.1),
        {},
        r"torch\.AdamW stepped 'a' with what is weight_decay=0\.1 here, and this optimizer has weight_decay=0\.01: "
        r"to continue the run, construct AdamW\(\.\.\., lr=0\.5, weight_decay=0\.1\)",
    ),
    "an option for one parameter": (
        lambda: AdamW(tensors().items(), overrides=[("b", dict(weight_decay=0.0))]),
        adamw,
        {},
        r"stepped 'b' with what is weight_decay=0\.01 here, and this optimizer has weight_decay=0\.0",
    ),
    "a scaled rate": (
        lambda: AdamW(tensors().items(), overrides=[("b", dict(lr_scale=0.5))]),
        adamw,
        {},
        "lr_scale=1.0 here, and this optimizer has lr_scale=0.5",
    ),
    "an option that we lack": (
        lambda: thalweg.torch.LAMB(tensors().items()),
        lambda: changed(adamw(), caution=True, step=3, **LAMB),
        dict(source="timm.Lamb"),
        "caution=True, which has no counterpart here",
    ),
    "an option that another rule lacks": (
        lambda: thalweg.torch.LAMB(tensors().items(), trust=False, eps=1e-8, weight_decay=0.01),
        lambda: adamw(amsgrad=True),
        {},
        "amsgrad=True, which has no counterpart here",
    ),
    "an option that is not valid here": (
        lambda: thalweg.torch.SGD(tensors().items(), momentum=0.9),
        lambda: stepped(torch.optim.SGD, momentum=1.5).state_dict(),
        {},
        r"SGD cannot continue this run of torch\.SGD: momentum must be a finite number >= 0 and < 1, got 1\.5",
    ),
    "two candidates": (
        lambda: AdamW(tensors().items()),
        lambda: changed(adamw(), decoupled_weight_decay=None),
        {},
        r"which optimizer made it: pass source='torch\.Adam' or source='torch\.AdamW'",
    ),
    "nothing known": (
        lambda: AdamW(tensors().items()),
        lambda: stepped(torch.optim.RMSprop).state_dict(),
        {},
        r"not those of an optimizer that is known: torch\.SGD, torch\.Adam, ",
    ),
    "an unknown source": (
        lambda: AdamW(tensors().items()),
        adamw,
        dict(source="torch.Adamw"),
        "source='torch.Adamw' is not known: did you mean 'torch.AdamW'",
    ),
    "another source": (
        lambda: AdamW(tensors().items()),
        adamw,
        dict(source="torch.SGD"),
        "this is no state of torch.SGD: its groups lack 'dampening', 'momentum', 'nesterov'",
    ),
    "another source, by a value": (
        lambda: AdamW(tensors().items()),
        adamw,
        dict(source="torch.Adam"),
        "this is no state of torch.Adam: its groups have decoupled_weight_decay=True",
    ),
    "another rule": (
        lambda: thalweg.torch.SGD(tensors().items()),
        adamw,
        {},
        "SGD does not have the mathematics of torch.AdamW: import its state into AdamW or LAMB",
    ),
    "a mixture": (
        lambda: Mixture(tensors().items(), [("*", thalweg.torch.SGD.options(lr=0.1))]),
        adamw,
        {},
        "SGD does not have the mathematics of torch.AdamW",
    ),
    "sizes": (
        lambda: AdamW([*tensors().values(), *tensors().values()]),
        adamw,
        {},
        r"groups of sizes \[2\], and this optimizer of sizes \[4\]",
    ),
    "names": (
        lambda: AdamW(tensors({"a": (6, 4), "c": (5,)}).items()),
        adamw,
        {},
        "the source lacks 'c', and this optimizer lacks 'b'; rename= takes",
    ),
    "two of one name": (
        lambda: AdamW(tensors().items()),
        adamw,
        dict(rename=lambda name: "a"),
        "two parameters of the source would be named 'a' here",
    ),
    "no names to change": (
        lambda: AdamW(tensors().items()),
        lambda: adamw(named=False),
        dict(rename={"x": "a"}),
        "rename= needs names",
    ),
    "a transposed parameter": (
        lambda: AdamW(tensors({"a": (4, 6), "b": (5,)}).items()),
        adamw,
        {},
        r"the state of 'a' does not fit: the saved entries are {'exp_avg': \(6, 4\)",
    ),
    "an entry that is missing": (
        lambda: AdamW(tensors().items()),
        lambda: (lambda saved: saved["state"][1].pop("exp_avg_sq") is None or saved)(adamw()),
        {},
        "the state of 'b' does not fit: the saved entries are {'exp_avg'",
    ),
    "no count of steps": (
        lambda: AdamW(tensors().items()),
        lambda: (lambda saved: saved["state"][1].pop("step") is None or saved)(adamw()),
        {},
        "the state of 'b' has no count of steps where torch.AdamW keeps it",
    ),
    "an entry of no parameter": (
        lambda: AdamW(tensors().items()),
        lambda: (lambda saved: saved["state"].update({7: {}}) or saved)(adamw()),
        {},
        "it has entries for 7, which is in none of its groups",
    ),
    "two rates for one group": (
        lambda: AdamW(tensors().items()),
        lambda: stepped(
            lambda params, **_: torch.optim.AdamW(
                [{"params": [pair], "lr": 1 / (i + 1)} for i, pair in enumerate(params)]
            )
        ).state_dict(),
        {},
        "several groups of torch.AdamW, whose learning rates are 1.0, 0.5",
    ),
    "an lr where there is none": (
        lambda: Adafactor(tensors().items(), variant="torch"),
        lambda: stepped(torch.optim.Adafactor).state_dict(),
        {},
        "torch.Adafactor was run with lr=0.01, and parameter group 0 has none: construct the optimizer with lr=0.01",
    ),
    "factored otherwise": (
        lambda: Adafactor(tensors().items(), variant="torch", lr=0.01, min_dim_size_to_factor=128),
        lambda: stepped(torch.optim.Adafactor).state_dict(),
        {},
        r"torch\.Adafactor has 'a' of shape \(6, 4\) factored over axes 0 and 1, and here it is unfactored: set",
    ),
    "a state of ours": (
        lambda: AdamW(tensors().items()),
        lambda: stepped(AdamW).state_dict(),
        {},
        "this is a state of thalweg.torch: load_state_dict takes it",
    ),
    "no state": (lambda: AdamW(tensors().items()), lambda: {"model": {}}, {}, "this is no state dict of an optimizer"),
    "two states": (
        lambda: AdamW(tensors().items()),
        lambda: {"optimizer_states": [adamw(), adamw()]},
        {},
        r"the states of 2 optimizers: pass one, as in checkpoint\['optimizer_states'\]\[0\]",
    ),
    "a debiased rate": (
        lambda: thalweg.torch.LAMB(tensors().items(), bias_correction=False, phi=(0.0, 10.0)),
        lambda: changed(
            adamw(weight_decay=0.0),
            **dict(weight_decouple=True, fixed_decay=False, rectify=False, grad_averaging=True, adam=False, step=3),
        ),
        dict(source="pytorch_optimizer.Lamb"),
        "only runs with adam_debias=True, or of so many steps",
    ),
}


@pytest.mark.parametrize(("optimizer", "saved", "how", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_whole(optimizer: Callable[[], Any], saved: Callable[[], Any], how: dict[str, Any], words: str) -> None:
    mine, state = optimizer(), saved()
    before = snapshot(mine)
    with pytest.raises(StateError, match=words):
        import_peer(mine, state, **how)
    assert snapshot(mine) == before


def test_an_optimizer_of_another_library_is_refused() -> None:
    with pytest.raises(StateError, match=r"an optimizer of thalweg\.torch, got torch\.optim\.adamw\.AdamW"):
        import_peer(stepped(torch.optim.AdamW), adamw())
