"""Ready-made mixtures: which parameters are hidden matrices, what all others are, and what is hinted at or refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, OF_TORCH
from families import make as make_family

from thalweg.errors import HintWarning, OptionError, ParameterError, UnusedOverrideWarning
from thalweg.torch import LAMB, AdamW, Mixture, kron_adamw, muon_adamw
from thalweg.torch.routing import HIDDEN, OTHER, roles_of

nn = torch.nn
WIDTH = 16
EITHER = pytest.mark.parametrize("make", [muon_adamw, kron_adamw])


class Model(nn.Module):
    """Layers and numbers by name, in the order in which they are given."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        for name, value in given.items():
            setattr(self, name, value)


class SelfAttention(Model):
    pass


class LowRank(Model):
    """A frozen layer and its adapter, as PEFT makes them."""

    def __init__(self) -> None:
        base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        super().__init__(base=base, lora_A=nn.Linear(WIDTH, 4, bias=False), lora_B=nn.Linear(4, WIDTH, bias=False))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.randn(shape)) for shape in ((4, 24, 8), (4, 8, 12)))


class Decoder(nn.Module):
    def __init__(self, *, tied: bool = False, head: str = "lm_head") -> None:
        super().__init__()
        self.wte, self.pos_embed = nn.Embedding(10, 8), nn.Parameter(torch.zeros(2, 8))
        norm = nn.LayerNorm((2, 4))  # weights of two axes
        heads = nn.ModuleList([nn.Linear(8, 4, bias=False)])
        block = Model(norm=norm, attention=nn.MultiheadAttention(8, 2), heads=heads, gate=nn.Linear(8, 1))
        self.blocks = nn.ModuleList([block])
        if head:
            setattr(self, head, nn.Linear(8, 10, bias=False))
        if tied:
            self.lm_head.weight = self.wte.weight


class Telling(Decoder):
    def get_output_embeddings(self) -> Any:
        return self.blocks[0].heads[0]


def linear(outputs: int, inputs: int = WIDTH) -> Any:
    return nn.Linear(inputs, outputs, bias=False)


def grouped() -> Any:
    """As Llama has it: two heads of keys and values for four of queries, and gates."""
    attn = SelfAttention(q_proj=linear(16), k_proj=linear(8), v_proj=linear(8), o_proj=linear(16))
    mlp = Model(gate_proj=linear(40), up_proj=linear(40), down_proj=linear(16, 40))
    return Model(self_attn=attn, mlp=mlp, norm=nn.RMSNorm(WIDTH))


def gpt(blocks: Any, **more: Any) -> Any:
    return Model(wte=nn.Embedding(50, WIDTH), h=nn.ModuleList(blocks), lm_head=linear(50), **more)


def body() -> Any:
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 16))


# ---- roles


def roles(optimizer: Any) -> dict[str, list[str]]:
    rules: dict[str, list[str]] = {}
    for group in optimizer.param_groups:
        kind = group["rule"] + (" without decay" if group["weight_decay"] == 0.0 else "")
        rules[kind] = sorted(group["param_names"])
    return rules


MATRICES = ["blocks.0.attention.in_proj_weight", "blocks.0.attention.out_proj.weight", "blocks.0.heads.0.weight"]
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
    assert roles(optimizer) == {"Kron": MATRICES, "AdamW": others, "AdamW without decay": VECTORS}
    assert optimizer.param_groups[0]["weight_decay_mode"] == "decoupled"
    assert {row.name for row in optimizer.explain().rows if row.rule == "Kron"} == set(MATRICES)
    found = roles(muon_adamw(model, weight_decay=0.1))
    assert (found["Muon"], found["AdamW without decay"]) == (MATRICES, VECTORS)


@pytest.mark.parametrize(
    ("model", "outputs"),
    [
        (Telling(head=""), {"blocks.0.heads.0.weight", "pos_embed", "wte.weight"}),
        (nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2)), {"3.weight"}),
        (Model(to_answer=nn.Linear(16, 5), body=body()), {"to_answer.weight"}),
        (Model(head=nn.Conv2d(16, 5, 1), stem=nn.Conv2d(3, 16, 3)), {"head.weight"}),
        (Model(end=nn.Conv2d(16, 5, 1), stem=nn.Conv2d(3, 16, 3)), {"end.weight"}),
        (Model(policy_head=nn.Linear(16, 5), value=nn.Linear(16, 3), body=body()), {"policy_head.weight"}),
        (Model(policy=nn.Sequential(nn.Linear(16, 20), nn.Linear(20, 4)), body=body()), {"policy.1.weight"}),
        (Model(heads=nn.ModuleDict(dict(a=linear(3), b=linear(4)))), {"heads.a.weight", "heads.b.weight"}),
        (Model(classifier=Model(dense=linear(16), out_proj=linear(3))), {"classifier.out_proj.weight"}),
        (Model(to_words=nn.Linear(8, 30), words=nn.Embedding(30, 8), body=body()), {"to_words.weight", "words.weight"}),
        (Model(fc1=nn.Linear(6, 20), fc2=nn.Linear(20, 20), fc3=nn.Linear(20, 4)), {"fc3.weight"}),
        (Model(conv=nn.Conv2d(3, 16, 5), fc1=nn.Linear(400, 32), fc2=nn.Linear(32, 4)), {"fc2.weight"}),
        (Model(fc=linear(6272), up=nn.ConvTranspose2d(128, 16, 4), last=nn.Conv2d(16, 3, 3)), {"last.weight"}),
        (Model(body=body(), norm=nn.LayerNorm(16)), set()),
    ],
    ids=lambda value: " ".join(sorted(value)) if isinstance(value, set) else "",
)
def test_output_layers(model: Any, outputs: set[str]) -> None:
    assert {name for name, role in roles_of(model).items() if role.role == OTHER} == outputs


