"""``thalweg plan``: every figure is what an optimizer of that model really keeps, and every mistake is one sentence."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import thalweg.torch
from thalweg.cli import run
from thalweg.errors import CommandError
from thalweg.plan import plan
from thalweg.plan.command import count_rules
from thalweg.plan.models import BUILT_IN, hold, load_model
from thalweg.plan.optimizers import USUAL
from thalweg.rules import RULES
from thalweg.show.arguments import Given

SHAPES = [(), (1,), (7,), (1000,), (0,), (3, 0), (5, 4), (130, 140), (3, 4, 5, 2), (16, 8, 3, 3), (2, 130, 140)]
STACKED = [(3, 7), (2, 130, 140), (4, 5, 6)]
CASES: list[tuple[str, dict[str, Any], Any]] = [
    *((name, {"vectors": "row"} if name == "Muon" else {}, SHAPES) for name in RULES),
    ("AdamW", {"spikes": True}, SHAPES),
    ("Kron", {"stacked_axes": 1, "precond_dtype": "bfloat16"}, STACKED),
]


class Net(torch.nn.Module):  # type: ignore[misc]
    """A small model with everything that a mixture tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.LayerNorm(64))])
        self.lm_head = torch.nn.Linear(64, 50, bias=False)


def bytes_planned(path: Path, **given: Any) -> int:
    (cost,) = plan(str(path), optimizers=["AdamW"], **given).optimizers
    return cost.parameter_bytes


def bytes_of(optimizer: Any) -> int:
    entries = {id(entry): entry for state in optimizer.state.values() for entry in state.values()}  # some are shared
    return sum((entry.to_local() if hasattr(entry, "to_local") else entry).nbytes for entry in entries.values())


def step(optimizer: Any, module: Any) -> None:
    for p in module.parameters():
        p.grad = torch.full_like(p, 0.5) if p.requires_grad else None
    optimizer.step()


# ---- the figures


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(("name", "options", "shapes"), CASES)
def test_a_rule_keeps_what_its_plan_says(name: str, options: dict[str, Any], shapes: Any, dtype: str) -> None:
    module = hold({f"p{i}": torch.ones(shape) for i, shape in enumerate(shapes)})
    given = [Given(name, key, value) for key, value in options.items()]
    (cost,) = plan(module, optimizers=[name], options=given, dtype=dtype).optimizers
    module = module.to(getattr(torch, dtype))
    rate = {} if name == "Adafactor" else {"lr": 1e-3}
    optimizer = thalweg.torch.optimizer(RULES[name])(
        list(module.named_parameters()), **rate, **{**USUAL.get(name, {}), **options}, engine="foreach"
    )
    told = optimizer.explain()
    step(optimizer, module)
    assert cost.state_bytes == bytes_of(optimizer)
    assert [row.state_bytes for row in cost.explanation.rows] == [row.state_bytes for row in told.rows]
    assert count_rules(cost) == {name: sum(map(math.prod, shapes))}


@pytest.mark.parametrize("name", ["muon_adamw", "kron_adamw"])
def test_a_mixture_keeps_what_its_plan_says(name: str) -> None:
    module = Net()
    (cost,) = plan(module, optimizers=[name], frozen=["embed.*"]).optimizers
    module.embed.requires_grad_(False)
    optimizer = getattr(thalweg.torch, name)(module)
    step(optimizer, module)
    trained = [p for p in module.parameters() if p.requires_grad]
    assert cost.state_bytes == bytes_of(optimizer)
    assert cost.parameter_bytes == sum(p.nbytes for p in trained) == sum(p.grad.nbytes for p in trained)
    assert cost.frozen_bytes == module.embed.weight.nbytes
    assert cost.total_bytes == 2 * cost.parameter_bytes + cost.frozen_bytes + cost.state_bytes + cost.temporary_bytes
    hidden = 16 * 64
    rest = sum(p.numel() for p in trained) - hidden
    assert count_rules(cost) == {"Muon" if name == "muon_adamw" else "Kron": hidden, "AdamW": rest}


