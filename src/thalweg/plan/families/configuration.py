"""A configuration of a model, as ``config.json`` has it: read with the defaults of its family, and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from thalweg.arrays import Shape
from thalweg.errors import CommandError

Named: TypeAlias = Iterator[tuple[str, Shape]]


@dataclass(frozen=True)
class Configuration:
    """What a configuration says, and where it says nothing, what its family does."""

    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    #: Other names under which some entries may stand.
    also_called: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        if name in self.given:
            return self.given[name]
        return self.given.get(self.also_called.get(name, name), self.defaults.get(name))

    def size(self, name: str, otherwise: int | None = None) -> int:
        """A whole number from 1 on; ``otherwise`` stands for null, and for nothing at all."""
        value = self.get(name)
        if value is None and otherwise is not None:
            return otherwise
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CommandError(f"the configuration's {name} must be a whole number from 1 on, got {value!r}")
        return value

    def within(self, name: str, defaults: Mapping[str, Any]) -> Configuration:
        """A configuration that stands within this one, or one of defaults alone."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise CommandError(f"the configuration's {name} must be a configuration of its own, got {value!r:.60}")
        return Configuration(value or {}, defaults)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise CommandError(f"the configuration's {name} must be true or false, got {value!r}")
        return value


@dataclass(frozen=True)
class Family:
    """How models of one ``model_type`` are made."""

    #: The class of transformers whose parameters these are.
    built: str
    tensors: Callable[[Configuration], Named]
    defaults: Mapping[str, Any]
    also_called: Mapping[str, str] = field(default_factory=dict)
    #: Names of parameters that transformers does not train.
    frozen: tuple[str, ...] = ()


def linear(name: str, outputs: int, inputs: int, *, bias: bool) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def norm(name: str, size: int, *, bias: bool = True) -> Named:
    """A layer norm, with a bias if nothing else is said."""
    yield f"{name}.weight", (size,)
    if bias:
        yield f"{name}.bias", (size,)
