"""The four optimizers for torch, in order of increasing complexity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thalweg.errors import OptionError
from thalweg.options import AdafactorOptions, KronOptions, LAMBOptions, LARSOptions, Unpack
from thalweg.torch.engines import Engine
from thalweg.torch.optimizer import Optimizer
from thalweg.torch.parameters import Params, Rate


class LARS(Optimizer):
    """SGD with momentum whose step size follows each layer's norm. Options: docs/lars.md."""

    rule_name = "LARS"

    def __init__(
        self,
        params: Params,
        lr: Rate = 1.0,
        *,
        engine: Engine = "auto",
        capturable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        **options: Unpack[LARSOptions],
    ) -> None:
        super().__init__(
            params,
            lr,
            engine=engine,
            capturable=capturable,
            foreach=foreach,
            fused=fused,
            differentiable=differentiable,
            **options,
        )


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
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        **options: Unpack[LAMBOptions],
    ) -> None:
        super().__init__(
            params,
            lr,
            engine=engine,
            capturable=capturable,
            foreach=foreach,
            fused=fused,
            differentiable=differentiable,
            **options,
        )


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
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        **options: Unpack[AdafactorOptions],
    ) -> None:
        super().__init__(
            params,
            lr,
            engine=engine,
            capturable=capturable,
            foreach=foreach,
            fused=fused,
            differentiable=differentiable,
            **options,
        )

    def _get_lr(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> float:
        """The step size of a group's first parameter, which ``AdafactorSchedule`` of transformers shows."""
        if not group.get("lr_is_scale"):
            raise OptionError(
                "AdafactorSchedule shows the steps of Adafactor without lr: this one has an lr, which it "
                "would overwrite; use a scheduler of torch.optim.lr_scheduler"
            )
        name = next(name for name, p in self._named() if p is group["params"][0])
        return float(self.stats().get(name, {}).get("step_size", group["lr"]))


class Kron(Optimizer):
    """SGD with momentum on gradients whitened by a learned Kronecker product. Options: docs/kron.md."""

    rule_name = "Kron"

    def __init__(
        self,
        params: Params,
        lr: Rate = 1e-3,
        *,
        engine: Engine = "auto",
        capturable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        **options: Unpack[KronOptions],
    ) -> None:
        super().__init__(
            params,
            lr,
            engine=engine,
            capturable=capturable,
            foreach=foreach,
            fused=fused,
            differentiable=differentiable,
            **options,
        )
