"""Steps of one small model over ranks, beside the same steps in one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from mixed import kron_and_others
from own_rules import Centred, InOnePart, Layerwise, Measured
from tolerances import WORLD
from world_layouts import (
    SHAPES,
    WRAPPERS,
    DTensor,
    drawn,
    gradient,
    home,
    mesh,
    placed,
    quiet,
    ranks,
    share_of_this_rank,
    torch,
)
from world_layouts import layout as laid_out

import thalweg.torch
from thalweg.errors import OptimError
from thalweg.torch.engines.lists import Lists
from thalweg.torch.engines.triton import Triton

#: Learning rates of which steps are of moderate size.
LR = {"LARS": 5.0, "LAMB": 0.05, "Adafactor": 0.05, "MARS": 0.01, "SOAP": 0.01, "Lion": 0.01, "AdEMAMix": 0.01}
#: Muon's products in full precision: one rounding to bfloat16 more or less is seen in every later one.
EXACT: Mapping[str, Any] = dict(ns_dtype=None, vectors="row")
#: All that a rule sums up: Adafactor's rows and columns of small tensors too.
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
OTHERS: dict[str, Callable[..., Any]] = {
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
    rates: tuple[float, ...] = (1.0, 0.5, 0.25)
    #: Options of each group; parameters go to them in turn.
    groups: tuple[Mapping[str, Any], ...] = ({},)
    overrides: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    #: How gradients are laid out.
    gradients: str = "alike"
    #: Under a wrapper, into how many passes the gradients are divided, and whether the last of them steps.
    passes: int = 1
    in_backward: bool = False
    #: By step, parameters that have no gradient.
    absent: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    #: (step, parameter, number): the last element of its gradient, which one rank or one row of ranks holds.
    spoilt: tuple[tuple[int, str, float], ...] = ()
    #: The same for all elements of a gradient, which stay finite.
    huge: tuple[int, str, float] | None = None
    tensor_rate: bool = False
    #: The rule chooses its learning rate itself.
    own_rate: bool = False
    one_by_one: bool = False
    #: By step: the state is "reloaded" after it, or the memory of shards "exchanged", or a scaler has it "refused".
    events: Mapping[int, str] = field(default_factory=dict)
    #: Whether plain tensors are replicated over all ranks.
    replicated: bool = False
    #: How many elements an owner receives at a time, if that is told.
    slot: int | None = None
    names: tuple[str, ...] = tuple(SHAPES)
    #: Of those the ones in float32, whatever the others are in.
    narrow: tuple[str, ...] = ()
    #: Kernels for GPUs step what ranks hold, by Triton's interpreter.
    interpreted: bool = False
    #: Where ranks hold it: they may share one GPU.
    device: str = "cpu"

    def numbers(self, name: str, seed: int) -> Any:
        return drawn(name, seed, "float32" if name in self.narrow else self.dtype)

    def lr(self, step: int) -> Any:
        if self.own_rate:
            return None
        rate = LR.get(self.rule, 0.02) * self.rates[step]
        return torch.tensor(rate, dtype=torch.float64) if self.tensor_rate else rate

    def given(self) -> dict[str, Any]:
        return copy.deepcopy(dict(TYPICAL.get(self.rule, {}) if self.options is None else self.options))


def run_of(rule: str, dtype: str = "float64", options: Mapping[str, Any] | None = None, **how: Any) -> Run:
    """A run with the options that are typical of its rule, and others."""
    return Run(rule, dtype, {**TYPICAL.get(rule, {}), **(options or {})}, **how)


class Model(torch.nn.Module):
    """Some parameters, whose gradients are the numbers that it is given."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__()
        for name, p in params.items():
            self.register_parameter(name, p)

    def forward(self, numbers: Mapping[str, Any]) -> Any:
        return torch.stack([(p * numbers[name]).sum() for name, p in self.named_parameters()]).sum()


