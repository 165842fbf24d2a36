"""Models as far as optimizers are concerned: named tensors with shapes and dtypes. Some are built in."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from thalweg.arrays import Shape
from thalweg.dtypes import DTYPES
from thalweg.errors import CommandError


@dataclass(frozen=True)
class Tensor:
    """One parameter: its name, its shape, and the dtype it is stored in."""

    name: str
    shape: Shape
    dtype: str = "float32"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Model:
    """All parameters of a model, in their order; what is tied stands here once."""

    name: str
    about: str
    #: Those that are trained.
    tensors: tuple[Tensor, ...]
    #: Weights that are not trained. They take memory for themselves, without gradient and state, in any dtype.
    frozen: tuple[Tensor, ...] = ()
    #: The same as an ``nn.Module`` without memory, where torch has built it.
    module: Any = field(default=None, repr=False, compare=False)

    @property
    def parameters(self) -> int:
        """How many numbers there are to train."""
        return sum(tensor.elements for tensor in self.tensors)

    def stored_as(self, dtype: str) -> Model:
        """The same model with all its parameters in one dtype; frozen ones of fewer than 16 bits stay as they are."""
        trained = tuple(replace(tensor, dtype=dtype) for tensor in self.tensors)
        frozen = tuple(replace(tensor, dtype=dtype) if tensor.dtype in DTYPES else tensor for tensor in self.frozen)
        return replace(self, tensors=trained, frozen=frozen)

    def freeze(self, patterns: Sequence[str]) -> Model:
        """The same model with parameters frozen whose names match one of these patterns, such as ``*.embed*``."""
        named = (*self.tensors, *self.frozen)
        for pattern in patterns:
            if not any(fnmatchcase(tensor.name, pattern) for tensor in named):
                some = ", ".join(tensor.name for tensor in named[:3])
                raise CommandError(f"--frozen {pattern} matches no parameter; the first ones are {some}")
        chosen = [any(fnmatchcase(tensor.name, pattern) for pattern in patterns) for tensor in self.tensors]
        pairs = list(zip(self.tensors, chosen, strict=True))
        frozen, trained = (tuple(t for t, own in pairs if own is wanted) for wanted in (True, False))
        if not trained:
            raise CommandError(f"all parameters of {self.name} are frozen: nothing is left to train")
        return replace(self, tensors=trained, frozen=(*self.frozen, *frozen))


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
#: Names of the models that are built in.
BUILTIN = tuple(BUILT_IN)


def spell_builtin(name: str) -> str:
    """The built-in name that is meant, or the name as it is: ``bert_large``, ``Llama1B``."""
    key = name.lower().replace("_", "").replace("-", "")
    return next((known for known in BUILTIN if known.replace("-", "") == key), name)


@functools.cache
def builtin(name: str) -> Model:
    """A model that is built in, of float32 tensors.

    >>> builtin("gpt2").parameters
    124439808
    """
    known = spell_builtin(name)
    about, named = BUILT_IN[known]
    return Model(known, about, tuple(Tensor(*pair) for pair in named()))
