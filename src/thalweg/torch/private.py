"""What torch does not publish and the library uses, each with what takes its place where a torch does not have it.

Seen in torch 2.11 and 2.13. ``THALWEG_TORCH_PRIVATE=0`` takes every other way: slower, with the same results. Besides
these there are the operations on lists, ``torch._foreach_*``, of which torch's own optimizers are made, and the hooks
of ``torch.optim.Optimizer``, which each optimizer keeps.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.errors import ParameterError

T = TypeVar("T")
#: Whether any of these is used.
USED = os.environ.get("THALWEG_TORCH_PRIVATE") != "0"


def find(module: str, path: str, otherwise: T) -> T:
    """What a module of torch has under this name, or what takes its place."""
    if not USED:
        return otherwise
    try:
        value: T = operator.attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return otherwise
    return value


# ---- around a step


#: Takes a tenth of the time of ``torch.no_grad()``.
set_grad_enabled: Callable[[bool], Any] = find("torch", "_C._set_grad_enabled", torch.set_grad_enabled)


def is_lowered_anywhere() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


#: Whether autocast is on, on any device: one question for all of them.
is_any_autocast_enabled: Callable[[], bool] = find("torch", "_C._is_any_autocast_enabled", is_lowered_anywhere)
#: Whether a profiler wants to see steps.
is_profiled: Callable[[], bool] = find("torch", "autograd._profiler_enabled", lambda: True)
#: The hooks around the steps of all optimizers. None: they are not known, and torch looks for them itself.
HOOKS_OF_ALL = [find("torch.optim.optimizer", f"_global_optimizer_{when}_hooks", None) for when in ("pre", "post")]
#: Without it torch asks every DTensor for functions of its own.
AsPlainTensors: Callable[[], contextlib.AbstractContextManager[Any]] = find(
    "torch", "_C.DisableTorchFunctionSubclass", contextlib.nullcontext
)


def with_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step with torch's hooks and its entry in profiles, as every optimizer of torch has them.

    Where there are none it is called as it is: to look for them takes torch as long as a small step.
    """
    hooked = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def lean(self: Any, *args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return uncompiled(self, *args, **named)
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        seen = hooks or HOOKS_OF_ALL != [{}, {}] or is_profiled()
        # torch itself runs the hooks around a step that a subclass has in its place
        return (hooked if seen and type(self).step is lean else step)(self, *args, **named)

    # The engines of a step are compiled already. A compiler would take torch's operations in their place, compile them
    # anew for each shape, and compute every refresh, due or not.
    uncompiled = torch.compiler.disable(lean)  # type: ignore[no-untyped-call]
    lean.hooked = True  # type: ignore[attr-defined]
    return lean


def borrow(x: Tensor) -> Tensor:
    """The same memory, which is not kept alive by that; or which is, if torch cannot do so."""
    make: Any = find("torch", "_C._construct_storage_from_data_pointer", None)
    if make is None:
        return x
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        make(x.data_ptr(), x.device, x.nbytes), 0, x.shape, x.stride()
    )


# ---- DTensors


class Placed(NamedTuple):
    """How a DTensor is laid out."""

    mesh: Any
    placements: Any


def placed(x: Any) -> Placed | None:
    return Placed(x.device_mesh, x.placements) if hasattr(x, "placements") else None


#: What this rank has of a DTensor: the same object each time.
LOCAL: Callable[[Any], Any] = operator.attrgetter("_local_tensor") if USED else operator.methodcaller("to_local")
#: How a DTensor is laid out, which FSDP2 gives a gradient of its parameter; None of plain tensors.
SPEC: Callable[[Any], Any] = (lambda x: getattr(x, "_spec", None)) if USED else placed


def local_block(shape: Shape, mesh: Any, placements: Sequence[Any]) -> tuple[Sequence[int], Sequence[int]]:
    """The shape of this rank's shard of a tensor, and where it begins."""
    compute = find("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset", chunk_of)
    return compute(shape, mesh, placements)


def chunk_of(shape: Shape, mesh: Any, placements: Sequence[Any]) -> tuple[Sequence[int], Sequence[int]]:
    """As ``torch.chunk`` divides each axis, one dimension of the mesh after the other."""
    held, offset = list(shape), [0] * len(shape)
    for dimension, placement in enumerate(placements):
        if hasattr(placement, "split_factor"):
            raise ParameterError(
                f"this torch does not tell where shards of the placement {placement} begin: shard each axis over "
                "mesh dimensions in their order"
            )
        if placement.is_shard():
            axis = placement.dim % len(shape)
            size = -(-held[axis] // mesh.size(dimension))
            begin = min(size * mesh.get_local_rank(dimension), held[axis])
            offset[axis] += begin
            held[axis] = min(size, held[axis] - begin)
    return held, offset


def make_dtensor(held: Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> Tensor:
    """A DTensor of what this rank holds, left on its device: parameters that are offloaded are beside their mesh's.

    Where torch publishes the one way alone, it goes to the device of the mesh.
    """
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    spec_of: Any = find("torch.distributed.tensor._dtensor_spec", "DTensorSpec", None)
    facts: Any = find("torch.distributed.tensor._dtensor_spec", "TensorMeta", None)
    if spec_of is None or facts is None:
        return DTensor.from_local(held, mesh, placements, shape=torch.Size(shape), stride=stride)
    spec = spec_of(mesh, tuple(placements), tensor_meta=facts(torch.Size(shape), stride, held.dtype))
    return DTensor(held, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def sharded_modules() -> Sequence[Any] | None:
    """The modules that FSDP2 has sharded in this process; None if torch does not tell."""
    known = find("torch.distributed._composable_state", "_module_state_mapping", None)
    return None if known is None else list(known)
