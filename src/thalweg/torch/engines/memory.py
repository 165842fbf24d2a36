"""How tensors lie in memory: whether they still do, and copies of those that do not lie as fused code needs them."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.cpu.described import DescribedForm, find_describe
from thalweg.kernels.cpu.library import is_here

DEVICE, DTYPE, SHAPE = map(operator.attrgetter, ("device", "dtype", "shape"))


def gradients_like(params: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gradients that lie as their parameters do; copies of those that do not."""
    return [alike(p, g) for p, g in zip(params, grads, strict=True)]


def are_the_same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether both have the same objects, in the same order."""
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def alike(p: Tensor, g: Tensor) -> Tensor:
    if g.is_neg() or not (g.stride() == p.stride() or (p.is_contiguous() and g.is_contiguous())):
        return torch.empty_like(p, dtype=g.dtype).copy_(g)
    return g


def join_memory(tensors: Sequence[Tensor]) -> Tensor | None:
    """An array whose rows are these tensors, which are moved to its memory; None if they share theirs with others."""
    first = tensors[0]
    if len(tensors) == 1:
        return first.unsqueeze(0)
    if all(x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes > 0 for x in tensors):
        joint = torch.stack(list(tensors))
        for x, row in zip(tensors, joint.unbind(), strict=True):
            x.set_(row)  # type: ignore[call-overload]
        return joint
    storage, addresses = first.untyped_storage().data_ptr(), [x.data_ptr() for x in tensors]
    is_joint = addresses == [first.data_ptr() + i * first.nbytes for i in range(len(tensors))]
    if is_joint and all(x.is_contiguous() and x.untyped_storage().data_ptr() == storage for x in tensors):
        return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
    return None


# ---- whether they lie as they did


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


def note_form(tensors: list[Tensor], *, may_move: bool) -> DescribedForm | ListedForm:
    """How these are stored: told by DLPack's interface, which torch has from 2.13 on, or by torch tensor by tensor."""
    table = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if table is not None and is_here() and all(map(has_memory, tensors)):
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
