"""Which code takes a step: XLA's own, compiled from the rule, or native code that writes in place, in one call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from thalweg.codecs import scale_key
from thalweg.errors import OptionError
from thalweg.kernels.cpu.operands import operand_of
from thalweg.kernels.cpu.reasons import reason_unserved
from thalweg.kernels.cpu.tables import Operand, Options
from thalweg.kernels.cpu.xla import TARGET, Laid, compile_handler, lay_out, place_of
from thalweg.kernels.threads import num_threads, of_machine
from thalweg.optax.batches import Job, Leaf, Step, step_all
from thalweg.optax.either import either
from thalweg.optax.shards import typed_layout
from thalweg.optax.states import Entries
from thalweg.optax.values import in_precision, rule_in_precision
from thalweg.programs.host import numbers_in, options_of
from thalweg.programs.trace import stand_in
from thalweg.rules import Rule
from thalweg.rules.checks import check_choice
from thalweg.settings import Setting
from thalweg.spaces import jax as space
from thalweg.storage import RECORD, arithmetic, describe_state

Engine: TypeAlias = Literal["auto", "xla", "native"]


def check_engine(rule: type[Rule], engine: Any) -> None:
    check_choice("engine", engine, "auto", "xla", "native")
    if engine == "native" and rule.needs_whole:
        raise OptionError(
            f"engine='native' cannot run {rule.__name__}: it is made of matrix products, which XLA does best"
        )


class Results(NamedTuple):
    """What came of some parameters."""

    #: Changes, or new parameters.
    values: list[Any]
    states: list[Entries]
    #: Whether all of it is finite; None: it was not asked.
    fine: Any
    stats: Sequence[Mapping[str, Any]]


def step_jobs(jobs: Sequence[Job], step: Step, *, applied: bool) -> Results:
    """One step by XLA. applied: answer with new parameters, rounded once, instead of changes."""
    if applied:  # changes are then told in the precision of the arithmetic
        jobs = [replace(job, g=job.g.astype(arithmetic(job.p.dtype.name))) for job in jobs]
    outcomes = step_all(jobs, step)
    deltas, states, fine = [o.delta for o in outcomes], [o.state for o in outcomes], None
    if step.guarded:
        fine = jnp.all(jnp.stack([jnp.asarray(o.finite) for o in outcomes])) if outcomes else jnp.asarray(True)
        deltas = [jnp.where(fine, delta, 0) for delta in deltas]
        states = [
            {k: jnp.where(fine, new[k], job.state[k]) for k in new} for new, job in zip(states, jobs, strict=True)
        ]
    if applied:
        pairs = zip(jobs, deltas, strict=True)
        deltas = [(job.p.astype(delta.dtype) + delta).astype(job.p.dtype) for job, delta in pairs]
    return Results(deltas, states, fine, [o.stats for o in outcomes])


def apply_jobs(jobs: Sequence[Job], step: Step, engine: Engine, *, observed: bool) -> Results:
    """One step that answers with new parameters, by native code where that can be. observed: figures are wanted."""
    served = choose(jobs, step, engine)
    if not served:
        return step_jobs(jobs, step, applied=True)
    others = [index for index in range(len(jobs)) if index not in served]
    found = run_either([jobs[i] for i in served], step, observed, is_required=engine == "native")
    rest = step_jobs([jobs[i] for i in others], step, applied=True)
    order = [*served, *others]
    fine = None if found.fine is None else found.fine & rest.fine

    def merge(own: Sequence[Any], other: Sequence[Any]) -> list[Any]:
        both = dict(zip(order, itertools.chain(own, other), strict=True))
        return [both[index] for index in range(len(jobs))]

    return Results(
        merge(found.values, rest.values), merge(found.states, rest.states), fine, merge(found.stats, rest.stats)
    )


# ---- which of them


def reason_against_all(engine: Engine) -> str:
    """Why no parameter has native code here, "" if some may."""
    if engine == "xla":
        return "engine='xla'"
    if jax.default_backend() != "cpu":
        return f"steps run on {jax.default_backend()}, and there is native code for CPUs"
    found = handler()
    return found if isinstance(found, str) else ""


@functools.cache
def handler() -> Any:
    """The library of native code for XLA, or why there is none."""
    library = compile_handler(jax.ffi.include_dir())
    if not isinstance(library, str):
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.thalweg_step), platform="cpu")
    return library


def reason_against(leaf: Leaf, engine: Engine) -> str:
    """Why native code does not step a parameter, "" if it does."""
    rule, shape, dtype = stand_in(leaf.setting.rule_at(1)), leaf.p.shape, leaf.p.dtype.name
    if rule.needs_whole or leaf.axes is not None:
        return f"{type(rule).__name__} is made of matrix products, which XLA does best"
    if any(leaf.mesh_axes) or typed_layout(leaf.p) is not None:
        return "it may be sharded, and native code steps whole arrays"
    if not leaf.p.size:
        return f"shape {shape} is empty"
    if reason := reason_unserved(rule, leaf.setting.handling, shape, dtype):
        return reason
    kept = describe_state(leaf.setting.stored_rule, leaf.setting.handling, shape, dtype)
    if not kept and engine == "auto":
        return "it has no state, and XLA's code is as fast"
    if isinstance(leaf, Job) and any(entry.dtype.name != kept[key][1] for key, entry in leaf.state.items()):
        return "its state is kept in another dtype than its options say"
    return ""


def explain_engine(engine: Engine, leaf: Leaf) -> str:
    reason = reason_against_all(engine) or reason_against(leaf, engine)
    return f"xla: {reason}" if reason else "native"


def choose(jobs: Sequence[Job], step: Step, engine: Engine) -> list[int]:
    """The jobs for native code."""
    in_program = any(isinstance(x, jax.core.Tracer) for job in jobs for x in (job.p, job.g, *job.state.values()))
    reason = reason_against_all(engine) or ("" if in_program else "native code runs within jit")
    if not jobs or (reason and engine != "native"):
        return []
    reasons = [reason or reason_against(job, engine) for job in jobs]
    for job, why in zip(jobs, reasons, strict=True):
        if why and engine == "native":
            raise OptionError(
                f"engine='native' cannot step parameter {job.names[0]!r}: {why}; use engine='auto', which takes the "
                "fastest code that can run"
            )
    served = [index for index, why in enumerate(reasons) if not why]
    # all parameters of a guarded step are written, or none
    return [] if step.guarded and len(served) < len(jobs) else served


# ---- native code


def run_either(jobs: Sequence[Job], step: Step, observed: bool, *, is_required: bool) -> Results:
    def given(ps: Any, gs: Any, states: Any, t: Any) -> tuple[list[Job], Step]:
        own = [replace(job, p=p, g=g, state=s) for job, p, g, s in zip(jobs, ps, gs, states, strict=True)]
        return own, replace(step, t=t)

    def xla(*args: Any) -> Results:
        found = step_jobs(*given(*args), applied=True)
        return found if observed else found._replace(stats=[{} for _ in jobs])

    def native(shapes: Results, *args: Any) -> Results:
        return run_native(*given(*args), shapes.stats)

    args = [job.p for job in jobs], [job.g for job in jobs], [job.state for job in jobs], step.t
    found: Results = either(native, xla, *args, is_required=is_required)
    return found


def run_native(jobs: Sequence[Job], step: Step, figures: Sequence[Mapping[str, Any]]) -> Results:
    """figures: shapes of those that are wanted."""
    layout = Layout(jobs, step)
    laid, written = layout.laid, layout.written
    wide = any(arithmetic(job.p.dtype.name) == "float64" for job in jobs)
    numbers = [number for group, code in laid.codes for number in layout.numbers(group, code, step)]
    precision = "float64" if wide else "float32"
    told = sum(len(names) * len(span) for names, span in zip(laid.figures, laid.tables.spans, strict=True))
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
    for names, span, wanted in zip(laid.figures, laid.tables.spans, figures, strict=True):
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
