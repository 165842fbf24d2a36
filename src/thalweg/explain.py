"""What an optimizer will do with each parameter, told before it does anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thalweg.arrays import Shape, is_number
from thalweg.codecs import CODECS, LEAST_GROUP, LEAST_SIZE, bytes_of, grouping
from thalweg.dtypes import DTYPES, NARROW
from thalweg.rules import Rule
from thalweg.rules.around import parts_of
from thalweg.rules.entries import Factor
from thalweg.settings import ParameterOptions
from thalweg.storage import describe_state

#: Bytes of dense factors from which on a warning is due.
HUGE = 2**28


@dataclass(frozen=True)
class Row:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    treatment: str
    lr_scale: float
    weight_decay: Any
    state_bytes: int
    warnings: tuple[str, ...] = ()
    #: The name of the rule that steps it.
    rule: str = ""
    #: What was not understood about it, or assumed, and what to write if that is wrong.
    hints: tuple[str, ...] = ()
    #: In JAX, the code that ``make_step`` runs for it on a device of its own: "native", or "xla" and why.
    engine: str = ""


@dataclass(frozen=True)
class GroupRow:
    """One parameter group, in front ends that have groups."""

    #: As a trainer has named the group; None if it has no name.
    name: str | None
    stepped: int
    #: Parameters that do not require gradients: they are not stepped and have no state.
    frozen: int
    lr: Any
    #: What lr multiplies, or is multiplied by, where that is not evident.
    notes: tuple[str, ...] = ()
    #: The name of its rule, in a mixture.
    rule: str = ""

    def __str__(self) -> str:
        frozen = f" and {self.frozen} frozen" if self.frozen else ""
        name = "" if self.name is None else f" {self.name!r}"
        rule = f"{self.rule}, " if self.rule else ""
        return "; ".join([f"{name}: {rule}{self.stepped} stepped{frozen}, lr {self.lr}", *self.notes])


@dataclass(frozen=True)
class Explanation:
    """A row for each parameter that is stepped; printed, it is a table with its totals, groups and warnings."""

    rows: Sequence[Row]
    #: Entries of ``overrides`` that match no parameter.
    unused_overrides: Sequence[Any] = field(default_factory=list)
    groups: Sequence[GroupRow] = ()
    #: The source of the fused code for each treatment, where it was asked for.
    code: Mapping[str, str] = field(default_factory=dict)
    #: Patterns of a mixture that are the first to match no parameter.
    unused_entries: Sequence[Any] = ()
    #: What a step needs in memory beside parameters, gradients and state, at most; None: the front end cannot tell.
    temporary_bytes: int | None = None

    @property
    def state_bytes(self) -> int:
        return sum(row.state_bytes for row in self.rows)

    @property
    def warnings(self) -> list[str]:
        by_row = [set(row.warnings) for row in self.rows] if len(self.rows) > 1 else [set[str]()]
        common = set[str].intersection(*by_row)
        problems = [f"{row.name}: {warning}" for row in self.rows for warning in row.warnings if warning not in common]
        problems = [f"all {len(self.rows)} parameters: {warning}" for warning in sorted(common)] + problems
        unused = {"overrides": self.unused_overrides, "entries": self.unused_entries}
        idle = [f"{what}: {pattern!r} matches no parameter" for what, named in unused.items() for pattern in named]
        return [*problems, *idle]

    @property
    def hints(self) -> list[str]:
        """What was not understood, or assumed, each with the parameters that it is about."""
        return list_hints((row.name, row.hints) for row in self.rows)

    def __str__(self) -> str:
        head = ("name", "shape", "dtype", "treatment", "lr scale", "decay", "state bytes")
        cells: list[tuple[str, ...]] = [
            (
                r.name,
                "x".join(map(str, r.shape)) or "()",
                r.dtype,
                r.treatment,
                f"{r.lr_scale:g}",
                f"{r.weight_decay}",
                f"{r.state_bytes:,}",
            )
            for r in self.rows
        ]
        cells = [head, *cells, ("total", "", "", "", "", "", f"{self.state_bytes:,}")]
        if any(group.rule for group in self.groups):
            rules = ("rule", *(row.rule for row in self.rows), "")
            cells = [(*row[:3], rule, *row[3:]) for row, rule in zip(cells, rules, strict=True)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        if self.temporary_bytes is not None:
            lines.append(f"temporaries at most: {self.temporary_bytes:,} bytes")
        groups = [f"group {index}{group}" for index, group in enumerate(self.groups)]
        code = [f"\n{title}\n\n{source}" for title, source in self.code.items()]
        notes = [f"warning: {warning}" for warning in self.warnings] + [f"hint: {hint}" for hint in self.hints]
        return "\n".join([*lines, *groups, *notes, *code])


def explain_parameter(
    name: str,
    shape: Shape,
    dtype: str,
    setting: ParameterOptions,
    *,
    lr: Any,
    rms: float | None,
    counter_bytes: int,
    hints: Sequence[str] = (),
) -> Row:
    """What holds for one parameter. hints: what is known of it beside its shape.

    lr: the learning rate; what is no number and not None is not known. rms: that of the parameter, None if not known.
    counter_bytes: what its count of steps takes.
    """
    rule = setting.rule_at(1)
    entries = describe_state(rule, setting.numerics, shape, dtype).items()
    state = {key: math.prod(entry_shape) * bytes_of(stored) for key, (entry_shape, stored) in entries}
    factors = sum(state[key] for key in rule.keys(shape, Factor))
    warnings = []
    if factors > HUGE:
        warnings.append(f"its factors take {factors / 2**20:,.0f} MiB: lower max_size_dense, or max_skew")
    if rms is not None and math.isnan(rms):
        warnings.append(
            "it holds NaN, which no step removes: load a checkpoint from before, and on_nonfinite='raise' names the "
            "parameter where it begins"
        )
    warnings += kept_wide(shape, setting)
    if rms is not None and (lr is None or is_number(lr)):
        warnings += lost_to_rounding(dtype, setting, lr, rms)
    if (lr is None or is_number(lr)) and (1.0 if lr is None else lr) * setting.lr_scale == 0:
        warnings.append("its learning rate is 0")
    return Row(
        name,
        shape,
        dtype,
        rule.treatment(shape),
        setting.lr_scale,
        getattr(rule, "weight_decay", 0.0),
        sum(state.values()) + counter_bytes,
        tuple(warnings),
        parts_of(type(rule))[0].__name__,
        tuple(hint for hint in (*hints, hint_of_stack(name, shape, rule)) if hint),
    )


def list_hints(hinted: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Hints in words, each with the parameters that it is about. hinted: the name of each parameter, and its hints."""
    names: dict[str, list[str]] = {}
    for name, hints in hinted:
        for hint in hints:
            names.setdefault(hint, []).append(name)
    more = {hint: f" and {len(owners) - 2} more" if len(owners) > 2 else "" for hint, owners in names.items()}
    return [f"{', '.join(owners[:2])}{more[hint]}: {hint}" for hint, owners in names.items()]