class Training:
    """The model of a run in a layout, its optimizer, and what each step raised, "" where it did not."""

    def __init__(self, run: Run, layout: str, seed: int = 0) -> None:
        home[0] = run.device
        if run.device == "cuda":
            torch.cuda.set_device(0)  # which all ranks share
        self.run, self.layout, self.errors = run, layout, list[str]()
        place = laid_out(layout)
        params = {name: torch.nn.Parameter(place(name, run.numbers(name, seed))) for name in run.names}
        for name in run.frozen:
            params[name].requires_grad_(False)
        with quiet():
            self.net = WRAPPERS.get(layout, lambda net: net)(Model(params))
        self.own = {name.removeprefix("module."): p for name, p in self.net.named_parameters()}
        groups: list[dict[str, Any]] = [{"params": [], **options} for options in run.groups]
        for group, pair in zip(itertools.cycle(groups), self.own.items(), strict=False):
            group["params"].append(pair)
        make = OTHERS.get(run.rule) or getattr(thalweg.torch, run.rule)
        shared = {"replicas": torch.distributed.group.WORLD} if run.replicated else {}
        more = {"overrides": list(run.overrides), **shared, **run.given()}
        self.optimizer = make(groups, run.lr(0), engine=run.engine, **more)
        if run.slot is not None:
            lists = Lists(slot=run.slot)
            self.optimizer._engines.update(lists=lists, triton=Triton(lists.owners))

    def steps(
        self, first: int, last: int, watch: Callable[[int], AbstractContextManager[Any]] | None = None
    ) -> Training:
        """Steps of the run; ``watch`` gives a context for each."""
        backward = self.run.in_backward and self.layout in WRAPPERS
        around = thalweg.torch.step_in_backward(self.net, self.optimizer) if backward else nullcontext()
        with serving() if self.run.interpreted else nullcontext(), around:
            for step in range(first, last):
                self.step(step, watch(step) if watch else nullcontext())
        return self

    def step(self, step: int, watched: AbstractContextManager[Any]) -> None:
        run, event = self.run, self.run.events.get(step)
        for group, options in zip(self.optimizer.param_groups, itertools.cycle(run.groups), strict=False):
            if "lr" not in options:
                group["lr"] = run.lr(step)
        self.give({name: self.number(name, step) for name in self.own}, run.absent.get(step, ()))
        if event == "refused":
            self.optimizer.found_inf = torch.ones(())
        try:
            with watched:
                if run.one_by_one:
                    for p in self.own.values():
                        self.optimizer.step_parameter(p)
                elif not (run.in_backward and self.layout in WRAPPERS):
                    self.optimizer.step()
            self.errors.append("")
        except OptimError as error:
            self.errors.append(f"{type(error).__name__}: {error}")
        if event == "refused":
            del self.optimizer.found_inf
        elif event == "reloaded":
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        elif event == "exchanged":  # as FSDP2 does
            for p in self.own.values():
                if isinstance(p, DTensor):
                    p._local_tensor = p._local_tensor.clone()

    def number(self, name: str, step: int) -> Any:
        """A whole gradient."""
        g = self.run.numbers(name, step + 1)
        for when, which, number in self.run.spoilt:
            if (when, which) == (step, name):
                g.view(-1)[-1] = number
        if self.run.huge and self.run.huge[:2] == (step, name):
            g.fill_(self.run.huge[2])
        return g

    def give(self, numbers: Mapping[str, Any], absent: tuple[str, ...]) -> None:
        """Gradients, each in its layout; under a wrapper each rank has a share of them, in several passes."""
        if self.layout not in WRAPPERS:
            for name, p in self.own.items():
                has = p.requires_grad and name not in absent
                p.grad = gradient(self.run.gradients, numbers[name], p) if has else None
            return
        share = share_of_this_rank(mesh(ranks())) * ranks()
        self.optimizer.zero_grad()
        for index in range(self.run.passes):
            last = index == self.run.passes - 1
            if self.layout != "DDP":
                self.net.set_requires_gradient_sync(last)
            with self.net.no_sync() if self.layout == "DDP" and not last else nullcontext():
                self.net({name: g * share / self.run.passes for name, g in numbers.items()}).backward()

    @property
    def params(self) -> dict[str, Any]:
        return {name: p.detach() for name, p in self.own.items()}

    @property
    def states(self) -> dict[str, dict[str, Any]]:
        return {name: dict(self.optimizer.state.get(p, {})) for name, p in self.own.items()}


def serving() -> AbstractContextManager[None]:
    """Within: kernels for GPUs are interpreted."""
    import interpreter

    return interpreter.serving()


def stepped(run: Run, layout: str, watch: Callable[[int], AbstractContextManager[Any]] | None = None) -> Training:
    """All steps of a run."""
    return Training(run, layout).steps(0, len(run.rates), watch)


KNOWN: dict[str, Training] = {}


