"""Where transformers is installed it tells the parameters of a configuration; where it is not, a table does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from thalweg.plan import library
from thalweg.plan.configurations import from_configuration
from thalweg.plan.families import FAMILIES
from thalweg.plan.library import without_elsewhere
from thalweg.plan.sources import resolve

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}
SEEN = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6, "image_size": 32}
#: What today's models say, as small as they can be.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"architectures": ["Gemma3ForCausalLM"], **SMALL},
    "gemma3": {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": SMALL, "vision_config": SEEN},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], **SMALL, "num_experts": 4},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], **SMALL, "pad_token_id": 0},
    "modernbert": {"architectures": ["ModernBertModel"], **SMALL, "pad_token_id": 0},
    "vit": {"architectures": ["ViTModel"], **SEEN},
    "whisper": {"architectures": ["WhisperForConditionalGeneration"], "d_model": 48},
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoConfig": "elsewhere.Config", "AutoModelForCausalLM": "elsewhere.Model"},
        "quantization_config": {"quant_method": "fp8"},
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        **SMALL,
        "num_key_value_heads": 6,
    },
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], **SMALL, "pad_token_id": 0, "num_local_experts": 4},
    "llama4": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": {**SMALL, "pad_token_id": 0, "num_local_experts": 2},
        "vision_config": SEEN,
    },
}


def configured(kind: str, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **CONFIGURATIONS[kind], "dtype": "bfloat16", **more}


@pytest.fixture
def transformers() -> Any:
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_todays_models_are_asked_of_transformers(kind: str, transformers: Any, tmp_path: Path) -> None:
    import torch

    path = tmp_path / "config.json"
    path.write_text(json.dumps(configured(kind)))
    model = resolve(str(path))
    [architecture] = CONFIGURATIONS[kind]["architectures"]
    assert model.about == f"{architecture}, shapes from transformers {transformers.__version__}"
    config = transformers.CONFIG_MAPPING[kind].from_dict(without_elsewhere(configured(kind)))
    with torch.device("meta"):
        wanted = getattr(transformers, architecture)._from_config(config)
    for tensors, trained in ((model.tensors, True), (model.frozen, False)):
        theirs = [(n, tuple(p.shape), p.dtype) for n, p in wanted.named_parameters() if p.requires_grad is trained]
        assert [(t.name, t.shape, getattr(torch, t.dtype)) for t in tensors] == theirs
    assert torch.get_default_dtype() == torch.float32
    assert {tensor.dtype for tensor in resolve(str(path), "fp16").tensors} == {"float16"}


@pytest.mark.parametrize("kind", sorted(CONFIGURATIONS.keys() & FAMILIES.keys()))
def test_the_table_says_what_transformers_says(kind: str, transformers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = from_configuration("m", configured(kind))
    monkeypatch.setitem(sys.modules, "transformers", None)
    mine = from_configuration("m", configured(kind))
    assert mine.about == f"{FAMILIES[kind].built}, shapes from thalweg's own table"
    assert (mine.tensors, mine.frozen) == (told.tensors, told.frozen)


def test_a_class_that_no_table_has_is_named_to_whoever_lacks_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    model = from_configuration("m", configured("vit", architectures=["ViTForImageClassification"]))
    wanted = "ViTModel, shapes from thalweg's own table; install transformers to plan ViTForImageClassification"
    assert model.about == wanted


def test_the_class_that_is_named_is_built(transformers: Any) -> None:
    model = from_configuration("m", configured("vit", architectures=["ViTForImageClassification"], num_labels=7))
    assert model.tensors[-1].shape == (7,)
    assert model.about.startswith("ViTForImageClassification, ")
    # a class that is not there, or of another family, is not
    for architectures in (["OfSomebody"], ["BertModel"], ["logging"], [3], "ViTModel", None):
        assert from_configuration("m", configured("vit", architectures=architectures)).about.startswith("ViTModel, ")
    # none named, and no table: the head that predicts words, if there is one
    mamba = from_configuration("m", {"model_type": "mamba", "hidden_size": 48, "num_hidden_layers": 1})
    assert mamba.about.startswith("MambaForCausalLM, ")
    swin = from_configuration("m", {"model_type": "dinov2", **SEEN})
    assert swin.about.startswith("Dinov2Model, ")


def test_what_leads_elsewhere_is_left_out() -> None:
    given = {
        "auto_map": {"AutoModel": "x"},
        "width": 3,
        "text_config": {"_attn_implementation": "somebody/kernel", "use_pretrained_backbone": True},
    }
    assert without_elsewhere(given) == {"width": 3, "text_config": {"use_pretrained_backbone": False}}
    assert "auto_map" in given


def test_what_transformers_does_not_build_is_told(transformers: Any, tmp_path: Path) -> None:
    with pytest.raises(library.Declined, match=r"transformers \S+ does not know the model type 'resnet50'"):
        library.built("m", {"model_type": "resnet50"}, None, None)
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "mamba", "hidden_size": "wide"}')
    with pytest.raises(
        ValueError, match=r"config.json: transformers \S+ could not build it: .*; give its .safetensors"
    ):
        resolve(str(path))
    # the table may know better, and says why it was asked
    model = from_configuration("m", configured("olmo2", hidden_act="squared away"))
    assert "shapes from thalweg's own table: transformers" in model.about


def test_built_in_models_and_shapes_do_not_load_transformers(tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text('{"w": [3, 4]}')
    program = (
        "import sys; from thalweg.plan import plan; plan('gpt2', device='cpu'); plan('shapes.json', device='cpu'); "
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
