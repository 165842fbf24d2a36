"""Models that read text, and T5, which reads and writes: names and shapes as transformers builds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thalweg.errors import CommandError
from thalweg.plan.families.configuration import Configuration, Family, Named, linear, norm


def bert(c: Configuration) -> Named:
    hidden = c.size("hidden_size")
    yield from bert_embeddings(c, hidden)
    yield from bert_layers(c, hidden)
    yield from linear("pooler.dense", hidden, hidden, bias=True)


def roberta(c: Configuration) -> Named:
    """BERT with its position embeddings in another place."""
    hidden = c.size("hidden_size")
    embeddings = list(bert_embeddings(c, hidden))
    position = next(pair for pair in embeddings if "position" in pair[0])
    yield from (pair for pair in embeddings if pair is not position)
    yield position
    yield from bert_layers(c, hidden)
    yield from linear("pooler.dense", hidden, hidden, bias=True)


def electra(c: Configuration) -> Named:
    """BERT with embeddings of a size of their own, and no pooler."""
    hidden, size = c.size("hidden_size"), c.size("embedding_size")
    yield from bert_embeddings(c, size)
    if size != hidden:
        yield from linear("embeddings_project", hidden, size, bias=True)
    yield from bert_layers(c, hidden)


def bert_embeddings(c: Configuration, size: int) -> Named:
    yield "embeddings.word_embeddings.weight", (c.size("vocab_size"), size)
    yield "embeddings.position_embeddings.weight", (c.size("max_position_embeddings"), size)
    yield "embeddings.token_type_embeddings.weight", (c.size("type_vocab_size"), size)
    yield from norm("embeddings.LayerNorm", size)


def bert_layers(c: Configuration, hidden: int) -> Named:
    inner, crossed = c.size("intermediate_size"), c.flag("add_cross_attention")
    for layer in range(c.size("num_hidden_layers")):
        inside = f"encoder.layer.{layer}"
        for attention in ("attention", "crossattention") if crossed else ("attention",):
            for part in ("query", "key", "value"):
                yield from linear(f"{inside}.{attention}.self.{part}", hidden, hidden, bias=True)
            yield from linear(f"{inside}.{attention}.output.dense", hidden, hidden, bias=True)
            yield from norm(f"{inside}.{attention}.output.LayerNorm", hidden)
        yield from linear(f"{inside}.intermediate.dense", inner, hidden, bias=True)
        yield from linear(f"{inside}.output.dense", hidden, inner, bias=True)
        yield from norm(f"{inside}.output.LayerNorm", hidden)


def distilbert(c: Configuration) -> Named:
    hidden, inner = c.size("dim"), c.size("hidden_dim")
    yield "embeddings.word_embeddings.weight", (c.size("vocab_size"), hidden)
    yield "embeddings.position_embeddings.weight", (c.size("max_position_embeddings"), hidden)
    yield from norm("embeddings.LayerNorm", hidden)
    for layer in range(c.size("n_layers")):
        inside = f"transformer.layer.{layer}"
        for part in ("q_lin", "k_lin", "v_lin", "out_lin"):
            yield from linear(f"{inside}.attention.{part}", hidden, hidden, bias=True)
        yield from norm(f"{inside}.sa_layer_norm", hidden)
        yield from linear(f"{inside}.ffn.lin1", inner, hidden, bias=True)
        yield from linear(f"{inside}.ffn.lin2", hidden, inner, bias=True)
        yield from norm(f"{inside}.output_layer_norm", hidden)


def modernbert(c: Configuration) -> Named:
    """The first layer has no norm before its attention: that of the embeddings serves it."""
    hidden, inner, normed = c.size("hidden_size"), c.size("intermediate_size"), c.flag("norm_bias")
    attending, feeding = c.flag("attention_bias"), c.flag("mlp_bias")
    yield "embeddings.tok_embeddings.weight", (c.size("vocab_size"), hidden)
    yield from norm("embeddings.norm", hidden, bias=normed)
    for layer in range(c.size("num_hidden_layers")):
        inside = f"layers.{layer}"
        if layer:
            yield from norm(f"{inside}.attn_norm", hidden, bias=normed)
        yield from linear(f"{inside}.attn.Wqkv", 3 * hidden, hidden, bias=attending)
        yield from linear(f"{inside}.attn.Wo", hidden, hidden, bias=attending)
        yield from norm(f"{inside}.mlp_norm", hidden, bias=normed)
        yield from linear(f"{inside}.mlp.Wi", 2 * inner, hidden, bias=feeding)
        yield from linear(f"{inside}.mlp.Wo", hidden, inner, bias=feeding)
    yield from norm("final_norm", hidden, bias=normed)


def t5(c: Configuration) -> Named:
    """The head is the embedding, whatever the configuration says of it: so transformers has it."""
    hidden, layers = c.size("d_model"), c.size("num_layers")
    yield "shared.weight", (c.size("vocab_size"), hidden)
    yield from t5_stack(c, "encoder", layers, ("SelfAttention",))
    yield from t5_stack(c, "decoder", c.size("num_decoder_layers", layers), ("SelfAttention", "EncDecAttention"))


def t5_stack(c: Configuration, stack: str, layers: int, attentions: tuple[str, ...]) -> Named:
    hidden, inner, heads = c.size("d_model"), c.size("d_ff"), c.size("num_heads")
    width, gated = heads * c.size("d_kv"), is_gated(c)
    for layer in range(layers):
        inside = f"{stack}.block.{layer}.layer"
        for place, attention in enumerate(attentions):
            for part in ("q", "k", "v"):
                yield f"{inside}.{place}.{attention}.{part}.weight", (width, hidden)
            yield f"{inside}.{place}.{attention}.o.weight", (hidden, width)
            if layer == 0 and place == 0:
                buckets = c.size("relative_attention_num_buckets")
                yield f"{inside}.0.{attention}.relative_attention_bias.weight", (buckets, heads)
            yield f"{inside}.{place}.layer_norm.weight", (hidden,)
        dense = f"{inside}.{len(attentions)}.DenseReluDense"
        for part in ("wi_0", "wi_1") if gated else ("wi",):
            yield f"{dense}.{part}.weight", (inner, hidden)
        yield f"{dense}.wo.weight", (hidden, inner)
        yield f"{inside}.{len(attentions)}.layer_norm.weight", (hidden,)
    yield f"{stack}.final_layer_norm.weight", (hidden,)


def is_gated(c: Configuration) -> bool:
    activation = c.get("feed_forward_proj")
    if not isinstance(activation, str):
        raise CommandError(f"the configuration's feed_forward_proj must be a name such as 'relu', got {activation!r}")
    return activation.startswith("gated-")


BERT: Mapping[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "add_cross_attention": False,
}

ENCODERS: Mapping[str, Family] = {
    "bert": Family("BertModel", bert, BERT),
    "roberta": Family("RobertaModel", roberta, {**BERT, "vocab_size": 50265}),
    "xlm-roberta": Family("XLMRobertaModel", roberta, BERT),
    "electra": Family(
        "ElectraModel", electra, {**BERT, "hidden_size": 256, "embedding_size": 128, "intermediate_size": 1024}
    ),
    "distilbert": Family(
        "DistilBertModel",
        distilbert,
        {"vocab_size": 30522, "max_position_embeddings": 512, "n_layers": 6, "dim": 768, "hidden_dim": 3072},
        {"dim": "hidden_size", "n_layers": "num_hidden_layers"},
    ),
    "modernbert": Family(
        "ModernBertModel",
        modernbert,
        {
            "vocab_size": 50368,
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_hidden_layers": 22,
            "norm_bias": False,
            "attention_bias": False,
            "mlp_bias": False,
        },
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        t5,
        {
            "vocab_size": 32128,
            "d_model": 512,
            "d_kv": 64,
            "d_ff": 2048,
            "num_layers": 6,
            "num_decoder_layers": None,
            "num_heads": 8,
            "relative_attention_num_buckets": 32,
            "feed_forward_proj": "relu",
        },
        {"d_model": "hidden_size", "num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"},
    ),
}
