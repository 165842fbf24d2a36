"""Triton from what a schedule was lowered to: a kernel for each pass, and those between passes.

The formulas are the rule's, and what is computed where is decided in ``programs/lower.py``. Passes of rules whose sums
all go over whole tensors go through runs of elements, all others through lines of rows and columns. What is computed
between passes is a *figure* if there is one for each tensor, else a *statistic*.
"""

from __future__ import annotations

import math
from typing import Any

from thalweg.kernels.text import ARITHMETIC, block, functions_in, indented, summand
from thalweg.kernels.triton import templates
from thalweg.kernels.triton.admission import ROOM
from thalweg.kernels.triton.blocks import OF_LINES, OF_RUNS
from thalweg.kernels.triton.memory import Memory, Stored
from thalweg.kernels.triton.sums import KINDS, Statistic
from thalweg.programs.extents import COLUMN, ELEMENT, HOST, MATRIX, ROW, TENSOR, Kinds
from thalweg.programs.graph import Value
from thalweg.programs.lower import FINITE, INPUT, KEPT, LOAD, NUMBER, REDUCED, Lowered, Statement, Sum
from thalweg.programs.schedule import Schedule
from thalweg.programs.trace import GRADIENT, PARAMETER

#: Operations as Triton has them.
TEXTS = {
    **ARITHMETIC,
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "and": "{0} & {1}",
    "abs": "tl.abs({0})",
    "sqrt": "tl.sqrt({0})",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "cos": "tl.cos({0})",
    "floor": "tl.floor({0})",
    "expm1": "expm1({0})",
    "pow": "power({0}, {1})",
    "isfinite": "is_finite({0})",
    "maximum": "larger({0}, {1})",
    "minimum": "smaller({0}, {1})",
    "where": "tl.where({0}, {1}, {2})",
}
#: Between passes, where a root may be of one number.
ROOT = "tl.sqrt_rn(nothing + {0})"
#: Names that kernels have for other things.
NAMES = """
after allowed along begin behind between block blocks column_entry columns_of_whole count
counts cut down elements_of_whole end entry factor failures figures first g_base g_place grad_scale gradients groups
groups_mask height i index inside is_first kind left line lr lr_scale mask matrix matrix_entry matrix_mask mode new
nothing now numbers origin p_base p_codes p_place p_scale p_scale_base p_scales part partials parts piece pieces
place position record_base record_place row row_entry row_mask rows rows_of_whole run start stored sums tensor tensors
tl which as_stored by_neighbours decoded failures_at gradient_factor is_allowed is_idle kept loaded number_kept
number_of step_number address by_place copy_of draws_of first_of groups_at half_of lanes_of matrix_of_column
matrix_of_row pointer quotient read_codes record_of rounded statistic_of store_coded with_record
"""
#: And those that have numbers, of sums, of what is kept and of arrays.
NUMBERED = {f"{word}_{i}" for word in ("draws", "home", "kept", "sum", "term") for i in range(100)}
PARTS = {f"s{i}_{word}" for word in ("base", "codes", "place", "scale", "scale_base", "scales") for i in range(ROOM)}
RESERVED = frozenset((*NAMES.split(), *NUMBERED, *PARTS, *functions_in(TEXTS.values())))
#: Inputs that are one number for each tensor.
SCALAR_INPUTS = {
    "t": "step_number(rows, row)",
    "lr": "number_of(lr)",
    "lr_scale": "number_of(lr_scale)",
}
#: Figures that every rule has before its own: whether a tensor's step is finite, and the number of the step.
OWN_FIGURES = 2
#: Blocks that one program goes through in turn where it has much to compute, and numbers are found once for all.
BLOCKS = 4
#: Keeps reads before what follows. Compilers spare registers by reading half a block when the other half is computed.
ALL_ASKED = "tl.debug_barrier()"
#: How many a mean combines, by what is averaged and what for.
COUNTS = {
    (ELEMENT, ROW): "columns_of_whole",
    (ELEMENT, COLUMN): "rows_of_whole",
    (ELEMENT, MATRIX): "rows_of_whole * columns_of_whole",
    (ELEMENT, TENSOR): "elements_of_whole",
    (ROW, MATRIX): "rows_of_whole",
    (ROW, TENSOR): "elements_of_whole / columns_of_whole",
    (COLUMN, MATRIX): "columns_of_whole",
    (COLUMN, TENSOR): "elements_of_whole / rows_of_whole",
    (MATRIX, TENSOR): "elements_of_whole / (rows_of_whole * columns_of_whole)",
}
#: Where the lanes of a block find what they belong to, and which of them do.
ENTRIES = {
    ROW: ("row_entry", "row_mask"),
    COLUMN: ("column_entry", "inside"),
    MATRIX: ("matrix_entry", "matrix_mask"),
}
#: Which lanes have terms, of which there are fewer than elements.
MASKS = {
    ELEMENT: "mask",
    ROW: "row_mask & (along == 0)",
    COLUMN: "inside & (down == 0)",
    MATRIX: "matrix_mask & (along == 0) & (down == 0)",
}
# Which lanes have a matrix, in the first piece along its rows or down its columns. Spelled without joining a scalar to
# a mask: of that the interpreter of Triton 3.9 makes a mask of whole numbers, and refuses it.
FIRST_ALONG, FIRST_DOWN = (f"behind < tl.where({place} == 0, after, 0)" for place in ("along", "down"))


