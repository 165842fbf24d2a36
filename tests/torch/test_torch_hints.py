"""What explain() and the first step say of a model or of rates that were not understood, and that they say no more."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from thalweg.errors import HintWarning  # noqa: E402
from thalweg.torch import LAMB, AdamW, Mixture, kron_adamw, muon_adamw  # noqa: E402

nn = torch.nn
WIDTH = 16


class Holder(nn.Module):
    """Layers and numbers by name."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        for name, value in given.items():
            setattr(self, name, value)


class SelfAttention(Holder):
    pass


class LowRank(Holder):
    """A frozen layer and its adapter, as PEFT makes them."""

    def __init__(self) -> None:
        base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        super().__init__(base=base, lora_A=nn.Linear(WIDTH, 4, bias=False), lora_B=nn.Linear(4, WIDTH, bias=False))


def linear(outputs: int, inputs: int = WIDTH) -> Any:
    return nn.Linear(inputs, outputs, bias=False)


def block(**attention: Any) -> Any:
    return Holder(attn=SelfAttention(**attention), norm=nn.LayerNorm(WIDTH), up=linear(64), down=linear(WIDTH, 64))


def grouped() -> Any:
    """As Llama has it: two heads of keys and values for four of queries, and gates."""
    attn = SelfAttention(q_proj=linear(16), k_proj=linear(8), v_proj=linear(8), o_proj=linear(16))
    mlp = Holder(gate_proj=linear(40), up_proj=linear(40), down_proj=linear(16, 40))
    return Holder(self_attn=attn, mlp=mlp, norm=nn.RMSNorm(WIDTH))


def gpt(blocks: Any, **more: Any) -> Any:
    return Holder(wte=nn.Embedding(50, WIDTH), h=nn.ModuleList(blocks), lm_head=linear(50), **more)


def residual(channels: int, before: int) -> Any:
    convs = nn.Conv2d(before, channels, 3), nn.Conv2d(channels, channels, 3), nn.Conv2d(before, channels, 1)
    return nn.Sequential(convs[0], nn.BatchNorm2d(channels), convs[1], nn.BatchNorm2d(channels), Holder(short=convs[2]))


ORDINARY: dict[str, Callable[[], Any]] = {
    "GPT": lambda: gpt([block(n_head=4, c_attn=linear(48), c_proj=linear(16)) for _ in range(2)]),
    "ViT": lambda: Holder(
        patch_embed=nn.Conv2d(3, WIDTH, 4),
        cls_token=nn.Parameter(torch.zeros(1, 1, WIDTH)),
        blocks=nn.Sequential(*(block(num_heads=4, qkv=linear(48), proj=linear(16)) for _ in range(2))),
        head=linear(10),
    ),
    "ResNet": lambda: Holder(stem=nn.Conv2d(3, 8, 3), a=residual(8, 8), b=residual(24, 8), fc=nn.Linear(24, 10)),
    "Llama": lambda: gpt([grouped(), grouped()]),
    "Llama in a row": lambda: Holder(wte=nn.Embedding(50, 16), layers=nn.Sequential(grouped()), lm_head=linear(50)),
    "LoRA": lambda: gpt([Holder(q_proj=LowRank(), v_proj=LowRank())]),
    "wide": lambda: gpt([Holder(n_head=4, up=linear(48), down=linear(16, 48), o=linear(16))]),
    "MLP": lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)),
}


def step(optimizer: Any, times: int = 1) -> None:
    for p in optimizer.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    for _ in range(times):
        optimizer.step()


