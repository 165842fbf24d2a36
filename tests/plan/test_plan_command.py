"""``thalweg plan``: what it prints, what it writes, and one sentence for every mistake."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from thalweg.cli import run
from thalweg.errors import CommandError
from thalweg.plan import plan
from thalweg.plan.models import Model, Tensor
from thalweg.plan.sources import resolve
from thalweg.rules import RULES
from thalweg.show.arguments import Given
from thalweg.show.registered import MIXTURES

#: What is planned of a model with norms: Muon refuses those, and mixtures need torch.
PLANNED = [name for name in RULES if name != "Muon"]
PLANNED += MIXTURES if importlib.util.find_spec("torch") is not None else ()


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["plan", *arguments]) == 0
    found = capsys.readouterr()
    assert found.err == ""
    return found.out


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    assert run(["plan", *arguments]) == code
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("thalweg: ")
    assert found.err.count("\n") == 1
    return found.err.removeprefix("thalweg: ").strip()


def test_one_row_for_each_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "gpt2", "--engine", "foreach")
    assert "gpt2 (GPT-2 124M, tied head): 124,439,808 parameters in 148 tensors, float32" in text
    every = (*RULES, *MIXTURES)
    lines = [line for line in text.splitlines() if line and "not planned" not in line]
    rows = {line.split()[0]: line for line in lines if line.split()[0] in every}
    assert list(rows) == PLANNED
    assert rows["LAMB"].split()[1:3] == ["996", "MB"]
    assert "Activations are not counted" in text
    assert "3.35 TB/s" in text
    assert "fits" not in text
    assert "sent" not in text


def test_not_a_terminal_has_no_escape_codes_and_no_broken_lines(capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--memory", "3GB", "--world", "8", "--layout", "fsdp2", "--optimizers", "lamb,kron", "--device", "cpu"]
    text = printed(capsys, "gpt2", *where, "--explain")
    assert "\x1b" not in text
    titles = next(line for line in text.splitlines() if line.startswith("optimizer"))
    wanted = "optimizer state peak all together fits moved time products sent engine"
    assert titles.split() == wanted.split()


def test_what_fits_is_told_and_the_exit_code_stays_0(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "gpt2", "--memory", "3GB", "--optimizers", "adafactor,lamb", "--engine", "foreach")
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith(("LAMB", "Adafactor"))}
    assert "yes, 1.38 GB left" in lines["Adafactor"]
    assert "no, 82.6 MB over" in lines["LAMB"]


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["resnet50", "--memory", "1GB", "--bandwidth", "2TB/s", "--flops", "50TFLOPS", "--dtype", "bfloat16"]
    arguments += ["--option", "momentum_dtype=bfloat16", "--option", "kron.max_size_dense=256", "--device", "cuda"]
    record = json.loads(printed(capsys, *arguments, "--optimizers", "sgd,adamw,lamb,kron", "--json"))
    assert record["model"] == {
        "name": "resnet50",
        "about": "ResNet-50 25.6M",
        "parameters": 25557032,
        "tensors": 161,
        "dtypes": ["bfloat16"],
        "frozen_parameters": 0,
        "frozen_tensors": 0,
        "frozen_dtypes": [],
    }
    assert (record["bandwidth"], record["flops"], record["memory"]) == (2e12, 5e13, 10**9)
    found = {cost["optimizer"]: cost for cost in record["optimizers"]}
    assert list(found) == ["SGD", "AdamW", "LAMB", "Kron"]
    lamb, kron = found["LAMB"], found["Kron"]
    assert lamb["parameter_bytes"] == lamb["gradient_bytes"] == 2 * 25557032
    assert lamb["state_bytes"] == (2 + 4) * 25557032 + 4 * 161
    assert lamb["total_bytes"] == sum(lamb[f"{part}_bytes"] for part in ("parameter", "gradient", "state", "peak"))
    assert lamb["fits"] is True
    assert lamb["seconds"] == lamb["moved_bytes"] / 2e12
    assert kron["seconds"] == kron["moved_bytes"] / 2e12 + kron["product_flops"] / 5e13
    assert kron["options"] == {"momentum_dtype": "bfloat16", "max_size_dense": 256}
    assert found["AdamW"]["options"] == {"momentum_dtype": "bfloat16"}
    assert found["SGD"]["options"] == {"momentum": 0.9, "momentum_dtype": "bfloat16"}
    assert "tensors" not in lamb
    explained = json.loads(printed(capsys, "resnet50", "--json", "--explain", "--optimizers", "lamb"))
    rows = explained["optimizers"][0]["tensors"]
    assert len(rows) == 161
    assert sum(row["state_bytes"] for row in rows) == explained["optimizers"][0]["state_bytes"]


def test_the_function_and_the_command_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(printed(capsys, "gpt2", "--json", "--front-end", "numpy", "--optimizers", "lamb,kron"))
    found = plan("gpt2", front_end="numpy", optimizers=["LAMB", "Kron"])
    assert [cost["state_bytes"] for cost in record["optimizers"]] == [cost.share.state_bytes for cost in found.costs]
    assert [cost["engine"] for cost in record["optimizers"]] == [cost.share.engine for cost in found.costs]


@pytest.mark.slow
def test_every_parameter_is_listed_as_explain_of_torch_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    import thalweg.torch
    from thalweg.plan.models import builtin

    tensors = builtin("resnet50").tensors
    for name in ("LAMB", "Adafactor", "Kron"):
        named = [
            (t.name, torch.empty(t.shape, dtype=torch.bfloat16, device="meta", requires_grad=True)) for t in tensors
        ]
        optimizer = getattr(thalweg.torch, name)(named)
        text = printed(capsys, "resnet50", "--dtype", "bfloat16", "--explain", "--optimizers", name.lower())
        mine = text.split(f"\n{name}\n")[1].strip()
        theirs = [line for line in str(optimizer.explain()).splitlines() if not line.startswith("group 0: ")]
        assert mine.splitlines() == theirs


@pytest.mark.slow
def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    few = ["--optimizers", "lamb,adafactor", "--device", "cpu", "--frozen", "*.wte.*"]
    for folder in ("one", "two"):
        assert run(["plan", "gpt2", "--memory", "3GB", *few, "--out", str(tmp_path / folder)]) == 0
    found = capsys.readouterr()
    assert "LAMB" in found.out
    assert str(tmp_path / "one" / "plan.png") in found.err
    svg = (tmp_path / "one" / "plan.svg").read_text()
    assert all(word in svg for word in ("Memory to train gpt2", "Adafactor", "peak in a step", "3 GB", "frozen"))
    for name in ("plan.png", "plan.svg"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert (tmp_path / "one" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_peaks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run(["plan", "gpt2", "--optimizers", "lamb", "--front-end", "optax", "--out", str(tmp_path)]) == 0
    svg = (tmp_path / "plan.svg").read_text()
    assert "peak in a step" not in svg
    assert "frozen" not in svg


def test_the_largest_model_takes_seconds_and_no_memory() -> None:
    plan("gpt2", optimizers=["LAMB"])  # loads what is needed
    tracemalloc.start()
    try:
        start = time.process_time()
        found = plan("llama-70b", optimizers=["LAMB"], world=8, layout="fsdp2", device="cpu")
        assert time.process_time() - start < 10
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()
    assert found.model.parameters == 70_553_706_496


def test_a_mesh_of_replicas_and_shards() -> None:
    many = Model("many", "", tuple(Tensor(f"w{i}", (64, 32)) for i in range(6)))
    where: Any = dict(optimizers=["Muon"], device="cpu", flops=1e9, bus=1e6)
    cost = plan(many, mesh={"dp": 2, "fsdp": 4}, **where).costs[0]
    assert (cost.busiest.rank, cost.share.collectives, cost.share.divided_tensors) == (0, 3, 6)
    # of its own matrix three quarters; a quarter of two others in this replica, and of three in the other
    each, own = plan(many, world=1, **where).costs[0].share.product_flops // 6, 64 * 32 * 2
    assert cost.busiest.product_flops == each
    assert cost.busiest.received_bytes == pytest.approx((3 / 4 + 2 / 4 + 3 / 4) * own, rel=0.01)
    share = cost.busiest
    wanted = share.moved_bytes / 1e11 + share.product_flops / 1e9 + max(share.sent_bytes, share.received_bytes) / 1e6
    assert cost.busiest_seconds == pytest.approx(wanted)
    assert 0 < share.slot_bytes < share.peak_bytes


def test_replicas_on_gpus_divide_what_kernels_step_then() -> None:
    many = Model("many", "", tuple(Tensor(f"w{i}", (4096, 4096), "bfloat16") for i in range(4)))
    where: Any = dict(optimizers=["Muon"], device="cuda", mesh={"dp": 2})
    share = plan(many, **where).costs[0].share
    assert (share.engine, share.divided_tensors, share.collectives) == ("fused", 4, 2)
    # momentum and parameters are written in place
    assert share.peak_bytes < plan(many, engine="foreach", **where).costs[0].share.peak_bytes
    rounded = plan(many, options=[Given("Muon", "rounding", "stochastic")], **where).costs[0].share
    assert (rounded.engine, rounded.divided_tensors) == ("fused", 0)


def test_ten_thousand_ranks_take_seconds() -> None:
    layers = tuple(Tensor(f"layers.{i}.{j}", (4096, 4096)) for i in range(50) for j in range(7))
    start = time.process_time()
    found = plan(Model("large", "", layers), optimizers=["Muon"], mesh={"fsdp": 10_000}, device="cpu")
    assert time.process_time() - start < 10
    assert (
        found.costs[0].busiest.product_flops
        == plan(Model("one", "", layers[:1]), optimizers=["Muon"]).costs[0].share.product_flops
    )


#: What a plan takes once kernels are loaded: seconds of a CPU, and how much memory the process grew by, in MiB.
LARGEST = """
import resource, time
from thalweg.plan import plan
plan("gpt2")
start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
plan("llama-70b", {arguments})
print(time.process_time() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["", "world=8, layout='fsdp2'"])
def test_the_largest_model_with_every_optimizer_takes_seconds(arguments: str) -> None:
    """Tables of kernels are laid out in pieces: those of the whole model would take more than a gigabyte."""
    pytest.importorskip("resource")
    command_line = [sys.executable, "-c", LARGEST.format(arguments=arguments)]
    answer = subprocess.run(command_line, check=True, capture_output=True, text=True, timeout=600)
    seconds, grown = map(float, answer.stdout.split())
    assert seconds < 10
    assert grown < 200


