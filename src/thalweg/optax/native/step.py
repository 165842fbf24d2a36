"""A step by native code, whichever device it is for: how it is laid out, divided over devices, and what comes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from thalweg.errors import RuleError
from thalweg.optax.batches import Job, Step
from thalweg.optax.steps import Outcome
from thalweg.rules import Rule
from thalweg.rules.rule import stand_in


class NativeStep(ABC):
    """Jobs as native code is shown them. It is laid out for one step, and run once."""

    #: Which jobs have the same code and options.
    groups: list[list[int]]

    def __init__(
        self,
        jobs: Sequence[Job],
        step: Step,
        figures: Sequence[Mapping[str, Any]],
        rules: Mapping[int, Rule] | None = None,
    ) -> None:
        """figures: shapes of those that are wanted. rules: at this step, by the id of their setting, if known."""
        self.jobs, self.step, self.figures = jobs, step, figures
        self.rules = rules or {id(job.setting): stand_in(job.setting.rule_at(step.t)) for job in jobs}
        self.lay_out()

    @abstractmethod
    def lay_out(self) -> None:
        """Find the groups, and what native code is given of them."""

    @abstractmethod
    def numbers(self) -> list[Any]:
        """What the step is given beside its arrays."""

    @abstractmethod
    def take(self, numbers: Sequence[Any]) -> tuple[dict[int, Outcome], Any]:
        """Step all jobs: their outcomes by place, each with all of its figures, and whether all of it is finite.

        The last is None where the step is not guarded.
        """

    def run(self, numbers: Sequence[Any]) -> tuple[list[Outcome], Any]:
        """The step. numbers: what ``numbers`` answered, for these jobs or for those that they are parts of."""
        (by_place, fine), outcomes = self.take(numbers), []
        for place, wanted in enumerate(self.figures):
            told = by_place[place].stats
            stats = {name: told[name].reshape(figure.shape).astype(figure.dtype) for name, figure in wanted.items()}
            outcomes.append(by_place[place]._replace(stats=stats))
        return outcomes, fine

    def run_by_parts(self) -> tuple[list[Outcome], Any]:
        """The step, of which each device takes its parts, without asking another."""

        def call(*arrays: Any) -> list[Any]:
            reader, parts = iter(arrays), []
            for job in self.jobs:
                p, g = next(reader), next(reader)
                parts.append(replace(job, p=p, g=g, state={key: next(reader) for key in job.state}))
            of_parts = type(self)(parts, self.step, self.figures, self.rules)
            if of_parts.groups != self.groups:  # whose numbers are those of the whole
                raise RuleError("parts of parameters are of other kinds than the parameters")
            outcomes, _ = of_parts.run(list(reader))
            return [x for outcome in outcomes for x in (outcome.value, *outcome.state.values())]

        arrays: list[Any] = []
        owners: list[int] = []
        given: list[int] = []
        for job in self.jobs:
            first = len(arrays)
            arrays += [job.p, job.g, *job.state.values()]
            owners += [first] * (1 + len(job.state))
            given += [first] * (2 + len(job.state))
        numbers = self.numbers()
        news = iter(by_parts(call, owners, [*given, *[-1] * len(numbers)], *arrays, *numbers))
        return [Outcome(next(news), {key: next(news) for key in job.state}, {}) for job in self.jobs], None


def by_parts(call: Callable[..., Sequence[Any]], owners: Sequence[int], given: Sequence[int], *args: Any) -> Any:
    """The results of call, declared to the compiler so that it divides call as it divides the arrays.

    owners: of each result, which array of args it is laid out like. given: the same of each of args, -1: of none, and
    every device has it whole.
    """

    def place(mesh: Any, args: Sequence[Any], of: Sequence[int]) -> tuple[Any, ...]:
        return tuple(NamedSharding(mesh, PartitionSpec()) if i < 0 else args[i].sharding for i in of)

    def divide(mesh: Any, args: Any, results: Any) -> Any:
        return mesh, as_tuple, place(mesh, args, owners), place(mesh, args, given)

    def as_tuple(*parts: Any) -> tuple[Any, ...]:
        return tuple(call(*parts))

    def infer(mesh: Any, args: Any, results: Any) -> Any:
        return place(mesh, args, owners)

    def axes_of(number: int, like: int) -> str:
        """Names of its axes: the same for all that are laid out alike."""
        prefix = f"w{number}" if like < 0 else f"a{like}"
        return " ".join(f"{prefix}{chr(98 + axis)}" for axis in range(args[number].ndim))

    sides = [[axes_of(i, like) for i, like in enumerate(given)], [axes_of(like, like) for like in owners]]
    declared = custom_partitioning(as_tuple)
    declared.def_partition(
        partition=divide,
        infer_sharding_from_operands=infer,
        sharding_rule=" -> ".join(", ".join(side) for side in sides),
    )
    return declared(*args)
