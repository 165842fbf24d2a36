"""What replicas that divide their work keep and do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: E402
from world_layouts import DTensor, plain  # noqa: E402
from world_layouts import layout as laid_out  # noqa: E402
from world_steps import Run, local, stepped  # noqa: E402

from thalweg.rules import RULES  # noqa: E402


def bits(run: Run, layout: str) -> dict[str, Any]:
    """By entry, which block of it this rank has and its numbers; and how much this rank transformed."""
    rule, elements = RULES[run.rule], [0]
    original = rule.transform

    def counted(self: Any, xp: Any, tensors: Any, *args: Any, **named: Any) -> Any:
        elements[0] += tensors[0].numel()
        return original(self, xp, tensors, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule, "transform", counted)
        got = stepped(run, laid_out(layout))
    entries = {(name, "p"): p for name, p in got.params.items()}
    entries |= {(name, key): entry for name, state in got.states.items() for key, entry in state.items()}
    held = {place: (block_of(entry), local(entry).tolist()) for place, entry in entries.items()}
    return {"held": held, "elements": elements[0]}


def block_of(x: Any) -> Any:
    """Which block of a tensor this rank has."""
    if not isinstance(x, DTensor):
        return tuple(x.shape)
    return compute_local_shape_and_global_offset(tuple(x.shape), x.device_mesh, x.placements)


def explained(run: Run, layout: str) -> str:
    return str(stepped(run, laid_out(layout)).optimizer.explain())


def errors_without_a_gradient(run: Run) -> list[str]:
    """The errors of a run in which all ranks but the first have no gradient of the last parameter."""
    absent = {0: run.names[-1:]} if torch.distributed.get_rank() else {}
    return stepped(replace(run, absent=absent), plain).errors
