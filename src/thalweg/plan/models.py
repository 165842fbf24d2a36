"""Models as far as optimizers are concerned: named tensors with shapes and dtypes. Some are built in."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from thalweg.arrays import Shape
from thalweg.dtypes import DTYPES
from thalweg.errors import CommandError
from thalweg.show.lists import suggestion


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
    #: Whether the source itself said in which dtype the parameters are stored.
    says_dtype: bool = False
    #: Weights that are not trained. They take memory for themselves, without gradient and state, in any dtype.
    frozen: tuple[Tensor, ...] = ()

    @property
    def parameters(self) -> int:
        """How many numbers there are to train."""
        return sum(tensor.elements for tensor in self.tensors)

    def stored_as(self, dtype: str) -> Model:
        """The same model with all its parameters in one dtype; frozen ones of fewer than 16 bits stay as they are."""
        trained = tuple(replace(tensor, dtype=dtype) for tensor in self.tensors)
        frozen = tuple(replace(tensor, dtype=dtype) if tensor.dtype in DTYPES else tensor for tensor in self.frozen)
        return replace(self, tensors=trained, frozen=frozen)

    def freezing(self, patterns: Sequence[str]) -> Model:
        """The same model with parameters frozen whose names match one of these patterns, such as ``*.embed*``."""
        named = (*self.tensors, *self.frozen)
        for pattern in patterns:
            if not any(fnmatchcase(tensor.name, pattern) for tensor in named):
                some = ", ".join(tensor.name for tensor in named[:3])
                raise CommandError(f"--frozen {pattern} matches no parameter; the first ones are {some}")
        chosen = {t.name for t in self.tensors if any(fnmatchcase(t.name, pattern) for pattern in patterns)}
        trained = tuple(tensor for tensor in self.tensors if tensor.name not in chosen)
        if not trained:
            raise CommandError(f"all parameters of {self.name} are frozen: nothing is left to train")
        frozen = tuple(tensor for tensor in self.tensors if tensor.name in chosen)
        return replace(self, tensors=trained, frozen=(*self.frozen, *frozen))


def made(name: str, about: str, named: Iterable[tuple[str, Shape]]) -> Model:
    """A model of float32 tensors."""
    return Model(name, about, tuple(Tensor(*pair) for pair in named))


#: What is built in: one line about it, and the configuration it is made from.
CONFIGURATIONS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("GPT-2 124M, tied head", {"model_type": "gpt2"}),
    "bert-large": (
        "BERT-large 335M",
        {
            "model_type": "bert",
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    ),
    "resnet50": ("ResNet-50 25.6M", {"model_type": "resnet50"}),
    "llama-1b": (
        "Llama 3.2 1B, tied head",
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "llama-8b": (
        "Llama 3.1 8B",
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "llama-70b": (
        "Llama 3.1 70B",
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
}
#: Names of the models that are built in.
BUILTIN = tuple(CONFIGURATIONS)


def spelt(name: str) -> str:
    """The built-in name that is meant, or the name as it is: ``bert_large``, ``Llama1B``."""
    key = name.lower().replace("_", "").replace("-", "")
    return next((known for known in BUILTIN if known.replace("-", "") == key), name)


@functools.cache
def builtin(name: str) -> Model:
    """A model that is built in.

    >>> builtin("gpt2").parameters
    124439808
    """
    from thalweg.plan.families import tensors_of

    known = spelt(name)
    if known not in CONFIGURATIONS:
        raise CommandError(f"there is no built-in model {name!r}: {suggestion(name, BUILTIN)}")
    about, configuration = CONFIGURATIONS[known]
    return made(known, about, tensors_of(configuration))
