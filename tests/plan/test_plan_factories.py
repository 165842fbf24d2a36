"""Models from module:factory, of torch and of JAX; nothing is allocated, and every mistake is named."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from thalweg.errors import CommandError
from thalweg.plan import plan
from thalweg.plan.models import Tensor
from thalweg.plan.sources import resolve

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a module into the current folder; nothing of it stays imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)

    def write_module(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        monkeypatch.delitem(sys.modules, name, raising=False)

    yield write_module  # type: ignore[misc]
    for name in set(sys.modules) - before:
        if name.startswith("planned_"):
            del sys.modules[name]


def said(text: str) -> str:
    with pytest.raises(CommandError) as error:
        resolve(text)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_torch_model_too_large_for_any_memory(write: Write) -> None:
    pytest.importorskip("torch")
    write(
        "planned_torch",
        """
        import torch

        class Inner:
            @staticmethod
            def build():
                model = torch.nn.Sequential(torch.nn.Linear(10**6, 10**6), torch.nn.LayerNorm(8))
                model.tied = model[0]
                model[1].weight.requires_grad_(False)
                return model.bfloat16()

        class Net(torch.nn.Module):
            def __init__(self, width=3):
                super().__init__()
                self.layer = torch.nn.Linear(width, 2)
        """,
    )
    model = resolve("planned_torch:Inner.build")
    assert model.tensors == (
        Tensor("0.weight", (10**6, 10**6), "bfloat16"),
        Tensor("0.bias", (10**6,), "bfloat16"),
        Tensor("1.bias", (8,), "bfloat16"),
    )
    assert model.frozen == (Tensor("1.weight", (8,), "bfloat16"),)
    assert model.about == "Sequential of torch"
    assert resolve("planned_torch:Net").tensors == (Tensor("layer.weight", (2, 3)), Tensor("layer.bias", (2,)))
    assert resolve("planned_torch:Net", "float16").tensors[0].dtype == "float16"


def test_adapters_beside_frozen_weights(write: Write) -> None:
    """As LoRA has them: the weights that are adapted take memory, in whatever dtype, and no gradient and no state."""
    pytest.importorskip("torch")
    write(
        "planned_adapters",
        """
        import torch

        class Adapted(torch.nn.Module):
            def __init__(self, dtype=torch.bfloat16):
                super().__init__()
                self.base = torch.nn.Parameter(torch.zeros(1024, 512, dtype=dtype), requires_grad=False)
                self.down = torch.nn.Parameter(torch.zeros(8, 512))
                self.up = torch.nn.Parameter(torch.zeros(1024, 8))

        def packed():
            return Adapted(torch.uint8)

        def all_frozen():
            return Adapted().requires_grad_(False)
        """,
    )
    trained = 8 * 512 + 8 * 1024
    for factory, size in (("Adapted", 2), ("packed", 1)):
        share = plan(f"planned_adapters:{factory}", optimizers=["LAMB"], device="cpu").costs[0].share
        assert share.frozen_bytes == size * 1024 * 512
        assert share.parameter_bytes == 4 * trained
        assert share.state_bytes == 8 * trained + 4 * 2
        assert share.total_bytes == share.frozen_bytes + 8 * trained + share.state_bytes + (share.peak_bytes or 0)
    # a dtype of fewer bits was chosen for its own sake
    stored = {name: resolve(f"planned_adapters:{name}", "fp16").frozen[0].dtype for name in ("Adapted", "packed")}
    assert stored == {"Adapted": "float16", "packed": "uint8"}
    more = resolve("planned_adapters:Adapted", frozen=["up"])
    assert [tensor.name for tensor in more.frozen] == ["base", "up"]
    assert "has no floating-point parameters that require a gradient" in said("planned_adapters:all_frozen")


def test_trees_of_jax(write: Write) -> None:
    pytest.importorskip("jax")
    write(
        "planned_jax",
        """
        import jax, jax.numpy as jnp

        def in_torch():
            import torch
            return torch.nn.Linear(10**6, 10**6)

        def build(key):
            large = jax.random.normal(key, (10**6, 10**6), "bfloat16")
            return {"w": large, "layers": [jnp.zeros(3, "float32")], "n": 3}
        """,
    )
    model = resolve("planned_jax:build")
    assert set(model.tensors) == {Tensor("layers.0", (3,)), Tensor("w", (10**6, 10**6), "bfloat16")}
    pytest.importorskip("torch")
    assert [tensor.shape for tensor in resolve("planned_jax:in_torch").tensors] == [(10**6, 10**6), (10**6,)]


def test_modules_of_flax(write: Write) -> None:
    pytest.importorskip("flax")
    write(
        "planned_flax",
        """
        from flax import nnx

        class Net(nnx.Module):
            def __init__(self, rngs: nnx.Rngs):
                self.layer = nnx.Linear(10**6, 10**6, rngs=rngs)
                self.norm = nnx.BatchNorm(4, rngs=rngs)
                self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def build():
            return Net(nnx.Rngs(0))
        """,
    )
    for factory in ("Net", "build"):
        model = resolve(f"planned_flax:{factory}")
        shapes = {tensor.name: tensor.shape for tensor in model.tensors}
        layer = {"layer.bias": (10**6,), "layer.kernel": (10**6, 10**6)}
        assert shapes == {**layer, "norm.bias": (4,), "norm.scale": (4,)}


def test_mistakes_are_named(write: Write) -> None:
    write("planned_wrong", "def build(): return 3\nnumber = 3")
    write("planned_needs", "import something_that_is_not_installed")
    write("planned_broken", "1 / 0")
    for text, words in {
        "planned_missing:build": "there is no module 'planned_missing'",
        "planned_missing.inner:build": "or among the installed ones",
        "planned_wrong:bulid": "module 'planned_wrong' has no 'bulid': did you mean 'build'?",
        "planned_wrong:number": "planned_wrong:number cannot be called: it is a int",
        "planned_wrong:": "'planned_wrong:' is not a factory function: write module:attribute, such as mymodel:build",
        "planned_needs:build": "No module named 'something_that_is_not_installed'",
        "planned_broken:build": "line 1): ZeroDivisionError: division by zero",
    }.items():
        assert words in said(text)


def test_results_that_are_no_model_are_named(write: Write) -> None:
    pytest.importorskip("torch")
    source = """
    import torch

    def build(): return "a word"
    def fails(): raise RuntimeError('no\\nsuch')
    def asks(width): return width
    def empty(): return torch.nn.ReLU()
    def imaginary():
        module = torch.nn.Module()
        module.p = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        return module
    """
    write("planned_results", source)
    wanted = "it must return a torch.nn.Module, an nnx.Module or a tree of JAX arrays"
    for name, words in {
        "build": f"planned_results:build returned a str: {wanted}",
        "fails": "planned_results:fails could not be built: RuntimeError: no",
        "asks": "planned_results:asks could not be built: TypeError",
        "empty": "planned_results:empty has no floating-point parameters",
        "imaginary": "the tensor 'p' has dtype complex64, which cannot be trained:",
    }.items():
        assert words in said(f"planned_results:{name}")


def test_neither_framework(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("planned_plain", "def build(): return {}")
    for module in [name for name in sys.modules if name.partition(".")[0] in ("torch", "jax")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert 'a factory needs torch or JAX: pip install "thalweg[torch]" or "thalweg[jax]"' in said("planned_plain:build")
