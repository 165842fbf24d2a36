"""Ready-made mixtures: which parameters are hidden matrices, and what all others are."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tolerances import FLOAT64  # noqa: E402

from thalweg.errors import OptionError, ParameterError, UnusedOverrideWarning  # noqa: E402
from thalweg.torch import LAMB, AdamW, Muon, kron_adamw, muon_adamw  # noqa: E402
from thalweg.torch.routing import OTHER, roles_of  # noqa: E402

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


class Telling(Decoder):
    def get_output_embeddings(self) -> Any:
        return self.blocks[0].heads[0]


def test_models_of_other_kinds() -> None:
    found = roles(kron_adamw(Telling(head=""), weight_decay=0.1))
    assert found["AdamW"] == ["blocks.0.heads.0.weight", "pos_embed", "wte.weight"]
    row = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2))
    found = roles(kron_adamw(row, weight_decay=0.1))
    assert (found["Kron"], found["AdamW"]) == (["0.weight", "2.weight"], ["3.weight"])
    found = roles(muon_adamw(Decoder(), weight_decay=0.1))
    assert (found["Muon"], found["AdamW without decay"]) == (HIDDEN, VECTORS)


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


MATCHED = dict(scaling="match_rms_adamw")


@pytest.mark.parametrize(
    ("recipe", "arguments", "expected"),
    [
        (muon_adamw, dict(), (0.02, 3e-4)),
        (muon_adamw, dict(lr=0.04), (0.04, 6e-4)),
        (muon_adamw, dict(muon=dict(lr=0.04)), (0.04, 6e-4)),
        (muon_adamw, dict(lr=1e-3, muon=MATCHED), (1e-3, 1e-3)),
        (muon_adamw, dict(lr=1e-3, muon=dict(variant="moonlight")), (1e-3, 1e-3)),
        (muon_adamw, dict(muon=MATCHED), (3e-4, 3e-4)),
        (muon_adamw, dict(lr=1e-3, adamw_lr=0.5, muon=MATCHED), (1e-3, 0.5)),
        (muon_adamw, dict(lr=0.04, adamw_lr=0.5), (0.04, 0.5)),
        (muon_adamw, dict(adamw_lr=0.5), (0.02, 0.5)),
        (kron_adamw, dict(), (3e-4, 3e-4)),
        (kron_adamw, dict(lr=1e-3), (1e-3, 1e-3)),
    ],
)
def test_the_rate_of_adamw_follows_from_that_of_matrices(recipe: Any, arguments: Any, expected: Any) -> None:
    optimizer = recipe(Decoder(), **arguments)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([expected[0], expected[1], expected[1]])
    told = str(optimizer.explain())
    assert all(f"lr {rate:.6g}" in told for rate in expected)


def test_what_is_refused() -> None:
    with pytest.raises(
        ParameterError, match=r"kron_adamw needs the model itself.*got generator: write kron_adamw\(model\)"
    ):
        kron_adamw(Decoder().parameters())
    with pytest.raises(OptionError, match="first must be a list of patterns"):
        kron_adamw(Decoder(), first="*.weight")
    with pytest.raises(OptionError, match="Kron has no option 'betas'"):
        kron_adamw(Decoder(), kron=dict(betas=(0.5, 0.5)))


# ---- output layers


class Model(nn.Module):
    """Layers by name, in the order in which they are given."""

    def __init__(self, **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)


def body() -> Any:
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 16))


@pytest.mark.parametrize(
    ("layers", "outputs"),
    [
        (dict(to_answer=nn.Linear(16, 5), body=body()), {"to_answer.weight"}),
        (dict(head=nn.Conv2d(16, 5, 1), stem=nn.Conv2d(3, 16, 3)), {"head.weight"}),
        (dict(end=nn.Conv2d(16, 5, 1), stem=nn.Conv2d(3, 16, 3)), {"end.weight"}),
        (dict(policy_head=nn.Linear(16, 5), value=nn.Linear(16, 3), body=body()), {"policy_head.weight"}),
        (dict(policy=nn.Sequential(nn.Linear(16, 20), nn.Linear(20, 4)), body=body()), {"policy.1.weight"}),
        (dict(heads=nn.ModuleDict(dict(a=nn.Linear(16, 3), b=nn.Linear(16, 4)))), {"heads.a.weight", "heads.b.weight"}),
        (dict(classifier=Model(dense=nn.Linear(16, 16), out_proj=nn.Linear(16, 3))), {"classifier.out_proj.weight"}),
        (dict(to_words=nn.Linear(8, 30), words=nn.Embedding(30, 8), body=body()), {"to_words.weight", "words.weight"}),
        (dict(fc1=nn.Linear(6, 20), fc2=nn.Linear(20, 20), fc3=nn.Linear(20, 4)), {"fc3.weight"}),
        (dict(conv=nn.Conv2d(3, 16, 5), fc1=nn.Linear(400, 32), fc2=nn.Linear(32, 4)), {"fc2.weight"}),
        (
            dict(fc=nn.Linear(10, 128 * 49), up=nn.ConvTranspose2d(128, 16, 4), last=nn.Conv2d(16, 3, 3)),
            {"last.weight"},
        ),
        (dict(body=body(), norm=nn.LayerNorm(16)), set()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_output_layers(layers: dict[str, Any], outputs: set[str]) -> None:
    assert {name for name, role in roles_of(Model(**layers)).items() if role.role == OTHER} == outputs


# ---- matrices in one tensor


class Experts(nn.Module):
    def __init__(self, experts: int, inner: int, outer: int, *, transposed: bool = False) -> None:
        super().__init__()
        up, down = (experts, 2 * inner, outer), (experts, outer, inner)
        turned = [(shape[0], shape[2], shape[1]) if transposed else shape for shape in (up, down)]
        self.gate_up_proj, self.down_proj = (nn.Parameter(0.1 * torch.randn(shape)) for shape in turned)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts(transposed: bool) -> None:
    turned = dict(transposed=True) if transposed else {}
    axis = dict(split_axis=1) if transposed else {}
    found = roles_of(Model(experts=Experts(4, 12, 8, transposed=transposed), gate=nn.Linear(8, 4)))
    assert (found["gate.weight"].role, found["experts.gate_up_proj"].hint) == (OTHER, "")
    assert found["experts.gate_up_proj"].options == dict(stacked_axes=1, split=2, **axis, **turned)
    assert found["experts.down_proj"].options == dict(stacked_axes=1, **turned)


def test_a_stack_that_no_module_tells_of_is_hinted_at() -> None:
    model = Model(mixer=Model(banks=nn.Parameter(torch.ones(4, 12, 8)), table=nn.Parameter(torch.ones(4, 8))))
    model.mixer.core = nn.Parameter(torch.ones(3, 5))
    told = muon_adamw(model).explain()
    assert {row.rule for row in told.rows} == {"AdamW"}
    assert len(told.hints) == 2
    assert "mixer.banks: it has three axes, and no module tells" in str(told)
    assert "hint: mixer.core: no module tells what it is: by AdamW" in str(told)


def test_one_rule_hints_at_stacks() -> None:
    model = Model(experts=Experts(4, 12, 8), conv=nn.Conv1d(4, 8, 3))
    hints = LAMB(model.named_parameters(), lr=0.1).explain().hints
    assert len(hints) == 1
    assert "experts.gate_up_proj, experts.down_proj: taken for one tensor" in hints[0]
    assert "dict(stacked_axes=1)" in hints[0]
    stacked = LAMB(model.named_parameters(), lr=0.1, overrides=[("experts.*", dict(stacked_axes=1))])
    assert stacked.explain().hints == AdamW(model.named_parameters(), lr=0.1).explain().hints == []


def test_kron_knows_stacks_and_needs_no_blocks() -> None:
    optimizer = kron_adamw(Model(experts=Experts(4, 12, 8)))
    assert [row.treatment for row in optimizer.explain().rows] == [
        "factors diagonal 24, dense 8",
        "factors dense 8, diagonal 12",
    ]


class Conv1D(nn.Module):
    """As transformers has it: the weight is stored as (in, out)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs, dtype=torch.float64))


