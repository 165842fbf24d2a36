"""Optimizers for the ``Trainer`` of transformers, and for trainers made of it (TRL, axolotl)."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from thalweg import torch as front_end
from thalweg.errors import OptionError, warn
from thalweg.integrations.audited import ChosenStep
from thalweg.rules import RULES, Rule
from thalweg.settings import defaults
from thalweg.torch import recipes
from thalweg.torch.recipes import RECIPES

#: Makes an optimizer of a model, with the arguments of ``thalweg.torch.kron_adamw``.
Recipe: TypeAlias = Callable[..., front_end.Optimizer]


def optimizer_cls_and_kwargs(
    args: TrainingArguments, rule: str | type[Rule] | type[front_end.Optimizer] | Recipe, **options: Any
) -> tuple[Callable[[], Recipe], dict[str, Any]]:
    """The argument ``optimizer_cls_and_kwargs`` of a ``Trainer`` that steps by a rule, or by a mixture of two.

    rule: the name of a rule ("LAMB"), a rule of one's own, a class of ``thalweg.torch``, or a mixture: "kron_adamw",
    "muon_adamw", or a function that takes what they take.
    options: of the rule or the mixture, overrides by name among them. They win over those in ``args.optim_args``, which
    win over the learning rate, the betas and the epsilon in ``args``. ``args.weight_decay`` holds for the parameters
    that a Trainer decays: not for biases and norms.

    What is returned first makes a function of the model, not a class: classes are not given the names of parameters.
    """
    given = {"weight_decay": args.weight_decay, **parsed(args.optim_args), **options}
    if given.get("spikes") and args.max_grad_norm:
        warn(
            f"spikes sees nothing: the Trainer clips gradients to {args.max_grad_norm} before the optimizer has them; "
            f"write max_grad_norm=0 in TrainingArguments, and max_grad_norm={args.max_grad_norm} here"
        )
    recipe: Recipe | None = None if isinstance(rule, (str, type)) else rule
    if isinstance(rule, str) and rule.lower() in RECIPES:
        recipe = getattr(recipes, rule.lower())
    if recipe is None:
        kind = find_class(rule)
        given = {"lr": args.learning_rate, **adam_options(args, kind.rule), **given}
        return partial(partial, make_by_rule, kind), given  # a Trainer calls the first without arguments
    adamw = {**adam_options(args, RULES["AdamW"]), **given.pop("adamw", {})}
    given = {"lr": args.learning_rate, **given, **({"adamw": adamw} if adamw else {})}
    defaults_of_recipe = {name: p.default for name, p in inspect.signature(recipe).parameters.items()}
    lr, adamw_lr = defaults_of_recipe.get("lr"), defaults_of_recipe.get("adamw_lr")
    if isinstance(lr, float) and isinstance(adamw_lr, float):  # a function of the user's own: the ratio of its defaults
        given = {"adamw_lr": given["lr"] * adamw_lr / lr, **given}
    return partial(partial, make_by_recipe, recipe), given


class Averages(TrainerCallback):
    """Every checkpoint, and the model after training, have the averages that a ``Trainer`` evaluates.

    It evaluates them without this too. A run that is resumed trains the weights, which are in the optimizer's state.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        if control.should_save or control.should_training_stop:  # before the best model is loaded
            optimizer.eval()

    on_epoch_end = on_step_end


class Audit(TrainerCallback):
    """Audits one step of a ``Trainer`` and logs the report. check: raise if it is not the step of its page.

    step: its number, from 1. options: memory and rule, as ``thalweg.torch.audit`` has them.
    """

    def __init__(self, step: int = 1, *, check: bool = False, **options: Any) -> None:
        self.chosen = ChosenStep(step, check=check, **options)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, optimizer: Any, model: Any = None, **_: Any
    ) -> None:
        self.chosen.begin(optimizer, model, state.global_step + 1)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.chosen.end()


def make_by_rule(
    kind: type[front_end.Optimizer], model: nn.Module, _: Any = None, *, weight_decay: float, **options: Any
) -> front_end.Optimizer:
    """An optimizer for a model. axolotl gives its arguments beside the model."""
    return kind(make_groups(model, kind.rule, weight_decay), **options)


def make_by_recipe(recipe: Recipe, model: nn.Module, _: Any = None, **options: Any) -> front_end.Optimizer:
    return recipe(model, **options)


def make_groups(model: nn.Module, rule: type[Rule], weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters of a model with their names, in a group that decays and one that does not."""
    if "weight_decay" not in defaults(rule):
        if weight_decay:
            raise OptionError(f"{rule.__name__} has no weight_decay: train with TrainingArguments(weight_decay=0)")
        return [{"params": list_trainable(model)}]
    decaying = set(Trainer.get_decay_parameter_names(None, model))  # which asks nothing of a Trainer
    named = list_trainable(model)
    groups = [
        {"params": [(name, p) for name, p in named if name in decaying], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in named if name not in decaying], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def list_trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def find_class(rule: Any) -> type[front_end.Optimizer]:
    """The class of thalweg.torch that is meant by a rule, its name, or the class itself."""
    if isinstance(rule, type) and issubclass(rule, front_end.Optimizer):
        return rule
    by_name = {name.lower(): shipped for name, shipped in RULES.items()}
    chosen = by_name.get(rule.lower()) if isinstance(rule, str) else rule
    if not (isinstance(chosen, type) and issubclass(chosen, Rule)):
        known = ", ".join([*RULES, *RECIPES])
        raise OptionError(f"rule must be one of {known}, a rule or a class of thalweg.torch, got {rule!r}")
    return front_end.optimizer(chosen)


def adam_options(args: TrainingArguments, rule: type[Rule]) -> dict[str, Any]:
    """The betas and the epsilon of TrainingArguments for a rule like Adam; their defaults there ask for nothing."""
    known = defaults(rule)
    asked = {f.name for f in fields(TrainingArguments) if getattr(args, f.name) != f.default}
    options: dict[str, Any] = {}
    if "betas" in known and asked & {"adam_beta1", "adam_beta2"}:
        options["betas"] = (args.adam_beta1, args.adam_beta2)
    if "betas" in known and "eps" in known and "adam_epsilon" in asked:
        options["eps"] = args.adam_epsilon
    return options


def parsed(optim_args: str | None) -> dict[str, Any]:
    """Options as a command line has them: "trust=False,betas=(0.9,0.95)"."""
    pairs = [pair for pair in re.split(r",(?![^(\[]*[)\]])", (optim_args or "").replace(" ", "")) if pair]
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise OptionError(f"optim_args must be a list such as 'trust=False,betas=(0.9,0.95)', got {wrong[0]!r} in it")
    return {name: parse_literal(value) for name, _, value in (pair.partition("=") for pair in pairs)}


def parse_literal(text: str) -> Any:
    """A value as Python writes it; whatever is none is text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