def test_matrices_in_one_tensor() -> None:
    """Of grouped queries, and of experts that are stored the other way round. Others: the table's families, below."""
    experts = Experts()
    experts.gate_up_proj, experts.down_proj = (nn.Parameter(p.mT.detach()) for p in experts.parameters())
    found = {name: role.options for name, role in roles_of(Model(experts=experts)).items()}
    stacked = dict(stacked_axes=1, transposed=True)
    assert found["experts.gate_up_proj"] == dict(stacked, split=2, split_axis=1)
    assert found["experts.down_proj"] == stacked
    layers = dict(qkv_proj=linear(24, 8), o_proj=linear(8, 12))
    model = Model(attention=Model(num_heads=4, num_key_value_heads=2, head_dim=3, **layers), gate=linear(4, 8))
    assert roles_of(model)["attention.qkv_proj.weight"].options == dict(split=(12, 6, 6))


def test_fused_matrices_of_unknown_sizes_are_left_to_adamw() -> None:
    unknown = Model(attention=Model(qkv_proj=linear(22, 8), o_proj=linear(8, 12)), experts=Experts(), gate=linear(4, 8))
    found = roles_of(unknown)
    assert found["attention.qkv_proj.weight"].role == found["gate.weight"].role == OTHER
    assert "several fused matrices" in found["attention.qkv_proj.weight"].hint
    assert found["experts.gate_up_proj"].hint == ""


def test_kron_knows_stacks_and_needs_no_blocks() -> None:
    optimizer = kron_adamw(Model(experts=Experts()))
    assert [row.treatment for row in optimizer.explain().rows] == [
        "factors diagonal 24, dense 8",
        "factors dense 8, diagonal 12",
    ]


# ---- the table in docs/mixtures.md


def row_of(family: str) -> str:
    """A row of the table: what Muon does not take for one matrix as it lies, and what AdamW takes with decay."""
    turned: dict[str, dict[str, None]] = {}
    others: dict[str, None] = {}
    roles = roles_of(make_family(family))
    assert not any(role.hint for role in roles.values() if role.role == HIDDEN)
    for name, role in roles.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        # the sizes of a tiny model say nothing of another: those of fused blocks are told by their number
        shown = {
            key: f"{len(value)} sizes" if isinstance(value, tuple) else value for key, value in role.options.items()
        }
        if role.role == HIDDEN and shown:
            turned.setdefault(", ".join(f"{key}={value}" for key, value in shown.items()), {})[f"`{pattern}`"] = None
        if role.role == OTHER:
            others[f"`{pattern}`" + (" (hint)" if role.hint else "")] = None
    options = "; ".join(f"{', '.join(names)}: {said}" for said, names in turned.items())
    return f"| {family} | {options} | {', '.join(others)} |"


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in OF_TORCH else pytest.mark.slow) for name in FAMILIES]
)
def test_the_table_tells_what_is_done(family: str) -> None:
    if family not in OF_TORCH:
        pytest.importorskip("transformers")
    page = Path(__file__).parents[2] / "docs" / "mixtures.md"
    rows = {line.split(" | ")[0].strip("| "): line for line in page.read_text().splitlines() if line.startswith("| ")}
    assert rows[family] == row_of(family)


# ---- hints


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


#: Beside the families of the table, of which none has a hint at a hidden matrix.
ORDINARY: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: gpt([Model(q_proj=LowRank(), v_proj=LowRank())]),
    "MLP": lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)),
}


