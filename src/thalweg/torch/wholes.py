"""Step rules that need whole tensors and whose state has the shapes of parameters: equal shapes as one stack."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
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
    first = lists[0][0]
    stacked, shape = replace(rule, stacked_axes=rule.stacked_axes + 1), rule.figure_shape(tuple(first.shape))
    answers = []
    for members in pieces([max(1, first.numel())] * len(lists[0]), most or most_whole(first.device)):
        made = stacked.transform(single, tuple(torch.stack([tensors[i] for i in members]) for tensors in lists), {})
        figures = {key: own.reshape(len(members), *shape) for key, own in made.figures.items()}
        for i in range(len(members)):
            answers.append(Direction(made.tensor[i], {key: own[i] for key, own in figures.items()}, {}))
    return answers


def draw_noise(like: Tensor, *, seed: int, names: Sequence[str], t: Any) -> Tensor:
    """The noise of parameters of one shape, as a stack, by the fastest code that there is for the device."""
    ids, room = [tensor_id(name) for name in names], (len(names), *like.shape)
    if isinstance(t, int) and not torch.compiler.is_compiling():
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


@torch.compiler.disable
@functools.lru_cache(maxsize=4096)
def tensor_ids(names: tuple[str, ...], device: torch.device) -> Tensor:
    """Numbers for random bits, copied to the device once: not at each step, nor into a CUDA graph."""
    return torch.tensor([tensor_id(name) for name in names], device=device)


def most_whole(device: torch.device) -> int:
    """Elements of a stack on a device, so that temporaries stay bounded."""
    return CHUNK if device.type == "cpu" else WHOLE_CHUNK
