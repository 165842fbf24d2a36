"""Kernels that are made from a rule: traced, scheduled for the dtypes at hand, emitted as Triton, and loaded."""

from __future__ import annotations

import functools
import hashlib
import linecache
import sys
import types
from dataclasses import fields
from typing import Any

import triton
import triton.language as tl

from thalweg.arrays import Shape, is_number
from thalweg.kernels.triton import blocks, coded, numbers, rows, stages, sums
from thalweg.kernels.triton.admission import program_of
from thalweg.kernels.triton.memory import Stored, sizes_of
from thalweg.kernels.triton.print import Printed
from thalweg.programs.extents import ELEMENT, TENSOR, Kinds, kinds_of
from thalweg.programs.schedule import Schedule, reductions_before, schedule
from thalweg.rules import Rule


@triton.jit
def kept(x, mask):
    """x where there is something, else 0."""
    if mask is not None:
        x = tl.where(mask, x, 0.0)
    return x


@functools.lru_cache(maxsize=256)
def kernels_for(
    rule: Rule,
    shape: Shape,
    stored: tuple[Stored, ...],
    guarded: bool,
    complete: bool,
    rated: bool = True,
    random: bool = False,
) -> tuple[Printed, dict[str, Any]]:
    """What was printed for a rule, and the module that it makes: Triton compiles its kernels when they are launched.

    stored: p, g, each entry, and the record if there is one. complete: all sums are before the last pass. rated:
    whether there is an lr; else the rule chooses its step size. random: whether state is rounded at random.
    """
    program = program_of(rule, shape, rated)
    kinds, size, exact = kinds_of(program, rule.stacked_axes), sizes_of(stored), [x.key for x in stored if x.exact]
    for is_complete in (complete or guarded, True):
        chosen = schedule(program, size, exact=exact, guarded=guarded, complete=is_complete)
        if kinds.axes is None or can_end(chosen, kinds):
            break
    printed = Printed(chosen, kinds, stored, title_of(rule), guarded=guarded, random=random)
    return printed, loaded(printed.source, type(rule).__name__)


def can_end(schedule: Schedule, kinds: Kinds) -> bool:
    """Whether the last pass makes sums of elements over tensors alone, and no row or column waits for them."""
    *before, last = schedule.passes
    over = {(kinds.find(value.args[0]), kinds.find(value)) for value in last.sums}
    waited_for = reductions_before(schedule.program.state[key] for key in schedule.small)
    return bool(before) and over <= {(ELEMENT, TENSOR)} and waited_for.isdisjoint(last.sums)


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
    """What printed source may use."""
    return {**named_in(blocks, coded, numbers, rows, stages, sums), "kept": kept, "triton": triton, "tl": tl}


def loaded(source: str, name: str) -> dict[str, Any]:
    """Run printed source as a module. Triton reads a kernel's source anew, so it has to be found by name."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    name = f"thalweg.kernels.triton.derived_{name.lower()}_{digest}"
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__file__ = f"<{name}>"
        linecache.cache[module.__file__] = (len(source), None, source.splitlines(True), module.__file__)
        vars(module).update(home())
        exec(compile(source, module.__file__, "exec"), vars(module))
        sys.modules[name] = module
    return vars(sys.modules[name])
