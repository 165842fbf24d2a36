"""Whether parameters, their gradients and their states are what they were: asked at every step."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, TypeAlias

import torch
from torch import Tensor

from thalweg.kernels.cpu.described import DescribedForm, find_describe
from thalweg.kernels.cpu.library import reason_missing
from thalweg.torch.engines.memory import are_the_same
from thalweg.torch.private import LOCAL, SPEC, AsPlainTensors
from thalweg.torch.sharding.shards import is_distributed, local

DEVICE, DTYPE, GRAD, SHAPE = map(operator.attrgetter, ("device", "dtype", "grad", "shape"))
States: TypeAlias = Mapping[Tensor, Any]
Given: TypeAlias = list[list[Tensor]]


class Look:
    """Parameters with gradients and states, as they were when this was made."""

    def __init__(self, given: Given, order: list[int], states: States) -> None:
        """given: parameters, in lists as groups have them. order: the places of those with gradients, as asked for."""
        self.sizes, self.objects = list(map(len, given)), list(objects_of(given, states))
        params = list(chain.from_iterable(given))
        stepped = [params[i] for i in order]
        self.idle = len(params) - len(order)
        #: Puts gradients into this order.
        self.sort: Callable[[Sequence[Any]], Sequence[Any]] = (
            operator.itemgetter(*order) if len(order) > 1 else lambda grads: [grads[i] for i in order]
        )
        kept = [*stepped, *chain.from_iterable(map(dict.values, states.values()))]
        #: DTensors, and what this rank had of them. Those with gradients, with how these are placed.
        self.dtensors = list(filter(is_distributed, kept))
        self.parts = list(map(LOCAL, self.dtensors))
        self.specs = list(map(SPEC, stepped))
        self.kept, grads = local_parts(kept), local_parts(read_gradients(stepped))
        self.held, self.kinds = self.kept[: len(stepped)], list(map(type, grads))
        self.negative = list(map(Tensor.is_neg, self.held))
        self.form_kept, self.form_of_gradients = form_of(self.kept, may_move=False), form_of(grads, may_move=True)

    def find_gradients(self, given: Given, states: States) -> tuple[Sequence[Any], array[int], bool] | None:
        """Gradients in the order that was asked for, where they are, and whether one is the negative of what is there.

        Of DTensors: what this rank has of them. None if they are stored otherwise, or anything else is not what or
        where it was.
        """
        if list(map(len, given)) != self.sizes or not are_the_same(list(objects_of(given, states)), self.objects):
            return None
        every = read_gradients(chain.from_iterable(given))
        if sum(map(operator.is_, every, repeat(None))) != self.idle:
            return None
        grads = list(self.sort(every))
        if any(map(operator.is_, grads, repeat(None))):
            return None
        if self.dtensors:
            if not all(map(operator.is_, map(LOCAL, self.dtensors), self.parts)):
                return None
            if not are_placed_alike(self.specs, list(map(SPEC, grads))):
                return None
            grads = local_parts(grads)
        if list(map(type, grads)) != self.kinds or list(map(Tensor.is_neg, self.held)) != self.negative:
            return None
        try:
            if not self.form_kept.holds(self.kept) or not self.form_of_gradients.holds(grads):
                return None
        except (BufferError, RuntimeError):  # a gradient that has no memory, as sparse ones have none
            return None
        return grads, self.form_of_gradients.addresses, any(map(Tensor.is_neg, grads))


class ListedForm:
    """How some tensors were stored when this was made, as torch tells it of each."""

    addresses: array[int]

    def __init__(self, tensors: Sequence[Tensor], *, may_move: bool) -> None:
        """may_move: whether they may be others, at other addresses."""
        self.may_move = may_move
        self.known = self.describe(tensors)

    def describe(self, tensors: Sequence[Tensor]) -> list[Any]:
        self.addresses = array("Q", map(Tensor.data_ptr, tensors))
        stored = [list(map(DTYPE, tensors)), list(map(SHAPE, tensors)), list(map(Tensor.stride, tensors))]
        # an address tells the device
        return [*stored, list(map(DEVICE, tensors)) if self.may_move else self.addresses]

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether as many tensors are stored alike; then ``addresses`` tells where."""
        return self.describe(tensors) == self.known


def form_of(tensors: list[Tensor], *, may_move: bool) -> DescribedForm | ListedForm:
    """How these are stored: told by DLPack's interface, which torch has from 2.13 on, or by torch tensor by tensor."""
    table = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if table is not None and reason_missing() is None and all(map(has_memory, tensors)):
        describe = find_describe(table)
        if describe is not None:
            try:
                return DescribedForm(describe, tensors, may_move=may_move)
            except (BufferError, RuntimeError):  # of a dtype that DLPack does not have
                pass
    return ListedForm(tensors, may_move=may_move)


def has_memory(x: Tensor) -> bool:
    """Whether a tensor has strides and memory of its own: a subclass that answers for itself may have none."""
    return type(x).__torch_dispatch__ is Tensor.__torch_dispatch__ and x.layout == torch.strided


def objects_of(given: Given, states: States) -> Iterator[Any]:
    """What has to be the same objects: parameters, states and their entries."""
    entries = chain.from_iterable(map(dict.values, states.values()))
    return chain(chain.from_iterable(given), states.values(), entries)


def read_gradients(params: Iterator[Tensor] | Sequence[Tensor]) -> list[Any]:
    with AsPlainTensors():
        return list(map(GRAD, params))


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(map(local_part, tensors))


def local_part(x: Tensor) -> Tensor:
    """The shard of a tensor that is here; waits for one that other ranks still send."""
    if not is_distributed(x):
        return x
    held = LOCAL(x)
    return held if type(held) is Tensor else local(x)


def are_placed_alike(params: Sequence[Any], grads: Sequence[Any]) -> bool:
    """By specifications: whether gradients are on the meshes of their parameters, with their placements."""
    # FSDP2 gives a gradient the very specification of its parameter
    return are_the_same(params, grads) or all(
        g is not None and p.placements == g.placements and p.mesh == g.mesh
        for p, g in zip(params, grads, strict=True)
        if p is not None
    )
