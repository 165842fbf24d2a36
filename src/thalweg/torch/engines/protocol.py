"""What every engine is given: parameters that are stepped together, and what is decided over the whole step."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from torch import Tensor

from thalweg.arrays import Shape
from thalweg.kernels.chunks import CHUNK, extent, pieces
from thalweg.rules.entries import Count
from thalweg.settings import ParameterOptions
from thalweg.spaces.sharded import Part
from thalweg.torch.engines.memory import are_the_same, gradients_like
from thalweg.torch.params.parameter import Param
from thalweg.torch.sharding.stages import Layout

T = TypeVar("T")
EngineKind: TypeAlias = Literal["lists", "native", "triton"]


class Table:
    """What all gradients of a step decide before anything is written; decisions stay where they are in memory."""

    def __init__(self) -> None:
        #: What a GradScaler leaves to the step.
        self.scaled_by: Tensor | None = None
        self.found_inf: Tensor | None = None
        #: Multiplies all gradients.
        self.grad_scale: Tensor | None = None
        #: Whether the step is taken.
        self.allowed: Tensor | None = None
        #: The parameters whose step is not finite, where that is an error.
        self.nonfinite: list[str] = []

    def release(self) -> None:
        """Forget what one step alone has."""
        self.scaled_by = self.found_inf = None
        self.nonfinite = []


@dataclass(eq=False)
class Bucket:
    """Parameters that are stepped together: of one group, setting, kind, place, dtype, lr and step.

    Gradients, their addresses, options, rates and counts are those of the step that is bound.
    """

    names: Sequence[str]
    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[Mapping[str, Tensor]]
    setting: ParameterOptions
    lr: float | Tensor | None
    #: The number of this step where the host knows it; None: it is in the states, on the device.
    t: int | None
    #: Multiplies the step size that the rule computes from lr.
    lr_scale: float = 1.0
    #: The name of the way in which they are stepped, as ``optimizer.engine`` tells it, and the engine that does it.
    way: str = "reference"
    engine: EngineKind = "lists"
    #: Why that is not fused code, "" if it is.
    refused: str = ""
    #: The place of their parameter group.
    group: int = 0
    #: The shard that this rank has of each parameter, if they are sharded; empty if they are whole.
    parts: Sequence[Part] = ()
    #: Where the gradients are, if they are stored like those that the step was laid out for; None: ask each.
    addresses: array[int] | None = None
    #: Whether they lay as their parameters do.
    is_read_in_place: bool = False
    table: Table = field(default_factory=Table)

    @property
    def grad_scale(self) -> Tensor | None:
        """Multiplies all gradients."""
        scale = self.table.grad_scale
        return None if scale is None else scale.to(self.params[0].device)

    @property
    def allowed(self) -> Tensor | None:
        """Whether the whole step may be taken, where that is decided by all gradients together."""
        allowed = self.table.allowed
        return None if allowed is None else allowed.to(self.params[0].device)

    @property
    def shape(self) -> Shape:
        """The shape of the first parameter as a whole: all are of one kind."""
        return self.parts[0].shape if self.parts else tuple(self.params[0].shape)

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of the boundary that are the same for every parameter."""
        return dict(lr=self.lr, lr_scale=self.lr_scale, grad_scale=self.grad_scale, allowed=self.allowed)

    @property
    def rate(self) -> dict[str, Any]:
        """The step size, as statistics tell it."""
        return {} if self.lr is None else {"lr": self.lr * self.lr_scale}

    def locate_gradients(self) -> array[int]:
        """Where the gradients are, for code that needs them to lie as parameters do: copies replace those that do not.

        Bound anew they are asked again, unless the first ones lay so.
        """
        if self.addresses is None or not self.is_read_in_place:
            grads, self.grads = self.grads, gradients_like(self.params, self.grads)
            self.is_read_in_place = are_the_same(grads, self.grads)
            self.addresses = array("Q", map(Tensor.data_ptr, self.grads))
        return self.addresses

    def copy_shards(self) -> list[tuple[Tensor, Tensor]]:
        """Put copies in the place of shards that are not contiguous; return these, each with its copy.

        All ranks must take the same engine, whatever the memory layout of their shards.
        """
        pairs = []

        def contiguous(x: Tensor) -> Tensor:
            if x.is_contiguous():
                return x
            pairs.append((x, x.contiguous()))
            return pairs[-1][1]

        self.params = [contiguous(p) for p in self.params]
        self.states = [{key: contiguous(entry) for key, entry in state.items()} for state in self.states]
        return pairs

    def chunks(self, limit: int = CHUNK) -> list[Bucket]:
        """Chunks of at most so many elements, or of a single larger tensor."""
        return [self.chosen(members) for members in pieces(self.extents, limit)]

    @property
    def extents(self) -> list[int]:
        """The elements for which each parameter counts where chunks are cut."""
        return [
            extent(p.numel(), (entry.numel() for entry in s.values()))
            for p, s in zip(self.params, self.states, strict=True)
        ]

    def alike(self) -> list[list[int]]:
        """Members for which the host decides the same, by the counts that it keeps."""
        by_counts: dict[tuple[float, ...], list[int]] = {}
        counts = self.setting.rule.keys(self.shape, Count)
        for index, s in enumerate(self.states):
            by_counts.setdefault(tuple(float(s[key]) for key in counts), []).append(index)
        return list(by_counts.values())

    def chosen(self, members: Sequence[int]) -> Bucket:
        def some(values: Sequence[T]) -> list[T]:
            return [values[i] for i in members]

        return replace(
            self,
            names=some(self.names),
            params=some(self.params),
            grads=some(self.grads),
            states=some(self.states),
            parts=some(self.parts) if self.parts else (),
            addresses=None if self.addresses is None else array("Q", some(self.addresses)),
        )


def say_buckets(buckets: Sequence[Bucket]) -> str:
    """What is stepped, in words: rules, how many tensors, and where these are."""
    rules = ", ".join(dict.fromkeys(type(bucket.setting.rule).__name__ for bucket in buckets))
    params = [p for bucket in buckets for p in bucket.params]
    places = ", ".join(dict.fromkeys(f"{str(p.dtype).removeprefix('torch.')} on {p.device}" for p in params))
    sharded = ", sharded" * any(bucket.parts for bucket in buckets)
    return f"{rules}, {count_tensors(params)}, {places}{sharded}"


def count_tensors(tensors: Sequence[Tensor]) -> str:
    elements = sum(map(Tensor.numel, tensors))
    return f"{len(tensors)} tensor{'s' * (len(tensors) > 1)} ({elements:,} elements)"


class Engine(Protocol):
    """An engine of one optimizer, with what outlives the steps that it lays out."""

    def lay_out(self, buckets: Sequence[Bucket]) -> Sequence[Layout]:
        """The stages by which these buckets are stepped: of each device, where it makes a difference."""

    def count_temporaries(self, params: Sequence[Param]) -> int:
        """Bytes that it needs at most to step these, beside them, their gradients and their state."""

    def forget(self) -> None:
        """State was replaced: drop what was remembered of it."""
        return  # most remember nothing
