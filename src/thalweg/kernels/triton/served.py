"""Which parameters fused kernels for GPUs step; told without loading torch or Triton."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping

from thalweg.arrays import Shape
from thalweg.codecs import CODECS, grouping, scale_key
from thalweg.programs.budget import state_entries
from thalweg.programs.extents import kinds_of, spread_shapes
from thalweg.programs.parts import reason_unparted
from thalweg.programs.reasons import reason_underived
from thalweg.programs.trace import Program, example_of, trace
from thalweg.rules import Rule, WholeRule
from thalweg.rules.entries import Count, PerSlice
from thalweg.rules.rule import stand_in
from thalweg.settings import ParameterOptions
from thalweg.storage import Kept, coded_groups

#: The dtypes of parameters and state that kernels read and write.
DTYPES = ("float32", "bfloat16", "float16")


def reason_against(setting: ParameterOptions, shape: Shape, dtype: str, state: Mapping[str, Kept]) -> str:
    """Why fused kernels cannot step a parameter whose state has these shapes and dtypes, "" if they can."""
    rule = setting.rule_at(1)
    if isinstance(rule, WholeRule):
        unserved = reason_against_whole(setting, rule, shape, state)
    else:
        unserved = reason_underived(rule, shape) or reason_against_scalars(rule, shape, state)
    if unserved:
        return unserved
    if dtype not in DTYPES:
        return f"there is no fused kernel for {dtype} on GPUs"
    entries = rule.entries(shape)
    numbers = [kept for key, (_, kept) in state.items() if not isinstance(entries.get(key), Count)]
    if any(kept not in (*DTYPES, *CODECS) for kept in numbers):
        return "there is no fused kernel for state of float64 on GPUs"
    is_coded = any(scale_key(key) in state for key in state)
    return reason_against_storage(setting, rule, shape, is_coded=is_coded)


def reason_against_scalars(rule: Rule, shape: Shape, state: Mapping[str, Kept]) -> str:
    """Why kernels cannot keep what is one number for each tensor, "" if they can."""
    narrow = [key for key in scalars_of(stand_in(rule), shape) if state[key][1] != "float32"]
    return f"fused kernels keep one number for each tensor in float32, and {narrow[0]!r} is not" if narrow else ""


@functools.lru_cache(maxsize=1024)
def scalars_of(rule: Rule, shape: Shape) -> list[str]:
    return program_of(rule, shape).scalars


def reason_against_whole(setting: ParameterOptions, rule: WholeRule, shape: Shape, state: Mapping[str, Kept]) -> str:
    """Why kernels cannot step a parameter before and after products of whole tensors, "" if they can."""
    name = type(rule).__name__
    if unserved := reason_unparted(rule, shape) or reason_against_guards(setting):
        return unserved
    if setting.handling.may_skip and not rule.IN_PARTS:
        return f"the host counts the steps of {name}, and would not know of one that is skipped"
    narrow = [state[key][1] for key in rule.keys(shape, PerSlice) if state[key][1] not in ("float32", "bfloat16")]
    if narrow:
        return f"factors of {narrow[0]} are for library products alone, not for those beside fused kernels"
    return "" if math.prod(shape) else "it has no elements"


def reason_against_storage(setting: ParameterOptions, rule: Rule, shape: Shape, *, is_coded: bool) -> str:
    """Why fused kernels cannot read and write state as it is kept, "" if they can. is_coded: whether some is codes."""
    name, handling = type(rule).__name__, setting.handling
    if isinstance(rule, WholeRule) and handling.state_rounding == "stochastic":
        return f"there is no fused kernel of {name} for state_rounding='stochastic'"
    if is_coded and not isinstance(rule, WholeRule) and cuts_groups(stand_in(rule), shape):
        return f"tiles of rows and columns of a tensor of shape {shape} cut its groups of codes"
    return ""


@functools.lru_cache(maxsize=1024)
def cuts_groups(rule: Rule, shape: Shape) -> bool:
    """Whether a tensor is stepped tile by tile, and its lines do not end with a group, or are not of columns alone."""
    groups = grouping(shape, rule.stacked_axes)
    axes = kinds_of(program_of(rule, shape), rule.stacked_axes).axes
    if groups is None or axes is None:
        return False
    return math.prod(shape[axes[1] + 1 :]) != 1 or shape[axes[1]] % groups.size != 0


def program_of(rule: Rule, shape: Shape) -> Program:
    example = example_of(rule, shape)
    return trace(rule, example, spread_shapes(rule.entries(example), example))


def reason_against_guards(setting: ParameterOptions) -> str:
    """Why fused kernels of the parts of a rule cannot step a parameter, "" if they can."""
    policy = setting.handling.on_nonfinite
    if policy != "propagate":
        return f"there is no fused kernel of {type(setting.rule).__name__} for on_nonfinite={policy!r}"
    return ""


def is_parted(setting: ParameterOptions, shape: Shape) -> bool:
    """Whether kernels step shards or replicas of a parameter before and after its owner has transformed the whole."""
    rule, handling = setting.rule, setting.handling
    if not isinstance(rule, WholeRule) or rule.stacked_axes or handling.is_random:
        return False
    if coded_groups(rule, handling, shape) is not None:
        return False
    return rule.IN_PARTS and rule.is_stackable(shape)


def would_lose_kernels(setting: ParameterOptions, shape: Shape, dtype: str, *, capturable: bool = False) -> bool:
    """Whether fused kernels step a parameter that is whole, and not if its replicas divided the work on it."""
    kind, rule = (setting, shape, dtype, state_entries(setting, shape, dtype)), setting.rule
    is_counted = not capturable or (isinstance(rule, WholeRule) and rule.IN_PARTS)
    return is_counted and not is_parted(setting, shape) and not reason_against(*kind)


def reason_against_shard(setting: ParameterOptions, shape: Shape, sharded: Collection[int]) -> str:
    """Why fused kernels cannot step a shard of a parameter of this shape, or the whole for its owner; "" if they can.

    sharded: along which axes.
    """
    rule = setting.rule
    if is_parted(setting, shape):
        return ""
    if isinstance(rule, WholeRule):
        return f"it is sharded, and owners have library products for {type(rule).__name__} with these options"
    if rule.needs_whole:  # the owner works on the whole tensor, and each rank then steps its shard
        return ""
    if rule.stacked_axes:
        return "it is sharded, and GPU kernels step shards only with stacked_axes=0"
    if setting.handling.is_random and sum(axis > 0 for axis in sharded) > 1:
        return "it is sharded along several axes beyond the first, and GPU kernels then round to the nearest alone"
    return ""