@pytest.mark.parametrize("scaling", ["original", "match_rms_adamw"])
def test_a_layer_stored_as_in_out_steps_as_its_twin(scaling: str) -> None:
    """GPT-2's layers, and the same ones as nn.Linear."""
    torch.manual_seed(0)
    sizes = dict(c_attn=(24, 8), c_fc=(32, 8), c_proj=(8, 32))
    attention = dict(num_heads=2, head_dim=4)
    turned = Model(block=Model(**attention, **{name: Conv1D(*size) for name, size in sizes.items()}))
    plain = Model(block=Model(**attention, **{name: nn.Linear(i, o, bias=False) for name, (o, i) in sizes.items()}))
    plain.double()
    optimizers = [
        muon_adamw(model, first=["*"], muon=dict(scaling=scaling, ns_dtype=None)) for model in (turned, plain)
    ]
    for name, p in plain.named_parameters():
        with torch.no_grad():
            turned.get_parameter(name).copy_(p.T)
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    for _ in range(3):
        for name, p in plain.named_parameters():
            p.grad = torch.randn_like(p)
            turned.get_parameter(name).grad = p.grad.T.contiguous()
        for optimizer in optimizers:
            optimizer.step()
    for name, p in plain.named_parameters():
        moved = (p - before[name]).abs().max()
        assert (turned.get_parameter(name).T - p).abs().max() < FLOAT64 * moved, name


