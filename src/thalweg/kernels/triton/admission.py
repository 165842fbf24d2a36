"""Which parameters fused kernels for GPUs step; told without loading torch or Triton."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping

from thalweg.arrays import Shape
from thalweg.codecs import CODECS, grouping, scale_key
from thalweg.errors import Refused, asked_once, refusal
from thalweg.programs.budget import state_entries
from thalweg.programs.extents import check_seen, is_spread, kinds_of, spread_shapes
from thalweg.programs.parts import decides_by_tensors, first_part, last_part, own_keys
from thalweg.programs.trace import Program, example_of, trace
from thalweg.rules import Rule, WholeRule
from thalweg.rules.around import entries_around
from thalweg.rules.entries import Count, PerSlice, Spread
from thalweg.rules.rule import stand_in
from thalweg.settings import ParameterOptions
from thalweg.storage import Kept, coded_groups

#: The dtypes of parameters and state that kernels read and write.
DTYPES = ("float32", "bfloat16", "float16")
#: State entries that the tables of kernels have room for.
ROOM = 6


def admit(setting: ParameterOptions, shape: Shape, dtype: str, state: Mapping[str, Kept]) -> None:
    """Raise Refused if fused kernels cannot step a parameter whose state has these shapes and dtypes."""
    rule = setting.rule_at(1)
    if isinstance(rule, WholeRule):
        check_whole(setting, rule, shape, state)
    else:
        check_derived(rule, shape)
        narrow = [
            key for key in program_of(stand_in(rule), example_of(rule, shape)).scalars if state[key][1] != "float32"
        ]
        if narrow:
            raise Refused(f"fused kernels keep one number for each tensor in float32, and {narrow[0]!r} is not")
    if dtype not in DTYPES:
        raise Refused(f"there is no fused kernel for {dtype} on GPUs")
    entries = rule.entries(shape)
    numbers = [stored_dtype for key, (_, stored_dtype) in state.items() if not isinstance(entries.get(key), Count)]
    if any(stored_dtype not in (*DTYPES, *CODECS) for stored_dtype in numbers):
        raise Refused("there is no fused kernel for state of float64 on GPUs")
    is_coded = any(scale_key(key) in state for key in state)
    if is_coded and not isinstance(rule, WholeRule) and cuts_groups(stand_in(rule), shape):
        raise Refused(f"tiles of rows and columns of a tensor of shape {shape} cut its groups of codes")


def check_derived(rule: Rule, shape: Shape) -> None:
    """Raise Refused if no kernels can be made of a rule for parameters of this kind."""
    check_example(stand_in(rule), example_of(rule, shape))


@asked_once
def check_example(rule: Rule, shape: Shape) -> None:
    name, entries = type(rule).__name__, rule.entries(shape)
    if len(entries) > ROOM:
        raise Refused(f"{name} keeps {len(entries)} entries for a parameter, and fused kernels have room for {ROOM}")
    if not all(map(is_spread, entries.values())):
        raise Refused(f"{name} keeps entries of a shape of their own, for which no kernels are made")
    # without an lr too, where a rule may choose its step size
    for rated in (True, False) if rule.lr_optional else (True,):
        program = program_of(rule, shape, rated)
        check_seen(program, kinds_of(program, rule.stacked_axes))


def check_whole(setting: ParameterOptions, rule: WholeRule, shape: Shape, state: Mapping[str, Kept]) -> None:
    """Raise Refused if kernels cannot step a parameter before and after products of whole tensors."""
    name, numerics = type(rule).__name__, setting.numerics
    check_parts(rule, shape)
    if numerics.on_nonfinite != "propagate":
        raise Refused(f"there is no fused kernel of {name} for on_nonfinite={numerics.on_nonfinite!r}")
    if numerics.may_skip and not rule.IN_PARTS:
        raise Refused(f"the host counts the steps of {name}, and would not know of one that is skipped")
    narrow = [state[key][1] for key in rule.keys(shape, PerSlice) if state[key][1] not in ("float32", "bfloat16")]
    if narrow:
        raise Refused(f"factors of {narrow[0]} are for library products alone, not for those beside fused kernels")
    if not math.prod(shape):
        raise Refused("it has no elements")
    if not shape and not rule.has_factors:  # kernels take a number for a vector, whose length sets the step's scale
        raise Refused(f"it is a single number, which {name} sees as a matrix of one element")
    if numerics.state_rounding == "stochastic":
        raise Refused(f"there is no fused kernel of {name} for state_rounding='stochastic'")


def check_parts(rule: WholeRule, shape: Shape) -> None:
    """Raise Refused if no fused code can be made of the first and the last part of a rule."""
    name = type(rule).__name__
    if not rule.goes_in_parts():
        raise Refused(f"{name} needs whole tensors, and its other parts are not known to go without")
    keys = own_keys(rule, shape)
    around = entries_around(rule, shape).values()
    if len(keys) != 1 or any(not isinstance(entry, Spread) or entry.over for entry in around):
        raise Refused(
            f"{name} keeps {sorted(keys) or 'nothing'} for a parameter, and fused code of its parts needs one entry"
        )
    check_derived(first_part(rule), shape)
    check_derived(last_part(rule), shape)
    if (counts := tuple(rule.keys(shape, Count))) and decides_by_tensors(rule, keys[0], counts):
        raise Refused(f"what is due in a step of {name} depends on tensors, and the host knows counts alone")


@functools.lru_cache(maxsize=1024)
def cuts_groups(rule: Rule, shape: Shape) -> bool:
    """Whether a tensor is stepped tile by tile, and its lines do not end with a group, or are not of columns alone."""
    groups = grouping(shape, rule.stacked_axes)
    axes = kinds_of(program_of(rule, example_of(rule, shape)), rule.stacked_axes).axes
    if groups is None or axes is None:
        return False
    return math.prod(shape[axes[1] + 1 :]) != 1 or shape[axes[1]] % groups.size != 0


@functools.lru_cache(maxsize=256)
def program_of(rule: Rule, shape: Shape, rated: bool = True) -> Program:
    """A rule traced for parameters of this kind. rated: whether there is an lr; else the rule chooses its step size."""
    return trace(rule, shape, spread_shapes(rule.entries(shape), shape), lr=1.0 if rated else None)


def is_parted(setting: ParameterOptions, shape: Shape) -> bool:
    """Whether kernels step shards or replicas of a parameter before and after its owner has transformed the whole."""
    rule, numerics = setting.rule, setting.numerics
    if not isinstance(rule, WholeRule) or rule.stacked_axes or numerics.is_random:
        return False
    if coded_groups(rule, numerics, shape) is not None:
        return False
    return rule.IN_PARTS and rule.whole_tensors() == 1 and rule.is_stackable(shape)


def would_lose_kernels(setting: ParameterOptions, shape: Shape, dtype: str, *, capturable: bool = False) -> bool:
    """Whether fused kernels step a parameter that is whole, and not if its replicas divided the work on it."""
    kind, rule = (setting, shape, dtype, state_entries(setting, shape, dtype)), setting.rule
    is_counted = not capturable or (isinstance(rule, WholeRule) and rule.IN_PARTS)
    return is_counted and not is_parted(setting, shape) and not refusal(admit, *kind)


def admit_shard(setting: ParameterOptions, shape: Shape, sharded: Collection[int]) -> None:
    """Raise Refused if fused kernels cannot step a shard of a parameter of this shape, or the whole for its owner.

    sharded: along which axes.
    """
    rule = setting.rule
    if is_parted(setting, shape):
        return
    if isinstance(rule, WholeRule):
        raise Refused(f"it is sharded, and owners have library products for {type(rule).__name__} with these options")
    if rule.needs_whole:  # the owner works on the whole tensor, and each rank then steps its shard
        return
    if rule.stacked_axes:
        raise Refused("it is sharded, and GPU kernels step shards only with stacked_axes=0")
    if setting.numerics.is_random and sum(axis > 0 for axis in sharded) > 1:
        raise Refused(
            "it is sharded along several axes beyond the first, and GPU kernels then round to the nearest alone"
        )
