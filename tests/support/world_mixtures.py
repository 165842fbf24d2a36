"""Mixtures over ranks, beside the same steps in one process, and the messages that they send."""

from __future__ import annotations

from typing import Any

from tolerances import WORLD
from world_layouts import SHAPES, drawn, gradient, plain, torch
from world_layouts import layout as laid_out
from world_messages import Messages
from world_steps import further_than

from thalweg.torch import LAMB, Adafactor, AdamW, Kron, Mixture

STEPS = 3
#: What alone would step the parameters of the entry below.
RULES: dict[str, Any] = {
    "Kron": Kron.options(lr=0.02),
    "Adafactor": Adafactor.options(lr=0.05, min_dim_size_to_factor=2),
    "LAMB": LAMB.options(lr=0.05),
    "AdamW": AdamW.options(lr=0.05),
}


def rule_of(name: str) -> str:
    shape = SHAPES[name]
    if len(shape) == 2:
        return "Kron"
    return "Adafactor" if len(shape) > 2 else "LAMB" if name == "vector" else "AdamW"


def stepped(
    layout: str, alone: str | None = None, **arguments: Any
) -> tuple[dict[str, Any], Any, list[dict[str, int]]]:
    """Parameters after some steps, the optimizer, and the messages of each step. alone: the only rule there is."""
    place = plain if layout == "one process" else laid_out(layout)
    names = [name for name in SHAPES if alone in (None, rule_of(name))]
    own = {name: torch.nn.Parameter(place(name, drawn(name, 0, "float64"))) for name in names}
    entries = [
        ((lambda name, p, rule=rule: rule_of(name) == rule), options)
        for rule, options in RULES.items()
        if alone in (None, rule)
    ]
    optimizer = Mixture(own.items(), entries, **arguments)
    heard = []
    for step in range(STEPS):
        for name, p in own.items():
            p.grad = gradient("alike", drawn(name, step + 1, "float64"), p)
        with Messages() as messages:
            optimizer.step()
        heard.append(dict(messages.heard))
    return own, optimizer, heard


def differences(layout: str, **arguments: Any) -> list[str]:
    wanted, one, _ = stepped("one process", **arguments)
    got, other, _ = stepped(layout, **arguments)
    found: list[str] = []
    for name, p in wanted.items():
        start = drawn(name, 0, "float64")
        found += further_than(WORLD["float64"], name, got[name].detach(), p.detach(), start)
        for key, entry in one.state[p].items():
            found += further_than(
                WORLD["float64"], f"{name}.{key}", other.state[got[name]][key], entry, torch.zeros_like(entry)
            )
    return found


def messages(layout: str, alone: str | None = None, **arguments: Any) -> dict[str, int]:
    """Those of a later step."""
    return stepped(layout, alone, **arguments)[2][-1]


def told_apart(rank_has: str) -> str:
    """What is said if ranks have rules of their own."""
    own = {"w": torch.nn.Parameter(laid_out("first axis")("matrix", drawn("matrix", 0, "float64")))}
    other = AdamW if torch.distributed.get_rank() else Kron
    optimizer = Mixture(own.items(), [("*", other.options(lr=0.1))])
    own["w"].grad = gradient("alike", drawn("matrix", 1, "float64"), own["w"])
    try:
        optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def resumed_elsewhere(folder: str) -> list[str]:
    """A model of FSDP2 whose mixture is saved by torch's distributed checkpoints, and goes on in another."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from world_training import batch, loss_of, sharded

    from thalweg.torch import kron_adamw

    def train(net: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(net, batch(step)).backward()
            optimizer.step()

    net = sharded()[0]
    optimizer = kron_adamw(net, 0.01, 0.01)
    train(net, optimizer, range(2))
    weights, state = get_state_dict(net, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    other = sharded()[0]
    resumed = kron_adamw(other, 0.01, 0.01)
    resumed.make_state()
    weights, state = get_state_dict(other, resumed)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state)
    train(net, optimizer, range(2, 4))
    train(other, resumed, range(2, 4))
    pairs = zip(net.named_parameters(), other.parameters(), strict=True)
    return [name for (name, p), q in pairs if not torch.equal(p.to_local(), q.to_local())]
