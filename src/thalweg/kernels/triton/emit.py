"""Triton from a schedule: one kernel for each pass over chunks, and one for what is decided tensor by tensor after it.

The formulas are the rule's: here is only how a value of a graph is written down, and where it comes from. A value as
large as a parameter is read or computed in a pass. One for each tensor is computed where the first pass needs it, or
after a pass, from its sums, and kept among the *figures*. Numbers that the options make are computed by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from thalweg.kernels.text import block, indented, summand
from thalweg.kernels.triton.lines import Statements
from thalweg.kernels.triton.memory import Memory, Stored
from thalweg.programs.graph import Value
from thalweg.programs.schedule import Schedule
from thalweg.programs.trace import GRADIENT, PARAMETER

#: Inputs that are one number for each tensor.
SCALAR_INPUTS = {
    "t": "step_number(rows, row{0})",
    "lr": "rate_of(lr, 1.0, LR_IS_TENSOR)",
    "lr_scale": "lr_scale * 1.0",
}
#: Figures that every rule has before its own: whether a tensor's step is finite, and the number of the step.
OWN_FIGURES = 2
ARGUMENTS = """\
    rows, gradients, chunks, numbers, figures, partials, grad_scale, allowed, lr, lr_scale, count, chunk_count,
    STAGE: tl.constexpr, BACKWARDS: tl.constexpr, SCALED: tl.constexpr, ALLOWED: tl.constexpr, GUARDED: tl.constexpr,
    STOCHASTIC: tl.constexpr, SPREAD: tl.constexpr, ALIGNED: tl.constexpr, LR_IS_TENSOR: tl.constexpr,
    P_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr,{dtypes}
    GROUP: tl.constexpr, CHUNK: tl.constexpr,
