"""Models from files: headers of safetensors, configurations, shapes; and what is said of files that are none."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thalweg.errors import CommandError
from thalweg.plan.costs import parameter_bytes
from thalweg.plan.models import Tensor
from thalweg.plan.sources import resolve

pytest.importorskip("safetensors")

KINDS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "U8": 1, "F8_E4M3": 1}


def written(path: Path, entries: dict[str, tuple[str, list[int]]], *, metadata: bool = True) -> Path:
    """A safetensors file of zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if metadata else {}
    end = 0
    for name, (kind, shape) in entries.items():
        start, end = end, end + KINDS[kind] * int(np.prod(shape))
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return path


def said(path: Path | str, dtype: str | None = None) -> str:
    with pytest.raises(CommandError) as error:
        resolve(str(path), dtype)
    message = str(error.value)
    assert "\n" not in message
    return message


# ---- safetensors


def test_one_file(tmp_path: Path) -> None:
    path = written(tmp_path / "m.safetensors", {"w": ("BF16", [6, 4]), "b": ("F32", [6]), "s": ("F64", [])})
    model = resolve(str(path))
    assert model.tensors == (Tensor("w", (6, 4), "bfloat16"), Tensor("b", (6,)), Tensor("s", (), "float64"))
    assert {tensor.dtype for tensor in resolve(str(path), "float16").tensors} == {"float16"}


