"""A mixture that is ready made: hidden matrices by Muon, all other parameters by AdamW."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import optax

from thalweg.errors import OptionError
from thalweg.given import HEADS, TOP_HEADS, Pattern, check_patterns, matches, unused_patterns
from thalweg.optax.functions import function_of
from thalweg.optax.matrices import READERS, Layout, Reading, check_layout, read_tree, rule_of_axes
from thalweg.optax.mixture import Mixture
from thalweg.optax.transformation import CONTENTS, Transformation
from thalweg.optax.trees import Named, Tree, parameters
from thalweg.rules import AdamW, Muon, Spikes
from thalweg.settings import Numerics, rates_with_adamw

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
#: The places of entries.
HIDDEN, OTHER, VECTORS = range(3)
ROLES = ("<hidden matrices>", "<embeddings and output layers>", "<norms, biases and vectors>")


def muon_adamw(
    learning_rate: Any,
    adamw_learning_rate: Any = None,
    *,
    layout: Layout | None = None,
    weight_decay: float | None = None,
    first: Sequence[Pattern] = (),
    other: Sequence[Pattern] = (),
    muon: Mapping[str, Any] = NO_OPTIONS,
    adamw: Mapping[str, Any] = NO_OPTIONS,
    max_grad_norm: float | None = None,
    on_nonfinite: Literal["propagate", "skip"] = "propagate",
    specs: Any = None,
    spikes: bool | Spikes = False,
) -> optax.GradientTransformationExtraArgs:
    """Hidden matrices by Muon; embeddings, output layers, norms, biases and vectors by AdamW.

    layout: how the model lays out its weights: "flax", "equinox" or "torch", or a function of a name and a parameter
    that returns a :class:`MatrixAxes` for Muon, or None for AdamW. It must be given.

    learning_rate, muon: of Muon. adamw_learning_rate, adamw: of AdamW; its rate, if not given, is that of Muon where
    their steps have one size (``muon=dict(consistent_rms=0.2)``), and 0.015 of it elsewhere. weight_decay: of all
    matrices; None leaves it to each rule. Norms, biases and vectors do not decay. first, other: patterns of parameters
    that go to Muon, or to AdamW, whatever they are found to be; first wins. ``explain`` shows who steps what;
    docs/jax.md says how parameters are assigned.

    >>> import jax.numpy as jnp
    >>> params = {"hidden": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}, "out": {"kernel": jnp.ones((3, 2))}}
    >>> from thalweg.optax import explain
    >>> for row in explain(muon_adamw(0.02, layout="flax"), params).rows:
    ...     print(row.name, row.rule, row.treatment)
    hidden.bias AdamW elementwise
    hidden.kernel Muon matrix 4 x 3
    out.kernel AdamW elementwise
    """
    if layout is None:
        raise OptionError(
            f"muon_adamw needs layout: one of {', '.join(map(repr, READERS))}, or a function of (name, parameter); "
            "flax keeps kernels as (in, out), equinox and torch keep weights as (out, in)"
        )
    check_layout(layout)
    scaled = muon if muon.get("consistent_rms") is None else {"scaling": "match_rms_adamw"}
    _, adamw_learning_rate, rate_hint = rates_with_adamw(Muon, scaled, learning_rate, adamw_learning_rate)
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    adamw_function = function_of(AdamW)
    hidden = function_of(Muon)(learning_rate, **{**decay, **muon, "layout": layout, "specs": specs})
    others = adamw_function(adamw_learning_rate, **{**decay, **adamw, "specs": specs})
    vectors = adamw_function(adamw_learning_rate, **{**adamw, "weight_decay": 0.0, "specs": specs})
    return Routed(
        tuple(zip(ROLES, (hidden, others, vectors), strict=True)),
        Numerics(max_grad_norm=max_grad_norm, on_nonfinite=on_nonfinite, spikes=spikes),
        specs,
        layout,
        check_patterns(first, "first"),
        check_patterns(other, "other"),
        rate_hint,
    ).transformation


@dataclass(frozen=True, eq=False)
class Routed(Mixture):
    """The functions ``init`` and ``update`` of Muon with AdamW; entries are for roles, which follow from the layout."""

    PATTERNS: ClassVar[str] = "patterns of first and other"

    layout: Layout
    first: tuple[Pattern, ...]
    other: tuple[Pattern, ...]
    #: What to tell of the learning rate.
    rate_hint: str

    def init(self, params: Tree) -> Any:
        result, contents = super().init(params), CONTENTS.get()
        if contents is not None:
            flat = parameters(params)
            readings, rules = self.read(flat)
            rows = zip(flat.names, flat.leaves, readings, rules, self.places(flat), strict=True)
            contents.hints.update((name, self.hints_about(name, *known)) for name, *known in rows)
            if isinstance(self.layout, str) and not self.other and not output_layers(self.layout, flat, readings):
                contents.group_notes[id(self.muon)] = "no output layer was recognized: name it in other=[...] for AdamW"
        return result

    @property
    def muon(self) -> Transformation:
        owner: Transformation = self.entries[HIDDEN][1].update.__self__
        return owner

    def read(self, flat: Named) -> tuple[list[Reading], list[Any]]:
        """What each parameter is, and the rule that Muon would have for it."""
        tree = flat.treedef.unflatten(flat.leaves)
        rules = [setting.rule for setting, _ in self.muon.settings_of(tree, flat)]
        return read_tree(self.layout, tree, flat, [rule.stacked_axes for rule in rules]), rules

    def hints_about(self, name: str, p: Any, reading: Reading, rule: Any, place: int) -> list[str]:
        is_told = rule.split != 1 or any(matches(pattern, name, p) for pattern in (*self.first, *self.other))
        stepper = "Muon" if place == HIDDEN else "AdamW"
        note = f"{stepper} steps it: {reading.note}; if that is wrong, give layout a function that tells its axes"
        return [*([note] if reading.note and not is_told else []), *([self.rate_hint] if place == HIDDEN else [])]

    def places(self, flat: Named) -> list[int]:
        readings, rules = self.read(flat)
        heads = output_layers(self.layout, flat, readings)

        def place(name: str, p: Any, reading: Reading, rule: Any) -> int:
            if any(matches(pattern, name, p) for pattern in self.first):
                return HIDDEN
            blocks = rule_of_axes(rule, reading.axes).blocks(p.shape) if reading.axes is not None else []
            if reading.role == "vector" or any(1 in block for block in blocks):
                return VECTORS
            is_other = name in heads or any(matches(pattern, name, p) for pattern in self.other)
            return OTHER if is_other or reading.role != "matrix" else HIDDEN

        return [place(*row) for row in zip(flat.names, flat.leaves, readings, rules, strict=True)]

    def unused_patterns(self, flat: Named, places: Sequence[int]) -> list[Pattern]:
        return unused_patterns((*self.first, *self.other), zip(flat.names, flat.leaves, strict=True))


def output_layers(layout: Layout, flat: Named, readings: Sequence[Reading]) -> set[str]:
    """The weights of output layers: those that are named as such, or else the last layer, where its place is known.

    The last layer is looked for at the top of a model. Fields of equinox's modules are in their order; flax and dicts
    sort names, so that there a number must tell, as in Dense_0, Dense_1. A function as layout tells all by itself.
    """
    if not isinstance(layout, str):
        return set()
    matrices = {
        name: [part for part in name.split(".") if part != "params"]
        for name, reading in zip(flat.names, readings, strict=True)
        if reading.role == "matrix"
    }
    named = {name for name, parts in matrices.items() if is_head(parts)}
    if named:
        return named
    sizes = dict(zip(flat.names, (p.ndim for p in flat.leaves), strict=True))
    tops = [n for n, parts in matrices.items() if is_top(parts) and sizes[n] == 2 and "conv" not in parts[-2].lower()]
    if tops and (len(tops) == 1 or is_in_order(layout, flat)):
        return {tops[-1]}
    numbered = {name: re.fullmatch(r"(.*?)[._]?(\d+)", ".".join(matrices[name][:-1])) for name in tops}
    known = {name: (number[1], int(number[2])) for name, number in numbered.items() if number}
    if tops and len(known) == len(tops) and len({prefix for prefix, _ in known.values()}) == 1:
        return {max(known, key=lambda name: known[name][1])}
    return set()


def is_head(parts: Sequence[str]) -> bool:
    """Whether a module is named as output layers are. Within numbered blocks such names mean something else."""
    before = [part for part in parts[:-1] if HEADS.fullmatch(part)]
    is_within = any(re.search(r"(^|_)\d+$", part) for part in parts[: parts.index(before[0])]) if before else False
    return bool(before and not is_within) or (len(parts) == 2 and TOP_HEADS.fullmatch(parts[0]) is not None)


def is_top(parts: Sequence[str]) -> bool:
    """Whether a layer is an attribute of the model, or an element of a list that is one."""
    return len(parts) == 2 or (len(parts) == 3 and parts[1].isdigit())


def is_in_order(layout: Layout, flat: Named) -> bool:
    """Whether parameters come in the order in which the model has them."""
    kinds = jax.tree_util.GetAttrKey, jax.tree_util.SequenceKey
    return layout == "equinox" and all(path and isinstance(path[0], kinds) for path in flat.paths)
