"""Optimizers for raw arrays, made of rules: those of the package, and one's own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from thalweg.numpy.base import Optimizer
from thalweg.numpy.checks import Rate
from thalweg.numpy.stepping import Engine
from thalweg.options import (
    AdafactorOptions,
    AdamWOptions,
    KronOptions,
    LAMBOptions,
    LARSOptions,
    LionOptions,
    MuonOptions,
    SGDOptions,
    Unpack,
    made,
)
from thalweg.rules import RULES, Rule
from thalweg.trial import check_rule


@functools.cache
def optimizer(rule: type[Rule]) -> type[Optimizer]:
    """The class of optimizers for numpy that step by a rule: its options are keyword arguments.

    >>> optimizer(RULES["LAMB"]) is LAMB
    True
    """
    check_rule(rule)
    found: type[Optimizer] = made(rule, Optimizer, optimizer)
    return found


if TYPE_CHECKING:

    class SGD(Optimizer):
        def __init__(
            self, lr: Rate = 1e-3, *, global_step: bool = False, engine: Engine = "auto", **options: Unpack[SGDOptions]
        ) -> None: ...

    class AdamW(Optimizer):
        def __init__(
            self,
            lr: Rate = 1e-3,
            *,
            global_step: bool = False,
            engine: Engine = "auto",
            **options: Unpack[AdamWOptions],
        ) -> None: ...

    class Lion(Optimizer):
        def __init__(
            self, lr: Rate = 1e-4, *, global_step: bool = False, engine: Engine = "auto", **options: Unpack[LionOptions]
        ) -> None: ...

    class LARS(Optimizer):
        def __init__(
            self, lr: Rate = 1.0, *, global_step: bool = False, engine: Engine = "auto", **options: Unpack[LARSOptions]
        ) -> None: ...

    class LAMB(Optimizer):
        def __init__(
            self, lr: Rate = 1e-3, *, global_step: bool = False, engine: Engine = "auto", **options: Unpack[LAMBOptions]
        ) -> None: ...

    class Adafactor(Optimizer):
        def __init__(
            self,
            lr: Rate = None,
            *,
            global_step: bool = False,
            engine: Engine = "auto",
            **options: Unpack[AdafactorOptions],
        ) -> None: ...

    class Muon(Optimizer):
        def __init__(
            self, lr: Rate = 0.02, *, global_step: bool = False, engine: Engine = "auto", **options: Unpack[MuonOptions]
        ) -> None: ...

    class Kron(Optimizer):
        def __init__(
            self, lr: Rate = 1e-3, *, global_step: bool = False, engine: Engine = "auto", **options: Unpack[KronOptions]
        ) -> None: ...

else:
    globals().update({name: optimizer(rule) for name, rule in RULES.items()})
