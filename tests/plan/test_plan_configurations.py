"""Models that are built in, and configurations, of which transformers tells the parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lanes import one_in

from thalweg.errors import CommandError
from thalweg.plan.models import BUILTIN, builtin
from thalweg.plan.sources import from_configuration, resolve, without_elsewhere

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


#: Published counts of parameters and tensors.
COUNTS = [
    ("gpt2", 124_439_808, 148),
    ("bert-large", 335_141_888, 391),
    ("resnet50", 25_557_032, 161),
    ("llama-1b", 1_235_814_400, 146),
    ("llama-8b", 8_030_261_248, 291),
    ("llama-70b", 70_553_706_496, 723),
    ("small", 894_848, 148),
]


@pytest.mark.parametrize(("name", "parameters", "tensors"), COUNTS)
def test_counts_are_those_published(name: str, parameters: int, tensors: int) -> None:
    model = builtin(name)
    assert (model.name, model.parameters, len(model.tensors)) == (name, parameters, tensors)
    assert len({tensor.name for tensor in model.tensors}) == tensors
    assert {tensor.dtype for tensor in model.tensors} == {"float32"}
    assert tuple(name for name, *_ in COUNTS) == BUILTIN


def test_other_spellings_are_understood() -> None:
    spelt = {"bert_large": "bert-large", "llama1b": "llama-1b", "GPT2": "gpt2"}
    assert {spelling: builtin(spelling).name for spelling in spelt} == spelt


@pytest.fixture
def transformers() -> Any:
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_in(4, CONFIGURATIONS))
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


#: The configurations of what is built in.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2"},
    "bert-large": {
        "model_type": "bert",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    **{
        name: {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "tie_word_embeddings": name == "llama-1b",
        }
        for name, hidden, inner, layers, heads in (
            ("llama-1b", 2048, 8192, 16, 32),
            ("llama-8b", 4096, 14336, 32, 32),
            ("llama-70b", 8192, 28672, 80, 64),
        )
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(5, PUBLISHED))
def test_what_is_built_in_is_what_transformers_builds(name: str, transformers: Any) -> None:
    asked = {"architectures": ["BertModel"]} if name == "bert-large" else {}
    assert builtin(name).tensors == from_configuration("m", {**PUBLISHED[name], **asked}).tensors


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_what_to_install_is_told_in_one_sentence(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "transformers":
        pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(CommandError) as error:
        from_configuration("config.json", configured("qwen3_moe"))
    assert str(error.value) == (
        f"config.json: install {missing} to plan qwen3_moe: pip install torch transformers; or give its .safetensors, "
        "or module:factory, or one of gpt2, bert-large, resnet50, llama-1b, llama-8b, llama-70b, small"
    )


def test_the_class_that_is_named_is_built(transformers: Any) -> None:
    model = from_configuration("m", configured("vit", architectures=["ViTForImageClassification"], num_labels=7))
    assert model.tensors[-1].shape == (7,)
    assert model.about.startswith("ViTForImageClassification, ")
    # a class that is not there, or of another family, is not
    for architectures in (["OfSomebody"], ["BertModel"], ["logging"], [3], "ViTModel", None):
        assert from_configuration("m", configured("vit", architectures=architectures)).about.startswith("ViTModel, ")
    # none named: the head that predicts words, if there is one
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
    with pytest.raises(CommandError, match=r"m: transformers \S+ does not know the model type 'resnet50'; give its"):
        from_configuration("m", {"model_type": "resnet50"})
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "mamba", "hidden_size": "wide"}')
    with pytest.raises(
        CommandError, match=r"config.json: transformers \S+ could not build it: .*; give its .safetensors"
    ):
        resolve(str(path))


@pytest.mark.nightly
def test_built_in_models_and_shapes_do_not_load_transformers(tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text('{"w": [3, 4]}')
    program = (
        "import sys; from thalweg.plan import plan; plan('gpt2', device='cpu'); plan('shapes.json', device='cpu'); "
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
