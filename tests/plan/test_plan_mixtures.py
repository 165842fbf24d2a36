"""Mixtures in plans: which parameter goes to which rule, and what an optimizer refuses."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from lanes import one_in

pytest.importorskip("click")
pytest.importorskip("torch")

from thalweg.cli import run
from thalweg.errors import CommandError
from thalweg.plan import Plan, plan
from thalweg.plan.models import Model, Tensor, builtin
from thalweg.plan.optimizers import assign, build_stand_in
from thalweg.show.arguments import Given
from thalweg.show.registered import OWN_MIXTURES

#: A small model of blocks, with an embedding and a head.
TENSORS = (
    Tensor("embed.weight", (50, 16)),
    Tensor("blocks.0.norm.weight", (16,)),
    Tensor("blocks.0.up.weight", (64, 16)),
    Tensor("blocks.0.up.bias", (64,)),
    Tensor("blocks.0.down.weight", (16, 64)),
    Tensor("lm_head.weight", (50, 16)),
)
HIDDEN = {"blocks.0.up.weight", "blocks.0.down.weight"}
MODEL = Model("small", "", TENSORS)

SOURCE = """
import torch
import thalweg.torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 16))])
        self.lm_head = torch.nn.Linear(16, 50, bias=False)

def mixture(model):
    lion, adamw = thalweg.torch.Lion.options(lr=1e-4), thalweg.torch.AdamW.options(lr=1e-3)
    return thalweg.torch.Mixture(model.named_parameters(), [("blocks.*", lion), ("*", adamw)])

def positional(model):
    return thalweg.torch.AdamW(model.parameters(), lr=1e-3)

def partial(model):
    return thalweg.torch.AdamW(model.lm_head.parameters(), lr=1e-3)

def broken(model):
    raise RuntimeError("out of luck")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    OWN_MIXTURES.clear()
    name = f"mixed_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(SOURCE))
    return name


def by_rule(found: Plan, optimizer: str) -> dict[str, set[str]]:
    cost = next(cost for cost in found.costs if cost.optimizer == optimizer)
    return {rule: {tensor.name for tensor in some} for rule, some in found.by_rule(cost).items()}


@pytest.mark.parametrize(("name", "rule"), [("muon_adamw", "Muon"), ("kron_adamw", "Kron")])
def test_hidden_matrices_go_to_one_rule_and_all_else_to_adamw(name: str, rule: str) -> None:
    found = plan(MODEL, optimizers=[name], device="cpu")
    rest = {tensor.name for tensor in TENSORS} - HIDDEN
    assert by_rule(found, name) == {rule: HIDDEN, "AdamW": rest}
    alone = {
        own: plan(Model("part", "", tuple(t for t in TENSORS if (t.name in HIDDEN) is hidden)), optimizers=[own])
        for own, hidden in ((rule, True), ("AdamW", False))
    }
    parts = [own.costs[0].share for own in alone.values()]
    assert found.costs[0].share.state_bytes == sum(share.state_bytes for share in parts)
    assert found.costs[0].share.moved_bytes == sum(share.moved_bytes for share in parts)


def test_the_state_of_a_mixture_is_what_it_allocates(module: str) -> None:
    import importlib

    import torch

    import thalweg.torch

    for name in ("muon_adamw", "kron_adamw"):
        planned = plan(f"{module}:Net", optimizers=[name], device="cpu").costs[0].share
        net = importlib.import_module(module).Net()
        optimizer = getattr(thalweg.torch, name)(net)
        for p in net.parameters():
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        entries = [entry for state in optimizer.state.values() for entry in state.values()]
        assert planned.state_bytes == sum(entry.nbytes for entry in entries)
        assert planned.engine == optimizer.engine


@pytest.mark.parametrize(
    ("model", "hidden"),
    one_in(
        3, [("gpt2", 48), ("llama-1b", 112), ("llama-8b", 224), ("resnet50", 53), ("bert-large", 145), ("small", 48)]
    ),
)
def test_what_is_built_in_is_told_apart_by_names(model: str, hidden: int) -> None:
    """Matrices of blocks, and what pools; embeddings and heads are others."""
    found = plan(model, optimizers=["muon_adamw"], device="cpu")
    matrices = by_rule(found, "muon_adamw")["Muon"]
    assert len(matrices) == hidden
    outside = ("embed", "wte", "wpe", "lm_head")
    assert not [name for name in matrices if name.startswith("fc.") or any(part in name for part in outside)]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt2", "bert-large", "llama-1b"])
def test_names_tell_what_modules_tell(name: str) -> None:
    pytest.importorskip("transformers")
    from thalweg.plan.sources import from_configuration
    from thalweg.torch.recipes import roles_of

    kinds = {"gpt2": "gpt2", "bert-large": "bert", "llama-1b": "llama"}
    asked = {"architectures": ["BertModel"]} if name == "bert-large" else {}
    real = from_configuration("m", {"model_type": kinds[name], **asked, "tie_word_embeddings": name != "bert-large"})
    theirs, mine = roles_of(real.module), roles_of(build_stand_in(real.tensors))
    assert mine == theirs


def test_a_function_makes_a_mixture_for_any_model(module: str) -> None:
    found = plan(f"{module}:Net", optimizers=[f"{module}:mixture", "adamw"], device="cpu")
    rules = by_rule(found, "mixture")
    assert {name.partition(".")[0] for name in rules["Lion"]} == {"blocks"}
    assert rules["AdamW"] == {"embed.weight", "lm_head.weight"}
    frozen = plan(f"{module}:Net", optimizers=["muon_adamw"], frozen=["embed.*"], dtype="bf16", device="cpu")
    assert "embed.weight" not in by_rule(frozen, "muon_adamw")["AdamW"]
    assert {tensor.dtype for tensor in frozen.model.tensors} == {"bfloat16"}
    # of shapes alone too, and of an optimizer of one rule, whatever it calls its parameters
    shapes = plan(MODEL, optimizers=[f"{module}:mixture"], device="cpu")
    assert by_rule(shapes, "mixture")["Lion"] == {t.name for t in TENSORS if t.name.startswith("blocks")}
    assert set(by_rule(plan(MODEL, optimizers=[f"{module}:positional"]), "positional")) == {"AdamW"}


