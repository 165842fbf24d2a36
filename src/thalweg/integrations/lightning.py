"""Optimizers for Lightning where a class in its configuration is not enough, and averages in its place of weights.

Classes of ``thalweg.torch`` need nothing of this: ``class_path: thalweg.torch.LAMB`` works as for those of torch. It is
for mixtures, which are made of a whole module, for names of groups, and for what is to be evaluated and saved.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from thalweg.errors import OptionError
from thalweg.integrations.audited import ChosenStep
from thalweg.torch import Optimizer, recipes
from thalweg.torch.recipes import RECIPES


class MixtureOf:
    """A mixture to be made of a module: what a file gives for an argument ``Callable[[nn.Module], Any]``.

    recipe: "kron_adamw" or "muon_adamw". options: its arguments beside the model; without "adamw_lr", AdamW's rate
    follows from "lr".

    >>> optimizer = MixtureOf("kron_adamw", {"lr": 0.01})(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    >>> [(group["name"], group["param_names"]) for group in optimizer.param_groups]
    [('Kron', ['0.weight']), ('AdamW', ['1.weight']), ('AdamW 2', ['0.bias', '1.bias'])]
    """

    def __init__(self, recipe: str, options: dict[str, Any] | None = None) -> None:
        if recipe not in RECIPES:
            raise OptionError(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
        self.recipe, self.options = recipe, dict(options or {})

    def __call__(self, module: nn.Module) -> Optimizer:
        return name_groups(getattr(recipes, self.recipe)(module, **self.options))


class Averages(Callback):
    """``fit`` evaluates and saves averages, and leaves them in the module; it trains the weights.

    Checkpoints have the weights in the optimizer's state: give this callback to the trainer that resumes too. Files of
    weights alone (``save_weights_only=True``) have averages where they are written after a validation.
    """

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, Optimizer):
                optimizer.train()

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, Optimizer):
                optimizer.eval()

    on_train_end = on_validation_start

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.on_validation_start(trainer, module)
        checkpoint["state_dict"] = trainer.strategy.lightning_module_state_dict()
        checkpoint["optimizer_states"] = [*map(trainer.strategy.optimizer_state, trainer.optimizers)]


class Audit(Callback):
    """Audits one step and logs the report. check: raise if it is not the step of its page.

    step: its number, from 1. options: memory and rule, as ``thalweg.torch.audit`` has them.
    """

    def __init__(self, step: int = 1, *, check: bool = False, **options: Any) -> None:
        self.chosen = ChosenStep(step, check=check, **options)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        self.chosen.begin(trainer.optimizers, module, trainer.global_step + 1)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step >= self.chosen.step:  # and not while gradients are accumulated
            self.chosen.end()


def name_groups(optimizer: Optimizer) -> Optimizer:
    """Give every group that has no name the name of its rule, by which ``LearningRateMonitor`` shows it."""
    seen: Counter[str] = Counter()
    for group in optimizer.param_groups:
        rule = group["rule"]
        seen[rule] += 1
        group.setdefault("name", rule if seen[rule] == 1 else f"{rule} {seen[rule]}")
    return optimizer
