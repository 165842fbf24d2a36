"""The models that are built in: their names and shapes, and torch modules of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias

from thalweg.arrays import Shape
from thalweg.errors import CommandError
from thalweg.given import NORM, TABLE
from thalweg.show.arguments import suggest

if TYPE_CHECKING:
    from torch import nn

Named: TypeAlias = Iterator[tuple[str, Shape]]


def weight_and_bias(name: str, *shape: int) -> Named:
    """A weight, and a bias as long as its first axis."""
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def gpt2(hidden: int = 768, vocabulary: int = 50257, positions: int = 1024) -> Named:
    """Its projections are stored the other way around: inputs x outputs."""
    yield "transformer.wte.weight", (vocabulary, hidden)
    yield "transformer.wpe.weight", (positions, hidden)
    for layer in range(12):
        inside = f"transformer.h.{layer}"
        for norm, projections in (
            ("ln_1", (("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1))),
            ("ln_2", (("mlp.c_fc", 1, 4), ("mlp.c_proj", 4, 1))),
        ):
            yield from weight_and_bias(f"{inside}.{norm}", hidden)
            for name, inputs, outputs in projections:
                yield f"{inside}.{name}.weight", (inputs * hidden, outputs * hidden)
                yield f"{inside}.{name}.bias", (outputs * hidden,)
    yield from weight_and_bias("transformer.ln_f", hidden)


def llama(hidden: int, inner: int, layers: int, keys: int = 1024, *, tied: bool = False) -> Named:
    vocabulary = 128256
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(layers):
        inside = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            yield f"{inside}.self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{inside}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{inside}.mlp.up_proj.weight", (inner, hidden)
        yield f"{inside}.mlp.down_proj.weight", (hidden, inner)
        yield f"{inside}.input_layernorm.weight", (hidden,)
        yield f"{inside}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not tied:
        yield "lm_head.weight", (vocabulary, hidden)


def bert() -> Named:
    hidden, layers = 1024, 24
    for name, rows in (("word", 30522), ("position", 512), ("token_type", 2)):
        yield f"embeddings.{name}_embeddings.weight", (rows, hidden)
    yield from weight_and_bias("embeddings.LayerNorm", hidden)
    for layer in range(layers):
        inside = f"encoder.layer.{layer}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            yield from weight_and_bias(f"{inside}.attention.{part}", hidden, hidden)
        yield from weight_and_bias(f"{inside}.attention.output.LayerNorm", hidden)
        yield from weight_and_bias(f"{inside}.intermediate.dense", 4 * hidden, hidden)
        yield from weight_and_bias(f"{inside}.output.dense", hidden, 4 * hidden)
        yield from weight_and_bias(f"{inside}.output.LayerNorm", hidden)
    yield from weight_and_bias("pooler.dense", hidden, hidden)


def resnet50() -> Named:
    """With the names of torchvision: bottleneck blocks of three convolutions, each with a norm."""
    yield "conv1.weight", (64, 3, 7, 7)
    yield from weight_and_bias("bn1", 64)
    before = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            inside, after = f"layer{stage}.{block}", 4 * width
            for place, shape in enumerate(((width, before, 1, 1), (width, width, 3, 3), (after, width, 1, 1)), 1):
                yield f"{inside}.conv{place}.weight", shape
                yield from weight_and_bias(f"{inside}.bn{place}", shape[0])
            if before != after:
                yield f"{inside}.downsample.0.weight", (after, before, 1, 1)
                yield from weight_and_bias(f"{inside}.downsample.1", after)
            before = after
    yield from weight_and_bias("fc", 1000, before)


#: What is built in: one line about it, and its tensors.
BUILT_IN: Mapping[str, tuple[str, Callable[[], Named]]] = {
    "gpt2": ("GPT-2 124M, tied head", gpt2),
    "bert-large": ("BERT-large 335M", bert),
    "resnet50": ("ResNet-50 25.6M", resnet50),
    "llama-1b": ("Llama 3.2 1B, tied head", lambda: llama(2048, 8192, 16, 512, tied=True)),
    "llama-8b": ("Llama 3.1 8B", lambda: llama(4096, 14336, 32)),
    "llama-70b": ("Llama 3.1 70B", lambda: llama(8192, 28672, 80)),
    "small": ("GPT-2 of narrow layers, for what a step costs beside its arithmetic", lambda: gpt2(64, 4096, 512)),
}


def find_builtin(name: str) -> str | None:
    """The built-in name that is meant, however it is written (``bert_large``, ``Llama1B``); None if there is none."""
    key = name.lower().replace("_", "").replace("-", "")
    return next((known for known in BUILT_IN if known.replace("-", "") == key), None)


def shapes_of(name: str) -> dict[str, Shape]:
    """The shape of each parameter of a built-in model, in the order of the model.

    >>> len(shapes_of("gpt2")), shapes_of("gpt2")["transformer.wte.weight"]
    (148, (50257, 768))
    """
    known = find_builtin(name)
    if known is None:
        raise CommandError(f"there is no built-in model {name!r}: {suggest(name, BUILT_IN)}")
    return dict(BUILT_IN[known][1]())


def build_module(name: str, device: str = "meta") -> nn.Module:
    """A torch module with the parameters of a built-in model, in float32 and not initialized.

    It has the modules that the names tell of (embeddings, linear layers, convolutions, norms), and no ``forward``.

    >>> sum(p.numel() for p in build_module("resnet50").parameters())
    25557032
    """
    import torch

    return arrange_parameters(
        {path: torch.nn.Parameter(torch.empty(shape, device=device)) for path, shape in shapes_of(name).items()}
    )


def arrange_parameters(params: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module around parameters. Names and shapes tell the types of its modules, by which mixtures choose."""
    from torch import nn

    class Norm(nn.Module):
        """A norm, whatever it computes."""

    class Conv1D(nn.Module):
        """A linear layer of GPT-2, stored (in, out)."""

    def make_module(name: str, parameter: str, shape: Shape) -> nn.Module:
        """A module that has parameters, of which this is the first."""
        if NORM.search(name):
            return Norm()
        if TABLE.search(name):
            return nn.Embedding(1, 1, device="meta")
        if parameter != "weight" or len(shape) not in (2, 3, 4, 5):
            return nn.Module()
        if len(shape) == 2:
            is_turned = name in ("c_attn", "c_fc", "c_proj")
            return Conv1D() if is_turned else nn.Linear(shape[1], shape[0], device="meta")
        make: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(shape) - 3]
        convolution: nn.Module = make(shape[1], shape[0], shape[2:], device="meta")
        return convolution

    root = nn.Module()
    for path, p in params.items():
        module: Any = root
        *parents, parameter = path.split(".")
        for name, following in zip_longest(parents, parents[1:]):
            if name not in module._modules:
                if following is None:
                    inner = make_module(name, parameter, tuple(p.shape))
                else:
                    inner = nn.ModuleList() if following.isdecimal() else nn.Module()
                inner._parameters.clear()
                module._modules[name] = inner
            module = module._modules[name]
        module._parameters[parameter] = p
    return root
