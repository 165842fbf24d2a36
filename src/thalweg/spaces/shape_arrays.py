"""An array without numbers: its shape, its dtype, and a ledger that knows how long it lives.

Arrays come and go as Python's references to them do, just as those of numpy and torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal, TypeAlias

from thalweg.arrays import Shape

Library: TypeAlias = Literal["numpy", "torch"]

BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int32": 4,
    "int64": 8,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}
#: Of two dtypes in one operation, the later one is the result's.
ORDER = tuple(BYTES)
#: From so many bytes on numpy writes the sum of two arrays over one that is let go; on Windows it never does.
REUSED_FROM = sys.maxsize if sys.platform == "win32" else 256 * 2**10


class Ledger:
    """What is alive, after each allocation, and the matrix products there were."""

    def __init__(
        self, library: Library = "torch", *, selects: bool = False, branch: bool = True, widens: bool = False
    ) -> None:
        self.library = library
        #: Whether products of 16 bits are made in float32, as on CPUs.
        self.widens = widens
        #: Whether both sides of a branch are computed, because the host does not know which is asked for.
        self.selects = selects
        #: Which side is taken otherwise.
        self.branch = branch
        #: How many arrays each one stands for: a list of equal shapes is stepped as one of them.
        self.times = 1
        self.live = self.start = 0
        #: Bytes that were alive after each allocation.
        self.moments: list[int] = []
        #: Memory that numpy may write the latest result over, if the operation itself lets go of it: then nothing else
        #: has a name for it. And which operation that is.
        self.reusable: tuple[int, ...] = ()
        self.operation: tuple[int, int] = (0, 0)
        #: Floating point operations of matrix products, and bytes of their operands and results.
        self.flops = self.product_bytes = 0

    def begin(self) -> None:
        """Take what is alive now for what was there before."""
        self.start, self.moments = self.live, []

    @property
    def extra(self) -> int:
        """The most that has been alive at once, beyond what was there at the beginning."""
        return max(self.moments, default=self.start) - self.start

    def array(self, shape: Shape, dtype: str) -> ShapeOnly:
        return ShapeOnly(shape, dtype, Memory(self, math.prod(shape) * BYTES[dtype] * self.times))


class Memory:
    """What an array and the views of it occupy. It is freed with the last of them."""

    __slots__ = ("ledger", "size")

    def __init__(self, ledger: Ledger, size: int) -> None:
        self.ledger, self.size = ledger, size
        ledger.live += size
        ledger.moments.append(ledger.live)
        ledger.reusable = ()

    def __del__(self) -> None:
        self.ledger.live -= self.size
        if id(self) in self.ledger.reusable and running(sys._getframe(1)) == self.ledger.operation:
            self.ledger.moments[-1] -= self.size
            self.ledger.reusable = ()


def running(frame: FrameType) -> tuple[int, int]:
    """Which operation of a function is being run."""
    return id(frame), frame.f_lasti


def _operator(*, dtype: str | None = None, over: str = "") -> Callable[..., Any]:
    """An operator; ``over``: which operands numpy may write the result over."""

    def method(x: ShapeOnly, *other: Any) -> Any:
        (y,) = other or (x,)
        if not isinstance(y, (ShapeOnly, int, float)):
            return NotImplemented
        result = applied(x, y, dtype=dtype)
        if x.ledger.library != "numpy" or x.nbytes < REUSED_FROM or not isinstance(y, ShapeOnly):
            return result
        if (x.shape, x.dtype) == (y.shape, y.dtype):
            owned = [operand for operand, side in ((x, "left"), (y, "right")) if side in over and not operand.is_view]
            x.ledger.reusable = tuple(id(operand.memory) for operand in owned)
            x.ledger.operation = running(sys._getframe(1))
        return result

    return method


class ShapeOnly:
    """An array without numbers."""

    __slots__ = ("dtype", "is_turned", "is_view", "memory", "shape")

    def __init__(self, shape: Shape, dtype: str, memory: Memory) -> None:
        self.shape, self.dtype, self.memory = shape, dtype, memory
        #: Whether the memory is another array's, and whether that has its elements in another order.
        self.is_view = self.is_turned = False

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

    def view(self, shape: Shape, *, is_turned: bool = False, dtype: str | None = None) -> ShapeOnly:
        seen = ShapeOnly(shape, dtype or self.dtype, self.memory)
        seen.is_view, seen.is_turned = True, is_turned
        return seen

    def __getitem__(self, index: int) -> ShapeOnly:
        return self.view(self.shape[1:], is_turned=self.is_turned)

    def __bool__(self) -> bool:
        raise TypeError("an array without numbers has no truth value")

    __add__ = __mul__ = __and__ = __xor__ = _operator(over="left right")
    __sub__ = __truediv__ = __neg__ = _operator(over="left")
    __radd__ = __rmul__ = __rand__ = __rxor__ = __rsub__ = __rtruediv__ = __pow__ = __rpow__ = __abs__ = __rshift__ = (
        _operator()
    )
    __gt__ = __ge__ = __lt__ = __le__ = _operator(dtype="bool")
    __eq__ = __ne__ = _operator(dtype="bool")
    __hash__ = None  # type: ignore[assignment]


def applied(*operands: Any, dtype: str | None = None) -> ShapeOnly:
    """A new array, the result of an elementwise operation; numbers among the operands widen nothing."""
    arrays = [x for x in operands if isinstance(x, ShapeOnly)]
    widest = dtype or max((x.dtype for x in arrays), key=ORDER.index)
    return arrays[0].new(broadcast([x.shape for x in arrays]), widest)


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