def test_files_that_the_library_itself_writes(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    library.save_file(
        {"w": np.zeros((3, 5), np.float32), "e": np.zeros((0, 2), np.float16)}, tmp_path / "m.safetensors"
    )
    assert set(resolve(str(tmp_path)).tensors) == {Tensor("w", (3, 5)), Tensor("e", (0, 2), "float16")}


@pytest.mark.parametrize("with_index", [True, False])
def test_a_folder_of_parts(tmp_path: Path, with_index: bool) -> None:
    written(tmp_path / "model-00001-of-00002.safetensors", {"a": ("F32", [2, 2])}, metadata=False)
    written(tmp_path / "model-00002-of-00002.safetensors", {"b": ("F32", [3])})
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')  # is not looked at
    index = tmp_path / "model.safetensors.index.json"
    if with_index:
        written(tmp_path / "old.safetensors", {"a": ("F32", [2, 2])})  # is not named by the index
        names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    model = resolve(str(tmp_path))
    assert model.tensors == (Tensor("a", (2, 2)), Tensor("b", (3,)))
    assert model.about == "2 safetensors files"
    if with_index:
        assert resolve(str(index)).tensors == model.tensors


def test_nothing_but_headers_is_read(tmp_path: Path) -> None:
    """A file of 3 TB, all hole."""
    text = json.dumps({"w": {"dtype": "F32", "shape": [750_000, 1_000_000], "data_offsets": [0, 3 * 10**12]}}).encode()
    path = tmp_path / "huge.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        try:
            file.truncate(8 + len(text) + 3 * 10**12)
        except OSError:
            pytest.skip("this file system has no such large files")
    assert resolve(str(path)).parameters == 75 * 10**10


def test_what_is_not_trained_is_left_out(tmp_path: Path) -> None:
    entries = {
        "h.0.attn.bias": ("F32", [1, 1, 8, 8]),  # GPT-2's mask
        "h.0.attn.c_attn.bias": ("F32", [24]),
        "bn.running_mean": ("F32", [8]),
        "bn.num_batches_tracked": ("I64", []),
        "rotary.inv_freq": ("F32", [4]),
        "attn.bias": ("F32", [8]),
    }
    model = resolve(str(written(tmp_path / "m.safetensors", entries)))  # type: ignore[arg-type]
    assert [tensor.name for tensor in model.tensors] == ["h.0.attn.c_attn.bias", "attn.bias"]
    assert model.about == "1 safetensors file, 4 tensors that are no parameter left out"


def test_dtypes_that_nobody_trains_in_need_another_unless_they_are_frozen(tmp_path: Path) -> None:
    path = written(tmp_path / "m.safetensors", {"base.w": ("F8_E4M3", [4, 4]), "up": ("BF16", [4])})
    assert "the tensor 'base.w' has dtype F8_E4M3, which cannot be trained: set another with --dtype" in said(path)
    assert resolve(str(path), "bfloat16").tensors[0] == Tensor("base.w", (4, 4), "bfloat16")
    for dtype, wanted in ((None, "bfloat16"), ("float32", "float32")):
        model = resolve(str(path), dtype, ["base.*"])
        assert model.tensors == (Tensor("up", (4,), wanted),)
        assert sum(map(parameter_bytes, model.frozen)) == 16


DAMAGED = "is damaged, or not a safetensors file: "


def entry(**told: Any) -> bytes:
    """A file whose only tensor is told like this."""
    text = json.dumps({"w": {"dtype": "F32", "data_offsets": [0, 0], **told}}).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", f"{DAMAGED}Error while deserializing header"),
        (b"1234567", DAMAGED),
        (struct.pack("<Q", 2**60) + b"{}", f"{DAMAGED}Error while deserializing header: header too large"),
        (struct.pack("<Q", 0), DAMAGED),
        (struct.pack("<Q", 100) + b"{}", DAMAGED),
        (struct.pack("<Q", 4) + b"{a:}", DAMAGED),
        (struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc", DAMAGED),
        (struct.pack("<Q", 2) + b"[]", DAMAGED),
        (struct.pack("<Q", 8) + b'{"w": 1}', DAMAGED),
        (struct.pack("<Q", 2) + b"{}", "it has no floating-point tensor"),
        (b"\x80\x02}q\x00." + bytes(20), "is a pickle, which plan does not open: save the model as safetensors"),
        (b"PK\x03\x04" + bytes(20), "is a pickle"),
        (entry(shape=[4], data_offsets=[0, 16]), f"{DAMAGED}Error"),
        (entry(shape=[2, -2]), "is damaged"),
        (entry(shape=[2], dtype=3), "is damaged"),
        (entry(shape="2"), "is damaged"),
        (entry(), "is damaged"),
        (entry(shape=[0] * 1000), "is damaged"),
        (entry(shape=[2**63, 0]), "is damaged"),
    ],
)
def test_damaged_files_are_told(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    assert message in said(path)
    assert str(path) in said(path)


def test_who_lacks_safetensors_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "m.safetensors", {"w": ("F32", [4])})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert said(path) == f"{path}: install safetensors to plan it: pip install safetensors"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"weight_map": {"a": "gone.safetensors"}}', "names a file that is not there"),
        ('{"weight_map": {"a": "../outside.safetensors"}}', "names a file that is not there"),
        ('{"weights": {}}', "it has no weight_map"),
        ("{", "is not valid JSON"),
    ],
)
def test_indexes_that_lead_nowhere_or_out_of_their_folder_are_told(tmp_path: Path, content: str, message: str) -> None:
    written(tmp_path / "outside.safetensors", {"a": ("F32", [2])})
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "model.safetensors.index.json").write_text(content)
    assert message in said(tmp_path / "inside")


def test_a_tensor_in_two_files_is_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        written(tmp_path / f"{name}.safetensors", {"w": ("F32", [4])})
    assert "the tensor 'w' is in another file of this model as well" in said(tmp_path)


# ---- JSON


