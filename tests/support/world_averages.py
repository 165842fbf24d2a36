"""Averages of a model over ranks, put in place and taken out again."""

from __future__ import annotations

from world_layouts import layout as laid_out
from world_layouts import torch
from world_steps import Run, further_than, in_one_process, local, stepped


def faults_of_averages(run: Run, layout: str) -> list[str]:
    """Where averages in place are not those of one process, or parameters after it not those before it."""
    wanted, got = in_one_process(run), stepped(run, laid_out(layout))
    before, found = {name: local(p).clone() for name, p in got.params.items()}, []
    with wanted.optimizer.averaged(), got.optimizer.averaged():
        for name, p in got.own.items():
            expected = wanted.own[name].detach()
            found += further_than(1e-9, name, p.detach(), expected, torch.zeros_like(expected))
            if torch.equal(local(p.detach()), before[name]) and before[name].numel():
                found.append(f"{name} is not averaged")
    found += [f"{name} is another" for name, p in got.own.items() if not torch.equal(local(p.detach()), before[name])]
    return found