def test_bytes_moved_are_those_of_the_passes() -> None:
    """Of Kron gradient, parameter, momentum and factors, of which all but the gradient are written too."""
    moved = {"SGD": 20, "AdamW": 28, "LARS": 28, "LAMB": 40, "Lion": 20, "Muon": 20, "Kron": 28}
    costs = plan(torch.nn.Linear(1000, 1000, bias=False), optimizers=[*moved]).optimizers
    assert {cost.optimizer: cost.moved_bytes for cost in costs} == pytest.approx(
        {rule: number * 10**6 for rule, number in moved.items()}, rel=1e-3
    )


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "Kron", "muon_adamw"])
def test_a_rank_of_fsdp2_keeps_what_its_plan_says(name: str) -> None:
    """The first of three ranks, which has most: rows of parameters, of momentum and of factors."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    module = Net()
    (cost,) = plan(module, optimizers=[name], world=3).optimizers
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        mesh = init_device_mesh("cpu", (3,))
        for inner in module.modules():
            for key, p in list(inner.named_parameters(recurse=False)):
                setattr(inner, key, torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
        make: Any = getattr(thalweg.torch, name)
        rate = {"lr": 1e-3} if name in ("AdamW", "Kron") else {}
        optimizer = make(module if name == "muon_adamw" else list(module.named_parameters()), **rate)
        optimizer.make_state()
        assert cost.state_bytes == bytes_of(optimizer)
        assert cost.parameter_bytes == sum(p.to_local().nbytes for p in module.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_the_temporaries_are_those_that_the_optimizer_tells() -> None:
    lamb, kron = plan(torch.nn.Linear(300, 200), optimizers=["LAMB", "Kron"]).optimizers
    assert all(cost.temporary_bytes == cost.explanation.temporary_bytes for cost in (lamb, kron))
    (rank,) = plan(torch.nn.Linear(300, 200), optimizers=["LAMB"], world=4).optimizers
    assert rank.temporary_bytes < lamb.temporary_bytes


# ---- models


@pytest.mark.parametrize(
    ("model", "parameters", "hidden"),
    [("gpt2", 124_439_808, 48), ("llama-1b", 1_235_814_400, 112), ("resnet50", 25_557_032, 53)],
)
def test_what_is_built_in_is_told_apart_by_names(model: str, parameters: int, hidden: int) -> None:
    (cost,) = plan(model, optimizers=["muon_adamw"]).optimizers
    assert sum(count_rules(cost).values()) == parameters
    assert [row.rule for row in cost.explanation.rows].count("Muon") == hidden
    module = load_model(model)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == dict(BUILT_IN[model]())


def test_a_module_is_not_changed_and_what_is_tied_counts_once() -> None:
    module = Net()
    plan(module, dtype="bf16", frozen=["embed.*"], optimizers=["AdamW"])
    assert all(p.requires_grad and p.device.type == "cpu" and p.dtype == torch.float32 for p in module.parameters())
    module.embed = torch.nn.Embedding(50, 64)
    module.lm_head.weight = module.embed.weight
    (cost,) = plan(module, optimizers=["AdamW"]).optimizers
    assert cost.parameter_bytes == sum(p.nbytes for p in module.parameters())


def test_a_folder_of_safetensors(tmp_path: Path) -> None:
    save = pytest.importorskip("safetensors.torch").save_file
    tensors = {"a.weight": torch.ones(4, 6, dtype=torch.bfloat16), "ids": torch.ones(3, dtype=torch.int64)}
    save(tensors, tmp_path / "1.safetensors")
    save({"b.weight": torch.ones(5)}, tmp_path / "2.safetensors")
    assert bytes_planned(tmp_path) == 2 * 24 + 4 * 5
    assert bytes_planned(tmp_path / "1.safetensors", dtype="float32") == 4 * 24
    save({"a.weight": torch.ones(4, dtype=torch.float8_e4m3fn)}, tmp_path / "1.safetensors")
    with pytest.raises(CommandError, match=r"'a.weight' has dtype torch.float8_e4m3fn, which cannot be trained: set"):
        plan(str(tmp_path))
    assert bytes_planned(tmp_path, dtype="bfloat16") == 2 * (4 + 5)
    (tmp_path / "2.safetensors").write_bytes(b"\x80\x04pickled")
    with pytest.raises(CommandError, match=r"2.safetensors is damaged, or not a safetensors file"):
        plan(str(tmp_path / "2.safetensors"))


@pytest.mark.slow
def test_a_configuration_is_built_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
    config = transformers.LlamaConfig(**sizes)
    model = transformers.LlamaForCausalLM(config)
    for architectures, wanted in ((["LlamaForCausalLM"], model), (None, model.model)):
        config.architectures = architectures
        config.save_pretrained(tmp_path)
        assert bytes_planned(tmp_path) == sum(p.nbytes for p in wanted.parameters())
    (tmp_path / "config.json").write_text('{"model_type": "no such"}')
    with pytest.raises(CommandError, match=r"could not be built: "):
        plan(str(tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CommandError, match=r"could not be built: ModuleNotFoundError: .*transformers"):
        plan(str(tmp_path))


# ---- options


def test_options_for_all_go_to_those_on_which_they_have_an_effect() -> None:
    options = [Given("", "momentum_dtype", "bfloat16"), Given("sgd", "momentum", 0.5)]
    plain, narrow = (
        {cost.optimizer: cost.state_bytes for cost in plan("small", options=own).optimizers} for own in ([], options)
    )
    assert narrow["Adafactor"] == plain["Adafactor"]  # which has no momentum
    for name in ("SGD", "AdamW", "muon_adamw"):
        assert narrow[name] < plain[name]


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("", "momentumm", 1, "no optimizer here has an option 'momentumm': did you mean 'momentum'?"),
        ("", "lr", 1, "no figure depends on the learning rate: leave out --option lr"),
        ("lamb", "trust", True, "the option lamb.trust is for lamb, which is not among the optimizers: SGD"),
        ("sgd", "momentum", -1, "SGD: momentum must be"),
        ("sgd", "momentumm", 1, "SGD has no option 'momentumm': did you mean 'momentum'?"),
        ("", "offload_state", True, "no optimizer here has an option 'offload_state': it is gone since 0.3"),
    ],
)
def test_options_that_cannot_be_meant(name: str, option: str, value: Any, message: str) -> None:
    with pytest.raises(CommandError, match=re.escape(message)):
        plan("small", optimizers=["SGD"], options=[Given(name, option, value)])


# ---- the command

SOURCE = """
import torch
import thalweg.torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(100_000, 100_000), torch.nn.LayerNorm(100_000))

