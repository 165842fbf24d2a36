"""What each parameter of a model is: a hidden matrix, or several in one tensor; an embedding or output layer; a vector.

Modules tell by their types, and where types do not tell, by the sizes of their siblings and of the configuration. No
weight is read, so that models on the meta device serve as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from thalweg.given import ATTENTION, HEADS, KV, QKV, Pattern, matches

HIDDEN = "hidden matrices"
OTHER = "embeddings, output layers and other tensors"
VECTORS = "norms, biases and vectors"

#: Parts of the name of a raw parameter that is a table of vectors, or one vector for all positions.
TABLES = ("emb", "token", "pos", "table")
#: Classes whose parameters choose among experts, and names of linear layers that do beside experts.
ROUTERS = re.compile(r"router|gating|(moe|topk|expert)gate", re.IGNORECASE)
ROUTER_NAMES = ("gate", "router", "gating", "wg", "switch", "gate_network", "classifier")
#: What attributes and configurations call the sizes of attention.
SIZES = {
    "heads": ("num_heads", "num_attention_heads", "n_head", "n_heads", "heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "head_size", "attention_head_size", "d_head"),
}
#: By the name of a fused layer, the sizes of its blocks of rows, as attributes; those that add up are taken.
FUSED: Mapping[str, Sequence[tuple[str, ...]]] = {
    "in_proj": [("intermediate_size",) * 2, ("intermediate_size", "conv_dim", "num_heads")],
    "x_proj": [("time_step_rank", "ssm_state_size", "ssm_state_size")],
    "kv_a_proj_with_mqa": [("kv_lora_rank", "qk_rope_head_dim")],
    "in_proj_qkv": [("key_dim", "key_dim", "value_dim")],
}
#: Names of stacked experts that make what the layer answers, and not what is within it.
WRITERS = re.compile(r"down|w2|wo$|out")
UNTOLD = "no module tells what it is: by AdamW; if it is a matrix, name it in first=[...]"
FUSED_UNTOLD = (
    "it looks like several fused matrices, whose sizes are not told: by AdamW; name it in first=[...] "
    "and say split=(...) in muon=dict(overrides=[...])"
)
STACK_UNTOLD = (
    "it has three axes, and no module tells whether it is a stack of matrices: by AdamW; if it is, name it in "
    "first=[...] and say stacked_axes=1 in muon=dict(overrides=[...])"
)
ORIENTATION_UNTOLD = "taken for (experts, out, in): no module tells which axis is the output"
UNSPLIT = (
    "it looks like queries, keys and values in one layer, and is taken for one matrix: say split=3 in "
    "muon=dict(overrides=[...]), or name it in first=[...] if it is one"
)
UNNAMED_END = (
    "no layer takes as many numbers as it makes, and it is taken for a hidden matrix: if it is an output layer, name "
    "it in other=[...], else in first=[...]"
)


@dataclass(frozen=True)
class Role:
    """What a parameter is."""

    #: HIDDEN, OTHER or VECTORS.
    role: str
    #: Options of Muon that say which matrices it holds; rules without them have no use for them.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Why it is not taken for a matrix though it may be one, or what was assumed; "" where modules tell.
    hint: str = ""


@dataclass(frozen=True)
class Place:
    """A module that holds a parameter, as an attribute."""

    name: str
    module: nn.Module
    attribute: str
    parent: nn.Module | None

    @property
    def own_name(self) -> str:
        return self.name.rpartition(".")[2]


Blocks: TypeAlias = int | tuple[int, ...]
#: Modules, and how many numbers or channels they take.
Taken: TypeAlias = Sequence[tuple[nn.Module, int]]


def roles_of(model: nn.Module, first: Sequence[Pattern] = (), other: Sequence[Pattern] = ()) -> dict[str, Role]:
    """The role of every parameter of a model, by name.

    first, other: patterns of parameters that are hidden matrices, or are not, whatever they are found to be.
    """
    places = places_of(model)
    heads, ends = ({id(p) for module in layers for p in module.parameters()} for layers in output_layers(model))

    def role_of(name: str, p: Tensor) -> Role:
        role = role_in(model, p, places[id(p)], is_head=id(p) in heads)
        if any(matches(pattern, name, p) for pattern in first):
            return Role(HIDDEN, role.options)
        if role.role != VECTORS and any(matches(pattern, name, p) for pattern in other):
            return Role(OTHER)
        # attention within blocks makes fewer keys than any layer takes
        is_end = id(p) in ends and all(place.parent is model or not is_in_attention(place) for place in places[id(p)])
        return replace(role, hint=role.hint or UNNAMED_END) if role.role == HIDDEN and is_end else role

    return {name: role_of(name, p) for name, p in model.named_parameters()}


def places_of(model: nn.Module) -> dict[int, list[Place]]:
    """By the identity of each parameter, the modules that hold it: tied weights have several."""
    modules, places = dict(model.named_modules()), dict[int, list[Place]]()
    for name, module in modules.items():
        parent = modules.get(name.rpartition(".")[0]) if name else None
        for attribute, p in module.named_parameters(recurse=False):
            places.setdefault(id(p), []).append(Place(name, module, attribute, parent))
    return places


def role_in(model: nn.Module, p: Tensor, places: Sequence[Place], *, is_head: bool) -> Role:
    if not is_matrix(p) or any(is_vector(p, place) for place in places):
        return Role(VECTORS)
    # an output layer may be a pattern's choice for Muon: how it is stored matters all the same
    roles = [in_module(model, p, place) for place in places]
    known = next((role for role in roles if role.role != HIDDEN), roles[0])
    return Role(OTHER, known.options) if is_head else known


def is_matrix(p: Tensor) -> bool:
    """Whether a parameter, with all axes after the first as one, has several rows and several columns."""
    return p.ndim >= 2 and p.shape[0] > 1 and p.numel() > p.shape[0]


def is_vector(p: Tensor, place: Place) -> bool:
    """Whether a parameter of several axes is that of a norm, biases in a stack, or marked as one without decay."""
    is_bias = place.attribute.endswith("bias") or place.attribute.startswith("bias")
    is_norm = "norm" in type(place.module).__name__.lower()
    return is_norm or is_bias or bool(getattr(p, "_no_weight_decay", False))


def in_module(model: nn.Module, p: Tensor, place: Place) -> Role:
    """What a matrix is by the module that holds it."""
    module = place.module
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or is_router(place):
        return Role(OTHER)
    if isinstance(module, nn.modules.conv._ConvNd):
        return of_convolution(module)
    if isinstance(module, nn.Bilinear):
        return Role(HIDDEN, {"stacked_axes": 1})
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        gates = p.shape[0] // module.hidden_size
        return Role(HIDDEN, blocks(gates) if "_hr_" not in place.attribute else {})
    if isinstance(module, nn.MultiheadAttention):
        return Role(HIDDEN, blocks(3) if place.attribute == "in_proj_weight" else {})
    if place.attribute == "weight" and (linear := as_linear(module)) is not None:
        fused = fused_blocks(model, place, linear.outputs, linear.inputs)
        if fused is None:
            return Role(OTHER, {}, FUSED_UNTOLD)
        is_unsplit = fused == 1 and linear.outputs == 3 * linear.inputs and is_in_attention(place)
        is_taken = any(linear.outputs in inputs_of(other) for other in children_of(place))
        return Role(HIDDEN, blocks(fused, linear.transposed), UNSPLIT if is_unsplit and not is_taken else "")
    if any(part in place.attribute.lower() for part in TABLES) or "embed" in type(module).__name__.lower():
        return Role(OTHER)
    if p.ndim == 3:
        return of_stack(p, place)
    return Role(OTHER, {}, UNTOLD)


class Linear(NamedTuple):
    """The sizes of a linear layer, and whether its weight is stored as (in, out)."""

    outputs: int
    inputs: int
    transposed: bool = False


def as_linear(module: nn.Module) -> Linear | None:
    """A module as a linear layer, whatever its class; None if it is none."""
    weight, kind = getattr(module, "weight", None), type(module).__name__
    if not isinstance(weight, Tensor) or weight.ndim != 2 or isinstance(module, nn.Embedding):
        return None
    rows, columns = weight.shape
    if kind == "Conv1D":  # of transformers
        return Linear(columns, rows, transposed=True)
    sizes = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if sizes == (rows, columns) or "linear" in kind.lower():
        return Linear(rows, columns)
    return Linear(columns, rows, transposed=True) if sizes == (columns, rows) else None


def is_router(place: Place) -> bool:
    """Whether a matrix chooses among experts."""
    parent = place.parent
    if any(module is not None and ROUTERS.search(type(module).__name__) for module in (place.module, parent)):
        return True
    beside = [name for name, _ in (*parent.named_children(), *parent.named_parameters(recurse=False))] if parent else []
    return place.own_name in ROUTER_NAMES and any("expert" in name for name in beside)


def blocks(sizes: Blocks, transposed: bool = False) -> dict[str, Any]:
    """The options of a matrix with blocks of outputs: how many of equal size, or their sizes."""
    if isinstance(sizes, tuple) and len(set(sizes)) == 1:
        sizes = len(sizes)
    options: dict[str, Any] = {} if sizes == 1 else {"split": sizes}
    if transposed:
        options |= {"transposed": True} if sizes == 1 else {"split_axis": 1, "transposed": True}
    return options


def of_convolution(module: nn.modules.conv._ConvNd) -> Role:
    """Each group of a convolution is a matrix; that of one channel in, or out, is a filter and no matrix."""
    inputs, outputs = module.in_channels // module.groups, module.out_channels // module.groups
    if module.groups > 1 and min(inputs, outputs) == 1:
        return Role(OTHER)
    split = {"split": module.groups} if module.groups > 1 else {}
    return Role(HIDDEN, {**split, **({"transposed": True} if module.transposed else {})})


def fused_blocks(model: nn.Module, place: Place, rows: int, columns: int) -> Blocks | None:
    """The blocks of rows of a linear layer: 1 if it is one matrix, None if it is fused and its sizes are not known."""
    name, parent = place.own_name, place.parent
    if parent is None:
        return 1
    size_of = partial(read_size, parent, model)
    for names in FUSED.get(name, ()):
        sizes = tuple(map(size_of, names))
        if None not in sizes and sum(sizes) == rows:  # type: ignore[arg-type]
            return sizes  # type: ignore[return-value]
    if QKV.search(name):
        return attention_blocks(size_of, rows, columns, by_head=is_by_head(name, parent))
    return 2 if (KV.fullmatch(name) and rows == 2 * columns) or is_gated(place, rows) else 1


def is_fused(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Whether a layer makes several things, which are taken by parts."""
    linear, parent = as_linear(module), model.get_submodule(name.rpartition(".")[0])
    return linear is not None and fused_blocks(model, Place(name, module, "weight", parent), *linear[:2]) != 1


