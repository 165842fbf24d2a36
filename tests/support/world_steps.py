"""Steps of one small model over ranks, beside the same steps in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from cases import EVERY, EXACT
from mixed import kron_and_others
from own_rules import Centred, InOnePart, Layerwise, Measured
from tolerances import WORLD
from world_layouts import SHAPES, DTensor, Place, divided, drawn, gradient, home, placed, plain, torch
from world_layouts import layout as laid_out

import thalweg.torch
from thalweg.errors import OptimError
from thalweg.torch.engines.lists import Lists
from thalweg.torch.engines.triton import Triton

#: Rules that differ in what ranks have to tell one another.
RULES = ("LARS", "LAMB", "MARS", "Adafactor", "Muon", "Kron", "SOAP")
#: Steps of moderate size, with all that a rule sums up: Adafactor's rows and columns of small tensors too.
LR = {**{case.name: case.lr for case in EVERY}, "LAMB": 0.05, "kron_and_others": 0.02}
TYPICAL: Mapping[str, Mapping[str, Any]] = {
    "LARS": dict(weight_decay=0.01),
    "LAMB": dict(weight_decay=0.01),
    "MARS": dict(weight_decay=0.01),
    "Adafactor": dict(min_dim_size_to_factor=2, momentum=0.9, weight_decay=0.01),
    "Muon": dict(EXACT, weight_decay=0.01),
    "Kron": dict(weight_decay=0.01),
    "SOAP": dict(precondition_frequency=2),
}
#: A mixture, and rules of one's own; beside them, `rule` of a run is the name of one of ours.
OTHERS: Mapping[str, Callable[..., Any]] = {
    "kron_and_others": kron_and_others,
    **{rule.__name__: thalweg.torch.optimizer(rule) for rule in (Layerwise, Centred, Measured, InOnePart)},
}


@dataclass(frozen=True)
class Run:
    """What is done, whatever the layout."""

    rule: str
    dtype: str = "float64"
    #: None: those that are typical of the rule.
    options: Mapping[str, Any] | None = None
    engine: str = "auto"
    #: A learning rate for each step, as a multiple of the rule's.
    rates: tuple[float, ...] = (1.0, 1.0, 0.5, 0.25)
    #: Options of each group; parameters go to them in turn.
    groups: tuple[Mapping[str, Any], ...] = ({},)
    overrides: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    #: How gradients are laid out.
    gradients: str = "alike"
    #: By step, parameters that have no gradient.
    absent: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    #: (step, parameter, number): the last element of its gradient, which one rank or one row of ranks holds.
    spoilt: tuple[tuple[int, str, float], ...] = ()
    #: The same for all elements of a gradient, which stay finite.
    huge: tuple[int, str, float] | None = None
    tensor_rate: bool = False
    #: The rule chooses its learning rate itself.
    own_rate: bool = False
    one_by_one: bool = False
    #: Whether plain tensors are replicated over all ranks.
    replicated: bool = False
    #: How many elements an owner receives at a time, if that is told.
    slot: int | None = None
    names: tuple[str, ...] = tuple(SHAPES)
    #: Kernels for GPUs step what ranks hold, by Triton's interpreter.
    interpreted: bool = False
    #: Where ranks hold it: they may share one GPU.
    device: str = "cpu"

    def numbers(self, name: str, seed: int) -> Any:
        return drawn(name, seed, self.dtype)

    def lr(self, step: int) -> Any:
        if self.own_rate:
            return None
        rate = LR.get(self.rule, 0.05) * self.rates[step]
        return torch.tensor(rate, dtype=torch.float64) if self.tensor_rate else rate

    def given(self) -> dict[str, Any]:
        return dict(TYPICAL.get(self.rule, {}) if self.options is None else self.options)


@dataclass
class Outcome:
    """What there is after some steps; on this rank its parts."""

    params: dict[str, Any]
    states: dict[str, dict[str, Any]]
    optimizer: Any
    own: dict[str, Any]
    #: What each step raised, "" where it did not.
    errors: list[str]


def stepped(run: Run, place: Place, watch: Callable[[int], AbstractContextManager[Any]] | None = None) -> Outcome:
    """All steps of a run; ``watch`` gives a context for each."""
    home[0] = run.device
    if run.device == "cuda":
        torch.cuda.set_device(0)  # which all ranks share
    if not run.interpreted:
        return stepped_here(run, place, watch)
    from interpreter import serving

    with serving():
        return stepped_here(run, place, watch)


def stepped_here(run: Run, place: Place, watch: Callable[[int], AbstractContextManager[Any]] | None) -> Outcome:
    own = {name: torch.nn.Parameter(place(name, run.numbers(name, 0))) for name in run.names}
    groups: list[dict[str, Any]] = [{"params": [], **options} for options in run.groups]
    for index, pair in enumerate(own.items()):
        groups[index % len(groups)]["params"].append(pair)
    make = OTHERS.get(run.rule) or getattr(thalweg.torch, run.rule)
    shared = {"replicas": torch.distributed.group.WORLD} if run.replicated else {}
    optimizer = make(groups, run.lr(0), engine=run.engine, overrides=list(run.overrides), **shared, **run.given())
    if run.slot is not None:
        lists = Lists(slot=run.slot)
        optimizer._engines.update(lists=lists, triton=Triton(lists.owners))
    errors = []
    for step in range(len(run.rates)):
        for group, options in zip(optimizer.param_groups, itertools.cycle(run.groups), strict=False):
            if "lr" not in options:
                group["lr"] = run.lr(step)
        for name, p in own.items():
            g = run.numbers(name, step + 1)
            for when, which, number in run.spoilt:
                if (when, which) == (step, name):
                    g.view(-1)[-1] = number
            if run.huge and run.huge[:2] == (step, name):
                g.fill_(run.huge[2])
            p.grad = None if name in run.absent.get(step, ()) else gradient(run.gradients, g, p)
        try:
            with watch(step) if watch else nullcontext():
                if run.one_by_one:
                    for p in own.values():
                        optimizer.step_parameter(p)
                else:
                    optimizer.step()
            errors.append("")
        except OptimError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return Outcome(
        {name: p.detach() for name, p in own.items()},
        {name: dict(optimizer.state.get(p, {})) for name, p in own.items()},
        optimizer,
        own,
        errors,
    )


KNOWN: dict[str, Outcome] = {}


def in_one_process(run: Run) -> Outcome:
    """The same steps on plain tensors, which many layouts are compared with."""
    engine = run.engine if run.engine in ("foreach", "reference") else "reference"
    run = replace(run, engine=engine, gradients="alike", interpreted=False, device="cpu", replicated=False)
    if repr(run) not in KNOWN:
        KNOWN[repr(run)] = stepped(run, plain)
    return KNOWN[repr(run)]


def differences(run: Run, layout: str, tolerance: float | None = None) -> list[str]:
    """Where steps over ranks are not those of one process: in parameters, state, how it is laid out, or errors."""
    wanted, got = in_one_process(run), stepped(run, laid_out(layout))
    found = list(unequal(run, wanted, got, WORLD[run.dtype] if tolerance is None else tolerance))
    found += list(misplaced(got))
    found += list(other_figures(wanted.optimizer.stats(), got.optimizer.stats(), tolerance or WORLD["float32"]))
    if got.errors != wanted.errors:
        found.append(f"errors are {got.errors}, and in one process {wanted.errors}")
    if got.optimizer.skipped != wanted.optimizer.skipped:
        found.append(f"{got.optimizer.skipped} steps are skipped, and {wanted.optimizer.skipped} in one process")
    if got.optimizer.nonfinite() != wanted.optimizer.nonfinite():
        found.append(f"not finite: {got.optimizer.nonfinite()}, and in one process {wanted.optimizer.nonfinite()}")
    return found


def unequal(run: Run, wanted: Outcome, got: Outcome, tolerance: float) -> Iterator[str]:
    for name, p in wanted.params.items():
        start = run.numbers(name, 0) if run.dtype == "float64" else torch.zeros_like(p)
        yield from further_than(tolerance, name, got.params[name], p, start)
        if (keys := list(got.states[name])) != list(wanted.states[name]):
            yield f"{name} has the state {keys}, and in one process {list(wanted.states[name])}"
            continue
        for key, entry in wanted.states[name].items():
            other = got.states[name][key]
            if (other.dtype, other.shape) != (entry.dtype, entry.shape):
                yield f"{name}.{key} is {other.dtype} {other.shape}, and in one process {entry.dtype} {entry.shape}"
                continue
            yield from further_than(tolerance, f"{name}.{key}", other, entry, torch.zeros_like(entry))


def other_figures(wanted: Mapping[str, Any], got: Mapping[str, Any], tolerance: float) -> Iterator[str]:
    """What `stats()` tells otherwise than in one process; of slices of a stack a rank may have only its own."""
    for name, figures in wanted.items():
        for key, figure in figures.items():
            if np.shape(got[name][key]) == np.shape(figure) and not np.allclose(
                got[name][key], figure, rtol=tolerance, atol=tolerance, equal_nan=True
            ):
                yield f"{name}: {key} is {got[name][key]}, and in one process {figure}"


def further_than(tolerance: float, what: str, x: Any, wanted: Any, start: Any) -> Iterator[str]:
    """Whether a tensor, or what this rank has of it, differs by more than that share of the largest element."""
    x, own = (each.detach().cpu().double() for each in (local(x), part_like(x, wanted)))
    if not torch.equal(x.isfinite(), own.isfinite()):
        yield f"{what} has other elements that are not finite"
    elif x.numel():
        size = (wanted.double() - start.double()).nan_to_num(0.0, 0.0, 0.0).abs().max().item()
        error = (x - own).nan_to_num(0.0, 0.0, 0.0).abs().max().item()
        if not error <= tolerance * size:
            yield f"{what} differs by {error:.1e} of {size:.1e}"


def local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


def part_like(x: Any, wanted: Any) -> Any:
    """What a rank should have, if it has x."""
    return local(placed(wanted, x.device_mesh, x.placements)) if isinstance(x, DTensor) else wanted


def misplaced(got: Outcome) -> Iterator[str]:
    """State lies where its parameter does; numbers of lines are plain tensors, and factors of whole tensors may be."""
    for name, p in got.own.items():
        for key, entry in got.optimizer.state.get(p, {}).items():
            single = key in ("step", "refresh", "basis_age", "line_squares", "spikes") or key.startswith("L_")
            if single or not isinstance(p, DTensor):
                if isinstance(entry, DTensor):
                    yield f"{name}.{key} is a DTensor"
            elif key.startswith(("Q_", "GG_")) or (key == "exp_avg_sq" and "basis_age" in got.optimizer.state[p]):
                if is_divided(p) and not isinstance(entry, DTensor):
                    yield f"{name}.{key} is no DTensor"
            elif not isinstance(entry, DTensor):
                yield f"{name}.{key} is no DTensor"
            elif entry.shape == p.shape and entry.placements != p.placements:
                yield f"{name}.{key} is placed as {entry.placements}, and its parameter as {p.placements}"


def is_divided(p: Any) -> bool:
    return isinstance(p, DTensor) and any(
        not placement.is_replicate() and size > 1
        for placement, size in zip(p.placements, p.device_mesh.shape, strict=True)
    )


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


def stepped_errors(run: Run, layout: str) -> list[str]:
    """What each step raised, "" where it did not."""
    return stepped(run, laid_out(layout)).errors


def flipped(run: Run, layout: str, other: Run | None = None) -> dict[str, float]:
    """Of each parameter the share of elements that are not those of one process, bit by bit; of its state too."""
    wanted, got = in_one_process(other or run), stepped(run, laid_out(layout))
    shares = {}
    for name, p in wanted.params.items():
        shares[name] = share_of_others(got.params[name], p)
        for key, entry in wanted.states[name].items():
            shares[f"{name}.{key}"] = share_of_others(got.states[name][key], entry)
    return shares


def share_of_others(x: Any, wanted: Any) -> float:
    others = local(x).cpu() != part_like(x, wanted).cpu()
    return float(others.double().mean()) if others.numel() else 0.0


def odd_memory(name: str, x: Any) -> Any:
    """Divided by rows, and on every rank but the first laid out by columns."""
    from world_layouts import mesh, ranks

    p = divided(x, mesh(ranks()), 0) if x.ndim else x.clone()
    if not isinstance(p, DTensor) or torch.distributed.get_rank() == 0:
        return p
    own = p.to_local().t().contiguous().t() if p.ndim == 2 else p.to_local()
    return DTensor.from_local(own, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())


def engine_told(run: Run, layout: str) -> tuple[str, list[str]]:
    """Which engine stepped shards, and differences to one process."""
    got = stepped(run, odd_memory if layout == "odd memory" else laid_out(layout))
    return got.optimizer.engine, list(unequal(run, in_one_process(run), got, WORLD[run.dtype]))


def differences_in_odd_memory(run: Run) -> list[str]:
    wanted, got = in_one_process(run), stepped(run, odd_memory)
    return list(unequal(run, wanted, got, WORLD[run.dtype]))


def differences_untraced(run: Run, layout: str) -> list[str]:
    """The same as ``differences`` where no rule can be traced, on this rank."""
    from thalweg.errors import RuleError
    from thalweg.torch.engines import shards

    def refused(*_: Any, **__: Any) -> Any:
        raise RuleError("no rule is traced here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "order_for", refused)
        return differences(run, layout)