def hint_of_stack(name: str, shape: Shape, rule: Rule) -> str:
    """What to say of a tensor of three axes that is no kernel of a convolution: it may be a stack of matrices."""
    last_name = name.rpartition(".")[2]
    is_kernel = last_name in ("weight", "kernel") and "expert" not in name
    if len(shape) != 3 or min(shape) < 2 or is_kernel or rule.stacked_axes or not rule.looks_at_shapes:
        return ""
    return "taken for one tensor; if it is a stack, as of experts, say overrides=[(name, dict(stacked_axes=1))]"


def kept_wide(shape: Shape, setting: ParameterOptions) -> list[str]:
    """Whether eight bits were asked for, and a tensor that is not small has rows that cannot be grouped."""
    rule, numerics = setting.rule_at(1), setting.numerics
    wanted = any(numerics.stored(entry) in CODECS for entry in rule.entries(shape).values())
    slice_shape = shape[rule.stacked_axes :]
    if not wanted or len(slice_shape) < 2 or math.prod(slice_shape) < LEAST_SIZE or grouping(shape, rule.stacked_axes):
        return []
    return [f"its state stays in float32: no row of {shape} can be cut into equal groups of {LEAST_GROUP} or more"]


def lost_to_rounding(dtype: str, setting: ParameterOptions, lr: float | None, rms: float) -> list[str]:
    """Whether steps of the expected size vanish when they are rounded to the nearest."""
    if dtype not in NARROW or setting.numerics.rounding != "nearest":
        return []
    step = setting.rule.expected_rms(lr, rms) * setting.lr_scale
    half = rms * 2.0 ** -DTYPES[dtype].digits
    if math.isfinite(step) and 0 < step < half:
        lost = f"steps of about {step:.1e} are below half the spacing of {dtype} at {rms:.1e} and will be lost"
        return [f"{lost}: use rounding='stochastic'"]
    return []
