"""Language models that predict the next token: names and shapes as transformers builds them, with their heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thalweg.errors import CommandError
from thalweg.plan.families.configuration import Configuration, Family, Named, linear, norm

# ---- Llama and those built like it


#: The norms of a layer. Gemma's are around both of its parts, OLMo 2's behind them.
NORMS = ("input_layernorm", "post_attention_layernorm")
GEMMA_NORMS = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
OLMO_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


def llama_like(
    c: Configuration,
    *,
    biased: str = "",
    norms: Sequence[str] = NORMS,
    measured: str = "",
    fed: Callable[[Configuration, str, int], Named] | None = None,
    prefix: str = "model",
) -> Named:
    """Rotary attention, a gated feed-forward part, norms without bias; no head.

    biased: projections that have biases, or "asked": all, if attention_bias is set. measured: "head" or "whole", where
    queries and keys have norms. fed: the feed-forward part of a layer.
    """
    hidden = c.size("hidden_size")
    if biased == "asked":
        biased = "qkvo" if c.flag("attention_bias") else ""
    yield f"{prefix}.embed_tokens.weight", (c.size("vocab_size"), hidden)
    for layer in range(c.size("num_hidden_layers")):
        inside = f"{prefix}.layers.{layer}"
        yield from separate_attention(c, f"{inside}.self_attn", biased, measured)
        yield from (fed or gated)(c, f"{inside}.mlp", layer)
        yield from norms_of_layer(inside, hidden, norms)
    yield f"{prefix}.norm.weight", (hidden,)


def separate_attention(c: Configuration, name: str, biased: str, measured: str) -> Named:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    size = c.size("head_dim", hidden // heads)
    queries, keys = heads * size, c.size("num_key_value_heads", heads) * size
    for letter, outputs, inputs in (("q", queries, hidden), ("k", keys, hidden), ("v", keys, hidden)):
        yield from linear(f"{name}.{letter}_proj", outputs, inputs, bias=letter in biased)
    yield from linear(f"{name}.o_proj", hidden, queries, bias="o" in biased)
    if measured:
        yield f"{name}.q_norm.weight", (size if measured == "head" else queries,)
        yield f"{name}.k_norm.weight", (size if measured == "head" else keys,)


def gated(c: Configuration, name: str, layer: int) -> Named:
    hidden, inner, bias = c.size("hidden_size"), c.size("intermediate_size"), c.get("mlp_bias") is True
    yield from linear(f"{name}.gate_proj", inner, hidden, bias=bias)
    yield from linear(f"{name}.up_proj", inner, hidden, bias=bias)
    yield from linear(f"{name}.down_proj", hidden, inner, bias=bias)


def stacked_experts(c: Configuration, name: str, inner: int) -> Named:
    """One tensor for all experts of a layer."""
    hidden, experts = c.size("hidden_size"), c.size("num_local_experts")
    yield f"{name}.experts.gate_up_proj", (experts, 2 * inner, hidden)
    yield f"{name}.experts.down_proj", (experts, hidden, inner)


def router(c: Configuration, name: str) -> Named:
    yield f"{name}.gate.weight", (c.size("num_local_experts"), c.size("hidden_size"))


def fed_by_mixtral(c: Configuration, name: str, layer: int) -> Named:
    yield from router(c, name)
    yield from stacked_experts(c, name, c.size("intermediate_size"))


def fed_by_qwen3_moe(c: Configuration, name: str, layer: int) -> Named:
    dense = c.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CommandError(f"the configuration's mlp_only_layers must be a list of layers, got {dense!r:.60}")
    if layer in dense or (layer + 1) % c.size("decoder_sparse_step"):
        yield from gated(c, name, layer)
        return
    yield from stacked_experts(c, name, c.size("moe_intermediate_size"))
    yield from router(c, name)


def norms_of_layer(inside: str, hidden: int, norms: Sequence[str] = NORMS) -> Named:
    for name in norms:
        yield f"{inside}.{name}.weight", (hidden,)


def head(c: Configuration) -> Named:
    if not c.flag("tie_word_embeddings"):
        yield "lm_head.weight", (c.size("vocab_size"), c.size("hidden_size"))


def variation(**differences: Any) -> Callable[[Configuration], Named]:
    """A family that differs from Llama in these ways, with its head."""

    def tensors(c: Configuration) -> Named:
        yield from llama_like(c, **differences)
        yield from head(c)

    return tensors


def phi3(c: Configuration) -> Named:
    """Queries, keys and values are one matrix; so are the two sides of the gate."""
    hidden, inner, heads = c.size("hidden_size"), c.size("intermediate_size"), c.size("num_attention_heads")
    size = c.size("head_dim", hidden // heads)
    queries, keys = heads * size, c.size("num_key_value_heads", heads) * size
    yield "model.embed_tokens.weight", (c.size("vocab_size"), hidden)
    for layer in range(c.size("num_hidden_layers")):
        inside = f"model.layers.{layer}"
        yield f"{inside}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{inside}.self_attn.qkv_proj.weight", (queries + 2 * keys, hidden)
        yield f"{inside}.mlp.gate_up_proj.weight", (2 * inner, hidden)
        yield f"{inside}.mlp.down_proj.weight", (hidden, inner)
        yield from norms_of_layer(inside, hidden)
    yield "model.norm.weight", (hidden,)
    yield from head(c)


# ---- others


def gpt2(c: Configuration) -> Named:
    """Its projections are stored the other way around: inputs x outputs."""
    hidden = c.size("n_embd")
    inner, crossed = c.size("n_inner", 4 * hidden), c.flag("add_cross_attention")
    yield "transformer.wte.weight", (c.size("vocab_size"), hidden)
    yield "transformer.wpe.weight", (c.size("n_positions"), hidden)
    for layer in range(c.size("n_layer")):
        inside = f"transformer.h.{layer}"
        yield from norm(f"{inside}.ln_1", hidden)
        yield from turned(f"{inside}.attn.c_attn", hidden, 3 * hidden)
        yield from turned(f"{inside}.attn.c_proj", hidden, hidden)
        yield from norm(f"{inside}.ln_2", hidden)
        if crossed:
            yield from turned(f"{inside}.crossattention.c_attn", hidden, 2 * hidden)
            yield from turned(f"{inside}.crossattention.q_attn", hidden, hidden)
            yield from turned(f"{inside}.crossattention.c_proj", hidden, hidden)
            yield from norm(f"{inside}.ln_cross_attn", hidden)
        yield from turned(f"{inside}.mlp.c_fc", hidden, inner)
        yield from turned(f"{inside}.mlp.c_proj", inner, hidden)
    yield from norm("transformer.ln_f", hidden)
    if not c.flag("tie_word_embeddings"):
        yield "lm_head.weight", (c.size("vocab_size"), hidden)


def turned(name: str, inputs: int, outputs: int) -> Named:
    yield f"{name}.weight", (inputs, outputs)
    yield f"{name}.bias", (outputs,)


def gpt_neox(c: Configuration) -> Named:
    hidden, inner, biased = c.size("hidden_size"), c.size("intermediate_size"), c.flag("attention_bias")
    yield "gpt_neox.embed_in.weight", (c.size("vocab_size"), hidden)
    for layer in range(c.size("num_hidden_layers")):
        inside = f"gpt_neox.layers.{layer}"
        yield from norm(f"{inside}.input_layernorm", hidden)
        yield from norm(f"{inside}.post_attention_layernorm", hidden)
        yield from linear(f"{inside}.attention.query_key_value", 3 * hidden, hidden, bias=biased)
        yield from linear(f"{inside}.attention.dense", hidden, hidden, bias=biased)
        yield from linear(f"{inside}.mlp.dense_h_to_4h", inner, hidden, bias=True)
        yield from linear(f"{inside}.mlp.dense_4h_to_h", hidden, inner, bias=True)
    yield from norm("gpt_neox.final_layer_norm", hidden)
    if not c.flag("tie_word_embeddings"):
        yield "lm_head.weight", (c.size("vocab_size"), hidden)


def opt(c: Configuration) -> Named:
    hidden, inner, biased = c.size("hidden_size"), c.size("ffn_dim"), c.flag("enable_bias")
    words, affine = c.size("word_embed_proj_dim", hidden), c.flag("layer_norm_elementwise_affine")

    def layer_norm(name: str) -> Named:
        return norm(name, hidden) if affine else iter(())

    yield "model.decoder.embed_tokens.weight", (c.size("vocab_size"), words)
    # the first two positions are never used
    yield "model.decoder.embed_positions.weight", (c.size("max_position_embeddings") + 2, hidden)
    if words != hidden:
        yield "model.decoder.project_out.weight", (words, hidden)
        yield "model.decoder.project_in.weight", (hidden, words)
    if c.flag("do_layer_norm_before") and not c.flag("_remove_final_layer_norm"):
        yield from layer_norm("model.decoder.final_layer_norm")
    for layer in range(c.size("num_hidden_layers")):
        inside = f"model.decoder.layers.{layer}"
        for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from linear(f"{inside}.self_attn.{part}", hidden, hidden, bias=biased)
        yield from layer_norm(f"{inside}.self_attn_layer_norm")
        yield from linear(f"{inside}.fc1", inner, hidden, bias=biased)
        yield from linear(f"{inside}.fc2", hidden, inner, bias=biased)
        yield from layer_norm(f"{inside}.final_layer_norm")
    if not c.flag("tie_word_embeddings"):
        yield "lm_head.weight", (c.size("vocab_size"), words)


# ---- what transformers takes where a configuration is silent


def sizes(
    vocabulary: int, hidden: int, inner: int, layers: int, heads: int, groups: int | None, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "tie_word_embeddings": False,
        "attention_bias": False,
        **more,
    }


def tied_sizes(*counts: int) -> dict[str, Any]:
    """Gemma's: heads of 256, and a head that is the embedding."""
    return sizes(*counts, head_dim=256, tie_word_embeddings=True)