class Printed:
    """Source of kernels, and what the host has to know of them."""

    def __init__(
        self, schedule: Schedule, kinds: Kinds, stored: tuple[Stored, ...], title: str, *, guarded: bool, random: bool
    ) -> None:
        """guarded: whether nothing is written before all is known to be finite. random: whether state is rounded so."""
        self.lowered = lowered = Lowered(schedule, kinds, RESERVED, guarded=guarded)
        self.program, self.last = lowered.program, lowered.last
        self.find, self.entries = kinds.find, lowered.program.entries
        #: Over which rows and columns go; None: all sums go over whole tensors.
        self.axes, self.by_lines = kinds.axes, kinds.axes is not None
        self.memory = Memory(self.program, stored, random)
        #: Sums of tensors, the failures of a rehearsal, sums of all else, and what is kept of these: all statistics.
        sums = [(number, added) for number in range(self.last + 1) for added in lowered.passes[number].sums]
        ordered = sorted(sums, key=lambda pair: pair[1].domain != TENSOR)
        totals = [added.value for _, added in ordered if added.domain == TENSOR]
        self.statistics = [Statistic(added.domain, added.source, number) for number, added in ordered]
        self.statistics.insert(len(totals), Statistic(TENSOR, ELEMENT, self.last + 1))
        self.statistics += [Statistic(self.find(value)) for value in lowered.lasting]
        places = [*totals, None, *(added.value for _, added in ordered[len(totals) :]), *lowered.lasting]
        self.places: dict[Any, int] = {value: place for place, value in enumerate(places)}
        #: Numbers of the options, in the order in which kernels read them behind the sign of the gradient.
        self.numbers = list(lowered.numbers)
        self.figures = len(lowered.figures)
        #: By name: the figure that shows it, or the number that it always is.
        shown = self.program.stats.items()
        self.stats = {name: self.figure(v) if isinstance(v, Value) else float(v) for name, v in shown}
        #: Whether some state of one number for each tensor is known after the last pass alone.
        self.late = any(lowered.stage_of(self.program.state[key]) == self.last for key in self.program.scalars)
        #: How many blocks one program goes through in turn.
        self.blocks = BLOCKS if self.memory.has_codes and not self.by_lines else 1
        #: By pass: for what something is computed after it.
        self.between = [tuple(kind for kind in KINDS if kind in blocks) for blocks in lowered.between]
        #: State that is written when all else is done, and its kinds: single numbers, and what only a guard lets be.
        self.kept = [*(lowered.small if guarded else ()), *self.program.scalars]
        self.kept_kinds = tuple(kind for kind in KINDS if kind in map(lowered.domain_of, self.kept))
        self.source = self.print(title)

    def sums(self, number: int) -> list[Sum]:
        """The sums that a pass makes."""
        return self.lowered.passes[number].sums

    def gathers(self, number: int) -> bool:
        """Whether a pass makes sums for rows or columns, or of them."""
        return any((added.source, added.domain) != (ELEMENT, TENSOR) for added in self.sums(number))

    def is_large(self, key: str) -> bool:
        """Whether an array is as large as its parameter."""
        return self.program.memory.get(key) == self.program.memory[PARAMETER]

    def figure(self, value: Value) -> int:
        return OWN_FIGURES + self.lowered.figures[value]

    def print(self, title: str) -> str:
        schedule, kernels = self.lowered.schedule, list[str]()
        for number in range(self.last + 1):
            kernels.append(PassText(self, number).print())
        for number in range(self.last + 1):
            if self.between[number]:
                kernels.append(self.fill(templates.BETWEEN, number=number, body=self.print_between(number)))
        if self.kept:
            kernels.append(self.fill(templates.KEEP, body=self.print_keep()))
        between = f"; between them, read and write {', '.join(self.lowered.small)}" if self.lowered.small else ""
        size = f"TENSOR = tl.constexpr(GEOMETRY.value + FACTS.value * {len(self.statistics)})"
        return "\n\n".join([f'"""{title}\n\n{schedule}{between}\n"""', size, *kernels])

    def fill(self, template: str, **given: Any) -> str:
        dtypes = "".join(f" S{i}_DTYPE: tl.constexpr," for i in range(len(self.entries)))
        return template.format(dtypes=dtypes, **given)

    # ---- what all kernels read

    def read_number(self, statement: Statement) -> str:
        if statement.op == NUMBER:  # behind the sign of the gradient
            return f"tl.load(numbers + {1 + self.lowered.numbers[statement.source]})"
        return f"tl.load(figures + {self.figure(statement.source)} * count + row)"

    def read_scalar(self, value: Value) -> str:
        """An input that is one number for each tensor."""
        if value.name in self.program.scalars:
            return f"number_kept(rows, row, {self.entries.index(value.name)})"
        return SCALAR_INPUTS[value.name]

    def mean(self, value: Value, total: str) -> str:
        return f"{total} / ({COUNTS[self.find(value.args[0]), self.find(value)]})" if value.is_mean else total

    # ---- between passes

    def print_values(self, number: int, kind: str) -> list[str]:
        """Lines that compute after a pass: for a tensor, or for its rows, columns or matrices."""
        lines = list[str]()
        for statement in self.lowered.between[number][kind].statements:
            name, op, _, domain, value = statement
            entry = "entry" if domain == kind else "matrix_entry"
            if op == INPUT and domain == TENSOR:
                is_counted = value.name == "t" and number == self.last > 0  # by then steps have been counted
                text = "tl.load(figures + T * count + row)" if is_counted else self.read_scalar(value)
            elif op == INPUT:
                text = f"loaded({self.memory.base(value.name, 'False')} + {entry}, mask)"
            elif op == REDUCED and domain == TENSOR:
                text = self.mean(value, f"tl.load(sums + {self.places[value]} * count + row)")
            elif op == REDUCED:
                text = self.mean(value, f"loaded(sums + first_of(tensor, {self.places[value]}) + {entry}, mask)")
            else:
                text = self.read_number(statement) if op == NUMBER else operation(statement, sqrt=ROOT)
            lines.append(f"{name} = {text}")
        return lines

    def print_between(self, number: int) -> str:
        """What is computed for each tensor, row, column or matrix after a pass."""
        body = []
        for kind in self.between[number]:
            own, lines = self.lowered.between[number][kind], self.print_values(number, kind)
            if any("matrix_entry" in line for line in lines):
                lines.insert(0, f"matrix_entry = matrix_of_{kind}(tensor, entry)")
            for value, name in own.keeps.items():
                place = f"sums + first_of(tensor, {self.places[value]})" if kind != TENSOR else self.place_of(value)
                lines.append(f"tl.store({place} + entry, nothing + {literal(name)}, mask)")
            if kind == TENSOR and number == self.last - 1:
                lines.append("tl.store(figures + T * count + row, step_number(rows, row))")
            writes = [self.write_entry(key, f"nothing + {literal(name)}") for key, name in own.stores.items()]
            lines += ["if is_allowed(allowed, ALLOWED):", *indented(writes, 4)] if writes else []
            body += [f"if kind == {KINDS.index(kind)}:  # for each {kind}", *indented(lines, 4)]
        return block(body, 4)

    def place_of(self, value: Any) -> str:
        """Where a figure is kept."""
        return f"figures + {'FINITE' if value is FINITE else self.figure(value)} * count + row"

    def write_entry(self, key: str, new: str) -> str:
        text = f"as_stored({new}, 0.0, {self.memory.dtype(key)}, False)"
        return f"tl.store({self.memory.base(key, 'False')} + entry, {text}, mask)"

    def print_keep(self) -> str:
        body = []
        for key in self.kept:
            kind, value = self.lowered.domain_of(key), self.program.state[key]
            body.append(f"if kind == {KINDS.index(kind)}:  # {key}")
            if kind == TENSOR:
                place = f"place_of_number(rows, row, {self.entries.index(key)})"
                body += ["    if STAGE == 2:", f"        tl.store({place}, tl.load({self.place_of(value)}))"]
                continue
            body += [
                f"    new = tl.load(sums + first_of(tensor, {self.places[value]}) + entry, mask, other=0.0)",
                "    if STAGE == 1:",
                f"        failed = failures_at(new.to({self.memory.dtype(key)}), mask)",
                "        tl.atomic_add(failures + row, tl.sum(failed))",
                "    else:",
                f"        {self.write_entry(key, 'new')}",
            ]
        return block(body, 4)


