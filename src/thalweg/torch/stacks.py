"""Rules that need whole tensors: the middle part of their step, for stacks of tensors of equal shape.

Used wherever tensors are whole: by lists, by kernels for GPUs between their other two parts, and by owners of shards.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from thalweg.kernels import triton as kernels
from thalweg.kernels.chunks import CHUNK, FACTORS_CHUNK, STACK, WHOLE_CHUNK, pieces
from thalweg.kernels.cpu import library
from thalweg.kernels.cpu.noise import fill_normal
from thalweg.kernels.threads import num_threads
from thalweg.rules.entries import PerSlice
from thalweg.rules.noise import normal, tensor_id
from thalweg.rules.rule import Update
from thalweg.rules.whole import Direction, WholeRule
from thalweg.spaces import torch as single
from thalweg.spaces.foreach import PerTensor, TensorList


def transform_stacks(
    rule: WholeRule,
    tensors: Sequence[Tensor | Sequence[Tensor]],
    factors: Mapping[str, Sequence[Tensor]],
    *,
    due: Sequence[Any],
    noise: Callable[[Sequence[int]], Tensor],
    most: int,
    space: Any = single,
) -> Iterator[tuple[list[int], Direction]]:
    """The middle part of a rule for many tensors, stack by stack: the places of its members, and what was made of them.

    tensors: for each that the rule shows, those of all, or a stack of them. factors: state that is shaped otherwise.
    due: what is due for each; tensors for which that is known by the device alone go one by one. noise: draws that of
    the tensors at some places. most: elements of a stack.
    """
    stacked = replace(rule, stacked_axes=rule.stacked_axes + 1)
    for members in find_stacks(tensors[0], due, most):
        shown = tuple(stack_up(of_all, members) for of_all in tensors)
        state = {key: stack_up(entries, members) for key, entries in factors.items()}
        draw = functools.partial(noise, members)
        direction = stacked.transform(space, shown, state, due=due[members[0]], noise=draw)
        shape = len(members), *rule.figure_shape(tuple(shown[0].shape[1:]))
        figures = {key: figure.reshape(shape) for key, figure in direction.figures.items()}
        yield members, Direction(direction.tensor, figures, direction.state)


def find_stacks(tensors: Tensor | Sequence[Tensor], due: Sequence[Any], most: int) -> Iterator[list[int]]:
    """Places of tensors of one shape for which the same is due."""
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for i, x in enumerate(tensors):
        alike[x.shape, i if isinstance(due[i], Tensor) else due[i]].append(i)
    for places in alike.values():
        extents = [max(1, tensors[i].numel()) for i in places]
        yield from ([places[at] for at in piece] for piece in pieces(extents, most))


def stack_up(tensors: Tensor | Sequence[Tensor], members: Sequence[int]) -> Tensor:
    if isinstance(tensors, Tensor) and list(members) == [*range(members[0], members[-1] + 1)]:
        return tensors[members[0] : members[-1] + 1]
    return tensors[members[0]][None] if len(members) == 1 else torch.stack([tensors[i] for i in members])


class InStacks:
    """A rule that steps a list of tensors: the first and the last part as one list, the middle part in stacks."""

    def __init__(self, rule: WholeRule, most: int) -> None:
        """most: elements of a stack."""
        self.rule, self.most = rule, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, t: Any, lr: Any, lr_scale: Any, noise: Any) -> Update:
        rule, count, drawn = self.rule, len(p.tensors), list[Any]()

        def draw(members: Sequence[int]) -> Tensor:
            """That of a stack, which is let go when the stack has used it."""
            if not drawn or any(drawn[i] is None for i in members):
                drawn[:] = noise().tensors
            stack = stack_up(drawn, members)
            put(drawn, members, [None] * len(members))
            return stack

        prepared = rule.prepare(xp, g, s, p, t)
        factors = {key: s[key].tensors for key in rule.keys(tuple(p.tensors[0].shape), PerSlice)}
        parts = Parts(count)
        for members, direction in transform_stacks(
            rule,
            [x.tensors for x in prepared.tensors],
            factors,
            due=due_of_each(prepared.due, count),
            noise=draw,
            most=self.most,
        ):
            parts.take(members, direction)
        direction = parts.direction(TensorList)
        state = {**prepared.state, **direction.state}
        return rule.apply(xp, direction, s, p, state, due=prepared.due, lr=lr * lr_scale)


def due_of_each(due: Any, count: int) -> Sequence[Any]:
    """What is due for each tensor: known to the host, unless the device counts."""
    if not isinstance(due, (PerTensor, TensorList)):
        return [due] * count
    if isinstance(due, PerTensor):
        return due.values.tolist() if due.values.is_cpu else due.values.unbind()
    return [x.item() if x.is_cpu else x for x in due.tensors]


class Parts:
    """What was made of tensors, put together from stacks."""

    def __init__(self, count: int) -> None:
        self.tensors: list[Any] = [None] * count
        self.figures: dict[str, list[Any]] = defaultdict(lambda: [None] * count)
        self.state: dict[str, list[Any]] = defaultdict(lambda: [None] * count)

    def take(self, members: Sequence[int], direction: Direction) -> None:
        put(self.tensors, members, direction.tensor)
        for key, figure in direction.figures.items():
            put(self.figures[key], members, figure)
        for key, entry in direction.state.items():
            put(self.state[key], members, entry)

    def direction(self, kind: Callable[[list[Any]], Any] = list) -> Direction:
        """kind: makes what holds the values of all members, of a list of them."""
        figures = {key: kind(values) for key, values in self.figures.items()}
        return Direction(kind(self.tensors), figures, {key: kind(entries) for key, entries in self.state.items()})


def put(entries: list[Any], members: Sequence[int], values: Tensor | Sequence[Any]) -> None:
    for i, entry in zip(members, values.unbind() if isinstance(values, Tensor) else values, strict=True):
        entries[i] = entry


def most_of_stack(rule: WholeRule, device: torch.device) -> int:
    """Elements of a stack on a device, so that temporaries stay bounded."""
    if device.type == "cpu":
        return STACK if rule.has_factors else CHUNK
    return FACTORS_CHUNK if rule.has_factors else WHOLE_CHUNK


@functools.cache
def space_of_kernels() -> Any:
    """torch's functions, but for those that have thalweg kernels."""
    from thalweg.kernels.products.stacks import multiply
    from thalweg.kernels.triton import matrices

    def combined(*terms: tuple[Any, Tensor]) -> Tensor:
        is_served = len(terms) <= 3 and all(x.dtype == torch.float32 for _, x in terms)
        return cast(Tensor, (matrices if is_served else single).combined(*terms))

    def make(precision: str | None) -> SimpleNamespace:
        library = single if precision is None else single.in_precision(precision)
        product = functools.partial(multiply, precision=precision)

        def matmul(x: Tensor, y: Tensor, *, symmetric: bool = False) -> Tensor:
            if x.ndim != 3 or single.are_few(x, y):
                is_served = x.ndim == 3 and y.shape[-1] == 1 and x.dtype == torch.float32
                return cast(Tensor, (matrices.times_vector if is_served else library.matmul)(x, y))
            return product(x, y, symmetric=symmetric)

        def matmul_add(
            x: Tensor, y: Tensor, z: Tensor, factor: float, plus: float, *, symmetric: bool = False
        ) -> Tensor:
            if x.ndim != 3 or single.are_few(x, y):
                return cast(Tensor, library.matmul_add(x, y, z, factor, plus))
            return product(x, y, z, alpha=factor, beta=plus, symmetric=symmetric)

        ours = dict(
            divided=matrices.divided,
            combined=combined,
            mean_power=matrices.mean_power,
            largest_column=matrices.largest_column,
            matmul=matmul,
            matmul_symmetric=functools.partial(matmul, symmetric=True),
            matmul_add=matmul_add,
            matmul_add_symmetric=functools.partial(matmul_add, symmetric=True),
            matmul_rounded=lambda x, y, dtype: product(x, y, dtype=getattr(torch, dtype)),
            orthonormal=functools.partial(single.orthonormal, product=functools.partial(multiply, precision="float32")),
            in_precision=functools.cache(make),
        )
        return SimpleNamespace(**{**vars(single), **ours})

    return make(None)