def broken():
    raise RuntimeError("out of luck")

def wrong():
    return 3

def mixture(model):
    entries = [("0.weight", thalweg.torch.Lion.options(lr=1e-4)), ("*", thalweg.torch.AdamW.options(lr=1e-3))]
    return thalweg.torch.Mixture(model.named_parameters(), entries)

def partial(model):
    return thalweg.torch.AdamW(model[0].named_parameters(), lr=1e-3)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "plannable", raising=False)
    (tmp_path / "plannable.py").write_text(SOURCE)
    (tmp_path / "model.pt").write_bytes(b"\x80")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{")
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpt3", "there is no model 'gpt3', and plan downloads none: did you mean 'gpt2'?"),
        ("nothing_like_it", "there are gpt2, resnet50"),
        ("meta/llama", "there is no model 'meta/llama', and plan downloads none"),
        ("gone.safetensors", "there is no file gone.safetensors"),
        ("gone.json", "there is no file gone.json"),
        ("bad.json", "bad.json could not be built: "),
        ("model.pt", "there is no model 'model.pt', and plan downloads none"),
        ("empty", "empty has neither .safetensors files nor a config.json"),
        ("plannable:broken", "plannable:broken could not be built: RuntimeError: out of luck"),
        ("plannable:wrong", "plannable:wrong returned a int: it must return a torch.nn.Module"),
        ("plannable:built", "module 'plannable' has no 'built': did you mean 'build'?"),
        ("no_such_module:build", "there is no module 'no_such_module'"),
        ("gpt2 --optimizers adam", "there is no optimizer 'adam': did you mean 'AdamW'?"),
        ("gpt2 --optimizers muon", "it is no matrix, and Muon orthogonalizes matrices"),
        ("gpt2 --optimizers plannable:broken", "plannable:broken could not be made, it must be a rule, or a function"),
        ("plannable:build --optimizers plannable:partial", "it leaves out parameter '1.weight'"),
        ("gpt2 --optimizers plannable:mixture --option plannable:mixture.x=1", "unexpected keyword argument 'x'"),
        ("gpt2 --option kron_adamw.variant=x", "kron_adamw has no argument 'variant'"),
        ("gpt2 --frozen nothing*", "--frozen nothing* matches no parameter; the first ones are transformer.wte.weight"),
        ("gpt2 --frozen *", "gpt2 has no floating-point parameter that requires a gradient"),
        ("gpt2 --dtype int4", "there is no dtype 'int4'"),
        ("gpt2 --memory 80", "--memory 80 must be a number with a unit, such as 80GB"),
        ("gpt2 --bandwidth fast", "--bandwidth fast must be a number with a unit"),
        ("gpt2 --world 0", "0 is not in the range"),
        ("gpt2 --option eps", "--option 'eps' must be NAME=VALUE"),
        ("", "Missing argument 'MODEL'"),
    ],
)
def test_a_mistake_is_one_sentence(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "bad.json" in words:
        pytest.importorskip("transformers")
    assert run(["plan", *words.split()]) == 2
    out, error = capsys.readouterr()
    assert not out
    assert message in error
    assert error.count("\n") == 1


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    code = run(["plan", *words.split()])
    out, error = capsys.readouterr()
    assert (code, error) == (0, "")
    return out


@pytest.mark.usefixtures("folder")
def test_a_factory_takes_no_memory_and_the_table_shows_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """40 GB of parameters."""
    out = shown("plannable:build --optimizers plannable:mixture,lamb,muon --memory 150GB", capsys)
    assert "plannable:build: 10,000,300,000 parameters in 4 tensors, float32" in out
    assert "yes, 29" in out
    assert "no, 10." in out
    assert "mixture: Lion steps 10,000,000,000 parameters; AdamW steps 300,000 parameters" in out
    assert "Muon is not planned: parameter '0.bias'" in out


def test_everything_is_shown_as_json_and_every_parameter_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    words = "gpt2 --optimizers lamb,adafactor --dtype bf16 --frozen *.wte.* --world 4"
    found = json.loads(shown(f"{words} --bandwidth 1TB/s --memory 220MB --json", capsys))
    expected = plan("gpt2", optimizers=["LAMB", "Adafactor"], dtype="bfloat16", frozen=["*.wte.*"], world=4).optimizers
    for figures, cost in zip(found["optimizers"], expected, strict=True):
        assert figures.items() >= {name: value for name, value in vars(cost).items() if name != "explanation"}.items()
        assert figures["fits"] is (cost.total_bytes <= 220 * 10**6)
        assert figures["floor_seconds"] == cost.moved_bytes / 1e12
    assert [figures["fits"] for figures in found["optimizers"]] == [False, True]
    assert expected[0].frozen_bytes == 2 * 768 * math.ceil(50257 / 4)
    rows = json.loads(shown("gpt2 --optimizers lamb --explain --json", capsys))["optimizers"][0]["tensors"]
    assert [row["name"] for row in rows] == list(dict(BUILT_IN["gpt2"]()))
    out = shown("gpt2 --optimizers adafactor --explain", capsys)
    assert "factored over axes 0 and 1" in out
    assert all(name in out for name, _ in BUILT_IN["gpt2"]())
