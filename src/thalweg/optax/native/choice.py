"""Two ways to compute the same, of which one is chosen when a program is compiled for its devices.

Native code serves one device, or each of several if it needs none of their sums. Programs for others, and derivatives
and batches of a step, are made of XLA's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from thalweg.errors import OptionError
from thalweg.optax.shards import varying_of


def either(native: Callable[..., Any], xla: Callable[..., Any], *args: Any, **params: Any) -> Any:
    """What both functions compute of args, trees of arrays. XLA's is traced late, for programs that need it.

    params: platform, on which native code runs; is_required, whether a program that cannot have native code is an
    error; is_local, whether the compiler may divide native code over devices.
    """
    operands, structure = jax.tree.flatten(args)

    def flatten(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values: jax.tree.leaves(function(*jax.tree.unflatten(structure, values)))

    by_native, shapes = jax.make_jaxpr(native, return_shape=True)(*args)
    by_xla, avals, consts = flatten(xla), by_native.out_avals, []
    # late it could not read values of this trace, and over which axes of a mesh results vary it alone tells
    if any(isinstance(x, jax.core.Tracer) for x in by_native.consts) or any(map(varying_of, operands)):
        early = jax.make_jaxpr(by_xla)(*operands)
        by_xla, avals, consts = partial(run_traced, early.jaxpr, len(early.consts)), early.out_avals, early.consts
    counts = len(consts), len(by_native.consts)
    results = step_p.bind(
        *(*consts, *by_native.consts, *operands),
        xla=by_xla,
        native=by_native.jaxpr,
        avals=tuple(avals),
        counts=counts,
        **params,
    )
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def run_traced(jaxpr: Jaxpr, consts: int, *operands: Any) -> list[Any]:
    results: list[Any] = jaxpr_as_fun(ClosedJaxpr(jaxpr, operands[:consts]))(*operands[consts:])
    return results


def run_xla(*operands: Any, xla: Callable[..., list[Any]], counts: tuple[int, int], **params: Any) -> list[Any]:
    xla_consts, native_consts = counts
    return xla(*operands[:xla_consts], *operands[xla_consts + native_consts :])


def run_native(*operands: Any, native: Jaxpr, counts: tuple[int, int], **params: Any) -> list[Any]:
    xla_consts, native_consts = counts
    return run_traced(native, native_consts, *operands[xla_consts:])


def refuse(is_required: bool, why: str) -> None:
    if is_required:
        raise OptionError(f"engine='native' cannot run: {why}; use engine='auto', which takes XLA's code there")


def is_alone(context: Any) -> bool:
    """Whether one device has all that is computed: it is the only one, or shard_map is about each of them."""
    if hasattr(context, "manual_axes"):
        return set(context.manual_axes) == set(context.mesh.axis_names)
    return bool(getattr(context, "num_devices", None) == 1)


def lower_for(here: str, ctx: Any, *operands: Any, **params: Any) -> Any:
    reason, module = "", ctx.module_context
    if here != params["platform"]:
        reason = "the program is compiled for another device than the default one"
    elif not (params["is_local"] or is_alone(module.axis_context)):
        reason = "the program is compiled for several devices, and native code steps whole arrays"
    elif getattr(module.lowering_parameters, "for_export", False):
        reason = "native code belongs to one process, and an exported program to all"
    if reason:
        refuse(params["is_required"], reason)
    chosen = run_xla if reason else run_native
    return mlir.lower_fun(chosen, multiple_results=True)(ctx, *operands, **params)


def batch(operands: Any, axes: Any, **params: Any) -> Any:
    refuse(params["is_required"], "there is no native code for vmap")
    results = jax.vmap(lambda *values: run_xla(*values, **params), in_axes=tuple(axes))(*operands)
    return results, [0] * len(results)


def differentiate(primals: Any, tangents: Any, **params: Any) -> Any:
    refuse(params["is_required"], "there is no native code for derivatives of a step")
    known = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(lambda *values: run_xla(*values, **params), tuple(primals), tuple(known))


step_p = Primitive("thalweg_step")
step_p.multiple_results = True
step_p.def_impl(run_xla)
step_p.def_abstract_eval(lambda *_, avals, **params: avals)
mlir.register_lowering(step_p, partial(lower_for, ""))
for name in ("cpu", "cuda"):
    mlir.register_lowering(step_p, partial(lower_for, name), platform=name)
batching.primitive_batchers[step_p] = batch
ad.primitive_jvps[step_p] = differentiate
