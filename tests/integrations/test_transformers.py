"""The Trainer of transformers with rules by name: what it is given, and that it trains and resumes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401  which a Trainer needs
import pytest
import torch
from networks import equal as are_equal
from networks import values as numbers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from thalweg import OptionError, Rule, Update
from thalweg.integrations.transformers import Averages, optimizer_cls_and_kwargs, parsed
from thalweg.torch import LAMB, muon_adamw


@dataclass(frozen=True, kw_only=True)
class Plain(Rule):
    """A rule without options."""

    def update(
        self, xp: Any, g: Any, s: Any, p: Any, *, t: Any, lr: Any, lr_scale: Any = 1.0, noise: Any = None
    ) -> Any:
        return Update(g * (-lr * lr_scale), {})


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=2,
        **{"max_steps": 2, "learning_rate": 0.01, "weight_decay": 0.1, "save_strategy": "no", **given},
    )


def trained(
    args: TrainingArguments, rule: Any, resume: str | None = None, *, callbacks: Any = None, **options: Any
) -> Trainer:
    torch.manual_seed(0)
    sizes = dict(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0)
    config = GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)  # no noise but that of the data
    data = [{"input_ids": torch.arange(8) % (i + 2), "labels": torch.arange(8) % (i + 2)} for i in range(8)]
    asked = optimizer_cls_and_kwargs(args, rule, **options)
    beside = dict(train_dataset=data, eval_dataset=data, callbacks=callbacks)
    trainer = Trainer(GPT2LMHeadModel(config), args, optimizer_cls_and_kwargs=asked, **beside)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def inner(trainer: Trainer) -> Any:
    """The optimizer inside of accelerate's."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


