"""A step as Python that computes the same numbers with numpy: a line for each value, in passes over memory."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from thalweg.arrays import Shape, is_number
from thalweg.errors import RuleError
from thalweg.programs.budget import schedule_of
from thalweg.programs.graph import Value
from thalweg.programs.host import options_of
from thalweg.programs.operations import OPERATIONS, REDUCTIONS
from thalweg.programs.schedule import Schedule
from thalweg.programs.trace import PARAMETER
from thalweg.rules.rule import stand_in
from thalweg.settings import Setting

#: Numbers of a step that are not options.
OF_STEP = ("t", "lr", "lr_scale")


def write_setting(setting: Setting, shape: Shape, dtype: str, *, has_lr: bool = True) -> str:
    """What a setting does with parameters of this kind; where it cannot be written down, a comment that says why."""
    rule = setting.rule_at(1)
    if rule.needs_whole:
        name = type(rule).__name__
        return f"# {name} multiplies whole matrices: its arithmetic is {type(rule).__module__}.{name}\n"
    try:
        alike = replace(setting, rule=stand_in(rule))
        return write_program(schedule_of(alike, shape, dtype, has_lr=has_lr), options_of(rule))
    except RuleError as error:
        return f"# {type(rule).__name__} has no text: {error}\n"


def write_program(schedule: Schedule, options: Mapping[str, Any]) -> str:
    """The source of ``step``, a function of arrays and numbers. options: the values of those that it takes."""
    return Writer(schedule, options).write()


def write_function(
    arrays: Iterable[str], numbers: Iterable[str], options: Mapping[str, Any], title: str, body: Iterable[str]
) -> str:
    """The source of ``step``. options: what numbers are if they are not given, where that can be written."""
    defaults = {"lr_scale": "1.0"}
    for name, value in options.items():
        if is_number(value) or (isinstance(value, tuple) and all(v is None or is_number(v) for v in value)):
            defaults[name] = write_number(value)
    given = [f"{name}={defaults[name]}" if name in defaults else name for name in numbers]
    head = ["import numpy as np\n\n", '@np.errstate(all="ignore")', f"def step({', '.join([*arrays, '*', *given])}):"]
    return "\n".join([*head, *(f"    {line}" for line in (f'"""{title}"""', *body)), ""])


class Writer:
    """The source of one program, while it is written."""

    def __init__(self, schedule: Schedule, options: Mapping[str, Any]) -> None:
        self.schedule, self.program, self.options = schedule, schedule.program, options
        self.every = self.program.memory[PARAMETER]
        needed = {value.name.partition("[")[0] for value in self.program.needed if value.op == "input"}
        self.numbers = [name for name in OF_STEP if name in self.program.inputs]
        self.numbers += [name for name in options if name in needed]
        self.used = {*self.program.memory, *self.numbers, "np"}
        #: The names of values: figures have those under which they are shown.
        self.names: dict[Value, str] = {}
        for name, value in {**self.program.stats, "finite": self.program.finite, "delta": self.program.delta}.items():
            if isinstance(value, Value) and value.op != "input":
                self.name(value, name)
        #: What the lines so far have computed: in all passes, and in this one.
        self.small: dict[Value, str] = {}
        self.large: dict[Value, str] = {}
        self.lines: list[str] = []
        #: Lines of this pass, and those that go before it.
        self.body: list[str] = []
        self.between: list[str] = []

    def write(self) -> str:
        program, passes = self.program, self.schedule.passes
        count = "one pass" if len(passes) == 1 else f"{len(passes)} passes"
        for number, each in enumerate(passes):
            self.write_pass(number, f"# pass {number + 1} of {len(passes)}: {each}")
        state = {key: self.of(program.state[key]) if key in self.schedule.small else key for key in program.state}
        finite, stats = self.of(program.finite), {key: self.of(value) for key, value in program.stats.items()}
        self.flush("# after the last pass")
        body = [*self.lines, f"return p, {write_dict(state)}, {finite}, {write_dict(stats)}"]
        title = f"One step of {program.rule_name}, in {count} over memory."
        return write_function(program.memory, self.numbers, self.options, title, body)

    def write_pass(self, number: int, title: str) -> None:
        each, self.body = self.schedule.passes[number], []
        self.large = {value: key for key, value in self.schedule.loads(number).items()}
        for value in each.sums:
            axes = "" if len(value.axes) == len(self.every or ()) else f", axis={value.axes}, keepdims=True"
            text = REDUCTIONS[value.op].text.format(self.of(value.args[0]), axes)
            self.body.append(f"{self.name(value)} = {text}")
        writes = {key: self.of(self.program.results[key]) for key in each.writes}
        if PARAMETER in writes:
            writes[PARAMETER] = f"p + {writes[PARAMETER]}"
        if writes:
            self.body.append(f"{', '.join(writes)} = {', '.join(writes.values())}")
        self.flush("# between passes" if number else "# before the first pass")
        self.lines += [title, *self.body]
        self.small.update({value: self.name(value) for value in each.sums})

    def flush(self, title: str) -> None:
        """Write what is smaller than a parameter, and was needed since the last pass."""
        self.lines += [title, *self.between] if self.between else []
        self.between = []

    def of(self, operand: Any) -> str:
        """What stands for an operand, computed in the lines so far."""
        if not isinstance(operand, Value):
            return write_number(operand)
        is_large = operand.extent == self.every
        known = self.large if is_large else self.small
        if operand not in known:
            if operand.op == "input":
                known[operand] = operand.name
            else:
                args = [self.of(arg) for arg in operand.args]
                if operand.op == "pow":
                    args = [f"({arg})" if arg.startswith("-") else arg for arg in args]
                known[operand] = self.name(operand)
                lines = self.body if is_large else self.between
                lines.append(f"{known[operand]} = {OPERATIONS[operand.op].text.format(*args)}")
        return known[operand]

    def name(self, value: Value, own: str = "") -> str:
        """The name that a value is given, that the rule has for it, or one that says its place among all."""
        if value not in self.names:
            base = own or re.sub(r"\W+", "_", value.graph.names.get(value, "")).strip("_") or f"v{value.index}"
            name, count = base, 1
            while name in self.used or keyword.iskeyword(name):
                name, count = f"{base}_{count}", count + 1
            self.used.add(name)
            self.names[value] = name
        return self.names[value]


def write_number(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(write_number, value))}{',' * (len(value) == 1)})"
    if isinstance(value, float) and not math.isfinite(value):
        return "np.nan" if math.isnan(value) else f"{'-' * (value < 0)}np.inf"
    return repr(value)


def write_dict(texts: Mapping[str, str]) -> str:
    return "{" + ", ".join(f'"{key}": {text}' for key, text in texts.items()) + "}"