@pytest.mark.nightly
def test_planning_loads_no_framework_but_for_what_kernels_keep_on_gpus() -> None:
    program = (
        "import sys; from thalweg.plan import plan; rules = ['SGD', 'LAMB', 'Kron']; "
        "plan('gpt2', device='cpu', optimizers=rules); plan('gpt2', engine='foreach', optimizers=rules); "
        "plan('gpt2', front_end='optax'); none = {'torch', 'jax', 'rich', 'matplotlib', 'click'} & set(sys.modules); "
        "plan('gpt2', optimizers=['LAMB']); sys.exit(bool(none or {'jax', 'rich', 'click'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gtp2"], "there is no model 'gtp2': did you mean 'gpt2'?"),
        (["gpt2", "--mesh", "pp=4"], "there is no mesh dimension 'pp': there are dp, fsdp, tp"),
        (["resnet50", "--mesh", "tp=4"], "mesh dimension 'tp' divides nothing: no parameter of resnet50 is"),
        (["gpt2", "--mesh", "dp=0"], "mesh dimension 'dp' must have at least one rank, got 0"),
        (["gpt2", "--mesh", "dp"], "--mesh dp: it must name each dimension once, with its ranks: dp=8,fsdp=64"),
        (["gpt2", "--mesh", "dp=4", "--world", "8"], "the mesh has 4 ranks, and the world 8: leave out --world"),
        (
            ["gpt2", "--optimizers", "lamp"],
            "there is no optimizer 'lamp': did you mean 'LAMB'? There are SGD, AdamW, LARS, LAMB, Adafactor, Muon",
        ),
        (["gpt2", "--memory", "much"], "'much' is not a size such as 80GB or 16GiB"),
        (
            ["gpt2", "--memory", "80"],
            "--memory 80 has no unit: it must be a size such as 80GB or 16GiB; say --memory 80GiB",
        ),
        (
            ["gpt2", "--bandwidth", "3.35"],
            "--bandwidth 3.35 has no unit: it must be a bandwidth such as 3.35TB/s; say --band",
        ),
        (["gpt2", "--flops", "300"], "say --flops 300TFLOPS or --flops 300GFLOPS"),
        (["gpt2", "--flops", "60TB"], "'60TB' is not a rate of operations"),
        (["gpt2", "--bandwidth", "3parsecs"], "'3parsecs' is not a bandwidth such as 3.35TB/s"),
        (["gpt2", "--option", "momentum"], "--option 'momentum' must be NAME=VALUE"),
        (["gpt2", "--option", "=3"], "--option '=3' must be NAME=VALUE"),
        (["gpt2", "--option", "lr=0.1"], "nothing that is planned depends on the learning rate: leave out --option lr"),
        (["gpt2", "--frozen", "*.wpee.*"], "--frozen *.wpee.* matches no parameter; the first ones are transformer.w"),
        (["gpt2", "--frozen", "*"], "all parameters of gpt2 are frozen: nothing is left to train"),
        (
            ["gpt2", "--option", "kron.max_size_dens=2"],
            "Kron has no option 'max_size_dens': did you mean 'max_size_dense'?",
        ),
        (["gpt2", "--option", "lamb.betas=(2,2)"], "LAMB: betas[0] must be"),
        (["gpt2", "--option", "kron.precond_dtype=int8"], "Kron: precond_dtype='int8': factors are multiplied"),
        (
            ["gpt2", "--option", "adafactor.momentum_dtype=bfloat16"],
            "Adafactor: momentum_dtype='bfloat16' has no effect here",
        ),
        (["gpt2", "--option", "adamw.trust=True"], "AdamW has no option 'trust'"),
        (
            ["gpt2", "--optimizers", "lamb", "--option", "kron.eps=1"],
            "the option kron.eps is for Kron, which is not among",
        ),
        (
            ["gpt2", "--optimizers", "adafactor", "--option", "momentum_dtype=bfloat16"],
            "the option momentum_dtype has no effect on any optimizer here: it needs a momentum",
        ),
        (["gpt2", "--front-end", "numpy", "--device", "cuda"], "numpy's arrays are on the CPU"),
        (["gpt2", "--front-end", "numpy", "--engine", "foreach"], "the numpy front end has no engine 'foreach'"),
        (["gpt2", "--front-end", "numpy", "--world", "2"], "the numpy front end runs in one process"),
        (["gpt2", "--front-end", "optax", "--engine", "reference"], "in JAX the compiler decides how steps are taken"),
        (["gpt2", "--front-end", "optax", "--world", "2", "--layout", "fsdp2"], "layout 'fsdp2' is for torch: in JAX"),
        (
            ["gpt2", "--engine", "fused", "--optimizers", "kron", "--option", "normalize_grads=True"],
            "cannot run Kron for 'transformer.wte.weight': there is no fused kernel for normalize_grads=True",
        ),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in told(capsys, *arguments)


