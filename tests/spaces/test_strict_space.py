"""The strict space: the shapes that arrays with numbers have, and no more than every array library can do."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from strategies import one_by_one

from thalweg.arrays import Squares
from thalweg.errors import OptimError, RuleError
from thalweg.rules import RULES
from thalweg.settings import RuleOptions
from thalweg.spaces.strict import Strict
from thalweg.trial import try_update

PARAMETERS = [(), (1,), (7,), (0,), (3, 0), (5, 4), (12, 10), (3, 4, 5, 2), (2, 12, 10)]


@pytest.mark.parametrize("name", RULES)
def test_every_rule_may_do_what_it_does(name: str) -> None:
    # each block of Muon's has a norm of its own, and rules of one's own one for each tensor
    tried = [options for options in one_by_one(RULES[name]) if "split" not in options]
    for shape, options in product(PARAMETERS, tried):
        rule = RuleOptions(RULES[name], options).base.for_shape(shape).rule_at(1)
        try:
            rule.check_shape("p", shape)
        except OptimError:
            continue
        try_update(rule, shape)


#: What cannot be done with m, (4, 6), and v, (3,), and what is said of it; tests/test_own_rule_mistakes.py has more.
REFUSED: list[tuple[Any, str]] = [
    (lambda xp, m, v: xp.where(m > 0, m, v), "which do not go together"),
    (lambda xp, m, v: np.float64(2) * m, "calls a function of numpy"),
    (lambda xp, m, v: xp.tanh(m), "uses xp.tanh, which is no function of xp"),
    (lambda xp, m, v: xp.sums((m, (2,))), r"asks for axis 2 of an array of shape \(4, 6\)"),
    (lambda xp, m, v: xp.means(Squares(0.5, None)), "needs an array, and has a float"),
    (lambda xp, m, v: xp.amax(v, (-2,)), r"asks for axis -2 of an array of shape \(3,\)"),
    (lambda xp, m, v: xp.reshape(m, (5, 5)), r"reshapes an array of shape \(4, 6\) to \(5, 5\)"),
    (lambda xp, m, v: xp.reshape(m, (-1,)), "give all sizes"),
    (lambda xp, m, v: xp.reshape_like(m, v), r"reshapes an array of shape \(4, 6\) to \(3,\)"),
    (lambda xp, m, v: xp.swapaxes(v, 0, 1), r"asks for axis 1 of an array of shape \(3,\)"),
    (lambda xp, m, v: xp.cut(m, 1, (2, 3)), r"cuts an array of shape \(4, 6\) along axis 1 into parts of \(2, 3\)"),
    (lambda xp, m, v: xp.join([m, xp.swapaxes(m, 0, 1)], 0), r"joins arrays of shapes \(4, 6\), \(6, 4\) along axis 0"),
    (lambda xp, m, v: xp.matmul(m, m), r"multiplies matrices of shapes \(4, 6\) and \(4, 6\)"),
    (lambda xp, m, v: xp.matmul(m, v), r"needs matrices, and has an array of shape \(3,\)"),
    (lambda xp, m, v: xp.matmul_add(m, xp.swapaxes(m, 0, 1), m, 1.0, 1.0), "which do not go together"),
    (lambda xp, m, v: xp.eigenvectors(m), r"needs square matrices, and has an array of shape \(4, 6\)"),
    (lambda xp, m, v: xp.orthonormal(v), "needs square matrices"),
    (lambda xp, m, v: xp.solve(xp.identity(6, m), m), r"multiplies matrices of shapes \(6, 6\) and \(4, 6\)"),
    (lambda xp, m, v: xp.arrange(m, v, 1), r"arranges axis 1 of an array of shape \(4, 6\) by numbers of shape"),
    (lambda xp, m, v: xp.matmul_rounded(m, xp.swapaxes(m, 0, 1), "bf61"), "asks for the dtype 'bf61'"),
    (lambda xp, m, v: xp.cond(m[0] > 0, lambda: m, lambda: v), "takes a part of a value"),
    (lambda xp, m, v: xp.cond(xp.amax(m, None) > 0, lambda: m, lambda: v), r"\(4, 6\) on one side of xp.cond"),
    (lambda xp, m, v: ~(m > 0), r"uses \| or ~ on truth values"),
    (lambda xp, m, v: 7 % m, "uses //, % or round"),
]


@pytest.mark.parametrize(("do", "message"), REFUSED)
def test_what_no_library_can_do_is_refused_with_the_line(do: Any, message: str) -> None:
    xp = Strict("Mine", frozenset({__file__}))
    line = rf"^Mine, line {do.__code__.co_firstlineno} of .*{__name__.rpartition('.')[2]}.py: update "
    with pytest.raises(RuleError, match=f"{line}.*{message}"):
        do(xp, xp.array((4, 6)), xp.array((3,)))