def is_by_head(name: str, parent: nn.Module) -> bool:
    """Whether queries, keys and values lie side by side head by head, as Megatron has them."""
    kind = type(parent).__name__
    is_known = kind.startswith(("CodeGen", "GPTBigCode")) and not getattr(parent, "multi_query", False)
    return name == "query_key_value" or is_known


def attention_blocks(size_of: Callable[..., int | None], rows: int, columns: int, *, by_head: bool) -> Blocks | None:
    heads, head_dim = (size_of(*SIZES[name]) for name in ("heads", "head_dim"))
    if head_dim is None and heads and columns % heads == 0:
        head_dim = columns // heads
    if by_head:
        return rows // head_dim if head_dim and rows % head_dim == 0 else None
    if heads and head_dim:
        kv_heads = size_of(*SIZES["kv_heads"]) or heads
        for counts in ((heads, kv_heads, kv_heads), (heads, heads, heads), (heads, 1, 1), (heads, heads)):
            if sum(counts) * head_dim == rows:
                return tuple(count * head_dim for count in counts)
    return 3 if rows == 3 * columns else None


def is_gated(place: Place, rows: int) -> bool:
    """Whether a layer makes twice what the only other one beside it takes: a gate, and what goes through it."""
    beside = [module for module in children_of(place) if as_linear(module) is not None and module is not place.module]
    only = as_linear(beside[0]) if len(beside) == 1 else None
    return only is not None and rows == 2 * only.inputs


