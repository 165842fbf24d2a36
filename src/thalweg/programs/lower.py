"""From a schedule to statements: what each pass computes, and what is computed between passes.

A value has a *domain*: that of which there is one number, such as an element, a row or a tensor (``extents``). A pass
goes through elements. What there is less of is computed where the first pass needs it, or between passes from their
sums, and kept for passes that follow; numbers that follow from options are the host's. Names, masks, where a value is
computed and what one division serves are decided here, for all languages in which statements are printed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from thalweg.programs.extents import ELEMENT, HOST, SMALL, TENSOR, Kinds
from thalweg.programs.graph import Value
from thalweg.programs.operations import OPERATIONS, TRUTH
from thalweg.programs.schedule import Schedule
from thalweg.programs.trace import PARAMETER, Program

#: What statements read, beside operations: an array as large as a parameter, what is smaller and was there before the
#: step, a number of the host, what was computed between passes, and the result of a reduction.
LOAD, INPUT, NUMBER, KEPT, REDUCED = "load", "input", "number", "kept", "reduced"
#: The key under which is kept whether a tensor's step is finite.
FINITE = "finite"

#: The name of a statement, or a number that stands in the rule.
Argument: TypeAlias = str | float


class Statement(NamedTuple):
    """name = op(args)"""

    name: str
    op: str
    args: tuple[Argument, ...]
    domain: str
    #: The value that it computes or reads; of LOAD: the key of the array.
    source: Any


class Sum(NamedTuple):
    """What a pass adds up for a reduction."""

    value: Value
    term: Argument
    #: Of what there is one term.
    source: str
    domain: str
    #: Whether terms are not 0 where nothing is, behind the end of a tensor.
    is_masked: bool


@dataclass
class Block:
    """Statements at one place, each once."""

    statements: list[Statement] = field(default_factory=list)
    #: Between passes, what passes and people read later, by value; and new state, by key. In a pass, what it writes.
    keeps: dict[Any, Argument] = field(default_factory=dict)
    stores: dict[str, Argument] = field(default_factory=dict)
    sums: list[Sum] = field(default_factory=list)


class Lowered:
    """The statements of a schedule."""

    def __init__(self, schedule: Schedule, kinds: Kinds, reserved: Collection[str], *, guarded: bool) -> None:
        """reserved: names that printed code has for other things. guarded: no small state is written between passes."""
        self.schedule, self.kinds, self.program, self.reserved = schedule, kinds, schedule.program, reserved
        self.last = len(schedule.passes) - 1
        #: The pass that makes each reduction.
        self.made_by = {value: number for number, pass_ in enumerate(schedule.passes) for value in pass_.sums}
        #: Numbers of the host, and what is kept: one for each tensor, and all else; each with its place.
        self.numbers: dict[Value, int] = {}
        self.figures: dict[Any, int] = {}
        self.lasting: dict[Value, int] = {}
        #: Of what is kept: the first pass that reads it.
        self.first_use: dict[Value, int] = {}
        self.passes = [
            KeptLines(self, number).write_pass(self.program, schedule.loads(number), pass_.sums, pass_.writes)
            for number, pass_ in enumerate(schedule.passes)
        ]
        for value in (*self.program.stats.values(), *(self.program.state[key] for key in self.program.scalars)):
            if isinstance(value, Value):
                self.figures.setdefault(value, len(self.figures))
        #: The state that is smaller than a parameter, but not one number for each tensor.
        self.small = {key: self.program.state[key] for key in schedule.small if key not in self.program.scalars}
        #: After which pass nothing is computed any more of what rows and columns had before the step.
        stages = [self.first_use[value] - 1 for value in self.lasting]
        self.settled = max([0, *stages, *(self.rounds_before(value) - 1 for value in self.small.values())])
        if guarded:
            for value in self.small.values():
                self.keep(value, self.settled + 1)
        #: After each pass, by domain: what is computed then.
        self.between: list[Mapping[str, Block]] = []
        for number in range(self.last + 1):
            blocks = {kind: self.lower_small(number, kind, guarded=guarded) for kind in SMALL}
            blocks[TENSOR] = self.lower_tensors(number, guarded=guarded)
            self.between.append({kind: block for kind, block in blocks.items() if block.keeps or block.stores})

    # ---- when and where values are known

    def rounds_before(self, value: Any) -> int:
        """How many rounds of sums come before a value can be computed."""
        if not isinstance(value, Value):
            return 0
        if value.is_reduction:
            return 1 + self.made_by[value]
        return max(map(self.rounds_before, value.args), default=0)

    def stage_of(self, value: Value) -> int:
        """The pass after which a number of each tensor is computed."""
        if value in self.first_use:
            return self.first_use[value] - 1
        return self.last if self.rounds_before(value) > self.last else max(self.last - 1, 0)

    def keep(self, value: Value, number: int) -> None:
        """Have a value computed before a pass."""
        self.first_use[value] = min(number, self.first_use.get(value, number))
        home = self.figures if self.kinds.find(value) == TENSOR else self.lasting
        home.setdefault(value, len(home))

    def domain_of(self, key: str) -> str:
        return self.kinds.of_extent(self.program.memory[key])

    # ---- blocks

    def lower_small(self, number: int, kind: str, *, guarded: bool) -> Block:
        """What is computed for each row, column or matrix after a pass."""
        lines = KeptLines(self, number, between=True)
        due = [v for v in self.lasting if self.kinds.find(v) == kind and self.first_use[v] == number + 1]
        keeps = {value: lines.number(value) for value in due}
        written = [key for key in self.small if self.domain_of(key) == kind and number == self.settled and not guarded]
        return Block(lines.statements, keeps, {key: lines.number(self.small[key]) for key in written})

    def lower_tensors(self, number: int, *, guarded: bool) -> Block:
        """What is computed for each tensor after a pass, for those that follow and for people to look at."""
        lines, finite = KeptLines(self, number, between=True), self.program.finite
        keeps: dict[Any, Argument] = {v: lines.number(v) for v in self.figures if self.stage_of(v) == number}
        is_known = number == max(self.last - 1, 0) and self.rounds_before(finite) <= number + 1
        if is_known and (guarded or self.last or isinstance(finite, Value)):  # else nothing needs a launch
            keeps[FINITE] = lines.number(finite)
        return Block(lines.statements, keeps)


class Lines:
    """Statements of one block, each once, while they are written. Languages say how a block reads and names values."""

    def __init__(self, kinds: Kinds) -> None:
        self.find = kinds.find
        self.statements: list[Statement] = []
        self.known: dict[Any, str] = {}
        #: Names of truths; all others are of numbers.
        self.truths: set[str] = set()

    def name(self, value: Value) -> str:
        """A name that no other value has."""
        raise NotImplementedError

    def read(self, operand: Any) -> Argument | None:
        """What is not computed here: how it is written down. None: it is computed."""
        raise NotImplementedError

    def let(self, value: Any, op: str, args: tuple[Argument, ...], source: Any = None, known_as: Any = None) -> str:
        """The name of a new statement, which is that of the value, or of what it is known as."""
        name = self.name(value)
        self.statements.append(Statement(name, op, args, self.find(value), value if source is None else source))
        return self.known.setdefault(value if known_as is None else known_as, name)

    def write(self, operand: Any) -> Argument:
        """The name of a value after the statements that compute it, or a number."""
        if isinstance(operand, Value) and operand in self.known:
            return self.known[operand]
        read = self.read(operand)
        return self.compute(operand) if read is None else read

    def compute(self, value: Value) -> str:
        op, args = value.op, value.args
        if op == "div" and self.find(value) == ELEMENT != self.find(args[1]):
            # one division for each tensor, row or column instead of one for each element
            op, args = "mul", (args[0], value.graph.apply("div", 1.0, args[1]))
        pairs = zip(args, OPERATIONS[op].takes or ("",) * len(args), strict=True)
        name = self.let(value, op, tuple(self.truth(x) if taken == TRUTH else self.number(x) for x, taken in pairs))
        if OPERATIONS[op].makes == TRUTH:
            self.truths.add(name)
        return name

    def number(self, operand: Any) -> Argument:
        """A value as a number: truths are 1 or 0."""
        name = self.write(operand)
        if name not in self.truths:
            return name
        key = operand, "number"
        return self.known.get(key) or self.let(operand, "where", (name, 1.0, 0.0), known_as=key)

    def truth(self, operand: Any) -> Argument:
        """A truth as a mask: numbers are what is kept of it, and what the host computes."""
        if not isinstance(operand, Value):
            return bool(operand)
        name = self.write(operand)
        if name in self.truths:
            return name
        key = operand, "truth"
        mask = self.known.get(key) or self.let(operand, "ne", (name, 0.0), known_as=key)
        self.truths.add(mask)
        return mask

    def write_pass(
        self, program: Program, loads: Mapping[str, Value], sums: Iterable[Value], writes: Collection[str]
    ) -> Block:
        """What a pass reads, computes, sums and writes."""
        for key, value in loads.items():
            self.let(value, LOAD, (), key)
        summed = [self.sum(value, program.memory[PARAMETER]) for value in sums]
        stores = {key: self.number(program.state[key]) for key in writes if key != PARAMETER}
        if PARAMETER in writes:
            args = self.number(program.inputs[PARAMETER]), self.number(program.delta)
            self.statements.append(Statement("new", "add", args, ELEMENT, None))
            stores[PARAMETER] = "new"
        return Block(self.statements, {}, stores, summed)

    def sum(self, value: Value, large: Any) -> Sum:
        (x,) = value.args
        source = self.find(x)
        is_masked = source != ELEMENT or not is_zero_where_nothing_is(x, large)
        return Sum(value, self.number(x), source, self.find(value), is_masked)


class KeptLines(Lines):
    """Those of a block that reads what was computed before, or between passes, by its place."""

    def __init__(self, lowered: Lowered, number: int, *, between: bool = False) -> None:
        """number: of the pass, or of the pass after which they are, if they are between passes."""
        super().__init__(lowered.kinds)
        self.lowered, self.number_of_pass, self.between = lowered, number, between
        self.used = {"new", *lowered.reserved}

    def name(self, value: Value) -> str:
        base = value.graph.names.get(value, "").replace("[", "_").replace("]", "")
        name, i = base or f"x{value.index}", 1
        while name in self.used:
            name, i = f"{base or 'x'}_{i}", i + 1
        self.used.add(name)
        return name

    def read(self, operand: Any) -> Argument | None:
        if not isinstance(operand, Value):
            return float(operand)
        domain = self.find(operand)
        if domain == HOST:
            self.lowered.numbers.setdefault(operand, len(self.lowered.numbers))
            return self.let(operand, NUMBER, ())
        if not self.between and self.number_of_pass and domain != ELEMENT:
            self.lowered.keep(operand, self.number_of_pass)
            return self.let(operand, KEPT, ())
        op = REDUCED if operand.is_reduction else INPUT
        return self.let(operand, op, ()) if operand.is_reduction or operand.op == "input" else None


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
