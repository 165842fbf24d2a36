"""Runs of torch's own optimizers, continued over ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tolerances import WORLD
from world_checkpoints import ENDED, LAYOUTS, SAVED, Net, numbers
from world_layouts import gradient, torch, whole
from world_steps import further_than

import thalweg.torch

#: torch's optimizer, our rule, what is said to both, and what more to ours.
CASES: Mapping[str, tuple[str, str, Mapping[str, Any], Mapping[str, Any]]] = {
    "AdamW": ("AdamW", "AdamW", dict(lr=0.01, weight_decay=0.1), {}),
    "Adafactor": ("Adafactor", "Adafactor", dict(lr=0.01, eps=(2.0**-23, 1e-3)), dict(variant="torch")),
}


def steps(net: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        for name, p in net.named_parameters():
            p.grad = gradient("alike", numbers(name, p.shape, step + 1), p)
        optimizer.step()


def continued(case: str, before: str, after: str) -> list[str]:
    """Where a run that torch began in one layout and we continue in another is not the run that torch ends alone."""
    there, rule, options, more = CASES[case]
    alone, begun, net = (Net(0, "float64", 10) for _ in range(3))
    optimizer = getattr(torch.optim, there)(alone.parameters(), **options)
    steps(alone, optimizer, 0, ENDED)
    LAYOUTS[before](begun)
    theirs = getattr(torch.optim, there)(begun.named_parameters(), **options)
    steps(begun, theirs, 0, SAVED)
    for p, value in zip(net.parameters(), begun.parameters(), strict=True):
        p.data.copy_(whole(value.detach()))
    LAYOUTS[after](net)
    mine = getattr(thalweg.torch, rule)(net.named_parameters(), **options, **more)
    thalweg.torch.import_peer(mine, copy.deepcopy(theirs.state_dict()))
    steps(net, mine, SAVED, ENDED)
    pairs = zip(alone.named_parameters(), net.parameters(), strict=True)
    return [
        words
        for (name, p), q in pairs
        for words in further_than(WORLD["float64"], name, whole(q.detach()), p.detach(), torch.zeros_like(p))
    ]
