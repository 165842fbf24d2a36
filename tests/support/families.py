"""Tiny models of many families on the meta device: their names, modules and shapes without a weight."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

#: Sizes that tell what is what: no two that mean different things are equal.
TEXT: dict[str, Any] = dict(
    hidden_size=24, num_attention_heads=4, num_hidden_layers=2, vocab_size=101, max_position_embeddings=33
)
GROUPED: dict[str, Any] = dict(TEXT, num_key_value_heads=2, head_dim=6)
DECODER: dict[str, Any] = dict(GROUPED, intermediate_size=40)
EXPERTS: dict[str, Any] = dict(DECODER, num_experts_per_tok=2)
TOWER: dict[str, Any] = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
VISION: dict[str, Any] = dict(TOWER, image_size=16, patch_size=8)
#: Of DeepSeek's attention and its experts.
LATENT: dict[str, Any] = dict(q_lora_rank=10, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
ROUTED: dict[str, Any] = dict(n_routed_experts=6, n_group=2, topk_group=1, first_k_dense_replace=1)
HEADS: dict[str, Any] = dict(encoder_attention_heads=4, decoder_attention_heads=4)
LAYERS: dict[str, Any] = dict(encoder_layers=1, decoder_layers=1, encoder_ffn_dim=40, decoder_ffn_dim=40)
SOUND: dict[str, Any] = dict(num_mel_bins=10, max_source_positions=15, max_target_positions=13, pad_token_id=0)


def of_transformers(model: str, config: str, **options: Any) -> nn.Module:
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return made


def clip() -> nn.Module:
    text = dict(TOWER, vocab_size=101, max_position_embeddings=33)
    return of_transformers("CLIPModel", "CLIPConfig", text_config=text, vision_config=VISION, projection_dim=20)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 24)
        self.lstm, self.gru = nn.LSTM(24, 20, num_layers=2, proj_size=12), nn.GRU(12, 16)
        self.cell = nn.RNN(16, 16)
        self.decoder = nn.Linear(16, 101)


class Upsampler(nn.Module):
    """What no other family has: transposed and grouped convolutions, a bilinear layer, a head of convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(16, 5, 1)  # defined before the body
        self.stem, self.grouped = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3, groups=4)
        self.depthwise = nn.Conv2d(32, 32, 3, groups=32)
        self.up, self.grouped_up = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose1d(16, 32, 3, groups=2)
        self.pair = nn.Bilinear(16, 12, 8)
        self.position = nn.Parameter(torch.zeros(9, 16))
        self.body = nn.Sequential(nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 16))


def hf(*given: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: of_transformers(*given, **options)


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 6
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)


class FusedViT(nn.Module):
    """Under the names of timm, whose models need torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token, self.pos_embed = (nn.Parameter(torch.zeros(1, length, 24)) for length in (1, 17))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, 24, 8, 8)})
        block = {"norm1": nn.LayerNorm(24), "attn": FusedAttention(), "norm2": nn.LayerNorm(24)}
        mlp = {"mlp": nn.ModuleDict({"fc1": nn.Linear(24, 40), "fc2": nn.Linear(40, 24)})}
        self.blocks = nn.Sequential(nn.ModuleDict({**block, **mlp}))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 7)


FAMILIES: Mapping[str, Callable[[], nn.Module]] = {
    "GPT-2": hf("GPT2LMHeadModel", "GPT2Config", n_embd=24, n_head=4, n_layer=2, vocab_size=101, n_positions=33),
    "Llama": hf("LlamaForCausalLM", "LlamaConfig", **DECODER),
    "Mistral": hf("MistralForCausalLM", "MistralConfig", **DECODER),
    "Mixtral": hf("MixtralForCausalLM", "MixtralConfig", num_local_experts=3, **DECODER),
    "Qwen3": hf("Qwen3ForCausalLM", "Qwen3Config", **DECODER),
    "Qwen3-MoE": hf("Qwen3MoeForCausalLM", "Qwen3MoeConfig", num_experts=3, moe_intermediate_size=14, **EXPERTS),
    "OLMoE": hf("OlmoeForCausalLM", "OlmoeConfig", num_experts=3, **EXPERTS),
    "GPT-OSS": hf("GptOssForCausalLM", "GptOssConfig", num_local_experts=3, **EXPERTS),
    "DeepSeek-V3": hf(
        *("DeepseekV3ForCausalLM", "DeepseekV3Config"),
        **dict(TEXT, num_key_value_heads=4, intermediate_size=40, moe_intermediate_size=14, num_experts_per_tok=2),
        **(LATENT | ROUTED),
    ),
    "Gemma": hf("GemmaForCausalLM", "GemmaConfig", **DECODER),
    "Phi-3": hf("Phi3ForCausalLM", "Phi3Config", pad_token_id=0, **{**DECODER, "num_key_value_heads": 2}),
    "GPT-NeoX": hf("GPTNeoXForCausalLM", "GPTNeoXConfig", intermediate_size=40, **TEXT),
    "BLOOM": hf("BloomForCausalLM", "BloomConfig", hidden_size=24, n_head=4, n_layer=2, vocab_size=101),
    "Falcon": hf(
        "FalconForCausalLM", "FalconConfig", hidden_size=24, num_attention_heads=4, num_hidden_layers=2, vocab_size=101
    ),
    "BERT": hf("BertForSequenceClassification", "BertConfig", intermediate_size=40, num_labels=5, **TEXT),
    "RoBERTa": hf("RobertaForMaskedLM", "RobertaConfig", intermediate_size=40, **TEXT),
    "T5": hf(
        "T5ForConditionalGeneration", "T5Config", d_model=24, d_kv=5, d_ff=40, num_layers=2, num_heads=4, vocab_size=101
    ),
    "Whisper": hf(
        *("WhisperForConditionalGeneration", "WhisperConfig"), d_model=24, vocab_size=101, **(HEADS | LAYERS | SOUND)
    ),
    "Mamba": hf("MambaForCausalLM", "MambaConfig", hidden_size=24, num_hidden_layers=2, vocab_size=101, state_size=7),
    "ViT": hf("ViTForImageClassification", "ViTConfig", num_labels=5, **VISION),
    "CLIP": clip,
    "Swin": hf(
        *("SwinForImageClassification", "SwinConfig"),
        **dict(image_size=32, patch_size=4, embed_dim=12, depths=[1, 1], num_heads=[2, 4], window_size=4, num_labels=5),
    ),
    "ViT of timm": FusedViT,
    "ConvNeXt": hf(
        *("ConvNextForImageClassification", "ConvNextConfig"),
        **dict(hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, num_labels=5),
    ),
    "ResNet": hf(
        *("ResNetForImageClassification", "ResNetConfig"),
        **dict(embedding_size=8, hidden_sizes=[12, 16], depths=[1, 1], layer_type="basic", num_labels=5),
    ),
    "MobileNetV2": hf("MobileNetV2ForImageClassification", "MobileNetV2Config", num_labels=5),
    "EfficientNet": hf(
        *("EfficientNetForImageClassification", "EfficientNetConfig"),
        **dict(width_coefficient=0.25, depth_coefficient=0.25, num_labels=5),
    ),
    "nn.Transformer": lambda: nn.Transformer(24, 4, 1, 1, 40),
    "LSTM, GRU, RNN": Recurrent,
    "convolutions, nn.Bilinear": Upsampler,
}


#: Those for which no package is imported.
OF_TORCH = ("ViT of timm", "nn.Transformer", "LSTM, GRU, RNN", "convolutions, nn.Bilinear")


def make(family: str) -> nn.Module:
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")  # what packages say of sizes this small
        return FAMILIES[family]()
