"""The models that are built in, as names and shapes, and modules that hold parameters of such names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from thalweg.arrays import Shape
from thalweg.given import TABLE

if TYPE_CHECKING:
    from torch import nn

Named: TypeAlias = Iterator[tuple[str, Shape]]


def with_bias(name: str, *shape: int) -> Named:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[-1:]


def gpt2(hidden: int, vocabulary: int, positions: int) -> Named:
    """Its projections are stored the other way around: inputs x outputs."""
    yield "transformer.wte.weight", (vocabulary, hidden)
    yield "transformer.wpe.weight", (positions, hidden)
    for layer in range(12):
        inside = f"transformer.h.{layer}"
        yield from with_bias(f"{inside}.ln_1", hidden)
        yield from with_bias(f"{inside}.attn.c_attn", hidden, 3 * hidden)
        yield from with_bias(f"{inside}.attn.c_proj", hidden, hidden)
        yield from with_bias(f"{inside}.ln_2", hidden)
        yield from with_bias(f"{inside}.mlp.c_fc", hidden, 4 * hidden)
        yield from with_bias(f"{inside}.mlp.c_proj", 4 * hidden, hidden)
    yield from with_bias("transformer.ln_f", hidden)


def llama(hidden: int, inner: int, layers: int, keys: int, *, has_head: bool) -> Named:
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
    if has_head:
        yield "lm_head.weight", (vocabulary, hidden)


def resnet50() -> Named:
    """Blocks of three convolutions, each with a norm."""
    yield "conv1.weight", (64, 3, 7, 7)
    yield from with_bias("bn1", 64)
    before = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            inside, after = f"layer{stage}.{block}", 4 * width
            for place, shape in enumerate(((width, before, 1, 1), (width, width, 3, 3), (after, width, 1, 1)), 1):
                yield f"{inside}.conv{place}.weight", shape
                yield from with_bias(f"{inside}.bn{place}", shape[0])
            if before != after:
                yield f"{inside}.downsample.0.weight", (after, before, 1, 1)
                yield from with_bias(f"{inside}.downsample.1", after)
            before = after
    yield "fc.weight", (1000, before)
    yield "fc.bias", (1000,)


BUILT_IN: Mapping[str, Callable[[], Named]] = {
    "gpt2": lambda: gpt2(768, vocabulary=50257, positions=1024),
    "resnet50": resnet50,
    "llama-1b": lambda: llama(2048, 8192, layers=16, keys=512, has_head=False),
    "llama-8b": lambda: llama(4096, 14336, layers=32, keys=1024, has_head=True),
    "small": lambda: gpt2(64, vocabulary=4096, positions=512),
}


def shapes_of(name: str) -> dict[str, Shape]:
    """The shape of each parameter of a built-in model, in the order of the model.

    >>> len(shapes_of("gpt2")), shapes_of("gpt2")["transformer.wte.weight"]
    (148, (50257, 768))
    """
    return dict(BUILT_IN[name]())


def arrange_parameters(params: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module that holds parameters by their names, with a module for each part of a name before its last dot."""
    from torch import nn

    root = nn.Module()
    for path, p in params.items():
        module: Any = root
        *parents, attribute = path.split(".")
        for depth, name in enumerate(parents, 1):
            if name not in module._modules:
                weight = params.get(".".join([*parents[:depth], "weight"]))
                is_list = "".join(parents[depth : depth + 1]).isdecimal()
                module._modules[name] = nn.ModuleList() if is_list else make_module(name, weight)
            module = module._modules[name]
        module._parameters[attribute] = p
    return root


def make_module(name: str, weight: nn.Parameter | None) -> nn.Module:
    """An empty module of the class that its name and its weight tell, by which mixtures choose."""
    from torch import nn

    kind: Any = nn.Module
    if weight is None:
        return nn.Module()
    if TABLE.search(name):
        kind = type("Embedding", (nn.Module,), {})
    elif weight.ndim == 2:
        kind = type("Conv1D" if name in ("c_attn", "c_fc", "c_proj") else "Linear", (nn.Module,), {})
    elif weight.ndim in (3, 4, 5):
        make: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[weight.ndim - 3]
        kind = partial(make, weight.shape[1], weight.shape[0], 1, bias=False, device="meta")
    module: nn.Module = kind()
    module._parameters.clear()
    return module
