"""Which matrix a parameter is: its axes, as the library that made the model lays them out, and Muon of such a matrix.

flax keeps kernels as (in, out), equinox and torch keep weights as (out, in). Both orders are the same matrix to Muon,
but for its scale, which follows from the numbers of inputs and outputs; with more axes they are different matrices.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from thalweg.arrays import A, Shape, Space, State, Truth
from thalweg.errors import OptionError, ParameterError
from thalweg.given import ATTENTION, KV, NORM, QKV, TABLE
from thalweg.optax.trees import Named, Path, Tree
from thalweg.rules import Muon, Rule
from thalweg.rules.around import rewrap
from thalweg.rules.rule import Noise
from thalweg.rules.whole import Direction


class MatrixAxes(NamedTuple):
    """The axes of a parameter that make up a matrix. All others are stacked: each of their elements has its own matrix.

    Axes are counted without those that ``stacked_axes`` declares.
    """

    inputs: int | Sequence[int]
    outputs: int | Sequence[int]
    #: How many equal matrices stand side by side along the outputs: the gates of a cell, the groups of a convolution.
    split: int = 1


@dataclass(frozen=True)
class Reading:
    """What a layout says about a parameter: whether it is a matrix, and by which axes."""

    role: Literal["matrix", "embedding", "vector", "unknown"]
    axes: MatrixAxes | None = None
    #: Why it is not understood, or what was assumed.
    note: str = ""


#: How a model lays out its weights: the name of a library, axes for all, or a function of a name and a parameter, of
#: which None means that it is no matrix.
Layout: TypeAlias = Any

VECTOR = Reading("vector")
#: flax's names of projections in attention, of (in, heads, size) and of (heads, size, out).
TO_HEADS, FROM_HEADS = ("query", "key", "value"), ("out",)
FUSED = "it looks like several fused matrices, whose sizes are not told"
UNSPLIT = "it looks like queries, keys and values in one layer, and is taken for one matrix"


# ---- reading a tree


def read_tree(layout: Layout, params: Tree, flat: Named, stacked: Sequence[int]) -> list[Reading]:
    """What each parameter is. stacked: of each, how many leading axes are stacked."""
    modules = equinox_modules(params) if layout == "equinox" else {}
    result = []
    for path, name, p, lead in zip(flat.paths, flat.names, flat.leaves, stacked, strict=True):
        shape = tuple(p.shape[lead:])
        reading = check_reading(read(layout, name, p, shape, owner_of(path, modules)), name, len(shape))
        result.append(divide_fused(reading, name, shape) if isinstance(layout, str) else reading)
    return result


def declare_layout(layout: Any) -> Any:
    """A layout that a user gave, checked. Without one, parameters have two axes."""
    if layout is None:
        return UNDECLARED
    check_layout(layout)
    return layout


def check_layout(layout: Any) -> None:
    if isinstance(layout, str) and layout not in READERS:
        raise OptionError(f"layout must be one of {', '.join(map(repr, READERS))}, or a function, got {layout!r}")
    if not (isinstance(layout, str) or callable(layout) or is_axes(layout)):
        raise OptionError(
            f"layout must be one of {', '.join(map(repr, READERS))}, a MatrixAxes, or a function of (name, parameter) "
            f"that returns one, or None, got {layout!r}"
        )


def as_tuple(axes: int | Sequence[int]) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)


def is_axes(value: Any) -> bool:
    """Whether a value is a MatrixAxes, or what optax.contrib.muon takes for one."""
    return isinstance(value, MatrixAxes) or hasattr(value, "reduction_axis")


def read(layout: Layout, name: str, p: Any, shape: Shape, module: Any) -> Reading:
    if isinstance(layout, str):
        return READERS[layout](name, shape, module)
    axes = layout if is_axes(layout) else layout(name, p)
    if axes is None or (is_axes(layout) and len(shape) < 2):
        return VECTOR if len(shape) < 2 else Reading("unknown")
    if not is_axes(axes):
        raise OptionError(f"layout of parameter {name!r} must be a MatrixAxes or None, got {axes!r}")
    return matrix(axes) if isinstance(axes, MatrixAxes) else matrix(MatrixAxes(axes.reduction_axis, axes.output_axis))


def check_reading(reading: Reading, name: str, ndim: int) -> Reading:
    """A reading with axes counted from 0."""
    if reading.axes is None:
        return reading
    inputs, outputs = (
        tuple(axis + ndim if axis < 0 else axis for axis in as_tuple(side))
        for side in (reading.axes.inputs, reading.axes.outputs)
    )
    both = (*inputs, *outputs)
    if not (inputs and outputs) or len(set(both)) < len(both) or not set(both) <= set(range(ndim)):
        raise OptionError(
            f"layout of parameter {name!r}: inputs={reading.axes.inputs!r} and outputs={reading.axes.outputs!r} must "
            f"be different axes among its {ndim}"
        )
    return Reading(reading.role, MatrixAxes(inputs, outputs, reading.axes.split), reading.note)


def divide_fused(reading: Reading, name: str, shape: Shape) -> Reading:
    """A reading of a layer, by its name: queries, keys and values in one layer are several matrices."""
    layer, axes = parts_of(name)[0], reading.axes
    if reading.role != "matrix" or axes is None or len(shape) != 2 or axes.split > 1:
        return reading
    inputs, outputs = (shape[side[0]] for side in (as_tuple(axes.inputs), as_tuple(axes.outputs)))
    if QKV.search(layer):  # query_key_value has them side by side for each head
        is_told = outputs == 3 * inputs and layer != "query_key_value"
        return matrix(axes._replace(split=3)) if is_told else Reading("unknown", axes, FUSED)
    if KV.fullmatch(layer) and outputs == 2 * inputs:
        return matrix(axes._replace(split=2))
    is_unsplit = outputs == 3 * inputs and any(map(ATTENTION.search, name.split(".")[-3:-1]))
    return Reading("matrix", axes, UNSPLIT) if is_unsplit else reading


def matrix(axes: MatrixAxes) -> Reading:
    return Reading("matrix", axes)


def unknown(note: str) -> Reading:
    return Reading("unknown", None, note)


def parts_of(name: str) -> tuple[str, str]:
    """The name of the module that holds a parameter, and that of the parameter in it."""
    module, _, attribute = name.rpartition(".")
    return module.rpartition(".")[2], attribute


def read_flax(name: str, shape: Shape, _: Any) -> Reading:
    """By names: kernels are (..., in, out), whatever has another name is no matrix."""
    module, attribute = parts_of(name)
    if len(shape) < 2 or attribute in ("bias", "scale") or NORM.search(module):
        return VECTOR
    if TABLE.search(attribute):
        return Reading("embedding", MatrixAxes(0, 1) if len(shape) == 2 else None)
    if attribute != "kernel":
        return unknown(f"flax has no layer with a weight of the name {attribute!r}")
    if len(shape) == 2:
        return matrix(MatrixAxes(0, 1))
    if QKV.search(module):  # (in, 3, heads, size): queries, keys and values are stacked
        return matrix(MatrixAxes(0, tuple(range(2, len(shape))))) if shape[1] == 3 else unknown(FUSED)
    if len(shape) == 3 and module in TO_HEADS:
        return matrix(MatrixAxes(0, (1, 2)))
    if len(shape) == 3 and module in FROM_HEADS:
        return matrix(MatrixAxes((0, 1), 2))
    if module in (*TO_HEADS, *FROM_HEADS) or (len(shape) == 3 and "conv" not in module.lower()):
        return unknown("a kernel of these axes may be stacked, or divided into heads: declare stacked_axes")
    if shape[-2] == 1:
        return unknown("a convolution of one channel may be one of each channel by itself")
    last = len(shape) - 1
    return matrix(MatrixAxes(tuple(range(last)), last))


def read_torch(name: str, shape: Shape, _: Any) -> Reading:
    """The first axis is that of outputs, all others are inputs."""
    module, attribute = parts_of(name)
    if len(shape) < 2 or "bias" in attribute or NORM.search(module):
        return VECTOR
    axes = MatrixAxes(tuple(range(1, len(shape))), 0)
    if TABLE.search(attribute) or (attribute == "weight" and len(shape) == 2 and TABLE.search(module)):
        return Reading("embedding", axes)
    return matrix(axes)


def read_equinox(name: str, shape: Shape, module: Any) -> Reading:
    """By the module that holds the parameter, where it is one of ``equinox.nn``; else by name."""
    kind, attribute = type(module).__name__, parts_of(name)[1]
    if module is None:
        reading = read_torch(name, shape, None)
        known = reading.role != "matrix" or (attribute == "weight" and len(shape) == 2)
        return reading if known else unknown("no layer of equinox.nn holds it")
    if len(shape) < 2 or "weight" not in attribute or "Norm" in kind:
        return VECTOR
    if kind == "Embedding":
        return Reading("embedding", MatrixAxes(0, 1))
    gates = {"GRUCell": 3, "LSTMCell": 4}.get(kind, 1)
    return matrix(MatrixAxes(tuple(range(1, len(shape))), 0, gates * getattr(module, "groups", 1)))


READERS: dict[str, Callable[[str, Shape, Any], Reading]] = {
    "flax": read_flax,
    "equinox": read_equinox,
    "torch": read_torch,
}
#: Layers of equinox.nn whose parameters read_equinox knows. Norms around other layers are not among them.
EQUINOX = re.compile(
    r"^(Linear|Embedding|GRUCell|LSTMCell|PReLU|Conv(Transpose)?([123]d)?|(Layer|RMS|Group|Batch)Norm)$"
)


def equinox_modules(params: Tree) -> dict[Path, Any]:
    """The layers of equinox.nn in a tree, by their paths; equinox itself is not imported."""

    def is_layer(node: Any) -> bool:
        kind: Any = type(node)
        return kind.__module__.startswith("equinox.nn.") and EQUINOX.match(kind.__name__) is not None

    pairs, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_layer)
    return {tuple(path): node for path, node in pairs if is_layer(node)}


def owner_of(path: Path, modules: dict[Path, Any]) -> Any:
    return next((modules[tuple(path[:end])] for end in range(len(path)) if tuple(path[:end]) in modules), None)


# ---- Muon of such a matrix


@dataclass(frozen=True, kw_only=True)
class MuonOfAxes(Muon):
    """Muon of a parameter whose axes are others than (rows, columns). State stays as the parameter is."""

    axes: MatrixAxes

    @property
    def order(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Inputs and outputs, in the order in which the parameter has them."""
        sides = (as_tuple(self.axes.inputs), as_tuple(self.axes.outputs))
        inputs, outputs = (tuple(axis + self.stacked_axes for axis in side) for side in sides)
        return (inputs, outputs) if self.inputs_first else (outputs, inputs)

    @property
    def inputs_first(self) -> bool:
        return min(as_tuple(self.axes.inputs)) < min(as_tuple(self.axes.outputs))

    @functools.cached_property
    def plain(self) -> Muon:
        """The rule of a stack of matrices. Its scalings by width are those of outputs over inputs here."""
        options = {f.name: getattr(self, f.name) for f in fields(Muon)}
        options |= {"stacked_axes": 1, "transposed": self.inputs_first}
        if self.scaling in ("original", "optax"):
            options["scaling"] = "optax" if self.inputs_first else "original"
        if self.axes.split > 1 and self.split == 1:
            options |= {"split": self.axes.split, "split_axis": 1 if self.inputs_first else 0}
        return Muon(**options)

    def transposition(self, ndim: int) -> tuple[int, ...]:
        """The axes with those that are stacked first, and the two sides of the matrix after them."""
        first, second = self.order
        return (*(axis for axis in range(ndim) if axis not in (*first, *second)), *first, *second)

    def seen(self, shape: Shape) -> Shape:
        """(matrices, rows, columns)."""
        rows, columns = (math.prod(shape[axis] for axis in side) for side in self.order)
        return (math.prod(shape) // max(1, rows * columns), rows, columns)

    def check_shape(self, name: object, shape: Shape) -> None:
        self.plain.check_shape(name, self.seen(shape))

    def scale(self, shape: Shape) -> Any:
        return self.plain.scale(self.seen(shape))

    def treatment(self, shape: Shape) -> str:
        return self.plain.treatment(self.seen(shape))

    def blocks(self, shape: Shape) -> list[tuple[int, int]]:
        return self.plain.blocks(self.seen(shape))

    def count_lines(self, shape: Shape) -> list[int]:
        """Of all matrices that a parameter is a stack of, beside its stacked axes."""
        stacked = max(1, math.prod(shape[: self.stacked_axes]))
        return self.plain.count_lines(self.seen(shape)) * (self.seen(shape)[0] // stacked)

    def transform(
        self, xp: Space[A], tensors: tuple[A, ...], s: State[A], *, due: Truth = True, noise: Noise[A] | None = None
    ) -> Direction:
        x: Any = tensors[0]
        order = self.transposition(x.ndim)
        turned = jnp.transpose(x, order)
        space: Any = xp
        direction = self.plain.transform(space, (jnp.reshape(turned, self.seen(x.shape)),), s, due=due, noise=noise)
        back = sorted(range(x.ndim), key=order.__getitem__)
        return direction._replace(tensor=jnp.transpose(jnp.reshape(direction.tensor, turned.shape), back))


def rule_of_axes(rule: Rule, axes: MatrixAxes | None) -> Any:
    """A rule for a parameter whose matrix has these axes; None: those that the rule sees by itself."""
    return rule if axes is None else rewrap(rule, MuonOfAxes, axes=axes)


def axes_of(reading: Reading, name: str, shape: Shape) -> MatrixAxes:
    """The axes of a parameter that Muon is to step."""
    if reading.axes is None:
        why = f" ({reading.note})" if reading.note else ""
        raise ParameterError(
            f"parameter {name!r} has shape {shape}, of which layout makes no matrix{why}, and Muon orthogonalizes "
            "matrices. Give it to an optimizer of its own, as muon_adamw() does, or give layout a function that tells "
            "its axes, such as lambda name, p: MatrixAxes(inputs=0, outputs=(1, 2))"
        )
    return reading.axes


#: For ``muon`` without a layout.
UNDECLARED = "undeclared"


def axes_in_tree(layout: Any, params: Tree, flat: Named, rules: Sequence[Any]) -> list[MatrixAxes | None]:
    """The axes of each parameter; None: as its rule sees it by itself. layout: None for rules that ask for none."""
    if layout is None:
        return [None] * len(rules)
    stacked = [rule.stacked_axes for rule in rules]
    if layout == UNDECLARED:
        for name, p, lead in zip(flat.names, flat.leaves, stacked, strict=True):
            check_two_axes(name, p.shape, lead)
        return [None] * len(rules)
    result: list[MatrixAxes | None] = []
    readings = read_tree(layout, params, flat, stacked)
    for reading, name, p, rule in zip(readings, flat.names, flat.leaves, rules, strict=True):
        is_row = p.ndim < rule.stacked_axes + 2 and rule.vectors == "row"
        result.append(None if is_row else axes_of(reading, name, p.shape))
    return result


def check_two_axes(name: str, shape: Shape, stacked: int) -> None:
    """Without a layout, a matrix has two axes: of more, each library makes another matrix."""
    if len(shape) > stacked + 2:
        raise ParameterError(
            f"parameter {name!r} has shape {shape}, and flax, equinox and torch make different matrices of so many "
            f"axes: say layout='flax', 'equinox' or 'torch', or give layout a function of (name, parameter); or "
            "declare the leading ones with stacked_axes"
        )
