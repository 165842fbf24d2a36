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
#: Blocks that one program goes through in turn where it has much to compute, and numbers are found once for all.
BLOCKS = 4
#: Keeps reads before what follows. Compilers spare registers by reading half a block when the other half is computed.
ALL_ASKED = "tl.debug_barrier()"
ARGUMENTS = """\
    rows, gradients, chunks, numbers, figures, partials, grad_scale, allowed, lr, lr_scale, count, chunk_count,
    STAGE: tl.constexpr, BACKWARDS: tl.constexpr, SCALED: tl.constexpr, ALLOWED: tl.constexpr, GUARDED: tl.constexpr,
    STOCHASTIC: tl.constexpr, SPREAD: tl.constexpr, ALIGNED: tl.constexpr, LR_IS_TENSOR: tl.constexpr,
    P_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr,{dtypes}
    GROUP: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
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
    left = tl.multiple_of(tl.load(rows + row * COLUMNS + SIZE) - first, GROUP)
{bases}
    for RAGGED in tl.static_range(2):  # a chunk that is full needs no mask, and is read and written in wider pieces
        if (left < CHUNK) == (RAGGED == 1):
            PIECE: tl.constexpr = BLOCK // PIECES if RAGGED else BLOCK
            index = tl.arange(0, PIECE)
{before}
            for begin in range(0, CHUNK, PIECE):
                mask = None
                if RAGGED:
                    mask = index < left - begin
{each}
{after}
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
    #: How many blocks one program goes through in turn.
    blocks: int = field(default=1, kw_only=True)


@dataclass
class Emission:
    """All kernels of one schedule, while they are written."""

    #: Where the elements of a block are in a tensor: the first of them, and behind it all.
    FIRST: ClassVar[str] = "first + begin"
    INDEX: ClassVar[str] = "index"

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
        self.memory = Memory(self.program, self.stored, self.random, self.FIRST, self.INDEX)
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
        #: What is read as codes, by what it stands for: how it is called.
        self.codes: dict[Value, str] = {}

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

    def is_one(self, operand: Any) -> bool:
        """Whether there is one for a tensor, not one for each element."""
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
        text = summand(value, self.of(value.args[0]))
        return text if is_zero_where_nothing_is(value.args[0], self.emission.large) else f"kept({text}, mask)"

    def text(self, value: Value) -> str:
        if value in self.codes:
            return "decoded({0}_codes, {0}_scale, GROUP)".format(self.codes[value])
        if value.op == "mul":
            for factor, codes in (value.args, value.args[::-1]):
                if isinstance(codes, Value) and codes in self.codes and codes not in self.known and self.is_one(factor):
                    # one product for each group instead of one for each element
                    return "decoded({0}_codes, {0}_scale * {1}, GROUP)".format(self.codes[codes], self.of(factor))
        if value.op == "div" and isinstance(value.args[0], Value) and value.args[0].extent == self.emission.large:
            below = value.args[1]
            if self.is_one(below):
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
    sums, blocks = [each.sums for each in found.passes], BLOCKS if emission.memory.has_codes else 1
    return Emitted(source, list(emission.numbers), sums, len(emission.figures), stats, blocks=blocks)


def emit_pass(emission: Emission, number: int) -> str:
    found, program, memory = emission.found, emission.program, emission.memory
    each, last = found.passes[number], len(found.passes) - 1
    lines = Elements(emission, number)
    keys = [key for key in program.memory if key in (*each.reads, *each.writes)]
    lines.lines = places_of(memory, keys)
    for key, value in found.loads(number).items():
        lines.read(key, value)
    # all that is large is asked for before anything waits for a number
    loads, lines.lines = lines.lines, []
    if not memory.has_codes:  # with codes it keeps nothing: what is computed goes before it
        loads.append(ALL_ASKED)
    sums = {f"sum_{emission.sums[value][0]}": lines.summed(value) for value in each.sums}
    before = [f"{name} = tl.zeros((PIECE // TOGETHER,), tl.float32)" for name in sums]
    after = [f"tl.store(partials + {name[4:]} * chunk_count + chunk, tl.sum({name}))" for name in sums]
    adding = [f"{name} += by_neighbours({text})" for name, text in sums.items()]
    results = {key: lines.of(program.state[key]) for key in each.writes if key != PARAMETER}
    before.append("now = " + ("tl.load(figures + T * count + row)" if number == last > 0 else "step_number(rows, row)"))
    stores = memory.write_all(results)
    if PARAMETER not in each.writes:
        body = [*lines.lines, *adding]
        if stores:
            body += ["if is_allowed(allowed, ALLOWED):", *indented(stores, 4)]
    else:
        new = f"{lines.of(program.inputs[PARAMETER])} + {lines.of(program.delta)}"
        body = [*lines.lines, *memory.rounded(new), "if STAGE == 1:", "    failures += failures_in(stored, mask)"]
        for key, text in results.items():
            failed = f"    failures += failures_in({text}.to({memory.dtype(key)}), mask)"
            body += indented([f"if {memory.dtype(key)} == tl.float16:", failed], 4)
        body += ["else:", *indented([*adding, *memory.write_rounded(), *stores], 4)]
        before.append("failures = tl.zeros((PIECE // TOGETHER,), tl.float32)")
        after = ["if STAGE == 1:", "    tl.store(partials + chunk, tl.sum(failures))", *otherwise(after)]
    # numbers are found once for a chunk of several blocks; else behind what is large
    home = before if memory.has_codes else loads
    home += lines.scalars.lines
    dtypes = "".join(f" S{i}_DTYPE: tl.constexpr," for i in range(len(emission.entries)))
    return HEAD.format(
        number=number,
        arguments=ARGUMENTS.format(dtypes=dtypes),
        words=str(each).capitalize(),
        bases=block(bases_of(memory, keys), 4),
        before=block(before, 12),
        each=block([*loads, *body], 16),
        after=block(after, 12),
    )


def otherwise(lines: Sequence[str]) -> list[str]:
    return ["else:", *indented(lines, 4)] if lines else []


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


def bases_of(memory: Memory, keys: Sequence[str]) -> list[str]:
    """Lines that find where a tensor begins, and the scales of its groups where there are codes."""
    lines = [f"{memory.short(key)}_base = {memory.base(key)}" for key in keys]
    if PARAMETER in keys and memory.has_record:
        lines.append(f"record_base = {memory.record}")
    return lines + [f"{memory.short(key)}_scale_base = {memory.scales(key)}" for key in keys if memory.is_coded(key)]


def places_of(memory: Memory, keys: Sequence[str]) -> list[str]:
    """Lines that find the places of a block's elements, and those of its groups, with which of these there are."""
    names = [memory.short(key) for key in keys] + ["record"] * (PARAMETER in keys and memory.has_record)
    lines = [f"{name}_place = {name}_base + {memory.first} + {memory.index}" for name in names]
    coded = [memory.short(key) for key in keys if memory.is_coded(key)]
    if coded:
        lines += ["groups, groups_mask = tl.arange(0, PIECE // GROUP), None", "if RAGGED:"]
        lines += ["    groups_mask = groups < (left - begin) // GROUP"]
    return lines + [f"{name}_scales = {name}_scale_base + (first + begin) // GROUP + groups" for name in coded]


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
