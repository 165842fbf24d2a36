"""What a step costs: the passes of a setting over parameters of some kind, and the bytes that they move."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping

from thalweg.arrays import Shape
from thalweg.codecs import bytes_of, scale_key
from thalweg.errors import RuleError
from thalweg.programs.schedule import Schedule, schedule
from thalweg.programs.trace import GRADIENT, PARAMETER, example_of, list_kind, trace
from thalweg.rules.entries import PerSlice
from thalweg.rules.rule import stand_in
from thalweg.settings import ParameterOptions
from thalweg.storage import RECORD, Kept, arithmetic, describe_state


@functools.lru_cache(maxsize=4096)
def state_entries(setting: ParameterOptions, shape: Shape, dtype: str, held: Shape | None = None) -> Mapping[str, Kept]:
    """Shape and dtype of everything that is kept for a parameter, or for a shard that has the shape ``held``."""
    return describe_state(setting.rule_at(1), setting.numerics, shape, dtype, held)


def entry_bytes(entry: Kept) -> int:
    shape, dtype = entry
    return math.prod(shape) * bytes_of(dtype)


def sizes_of(setting: ParameterOptions, shape: Shape, dtype: str, held: Shape | None = None) -> dict[str, int]:
    """Bytes of a parameter or a shard of it, of its gradient in the same dtype, and of the entries of its state.

    Scales are read and written with their entries, and the record of rounding with the parameter.
    """
    size = {key: entry_bytes(entry) for key, entry in state_entries(setting, shape, dtype, held).items()}
    entries = {key: size[key] + size.get(scale_key(key), 0) for key in setting.rule_at(1).entries(shape)}
    parameter = entry_bytes((shape if held is None else held, dtype))
    return {PARAMETER: parameter + size.get(RECORD, 0), GRADIENT: parameter, **entries}


def passes_of(setting: ParameterOptions, shape: Shape, dtype: str) -> Schedule:
    """The passes of a step over parameters of the same kind as one of this shape and dtype."""
    # whether lr is given is not known here: the larger of both
    rates = (True, False) if setting.rule_at(1).lr_optional else (True,)
    schedules = [schedule_of(setting, shape, dtype, has_lr=has_lr) for has_lr in reversed(rates)]
    size = sizes_of(setting, shape, dtype)
    return max(schedules, key=lambda candidate: candidate.count_bytes(size))


def schedule_of(setting: ParameterOptions, shape: Shape, dtype: str, *, has_lr: bool) -> Schedule:
    """The passes of a step over such parameters. has_lr: whether a learning rate is given."""
    rule = stand_in(setting.rule_at(1))
    alike = list_kind(rule, setting.numerics, shape)
    return schedule_kind(
        ParameterOptions(rule, setting.numerics),
        alike,
        len(shape),
        Example(example_of(rule, shape), shape),
        dtype,
        has_lr,
    )


def bytes_moved(setting: ParameterOptions, shape: Shape, dtype: str, held: Shape | None = None) -> int:
    """What a step of a parameter, or of a shard, moves to memory and from it, if tensors are larger than caches."""
    size = sizes_of(setting, shape, dtype, held)
    # all gradients are read once more for their joint norm
    clipping = size[GRADIENT] if setting.numerics.needs_norm else 0
    if not setting.rule_at(1).needs_whole:
        try:
            return clipping + passes_of(setting, shape, dtype).count_bytes(size)
        except RuleError:  # no passes can be made of the rule
            pass
    return clipping + bytes_of_whole(setting, shape, size, is_shard=held not in (None, shape))


def bytes_of_whole(setting: ParameterOptions, shape: Shape, size: Mapping[str, int], *, is_shard: bool) -> int:
    """What a step moves at least where there are no passes: it reads everything, and writes all but factors.

    size: that of the parameter, its gradient and each entry of its state, in bytes. is_shard: whether another rank may
    read the factors.
    """
    factors = setting.rule_at(1).keys(shape, PerSlice)
    like_parameter = sum(bytes_ for key, bytes_ in size.items() if key not in factors)
    read_only = 0 if is_shard else sum(size[key] for key in factors)
    return 2 * like_parameter - size[GRADIENT] + read_only


class Example:
    """A shape that stands for all of its kind: all give the same passes. parameter_shape: a real one."""

    def __init__(self, shape: Shape, parameter_shape: Shape) -> None:
        self.shape, self.parameter_shape = shape, parameter_shape

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Example)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=1024)
def schedule_kind(
    setting: ParameterOptions, kind: Hashable, axes: int, example: Example, dtype: str, has_lr: bool
) -> Schedule:
    shape, rule = example.shape, setting.rule_at(1)
    declared = rule.entries(shape).items()
    entries = {key: entry.shape(shape, rule.stacked_axes) for key, entry in declared}
    stored = state_entries(setting, example.parameter_shape, dtype)
    exact = [key for key in entries if stored[key][1] == arithmetic(dtype)]
    return schedule(
        trace(rule, shape, entries, lr=1.0 if has_lr else None),
        sizes_of(setting, example.parameter_shape, dtype),
        exact=exact,
        guarded=setting.numerics.on_nonfinite != "propagate",
    )
