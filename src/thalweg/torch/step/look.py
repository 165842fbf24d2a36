"""Whether parameters, their gradients and their states are what they were: asked at every step."""

from __future__ import annotations

import ctypes
import functools
import operator
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from thalweg.kernels.cpu.library import reason_missing
from thalweg.kernels.cpu.look import Interpreter, Look, interpreter_with
from thalweg.torch.engines.memory import are_the_same
from thalweg.torch.sharding.shards import is_distributed, local

DEVICE, DTYPE, GRAD, LAYOUT, SHAPE = map(operator.attrgetter, ("device", "dtype", "grad", "layout", "shape"))
LOCAL, SPEC = map(operator.attrgetter, ("_local_tensor", "_spec"))
States: TypeAlias = Mapping[Tensor, Any]
Given: TypeAlias = list[list[Tensor]]


class AnyLook(Protocol):
    """Parameters with gradients and states, as they were when this was made."""

    def find_gradients(self, given: Given, states: States) -> tuple[list[Any], array[int], bool] | None:
        """The gradients of all, where those are that there are, and whether one is the negative of what lies there.

        Of DTensors: what this rank has of them. None if they are stored otherwise, or anything else is not what or
        where it was.
        """


def look_at(given: Given, order: list[int], states: States) -> AnyLook:
    """given: parameters, in lists as groups have them. order: the places of those with gradients, as told."""
    python, params = interpreter(), list(chain.from_iterable(given))
    stepped = [params[i] for i in order]
    kept = [*stepped, *entries_of(states)]
    if python is not None and any(map(is_distributed, stepped)):
        if all(has_strides_and_memory(getattr(x, "_local_tensor", x)) for x in [*kept, *map(GRAD, stepped)]):
            divided = DividedLook(python, given, order, states)
            if divided.native.works:
                return divided
    elif python is not None and all(map(has_strides_and_memory, [*kept, *map(GRAD, stepped)])):
        lines = [*map(id, states.values()), *(line for x in kept for line in memory_of(x))]
        native = Look(python, given, order, states, lines)
        if native.works:
            return native
    return PlainLook(given, order, states)


def has_strides_and_memory(x: Any) -> bool:
    """Whether native code can be told where a tensor is: not if it only stands for others, as a DTensor does."""
    # a subclass that answers for itself may have no memory of its own
    plain = isinstance(x, Tensor) and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
    return plain and x.layout == torch.strided


#: Words of a tensor among which is that of its dispatch keys.
KEYS_WITHIN = 26
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
    keys, negative = find_keys()
    known = len(places[0]) == 1 and places[0] == places[1] and len(keys) == 1
    if not known or not all(hasattr(library, name) for name in OF_TENSORS.values()):
        return None
    functions = {own: getattr(library, name) for own, name in OF_TENSORS.items()}
    return interpreter_with(functions, places[0][0], keys[0], negative)


def find_tensor(x: Tensor) -> list[int]:
    """Where in the object of a tensor torch has its pointer to the tensor."""
    words = range(0, type(x).__basicsize__, ctypes.sizeof(ctypes.c_void_p))
    return [place for place in words if ctypes.c_void_p.from_address(id(x) + place).value == x._cdata]


def find_keys() -> tuple[list[int], int]:
    """Where in a tensor torch has the word of its dispatch keys, and which bit of it is that of negative views."""
    x = torch.zeros(1)
    tensors = x, torch._neg_view(x)
    known = [torch._C._dispatch_keys(each).raw_repr() for each in tensors]
    words = [(ctypes.c_uint64 * KEYS_WITHIN).from_address(each._cdata) for each in tensors]
    places = [8 * i for i in range(KEYS_WITHIN) if [own[i] for own in words] == known]
    bit = known[0] ^ known[1]
    return places if bit.bit_count() == 1 and known[1] & bit else [], bit


def memory_of(x: Tensor) -> list[int]:
    """What is read to find out where a tensor is: lines of 64 bytes of its object, of the tensor and of its storage."""
    return [id(x), *range(x._cdata, x._cdata + 256, 64), x.untyped_storage()._cdata]


def read_gradients(params: Sequence[Tensor]) -> list[Any]:
    with torch._C.DisableTorchFunctionSubclass():  # or torch asks every DTensor for functions of its own
        return list(map(GRAD, params))


class StandIn(Tensor):
    """A tensor with room for another one in the place of its gradient: what this rank has of a parameter's."""

    __slots__ = ("grad",)


#: Puts a gradient there, without a loop of the interpreter.
PUT = StandIn.__dict__["grad"].__set__


