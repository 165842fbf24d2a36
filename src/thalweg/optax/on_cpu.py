"""Native code on CPUs: the core's passes over all parameters, in one call."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from thalweg.codecs import scale_key
from thalweg.errors import Refused, RuleError
from thalweg.kernels.cpu import admission
from thalweg.kernels.cpu.operands import operand_of
from thalweg.kernels.cpu.tables import Operand, Options
from thalweg.kernels.cpu.xla import TARGET, NativeStep, compile_handler, lay_out, place_of
from thalweg.kernels.threads import num_threads, of_machine
from thalweg.optax.batches import Job, Leaf, Step
from thalweg.optax.steps import Results
from thalweg.optax.values import in_precision, rule_in_precision
from thalweg.programs.host import numbers_in, options_of
from thalweg.rules import Rule
from thalweg.rules.rule import stand_in
from thalweg.settings import ParameterOptions
from thalweg.spaces import jax as space
from thalweg.storage import RECORD, arithmetic, describe_state


@functools.cache
def handler() -> Any:
    """The library of native code for XLA, or why there is none."""
    library = compile_handler(jax.ffi.include_dir())
    if not isinstance(library, str):
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.thalweg_step), platform="cpu")
    return library


def admit(leaf: Leaf) -> None:
    """Raise Refused if this code cannot step a parameter that is whole and has elements."""
    setting, shape, dtype = leaf.setting, leaf.p.shape, leaf.p.dtype.name
    described = describe_state(setting.stored_rule, setting.handling, shape, dtype)
    if "float16" in (dtype, getattr(leaf, "g", leaf.p).dtype.name, *(stored for _, stored in described.values())):
        raise Refused("XLA's threads take numbers of float16 below 2**-14 for 0 where native code reads them")
    admission.admit(stand_in(setting.rule_at(1)), setting.handling, shape, dtype)


def admit_sums(leaf: Leaf) -> None:
    """Refuse: this code cannot sum over parts of a parameter that are on other devices."""
    raise Refused(f"native code sums over whole arrays, as {type(leaf.setting.rule).__name__} does")


class Native:
    """Jobs as native code is shown them: buffers that it writes, and a table of where each lies among them."""

    def __init__(
        self,
        jobs: Sequence[Job],
        step: Step,
        figures: Sequence[Mapping[str, Any]],
        rules: Mapping[int, Rule] | None = None,
    ) -> None:
        """figures: shapes of those that are wanted. rules: at this step, by the id of their setting, if known."""
        self.step, self.figures = step, figures
        self.rules = rules or {id(job.setting): stand_in(job.setting.rule_at(step.t)) for job in jobs}
        #: By what decides the numbers of a step: the setting, and the precision of the arithmetic.
        self.groups: dict[Any, int] = {}
        self.settings: list[tuple[ParameterOptions, str]] = []
        self.dtypes: list[str] = []
        options: list[Options] = []
        operands: list[Operand] = []
        for job in jobs:
            setting, precision = job.setting, arithmetic(job.p.dtype.name)
            group = self.groups.setdefault((id(setting), precision), len(options))
            if group == len(options):
                self.settings.append((setting, precision))
                rule, lr = self.rules[id(setting)], None if step.lr is None else 1.0
                options.append(Options(rule, setting.handling, 1, lr, 1.0, declared=setting.rule))
            shown = job.names[0], job.p.shape, job.p, job.g.dtype.name, job.state
            operands.append(operand_of(setting.rule, *shown, self.place, group))
        gradients = [place_of(len(self.dtypes) + index) for index in range(len(jobs))]
        operands = [operand._replace(g=place) for operand, place in zip(operands, gradients, strict=True)]
        threads = num_threads(of_machine)
        self.laid: NativeStep = lay_out(handler(), operands, options, len(self.dtypes), threads=threads)

    def place(self, x: Any) -> tuple[int, str]:
        self.dtypes.append(x.dtype.name)
        return place_of(len(self.dtypes) - 1), x.dtype.name

    def for_parts(self, jobs: Sequence[Job]) -> Native:
        """The same for parts of the parameters, element by element."""
        native = Native(jobs, self.step, self.figures, self.rules)
        if native.codes() != self.codes():  # whose numbers are those of the whole
            raise RuleError("parts of parameters are of other kinds than the parameters")
        return native

    def codes(self) -> list[tuple[int, Any]]:
        return [(group, list(map(str, code.literals))) for group, code in self.laid.tables.used]

    def numbers(self) -> list[Any]:
        """What a step is given beside its arrays: the registers with which tensors begin, and the count."""
        wide = "float64" if any(precision == "float64" for _, precision in self.settings) else "float32"
        numbers = [number for group, code in self.laid.tables.used for number in self.registers(group, code)]
        return [jnp.stack([jnp.asarray(number, wide) for number in numbers]), jnp.asarray(self.step.t, "int32")]

    def registers(self, group: int, code: Any) -> list[Any]:
        """The registers that are not the same in all steps."""
        step, (setting, precision) = self.step, self.settings[group]
        rule = rule_in_precision(setting.rule_at(step.t), precision)
        given = {
            **options_of(rule),
            "t": step.t.astype(precision),
            "lr": in_precision(step.lr, precision),
            "lr_scale": setting.lr_scale,
        }
        scale = 1.0 if step.grad_scale is None else in_precision(step.grad_scale, precision)
        return [-scale if setting.handling.maximize else scale, 1.0, 1.0, *numbers_in(space, code.literals, given)]

    def run(self, jobs: Sequence[Job], numbers: Sequence[Any]) -> Results:
        tables = self.laid.tables
        ordered = [(job, order_of(job)) for job in jobs]
        written = [x for job, keys in ordered for x in (job.p, *(job.state[key] for key in keys))]
        figure_count = sum(len(names) * len(span) for names, span in zip(tables.stats, tables.spans, strict=True))
        results = jax.ffi.ffi_call(
            TARGET,
            [
                *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written),
                jax.ShapeDtypeStruct((), "int32"),
                jax.ShapeDtypeStruct((figure_count,), numbers[0].dtype),
                jax.ShapeDtypeStruct((self.laid.workspace_bytes,), "uint8"),
            ],
            input_output_aliases={i: i for i in range(len(written))},
        )(*written, *(job.g for job in jobs), *numbers, key=self.laid.key)
        news, fine, told_figures = iter(results[: len(written)]), results[-3] != 0, results[-2]
        values, states = [], []
        for job, keys in ordered:
            values.append(next(news))
            entries = {key: next(news) for key in keys}
            states.append({key: entries[key] for key in job.state})
        stats, start = [], 0
        for names, span, wanted in zip(tables.stats, tables.spans, self.figures, strict=True):
            shown = {}
            for name in names:
                if name in wanted:
                    figure = told_figures[start : start + len(span)]
                    shown[name] = figure.reshape(wanted[name].shape).astype(wanted[name].dtype)
                start += len(span)
            stats.append({name: shown[name] for name in wanted})
        return Results(values, states, fine if self.step.guarded else None, stats)


def order_of(job: Job) -> list[str]:
    """The keys of a job's state in the order of native code."""
    entries = list(job.setting.rule.entries(job.p.shape))
    return [*entries, *(key for key in (*map(scale_key, entries), RECORD) if key in job.state)]
