"""Which rank owns which tensor, where a rule needs whole tensors and parameters are sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from thalweg.arrays import Shape
from thalweg.rules import Kron
from thalweg.rules.blocks import is_zero


def cost(rule: Kron, shape: Shape) -> int:
    """About how many multiplications: products with every dense factor, and of the factors with one another."""
    sizes = rule.sizes(shape)
    dense = [n for n, diagonal in zip(sizes, rule.diagonals(sizes), strict=True) if not diagonal]
    return math.prod(shape) * (1 + sum(dense)) + sum(n**3 for n in dense)


def owners_of(tensors: Sequence[tuple[str, int]], ranks: int) -> list[int]:
    """The rank that owns each tensor, told by its name and cost: the most work first, to the rank with the least."""
    load, found = [0] * ranks, [0] * len(tensors)
    for index in sorted(range(len(tensors)), key=lambda i: (-tensors[i][1], tensors[i][0])):
        found[index] = owner = min(range(ranks), key=load.__getitem__)
        load[owner] += tensors[index][1]
    return found


def tensors_seen(rule: Kron) -> int:
    """How many tensors of a parameter's size an owner has to see: an average to precondition, a gradient to learn."""
    averaged = rule.momentum_mode == "ema" and not is_zero(rule.momentum)
    return 2 if averaged and rule.whiten == "gradient" else 1


def is_remembered(on_nonfinite: str) -> bool:
    """Whether owners keep whole factors from step to step: not if a step may turn out not to be taken."""
    return on_nonfinite == "propagate"
