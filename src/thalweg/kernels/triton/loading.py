"""Kernels that are made from a rule: traced, scheduled for the dtypes at hand, emitted as Triton, and loaded."""

from __future__ import annotations

import functools
import hashlib
import linecache
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import triton
import triton.language as tl

from thalweg.arrays import Shape, is_number
from thalweg.kernels.triton import coded, numbers, rows, stages
from thalweg.kernels.triton.emit import Emitted, emit
from thalweg.kernels.triton.memory import Stored, sizes_of
from thalweg.programs.extents import spread_shapes
from thalweg.programs.schedule import schedule
from thalweg.programs.trace import Program, trace
from thalweg.rules import Rule


@triton.jit
def kept(x, mask):
    """x where there is something, else 0."""
    if mask is not None:
        x = tl.where(mask, x, 0.0)
    return x


@dataclass(frozen=True)
class Kernels:
    """Kernels of one schedule, compiled by Triton when they are first launched."""

    emitted: Emitted
    passes: Sequence[Any]
    decisions: Sequence[Any]


@functools.lru_cache(maxsize=256)
def kernels_for(
    rule: Rule,
    shape: Shape,
    stored: tuple[Stored, ...],
    guarded: bool,
    complete: bool,
    rated: bool = True,
    random: bool = False,
) -> Kernels:
    """stored: p, g, each entry, and the record if there is one.

    rated: whether there is an lr; else the rule chooses its step size. random: whether state is rounded at random.
    """
    program = traced(rule, shape, rated)
    exact = [entry.key for entry in stored if entry.exact]
    chosen = schedule(program, sizes_of(stored), exact=exact, guarded=guarded, complete=complete or guarded)
    emitted = emit(chosen, title_of(rule), stored, random=random)
    kernels = loaded(emitted.source, type(rule).__name__)
    passes = [kernel for name, kernel in kernels.items() if name.startswith("pass_")]
    decisions = [kernel for name, kernel in kernels.items() if name.startswith("decide_")]
    return Kernels(emitted, passes, decisions)


@functools.lru_cache(maxsize=256)
def traced(rule: Rule, shape: Shape, rated: bool) -> Program:
    return trace(rule, shape, spread_shapes(rule.entries(shape), shape), lr=1.0 if rated else None)


def title_of(rule: Rule) -> str:
    """A rule with the options that decide what its kernels look like: numbers do not, unless they are 0."""

    def decides(value: Any) -> bool:
        return not (isinstance(value, tuple) or (is_number(value) and not isinstance(value, bool) and value != 0))

    chosen = {f.name: getattr(rule, f.name) for f in fields(rule) if decides(getattr(rule, f.name))}
    return f"{type(rule).__name__}({', '.join(f'{name}={value!r}' for name, value in chosen.items())})"


def named_in(*modules: types.ModuleType) -> dict[str, Any]:
    """What modules have for kernels."""
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, (triton.runtime.JITFunction, tl.constexpr)) or type(value).__module__.startswith("triton.")
    }


@functools.cache
def home() -> dict[str, Any]:
    """What emitted source may use."""
    return {**named_in(coded, numbers, rows, stages), "kept": kept, "triton": triton, "tl": tl}


def loaded(source: str, name: str, beside: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run emitted source as a module. Triton reads a kernel's source anew, so it has to be found by name.

    beside: names that the source may use in addition to those of this module.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    name = f"thalweg.kernels.triton.derived_{name.lower()}_{digest}"
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__file__ = f"<{name}>"
        linecache.cache[module.__file__] = (len(source), None, source.splitlines(True), module.__file__)
        vars(module).update({**home(), **(beside or {})})
        exec(compile(source, module.__file__, "exec"), vars(module))
        sys.modules[name] = module
    return vars(sys.modules[name])
