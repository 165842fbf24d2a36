"""The dtypes that parameters, gradients and state may have: one table, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

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
    #: Numbers below it, and sums of a few of them, are surely finite; what may be larger is looked at.
    trusted: float

    @property
    def rounding(self) -> float:
        """The distance from 1 to the next larger number."""
        return 2.0 ** (1 - self.digits)


DTYPES: Mapping[str, DType] = {
    "float32": DType(4, 24, -125, 1e38),
    "float64": DType(8, 53, -1021, 1e307),
    "bfloat16": DType(2, 8, -125, 1e38),
    "float16": DType(2, 11, -13, 6e4),
}
#: Those that are narrower than any arithmetic, so that what is stored in them is rounded.
NARROW = tuple(name for name, dtype in DTYPES.items() if dtype.bytes == 2)

#: What else a dtype is called, in small letters. ``float`` is not here: it has 32 bits in torch and 64 in numpy.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "float32": ("fp32", "f32"),
    "float64": ("fp64", "f64", "double"),
    "bfloat16": ("bf16",),
    "float16": ("fp16", "f16", "half"),
}
NAMES: Mapping[str, str] = {alias: name for name in DTYPES for alias in (name, *ALIASES[name])}


def spelt_dtype(name: Any) -> Any:
    """The dtype that is meant, as it is spelt here; what is not known is left as it is.

    >>> spelt_dtype("BF16"), spelt_dtype("torch.float16"), spelt_dtype("int8")
    ('bfloat16', 'float16', 'int8')
    """
    return NAMES.get(str(name).strip().lower().removeprefix("torch."), name)