def told_by_steps(optimizer: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step(optimizer, 3)
    assert {warning.category for warning in told} <= {HintWarning}
    return [str(warning.message) for warning in told]


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.parametrize("make", [muon_adamw, kron_adamw])
def test_ordinary_models_need_no_hint(make: Any, name: str) -> None:
    optimizer = make(ORDINARY[name]())
    assert optimizer.explain().hints == told_by_steps(optimizer) == []


@pytest.mark.parametrize("name", ["unembed", "readout", "head_out", "policy_out", "critic"])
def test_a_layer_whose_outputs_nothing_takes_is_hinted_at_beside_a_head(name: str) -> None:
    model = gpt([grouped()], **{name: linear(6)})
    optimizer = muon_adamw(model)
    assert f"{name}.weight" in optimizer.param_groups[0]["param_names"]
    (hint,) = optimizer.explain().hints
    assert hint.startswith(f"{name}.weight: no layer takes as many numbers as it makes")
    assert told_by_steps(optimizer) == [hint]  # at the first step alone
    for argument, rule in (("other", "AdamW"), ("first", "Muon")):
        settled = muon_adamw(model, **{argument: [f"{name}.*"]})
        assert told_by_steps(settled) == []
        assert {row.rule for row in settled.explain().rows if row.name == f"{name}.weight"} == {rule}


FUSED: dict[str, tuple[Callable[[], Any], str]] = {
    # as in a tutorial: the layer itself is called attention
    "by its name": (lambda: Holder(attention=linear(48), project=linear(16)), "h.0.attention.weight"),
    "by its class": (lambda: Holder(mixer=SelfAttention(c=linear(48), o=linear(16))), "h.0.mixer.c.weight"),
    "by its parent": (lambda: Holder(attn=Holder(w=linear(48), o=linear(16))), "h.0.attn.w.weight"),
    **{
        heads: (lambda heads=heads: Holder(**{heads: 4}, in_proj=linear(48), o=linear(16)), "h.0.in_proj.weight")
        for heads in ("num_heads", "n_head", "n_heads")
    },
}


@pytest.mark.parametrize("how", FUSED)
def test_three_matrices_in_one_are_hinted_at_where_no_name_tells(how: str) -> None:
    make, name = FUSED[how]
    optimizer = muon_adamw(gpt([make()]))
    (hint,) = optimizer.explain().hints
    assert hint.startswith(f"{name}: it looks like queries, keys and values in one layer")
    assert told_by_steps(optimizer) == [hint]
    assert told_by_steps(kron_adamw(gpt([make()]))) == []  # which needs no blocks
    split = muon_adamw(gpt([make()]), muon=dict(overrides=[(name, dict(split=3))]))
    assert told_by_steps(split) == []
    assert {row.treatment for row in split.explain().rows if row.name == name} == {"3 matrices 16 x 16"}
    assert told_by_steps(muon_adamw(gpt([make()]), first=[name])) == []


# ---- rates


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (dict(lr=3e-4), "the rate 0.0003 is that of Muon, usually 0.02, and AdamW has 4.5e-06, a share of it"),
        (dict(lr=5e-5), "the rate 5e-05 is that of Muon, usually 0.02, and AdamW has 7.5e-07, a share of it"),
        (dict(muon=dict(lr=1e-3)), "the rate 0.001 is that of Muon"),
        (dict(), ""),
        (dict(lr=2e-3), ""),
        (dict(lr=3e-4, adamw_lr=3e-4), ""),
        (dict(lr=3e-4, adamw=dict(lr=3e-4)), ""),
        (dict(lr=3e-4, muon=dict(scaling="match_rms_adamw")), ""),
    ],
    ids=str,
)
def test_a_rate_that_is_meant_for_adamw_is_told(arguments: Any, told: str) -> None:
    optimizer = muon_adamw(gpt([grouped()]), **arguments)
    hints = optimizer.explain().hints
    assert [told in hint for hint in hints] == [True] * bool(told)
    assert told_by_steps(optimizer) == hints


def entries() -> list[Any]:
    return [("weight", LAMB.options(lr=0.02)), ("*", AdamW.options(lr=3e-4))]


def one_for_all(optimizer: Any) -> Any:
    for group in optimizer.param_groups:
        group["lr"] = 0.01


SCHEDULES = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    "schedule",
    [
        one_for_all,
        lambda it: SCHEDULES.OneCycleLR(it, max_lr=0.02, total_steps=10, cycle_momentum=False),
        lambda it: SCHEDULES.CyclicLR(it, base_lr=1e-3, max_lr=0.02, cycle_momentum=False),
        lambda it: torch.optim.swa_utils.SWALR(it, swa_lr=0.01, anneal_epochs=1),
        lambda it: SCHEDULES.CosineAnnealingLR(it, T_max=2, eta_min=1e-3),
    ],
    ids=["a loop over groups", "OneCycleLR", "CyclicLR", "SWALR", "eta_min"],
)
def test_one_rate_for_two_rules_is_told_once(schedule: Any) -> None:
    optimizer = Mixture(nn.Linear(3, 2).named_parameters(), entries())
    scheduler = schedule(optimizer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            step(optimizer)
            if scheduler is not None:
                scheduler.step()
        step(optimizer)
    (message,) = [str(own.message) for own in told if own.category is HintWarning]
    assert message.startswith("LAMB and AdamW had different learning rates, and now have the same, 0.0")


@pytest.mark.parametrize(
    "schedule",
    [
        lambda it: SCHEDULES.LambdaLR(it, lambda t: t / 2),  # from 0
        lambda it: SCHEDULES.LinearLR(it, 1.0, 0.0, total_iters=2),
        lambda it: SCHEDULES.CosineAnnealingLR(it, T_max=2),
        lambda it: SCHEDULES.OneCycleLR(it, max_lr=[0.02, 3e-4], total_steps=10, cycle_momentum=False),
        lambda it: it.param_groups[0].update(lr=0.01),
    ],
    ids=["warm-up", "to 0", "cosine", "a rate for each group", "one group"],
)
def test_rates_that_stay_apart_are_not_told(schedule: Any) -> None:
    optimizer = Mixture(nn.Linear(3, 2).named_parameters(), entries())
    scheduler = schedule(optimizer)
    for _ in range(4):
        step(optimizer)
        if scheduler is not None:
            scheduler.step()


def test_rules_may_have_one_rate_from_the_start() -> None:
    assert told_by_steps(kron_adamw(gpt([grouped()]), lr=0.01)) == []


def test_the_table_of_a_mixture_always_tells_rules() -> None:
    model = LowRank()
    optimizer = muon_adamw(model, first=["lora_*"])
    assert {row.rule for row in optimizer.explain().rows} == {"Muon"}
    lines = str(optimizer.explain()).splitlines()
    assert lines[0].split() == ["name", "shape", "dtype", "rule", "treatment", "lr", "scale", "decay", "state", "bytes"]
    assert "group 0: Muon, 2 stepped and 1 frozen, lr 0.02" in lines
    assert " rule " not in str(AdamW(model.named_parameters(), lr=0.1).explain())
