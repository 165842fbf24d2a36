"""An array without numbers: its shape, its dtype, and a ledger that knows how long it lives.

Arrays come and go as Python's references to them do, just as those of numpy and torch. Where the two differ in what
they allocate for an operation, the ledger says whose ways are followed.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Literal, TypeAlias

from thalweg.arrays import Shape

Library: TypeAlias = Literal["numpy", "torch"]

BYTES = {"bool": 1, "int32": 4, "int64": 8, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
#: Of two dtypes in one operation, the later one is the result's.
ORDER = tuple(BYTES)
#: From so many bytes on numpy writes a result over an operand that nobody else refers to.
REUSED_FROM = 256 * 2**10


#: References to an operand that is not asked about.
MANY = sys.maxsize


class Ledger:
    """What is alive, the most that has been at once, and the matrix products there were."""

    def __init__(self, library: Library = "torch", *, selects: bool = False, branch: bool = True) -> None:
        self.library = library
        #: Whether both sides of a branch are computed, because the host does not know which is asked for.
        self.selects = selects
        #: Which side is taken otherwise.
        self.branch = branch
        self.live = self.peak = self.start = 0
        #: Floating point operations of matrix products, and bytes of their operands and results.
        self.flops = self.product_bytes = 0

    def begin(self) -> None:
        """Take what is alive now for what was there before."""
        self.peak = self.start = self.live

    @property
    def extra(self) -> int:
        """The most that has been alive at once, beyond what was there at the beginning."""
        return self.peak - self.start

    def array(self, shape: Shape, dtype: str) -> ShapeOnly:
        return ShapeOnly(shape, dtype, Memory(self, math.prod(shape) * BYTES[dtype]))


class Memory:
    """What an array and the views of it occupy. It is freed with the last of them."""

    __slots__ = ("ledger", "size")

    def __init__(self, ledger: Ledger, size: int) -> None:
        self.ledger, self.size = ledger, size
        ledger.live += size
        ledger.peak = max(ledger.peak, ledger.live)

    def __del__(self) -> None:
        self.ledger.live -= self.size


class ShapeOnly:
    """An array without numbers."""

    __slots__ = ("dtype", "is_plain", "is_view", "memory", "shape", "strides")

    def __init__(self, shape: Shape, dtype: str, memory: Memory, strides: Shape | None = None) -> None:
        self.shape, self.dtype, self.memory = shape, dtype, memory
        #: In elements; None: in C order, without gaps.
        self.strides = strides
        #: Whether the memory is another array's.
        self.is_view = False
        #: Whether the library has a number of Python's here, which widens nothing.
        self.is_plain = False

    @property
    def ledger(self) -> Ledger:
        return self.memory.ledger

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]

    def new(self, shape: Shape | None = None, dtype: str | None = None) -> ShapeOnly:
        return self.ledger.array(self.shape if shape is None else shape, dtype or self.dtype)

    def view(self, shape: Shape, strides: Shape | None) -> ShapeOnly:
        seen = ShapeOnly(shape, self.dtype, self.memory, strides)
        seen.is_view, seen.is_plain = True, self.is_plain
        return seen

    def __getitem__(self, index: int) -> ShapeOnly:
        return self.view(self.shape[1:], self.strides and self.strides[1:])

    def __bool__(self) -> bool:
        raise TypeError("an array without numbers has no truth value")

    # References to operands are counted in the operators themselves, as numpy does it, before anything refers to them.

    def __add__(self, other: Any) -> Any:
        return combined(sys.getrefcount(self), sys.getrefcount(other), self, other)

    def __mul__(self, other: Any) -> Any:
        return combined(sys.getrefcount(self), sys.getrefcount(other), self, other)

    def __and__(self, other: Any) -> Any:
        return combined(sys.getrefcount(self), sys.getrefcount(other), self, other)

    def __xor__(self, other: Any) -> Any:
        return combined(sys.getrefcount(self), sys.getrefcount(other), self, other)

    def __sub__(self, other: Any) -> Any:
        return combined(sys.getrefcount(self), MANY, self, other)

    def __truediv__(self, other: Any) -> Any:
        return combined(sys.getrefcount(self), MANY, self, other)

    def __neg__(self) -> ShapeOnly:
        return over_itself(self) if is_reused(sys.getrefcount(self) - UNNAMED[2], self, self) else applied(self)

    def __radd__(self, other: Any) -> Any:
        return combined(MANY, MANY, self, other)

    def __rmul__(self, other: Any) -> Any:
        return combined(MANY, MANY, self, other)

    def __rand__(self, other: Any) -> Any:
        return combined(MANY, MANY, self, other)

    def __rxor__(self, other: Any) -> Any:
        return combined(MANY, MANY, self, other)

    def __rsub__(self, other: Any) -> Any:
        return combined(MANY, MANY, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        # torch takes the reciprocal, and multiplies
        return combined(MANY, MANY, self if self.ledger.library == "numpy" else applied(self), other)

    def __pow__(self, other: Any) -> Any:
        return combined(MANY, MANY, self, other)

    def __rshift__(self, other: Any) -> Any:
        return combined(MANY, MANY, self, other)

    def __gt__(self, other: Any) -> Any:
        return compared(self, other)

    def __ge__(self, other: Any) -> Any:
        return compared(self, other)

    def __lt__(self, other: Any) -> Any:
        return compared(self, other)

    def __le__(self, other: Any) -> Any:
        return compared(self, other)

    def __eq__(self, other: object) -> Any:
        return compared(self, other)

    def __ne__(self, other: object) -> Any:
        return compared(self, other)

    __hash__ = None  # type: ignore[assignment]


class _Counted:
    """Something whose operator tells how many references its operands have."""

    def __add__(self, other: Any) -> tuple[int, int]:
        return sys.getrefcount(self), sys.getrefcount(other)

    def __neg__(self) -> int:
        return sys.getrefcount(self)


#: References to operands that only the interpreter knows: on the left, on the right, alone.
UNNAMED = (*(_Counted() + _Counted()), -_Counted())
_named = _Counted()
#: Interpreters that lend operands without counting do not tell these from others: then nothing is taken for reused.
TELLS = (_named + _Counted())[0] > UNNAMED[0] and sys.platform != "win32"


def combined(left: int, right: int, x: ShapeOnly, other: Any) -> Any:
    """The result of an operation on two operands with so many references, one of which may become it."""
    if isinstance(other, ShapeOnly):
        if is_reused(left - UNNAMED[0], x, other):
            return over_itself(x)
        if x.shape == other.shape and is_reused(right - UNNAMED[1], other, x):
            return over_itself(other)
    elif not isinstance(other, (int, float)):
        return NotImplemented
    return applied(x, other)


def is_reused(references: int, x: ShapeOnly, other: ShapeOnly) -> bool:
    """Whether numpy would write the result over x, to which there are so many references with names."""
    return (
        TELLS
        and references <= 0
        and x.ledger.library == "numpy"
        and not (x.is_view or x.is_plain or other.is_plain)
        and x.nbytes >= REUSED_FROM
        and other.shape in ((), x.shape)
        and ORDER.index(other.dtype) <= ORDER.index(x.dtype)
    )


def over_itself(x: ShapeOnly) -> ShapeOnly:
    return ShapeOnly(x.shape, x.dtype, x.memory, x.strides)


def compared(x: ShapeOnly, other: Any) -> ShapeOnly:
    return applied(x, other, dtype="bool")


def applied(*operands: Any, dtype: str | None = None) -> ShapeOnly:
    """A new array, the result of an elementwise operation; numbers among the operands widen nothing."""
    arrays = [x for x in operands if isinstance(x, ShapeOnly)]
    typed = [x for x in arrays if not x.is_plain] or arrays
    widest = dtype or max((x.dtype for x in typed), key=ORDER.index)
    result = arrays[0].new(broadcast([x.shape for x in arrays]), widest)
    result.is_plain = all(x.is_plain for x in arrays)
    return result


def broadcast(shapes: list[Shape]) -> Shape:
    if len(set(shapes)) == 1:
        return shapes[0]
    ndim = max(map(len, shapes))
    padded = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    found = []
    for sizes in zip(*padded, strict=True):
        size = next((n for n in sizes if n != 1), 1)
        if any(n not in (1, size) for n in sizes):
            raise ValueError(f"shapes {', '.join(map(str, shapes))} cannot be broadcast together")
        found.append(size)
    return tuple(found)