class DividedLook:
    """The same where some parameters are DTensors: native code looks at what this rank has of them."""

    def __init__(self, python: Interpreter, given: Given, order: list[int], states: States) -> None:
        self.sizes, self.params = list(map(len, given)), list(chain.from_iterable(given))
        stepped, self.states, self.entries = [self.params[i] for i in order], list(states.values()), entries_of(states)
        kept = [*stepped, *self.entries]
        #: DTensors with gradients, and all other parameters.
        places = [i for i in order if is_distributed(self.params[i])]
        others = sorted({*range(len(self.params))} - {*places})
        self.sharded, self.others = ([self.params[i] for i in own] for own in (places, others))
        self.dtensors = list(filter(is_distributed, kept))
        self.parts = list(map(LOCAL, self.dtensors))
        self.held = {0: dict(enumerate(map(local_part, kept)))}
        self.stand_ins = [[torch.zeros(()).as_subclass(StandIn) for _ in self.params]]
        self.for_sharded, self.for_others = ([self.stand_ins[0][i] for i in own] for own in (places, others))
        self.put_gradients()
        lines = [line for x in (*self.stand_ins[0], *self.held[0].values()) for line in memory_of(x)]
        self.native = Look(python, self.stand_ins, order, self.held, lines)
        self.remove_gradients()

    def find_gradients(self, given: Given, states: States) -> tuple[list[Any], array[int], bool] | None:
        if list(map(len, given)) != self.sizes or not all(map(operator.is_, chain.from_iterable(given), self.params)):
            return None
        if not are_the_same(list(states.values()), self.states) or sum(map(len, self.states)) != len(self.entries):
            return None
        entries = chain.from_iterable(map(dict.values, self.states))
        if not all(map(operator.is_, entries, self.entries)):
            return None
        if not all(map(operator.is_, map(LOCAL, self.dtensors), self.parts)):
            return None
        try:
            specs = self.put_gradients()
            if are_placed_alike(list(map(SPEC, self.sharded)), specs):
                return self.native.find_gradients(self.stand_ins, self.held)
        except AttributeError:  # a gradient is gone, or no DTensor
            pass
        finally:
            self.remove_gradients()
        return None

    def put_gradients(self) -> list[Any]:
        """Show native code what this rank has of them; how those of DTensors are placed."""
        own = read_gradients(self.sharded)
        deque(map(PUT, self.for_sharded, map(LOCAL, own)), maxlen=0)
        deque(map(PUT, self.for_others, read_gradients(self.others)), maxlen=0)
        return list(map(SPEC, own))

    def remove_gradients(self) -> None:
        """Keep none of them alive."""
        deque(map(PUT, self.stand_ins[0], repeat(None)), maxlen=0)


def entries_of(states: States) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, states.values())))


def objects_of(states: States) -> list[Any]:
    return [*states.values(), *entries_of(states)]


class PlainLook:
    """The same without native code."""

    def __init__(self, given: Given, order: list[int], states: States) -> None:
        self.sizes, self.params, self.order = list(map(len, given)), list(chain.from_iterable(given)), order
        self.stepped = [self.params[i] for i in order]
        self.are_dtensors = any(map(is_distributed, self.stepped))
        self.objects, self.forms = self.look(read_gradients(self.stepped), states)

    def find_gradients(self, given: Given, states: States) -> tuple[list[Any], array[int], bool] | None:
        if list(map(len, given)) != self.sizes or not are_the_same(list(chain.from_iterable(given)), self.params):
            return None
        grads = read_gradients(self.params)
        own = [grads[i] for i in self.order]
        if sum(g is not None for g in grads) != len(own) or any(g is None for g in own):
            return None
        if self.are_dtensors and not are_placed_alike(specs_of(self.stepped), specs_of(own)):
            return None
        objects, forms = self.look(own, states)
        if forms != self.forms or not are_the_same(objects, self.objects):
            return None
        held = self.local_parts(own)
        for i, part in zip(self.order, held, strict=True):
            grads[i] = part
        return grads, array("Q", map(Tensor.data_ptr, held)), any(map(Tensor.is_neg, held))

    def look(self, own: list[Any], states: States) -> tuple[list[Any], list[Any]]:
        """What must be the same objects, and how and where all are stored. own: the gradients."""
        kept = self.local_parts([*self.stepped, *entries_of(states)])
        every = [*self.local_parts(own), *kept]
        forms = [*map(type, own), *map(LAYOUT, every), *map(DTYPE, every), *map(DEVICE, every), *map(SHAPE, every)]
        strides = [x.stride() for x in every if x.layout == torch.strided]
        places = [*map(Tensor.data_ptr, kept), *map(Tensor.is_neg, kept)]
        return [*states, *objects_of(states)], [*forms, *strides, *places]

    def local_parts(self, tensors: list[Any]) -> list[Tensor]:
        return [local_part(x) for x in tensors] if self.are_dtensors else tensors


def local_part(x: Tensor) -> Tensor:
    """The shard of a tensor that is here; waits for one that other ranks still send."""
    held = getattr(x, "_local_tensor", x)
    return held if held is x or type(held) is Tensor else local(x)


def specs_of(tensors: Sequence[Tensor]) -> list[Any]:
    return [getattr(x, "_spec", None) for x in tensors]


def are_placed_alike(params: Sequence[Any], grads: Sequence[Any]) -> bool:
    """By specifications: whether gradients are on the meshes of their parameters, with their placements."""
    # FSDP2 gives a gradient the very specification of its parameter
    return are_the_same(params, grads) or all(
        g is not None and p.placements == g.placements and p.mesh == g.mesh
        for p, g in zip(params, grads, strict=True)
        if p is not None
    )