def is_in_attention(place: Place) -> bool:
    """Whether a layer, or the module that has it, is called attention, or knows a number of heads."""
    names = (*place.name.split(".")[-2:], type(place.parent).__name__)
    sizes = (getattr(place.parent, name, None) for name in SIZES["heads"])
    return any(map(ATTENTION.search, names)) or any(isinstance(size, int) for size in sizes)


def children_of(place: Place) -> list[nn.Module]:
    """All that the parent of a module has."""
    return [] if place.parent is None else list(place.parent.children())


def read_size(module: nn.Module, model: nn.Module, *names: str) -> int | None:
    """A number that a module, its configuration or that of the model tells, by the first of these names."""
    for source in (module, getattr(module, "config", None), getattr(model, "config", None)):
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def of_stack(p: Tensor, place: Place) -> Role:
    """A raw parameter of three axes: experts in a stack, as (experts, out, in) or (experts, in, out)."""
    module, parent = place.module, place.parent
    words = f"{place.name} {type(module).__name__} {type(parent).__name__}".lower()
    if not any(part in words for part in ("expert", "moe")):
        return Role(OTHER, {}, STACK_UNTOLD)
    stack, declared = {"stacked_axes": 1}, getattr(module, "is_transposed", None)
    writes = WRITERS.search(place.own_name if place.attribute == "weight" else place.attribute)
    for other in stacks_beside(p, place):
        for transposed in (declared,) if isinstance(declared, bool) else (False, True):
            ours, beside = (shape[::-1] if transposed else shape for shape in (tuple(p.shape[1:]), other))
            (back, middle), (rows, columns) = (ours, beside) if writes else (beside, ours)
            if columns == back and rows in (middle, 2 * middle):  # one makes what the other takes
                is_pair = not writes and rows != middle and getattr(module, "is_concatenated", True)
                return Role(HIDDEN, {**stack, **blocks(2 if is_pair else 1, transposed=transposed)})
    if isinstance(declared, bool):
        return Role(HIDDEN, {**stack, **blocks(1, transposed=declared)})
    return Role(HIDDEN, stack, ORIENTATION_UNTOLD)


