"""Native code on CPUs: the core's passes over all parameters, in one call."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from thalweg.codecs import scale_key
from thalweg.kernels.cpu.operands import operand_of
from thalweg.kernels.cpu.reasons import reason_unserved
from thalweg.kernels.cpu.tables import Operand, Options
from thalweg.kernels.cpu.xla import TARGET, Laid, compile_handler, lay_out, place_of
from thalweg.kernels.threads import num_threads, of_machine
from thalweg.optax.batches import Job, Leaf, Step
from thalweg.optax.results import Results
from thalweg.optax.values import in_precision, rule_in_precision
from thalweg.programs.host import numbers_in, options_of
from thalweg.programs.trace import stand_in
from thalweg.settings import Setting
from thalweg.spaces import jax as space
from thalweg.storage import RECORD, arithmetic

#: Whether ``engine="auto"`` takes it.
IS_DEFAULT = True


@functools.cache
def handler() -> Any:
    """The library of native code for XLA, or why there is none."""
    library = compile_handler(jax.ffi.include_dir())
    if not isinstance(library, str):
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.thalweg_step), platform="cpu")
    return library


def reason_against(leaf: Leaf) -> str:
    """Why this code cannot step a parameter that is whole and has elements, "" if it can."""
    setting = leaf.setting
    return reason_unserved(stand_in(setting.rule_at(1)), setting.handling, leaf.p.shape, leaf.p.dtype.name) or ""


def run_native(jobs: Sequence[Job], step: Step, figures: Sequence[Mapping[str, Any]]) -> Results:
    """figures: shapes of those that are wanted."""
    layout = Layout(jobs, step)
    laid, written = layout.laid, layout.written
    wide = any(arithmetic(job.p.dtype.name) == "float64" for job in jobs)
    numbers = [number for group, code in laid.tables.used for number in layout.numbers(group, code, step)]
    precision = "float64" if wide else "float32"
    told = sum(len(names) * len(span) for names, span in zip(laid.tables.stats, laid.tables.spans, strict=True))
    results = jax.ffi.ffi_call(
        TARGET,
        [
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written),
            jax.ShapeDtypeStruct((), "int32"),
            jax.ShapeDtypeStruct((told,), precision),
            jax.ShapeDtypeStruct((laid.workspace_bytes,), "uint8"),
        ],
        input_output_aliases={i: i for i in range(len(written))},
    )(
        *written,
        *(job.g for job in jobs),
        jnp.stack([jnp.asarray(number, precision) for number in numbers]),
        jnp.asarray(step.t, "int32"),
        key=laid.key,
    )
    news, fine, told_figures = iter(results[: len(written)]), results[-3] != 0, results[-2]
    values, states = [], []
    for job, keys in zip(jobs, layout.keys, strict=True):
        values.append(next(news))
        found = {key: next(news) for key in keys}
        states.append({key: found[key] for key in job.state})
    stats, start = [], 0
    for names, span, wanted in zip(laid.tables.stats, laid.tables.spans, figures, strict=True):
        own = {}
        for name in names:
            if name in wanted:
                own[name] = (
                    told_figures[start : start + len(span)].reshape(wanted[name].shape).astype(wanted[name].dtype)
                )
            start += len(span)
        stats.append({name: own[name] for name in wanted})
    return Results(values, states, fine if step.guarded else None, stats)


class Layout:
    """Jobs as native code is shown them: buffers that it writes, and a table of where each lies among them."""

    def __init__(self, jobs: Sequence[Job], step: Step) -> None:
        self.written: list[Any] = []
        #: Of each job: under which keys its state follows its parameter among the buffers.
        self.keys: list[list[str]] = []
        #: By what decides the numbers of a step: the setting, and the precision of the arithmetic.
        self.groups: dict[Any, int] = {}
        self.settings: list[tuple[Setting, str]] = []
        options: list[Options] = []
        operands: list[Operand] = []
        for job in jobs:
            setting, precision = job.setting, arithmetic(job.p.dtype.name)
            group = self.groups.setdefault((id(setting), precision), len(options))
            if group == len(options):
                self.settings.append((setting, precision))
                rule, lr = stand_in(setting.rule_at(step.t)), None if step.lr is None else 1.0
                options.append(Options(rule, setting.handling, 1, lr, 1.0, declared=setting.rule))
            entries = list(setting.rule.entries(job.p.shape))
            self.keys.append([*entries, *(key for key in (*map(scale_key, entries), RECORD) if key in job.state)])
            shown = job.names[0], job.p.shape, job.p, job.g.dtype.name, job.state
            operands.append(operand_of(setting.rule, *shown, self.place, group))
        gradients = [place_of(len(self.written) + index) for index in range(len(jobs))]
        operands = [operand._replace(g=place) for operand, place in zip(operands, gradients, strict=True)]
        threads = num_threads(of_machine)
        self.laid: Laid = lay_out(handler(), operands, options, len(self.written), threads=threads)

    def place(self, x: Any) -> tuple[int, str]:
        self.written.append(x)
        return place_of(len(self.written) - 1), x.dtype.name

    def numbers(self, group: int, code: Any, step: Step) -> list[Any]:
        """The registers with which tensors of a group begin, as far as they are not the same for all steps."""
        setting, precision = self.settings[group]
        rule = rule_in_precision(setting.rule_at(step.t), precision)
        given = {
            **options_of(rule),
            "t": step.t.astype(precision),
            "lr": in_precision(step.lr, precision),
            "lr_scale": setting.lr_scale,
        }
        scale = 1.0 if step.grad_scale is None else in_precision(step.grad_scale, precision)
        return [-scale if setting.handling.maximize else scale, 1.0, 1.0, *numbers_in(space, code.literals, given)]
