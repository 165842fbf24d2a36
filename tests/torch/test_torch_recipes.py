"""Ready-made mixtures: which parameters are hidden matrices, and what all others are."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from thalweg.errors import OptionError, ParameterError  # noqa: E402
from thalweg.torch import kron_adamw, muon_adamw  # noqa: E402

nn = torch.nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((2, 4))  # weights of two axes
        self.attention = nn.MultiheadAttention(8, 2)
        self.heads = nn.ModuleList([nn.Linear(8, 4, bias=False)])
        self.gate = nn.Linear(8, 1)


class Decoder(nn.Module):
    def __init__(self, *, tied: bool = False, head: str = "lm_head") -> None:
        super().__init__()
        self.wte, self.pos_embed = nn.Embedding(10, 8), nn.Parameter(torch.zeros(2, 8))
        self.blocks = nn.ModuleList([Block()])
        if head:
            setattr(self, head, nn.Linear(8, 10, bias=False))
        if tied:
            self.lm_head.weight = self.wte.weight


def roles(optimizer: Any) -> dict[str, list[str]]:
    rules: dict[str, list[str]] = {}
    for group in optimizer.param_groups:
        kind = group["rule"] + (" without decay" if group["weight_decay"] == 0.0 else "")
        rules[kind] = sorted(group["param_names"])
    return rules


HIDDEN = ["blocks.0.attention.in_proj_weight", "blocks.0.attention.out_proj.weight", "blocks.0.heads.0.weight"]
VECTORS = [
    *("blocks.0.attention.in_proj_bias", "blocks.0.attention.out_proj.bias", "blocks.0.gate.bias"),
    *("blocks.0.gate.weight", "blocks.0.norm.bias", "blocks.0.norm.weight"),
]


@pytest.mark.parametrize(
    ("model", "others"),
    [
        (Decoder(), ["lm_head.weight", "pos_embed", "wte.weight"]),
        (Decoder(tied=True), ["pos_embed", "wte.weight"]),
        (Decoder(head=""), ["pos_embed", "wte.weight"]),
        (Decoder(head="to_words"), ["pos_embed", "to_words.weight", "wte.weight"]),
    ],
    ids=["head", "tied head", "no head", "last linear layer"],
)
def test_roles(model: Any, others: list[str]) -> None:
    optimizer = kron_adamw(model, weight_decay=0.1)
    assert roles(optimizer) == {"Kron": HIDDEN, "AdamW": others, "AdamW without decay": VECTORS}
    assert optimizer.param_groups[0]["weight_decay_mode"] == "decoupled"
    assert {row.name for row in optimizer.explain().rows if row.rule == "Kron"} == set(HIDDEN)


def test_a_model_that_tells_its_output_layer() -> None:
    class Telling(Decoder):
        def get_output_embeddings(self) -> Any:
            return self.blocks[0].heads[0]

    found = roles(kron_adamw(Telling(head=""), weight_decay=0.1))
    assert found["AdamW"] == ["blocks.0.heads.0.weight", "pos_embed", "wte.weight"]


def test_layers_in_a_row() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2))
    found = roles(kron_adamw(net, weight_decay=0.1))
    assert (found["Kron"], found["AdamW"]) == (["0.weight", "2.weight"], ["3.weight"])


def test_patterns_decide_first() -> None:
    optimizer = kron_adamw(
        Decoder(),
        weight_decay=0.1,
        first=["pos_embed", "*.gate.*"],
        other=[re.compile("out_proj"), lambda name, p: name == "pos_embed"],
    )
    found = roles(optimizer)
    assert found["Kron"] == sorted([HIDDEN[0], HIDDEN[2], "blocks.0.gate.bias", "blocks.0.gate.weight", "pos_embed"])
    assert found["AdamW"] == sorted([HIDDEN[1], "lm_head.weight", "wte.weight"])


def test_options_and_arguments() -> None:
    optimizer = kron_adamw(
        Decoder(),
        0.02,
        0.03,
        kron=dict(momentum=0.5),
        adamw=dict(betas=(0.5, 0.6)),
        max_grad_norm=1.0,
        engine="foreach",
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.03, 0.03]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.01, 0.0]  # each rule's own
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[2]["betas"]) == (0.5, (0.5, 0.6))
    assert {group["max_grad_norm"] for group in optimizer.param_groups} == {1.0}
    assert optimizer.engine == "foreach"


def test_what_is_refused() -> None:
    with pytest.raises(ParameterError, match="this needs a model"):
        kron_adamw(Decoder().parameters())
    with pytest.raises(OptionError, match="first must be a list of patterns"):
        kron_adamw(Decoder(), first="*.weight")
    with pytest.raises(OptionError, match="Kron has no option 'betas'"):
        kron_adamw(Decoder(), kron=dict(betas=(0.5, 0.5)))


def test_muon() -> None:
    found = roles(muon_adamw(Decoder(), weight_decay=0.1))
    assert (found["Muon"], found["AdamW without decay"]) == (HIDDEN, VECTORS)
