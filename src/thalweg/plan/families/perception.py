"""Models that see and hear: names and shapes as transformers builds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thalweg.plan.families.configuration import Configuration, Family, Named, linear, norm
from thalweg.plan.families.decoders import GEMMA3, GEMMA3_SIZES, llama_like


def vit(c: Configuration) -> Named:
    hidden, inner, biased = c.size("hidden_size"), c.size("intermediate_size"), c.flag("qkv_bias")
    yield "embeddings.cls_token", (1, 1, hidden)
    yield "embeddings.position_embeddings", (1, patches(c) + 1, hidden)
    yield from patch_embedding(c, "embeddings.patch_embeddings.projection")
    for layer in range(c.size("num_hidden_layers")):
        inside = f"layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj"):
            yield from linear(f"{inside}.attention.{part}", hidden, hidden, bias=biased)
        yield from linear(f"{inside}.attention.o_proj", hidden, hidden, bias=True)
        yield from norm(f"{inside}.layernorm_before", hidden)
        yield from norm(f"{inside}.layernorm_after", hidden)
        yield from feed_forward(f"{inside}.mlp", hidden, inner)
    yield from norm("layernorm", hidden)
    yield from linear("pooler.dense", c.size("pooler_output_size", hidden), hidden, bias=True)


def gemma3(c: Configuration) -> Named:
    """A tower that sees, what leads from there to words, and the language model."""
    seeing, speaking = c.within("vision_config", VISION), c.within("text_config", GEMMA3_SIZES)
    yield from tower(seeing, "model.vision_tower")
    words = speaking.size("hidden_size")
    yield "model.multi_modal_projector.mm_input_projection_weight", (seeing.size("hidden_size"), words)
    yield "model.multi_modal_projector.mm_soft_emb_norm.weight", (seeing.size("hidden_size"),)
    yield from llama_like(speaking, **GEMMA3, prefix="model.language_model")
    if not c.flag("tie_word_embeddings"):
        yield "lm_head.weight", (speaking.size("vocab_size"), words)


def tower(c: Configuration, name: str) -> Named:
    """SigLIP's, with the head that sums up what was seen unless it is left out."""
    hidden, inner = c.size("hidden_size"), c.size("intermediate_size")
    yield from patch_embedding(c, f"{name}.embeddings.patch_embedding")
    yield f"{name}.embeddings.position_embedding.weight", (patches(c), hidden)
    for layer in range(c.size("num_hidden_layers")):
        inside = f"{name}.encoder.layers.{layer}"
        yield from norm(f"{inside}.layer_norm1", hidden)
        for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from linear(f"{inside}.self_attn.{part}", hidden, hidden, bias=True)
        yield from norm(f"{inside}.layer_norm2", hidden)
        yield from feed_forward(f"{inside}.mlp", hidden, inner)
    yield from norm(f"{name}.post_layernorm", hidden)
    if c.flag("vision_use_head"):
        yield f"{name}.head.probe", (1, 1, hidden)
        yield f"{name}.head.attention.in_proj_weight", (3 * hidden, hidden)
        yield f"{name}.head.attention.in_proj_bias", (3 * hidden,)
        yield from linear(f"{name}.head.attention.out_proj", hidden, hidden, bias=True)
        yield from norm(f"{name}.head.layernorm", hidden)
        yield from feed_forward(f"{name}.head.mlp", hidden, inner)


def patches(c: Configuration) -> int:
    side = c.size("image_size") // c.size("patch_size")
    return side * side


def patch_embedding(c: Configuration, name: str) -> Named:
    side = c.size("patch_size")
    yield f"{name}.weight", (c.size("hidden_size"), c.size("num_channels"), side, side)
    yield f"{name}.bias", (c.size("hidden_size"),)


def feed_forward(name: str, hidden: int, inner: int) -> Named:
    yield from linear(f"{name}.fc1", inner, hidden, bias=True)
    yield from linear(f"{name}.fc2", hidden, inner, bias=True)


def whisper(c: Configuration) -> Named:
    hidden = c.size("d_model")
    for place, inputs in ((1, c.size("num_mel_bins")), (2, hidden)):
        yield f"model.encoder.conv{place}.weight", (hidden, inputs, 3)
        yield f"model.encoder.conv{place}.bias", (hidden,)
    yield "model.encoder.embed_positions.weight", (c.size("max_source_positions"), hidden)
    yield from whisper_layers(c, "encoder", ("self_attn",))
    yield "model.decoder.embed_tokens.weight", (c.size("vocab_size"), hidden)
    yield "model.decoder.embed_positions.weight", (c.size("max_target_positions"), hidden)
    yield from whisper_layers(c, "decoder", ("self_attn", "encoder_attn"))
    if not c.flag("tie_word_embeddings"):
        yield "proj_out.weight", (c.size("vocab_size"), hidden)


def whisper_layers(c: Configuration, stack: str, attentions: tuple[str, ...]) -> Named:
    hidden = c.size("d_model")
    for layer in range(c.size(f"{stack}_layers")):
        inside = f"model.{stack}.layers.{layer}"
        for attention in attentions:
            for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
                yield from linear(f"{inside}.{attention}.{part}", hidden, hidden, bias=part != "k_proj")
            yield from norm(f"{inside}.{attention}_layer_norm", hidden)
        yield from feed_forward(inside, hidden, c.size(f"{stack}_ffn_dim"))
        yield from norm(f"{inside}.final_layer_norm", hidden)
    yield from norm(f"model.{stack}.layer_norm", hidden)


PICTURES: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
}
VISION: Mapping[str, Any] = {**PICTURES, "vision_use_head": True}

PERCEPTION: Mapping[str, Family] = {
    "gemma3": Family("Gemma3ForConditionalGeneration", gemma3, {"tie_word_embeddings": True}),
    "vit": Family("ViTModel", vit, {**PICTURES, "qkv_bias": True, "pooler_output_size": None}),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        whisper,
        {
            "vocab_size": 51865,
            "num_mel_bins": 80,
            "d_model": 384,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "encoder_ffn_dim": 1536,
            "decoder_ffn_dim": 1536,
            "max_source_positions": 1500,
            "max_target_positions": 448,
            "tie_word_embeddings": True,
        },
        {"d_model": "hidden_size", "encoder_layers": "num_hidden_layers"},
        # sines and cosines
        frozen=("model.encoder.embed_positions.weight",),
    ),
}
