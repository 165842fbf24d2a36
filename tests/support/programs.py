"""The program of a rule."""

from __future__ import annotations

from thalweg.programs.trace import Program, example_of, trace
from thalweg.rules import Rule


def program_of(rule: Rule, shape: tuple[int, ...], lr: float | None = 0.1) -> Program:
    """The program for parameters of the same kind as one of this shape."""
    example = example_of(rule, shape)
    state = {key: entry.shape(example, rule.stacked_axes) for key, entry in rule.entries(example).items()}
    return trace(rule, example, state, lr=lr)
