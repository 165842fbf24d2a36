"""Step rules that need whole tensors and whose state has the shapes of parameters: equal shapes as one stack."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from thalweg.kernels import triton as kernels
from thalweg.kernels.chunks import CHUNK, WHOLE_CHUNK, pieces
from thalweg.kernels.cpu import library
from thalweg.kernels.cpu.noise import fill_normal
from thalweg.kernels.threads import num_threads
from thalweg.rules.noise import normal, tensor_id
from thalweg.rules.rule import Update
from thalweg.rules.whole import Direction, WholeRule
from thalweg.spaces import torch as single
from thalweg.spaces.foreach import TensorList


class InStacks:
    """A rule whose middle part is taken for a list of tensors of equal shape as one stack."""

    def __init__(self, rule: WholeRule) -> None:
        self.rule = rule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, t: Any, lr: Any, lr_scale: Any, noise: Any) -> Update:
        shown = self.rule.prepare(xp, g, s, p, t)
        answers = transform_lists(self.rule, [x.tensors for x in shown.tensors])
        figures = {key: TensorList([made.figures[key] for made in answers]) for key in self.rule.FIGURES}
        made = Direction(TensorList([made.tensor for made in answers]), figures, {})
        return self.rule.apply(xp, made, s, p, shown.state, due=shown.due, lr=lr * lr_scale)


def transform_lists(rule: WholeRule, lists: Sequence[Sequence[Tensor]], most: int | None = None) -> list[Direction]:
    """The middle part of a rule for each of several tensors of equal shape.

    lists: what is shown of them. most: elements of a stack; None: as many as the device should have.
    """
    answers = []
    for made in transform_stacks(rule, lists, most):
        for i, tensor in enumerate(made.tensor):
            answers.append(Direction(tensor, {key: own[i] for key, own in made.figures.items()}, {}))
    return answers


def transform_stacks(
    rule: WholeRule, lists: Sequence[Tensor | Sequence[Tensor]], most: int | None = None, space: Any = single
) -> list[Direction]:
    """The same for stacks of them. lists: may be stacks already."""
    first = lists[0][0]
    stacked, shape = replace(rule, stacked_axes=rule.stacked_axes + 1), rule.figure_shape(tuple(first.shape))
    answers = []
    for members in pieces([max(1, first.numel())] * len(lists[0]), most or most_whole(first.device)):
        own = [tensors[members.start : members.stop] for tensors in lists]
        stacks = tuple(x if isinstance(x, Tensor) else torch.stack(list(x)) for x in own)
        made = stacked.transform(space, stacks, {})
        figures = {key: figure.reshape(len(members), *shape) for key, figure in made.figures.items()}
        answers.append(Direction(made.tensor, figures, {}))
    return answers


@functools.cache
def space_of_kernels() -> Any:
    """torch's functions, but for those that have thalweg kernels."""
    from thalweg.kernels.products.stacks import multiply
    from thalweg.kernels.triton.matrices import divided

    def matmul_add(x: Tensor, y: Tensor, z: Tensor, product: float, plus: float, *, symmetric: bool = False) -> Tensor:
        return multiply(x, y, z, alpha=product, beta=plus, symmetric=symmetric, b_symmetric=symmetric)

    def matmul_rounded(x: Tensor, y: Tensor, dtype: str) -> Tensor:
        return multiply(x, y, dtype=getattr(torch, dtype))

    ours = dict(
        divided=divided,
        matmul_rounded=matmul_rounded,
        matmul_symmetric=functools.partial(multiply, symmetric=True),
        matmul_add=matmul_add,
        matmul_add_symmetric=functools.partial(matmul_add, symmetric=True),
    )
    return SimpleNamespace(**{**vars(single), **ours})


def draw_noise(like: Tensor, *, seed: int, names: Sequence[str], t: Any) -> Tensor:
    """The noise of parameters of one shape, as a stack, by the fastest code that there is for the device."""
    ids, room = [tensor_id(name) for name in names], (len(names), *like.shape)
    if isinstance(t, int):
        if like.is_cpu and library.reason_missing() is None:
            noise, threads = torch.empty(room, dtype=like.dtype), num_threads(torch.get_num_threads)
            dtype = str(like.dtype).removeprefix("torch.")
            for own, tensor in zip(noise, ids, strict=True):
                fill_normal(own.data_ptr(), dtype, own.numel(), seed=seed, tensor=tensor, t=t, threads=threads)
            return noise
        if like.device.type in kernels.DEVICES and like.dtype == torch.float32 and kernels.reason_missing() is None:
            from thalweg.kernels.triton.noise import draw_normal

            return draw_normal(like.new_empty(room), seed=seed, tensors=ids, t=t)
    tensors = tensor_ids(tuple(names), like.device).reshape(-1, *[1] * like.ndim)
    return cast(Tensor, normal(single, like, seed=seed, tensor=tensors, t=t))


@functools.lru_cache(maxsize=4096)
def tensor_ids(names: tuple[str, ...], device: torch.device) -> Tensor:
    """Numbers for random bits, copied to the device once: not at each step, nor into a CUDA graph."""
    return torch.tensor([tensor_id(name) for name in names], device=device)


def most_whole(device: torch.device) -> int:
    """Elements of a stack on a device, so that temporaries stay bounded."""
    return CHUNK if device.type == "cpu" else WHOLE_CHUNK