def literal(number: Any) -> str:
    """A number as Triton has it; names stay as they are."""
    if isinstance(number, str):
        return number
    return repr(number) if isinstance(number, bool) or math.isfinite(number) else f'float("{number}")'


def operation(statement: Statement, **other: str) -> str:
    """other: operations that have another text."""
    return {**TEXTS, **other}[statement.op].format(*map(literal, statement.args))


class PassText:
    """The kernel of one pass: what it does once, for each block of elements, and at its end."""

    def __init__(self, printed: Printed, number: int) -> None:
        self.printed, self.number, self.by_lines = printed, number, printed.by_lines
        self.memory, self.own = printed.memory, printed.lowered.passes[number]
        self.bases: list[str] = []
        self.once: list[str] = []
        #: What is read for rows, before all that is for elements: compilers lay out lanes as the last load wants it.
        self.rows: list[str] = []
        self.loads: list[str] = []
        #: One for each tensor. Of runs, behind what is large, unless several blocks share them.
        self.numbers: list[str] = self.once if self.by_lines or self.memory.has_codes else []
        self.body: list[str] = []
        self.end: list[str] = []
        #: By the name of what is read as codes: how these are called, until they are decoded.
        self.codes: dict[str, str] = {}
        self.domains = {statement.name: statement.domain for statement in self.own.statements}

    def print(self) -> str:
        own, memory, printed = self.own, self.memory, self.printed
        self.read()
        for statement in own.statements:
            if statement.op != LOAD and statement.source is not None:
                self.write(statement)
        adding = self.add_up()
        results = {key: self.decoded(name) for key, name in own.stores.items() if key != PARAMETER}
        stores = memory.write_all(results)
        if PARAMETER not in own.stores:
            self.body += adding
            if stores:
                self.body += ["if is_allowed(allowed, ALLOWED):", *indented(stores, 4)]
        else:
            self.body += memory.rounded("{} + {}".format(*map(self.decoded, own.statements[-1].args)))
            self.body += ["if STAGE == 1:", f"    failures += {self.reduced('failures_at(stored, mask)')}"]
            for key, text in results.items():
                failed = self.reduced(f"failures_at(({text}).to({memory.dtype(key)}), mask)")
                self.body += [f"    if {memory.dtype(key)} == tl.float16:", f"        failures += {failed}"]
            self.body += ["else:", *indented([*adding, *memory.write_rounded(), *stores], 4)]
            self.once.append(f"failures = {self.zeros}")
            others = ["else:", *indented(self.end, 4)] if self.end else []
            self.end = ["if STAGE == 1:", "    tl.store(partials + part, tl.sum(failures))", *others]
        if PARAMETER in own.stores or any(map(memory.is_random, results)):
            is_noted = self.number == printed.last > 0
            self.once.append(f"now = {'tl.load(figures + T * count + row)' if is_noted else 'step_number(rows, row)'}")
        asked = [] if self.by_lines or memory.has_codes else [ALL_ASKED]  # with codes it keeps nothing
        numbers = [] if self.numbers is self.once else self.numbers
        pass_, forms = printed.lowered.schedule.passes[self.number], OF_LINES if self.by_lines else OF_RUNS
        return printed.fill(
            templates.PASS,
            number=self.number,
            words=str(pass_).capitalize() or "Sum what is known",
            sizes=block(templates.sizes(forms), 4),
            modes=block(templates.modes(self.number, len(printed.entries), forms), 4),
            bases=block(self.bases, 4),
            once=block(self.once, 4),
            each=block([*self.rows, *self.loads, *asked, *numbers, *self.body], 8),
            end=block(self.end, 4),
        )

    # ---- of runs or of lines

    @property
    def zeros(self) -> str:
        """What elements are added to; across threads at the end alone."""
        return f"tl.zeros({'(LINES, STEPS, WIDTH)' if self.by_lines else '(WIDTH // TOGETHER,)'}, tl.float32)"

    def reduced(self, text: str) -> str:
        return text if self.by_lines else f"by_neighbours({text})"

    # ---- memory

    def read(self) -> None:
        """Find the places of a block's elements, and load what is read."""
        memory, loads = self.memory, {x.source: x.name for x in self.own.statements if x.op == LOAD}
        keys = [key for key in self.printed.program.memory if key in loads or key in self.own.stores]
        bases = {memory.short(key): memory.base(key, "VECTOR > 1") for key in keys}
        if PARAMETER in keys and memory.has_record:
            bases["record"] = memory.record("VECTOR > 1")
        for name, base in bases.items():
            self.bases.append(f"{name}_base = {base}")
            self.loads += [f"{name}_place = {name}_base + start + index", "if VECTOR > 1:"]
            self.loads.append(f"    {name}_place = tl.multiple_of({name}_place, (1, 1, 16))")
        if coded := {memory.short(key): memory.scales(key) for key in keys if memory.is_coded(key)}:
            self.bases += [f"{name}_scale_base = {scales}" for name, scales in coded.items()]
            self.loads += templates.GROUPS
            self.loads += [f"{name}_scales = {name}_scale_base + groups" for name in coded]
        for key, name in loads.items():
            if memory.is_coded(key):  # which become numbers where they are first needed
                self.codes[name] = memory.short(key)
                self.loads.append(memory.read_codes(key))
                continue
            factor = "gradient_factor(numbers, grad_scale, SCALED)"
            if key == GRADIENT and self.numbers is self.once:
                self.once.append(f"factor = {factor}")
                factor = "factor"
            self.loads.append(f"{name} = {memory.read(key)}{f' * {factor}' if key == GRADIENT else ''}")

    def decoded(self, name: Any) -> str:
        """The name of a number, or the number, after the line that decodes it."""
        if name in self.codes:
            codes = self.codes.pop(name)
            self.body.append(f"{name} = decoded({codes}_codes, {codes}_scale, GROUP)")
        return literal(name)

    # ---- statements

    def write(self, statement: Statement) -> None:
        name, op, args, domain, value = statement
        printed, home = self.printed, self.home(statement)
        if op in (NUMBER, KEPT) and domain in (HOST, TENSOR):
            text = printed.read_number(statement)
        elif op == INPUT and domain == TENSOR:
            text = printed.read_scalar(value)
        elif op in (KEPT, INPUT):
            entry, mask = ENTRIES[domain]
            if op == KEPT:
                place = printed.places[value]
                base, where = f"kept_{place}", f"sums + first_of(tensor, {place})"
            else:
                base, where = f"{self.memory.short(value.name)}_base", self.memory.base(value.name, "False")
            if f"{base} = {where}" not in self.once:
                self.once.append(f"{base} = {where}")
            text = f"loaded({base} + {entry}, {mask})"
        else:
            factor = self.factor_of(statement) if op == "mul" else None
            if factor is not None:
                # one product for each group instead of one for each element
                codes, other = factor
                text = f"decoded({codes}_codes, {codes}_scale * {other}, GROUP)"
            else:
                for arg in args:
                    self.decoded(arg)
                text = operation(statement, **(self.memory.operations if domain == ELEMENT else {}))
        home.append(f"{name} = {text}")

    def home(self, statement: Statement) -> list[str]:
        if statement.domain in (HOST, TENSOR):
            return self.numbers
        if statement.domain == ROW and statement.op in (KEPT, INPUT):
            return self.rows
        return self.body if statement.domain in (ROW, ELEMENT) else self.once

    def factor_of(self, statement: Statement) -> tuple[str, str] | None:
        """Of a product of codes, not decoded yet, and a number of the tensor: both."""
        for codes, other in (statement.args, statement.args[::-1]):
            if codes in self.codes and self.domains.get(str(other), HOST) in (HOST, TENSOR):
                return self.codes[str(codes)], literal(other)
        return None

    # ---- sums

    def summed(self, added: Sum) -> str:
        """What is added up; 0 where nothing is."""
        text = summand(added.value, self.decoded(added.term))
        return f"kept({text}, {MASKS[added.source]})" if added.is_masked else text

    def add_up(self) -> list[str]:
        """Sums of a block. Equal terms are computed once."""
        adding: list[str] = []
        shared: dict[tuple[Any, bool], list[Sum]] = {}
        for added in self.own.sums:
            shared.setdefault((added.term, added.value.is_squared), []).append(added)
        for targets in shared.values():
            first, place = targets[0], self.printed.places[targets[0].value]
            domains, total = {added.domain for added in targets}, f"sum_{place}"
            text, home = self.summed(first), adding if first.source in (ROW, ELEMENT) else self.once
            if domains != {TENSOR} or home is self.once:
                home.append(f"term_{place} = {text}")
                text = f"term_{place}"
            else:
                text = self.reduced(text)
            if first.source == ROW or (first.source == ELEMENT and domains != {ROW}):
                zeros = self.zeros if first.source == ELEMENT else "tl.zeros((LINES, 1, behind.shape[2]), tl.float32)"
                self.once.append(f"{total} = {zeros}")
                home.append(f"{total} += {text}")
            for added in targets:
                self.leave(added, adding, f"term_{place}", total)
        return adding

    def leave(self, added: Sum, adding: list[str], x: str, total: str) -> None:
        """Leave a program's part of one sum where it belongs."""
        place, over = self.printed.places[added.value], (added.source, added.domain)
        if added.domain == TENSOR:
            number = place - min(self.printed.places[other.value] for other in self.own.sums)
            text = x if added.source in (COLUMN, MATRIX) else total
            self.end.append(f"tl.store(partials + {number} * parts + part, tl.sum({text}))")
            return
        home = f"home_{place}"
        copy = {
            (ELEMENT, ROW): "along",
            (ELEMENT, COLUMN): "down",
            (ELEMENT, MATRIX): "down * tl.load(cut + ALONGS) + along",
            (ROW, MATRIX): "down",
            (COLUMN, MATRIX): "along",
        }[over]
        self.once.append(f"{home} = sums + copy_of(statistic_of(tensor, {place}), {copy})")
        down = f"tl.sum({total}, 0)[None, :, :]"
        if over == (ELEMENT, ROW):
            adding.append(f"tl.store({home} + row_entry, by_place({x}, MODE), row_mask)")
        else:
            stored, entry, mask = {
                (ELEMENT, COLUMN): (down, "column_entry", "inside"),
                (ELEMENT, MATRIX): (f"by_place({down}, MODE)", "matrix_entry", "matrix_mask"),
                (ROW, MATRIX): (down, "matrix_entry", FIRST_ALONG),
                (COLUMN, MATRIX): (f"by_place({x}, MODE)", "matrix_entry", FIRST_DOWN),
            }[over]
            self.end.append(f"tl.store({home} + {entry}, {stored}, {mask})")
