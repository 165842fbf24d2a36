"""Stacks of arrays, put together and taken apart in one call: XLA would compile a kernel for each of their members."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from thalweg.kernels.cpu.xla import place_of

#: Copies from arrays to results, of which it is told shapes and dtypes: of each copy two places, and how many bytes.
Move: TypeAlias = Callable[[Sequence[Any], Sequence[Any], Sequence[int]], list[Any]]


def stack_all(move: Move, lists: Sequence[Sequence[Any]]) -> list[Any]:
    """The arrays of each list as one, with a leading axis more."""
    members = [x for arrays in lists for x in arrays]
    results = [jax.ShapeDtypeStruct((len(arrays), *arrays[0].shape), arrays[0].dtype) for arrays in lists]
    moves: list[int] = []
    first = 0
    for number, stack in enumerate(results):
        size = bytes_of_member(stack)
        for index in range(len(lists[number])):
            moves += place_of(first + index), place_of(len(members) + number, index * size), size
        first += len(lists[number])
    return move(members, results, moves) if members else []


def take_apart(move: Move, stacks: Sequence[Any]) -> list[list[Any]]:
    """The members of each stack."""
    results: list[Any] = []
    moves: list[int] = []
    for number, stack in enumerate(stacks):
        size = bytes_of_member(stack)
        for index in range(len(stack)):
            moves += place_of(number, index * size), place_of(len(stacks) + len(results)), size
            results.append(jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype))
    parts = iter(move(stacks, results, moves) if stacks else [])
    return [[next(parts) for _ in range(len(stack))] for stack in stacks]


def bytes_of_member(stack: Any) -> int:
    size: int = math.prod(stack.shape[1:]) * stack.dtype.itemsize
    return size
