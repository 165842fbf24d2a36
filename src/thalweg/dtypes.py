"""The dtypes that parameters, gradients and state may have: one table, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

Name: TypeAlias = Literal["float32", "float64", "bfloat16", "float16"]
#: The same for state that may also be kept in eight bits.
StateName: TypeAlias = Literal["float32", "float64", "bfloat16", "float16", "int8"]


class DType(NamedTuple):
    """A format of floating point numbers m * 2**e with 0.5 <= abs(m) < 1."""

    bytes: int
    #: Binary digits of m.
    digits: int
    #: The least e of a number that has all its digits.
    least: int

    @property
    def rounding(self) -> float:
        """The distance from 1 to the next larger number."""
        return 2.0 ** (1 - self.digits)


DTYPES: Mapping[str, DType] = {
    "float32": DType(4, 24, -125),
    "float64": DType(8, 53, -1021),
    "bfloat16": DType(2, 8, -125),
    "float16": DType(2, 11, -13),
}
#: Those that are narrower than any arithmetic, so that what is stored in them is rounded.
NARROW = tuple(name for name, dtype in DTYPES.items() if dtype.bytes == 2)
