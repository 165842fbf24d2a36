"""C++ from a schedule: one function for each pass, and one for rows and columns where statistics are factored.

The formulas are the rule's: here is only how a value of a graph is written down, and where it comes from. What is as
large as a parameter is computed in a pass, from *operands* that lie in memory and from *numbers*, one for each tensor.
Numbers are kept in registers; what follows from the sums of a pass is a list of instructions for them. Functions are
named by what they compute, so that rules and options that compute the same share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from thalweg.errors import RuleError
from thalweg.kernels.cpu.kinds import Kinds
from thalweg.kernels.cpu.lines import Function, Lines, Names, Numbers, cpp, function, indented, index_of
from thalweg.kernels.cpu.structs import MOST_PASSES, OPERANDS, SLOTS
from thalweg.programs.extents import COLUMN, ELEMENT, HOST, MATRIX, ROW, TENSOR
from thalweg.programs.graph import Value
from thalweg.programs.schedule import Pass, Schedule
from thalweg.programs.trace import GRADIENT, PARAMETER

#: Operations of registers, in the order of native/scalars.h.
OPERATIONS = (
    *("add", "sub", "mul", "div", "pow", "gt", "ge", "lt", "le", "eq", "ne", "and", "neg", "abs", "sqrt", "exp", "log"),
    *("expm1", "cos", "floor", "isfinite", "maximum", "minimum", "where"),
)
#: What native code has room for, beside what its structures say: sums of a pass, and numbers of a pass.
MOST_SUMS, MOST_NUMBERS = 5, 64
#: Marks an operand among what sums of columns are of.
OPERAND = 128
#: Registers that every program has: the scale of the gradient, the number of elements, the largest number of p.
SCALE, COUNT, LARGEST, FIRST_NUMBER = 0, 1, 2, 3


@dataclass
class EmittedPass:
    function: Function
    #: The operands, by place in a tensor: 0 is p, 1 is g, then the state.
    operands: list[int]
    written: list[bool]
    numbers: list[Any]
    sums: list[Value]
    kept: int
    rows: list[Value] = field(default_factory=list)
    columns: list[Value] = field(default_factory=list)
    row_sums: list[Value] = field(default_factory=list)
    column_sums: list[Value] = field(default_factory=list)
    column_of: list[int] = field(default_factory=list)


@dataclass
class EmittedBetween:
    function: Function
    after_pass: int
    numbers: list[Any]
    #: Slots: the operand that is read into it and written from it, or -1.
    row_state: list[int]
    column_state: list[int]


@dataclass
class Emitted:
    """All code of one schedule."""

    found: Schedule
    kinds: Kinds
    passes: list[EmittedPass]
    between: EmittedBetween | None
    #: The slots of rows and columns that passes ask for.
    rows: list[Value]
    columns: list[Value]

    @property
    def functions(self) -> list[Function]:
        return [each.function for each in self.passes] + ([self.between.function] if self.between else [])


class Emission:
    def __init__(self, found: Schedule, kinds: Kinds) -> None:
        self.found, self.kinds, self.program = found, kinds, found.program
        self.entries = [key for key in self.program.memory if key not in (PARAMETER, GRADIENT)]
        self.inputs = {value.name: value for value in self.program.graph.values if value.op == "input"}
        large = [key for key in self.entries if self.program.memory[key] == kinds.large]
        small = [key for key in self.entries if key not in large]
        #: Slots of rows and columns: those of the state come first, each under its new value.
        self.slots: dict[str, dict[Any, int]] = {ROW: {}, COLUMN: {}}
        self.state_slots: dict[str, list[str]] = {ROW: [], COLUMN: []}
        for key in small:
            kind = kinds.of(self.inputs[key])
            self.slots[kind][self.program.state[key]] = len(self.state_slots[kind])
            self.state_slots[kind].append(key)

    def place(self, key: str) -> int:
        return (PARAMETER, GRADIENT, *self.entries).index(key)

    def slot(self, kind: str, value: Any) -> int:
        return self.slots[kind].setdefault(value, len(self.slots[kind]))

    # ---- passes

    def emit_pass(self, number: int) -> EmittedPass:
        each = self.found.passes[number]
        names = Names()
        numbers = Numbers(names)
        written = {key for earlier in self.found.passes[:number] for key in earlier.writes}
        keys = [key for key in (PARAMETER, GRADIENT, *self.entries) if key in (*each.reads, *each.writes)]
        keys = [key for key in keys if self.program.memory[key] == self.kinds.large]
        places = {key: names.new(None, f"{key}_tile") for key in keys}
        rows: dict[Value, str] = {}
        columns: dict[Value, str] = {}

        def leaf(operand: Any) -> str | None:
            kind = self.kinds.of(operand)
            if kind in (HOST, TENSOR):
                return numbers.of(operand)
            if kind == COLUMN:
                return columns.setdefault(operand, names.new(operand))
            if kind in (ROW, MATRIX):
                return rows.setdefault(operand, names.new(operand))
            return None

        lines = Lines(self.kinds, names, ELEMENT, leaf)
        for key in keys:
            if key in each.reads:
                value = self.program.state[key] if key in written else self.inputs[key]
                name = names.new(value, key if key in (PARAMETER, GRADIENT) else "")
                scale = f" * {numbers.of('scale')}" if key == GRADIENT else ""
                lines.lines.append(f"[[maybe_unused]] const X {name} = load<X>({places[key]} + i){scale};")
                lines.known[value] = name
        summed = [value for value in each.sums if self.kinds.of(value.args[0]) == ELEMENT]
        body: list[str] = []
        before: list[str] = []
        after: list[str] = []
        kept: dict[Any, int] = {}
        #: Of a pass that writes nothing, what is kept is computed again where it is needed.
        again: list[str] = []

        def found_again(value: Any, *, computed: bool = False) -> tuple[str, str, int]:
            """Where a value is, if its sum overflows, and what it is to be multiplied by."""
            key = next((key for key in keys if value is self.inputs[key] and key not in each.writes), None)
            if key is not None:
                scale = numbers.of("scale") if key == GRADIENT else "T(1)"
                return places[key], scale, OPERAND + keys.index(key)
            if value not in kept:
                kept[value] = len(kept)
                to = again if computed else body
                to.append(f"store(kept + {kept[value]} * TILE + i, widened<X>({lines.of(value)}));")
            return f"kept + {kept[value]} * TILE", "T(1)", kept[value]

        sums = [value for value in summed if self.kinds.of(value) == TENSOR]
        checks: list[tuple[str, str, bool]] = []
        for index, value in enumerate(sums):
            name, term, squared = self.summed(names, lines, value)
            before.append(f"Sum<T> {name};")
            body.append(f"{name}.add({term}, k);")
            total = names.new(None, "total")
            after.append(f"const double {total} = {name}.total();")
            check = "checked_squares" if squared else "checked_sum"
            place, scale, _ = found_again(value.args[0], computed=not each.writes)
            checks.append((total, f"tile.sums[{index}] += {check}<T>({total}, {place}, {scale}, tile.n);", squared))
        if again:
            doubts = " || ".join(f"is_doubtful<T, {cpp(squared)}>({total})" for total, _, squared in checks)
            after += [f"if ({doubts})", "    for (int64_t i = 0; i < tile.n; i++) {", "        using X = T;"]
            after += [*indented(["«lines»", *again], 8), "    }"]
        after += [line for _, line, _ in checks]
        row_sums = [value for value in summed if self.kinds.of(value) == ROW]
        for index, value in enumerate(row_sums):
            name, term, squared = self.summed(names, lines, value)
            before.append(f"Sum<T> {name};")
            body.append(f"{name}.add({term}, k);")
            body.append(f"if (has_terms) store(terms + {index} * TILE + i, widened<X>({term}));")
            place, scale, _ = found_again(value.args[0])
            after.append(
                f"add_to_row<T, {cpp(squared)}>({name}.total(), terms + {index} * TILE, "
                f"{place}, {scale}, tile.n, tile.after, tile.row_sums[{index}]);"
            )
        column_sums = [value for value in summed if self.kinds.of(value) == COLUMN]
        column_of = []
        for index, value in enumerate(column_sums):
            name, term, squared = self.summed(names, lines, value)
            before.append(f"T* const {name} = tile.column_sums[{index}];")
            body.append(f"store({name} + i, load<X>({name} + i) + {term});")
            column_of.append(found_again(value.args[0])[2])
        stores = []
        for key in keys:
            if key in each.writes and key != PARAMETER:
                stores.append(f"store({places[key]} + i, widened<X>({lines.of(self.program.state[key])}));")
        if PARAMETER in each.writes:
            new = f"{lines.of(self.inputs[PARAMETER])} + {lines.of(self.program.delta)}"
            stores.append(f"store({places[PARAMETER]} + i, widened<X>({new}));")
        head = [f"T* const {name} = tile.x[{index}];" for index, name in enumerate(places.values())]
        head += numbers.fetched("tile")
        # what emitted code reads in its loops are constants of its own: a tile might be changed by what it writes
        for index, name in enumerate(rows.values()):
            across, row = names.new(None, "across"), names.new(None, "row_value")
            head += [f"const T* const {across} = tile.across[{index}];", f"const T {row} = tile.row[{index}];"]
            text = f"{across} ? load<X>({across} + i) : X{{}} + {row}"
            lines.lines.insert(0, f"[[maybe_unused]] const X {name} = {text};")
        for index, name in enumerate(columns.values()):
            column = names.new(None, "column_tile")
            head.append(f"const T* const {column} = tile.column[{index}];")
            lines.lines.insert(0, f"[[maybe_unused]] const X {name} = load<X>({column} + i);")
        if kept:
            head.append("T* const kept = tile.kept;")
        if row_sums:
            head += ["T* const terms = tile.terms;", "const bool has_terms = tile.after > 1;"]
        after = [line for each in after for line in (indented(lines.lines, 8) if each.strip() == "«lines»" else [each])]
        text = "\n".join(
            [
                "    const Tile<T>& tile = *static_cast<const Tile<T>*>(given);",
                *indented([*head, *before], 4),
                "    over<T>(tile.n, [&](auto lane, int64_t i, int k) {",
                "        using X = decltype(lane);",
                *indented([*lines.lines, *body, *stores], 8),
                "        (void)k;",
                "    });",
                *indented(after, 4),
            ]
        )
        made = function("pass", text, names, words(each))
        return EmittedPass(
            made,
            [self.place(key) for key in keys],
            [key in each.writes for key in keys],
            numbers.values,
            sums,
            len(kept),
            list(rows),
            list(columns),
            row_sums,
            column_sums,
            column_of,
        )

    def summed(self, names: Names, lines: Lines, value: Value) -> tuple[str, str, bool]:
        """The name of a sum, what is added to it, and whether that is a square."""
        squared = value.op.endswith("squares")
        x = lines.of(value.args[0])
        return names.new(value), f"{x} * {x}" if squared else x, squared

    # ---- between passes

    def emit_between(self, after_pass: int, row_sums: list[Value], column_sums: list[Value]) -> EmittedBetween:
        """Rows and columns, from their sums and their state."""
        names = Names()
        numbers = Numbers(names)
        matrices: dict[Any, str] = {}
        totals: dict[Value, str] = {}

        def leaf_of(kind: str) -> Callable[[Any], str | None]:
            sums, letter = (row_sums, "r") if kind == ROW else (column_sums, "c")
            array = "row" if kind == ROW else "column"
            stride = "matrix.row_stride" if kind == ROW else "matrix.after"

            def leaf(operand: Any) -> str | None:
                found = self.kinds.of(operand)
                if found in (HOST, TENSOR):
                    return numbers.of(operand)
                if found == MATRIX:
                    return f"{matrices.setdefault(operand, names.new(operand))}[k]"
                if found != kind:
                    raise RuleError(f"{self.program.rule_name} computes rows from columns or elements")
                if operand.op == "input":
                    slot = self.state_slots[kind].index(operand.name)
                    return f"matrix.{array}[{slot}][{letter} * {stride} + k]"
                if operand.is_reduction:
                    along = "matrix.columns" if kind == ROW else "matrix.rows"
                    by = f" / double({along})" if operand.op.startswith("mean") else ""
                    return f"T(matrix.{array}_sums[{index_of(sums, operand)}][{letter} * matrix.after + k]{by})"
                return None

            return leaf

        loops = []
        for kind, letter in ((ROW, "r"), (COLUMN, "c")):
            array, stride = ("row", "matrix.row_stride") if kind == ROW else ("column", "matrix.after")
            lines = Lines(self.kinds, names, kind, leaf_of(kind))
            stores = []
            for value, slot in self.slots[kind].items():
                text = lines.of(value)
                stores.append(f"matrix.{array}[{slot}][{letter} * {stride} + k] = {text};")
            loops += looped(letter, array, [*lines.lines, *stores])

        def leaf_of_matrix(operand: Any) -> str | None:
            found = self.kinds.of(operand)
            if found in (HOST, TENSOR):
                return numbers.of(operand)
            if found == MATRIX and operand.is_reduction:
                return f"T({totals.setdefault(operand, names.new(operand))}[k]{self.divisor(operand)})"
            return None

        lines = Lines(self.kinds, names, MATRIX, leaf_of_matrix)
        stores = [f"{name}[k] = {lines.of(value)};" for value, name in list(matrices.items())]
        head = [f"T {name}[MOST_AFTER];" for name in matrices.values()]
        adding = []
        for value, name in totals.items():
            head.append(f"double {name}[MOST_AFTER] = {{}};")
            adding += self.added(value, name, row_sums, leaf_of, names)
        text = "\n".join(
            [
                "    const Matrix<T>& matrix = *static_cast<const Matrix<T>*>(given);",
                "    using X = T;",
                *indented([*numbers.fetched("matrix"), *head, *adding], 4),
                *indented(
                    ["for (int64_t k = 0; k < matrix.after; k++) {", *indented([*lines.lines, *stores], 4), "}"], 4
                ),
                *indented(loops, 4),
            ]
        )
        states = {
            kind: [self.place(key) for key in self.state_slots[kind]]
            + [-1] * (len(self.slots[kind]) - len(self.state_slots[kind]))
            for kind in (ROW, COLUMN)
        }
        made = function("between", text, names, "from sums of rows and columns to what passes need of them")
        return EmittedBetween(made, after_pass, numbers.values, states[ROW], states[COLUMN])

    def divisor(self, value: Value) -> str:
        if not value.op.startswith("mean"):
            return ""
        kind = self.kinds.of(value.args[0])
        along = {ROW: "matrix.rows", COLUMN: "matrix.columns", ELEMENT: "matrix.rows * matrix.columns"}[kind]
        return f" / double({along})"

    def added(
        self, value: Value, name: str, row_sums: list[Value], leaf_of: Callable[..., Any], names: Names
    ) -> list[str]:
        """Loops that add up what a matrix has of something."""
        kind = self.kinds.of(value.args[0])
        if kind == ELEMENT:
            same = next(i for i, rows in enumerate(row_sums) if self.kinds.is_part(rows, value))
            return looped("r", "row", [f"{name}[k] += matrix.row_sums[{same}][r * matrix.after + k];"])
        letter, array = ("r", "row") if kind == ROW else ("c", "column")
        lines = Lines(self.kinds, names, kind, leaf_of(kind))
        x = lines.of(value.args[0])
        term = f"double({x}) * double({x})" if value.op.endswith("squares") else f"double({x})"
        return looped(letter, array, [*lines.lines, f"{name}[k] += {term};"])


def emit(found: Schedule, kinds: Kinds) -> Emitted:
    emission = Emission(found, kinds)
    passes = [emission.emit_pass(number) for number in range(len(found.passes))]
    for each in passes:  # rows that are one number for each matrix are spread over its rows
        for kind, values in ((ROW, each.rows), (COLUMN, each.columns)):
            for value in values:
                emission.slot(kind, value)
    summing = [number for number, each in enumerate(passes) if each.row_sums or each.column_sums]
    between = None
    if kinds.is_factored:
        if len(summing) != 1:
            raise RuleError(f"{found.program.rule_name} needs sums of rows and columns in {len(summing)} passes")
        (number,) = summing
        between = emission.emit_between(number, passes[number].row_sums, passes[number].column_sums)
    check_room(found.program.rule_name, passes, emission)
    return Emitted(found, kinds, passes, between, list(emission.slots[ROW]), list(emission.slots[COLUMN]))


def check_room(name: str, passes: list[EmittedPass], emission: Emission) -> None:
    for what, most, counts in (
        ("state entries", OPERANDS - 2, [len(emission.entries)]),
        ("passes over memory", MOST_PASSES, [len(passes)]),
        ("sums in one pass", MOST_SUMS, [max(len(each.sums), each.kept) for each in passes]),
        ("numbers in one pass", MOST_NUMBERS, [len(each.numbers) for each in passes]),
        (
            "statistics of rows or columns",
            SLOTS,
            [len(x) for each in passes for x in (each.rows, each.columns, each.row_sums, each.column_sums)],
        ),
        ("values of rows or columns", 2 * SLOTS, [len(slots) for slots in emission.slots.values()]),
    ):
        if max(counts) > most:
            raise RuleError(f"{name} needs {max(counts)} {what}, and native code has room for {most}")


def words(each: Pass) -> str:
    parts = [f"{verb} {', '.join(names)}" for verb, names in (("read", each.reads), ("write", each.writes)) if names]
    return " and ".join(parts)


def looped(letter: str, array: str, lines: Iterable[str]) -> list[str]:
    """Statements for every row, or column, of a matrix and every place behind it."""
    return [
        f"for (int64_t {letter} = 0; {letter} < matrix.{array}s; {letter}++)",
        "    for (int64_t k = 0; k < matrix.after; k++) {",
        *indented(lines, 8),
        "    }",
    ]


def library_source(functions: Mapping[str, Function]) -> str:
    """The emitted functions, and the table by which they are found."""
    table = ",\n".join(f"    {{{name}<float>, {name}<double>}}" for name in functions)
    return "\n".join(
        [
            "// Emitted from the rules.",
            "#pragma once\n",
            '#include "body.h"\n',
            "namespace {\n",
            *(each.source for each in functions.values()),
            f"constexpr Functions EMITTED[] = {{\n{table},\n}};\n",
            "}  // namespace",
            "",
        ]
    )