def draw_noise(like: Tensor, *, seed: int, names: Sequence[str], t: Any) -> Tensor:
    """The noise of parameters of one shape, as a stack, by the fastest code that there is for the device."""
    ids, shape = [tensor_id(name) for name in names], (len(names), *like.shape)
    if isinstance(t, int):
        if like.is_cpu and library.is_here():
            noise, threads = torch.empty(shape, dtype=like.dtype), num_threads(torch.get_num_threads)
            dtype = str(like.dtype).removeprefix("torch.")
            for row, tensor in zip(noise, ids, strict=True):
                fill_normal(row.data_ptr(), dtype, row.numel(), seed=seed, tensor=tensor, t=t, threads=threads)
            return noise
        if like.device.type in kernels.DEVICES and like.dtype == torch.float32 and kernels.is_here():
            from thalweg.kernels.triton.noise import draw_normal

            return draw_normal(like.new_empty(shape), seed=seed, tensors=ids, t=t)
    tensors = tensor_ids(tuple(names), like.device).reshape(-1, *[1] * like.ndim)
    return cast(Tensor, normal(single, like, seed=seed, tensor=tensors, t=t))


@functools.lru_cache(maxsize=4096)
def tensor_ids(names: tuple[str, ...], device: torch.device) -> Tensor:
    """Numbers for random bits, copied to the device once: not at each step, nor into a CUDA graph."""
    return torch.tensor([tensor_id(name) for name in names], device=device)
