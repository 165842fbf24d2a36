"""How values of a graph are written down in Triton, and where kernels find them.

The formulas are the rule's. A value as large as a parameter is read or computed in a pass. One for each tensor is
computed where the first pass needs it, or after a pass, from its sums, and kept among the *figures*. Numbers that the
options make are computed by the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from thalweg.kernels.text import summand
from thalweg.kernels.triton.lines import Statements
from thalweg.kernels.triton.memory import Memory, Stored
from thalweg.programs.graph import Value
from thalweg.programs.operations import TRUTH
from thalweg.programs.schedule import Schedule
from thalweg.programs.trace import GRADIENT, PARAMETER
from thalweg.programs.verify import dtype_of

#: Inputs that are one number for each tensor.
SCALAR_INPUTS = {
    "t": "step_number(rows, row{0})",
    "lr": "number_of(lr)",
    "lr_scale": "number_of(lr_scale)",
}
#: Figures that every rule has before its own: whether a tensor's step is finite, and the number of the step.
OWN_FIGURES = 2


@dataclass
class Emission:
    """All kernels of one schedule, while they are written."""

    #: Where the elements of a block are in a tensor: the first of them, and behind it all.
    FIRST: ClassVar[str] = "first + begin"
    INDEX: ClassVar[str] = "index"

    schedule: Schedule
    #: How all that is read and written is stored, and whether state is rounded at random.
    stored: tuple[Stored, ...] = ()
    random: bool = False
    #: Places of numbers and figures, in the order in which they were first needed.
    numbers: dict[Value, int] = field(default_factory=dict)
    figures: dict[Value, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.program = self.schedule.program
        self.large = self.program.memory[PARAMETER]
        self.memory = Memory(self.program, self.stored, self.random, self.FIRST, self.INDEX)
        self.entries = self.program.entries
        #: Of the state: what is one number for each tensor, and what else is smaller than a parameter.
        self.scalars = self.program.scalars
        self.small = [key for key in self.schedule.small if key not in self.scalars]
        numbered = [(number, value) for number, pass_ in enumerate(self.schedule.passes) for value in pass_.sums]
        #: Of each reduction: its place among all, and the pass that makes it.
        self.sums = {value: (place, number) for place, (number, value) in enumerate(numbered)}

    def number(self, value: Value) -> int:
        return 1 + self.numbers.setdefault(value, len(self.numbers))  # behind the sign of the gradient

    def figure(self, value: Value) -> int:
        return OWN_FIGURES + self.figures.setdefault(value, len(self.figures))

    def scalar(self, value: Value, mask: str = "") -> str:
        """An input that is one number for each tensor. mask: ", mask" where many tensors are looked at together."""
        if value.name in self.scalars:
            return f"number_kept(rows, row, {self.entries.index(value.name)}{mask})"
        return SCALAR_INPUTS[value.name].format(mask)

    def kept_figures(self) -> list[tuple[int, int]]:
        """The entries of the state that are one number for each tensor, each with the figure of its new value."""
        return [(self.entries.index(key), self.figure(self.program.state[key])) for key in self.scalars]

    def read_figure(self, value: Value) -> str:
        number = f"tl.load(figures + {self.figure(value)} * count + row)"
        return f"{number} != 0" if dtype_of(value) == TRUTH else number

    def stats(self) -> dict[str, int | float]:
        """The rule's statistics by name: the figure that holds each, or the number that it always is."""
        shown = self.program.stats.items()
        return {name: self.figure(value) if isinstance(value, Value) else float(value) for name, value in shown}

    def rounds_before(self, value: Any) -> int:
        """How many rounds of sums come before a value can be computed."""
        if not isinstance(value, Value):
            return 0
        if value.is_reduction:
            return 1 + self.sums[value][1]
        return max(map(self.rounds_before, value.args), default=0)


class Lines(Statements):
    """The lines of one kernel."""

    def __init__(self, emission: Emission) -> None:
        super().__init__()
        self.emission = emission

    def number_text(self, value: Value) -> str:
        return f"tl.load(numbers + {self.emission.number(value)})"


