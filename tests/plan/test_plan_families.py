"""Names and shapes from configurations are those of the models that transformers builds from them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from thalweg.errors import CommandError
from thalweg.plan.families import FAMILIES, tensors_of
from thalweg.plan.models import CONFIGURATIONS

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "vocab_size": 101,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
SEEN = {**{k: v for k, v in SMALL.items() if k != "vocab_size"}, "image_size": 33, "patch_size": 8}

#: Options that change which parameters there are, or their shapes.
CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in FAMILIES),  # the defaults, in their real sizes
    *((str(config["model_type"]), dict(config)) for _, config in CONFIGURATIONS.values() if "num" in str(config)),
    ("gpt2", {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_inner": 100, "vocab_size": 101, "n_positions": 33}),
    ("gpt2", {"n_embd": 48, "n_layer": 1, "n_head": 6, "add_cross_attention": True, "tie_word_embeddings": False}),
    ("gpt2", {"hidden_size": 48, "num_hidden_layers": 2, "n_head": 6, "max_position_embeddings": 33}),
    ("llama", {**SMALL, "attention_bias": True, "mlp_bias": True}),
    ("llama", {**GROUPED, "head_dim": 20, "tie_word_embeddings": True}),
    ("mistral", {**GROUPED, "head_dim": None}),
    ("mistral", {**GROUPED, "head_dim": 20, "tie_word_embeddings": True}),
    ("mixtral", {**GROUPED, "num_local_experts": 3}),
    ("qwen2", {**GROUPED, "tie_word_embeddings": True}),
    ("qwen3", {**GROUPED, "attention_bias": True}),
    ("qwen3", {**GROUPED, "head_dim": 20, "tie_word_embeddings": True}),
    ("gemma", {**GROUPED, "head_dim": 20}),
    ("gemma2", {**GROUPED, "head_dim": 20, "attention_bias": True}),
    ("phi3", {**GROUPED, "tie_word_embeddings": True, "pad_token_id": 0}),
    ("gpt_neox", {**SMALL, "attention_bias": False}),
    ("gpt_neox", {**SMALL, "tie_word_embeddings": True}),
    ("opt", {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "ffn_dim": 80}),
    ("opt", {"hidden_size": 48, "num_attention_heads": 6, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    (
        "opt",
        {"hidden_size": 48, "num_attention_heads": 6, "enable_bias": False, "layer_norm_elementwise_affine": False},
    ),
    ("bert", {**SMALL, "type_vocab_size": 3}),
    ("bert", {**SMALL, "is_decoder": True, "add_cross_attention": True}),
    ("roberta", {**SMALL, "max_position_embeddings": 33}),
    ("electra", {**SMALL, "embedding_size": 48}),
    ("electra", SMALL),
    ("distilbert", {"dim": 48, "n_layers": 2, "n_heads": 6, "hidden_dim": 80}),
    ("distilbert", {"hidden_size": 48, "num_hidden_layers": 2, "n_heads": 6}),
    ("t5", {"d_model": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 3, "d_kv": 20, "d_ff": 80}),
    ("qwen3_moe", {**GROUPED, "num_experts": 4, "moe_intermediate_size": 24, "attention_bias": True}),
    (
        "qwen3_moe",
        {**GROUPED, "num_hidden_layers": 5, "num_experts": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2},
    ),
    ("olmo2", {**GROUPED, "attention_bias": True}),
    ("olmo2", {**SMALL, "tie_word_embeddings": True}),
    ("gemma3_text", {**GROUPED, "head_dim": 20, "attention_bias": True}),
    ("gemma3", {"text_config": {**GROUPED, "head_dim": 20}, "vision_config": {**SEEN, "vision_use_head": False}}),
    ("gemma3", {"text_config": GROUPED, "vision_config": SEEN, "tie_word_embeddings": False}),
    ("modernbert", {**SMALL, "pad_token_id": 0, "norm_bias": True, "attention_bias": True, "mlp_bias": True}),
    ("vit", {**SEEN, "qkv_bias": False}),
    ("vit", {**SEEN, "pooler_output_size": 20, "num_channels": 1}),
    ("whisper", {"d_model": 48, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 6}),
    ("whisper", {"encoder_ffn_dim": 80, "decoder_ffn_dim": 90, "num_mel_bins": 128, "tie_word_embeddings": False}),
    ("t5", {"d_model": 48, "num_layers": 2, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
]


def built_by_transformers(kind: str, options: dict[str, Any]) -> tuple[str, list[tuple[str, tuple[int, ...]]], Any]:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in options.items() if k != "model_type"})
    with torch.device("meta"):
        model = getattr(transformers, FAMILIES[kind].built)(config)
    found = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    return type(model).__name__, found, config


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_parameters_are_those_that_transformers_builds(kind: str, options: dict[str, Any]) -> None:
    built, wanted, config = built_by_transformers(kind, options)
    assert built == FAMILIES[kind].built
    assert list(tensors_of({"model_type": kind, **options})) == wanted
    # as it is written to a file, whole, and without what equals the defaults
    for text in (config.to_json_string(use_diff=False), config.to_json_string(use_diff=True)):
        assert list(tensors_of(json.loads(text))) == wanted


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_class_is_the_one_that_transformers_takes_by_itself(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    built = FAMILIES[kind].built
    auto = {
        "ForCausalLM": ["CAUSAL_LM"],
        "LMHeadModel": ["CAUSAL_LM"],
        "ForConditionalGeneration": ["SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ"],
    }
    tasks = next((tasks for end, tasks in auto.items() if built.endswith(end)), [])
    names = [f"MODEL_FOR_{task}_MAPPING" for task in tasks] or ["MODEL_MAPPING"]
    config = transformers.AutoConfig.for_model(kind)
    taken = [mapping[type(config)] for name in names if type(config) in (mapping := getattr(transformers, name))]
    assert built in [found.__name__ for found in taken]


def test_a_type_that_is_not_known_is_told_what_is() -> None:
    wanted = (
        r"install transformers and torch to plan mamba: without them there are bert, .*, xlm-roberta; .*safetensors"
    )
    with pytest.raises(CommandError, match=wanted):
        tensors_of({"model_type": "mamba"})
    with pytest.raises(CommandError, match="no model_type"):
        tensors_of({"hidden_size": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": "768"}, "hidden_size must be a whole number from 1 on, got '768'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a whole number from 1 on, got -1"),
        ({"vocab_size": True}, "vocab_size must be a whole number from 1 on, got True"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
    ],
)
def test_a_value_that_cannot_be_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        list(tensors_of({"model_type": "llama", **options}))