def test_fused_attention_is_split_where_its_sizes_are_told() -> None:
    """Grouped queries, keys and values in one matrix."""
    sizes = dict(num_heads=4, num_key_value_heads=2, head_dim=3)
    fused = Model(attention=Model(**sizes, qkv_proj=nn.Linear(8, 24, bias=False), o_proj=nn.Linear(12, 8)))
    assert roles_of(fused)["attention.qkv_proj.weight"].options == dict(split=(12, 6, 6))
    unknown = Model(attention=Model(qkv_proj=nn.Linear(8, 22, bias=False), o_proj=nn.Linear(12, 8)))
    found = roles_of(unknown)["attention.qkv_proj.weight"]
    assert found.role == OTHER
    assert "several fused matrices" in found.hint


# ---- patterns and messages


@pytest.mark.parametrize("argument", ["first", "other"])
def test_a_pattern_that_matches_nothing_is_told(argument: str) -> None:
    with pytest.warns(
        UnusedOverrideWarning, match=rf"patterns in {argument} that match no parameter: '\*\.wieght'"
    ) as told:
        muon_adamw(Decoder(), **{argument: ["*.wieght", "*.gate.weight"] if argument == "other" else ["*.wieght"]})
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(muon_lr=0.1), "has no argument 'muon_lr': write lr, the rate of Muon; adamw_lr is that of AdamW"),
        (dict(betas=(0.9, 0.95)), r"has no argument 'betas': write adamw=dict\(betas=...\)"),
        (dict(momentum=0.9), r"has no argument 'momentum': write muon=dict\(momentum=...\)$"),
        (dict(ns_steps=3), r"write muon=dict\(ns_steps=...\)$"),
        (dict(max_grad_nrom=1.0), "write 'max_grad_norm'"),
        (dict(frobnicate=1), "it has overrides, maximize"),
    ],
    ids=str,
)
def test_arguments_of_rules_are_sent_where_they_belong(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        muon_adamw(Decoder(), **arguments)


def test_parameters_of_another_model_need_a_rule() -> None:
    optimizer, more = muon_adamw(Decoder()), nn.Linear(3, 3)
    with pytest.raises(ParameterError, match=r"'more.weight' is not of the model .*\"rule\": 'Muon' or 'AdamW'"):
        optimizer.add_param_group({"params": [("more.weight", more.weight)]})
    assert len(optimizer.param_groups) == 3
    optimizer.add_param_group({"params": [("more.weight", more.weight)], "rule": "Muon"})
    assert optimizer.param_groups[3]["rule"] == "Muon"


@pytest.mark.parametrize("make", [muon_adamw, kron_adamw])
def test_what_is_around_a_rule_is_around_both(make: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 2))
    optimizer = make(model, lr=0.02, averaged=0.5, cautious=True)
    assert all(group["averaged"] == 0.5 and group["cautious"] is True for group in optimizer.param_groups)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    after = [p.detach().clone() for p in model.parameters()]
    with optimizer.averaged():
        for p, old, new in zip(model.parameters(), before, after, strict=True):
            assert torch.allclose(p, 0.5 * (old + new), atol=1e-7)
    apart = make(model, averaged=0.5, adamw=dict(averaged=None))
    assert {group.get("averaged") for group in apart.param_groups if group["rule"] == "AdamW"} == {None}
