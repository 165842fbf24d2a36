"""The four optimizers for torch, in order of increasing complexity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from thalweg.errors import OptionError
from thalweg.options import AdafactorOptions, KronOptions, LAMBOptions, LARSOptions, Unpack, with_signature
from thalweg.torch.optimizer import Optimizer
from thalweg.torch.params.grouped import Params
from thalweg.torch.params.groups import EngineName
from thalweg.torch.params.rates import Rate


class Beside(TypedDict, total=False):
    """What every optimizer takes beside its options."""

    engine: EngineName
    capturable: bool
    foreach: bool | None
    fused: bool | None
    differentiable: bool


class LARSArguments(LARSOptions, Beside, total=False): ...


class LAMBArguments(LAMBOptions, Beside, total=False): ...


class AdafactorArguments(AdafactorOptions, Beside, total=False): ...


class KronArguments(KronOptions, Beside, total=False): ...


@with_signature
class LARS(Optimizer):
    """SGD with momentum whose step size follows each layer's norm. Options: docs/lars.md."""

    rule_name = "LARS"

    def __init__(self, params: Params, lr: Rate = 1.0, **options: Unpack[LARSArguments]) -> None:
        super().__init__(params, lr, **options)


@with_signature
class LAMB(Optimizer):
    """Adam whose step size follows each layer's norm. Options: docs/lamb.md."""

    rule_name = "LAMB"

    def __init__(self, params: Params, lr: Rate = 1e-3, **options: Unpack[LAMBArguments]) -> None:
        super().__init__(params, lr, **options)


@with_signature
class Adafactor(Optimizer):
    """Adaptive step sizes with memory for rows and columns only. Options: docs/adafactor.md."""

    rule_name = "Adafactor"

    def __init__(self, params: Params, lr: Rate = None, **options: Unpack[AdafactorArguments]) -> None:
        super().__init__(params, lr, **options)

    def _get_lr(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> float:
        """The step size of a group's first parameter, which ``AdafactorSchedule`` of transformers shows."""
        if not group.get("lr_is_scale"):
            raise OptionError(
                "AdafactorSchedule shows the steps of Adafactor without lr: this one has an lr, which it "
                "would overwrite; use a scheduler of torch.optim.lr_scheduler"
            )
        name = next(name for name, p in self._named() if p is group["params"][0])
        return float(self.stats().get(name, {}).get("step_size", group["lr"]))


@with_signature
class Kron(Optimizer):
    """SGD with momentum on gradients whitened by a learned Kronecker product. Options: docs/kron.md."""

    rule_name = "Kron"

    def __init__(self, params: Params, lr: Rate = 1e-3, **options: Unpack[KronArguments]) -> None:
        super().__init__(params, lr, **options)
