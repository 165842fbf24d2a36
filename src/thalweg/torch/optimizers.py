"""The four optimizers for torch, in order of increasing complexity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thalweg.torch.engines import Engine
from thalweg.torch.optimizer import Optimizer
from thalweg.torch.parameters import Params, Rate

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from thalweg.options import AdafactorOptions, KronOptions, LAMBOptions, LARSOptions


class LARS(Optimizer):
    """SGD with momentum whose step size follows each layer's norm. Options: docs/lars.md."""

    rule_name = "LARS"

    def __init__(
        self,
        params: Params,
        lr: Rate,
        *,
        engine: Engine = "auto",
        capturable: bool = False,
        **options: Unpack[LARSOptions],
    ) -> None:
        super().__init__(params, lr, engine=engine, capturable=capturable, **options)


class LAMB(Optimizer):
    """Adam whose step size follows each layer's norm. Options: docs/lamb.md."""

    rule_name = "LAMB"

    def __init__(
        self,
        params: Params,
        lr: Rate = 1e-3,
        *,
        engine: Engine = "auto",
        capturable: bool = False,
        **options: Unpack[LAMBOptions],
    ) -> None:
        super().__init__(params, lr, engine=engine, capturable=capturable, **options)


class Adafactor(Optimizer):
    """Adaptive step sizes with memory for rows and columns only. Options: docs/adafactor.md."""

    rule_name = "Adafactor"

    def __init__(
        self,
        params: Params,
        lr: Rate = None,
        *,
        engine: Engine = "auto",
        capturable: bool = False,
        **options: Unpack[AdafactorOptions],
    ) -> None:
        super().__init__(params, lr, engine=engine, capturable=capturable, **options)


class Kron(Optimizer):
    """SGD with momentum on gradients whitened by a learned Kronecker product. Options: docs/kron.md."""

    rule_name = "Kron"

    def __init__(
        self,
        params: Params,
        lr: Rate,
        *,
        engine: Engine = "auto",
        capturable: bool = False,
        **options: Unpack[KronOptions],
    ) -> None:
        super().__init__(params, lr, engine=engine, capturable=capturable, **options)