#: The language model of Gemma 3, by itself or beside a tower that sees.
GEMMA3: Mapping[str, Any] = {"biased": "asked", "measured": "head", "norms": GEMMA_NORMS}
GEMMA3_SIZES = tied_sizes(262208, 2304, 9216, 26, 8, 4)

DECODERS: Mapping[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        gpt2,
        {
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_inner": None,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
        },
        {"n_embd": "hidden_size", "n_positions": "max_position_embeddings", "n_layer": "num_hidden_layers"},
    ),
    "llama": Family(
        "LlamaForCausalLM", variation(biased="asked"), sizes(32000, 4096, 11008, 32, 32, None, mlp_bias=False)
    ),
    "mistral": Family("MistralForCausalLM", variation(), sizes(32000, 4096, 14336, 32, 32, 8)),
    "mixtral": Family(
        "MixtralForCausalLM", variation(fed=fed_by_mixtral), sizes(32000, 4096, 14336, 32, 32, 8, num_local_experts=8)
    ),
    "qwen2": Family("Qwen2ForCausalLM", variation(biased="qkv"), sizes(151936, 4096, 22016, 32, 32, 32)),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        variation(biased="asked", measured="head"),
        sizes(151936, 4096, 22016, 32, 32, 32, head_dim=128),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        variation(biased="asked", measured="head", fed=fed_by_qwen3_moe),
        sizes(151936, 2048, 6144, 24, 32, 4, moe_intermediate_size=768, num_local_experts=128, decoder_sparse_step=1),
        {"num_local_experts": "num_experts"},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        variation(biased="asked", measured="whole", norms=OLMO_NORMS),
        sizes(50304, 4096, 11008, 32, 32, None),
    ),
    "gemma": Family("GemmaForCausalLM", variation(biased="asked"), tied_sizes(256000, 3072, 24576, 28, 16, 16)),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        variation(biased="asked", norms=GEMMA_NORMS),
        tied_sizes(256000, 2304, 9216, 26, 8, 4),
    ),
    "gemma3_text": Family("Gemma3ForCausalLM", variation(**GEMMA3), GEMMA3_SIZES),
    "phi3": Family("Phi3ForCausalLM", phi3, sizes(32064, 3072, 8192, 32, 32, None)),
    "gpt_neox": Family("GPTNeoXForCausalLM", gpt_neox, sizes(50432, 6144, 24576, 44, 64, None, attention_bias=True)),
    "opt": Family(
        "OPTForCausalLM",
        opt,
        {
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "word_embed_proj_dim": None,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
        },
    ),
}