@pytest.mark.parametrize("name", ORDINARY)
@EITHER
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
    "by its name": (lambda: Model(attention=linear(48), project=linear(16)), "h.0.attention.weight"),
    "by its class": (lambda: Model(mixer=SelfAttention(c=linear(48), o=linear(16))), "h.0.mixer.c.weight"),
    "by its parent": (lambda: Model(attn=Model(w=linear(48), o=linear(16))), "h.0.attn.w.weight"),
    **{
        heads: (lambda heads=heads: Model(**{heads: 4}, in_proj=linear(48), o=linear(16)), "h.0.in_proj.weight")
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


def test_stacks_that_no_module_tells_of_are_hinted_at() -> None:
    model = Model(mixer=Model(banks=nn.Parameter(torch.ones(4, 12, 8)), table=nn.Parameter(torch.ones(4, 8))))
    model.mixer.core = nn.Parameter(torch.ones(3, 5))
    told = muon_adamw(model).explain()
    assert {row.rule for row in told.rows} == {"AdamW"}
    assert len(told.hints) == 2
    assert "mixer.banks: it has three axes, and no module tells" in str(told)
    assert "hint: mixer.core: no module tells what it is: by AdamW" in str(told)
    # by one rule for all
    model = Model(experts=Experts(), conv=nn.Conv1d(4, 8, 3))
    (hint,) = LAMB(model.named_parameters(), lr=0.1).explain().hints
    assert "experts.gate_up_proj, experts.down_proj: taken for one tensor" in hint
    assert "dict(stacked_axes=1)" in hint
    stacked = LAMB(model.named_parameters(), lr=0.1, overrides=[("experts.*", dict(stacked_axes=1))])
    assert stacked.explain().hints == AdamW(model.named_parameters(), lr=0.1).explain().hints == []


def test_the_table_of_a_mixture_always_tells_rules() -> None:
    model = LowRank()
    optimizer = muon_adamw(model, first=["lora_*"])
    assert {row.rule for row in optimizer.explain().rows} == {"Muon"}
    lines = str(optimizer.explain()).splitlines()
    assert lines[0].split() == ["name", "shape", "dtype", "rule", "treatment", "lr", "scale", "decay", "state", "bytes"]
    assert "group 0: Muon, 2 stepped and 1 frozen, lr 0.02" in lines
    assert " rule " not in str(AdamW(model.named_parameters(), lr=0.1).explain())


# ---- rates


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


@pytest.mark.parametrize(
    ("make", "arguments", "told"),
    [
        (muon_adamw, dict(lr=3e-4), "0.0003 is that of Muon, usually 0.02, and AdamW has 4.5e-06, a share of it"),
        (muon_adamw, dict(lr=5e-5), "5e-05 is that of Muon, usually 0.02, and AdamW has 7.5e-07, a share of it"),
        (muon_adamw, dict(muon=dict(lr=1e-3)), "the rate 0.001 is that of Muon"),
        (muon_adamw, dict(), ""),
        (muon_adamw, dict(lr=2e-3), ""),
        (muon_adamw, dict(lr=3e-4, adamw_lr=3e-4), ""),
        (muon_adamw, dict(lr=3e-4, adamw=dict(lr=3e-4)), ""),
        (muon_adamw, dict(lr=3e-4, muon=MATCHED), ""),
        (kron_adamw, dict(lr=0.01), ""),  # rules may have one rate from the start
    ],
)
def test_a_rate_that_is_meant_for_adamw_is_told(make: Any, arguments: Any, told: str) -> None:
    optimizer = make(gpt([grouped()]), **arguments)
    hints = optimizer.explain().hints
    assert [told in hint for hint in hints] == [True] * bool(told)
    assert told_by_steps(optimizer) == hints


def one_for_all(optimizer: Any) -> Any:
    for group in optimizer.param_groups:
        group["lr"] = 0.01


SCHEDULES = torch.optim.lr_scheduler
#: Whether the two rules come to have one rate.
SCHEDULED: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "a loop over groups": (one_for_all, True),
    "OneCycleLR": (lambda it: SCHEDULES.OneCycleLR(it, max_lr=0.02, total_steps=10, cycle_momentum=False), True),
    "CyclicLR": (lambda it: SCHEDULES.CyclicLR(it, base_lr=1e-3, max_lr=0.02, cycle_momentum=False), True),
    "SWALR": (lambda it: torch.optim.swa_utils.SWALR(it, swa_lr=0.01, anneal_epochs=1), True),
    "eta_min": (lambda it: SCHEDULES.CosineAnnealingLR(it, T_max=2, eta_min=1e-3), True),
    "warm-up from 0": (lambda it: SCHEDULES.LambdaLR(it, lambda t: t / 2), False),
    "to 0": (lambda it: SCHEDULES.LinearLR(it, 1.0, 0.0, total_iters=2), False),
    "cosine": (lambda it: SCHEDULES.CosineAnnealingLR(it, T_max=2), False),
    "a rate for each group": (
        lambda it: SCHEDULES.OneCycleLR(it, max_lr=[0.02, 3e-4], total_steps=10, cycle_momentum=False),
        False,
    ),
    "one group": (lambda it: it.param_groups[0].update(lr=0.01), False),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_one_rate_for_two_rules_is_told_once_and_two_are_not(name: str) -> None:
    make, is_told = SCHEDULED[name]
    entries = [("weight", LAMB.options(lr=0.02)), ("*", AdamW.options(lr=3e-4))]
    optimizer = Mixture(nn.Linear(3, 2).named_parameters(), entries)
    scheduler = make(optimizer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(5):
            step(optimizer)
            if scheduler is not None:
                scheduler.step()
    messages = [str(warning.message) for warning in told if warning.category is HintWarning]
    assert len(messages) == is_told
    words = "LAMB and AdamW had different learning rates, and now have the same, 0.0"
    assert all(message.startswith(words) for message in messages)


# ---- arguments


def test_patterns_decide_first() -> None:
    optimizer = kron_adamw(
        Decoder(),
        weight_decay=0.1,
        first=["pos_embed", "*.gate.*"],
        other=[re.compile("out_proj"), lambda name, p: name == "pos_embed"],
    )
    found = roles(optimizer)
    gates = ["blocks.0.gate.bias", "blocks.0.gate.weight"]
    assert found["Kron"] == sorted([MATRICES[0], MATRICES[2], *gates, "pos_embed"])
    assert found["AdamW"] == sorted([MATRICES[1], "lm_head.weight", "wte.weight"])


@pytest.mark.parametrize("argument", ["first", "other"])
def test_a_pattern_that_matches_nothing_is_told(argument: str) -> None:
    words = rf"patterns in {argument} that match no parameter: '\*\.wieght'"
    with pytest.warns(UnusedOverrideWarning, match=words) as told:
        muon_adamw(Decoder(), **{argument: ["*.wieght", "*.gate.weight"] if argument == "other" else ["*.wieght"]})
    assert told[0].filename == __file__


def test_options_and_arguments() -> None:
    options = dict(kron=dict(momentum=0.5), adamw=dict(betas=(0.5, 0.6)), max_grad_norm=1.0, engine="foreach")
    optimizer = kron_adamw(Decoder(), 0.02, 0.03, **options)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.03, 0.03]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.01, 0.0]  # each rule's own
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[2]["betas"]) == (0.5, (0.5, 0.6))
    assert {group["max_grad_norm"] for group in optimizer.param_groups} == {1.0}
    assert optimizer.engine == "foreach"


