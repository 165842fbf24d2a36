"""Operands of native passes: where a parameter and what is kept for it lie, whichever library holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from thalweg.arrays import Shape
from thalweg.codecs import scale_key
from thalweg.kernels.cpu.tables import Operand
from thalweg.rules import Rule
from thalweg.storage import RECORD


def operand_of(
    rule: Rule,
    name: str | int,
    shape: Shape,
    p: Any,
    gradient: str,
    state: Mapping[str, Any],
    place: Callable[[Any], tuple[int, str]],
    group: int,
    *,
    position: int = 0,
    whole: Shape | None = None,
) -> Operand:
    """How native code is shown a parameter; the address of its gradient comes later.

    rule: the one that says what is kept. gradient: its dtype. place: the address and the dtype of an array. group:
    which of the options hold. position, whole: of a shard, its first element in the parameter, and that one's shape.
    """
    keys = list(rule.entries(shape if whole is None else whole))
    located = [place(x) for x in (p, *(state[key] for key in keys))]
    addresses, dtypes = [address for address, _ in located], [dtype for _, dtype in located]
    *scales, record = [place(state[key])[0] if key in state else 0 for key in (*map(scale_key, keys), RECORD)]
    return Operand(
        name,
        shape,
        addresses[0],
        0,
        tuple(addresses[1:]),
        (dtypes[0], gradient, *dtypes[1:]),
        group,
        position,
        whole,
        tuple(scales),
        record,
    )
