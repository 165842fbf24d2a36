"""timm's factory with rules by name."""

from __future__ import annotations

import logging

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import CosineLRScheduler
from torch import nn

from thalweg import OptionError
from thalweg.integrations.timm import register
from thalweg.rules import RULES, SGD


def small() -> nn.Module:
    torch.manual_seed(0)
    shape = dict(depth=1, embed_dim=8, num_heads=2, img_size=32, num_classes=4)
    return timm.create_model("vit_tiny_patch16_224", **shape)


def test_registering_twice_is_as_registering_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert register() == register()
    assert sorted(register()) == list_optimizers("thalweg*")
    assert not caplog.records
    assert not any("_" in name for name in register())


def test_a_name_means_the_rule_that_was_registered_last_and_never_one_of_the_package() -> None:
    register()
    with pytest.raises(OptionError, match="two optimizers by one name, 'thalweglamb': give your rule another name"):
        register(type("Lamb", (SGD,), {}))
    for _ in range(2):
        mine = type("Mine", (SGD,), {})
        register(mine)
        assert create_optimizer_v2(nn.Linear(2, 2), "thalwegmine", lr=0.1).rule is mine


@pytest.mark.parametrize("name", ["lars", "adafactor", "kron", "lamb", "muonadamw"])
def test_a_model_is_stepped_with_layer_decay(name: str) -> None:
    model = small()
    register()
    optimizer = create_optimizer_v2(model, f"thalweg{name}", lr=0.1, weight_decay=0.05, layer_decay=0.5)
    scheduler = CosineLRScheduler(optimizer, 10)
    scheduler.step(0)
    before = [p.clone() for p in model.parameters()]
    model(torch.ones(2, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    scales = {group["lr_scale"] for group in optimizer.param_groups}
    assert scales == {0.25, 0.5, 1.0}
    for group in optimizer.param_groups:
        share = 3e-4 / 0.02 if name == "muonadamw" and group["rule"] == "AdamW" else 1.0
        assert group["lr"] == pytest.approx(0.1 * group["lr_scale"] * share)
        assert group["weight_decay"] in (0.0, 0.05)
        assert group.get("momentum") == {"lars": 0.9, "kron": 0.9, "muonadamw": group.get("momentum")}.get(name)


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        (dict(lr=1e-3, scaling="match_rms_adamw"), {"Muon": 1e-3, "AdamW": 1e-3}),
        (dict(lr=0.1), {"Muon": 0.1, "AdamW": 1.5e-3}),
        (dict(lr=None), {"Muon": 0.02, "AdamW": 3e-4}),
        (dict(lr=None, scaling="match_rms_adamw"), {"Muon": 3e-4, "AdamW": 3e-4}),
    ],
)
def test_the_rate_of_adamw_follows_from_the_rate_that_timm_is_given(given: dict, rates: dict) -> None:
    register()
    optimizer = create_optimizer_v2(small(), "thalwegmuonadamw", **given)
    for group in optimizer.explain().groups:
        assert float(group.lr) == pytest.approx(rates[group.rule])


def test_parameters_marked_for_fallback_go_to_adamw_in_a_mixture_and_are_refused_elsewhere() -> None:
    register()
    model = small()
    mixed = create_optimizer_v2(model, "thalwegkronadamw", lr=0.1, fallback_list=["head*", "patch_embed*"])
    by_kron = {id(p) for group in mixed.param_groups if group["rule"] == "Kron" for p in group["params"]}
    hidden = {id(p) for name, p in model.blocks.named_parameters() if p.ndim == 2}
    assert by_kron == hidden
    with pytest.raises(OptionError, match="use_fallback=True asks for AdamW in place of Muon"):
        create_optimizer_v2(nn.Linear(2, 2, bias=False), "thalwegmuon", lr=0.1, fallback_list=["weight"])


def test_every_rule_has_the_arguments_that_timm_asks_about() -> None:
    register()
    model = nn.Linear(4, 4, bias=False)
    for rule in RULES:
        create_optimizer_v2(model, f"thalweg{rule.lower()}", lr=0.1, eps=1e-5, betas=(0.8, 0.9), weight_decay=0.1)
