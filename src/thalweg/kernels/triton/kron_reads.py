"""What the kernels of Kron read of a matrix: its figures, sums that others have left, whether there is work at all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from thalweg.kernels.triton.coded import decoded, read_codes
from thalweg.kernels.triton.kron_layout import DUE, GO, ROWS
from thalweg.kernels.triton.rows import loaded

#: What kernels are given in memory; all else that is no constant is a number.
TABLES = "places", "figures", "finite"


def kernel(function: Callable[..., Any]) -> Any:
    """A kernel that is compiled for all numbers that it may be given, and not anew for each."""
    given = inspect.signature(function).parameters.values()
    numbers = [each.name for each in given if "constexpr" not in str(each.annotation) and each.name not in TABLES]
    return triton.jit(do_not_specialize=numbers)(function)


@triton.jit
def figure(figures, which, matrix, count):
    return tl.load(figures + which * count + matrix)


@triton.jit
def number(places, which: tl.constexpr, matrix, count):
    """A number that stands in the table of addresses itself."""
    return tl.load(places + which * count + matrix)


@triton.jit
def extent(places, axis, matrix, count):
    """Rows or columns of a matrix."""
    return tl.load(places + (ROWS + axis) * count + matrix).to(tl.int32)


@triton.jit
def momentum(m_places, s_places, mask, groups, GROUP: tl.constexpr):
    """The momentum of some elements. GROUP: how many share a scale; 0: it is no codes. groups: the mask of scales."""
    if GROUP == 0:
        return loaded(m_places, mask)
    else:
        codes, scale = read_codes(m_places, s_places, mask, groups)
        return decoded(codes, scale, GROUP)


@triton.jit
def sum_of(numbers, count, BLOCK: tl.constexpr):
    """The sum of a panel of numbers, in an order that is always the same."""
    total = tl.zeros((BLOCK,), tl.float32)
    begin = 0
    while begin < count:
        index = begin + tl.arange(0, BLOCK)
        total += tl.load(numbers + index, index < count, other=0.0)
        begin += BLOCK
    return tl.sum(total)


@triton.jit
def sum_over(places, which, matrix, several, each, count, BLOCK: tl.constexpr):
    """The sum of panels of ``each`` numbers, of several matrices from one on, in an order that is always the same."""
    total = tl.zeros((BLOCK,), tl.float32)
    begin = 0
    while begin < several * each:
        index = begin + tl.arange(0, BLOCK)
        mask = index < several * each
        panels = tl.load(places + which * count + matrix + index // each, mask, other=0)
        total += tl.load(panels.to(tl.pointer_type(tl.float32)) + index % each, mask, other=0.0)
        begin += BLOCK
    return tl.sum(total)


@triton.jit
def largest_of(numbers, count, BLOCK: tl.constexpr):
    found = tl.zeros((BLOCK,), tl.float32)
    begin = 0
    while begin < count:
        index = begin + tl.arange(0, BLOCK)
        found = tl.maximum(found, tl.load(numbers + index, index < count, other=0.0))
        begin += BLOCK
    return tl.max(found)


@triton.jit
def idle(figures, matrix, count, refreshes):
    """Whether there is nothing to do for a matrix: it is not stepped, or has no refresh where this is part of one."""
    rests = figure(figures, GO, matrix, count) == 0
    return rests | ((figure(figures, DUE, matrix, count) == 0) & (refreshes != 0))
