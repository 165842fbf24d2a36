"""C++ from a schedule: one function for each pass, and one for rows and columns where statistics are factored.

The formulas are the rule's: here is only how a value of a graph is written down, and where it comes from. What is as
large as a parameter is computed in a pass, from *operands* that lie in memory and from *numbers*, one for each tensor.
Numbers are kept in registers; what follows from the sums of a pass is a list of instructions for them. Functions are
named by what they compute, so that rules and options that compute the same share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thalweg.errors import RuleError
from thalweg.kernels.cpu.between import Between, EmittedBetween
from thalweg.kernels.cpu.lines import Function, Lines, Names, Numbers, function
from thalweg.kernels.cpu.structs import MOST_PASSES, OPERANDS, SLOTS
from thalweg.kernels.text import indented, summand
from thalweg.programs.extents import COLUMN, ELEMENT, HOST, MATRIX, ROW, TENSOR, MatrixKinds
from thalweg.programs.graph import Value
from thalweg.programs.lower import LOAD
from thalweg.programs.schedule import Schedule, reach, reductions_of
from thalweg.programs.trace import GRADIENT, PARAMETER

#: Limits of native code that its structures do not state: sums of a pass, and numbers of a pass.
MOST_SUMS, MOST_NUMBERS = 5, 64


@dataclass
class EmittedPass:
    function: Function
    #: The operands, by place in a tensor: 0 is p, 1 is g, then the state.
    operands: list[int]
    written: list[bool]
    numbers: list[Any]
    #: What is computed to be summed, kept of every element: float32 may not do for the sum, and a short pass need not
    #: compute it again.
    kept: list[Value]
    #: Of every sum where what it adds up is found: an operand that the pass only reads, or behind those what is kept.
    summed: list[int]
    sums: list[Value]
    row_sums: list[Value]
    column_sums: list[Value]
    #: The rows and columns that are read.
    rows: list[Value]
    columns: list[Value]

    @property
    def every_sum(self) -> list[Value]:
        return [*self.sums, *self.row_sums, *self.column_sums]


@dataclass
class Emitted:
    """All code of one schedule."""

    schedule: Schedule
    kinds: MatrixKinds
    passes: list[EmittedPass]
    #: The last pass where what the one before it has kept is at hand; None: that would save nothing.
    short: EmittedPass | None
    between: EmittedBetween | None
    #: The slots of rows and columns that passes ask for.
    rows: list[Value]
    columns: list[Value]
    #: Entries of the state that are one number for each tensor, by key: the operand.
    scalars: dict[str, int]

    @property
    def functions(self) -> list[Function]:
        return [emitted.function for emitted in (*self.passes, self.short, self.between) if emitted is not None]


class Emission:
    """All code of one schedule, while it is written."""

    def __init__(self, schedule: Schedule, kinds: MatrixKinds) -> None:
        self.schedule, self.kinds, self.program = schedule, kinds, schedule.program
        #: Of p, g and the entries of the state: the place among a tensor's operands.
        self.places = {key: place for place, key in enumerate(self.program.memory)}
        #: Slots of rows and columns: those of the state come first, each under its new value.
        self.slots: dict[str, dict[Any, int]] = {ROW: {}, COLUMN: {}}
        self.state_slots: dict[str, list[str]] = {ROW: [], COLUMN: []}
        #: Entries of the state that are one number for each tensor.
        self.scalars: list[str] = []
        for key in schedule.small:
            kind = kinds.of_extent(self.program.memory[key])
            if kind == TENSOR:
                self.scalars.append(key)
                continue
            self.slots[kind][self.program.state[key]] = len(self.state_slots[kind])
            self.state_slots[kind].append(key)

    def emit_pass(self, number: int, at_hand: Sequence[Value] = ()) -> EmittedPass:
        """The function of a pass. at_hand: what the pass before has kept, to be read instead of computed again."""
        pass_, program, loads = self.schedule.passes[number], self.program, self.schedule.loads(number)
        names = Names()
        numbers = Numbers(names)
        slots: dict[Value, int] = {}
        if at_hand:
            loaded = set(loads.values())
            needed = reach(program, [program.results[key] for key in pass_.writes], loaded.union(at_hand))
            slots = {value: slot for slot, value in enumerate(at_hand) if value in needed - loaded}
            loads = {key: value for key, value in loads.items() if value in needed or key == PARAMETER}
        keys = [key for key in program.memory if key in loads or key in pass_.writes]
        places = {key: names.new(None, f"{key}_tile") for key in keys}
        rows: dict[Value, str] = {}
        columns: dict[Value, str] = {}

        def leaf(operand: Any) -> str | None:
            kind = self.kinds.find(operand)
            if kind in (HOST, TENSOR):
                return numbers.add(operand)
            if kind == ELEMENT:
                return None
            home = columns if kind == COLUMN else rows
            return home[operand] if operand in home else home.setdefault(operand, names.new(operand))

        lines = Lines(self.kinds, names, leaf)
        for value in slots:
            lines.known[value] = names.new(value)
        scale = numbers.add("scale") if GRADIENT in loads else ""
        sums, row_sums, column_sums = (
            [v for v in pass_.sums if (self.kinds.find(v.args[0]), self.kinds.find(v)) == (ELEMENT, kind)]
            for kind in (TENSOR, ROW, COLUMN)
        )
        overwritten = {loads[key] for key in pass_.writes if key in loads}
        if overwritten & reach(program, [x for value in column_sums for x in value.args], set(loads.values())):
            raise RuleError(f"{program.rule_name} sums columns of what the same pass overwrites")
        block = lines.write_pass(program, loads, (*sums, *row_sums, *column_sums), pass_.writes)
        names_of = {x.source: x.name for x in block.statements if x.op == LOAD}
        texts = {name: f"load<X>({places[key]} + i)" for key, name in names_of.items()}
        if GRADIENT in names_of:
            texts[names_of[GRADIENT]] += f" * {scale}"
        texts |= {lines.known[value]: f"load<X>(kept + {slot} * TILE + i)" for value, slot in slots.items()}
        head = [f"T* const {name} = tile.x[{index}];" for index, name in enumerate(places.values())]
        head += numbers.fetch("tile")
        # what emitted code reads in its loops are constants of its own: a tile might be changed by what it writes
        for index, name in enumerate(rows.values()):
            across, row = names.new(None, "across"), names.new(None, "row_value")
            head += [f"const T* const {across} = tile.across[{index}];", f"const T {row} = tile.row[{index}];"]
            texts[name] = f"{across} ? load<X>({across} + i) : X{{}} + {row}"
        for index, name in enumerate(columns.values()):
            column = names.new(None, "column_tile")
            head.append(f"const T* const {column} = tile.column[{index}];")
            texts[name] = f"load<X>({column} + i)"
        body: list[str] = []
        after: list[str] = []
        kept: dict[Value, int] = {}
        summed: list[int] = []
        for index, (value, x, _, kind, _) in enumerate(block.sums):
            name, term = names.new(value), summand(value, str(x))
            if kind == COLUMN:
                head.append(f"T* const {name} = tile.column_sums[{index - len(sums) - len(row_sums)}];")
                body.append(f"store({name} + i, load<X>({name} + i) + {term});")
            else:
                head.append(f"Sum<T> {name};")
                body.append(f"{name}.add({term}, k);")
                after.append(f"tile.sums[{index}] = {name}.total();")
            added = value.args[0]
            key = next((key for key in keys if added is loads.get(key) and key not in pass_.writes), None)
            if key is not None:
                summed.append(keys.index(key))
                continue
            if added not in kept:
                kept[added] = len(kept)
                body.append(f"store(kept + {kept[added]} * TILE + i, widened<X>({x}));")
            summed.append(OPERANDS + kept[added])
        if kept or slots:
            head.append("T* const kept = tile.kept;")
        results = block.stores
        if PARAMETER in results:
            results[PARAMETER] = "{} + {}".format(*block.statements[-1].args)
        body += [f"store({places[key]} + i, widened<X>({text}));" for key, text in results.items()]
        text = "\n".join(
            [
                "    const Tile<T>& tile = *static_cast<const Tile<T>*>(given);",
                *indented(head, 4),
                "    over<T>(tile.n, [&](auto lane, int64_t i, int k) {",
                "        using X = decltype(lane);",
                *(f"        [[maybe_unused]] const X {name} = {read};" for name, read in texts.items()),
                *indented([*lines.lines, *body], 8),
                "        (void)k;",
                "    });",
                *indented(after, 4),
            ]
        )
        reads = (*loads, *(["what the pass before has kept"] if slots else []))
        return EmittedPass(
            function("pass", text, names, str(replace(pass_, reads=reads))),
            [self.places[key] for key in keys],
            [key in pass_.writes for key in keys],
            numbers.values,
            list(kept),
            summed,
            sums,
            row_sums,
            column_sums,
            list(rows),
            list(columns),
        )


def emit(schedule: Schedule, kinds: MatrixKinds) -> Emitted:
    name, emission = schedule.program.rule_name, Emission(schedule, kinds)
    summed = reductions_of(schedule.program)
    if kinds.axes is not None and not {ROW, COLUMN} <= {kinds.find(value) for value in summed}:
        raise RuleError(f"{name} sums rows or columns, and native code is made for both together")
    for value in summed:
        if kinds.find(value.args[0]) != ELEMENT and kinds.find(value) != MATRIX:
            raise RuleError(f"{name} sums rows or columns over whole tensors, of which no native code is made")
    passes = [emission.emit_pass(number) for number in range(len(schedule.passes))]
    short = None
    if len(passes) > 1 and kinds.axes is None and schedule.passes[-2].writes and not schedule.passes[-1].sums:
        short = emission.emit_pass(len(passes) - 1, passes[-2].kept)
        short.kept = passes[-2].kept
        short = short if short.function != passes[-1].function else None
    for pass_ in passes:  # rows that are one number for each matrix are spread over its rows
        for kind, values in ((ROW, pass_.rows), (COLUMN, pass_.columns)):
            for value in values:
                emission.slots[kind].setdefault(value, len(emission.slots[kind]))
    summing = {number: pass_ for number, pass_ in enumerate(passes) if pass_.row_sums or pass_.column_sums}
    between = None
    if kinds.axes is not None:
        if len(summing) != 1:
            raise RuleError(f"{name} needs sums of rows and columns in {len(summing)} passes")
        ((number, pass_),) = summing.items()
        sums = {ROW: pass_.row_sums, COLUMN: pass_.column_sums}
        between = Between(kinds, sums, emission.slots, emission.state_slots).emit(number, emission.places)
    check_room(name, passes, emission)
    scalars = {key: emission.places[key] for key in emission.scalars}
    rows, columns = map(list, emission.slots.values())
    return Emitted(schedule, kinds, passes, short, between, rows, columns, scalars)


def check_room(name: str, passes: list[EmittedPass], emission: Emission) -> None:
    for what, most, counts in (
        ("state entries", OPERANDS - 2, [len(emission.program.entries)]),
        ("passes over memory", MOST_PASSES, [len(passes)]),
        ("sums in one pass", MOST_SUMS, [max(len(emitted.sums), len(emitted.kept)) for emitted in passes]),
        ("numbers in one pass", MOST_NUMBERS, [len(emitted.numbers) for emitted in passes]),
        (
            "statistics of rows or columns",
            SLOTS,
            [len(x) for p in passes for x in (p.rows, p.columns, p.row_sums, p.column_sums)],
        ),
        ("values of rows or columns", 2 * SLOTS, [len(slots) for slots in emission.slots.values()]),
    ):
        if max(counts) > most:
            raise RuleError(f"{name} needs {max(counts)} {what}, and native code has room for {most}")


def library_source(functions: Mapping[str, Function]) -> str:
    """The emitted functions, and the table by which they are found."""
    table = ",\n".join(f"    {{{name}<float>, {name}<double>}}" for name in functions)
    return "\n".join(
        [
            "// Emitted from the rules.",
            "#pragma once\n",
            '#include "body.h"\n',
            "namespace {\n",
            *(function.source for function in functions.values()),
            f"constexpr Functions EMITTED[] = {{\n{table},\n}};\n",
            "}  // namespace",
            "",
        ]
    )
