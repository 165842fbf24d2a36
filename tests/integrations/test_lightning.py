"""Lightning: optimizers by class path, by callables with names, and mixtures with names for the monitor of rates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from lightning.pytorch.loggers import CSVLogger
from networks import equal as are_equal
from networks import values as numbers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thalweg import OptionError
from thalweg.integrations.lightning import Averages, MixtureOf
from thalweg.torch import LAMB, Adafactor, Kron

QUIET = dict(
    accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, logger=False
)


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def training_step(self, batch: Any, index: int) -> Any:
        return self.net(batch[0]).square().mean()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)


class ByParameters(Plain):
    def __init__(self, optimizer: OptimizerCallable = LAMB) -> None:
        super().__init__()
        self.make = optimizer

    def configure_optimizers(self) -> Any:
        return self.make(self.named_parameters())


class ByModule(Plain):
    def __init__(self, optimizer: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.make = optimizer

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fitted(module: type[pl.LightningModule], folder: Path, **config: Any) -> Any:
    """The optimizer of a run that is configured as by a file."""
    file = folder / "config.yaml"
    file.write_text(json.dumps({"trainer": {**QUIET, "max_steps": 2}, **config}))  # JSON is YAML
    cli = LightningCLI(module, args=["fit", "--config", str(file)], save_config_callback=None)
    return cli.trainer.optimizers[0]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LAMB, dict(lr=0.01, betas=[0.8, 0.9], trust=False, max_grad_norm=1.0)),
        (Adafactor, dict(lr=None, eps=[1e-30, 1e-2])),
        (Kron, dict(lr=0.01, precond_update_probability=0.5, state_dtype="bfloat16")),
    ],
)
def test_a_class_path_and_its_options_are_read_from_a_file(kind: Any, options: dict, tmp_path: Path) -> None:
    given = {"class_path": f"thalweg.torch.{kind.__name__}", "init_args": options}
    optimizer = fitted(Plain, tmp_path, optimizer=given)
    assert type(optimizer) is kind
    shown = {**options, "lr": options["lr"] or 1.0}
    group = {name: list(v) if isinstance(v, tuple) else v for name, v in optimizer.param_groups[0].items()}
    assert {name: group[name] for name in shown} == shown


def test_names_reach_overrides_by_a_callable_and_their_want_is_told_without(tmp_path: Path) -> None:
    options = dict(lr=0.01, overrides=[["*.bias", dict(trust=False)]])
    given = {"class_path": "thalweg.torch.LAMB", "init_args": options}
    optimizer = fitted(ByParameters, tmp_path, model={"optimizer": given})
    assert not optimizer.explain().unused_overrides
    assert optimizer.param_groups[0]["param_names"][1] == "net.0.bias"
    with pytest.raises(OptionError, match=r"overrides by name .* need a name for every parameter"):
        fitted(Plain, tmp_path, optimizer=given)


def test_a_mixture_of_a_file_has_groups_that_the_monitor_names(tmp_path: Path) -> None:
    given = {"recipe": "kron_adamw", "options": {"lr": 0.01, "adamw_lr": 0.002}}
    path = "thalweg.integrations.lightning.MixtureOf"
    optimizer = fitted(ByModule, tmp_path, model={"optimizer": {"class_path": path, "init_args": given}})
    assert [group["name"] for group in optimizer.param_groups] == ["Kron", "AdamW", "AdamW 2"]
    monitor = LearningRateMonitor("step")
    beside = dict(max_steps=2, log_every_n_steps=1, callbacks=[monitor], logger=CSVLogger(tmp_path))
    pl.Trainer(**{**QUIET, **beside}).fit(ByModule(MixtureOf(**given)))
    assert monitor.lrs == {
        "lr-Mixture/Kron": [0.01, 0.005],
        "lr-Mixture/AdamW": [0.002, 0.001],
        "lr-Mixture/AdamW 2": [0.002, 0.001],
    }


def test_a_recipe_of_another_name_is_told() -> None:
    with pytest.raises(OptionError, match="recipe must be one of kron_adamw, muon_adamw, got 'kron'"):
        MixtureOf("kron")


# ---- averages


class Evaluated(Plain):
    """A module with averages, which notes what it is evaluated at."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def validation_step(self, batch: Any, index: int) -> Any:
        self.seen.append(numbers(self))

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def configure_optimizers(self) -> Any:
        return LAMB(self.named_parameters(), lr=0.05, averaged=0.5)


def averaging(folder: Path, resume: str | None = None, **given: Any) -> tuple[Evaluated, Any]:
    torch.manual_seed(0)
    module = Evaluated()
    trainer = pl.Trainer(
        **{**QUIET, "enable_checkpointing": True, "default_root_dir": folder, "max_epochs": 4, **given}
    )
    trainer.fit(module, ckpt_path=resume)
    return module, trainer


def test_fit_evaluates_and_saves_averages_and_trains_weights(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=3, filename="{step}")
    module, trainer = averaging(tmp_path, callbacks=[Averages(), saving])
    plain, without = averaging(tmp_path, num_sanity_val_steps=0, limit_val_batches=0)
    with without.optimizers[0].averaged():
        assert are_equal(module.seen[-1], numbers(plain))
    assert are_equal(module.seen[-1], numbers(module)), "training leaves averages"
    saved = torch.load(tmp_path / "step=6.ckpt", weights_only=True)["state_dict"]
    assert are_equal(module.seen[-3], list(saved.values())), "of epoch 2, in which step 6 is the last"
    again, resumed = averaging(tmp_path, str(tmp_path / "step=3.ckpt"), callbacks=[Averages()])
    assert are_equal(numbers(again), numbers(module))
    trainer.validate(module, verbose=False)
    assert are_equal(module.seen[-1], numbers(again))
    for optimizer in (trainer.optimizers[0], resumed.optimizers[0]):
        optimizer.train()
    assert are_equal(numbers(again), numbers(module))
    assert are_equal(numbers(plain), numbers(module))


def test_a_checkpoint_of_averages_is_not_trained_on_without_the_callback(tmp_path: Path) -> None:
    _, trainer = averaging(tmp_path, callbacks=[Averages()])
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(OptionError, match=r"in eval mode: .* call train\(\)"):
        averaging(tmp_path, str(tmp_path / "last.ckpt"), max_epochs=5)