def test_slices_that_are_not_there_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "shapes.json"
    path.write_text('{"scale": []}')
    assert "stacked_axes=1, but parameter 'scale' has shape ()" in told(capsys, str(path), "--option", "stacked_axes=1")


@pytest.mark.parametrize("arguments", [["--dtype", "int8"], ["--world", "0"], ["--layout", "zero"], ["--typo"]])
def test_usage_is_told_by_click(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "(thalweg plan --help says more)" in told(capsys, "gpt2", *arguments, code=2)


@pytest.mark.parametrize("name", ["bf16", "BF16", "torch.bfloat16"])
def test_dtypes_have_short_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--dtype", name, "--optimizers", "lars", "--option", f"momentum_dtype={name}", "--json"]
    record = json.loads(printed(capsys, "gpt2", *arguments, "--device", "cpu"))
    assert record["model"]["dtypes"] == ["bfloat16"]
    assert record["optimizers"][0]["options"] == {"momentum_dtype": "bfloat16"}


def test_other_dtypes_have_short_names_too() -> None:
    short = {"fp16": "float16", "half": "float16", "Float32": "float32", "fp64": "float64", "double": "float64"}
    assert {name: resolve("gpt2", name).tensors[0].dtype for name in short} == short


def test_a_dtype_that_is_not_known_is_told_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = (
        "there is no dtype 'bf61': there are float32 (or fp32, f32), float64 (or fp64, f64, double), bfloat16 (or bf16)"
    )
    assert wanted in told(capsys, "gpt2", "--dtype", "bf61", code=2)
    with pytest.raises(CommandError, match="there is no dtype 'int8': there are float32"):
        plan("gpt2", dtype="int8")


def test_a_model_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "MODEL is given not at all: say thalweg plan gpt2" in told(capsys, code=2)
    assert "MODEL is given twice" in told(capsys, "gpt2", "--model", "gpt2", code=2)


# ---- weights that are not trained


def test_frozen_weights_take_memory_alone(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--optimizers", "lamb", "--device", "cpu", "--engine", "foreach"]
    text = printed(capsys, "gpt2", "--frozen", "*.wte.*", "--frozen", "*.wpe.*", *arguments)
    frozen = 768 * (50257 + 1024)
    assert f"frozen: {frozen:,} parameters in 2 tensors, float32, take 158 MB, without gradients and state" in text
    assert "all together: parameters, gradients, frozen weights, state and peak" in text
    assert f"{124_439_808 - frozen:,} parameters in 146 tensors" in text
    record = json.loads(printed(capsys, "gpt2", "--frozen", "*.w[tp]e.*", *arguments, "--json"))
    found = record["optimizers"][0]
    assert found["frozen_bytes"] == 4 * frozen
    assert found["parameter_bytes"] == 4 * (124_439_808 - frozen)
    assert found["state_bytes"] == 8 * (124_439_808 - frozen) + 4 * 146
    parts = ("parameter", "gradient", "frozen", "state", "peak")
    assert found["total_bytes"] == sum(found[f"{part}_bytes"] for part in parts)
    assert record["model"]["frozen_parameters"] == frozen
    # what fits is told with them
    for memory, fits in ((found["total_bytes"], True), (found["total_bytes"] - 1, False)):
        record = json.loads(
            printed(capsys, "gpt2", "--frozen", "*.w[tp]e.*", *arguments, "--memory", f"{memory}B", "--json")
        )
        assert record["optimizers"][0]["fits"] is fits


@pytest.mark.parametrize("optimizer", ["LAMB", "Kron"])
def test_frozen_weights_are_divided_over_ranks(optimizer: str) -> None:
    given = {"optimizers": [optimizer], "device": "cpu", "world": 4, "layout": "fsdp2"}
    trained, frozen = Tensor("w", (6, 4)), Tensor("f", (10, 3), "bfloat16")
    bare = plan(Model("m", "", (trained,)), **given)  # type: ignore[arg-type]
    share = plan(Model("m", "", (trained, frozen)), frozen=["f"], **given).costs[0].share  # type: ignore[arg-type]
    assert share.frozen_bytes == 2 * 3 * 3
    assert share.total_bytes == bare.costs[0].share.total_bytes + share.frozen_bytes
