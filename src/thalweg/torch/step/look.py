"""Whether parameters, their gradients and their states are what they were: asked at every step."""

from __future__ import annotations

import ctypes
import functools
import operator
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from thalweg.kernels.cpu.library import reason_missing
from thalweg.kernels.cpu.look import Interpreter, Look, interpreter_with
from thalweg.torch.engines.memory import are_the_same
from thalweg.torch.sharding.shards import is_distributed, local

DEVICE, DTYPE, LAYOUT, SHAPE = map(operator.attrgetter, ("device", "dtype", "layout", "shape"))
States = Mapping[Tensor, Any]


class AnyLook(Protocol):
    """Parameters with gradients and states, as they were when this was made."""

    def find_gradients(self, grads: list[Any], states: States) -> array[int] | None:
        """Where gradients are now; None if they are stored otherwise, or anything else is not what or where it was."""


def look_at(params: list[Tensor], grads: list[Any], places: list[int], states: States) -> AnyLook:
    """places: of each parameter's gradient among the gradients."""
    python = interpreter()
    kept = [*params, *chain.from_iterable(map(dict.values, states.values()))]
    if python is not None and all(map(has_strides_and_memory, [*kept, *(grads[i] for i in places)])):
        read = [line for x in kept for line in memory_of(x)]
        native = Look(python, params, grads, places, states, read)
        if native.works:
            return native
    return PlainLook(params, grads, places, states)


def has_strides_and_memory(x: Any) -> bool:
    """Whether native code can be told where a tensor is: not if it only stands for others, as a DTensor does."""
    # a subclass that answers for itself may have no memory of its own
    plain = isinstance(x, Tensor) and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
    return plain and x.layout == torch.strided


#: The functions of torch's C interface that tell how a tensor is stored.
OF_TENSORS = {
    **{name: f"aoti_torch_get_{name}" for name in ("layout", "dtype", "device_type", "device_index")},
    **{"axes": "aoti_torch_get_dim", "data": "aoti_torch_get_data_ptr"},
    **{name: f"aoti_torch_get_{name}" for name in ("sizes", "strides")},
}


@functools.cache
def interpreter() -> Interpreter | None:
    """What tells native code of tensors; None if this torch has no such functions, or without native code."""
    if reason_missing() is not None:
        return None
    library = ctypes.CDLL(torch._C.__file__)
    places = [find_tensor(x) for x in (torch.zeros(1), torch.nn.Parameter(torch.zeros(1)))]
    if len(places[0]) != 1 or places[0] != places[1] or not all(hasattr(library, name) for name in OF_TENSORS.values()):
        return None
    return interpreter_with({own: getattr(library, name) for own, name in OF_TENSORS.items()}, places[0][0])


def find_tensor(x: Tensor) -> list[int]:
    """Where in the object of a tensor torch has its pointer to the tensor."""
    words = range(0, type(x).__basicsize__, ctypes.sizeof(ctypes.c_void_p))
    return [place for place in words if ctypes.c_void_p.from_address(id(x) + place).value == x._cdata]


def memory_of(x: Tensor) -> list[int]:
    """What is read to find out where a tensor is: lines of 64 bytes of its object, of the tensor and of its storage."""
    return [id(x), *range(x._cdata, x._cdata + 256, 64), x.untyped_storage()._cdata]


class PlainLook:
    """The same without native code; and for DTensors, whose shards may be exchanged."""

    def __init__(self, params: list[Tensor], grads: list[Any], places: list[int], states: States) -> None:
        self.params, self.places = params, places
        self.are_dtensors = any(map(is_distributed, params))
        self.objects, self.forms = self.look(grads, states)

    def find_gradients(self, grads: list[Any], states: States) -> array[int] | None:
        own = [grads[i] for i in self.places]
        if self.are_dtensors and not are_placed_alike(self.params, own):
            return None
        objects, forms = self.look(grads, states)
        if forms != self.forms or not are_the_same(objects, self.objects):
            return None
        return array("Q", map(Tensor.data_ptr, self.local_parts(own)))

    def look(self, grads: list[Any], states: States) -> tuple[list[Any], list[Any]]:
        """What must be the same objects, and how and where all are stored."""
        own = [grads[i] for i in self.places]
        entries = list(chain.from_iterable(map(dict.values, states.values())))
        kept = self.local_parts([*self.params, *entries])
        every = [*self.local_parts(own), *kept]
        forms = [*map(type, own), *map(LAYOUT, every), *map(DTYPE, every), *map(DEVICE, every), *map(SHAPE, every)]
        strides = [x.stride() for x in every if x.layout == torch.strided]
        return [*states, *states.values(), *entries], [*forms, *strides, *map(Tensor.data_ptr, kept)]

    def local_parts(self, tensors: list[Any]) -> list[Tensor]:
        return [local_part(x) for x in tensors] if self.are_dtensors else tensors


def local_part(x: Tensor) -> Tensor:
    """The shard of a tensor that is here; waits for one that other ranks still send."""
    held = getattr(x, "_local_tensor", x)
    return held if held is x or type(held) is Tensor else local(x)


def are_placed_alike(params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Whether gradients can be used as they are: on the meshes of their parameters, with their placements."""
    # FSDP2 gives a gradient the very specification of its parameter
    return are_the_same(*([getattr(x, "_spec", None) for x in some] for some in (params, grads))) or all(
        p.placements == g.placements and p.device_mesh is g.device_mesh  # type: ignore[attr-defined]
        for p, g in zip(params, grads, strict=True)
        if is_distributed(p)
    )
