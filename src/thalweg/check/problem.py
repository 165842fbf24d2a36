"""What checks are made of: small parameters with numbers of their own, and steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from thalweg.check.subject import Subject
from thalweg.show.modules import describe_error

Shapes: TypeAlias = Sequence[tuple[int, ...]]
#: What makes a parameter of a whole tensor and its index in the model.
Place: TypeAlias = Callable[[Tensor, int], Tensor]
#: Two of the same shape among them, a vector and a filter.
MODEL: Shapes = ((6, 4), (6,), (6, 4), (5, 6), (3, 2, 2, 2))
#: Gradients are this large, and parameters as large as those of a network that was just initialised.
GRADIENT, WEIGHT = 0.1, 0.1


def draw(shape: Sequence[int], *key: int) -> Tensor:
    """Normal numbers that depend on nothing but the shape and the key."""
    generator = torch.Generator().manual_seed(sum(7919**place * (1 + part) for place, part in enumerate(key)))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchSubject(Subject):
    """An optimizer for torch, and parameters for it."""

    #: Where parameters are: here, or divided over ranks.
    place: Place = lambda p, _: p

    @property
    def shapes(self) -> Shapes:
        return [shape for shape in MODEL if len(shape) == 2] if self.facts.needs_matrices else MODEL

    def make(self, *params: Any, **more: Any) -> Any:
        """The global seed is set before: one that draws from it fails where that is checked, and not everywhere."""
        torch.manual_seed(0)
        return super().make(*params, **more)

    def weights(self, dtype: torch.dtype = torch.float32, shapes: Shapes | None = None) -> list[Parameter]:
        whole = weights(self.shapes if shapes is None else shapes, dtype)
        return [Parameter(self.place(p.detach(), index)) for index, p in enumerate(whole)]

    def make_fresh(
        self, dtype: torch.dtype = torch.float32, shapes: Shapes | None = None, **more: Any
    ) -> tuple[list[Parameter], Any]:
        """Parameters and an optimizer for them."""
        params = self.weights(dtype, shapes)
        return params, self.make(params, **more)

    def make_again(self, params: Sequence[Tensor]) -> tuple[list[Parameter], Any]:
        """Parameters with the values of others, where this has its own, and an optimizer that has not stepped."""
        again = [Parameter(self.place(p, index)) for index, p in enumerate(values(params))]
        return again, self.make(again)

    def begin(self, dtype: torch.dtype = torch.float32, steps: int = 3) -> tuple[list[Parameter], Any]:
        """Parameters and their optimizer in the middle of a run."""
        params, optimizer = self.make_fresh(dtype)
        train(optimizer, params, steps)
        return params, optimizer

    def run_steps(self, shapes: Shapes | None = None, steps: int = 1, **more: Any) -> list[Tensor]:
        """The parameters after some steps of an optimizer that is made for it."""
        params, optimizer = self.make_fresh(shapes=shapes, **more)
        return train(optimizer, params, steps)


def weights(shapes: Shapes, dtype: torch.dtype = torch.float32, which: Sequence[int] | None = None) -> list[Parameter]:
    """Parameters; ``which`` says whose numbers each has, by default those of its place."""
    places = range(len(shapes)) if which is None else which
    return [Parameter((WEIGHT * draw(shape, 0, place)).to(dtype)) for shape, place in zip(shapes, places, strict=True)]


def give(params: Sequence[Tensor], t: int, which: Sequence[int] | None = None, size: float = GRADIENT) -> None:
    """Set the gradients of step ``t``, which lie like their parameters."""
    for p, place in zip(params, range(len(params)) if which is None else which, strict=True):
        p.grad = lay_like(p, (size * draw(p.shape, 1, place, t)).to(p.dtype))


def lay_like(p: Tensor, whole: Tensor) -> Tensor:
    """A tensor that lies in memory, and over ranks, as a parameter does; nothing is sent."""
    if hasattr(p, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)  # type: ignore[attr-defined]
    return torch.empty_like(p).copy_(whole) if p.numel() else torch.empty_like(p)


def train(
    optimizer: Any,
    params: Sequence[Tensor],
    steps: int,
    first: int = 0,
    which: Sequence[int] | None = None,
    size: float = GRADIENT,
    without: Sequence[int] = (),
) -> list[Tensor]:
    """Steps with gradients that depend on the step and the place alone, some without; the whole parameters then."""
    for t in range(first, first + steps):
        give(params, t, which, size)
        for place in without:
            params[place].grad = None
        optimizer.step()
    return values(params)


def values(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of whole tensors, brought together where they are divided over ranks."""
    copies = [tensor.detach().clone() for tensor in tensors]
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in copies]


def module_of(params: Iterable[Parameter]) -> torch.nn.Module:
    """A module with these parameters, for checkpoints by name."""
    module = torch.nn.Module()
    for place, p in enumerate(params):
        module.register_parameter(f"p{place}", p)
    return module


def copy_state(optimizer: Any) -> Any:
    """A copy of the state dict, which nothing changes."""
    return copy.deepcopy(optimizer.state_dict())


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything within nested dicts, lists and tuples, by its path."""
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(value):
            yield from leaves(part, f"{path}.{place}" if path else str(place))
    else:
        yield path, value


def tensors_of(optimizer: Any) -> dict[str, Tensor]:
    """The tensors of the state, by their paths."""
    return {path: leaf for path, leaf in leaves(optimizer.state_dict()["state"]) if isinstance(leaf, Tensor)}


def step_unless_refused(optimizer: Any) -> bool:
    """Whether a step is taken; one that is refused has to say why."""
    try:
        optimizer.step()
    except Exception as error:
        if not str(error).strip():
            pytest.fail(f"{type(error).__name__} without a word")
        return False
    return True


@contextmanager
def unless_refused(what: str) -> Iterator[None]:
    """Errors within mean that it is not offered."""
    try:
        yield
    except Exception as error:
        pytest.skip(f"{what}: {describe_error(error)}")


def require_option(optimizer: Any, option: str) -> None:
    if option not in optimizer.param_groups[0]:
        pytest.skip(f"there is no {option}")