def in_one_process(run: Run, *, alike: bool = False) -> Training:
    """The same steps on plain tensors, which many layouts are compared with.

    alike: by the engine of the run; else by the reference, or by lists if the run is.
    """
    run = replace(run, gradients="alike", device="cpu", replicated=False, slot=None)
    if not alike:
        run = replace(run, engine="foreach" if run.engine == "foreach" else "reference", interpreted=False)
    if repr(run) not in KNOWN:
        KNOWN[repr(run)] = stepped(run, "plain")
    return KNOWN[repr(run)]


def differences(
    run: Run, layout: str, tolerance: float | None = None, *, engine: str | None = None, alike: bool = False
) -> list[str]:
    """Where steps over ranks are not those of one process: in parameters, state, how it is laid out, or errors.

    engine: the one that has to have stepped.
    """
    wanted, got = in_one_process(run, alike=alike), stepped(run, layout)
    found = [*unequal(wanted, got, tolerance), *misplaced(got)]
    found += other_figures(wanted.optimizer.stats(), got.optimizer.stats(), tolerance or WORLD["float32"])
    pairs = {
        "errors are": (got.errors, wanted.errors),
        "skipped are": (got.optimizer.skipped, wanted.optimizer.skipped),
        "not finite are": (got.optimizer.nonfinite(), wanted.optimizer.nonfinite()),
        "the engine is": (got.optimizer.engine, engine or got.optimizer.engine),
    }
    return found + [f"{what} {one}, not {other}" for what, (one, other) in pairs.items() if one != other]


def unequal(wanted: Training, got: Training, tolerance: float | None = None) -> Iterator[str]:
    """tolerance: None for that of each parameter's dtype."""
    states, others = wanted.states, got.states
    for name, p in wanted.params.items():
        start = wanted.run.numbers(name, 0) if p.dtype == torch.float64 else torch.zeros_like(p)
        near = WORLD[str(p.dtype).removeprefix("torch.")] if tolerance is None else tolerance
        yield from further_than(near, name, got.params[name], p, start)
        if list(others[name]) != list(states[name]):
            yield f"{name} has the state {list(others[name])}, and in one process {list(states[name])}"
            continue
        for key, entry in states[name].items():
            other = others[name][key]
            if (other.dtype, other.shape) != (entry.dtype, entry.shape):
                yield f"{name}.{key} is {other.dtype} {other.shape}, and in one process {entry.dtype} {entry.shape}"
                continue
            yield from further_than(near, f"{name}.{key}", other, entry, torch.zeros_like(entry))


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


def misplaced(got: Training) -> Iterator[str]:
    """State lies where its parameter does; numbers of lines are plain tensors, and factors of whole tensors may be."""
    for name, p in got.own.items():
        state = got.optimizer.state.get(p, {})
        for key, entry in state.items():
            single = key in ("step", "refresh", "basis_age", "line_squares", "spikes") or key.startswith("L_")
            factor = key.startswith(("Q_", "GG_")) or (key == "exp_avg_sq" and "basis_age" in state)
            if isinstance(entry, DTensor):
                if single or not isinstance(p, DTensor):
                    yield f"{name}.{key} is a DTensor"
                elif not factor and entry.shape == p.shape and entry.placements != p.placements:
                    yield f"{name}.{key} is placed as {entry.placements}, and its parameter as {p.placements}"
            elif not single and (is_divided(p) or (isinstance(p, DTensor) and not factor)):
                yield f"{name}.{key} is no DTensor"


def is_divided(p: Any) -> bool:
    return isinstance(p, DTensor) and any(
        not placement.is_replicate() and size > 1
        for placement, size in zip(p.placements, p.device_mesh.shape, strict=True)
    )


def told(run: Run, layout: str) -> tuple[list[str], str]:
    """What each step raised, "" where it did not, and what the optimizer says of itself after them."""
    got = stepped(run, layout)
    with serving() if run.interpreted else nullcontext():
        return got.errors, str(got.optimizer.explain())


def flipped(run: Run, layout: str, other: Run | None = None, *, alike: bool = False) -> dict[str, float]:
    """Of each parameter the share of elements that are not those of one process, bit by bit; of its state too."""
    wanted, got = in_one_process(other or run, alike=alike), stepped(run, layout)
    shares = {}
    for name, p in wanted.params.items():
        shares[name] = share_of_others(got.params[name], p)
        for key, entry in wanted.states[name].items():
            shares[f"{name}.{key}"] = share_of_others(got.states[name][key], entry)
    return shares


def share_of_others(x: Any, wanted: Any) -> float:
    others = local(x).cpu() != part_like(x, wanted).cpu()
    return float(others.double().mean()) if others.numel() else 0.0
