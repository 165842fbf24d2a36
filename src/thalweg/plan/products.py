"""The matrix products of a step, counted by running it on arrays without numbers."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.boundary import arithmetic
from thalweg.plan.items import Item
from thalweg.plan.peaks import held, stepped
from thalweg.spaces import shapes
from thalweg.spaces.shape_arrays import Ledger


@dataclass(frozen=True)
class Products:
    """Matrix products of one step."""

    flops: int
    #: Of operands and results.
    bytes: int


def products(item: Item, *, refresh: bool = True) -> Products:
    """The matrix products of a step of one parameter; ``refresh``: of one that refreshes Kron's factors."""
    ledger = Ledger("torch", branch=refresh)
    one = held(ledger, item)
    stepped(shapes, item, one.p, one.g, one.state, noise=lambda: ledger.array(one.p.shape, arithmetic(one.p.dtype)))
    return Products(ledger.flops, ledger.product_bytes)