"""
HEAD = """\
@triton.jit
def pass_{number}(
{arguments}):
    \"\"\"{words}.\"\"\"
    chunk = tl.program_id(0)
    if BACKWARDS:  # what the last pass read is still in cache
        chunk = chunk_count - 1 - chunk
    row = tl.load(chunks + 2 * chunk)
    if is_idle(figures, row, allowed, count, STAGE, ALLOWED, GUARDED):
        return
    first = tl.load(chunks + 2 * chunk + 1).to(tl.int64) * CHUNK
    left = tl.load(rows + row * COLUMNS + SIZE) - first
    index = tl.arange(0, CHUNK)
{places}
    for RAGGED in tl.static_range(2):  # a chunk that is full needs no mask, and is read and written in wider pieces
        if (left < CHUNK) == (RAGGED == 1):
            mask = None
            if RAGGED:
                mask = index < left
{loads}
{body}
"""
DECIDE = """\
@triton.jit
def decide_{number}(
    rows, counts, numbers, totals, figures, lr, lr_scale, count, LR_IS_TENSOR: tl.constexpr, BLOCK: tl.constexpr
):
    \"\"\"What holds for each tensor, from its sums.\"\"\"
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    nothing = tl.zeros((BLOCK,), tl.float32)
{body}
"""


@dataclass
class Emitted:
    """Source of kernels, and what the host has to know of them."""

    source: str
    #: Numbers of the options, in the order in which kernels read them behind the sign of the gradient.
    numbers: list[Value]
    #: Of each pass: the sums that it makes.
    sums: list[tuple[Value, ...]]
    figures: int
    #: By name: the figure that shows it, or the number that it always is.
    stats: dict[str, int | float]


@dataclass
class Emission:
    """All kernels of one schedule, while they are written."""

    #: Where the elements of a block are in a tensor.
    INDEX: ClassVar[str] = "first + index"

    found: Schedule
    #: How all that is read and written is stored, and whether state is rounded at random.
    stored: tuple[Stored, ...] = ()
    random: bool = False
    #: Places of numbers and figures, in the order in which they were first needed.
    numbers: dict[Value, int] = field(default_factory=dict)
    figures: dict[Value, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.program = self.found.program
        self.large = self.program.memory[PARAMETER]
        self.memory = Memory(self.program, self.stored, self.random, self.INDEX)
        self.entries = self.program.entries
        every = [(number, value) for number, each in enumerate(self.found.passes) for value in each.sums]
        #: Of each reduction: its place among all, and the pass that makes it.
        self.sums = {value: (place, number) for place, (number, value) in enumerate(every)}

    def number(self, value: Value) -> int:
        return 1 + self.numbers.setdefault(value, len(self.numbers))  # behind the sign of the gradient

    def figure(self, value: Value) -> int:
        return OWN_FIGURES + self.figures.setdefault(value, len(self.figures))

    def stats(self) -> dict[str, int | float]:
        """What people may look at: the figures that show it, or the numbers that it always is."""
        shown = self.program.stats.items()
        return {name: self.figure(value) if isinstance(value, Value) else float(value) for name, value in shown}

    def rounds_before(self, value: Any) -> int:
        """In how many rounds the sums are made that a value is computed from."""
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

    def text(self, value: Value) -> str:
        if value.op == "input":
            return SCALAR_INPUTS[value.name].format(", mask")
        if value.is_reduction:
            index, _ = self.emission.sums[value]
            total = f"tl.load(totals + {len(self.emission.sums)} * row + {index}, mask, other=0.0)"
            return f"{total} / tl.load(counts + row, mask, other=1.0)" if value.is_mean else total
        return self.operation(value, sqrt="tl.sqrt_rn(nothing + {0})")

    def finite_by(self, rounds: int) -> list[str]:
        """What tells whether steps are finite, if so many rounds of sums can tell."""
        finite = self.emission.program.finite
        if self.emission.rounds_before(finite) > rounds:
            return []
        text = self.of(finite) if isinstance(finite, Value) else "nothing == 0" if finite else "nothing != 0"
        return [f"tl.store(figures + FINITE * count + row, nothing + tl.where({text}, 1.0, 0.0), mask)"]


class Scalars(Lines):
    """What the first pass computes once for each chunk."""

    def text(self, value: Value) -> str:
        if value.op == "input":
            return SCALAR_INPUTS[value.name].format("")
        return self.operation(value)


class Elements(Lines):
    """What one pass computes element by element."""

    def __init__(self, emission: Emission, number: int) -> None:
        super().__init__(emission)
        self.pass_number = number
        #: What is one number for each tensor: computed at once by a first pass, else found among the figures.
        self.scalars = Scalars(emission)
        self.scalars.used = self.used

    def of(self, operand: Any) -> str:
        if isinstance(operand, Value) and operand not in self.known and operand.extent != self.emission.large:
            self.known[operand] = self.scalar(operand)
        return super().of(operand)

    def scalar(self, value: Value) -> str:
        if self.pass_number == 0 or value.extent is None:
            return self.scalars.of(value)
        if value not in self.scalars.known:
            self.scalars.let(value, f"tl.load(figures + {self.emission.figure(value)} * count + row)")
        return self.scalars.known[value]

    def text(self, value: Value) -> str:
        if value.op == "div" and isinstance(value.args[0], Value) and value.args[0].extent == self.emission.large:
            below = value.args[1]
            if not isinstance(below, Value) or below.extent != self.emission.large:
                # one division for each tensor instead of one for each element
                return f"{self.of(value.args[0])} * {self.of(value.graph.apply('div', 1.0, below))}"
        return self.operation(value, **self.emission.memory.operations)


def emit(found: Schedule, title: str, stored: tuple[Stored, ...], *, random: bool = False) -> Emitted:
    """Kernels of a schedule whose sums all go over whole tensors. random: whether state is rounded at random."""
    emission = Emission(found, stored, random)
    last = len(found.passes) - 1
    passes = [emit_pass(emission, number) for number in range(last + 1)]
    stats = emission.stats()
    decided = range(last + 1 if found.passes[last].sums else last)
    decisions = [emit_decision(emission, number, last) for number in decided]
    source = "\n\n".join([f'"""{title}\n\n{found}\n"""', *passes, *decisions])
    return Emitted(source, list(emission.numbers), [each.sums for each in found.passes], len(emission.figures), stats)


def emit_pass(emission: Emission, number: int) -> str:
    found, program, memory = emission.found, emission.program, emission.memory
    each, last = found.passes[number], len(found.passes) - 1
    lines = Elements(emission, number)
    keys = [key for key in program.memory if key in (*each.reads, *each.writes)]
    for key, value in found.loads(number).items():
        factor = " * gradient_factor(numbers, grad_scale, SCALED)" if key == GRADIENT else ""
        lines.let(value, f"{memory.read(key)}{factor}")
    # all that is large is asked for before anything waits for a number
    loads, lines.lines = [*masks_of(memory, keys), *lines.lines], []
    sums = []
    for value in each.sums:
        summed = summand(value, lines.of(value.args[0]))
        if not is_zero_where_nothing_is(value.args[0], emission.large):
            summed = f"kept({summed}, mask)"
        sums.append(f"tl.store(partials + {emission.sums[value][0]} * chunk_count + chunk, tl.sum({summed}))")
    results = {key: lines.of(program.state[key]) for key in each.writes if key != PARAMETER}
    t = "step_number(rows, row)" if number < last or last == 0 else "tl.load(figures + T * count + row)"
    stores = memory.write_all(results, t)
    if PARAMETER not in each.writes:
        body = [*lines.lines, *sums]
        if stores:
            body += ["if is_allowed(allowed, ALLOWED):", *indented(stores, 4)]
    else:
        new = f"{lines.of(program.inputs[PARAMETER])} + {lines.of(program.delta)}"
        body = [*lines.lines, *memory.rounded(new, t)]
        body += ["if STAGE == 1:", *indented(["failures = failures_in(stored, mask)"], 4)]
        for key, text in results.items():
            failed = f"    failures += failures_in({text}.to({memory.dtype(key)}), mask)"
            body += indented([f"if {memory.dtype(key)} == tl.float16:", failed], 4)
        body += indented(["tl.store(partials + chunk, failures)"], 4)
        body += ["else:", *indented([*sums, *memory.write_rounded(), *stores], 4)]
    dtypes = "".join(f" S{i}_DTYPE: tl.constexpr," for i in range(len(emission.entries)))
    return HEAD.format(
        number=number,
        arguments=ARGUMENTS.format(dtypes=dtypes),
        words=str(each).capitalize(),
        places=block(places_of(memory, keys), 4),
        loads=block(loads, 12),
        body=block([*lines.scalars.lines, *body], 12),
    )


def emit_decision(emission: Emission, number: int, last: int) -> str:
    """What is known after a pass, and not before."""
    lines = Decision(emission)
    final = number == last
    stores = []
    for value in emission.figures:
        rounds = emission.rounds_before(value)
        if max(rounds, 1) == number + 1 or (final and rounds > number):
            stores.append((emission.figure(value), lines.of(value)))
    if number == max(last - 1, 0):
        lines.lines += lines.finite_by(number + 1)
        if last:
            lines.lines.append("tl.store(figures + T * count + row, step_number(rows, row, mask), mask)")
    body = [*lines.lines, *(f"tl.store(figures + {i} * count + row, nothing + {text}, mask)" for i, text in stores)]
    return DECIDE.format(number=number, body=block(body, 4))


def places_of(memory: Memory, keys: Sequence[str]) -> list[str]:
    """Lines that find the places of a chunk's elements, and those of its groups where there are codes."""
    lines = [f"{memory.short(key)}_place = {memory.base(key)} + first + index" for key in keys]
    if PARAMETER in keys and memory.has_record:
        lines.append(f"record_place = {memory.record} + first + index")
    coded = [key for key in keys if memory.is_coded(key)]
    lines += ["groups = tl.arange(0, CHUNK // GROUP)"] if coded else []
    return lines + [f"{memory.short(key)}_scales = {memory.scales(key)} + first // GROUP + groups" for key in coded]


def masks_of(memory: Memory, keys: Sequence[str]) -> list[str]:
    """Lines that tell which groups of a chunk there are."""
    if not any(map(memory.is_coded, keys)):
        return []
    return ["groups_mask = None", "if RAGGED:", "    groups_mask = groups < left // GROUP"]


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
