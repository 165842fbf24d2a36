"""A model of many small tensors, and modules around the tensors of any model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from thalweg.plan.models import Model, Tensor

if TYPE_CHECKING:
    from torch import nn

#: The name of the model that is built in here.
SMALL = "small"
#: Parts of the names of layers that are embeddings.
EMBEDDINGS = ("embed", "wte", "wpe")


def small_model() -> Model:
    """Many small tensors: those of GPT-2, 64 wide and with 4,096 tokens.

    >>> len(small_model().tensors), small_model().parameters
    (148, 894848)
    """
    width = 64
    layer = [
        ("ln_1.weight", (width,)),
        ("ln_1.bias", (width,)),
        ("attn.c_attn.weight", (3 * width, width)),
        ("attn.c_attn.bias", (3 * width,)),
        ("attn.c_proj.weight", (width, width)),
        ("attn.c_proj.bias", (width,)),
        ("ln_2.weight", (width,)),
        ("ln_2.bias", (width,)),
        ("mlp.c_fc.weight", (4 * width, width)),
        ("mlp.c_fc.bias", (4 * width,)),
        ("mlp.c_proj.weight", (width, 4 * width)),
        ("mlp.c_proj.bias", (width,)),
    ]
    shapes: list[tuple[str, tuple[int, ...]]] = [("wte.weight", (4096, width)), ("wpe.weight", (512, width))]
    shapes += [(f"h.{number}.{name}", shape) for number in range(12) for name, shape in layer]
    shapes += [("ln_f.weight", (width,)), ("ln_f.bias", (width,))]
    return Model(SMALL, "A transformer of 12 narrow layers", tuple(Tensor(*pair) for pair in shapes))


def build_module(params: Mapping[str, nn.Parameter]) -> nn.Module:
    """Put modules around parameters, of types that fit names and shapes: mixtures tell parameters apart by them."""
    from torch import nn

    root = nn.Module()
    for name, p in params.items():
        place, path = root, ""
        *parts, last = name.split(".")
        for part in parts:
            path = f"{path}{part}."
            if part not in place._modules:
                place.add_module(part, choose_module(path, params))
            place = place.get_submodule(part)
        place.register_parameter(last, p)
    return root


def choose_module(path: str, params: Mapping[str, nn.Parameter]) -> nn.Module:
    """A list of layers, an embedding, a linear layer, a convolution or a norm, without parameters of its own."""
    from torch import nn

    if any(name.startswith(path) and name[len(path) :].partition(".")[0].isdecimal() for name in params):
        return nn.ModuleList()
    weight = params.get(f"{path}weight")
    if weight is None:
        return nn.Module()
    shape = tuple(weight.shape)
    if len(shape) == 1:
        return nn.LayerNorm(shape, bias=False, device="meta")
    if len(shape) == 4:
        return nn.Conv2d(shape[1], shape[0], shape[2:], bias=False, device="meta")
    if len(shape) != 2:
        return nn.Module()
    if any(part in path for part in EMBEDDINGS):
        return nn.Embedding(*shape, device="meta")
    return nn.Linear(shape[1], shape[0], bias=False, device="meta")