@pytest.mark.parametrize(
    ("make", "arguments", "said"),
    [
        (kron_adamw, dict(first="*.weight"), "first must be a list of patterns"),
        (kron_adamw, dict(kron=dict(betas=(0.5, 0.5))), "Kron has no option 'betas'"),
        (muon_adamw, dict(muon_lr=0.1), "'muon_lr': write lr, the rate of Muon; adamw_lr is that of AdamW"),
        (muon_adamw, dict(betas=(0.9, 0.95)), r"has no argument 'betas': write adamw=dict\(betas=...\)"),
        (muon_adamw, dict(momentum=0.9), r"has no argument 'momentum': write muon=dict\(momentum=...\)$"),
        (muon_adamw, dict(ns_steps=3), r"write muon=dict\(ns_steps=...\)$"),
        (muon_adamw, dict(max_grad_nrom=1.0), "write 'max_grad_norm'"),
        (muon_adamw, dict(frobnicate=1), "it has overrides, maximize"),
    ],
)
def test_arguments_that_are_refused(make: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        make(Decoder(), **arguments)
    with pytest.raises(ParameterError, match=rf"needs the model itself.*got generator: write {make.__name__}\(model\)"):
        make(Decoder().parameters())


def test_parameters_of_another_model_need_a_rule() -> None:
    optimizer, more = muon_adamw(Decoder()), nn.Linear(3, 3)
    with pytest.raises(ParameterError, match=r"'more.weight' is not of the model .*\"rule\": 'Muon' or 'AdamW'"):
        optimizer.add_param_group({"params": [("more.weight", more.weight)]})
    assert len(optimizer.param_groups) == 3
    optimizer.add_param_group({"params": [("more.weight", more.weight)], "rule": "Muon"})
    assert optimizer.param_groups[3]["rule"] == "Muon"


@EITHER
def test_what_is_around_a_rule_is_around_both(make: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    optimizer = make(model, lr=0.02, averaged=0.5, cautious=True)
    assert all(group["averaged"] == 0.5 and group["cautious"] is True for group in optimizer.param_groups)
    apart = make(model, averaged=0.5, adamw=dict(averaged=None))
    assert {group.get("averaged") for group in apart.param_groups if group["rule"] == "AdamW"} == {None}
