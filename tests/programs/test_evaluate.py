"""A traced rule that is run round by round holds no value too long. tests/sharded has that its numbers are right."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from thalweg.errors import RuleError  # noqa: E402
from thalweg.programs.evaluate import order_for, update_by  # noqa: E402
from thalweg.rules import LAMB, Kron  # noqa: E402
from thalweg.spaces.foreach import TensorList  # noqa: E402
from thalweg.spaces.sharded import Part, Sharded  # noqa: E402


def test_a_value_is_let_go_after_its_last_use() -> None:
    """When sums of squares have been made, nothing else needs what they are of."""
    shape, rule, seen = (4, 6), LAMB(), []
    xp: Any = Sharded([Part(shape, (0, 0), ((), ()))] * 2)
    given: dict[str, Any] = {name: TensorList([torch.randn(shape) for _ in range(2)]) for name in "pg"}
    given.update(rule.init(xp, given["p"]), t=1, lr=0.1, lr_scale=1.0)
    order = order_for(rule, rule, list(rule.entries(shape)), shape, with_lr=True)
    held = [weakref.ref(given[name]) for name in "pg"]

    def complete(partials: Sequence[Any]) -> Generator[Any, Any, Sequence[Any]]:
        seen.append([reference() is None for reference in held])
        yield
        return [partial.complete(iter([figure for figure, _ in partial.asked])) for partial in partials]

    list(update_by(rule, order, xp, given, complete))
    assert seen == [[True, True]]
    assert not given


def test_what_cannot_be_traced_is_told() -> None:
    kron = Kron()
    with pytest.raises(RuleError, match=r"Kron.*xp\.in_precision"):
        order_for(kron, kron, tuple(kron.entries((4, 6))), (4, 6), with_lr=True)
