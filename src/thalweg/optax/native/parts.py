"""One call on every device's part of its arrays, where nothing in it depends on other parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec


def by_parts(call: Callable[..., Sequence[Any]], owners: Sequence[int], given: Sequence[int], *args: Any) -> Any:
    """The results of call, declared to the compiler so that it divides call as it divides the arrays.

    owners: of each result, which array of args it is laid out like. given: the same of each of args, -1: of none, and
    every device has it whole.
    """

    def place(mesh: Any, args: Sequence[Any], of: Sequence[int]) -> tuple[Any, ...]:
        return tuple(NamedSharding(mesh, PartitionSpec()) if i < 0 else args[i].sharding for i in of)

    def divide(mesh: Any, args: Any, results: Any) -> Any:
        return mesh, as_tuple, place(mesh, args, owners), place(mesh, args, given)

    def as_tuple(*parts: Any) -> tuple[Any, ...]:
        return tuple(call(*parts))

    def infer(mesh: Any, args: Any, results: Any) -> Any:
        return place(mesh, args, owners)

    def axes_of(number: int, like: int) -> str:
        """Names of its axes: the same for all that are laid out alike."""
        prefix = f"w{number}" if like < 0 else f"a{like}"
        return " ".join(f"{prefix}{chr(98 + axis)}" for axis in range(args[number].ndim))

    sides = [[axes_of(i, like) for i, like in enumerate(given)], [axes_of(like, like) for like in owners]]
    declared = custom_partitioning(as_tuple)
    declared.def_partition(
        partition=divide,
        infer_sharding_from_operands=infer,
        sharding_rule=" -> ".join(", ".join(side) for side in sides),
    )
    return declared(*args)