def test_a_configuration(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "torch_dtype": "bfloat16"}))
    model = resolve(str(path))
    assert model.about.startswith("GPT2LMHeadModel, shapes from transformers")
    assert model.tensors[0] == Tensor("transformer.wte.weight", (50257, 768), "bfloat16")
    assert resolve(str(tmp_path)).tensors == model.tensors
    assert resolve(str(path), "float32").tensors[0].dtype == "float32"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "this configuration has no model_type"),
        ({"model_type": ["gpt2"]}, "model_type must be a name such as 'llama', got ['gpt2']"),
        ({"model_type": "gpt2", "n_layer": 10**9}, "the configuration's n_layer is 1000000000, and may be 10,000 at"),
        ({"model_type": "gpt2", "n_layer": 1, "dtype": "int8"}, "has dtype int8, which cannot be trained: set another"),
    ],
)
def test_configurations_that_cannot_be_read_are_told(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    if "dtype" in config:
        pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert message in said(path)
    assert str(path) in said(path)


@pytest.mark.parametrize(
    ("content", "tensors"),
    [
        ({"w": [3, 4], "s": []}, (Tensor("w", (3, 4)), Tensor("s", ()))),
        ([[3, 4], [3]], (Tensor("tensor.0", (3, 4)), Tensor("tensor.1", (3,)))),
        (
            {"w": {"shape": [3], "dtype": "BF16"}, "v": {"shape": [2]}},
            (Tensor("w", (3,), "bfloat16"), Tensor("v", (2,))),
        ),
    ],
)
def test_shapes(tmp_path: Path, content: Any, tensors: tuple[Tensor, ...]) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(content))
    assert resolve(str(path)).tensors == tensors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "must hold shapes, such as"),
        ("3", "must hold shapes, such as"),
        ('{"w": 3}', "'w' must have a shape, a list of whole numbers >= 0, got 3"),
        ('{"w": [2.5]}', "'w' must have a shape"),
        ('{"w": [true]}', "'w' must have a shape"),
        ('{"w": {"shape": [2], "dtype": "int8"}}', "'w' has dtype 'int8': there are float32 (or fp32, f32)"),
        ('{"w": {"dtype": "float32"}}', "'w' must have a shape"),
    ],
)
def test_shapes_that_are_none_are_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(text)
    assert message in said(path)


# ---- what else MODEL may be


def test_words_that_mean_nothing_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no model 'gtp2': did you mean 'gpt2'?" in said("gtp2")
    assert "there is no file or folder missing/model.safetensors" in said("missing/model.safetensors")
    assert "there is no file or folder config.json" in said("config.json")
    assert "there are no .safetensors files and no config.json in" in said(tmp_path)
    for name in ("pytorch_model.bin", "model.pt", "last.ckpt"):
        (tmp_path / name).write_bytes(b"\x80\x02.")
        assert "may be a pickle, which plan does not open" in said(name)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "model.gguf must be a .safetensors or a .json file" in said("model.gguf")


def test_names_on_a_hub_are_told_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = said("meta-llama/Llama-3.1-8B")
    assert "there is no file or folder meta-llama/Llama-3.1-8B, and plan downloads nothing" in message
    download = (
        "`hf download meta-llama/Llama-3.1-8B config.json --local-dir Llama-3.1-8B`, then `thalweg plan Llama-3.1-8B`"
    )
    assert download in message
    for command in ("config.json", "model.safetensors", "model.safetensors.index.json", "mymodel:build"):
        assert f"`thalweg plan {command}`" in message
    assert "it is built in, `thalweg plan gpt2`" in said("openai-community/gpt2")
    # paths that are misspelt
    (tmp_path / "checkpoints").mkdir()
    for path in ("checkpoints/mistal", "./org/name", "a/b/c", "/org/name", "org/model.safetensors"):
        assert said(path) == f"there is no file or folder {path}"
    # what is there is read
    (tmp_path / "checkpoints" / "tiny").mkdir()
    written(tmp_path / "checkpoints" / "tiny" / "m.safetensors", {"w": ("F32", [4])})
    assert resolve("checkpoints/tiny").parameters == 4


def test_a_built_in_name_wins_over_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert resolve("gpt2").parameters == 124_439_808
    assert "no config.json in gpt2" in said("./gpt2")