def stacks_beside(p: Tensor, place: Place) -> Iterator[tuple[int, ...]]:
    """The shapes, without the first axis, of other stacks of as many matrices in the same module or beside it."""
    for other in (place.parent or place.module).parameters():
        if other is not p and other.ndim == 3 and other.shape[0] == p.shape[0]:
            yield tuple(other.shape[1:])


# ---- output layers


def output_layers(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The layers that make what a model answers, and those that may.

    Those that the model tells of, that are named as output layers are, or that make as many numbers as there are words
    or labels; else those whose outputs no other layer can take. Lists of layers hold hidden blocks and have none.
    """
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    outside = {name: module for name, module in model.named_modules() if not name.startswith(lists)}
    layers = {name: module for name, module in outside.items() if outputs_of(module) is not None}
    answers, taken = answer_sizes(model), [(module, size) for module in model.modules() for size in inputs_of(module)]
    outputs = [module for module in map(ask_for_output, outside.values()) if module is not None]
    for name, module in outside.items():
        if HEADS.fullmatch(name.rpartition(".")[2]):
            outputs += last_layers(module, answers, taken)
    outputs += [module for module in layers.values() if isinstance(module, nn.Linear) and outputs_of(module) in answers]
    ends = [module for name, module in layers.items() if is_end(module, taken) and not is_fused(model, name, module)]
    if outputs:
        return outputs, ends
    return ends or (list(layers.values())[-1:] if isinstance(model, nn.Sequential) else []), []


def ask_for_output(module: nn.Module) -> nn.Module | None:
    try:
        head = getattr(module, "get_output_embeddings", lambda: None)()
    except (NotImplementedError, AttributeError):  # of a model that has none
        return None
    return head if isinstance(head, nn.Module) else None


def answer_sizes(model: nn.Module) -> set[int]:
    """How many words or labels a model knows, as far as it tells."""
    words = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    config = getattr(model, "config", None)
    sizes = [getattr(config, "vocab_size", None)]
    labels = getattr(config, "num_labels", None) if getattr(config, "num_labels", 2) != 2 else None
    sizes += [labels, getattr(model, "num_classes", None)]
    return {size for size in (*words[:1], *sizes) if isinstance(size, int) and size > 1}


def outputs_of(module: nn.Module) -> int | None:
    """How many numbers, or channels, a layer makes; None if it is no linear layer and no convolution."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return module.out_channels
    linear = as_linear(module)
    return None if linear is None else linear.outputs


def inputs_of(module: nn.Module) -> Iterator[int]:
    """How many numbers, or channels, a layer takes."""
    names = ("in_channels", "input_size", "num_features", "in1_features", "in2_features", "embed_dim")
    yield from (size for name in names if isinstance(size := getattr(module, name, None), int))
    yield from tuple(getattr(module, "normalized_shape", ()))[-1:]
    if (linear := as_linear(module)) is not None:
        yield linear.inputs


def last_layers(module: nn.Module, answers: set[int], taken: Taken) -> list[nn.Module]:
    """Of a module that is named as an output layer is, the layers that make the answer."""
    if outputs_of(module) is not None:
        return [module]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [layer for child in module.children() for layer in last_layers(child, answers, taken)]
    layers = [layer for layer in module.modules() if outputs_of(layer) is not None]
    if isinstance(module, nn.Sequential):
        return layers[-1:]
    by_size = [layer for layer in layers if outputs_of(layer) in answers]
    return by_size or [layer for layer in layers if is_end(layer, taken)] or layers


def is_end(module: nn.Module, taken: Taken) -> bool:
    """Whether no other module takes what a layer makes, by its size; flattened images are multiples of channels."""
    size, others = outputs_of(module), {width for other, width in taken if other is not module}
    assert size is not None
    if isinstance(module, nn.modules.conv._ConvNd):
        return not any(width % size == 0 for width in others)
    images = {width for other, width in taken if isinstance(other, nn.modules.conv._ConvTransposeNd)}
    return size not in others and not any(size % width == 0 for width in images)
