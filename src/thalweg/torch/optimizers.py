"""Optimizers for torch, made of rules: those of the package, and one's own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypedDict

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
from thalweg.torch.base import Optimizer
from thalweg.torch.params.grouped import Params
from thalweg.torch.params.groups import EngineName
from thalweg.torch.params.rates import Rate
from thalweg.trial import check_rule


@functools.cache
def optimizer(rule: type[Rule]) -> type[Optimizer]:
    """The class of optimizers for torch that step by a rule: its options are keyword arguments.

    >>> optimizer(RULES["LAMB"]) is LAMB
    True
    """
    check_rule(rule)
    found: type[Optimizer] = made(rule, Optimizer, optimizer)
    return found


if TYPE_CHECKING:

    class Beside(TypedDict, total=False):
        """What every optimizer takes beside its options."""

        engine: EngineName
        offload_state: bool
        capturable: bool
        foreach: bool | None
        fused: bool | None
        differentiable: bool

    class SGDArguments(SGDOptions, Beside, total=False): ...

    class AdamWArguments(AdamWOptions, Beside, total=False): ...

    class LionArguments(LionOptions, Beside, total=False): ...

    class LARSArguments(LARSOptions, Beside, total=False): ...

    class LAMBArguments(LAMBOptions, Beside, total=False): ...

    class AdafactorArguments(AdafactorOptions, Beside, total=False): ...

    class MuonArguments(MuonOptions, Beside, total=False): ...

    class KronArguments(KronOptions, Beside, total=False): ...

    class SGD(Optimizer):
        def __init__(
            self, params: Params, lr: Rate = 1e-3, *positional: Any, **options: Unpack[SGDArguments]
        ) -> None: ...

    class AdamW(Optimizer):
        def __init__(
            self, params: Params, lr: Rate = 1e-3, *positional: Any, **options: Unpack[AdamWArguments]
        ) -> None: ...

    class Lion(Optimizer):
        def __init__(self, params: Params, lr: Rate = 1e-4, **options: Unpack[LionArguments]) -> None: ...

    class LARS(Optimizer):
        def __init__(self, params: Params, lr: Rate = 1.0, **options: Unpack[LARSArguments]) -> None: ...

    class LAMB(Optimizer):
        def __init__(self, params: Params, lr: Rate = 1e-3, **options: Unpack[LAMBArguments]) -> None: ...

    class Adafactor(Optimizer):
        def __init__(
            self, params: Params, lr: Rate = None, *positional: Any, **options: Unpack[AdafactorArguments]
        ) -> None: ...

    class Muon(Optimizer):
        def __init__(
            self, params: Params, lr: Rate = 0.02, *positional: Any, **options: Unpack[MuonArguments]
        ) -> None: ...

    class Kron(Optimizer):
        def __init__(self, params: Params, lr: Rate = 1e-3, **options: Unpack[KronArguments]) -> None: ...

else:
    globals().update({name: optimizer(rule) for name, rule in RULES.items()})