@pytest.mark.parametrize("rule", ["lamb", LAMB, LAMB.rule])
def test_a_trainer_steps_by_a_rule_with_decay_where_transformers_decays(tmp_path: Path, rule: Any) -> None:
    overrides = [("*.ln_*", dict(trust=False))]
    args = arguments(tmp_path, adam_beta2=0.95, optim_args="eps_root=1e-9, rounding=stochastic")
    optimizer = inner(trained(args, rule, overrides=overrides))
    decays, others = optimizer.param_groups
    assert type(optimizer) is LAMB
    assert (decays["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all("bias" in name or "ln_" in name for name in others["param_names"])
    assert "transformer.h.0.attn.c_attn.weight" in decays["param_names"]
    assert (decays["betas"], decays["eps"]) == ((0.9, 0.95), 1e-6)  # eps is not asked for: LAMB's own
    assert (decays["eps_root"], decays["rounding"]) == (1e-9, "stochastic")
    assert decays["initial_lr"] == 0.01
    assert not optimizer.explain().unused_overrides


def test_a_mixture_takes_its_rates_and_the_options_of_adam_from_the_arguments(tmp_path: Path) -> None:
    args = arguments(tmp_path, adam_epsilon=1e-7)
    muon, embeddings, vectors = inner(trained(args, "muon_adamw", adamw=dict(nesterov=True))).param_groups
    assert [group["rule"] for group in (muon, embeddings, vectors)] == ["Muon", "AdamW", "AdamW"]
    assert (muon["initial_lr"], embeddings["initial_lr"]) == pytest.approx((0.01, 0.01 * 3e-4 / 0.02))
    assert (embeddings["eps"], embeddings["nesterov"]) == (1e-7, True)
    assert [group["weight_decay"] for group in (muon, embeddings, vectors)] == [0.1, 0.1, 0.0]
    _, given = optimizer_cls_and_kwargs(args, muon_adamw, adamw_lr=1.0, weight_decay=0.0)
    assert (given["adamw_lr"], given["weight_decay"]) == (1.0, 0.0)


def test_adamw_has_the_rate_of_muon_where_their_steps_are_of_one_size(tmp_path: Path) -> None:
    args = arguments(tmp_path, learning_rate=1e-3)

    def rates(recipe: str, **options: Any) -> list[float]:
        factory, given = optimizer_cls_and_kwargs(args, recipe, **options)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        return [float(group.lr) for group in factory()(model, **given).explain().groups]

    assert rates("muon_adamw", muon=dict(scaling="match_rms_adamw")) == rates("kron_adamw") == [1e-3] * 3
    assert rates("muon_adamw", lr=0.04) == pytest.approx([0.04, 6e-4, 6e-4])


def test_a_function_of_ones_own_keeps_the_ratio_of_its_defaults(tmp_path: Path) -> None:
    def mine(model: Any, lr: float = 0.1, adamw_lr: float = 0.02, **arguments: Any) -> Any:
        return muon_adamw(model, lr, adamw_lr, **arguments)

    _, given = optimizer_cls_and_kwargs(arguments(tmp_path, learning_rate=0.05), mine)
    assert (given["lr"], given["adamw_lr"]) == (0.05, pytest.approx(0.01))


def test_axolotl_gives_one_argument_more_and_an_unknown_rule_is_told(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"rule must be one of SGD, .*muon_adamw, a rule or a class"):
        optimizer_cls_and_kwargs(arguments(tmp_path), "lambda")
    factory, given = optimizer_cls_and_kwargs(arguments(tmp_path), "Lion")
    model = torch.nn.Linear(2, 2)
    assert type(factory()(model, object(), **given)).__name__ == "Lion"


def test_a_rule_without_weight_decay_needs_arguments_without(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    factory, given = optimizer_cls_and_kwargs(arguments(tmp_path), Plain)
    with pytest.raises(OptionError, match=r"Plain has no weight_decay: train with TrainingArguments\(weight_decay=0\)"):
        factory()(model, **given)
    factory, given = optimizer_cls_and_kwargs(arguments(tmp_path, weight_decay=0.0), Plain)
    assert factory()(model, **given).param_groups[0]["param_names"] == ["weight", "bias"]


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = trained(arguments(tmp_path / "whole", max_steps=4), "kron_adamw")
    trained(arguments(tmp_path / "part", max_steps=4, save_strategy="steps", save_steps=2), "kron_adamw")
    again = trained(arguments(tmp_path / "rest", max_steps=4), "kron_adamw", str(tmp_path / "part" / "checkpoint-2"))
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_options_of_a_command_line_may_be_tuples() -> None:
    wanted = {"trust": False, "betas": (0.9, 0.95), "rounding": "stochastic"}
    assert parsed("trust=False, betas=(0.9, 0.95),rounding=stochastic") == wanted
    with pytest.raises(OptionError, match=r"optim_args must be a list such as .* got 'trust' in it"):
        parsed("trust")


# ---- averages


def evaluated(folder: Path, resume: str | None = None, callbacks: Any = None, **given: Any) -> Trainer:
    """A Trainer with averages, trained or resumed."""
    args = arguments(folder, max_steps=4, **given)
    return trained(args, "LAMB", resume, callbacks=callbacks, averaged=0.5)


def test_a_trainer_evaluates_averages_and_goes_on_training_weights(tmp_path: Path) -> None:
    plain, looked = evaluated(tmp_path), evaluated(tmp_path, eval_strategy="steps", eval_steps=3)
    averages = numbers(looked.model)
    assert not are_equal(averages, numbers(plain.model)), "it was evaluated last, and is in eval mode"
    with inner(plain).averaged():
        assert are_equal(averages, numbers(plain.model))
    loss = looked.evaluate()["eval_loss"]
    assert loss == looked.state.log_history[-1]["eval_loss"]
    assert loss == plain.evaluate()["eval_loss"]
    looked.optimizer.train()
    plain.optimizer.train()
    assert are_equal(numbers(looked.model), numbers(plain.model))


@pytest.mark.parametrize("eval_strategy", ["no", "steps"])
def test_checkpoints_have_averages_and_resume_the_weights(tmp_path: Path, eval_strategy: str) -> None:
    given = dict(callbacks=[Averages()], save_strategy="steps", save_steps=2, eval_strategy=eval_strategy, eval_steps=2)
    whole = evaluated(tmp_path / "whole", **given)
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "whole/checkpoint-2")
    again = evaluated(tmp_path / "rest", str(tmp_path / "whole/checkpoint-2"), **given)
    assert are_equal(numbers(whole.model), numbers(again.model))
    final = GPT2LMHeadModel.from_pretrained(tmp_path / "rest/checkpoint-4")
    assert are_equal(numbers(final), numbers(whole.model)), "what training leaves is what it saves"
    whole.optimizer.train()
    again.optimizer.train()
    assert are_equal(numbers(whole.model), numbers(again.model))
    assert not are_equal(numbers(saved), numbers(final))
    assert not are_equal(numbers(final), numbers(whole.model))


def test_the_best_model_is_what_was_evaluated(tmp_path: Path) -> None:
    given = dict(eval_strategy="steps", save_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True)
    worst = dict(metric_for_best_model="loss", greater_is_better=True)  # the first, so that it is not the last
    trainer = evaluated(tmp_path, callbacks=[Averages()], **given, **worst)
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert losses[0] == max(losses) > losses[-1]
    assert trainer.evaluate()["eval_loss"] == losses[0]


def test_a_schedule_beside_schedule_free_and_a_clip_before_spikes_are_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="schedule_free takes the place of a schedule, and lr went from 0.01 to 0.005"):
        trained(arguments(tmp_path, max_steps=2), "SGD", momentum=0.0, schedule_free=True)
    told = "spikes sees nothing: .* write max_grad_norm=0 in TrainingArguments, and max_grad_norm=1.0 here"
    with pytest.warns(UserWarning, match=told):
        trained(arguments(tmp_path), "LAMB", spikes=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        optimizer_cls_and_kwargs(arguments(tmp_path, max_grad_norm=0.0), "LAMB", spikes=True, max_grad_norm=1.0)
        optimizer_cls_and_kwargs(arguments(tmp_path), "LAMB")