def test_functions_of_one_name_are_told_apart(module: str) -> None:
    other = f"{module}_other"
    Path(f"{other}.py").write_text(Path(f"{module}.py").read_text())
    found = plan(MODEL, optimizers=[f"{module}:positional", f"{other}:positional"], device="cpu")
    assert [cost.optimizer for cost in found.costs] == ["positional", f"{other}:positional"]


def test_functions_that_make_none_are_told(module: str) -> None:
    for name, words in {
        "broken": r"broken could not be made for small, it must be .*: RuntimeError: out of luck",
        "partial": "partial: it leaves out parameter 'embed.weight'",
        "misspelt": "has no 'misspelt'",
    }.items():
        with pytest.raises(CommandError, match=words):
            plan(MODEL, optimizers=[f"{module}:{name}"])
    with pytest.raises(CommandError, match=r"is a mixture of thalweg.torch"):
        plan(MODEL, optimizers=["muon_adamw"], front_end="optax")


def test_options_reach_the_rules_that_have_them() -> None:
    def settings(*options: Given) -> dict[str, Any]:
        assigned = assign("muon_adamw", MODEL, options)
        return {type(own.setting.rule).__name__: own.setting for own in assigned}

    found = settings(Given("", "momentum_dtype", "bfloat16"), Given("", "ns_steps", 3), Given("", "max_grad_norm", 1.0))
    assert {own.handling.momentum_dtype for own in found.values()} == {"bfloat16"}
    assert {own.handling.max_grad_norm for own in found.values()} == {1.0}
    assert found["Muon"].rule.ns_steps == 3
    assert settings(Given("muon_adamw", "ns_steps", 3))["Muon"].rule.ns_steps == 3
    assert settings(Given("Muon", "ns_steps", 3))["Muon"].rule.ns_steps == 5
    with pytest.raises(CommandError, match="muon_adamw has no rule with an option 'factored': Muon, AdamW"):
        settings(Given("muon_adamw", "factored", True))


# ---- what is refused


def test_an_optimizer_that_refuses_a_parameter_is_told_and_not_planned() -> None:
    found = plan(MODEL, optimizers=["Muon", "AdamW"])
    assert [cost.optimizer for cost in found.costs] == ["AdamW"]
    assert found.refused["Muon"].startswith("it refuses 2 of 6 parameters: parameter 'blocks.0.norm.weight' has shape")
    with pytest.raises(CommandError, match=r"Muon: it refuses 2 of 6 parameters: parameter 'blocks.0.norm.weight'"):
        plan(MODEL, optimizers=["Muon"])
    rows = plan(MODEL, optimizers=["Muon"], options=[Given("Muon", "vectors", "row")])
    assert not rows.refused


def test_sharded_mixtures() -> None:
    """Owners have the hidden matrices; sums of the others cross ranks."""
    where: Any = dict(world=2, layout="fsdp2", device="cpu")
    share = plan(MODEL, optimizers=["muon_adamw"], **where).costs[0].share
    hidden, others = (Model("", "", tuple(t for t in TENSORS if (t.name in HIDDEN) is own)) for own in (True, False))
    muon = plan(hidden, optimizers=["Muon"], **where).costs[0].share
    adamw = plan(others, optimizers=["AdamW"], **where).costs[0].share
    assert share.state_bytes == muon.state_bytes + adamw.state_bytes
    assert share.moved_bytes == muon.moved_bytes + adamw.moved_bytes
    assert share.parameter_bytes == muon.parameter_bytes + adamw.parameter_bytes
    assert share.product_flops == muon.product_flops


# ---- the command


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert run(["plan", "gpt2", "--device", "cpu", "--optimizers", "muon,muon_adamw"]) == 0
    text = capsys.readouterr().out
    assert "muon_adamw: Muon steps 84,934,656 parameters in 48 tensors, float32; AdamW steps 39,505,152" in text
    assert "(told apart by their names)" in text
    assert "Muon is not planned: it refuses 98 of 148 parameters: parameter 'transformer.h.0.ln_1.weight'" in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    arguments = ["--device", "cpu", "--json", "--explain", "--optimizers", "muon,muon_adamw,sgd"]
    assert run(["plan", "resnet50", *arguments]) == 0
    record = json.loads(capsys.readouterr().out)
    assert list(record["refused"]) == ["Muon"]
    mixed, single = record["optimizers"]
    assert (mixed["rule"], single["rule"]) == (None, "SGD")
    assert {rule: own["tensors"] for rule, own in mixed["rules"].items()} == {"Muon": 53, "AdamW": 108}
    assert sum(own["parameters"] for own in mixed["rules"].values()) == builtin("resnet50").parameters
    assert {row["rule"] for row in mixed["tensors"]} == {"Muon", "AdamW"}
    assert sum(row["state_bytes"] for row in mixed["tensors"]) == mixed["state_bytes"]


@pytest.mark.parametrize("arguments", [["--model", "gpt2"], ["gpt2", "--rules", "sgd"], ["gpt2", "--optimizer", "sgd"]])
def test_other_names_of_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    more = [] if len(arguments) > 2 else ["--optimizers", "sgd"]
    assert run(["plan", *arguments, *more, "--device", "cpu"]) == 0
    assert "SGD" in capsys.readouterr().out
