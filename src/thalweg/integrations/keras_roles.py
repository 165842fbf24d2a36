"""What a variable of a Keras model is, by its path and its shape, which are all that an optimizer sees of it.

Keras keeps kernels as (in, out), convolutions as (height, width, in, out), and gates of a cell side by side.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from thalweg.arrays import Shape
from thalweg.given import HEADS, NORM, TOP_HEADS

#: Weights that are no matrices, whatever axes they have.
VECTORS = ("gamma", "beta", "alpha", "scale")
#: The name of one of several layers of a kind, in which names of output layers mean something else.
NUMBERED = re.compile(r".*_\d+")


@dataclass(frozen=True)
class Role:
    """What a variable was found to be."""

    kind: Literal["hidden", "other", "vector"]
    #: What Muon has to know of it.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: What was not understood, or assumed.
    hint: str = ""


VECTOR, OTHER = Role("vector"), Role("other")


@dataclass(frozen=True)
class Routing:
    """Which variables a mixture gives to Muon, as ``keras.optimizers.Muon`` does, and output layers not among them."""

    #: Regular expressions that are searched for in paths.
    include_layers: tuple[str, ...] = ()
    exclude_layers: tuple[str, ...] = ()
    exclude_embeddings: bool = True

    def roles_of(self, paths: Sequence[str], shapes: Sequence[Shape]) -> list[Role]:
        """The role of each variable."""
        gates = gates_of(paths, shapes)
        found = [self.role_of(path, shape, gates) for path, shape in zip(paths, shapes, strict=True)]
        for index, hint in output_layers(paths, shapes).items():
            if found[index].kind == "hidden" and not is_found(self.include_layers, paths[index]):
                found[index] = Role("other", hint=hint)
        return found

    def role_of(self, path: str, shape: Shape, gates: Mapping[str, int]) -> Role:
        """The role of a variable, before output layers are looked for."""
        layer, _, own = path.rpartition("/")
        split = {"split": gates[layer], "split_axis": 1} if gates.get(layer, 1) > 1 else {}
        if len(shape) < 2 or "bias" in own:
            return VECTOR
        if is_found(self.include_layers, path):
            return Role("hidden", split)
        is_norm = NORM.search(layer.rpartition("/")[2]) is not None
        if is_norm or own in VECTORS or (len(shape) == 2 and 1 in shape):
            return VECTOR
        if is_found(self.exclude_layers, path) or (self.exclude_embeddings and "embedding" in path.lower()):
            return OTHER
        if len(shape) > 2:
            return OTHER
        if "kernel" not in own:
            hint = f"no layer of Keras has a matrix of the name {own!r}: by AdamW; if it is one, (in, out), name it in"
            return Role("other", hint=f"{hint} include_layers=[...]")
        return Role("hidden", split)

    def unused_expressions(self, paths: Sequence[str]) -> list[str]:
        """Patterns that are found in no path."""
        return [
            own for own in (*self.include_layers, *self.exclude_layers) if not any(is_found([own], p) for p in paths)
        ]


def is_found(patterns: Sequence[str], path: str) -> bool:
    return any(re.search(pattern, path) for pattern in patterns)


def gates_of(paths: Sequence[str], shapes: Sequence[Shape]) -> dict[str, int]:
    """How many gates the cells of a model have, by their paths: recurrent kernels are (units, gates * units)."""
    found = {}
    for path, shape in zip(paths, shapes, strict=True):
        layer, _, own = path.rpartition("/")
        if own == "recurrent_kernel" and len(shape) == 2 and shape[1] % shape[0] == 0:
            found[layer] = shape[1] // shape[0]
    return found


def output_layers(paths: Sequence[str], shapes: Sequence[Shape]) -> dict[int, str]:
    """The places of the kernels of output layers, each with a hint where its name does not say so.

    Where no name does, they are those whose outputs no kernel can take, by size; or else the last one.
    """
    cells, layers = gates_of(paths, shapes), layers_of(paths)
    kernels = [index for index, path in enumerate(paths) if path.endswith("kernel") and len(shapes[index]) > 1]
    named = [index for index in kernels if is_head(layers[index])]
    dense = [index for index in kernels if len(shapes[index]) == 2 and paths[index].rpartition("/")[0] not in cells]
    if named or not dense:
        return dict.fromkeys(named, "")
    taken = {size for index in kernels for size in (shapes[index][-2], math.prod(shapes[index][:-1]))}
    ends = [index for index in dense if shapes[index][1] not in taken]
    why = "no other kernel can take its outputs" if ends else "it is the last kernel of all"
    hint = f"taken for an output layer, since {why}: by AdamW; if it is hidden, name it in include_layers=[...]"
    return dict.fromkeys(ends or dense[-1:], hint)


def layers_of(paths: Sequence[str]) -> list[list[str]]:
    """The names of the layers that hold each variable, from the outermost. The name of the model is not among them."""
    parts = [path.split("/")[:-1] for path in paths]
    has_name = all(len(own) > 1 for own in parts) and len({own[0] for own in parts}) == 1
    return [own[1:] for own in parts] if has_name else parts


def is_head(layers: Sequence[str]) -> bool:
    """Whether one of the layers that hold a variable is named as output layers are."""
    if len(layers) == 1 and TOP_HEADS.fullmatch(layers[0]):
        return True
    head = next((index for index, layer in enumerate(layers) if HEADS.fullmatch(layer)), None)
    return head is not None and not any(NUMBERED.fullmatch(layer) for layer in layers[:head])