class Decision(Lines):
    """What is computed for all tensors at once, after a round of sums."""

    def __init__(self, emission: Emission, *, counted: bool = False) -> None:
        """counted: the steps of parameters have been counted on."""
        super().__init__(emission)
        self.counted = counted

    def text(self, value: Value) -> str:
        if value.op == "input":
            noted = self.counted and value.name == "t"
            return "tl.load(figures + T * count + row, mask)" if noted else self.emission.scalar(value, ", mask")
        if value.is_reduction:
            index, _ = self.emission.sums[value]
            total = f"tl.load(totals + {len(self.emission.sums)} * row + {index}, mask, other=0.0)"
            return f"{total} / tl.load(counts + row, mask, other=1.0)" if value.is_mean else total
        return self.operation(value, sqrt="tl.sqrt_rn(nothing + {0})")

    def write_figure(self, value: Value) -> str:
        text = self.write(value)
        number = f"tl.where({text}, 1.0, 0.0)" if dtype_of(value) == TRUTH else text
        return f"tl.store(figures + {self.emission.figure(value)} * count + row, nothing + {number}, mask)"

    def finite_by(self, rounds: int) -> list[str]:
        """The value that says whether steps are finite, if it is known after so many rounds of sums."""
        finite = self.emission.program.finite
        if self.emission.rounds_before(finite) > rounds:
            return []
        text = self.write(finite) if isinstance(finite, Value) else "nothing == 0" if finite else "nothing != 0"
        return [f"tl.store(figures + FINITE * count + row, nothing + tl.where({text}, 1.0, 0.0), mask)"]


class Scalars(Lines):
    """What the first pass computes once for each chunk."""

    def text(self, value: Value) -> str:
        if value.op == "input":
            return self.emission.scalar(value)
        return self.operation(value)


class Elements(Lines):
    """What one pass computes element by element."""

    def __init__(self, emission: Emission, number: int) -> None:
        super().__init__(emission)
        self.pass_number = number
        #: What is one number for each tensor: computed at once by a first pass, else found among the figures.
        self.scalars = Scalars(emission)
        self.scalars.used = self.used
        #: What is read as codes, by what it stands for: how it is called.
        self.codes: dict[Value, str] = {}

    def write(self, operand: Any) -> str:
        if isinstance(operand, Value) and operand not in self.known and operand.extent != self.emission.large:
            self.known[operand] = self.scalar(operand)
        return super().write(operand)

    def scalar(self, value: Value) -> str:
        if self.pass_number == 0 or value.extent is None:
            return self.scalars.write(value)
        if value not in self.scalars.known:
            self.scalars.let(value, self.emission.read_figure(value))
        return self.scalars.known[value]

    def is_one(self, operand: Any) -> bool:
        """Whether an operand is one number for a tensor, not one for each element."""
        return not isinstance(operand, Value) or operand.extent != self.emission.large

    def read(self, key: str, value: Value) -> None:
        """Load what is large. Codes become numbers where they are first needed."""
        memory = self.emission.memory
        if memory.is_coded(key):
            self.codes[value] = memory.short(key)
            self.lines.append(memory.read_codes(key))
        else:
            factor = " * gradient_factor(numbers, grad_scale, SCALED)" if key == GRADIENT else ""
            self.let(value, f"{memory.read(key)}{factor}")

    def summed(self, value: Value) -> str:
        """What a reduction adds up; 0 where nothing is."""
        text = summand(value, self.write(value.args[0]))
        return text if is_zero_where_nothing_is(value.args[0], self.emission.large) else f"kept({text}, mask)"

    def text(self, value: Value) -> str:
        if value in self.codes:
            return "decoded({0}_codes, {0}_scale, GROUP)".format(self.codes[value])
        if value.op == "mul":
            for factor, codes in (value.args, value.args[::-1]):
                if isinstance(codes, Value) and codes in self.codes and codes not in self.known and self.is_one(factor):
                    # one product for each group instead of one for each element
                    return "decoded({0}_codes, {0}_scale * {1}, GROUP)".format(self.codes[codes], self.write(factor))
        if value.op == "div" and isinstance(value.args[0], Value) and value.args[0].extent == self.emission.large:
            below = value.args[1]
            if self.is_one(below):
                # one division for each tensor instead of one for each element
                return f"{self.write(value.args[0])} * {self.write(value.graph.apply('div', 1.0, below))}"
        return self.operation(value, **self.emission.memory.operations)


def is_zero_where_nothing_is(value: Any, large: Any) -> bool:
    """Whether a value is 0 where everything that is read is 0, as it is behind the end of a tensor."""

    def is_zero(operand: Any) -> bool:
        if not isinstance(operand, Value):
            return bool(operand == 0)
        if operand.op == "input":
            return bool(operand.extent == large)
        if operand.op == "mul":
            return any(map(is_zero, operand.args))
        if operand.op in ("add", "sub"):
            return all(map(is_zero, operand.args))
        return operand.op in ("neg", "abs", "sqrt") and is_zero(operand.args[0])

    return is_zero(value)
