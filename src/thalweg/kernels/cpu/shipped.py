"""The code of the rules that come with the package, for its build: python -m thalweg.kernels.cpu.shipped FOLDER.

With --quick only that of the most used options: any other is compiled at its first use. With --codecs only the
constants of codes, for which no rule has to be traced.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from thalweg.arrays import Shape
from thalweg.codecs import CODECS, FIFTH, FIFTH_SHIFT, LEAST_SCALE
from thalweg.dtypes import DTYPES
from thalweg.kernels.cpu import structs
from thalweg.kernels.cpu.compiled import emit_kind, kind_of
from thalweg.kernels.cpu.emit import library_source
from thalweg.kernels.cpu.lines import Function
from thalweg.rules import RULES, Rule

#: One that is factored, if a rule factors, and one that never is. What has more axes has the same code.
SHAPES: tuple[Shape, ...] = ((3,), (3, 3))
#: Of each rule the options that change its code, with values that do, the default first; all others change numbers
#: alone. All that go together are compiled.
VARIANTS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "SGD": {"momentum": (0.0, 0.5), "nesterov": (False, True)},
    "AdamW": {"amsgrad": (False, True), "nesterov": (False, True), "decoupled": (True, False)},
    "LARS": {
        "momentum": (0.9, 0.0),
        "weight_decay": (0.0, 0.5),
        "nesterov": (False, True),
        "trust": (True, False),
        "always_adapt": (True, False),
        "keep_norms": (False, True),
        "norm_mode": ("paper", "combined"),
        "momentum_mode": ("lr_inside", "lr_outside"),
    },
    "LAMB": {
        "weight_decay": (0.0, 0.5),
        "bias_correction": (True, False),
        "trust": (True, False),
        "always_adapt": (True, False),
        "keep_norms": (False, True),
        "weight_decay_mode": ("in_update", "decoupled", "l2"),
    },
    "Adafactor": {
        "clip_threshold": (1.0, None),
        "relative_step": (None, True),
        "scale_parameter": (True, False),
        "momentum": (None, 0.0),
        "momentum_mode": ("after_lr", "before_lr"),
        "eps_mode": ("grad_sq", "clamp"),
    },
    "AdEMAMix": {},
    "Lion": {"betas": ((0.9, 0.99), (0.0, 0.0))},
    "MARS": {"amsgrad": (False, True), "nesterov": (False, True), "decoupled": (True, False)},
}


def functions_for(rule: Rule, kinds: Iterable[tuple[bool, ...]]) -> dict[str, Function]:
    """kinds: whether there is an lr, whether all state is stored as it is computed, whether steps are guarded."""
    functions = {}
    for shape, (has_lr, exact, guarded) in itertools.product(SHAPES, kinds):
        if has_lr or rule.lr_optional:
            kind = kind_of(rule, shape, has_lr=has_lr, exact=exact, guarded=guarded)
            functions.update({function.name: function for function in emit_kind(kind).functions})
    return functions


def make_rule(rule: type[Rule], options: dict[str, Any]) -> Rule | None:
    """The rule with these options, if they go together."""
    factoring = {"min_dim_size_to_factor": 1} if "min_dim_size_to_factor" in {f.name for f in fields(rule)} else {}
    try:
        instance = rule(**factoring, **options)
        instance.validate()
    except ValueError:
        return None
    return instance


def rules_of(name: str, *, quick: bool) -> Iterator[Rule]:
    """A rule with all of its options that go together; quick: with its defaults, and with one that differs."""
    options = VARIANTS[name]
    default = {option: values[0] for option, values in options.items()}
    usual = [default, *({**default, option: x} for option, values in options.items() for x in values[1:])]
    every = (dict(zip(options, values, strict=True)) for values in itertools.product(*options.values()))
    for given in usual if quick else every:
        instance = make_rule(RULES[name], given)
        if instance is not None:
            yield instance


def emit_shipped(quick: bool = False) -> dict[str, Function]:
    functions: dict[str, Function] = {}
    kinds = [(True, True, False), (True, True, True)] if quick else list(itertools.product((True, False), repeat=3))
    for name in VARIANTS:
        for variant in rules_of(name, quick=quick):
            functions.update(functions_for(variant, kinds))
    return functions


def codecs_source() -> str:
    """The constants of codes of eight bits, and of dtypes in the order of their numbers."""
    trusted = ", ".join(repr(DTYPES[name].trusted if name in DTYPES else 0.0) for name in structs.DTYPES)
    lines = [
        f"constexpr double TRUSTED[] = {{0.0, {trusted}}};",
        f"constexpr float LEAST_SCALE = {LEAST_SCALE.hex()}f;",
        f"constexpr int32_t FIFTH = {FIFTH}, FIFTH_SHIFT = {FIFTH_SHIFT};",
    ]
    for codec in CODECS.values():
        integers = ", ".join(f"{name.upper()} = {getattr(codec, name)}" for name in ("step", "shift", "first", "most"))
        lines += [
            f"\nstruct {codec.name.capitalize()} {{",
            f"    static constexpr int32_t {integers};",
            f"    static constexpr float SHARE = {codec.share.hex()}f;",
            "};",
        ]
    top = "// Constants of thalweg/codecs.py and dtypes.py.\n#pragma once\n\n#include <cstdint>\n\nnamespace codecs {\n"
    return "\n".join([top, *lines, "\n}  // namespace codecs", ""])


def emitted_sources(quick: bool) -> dict[str, str]:
    functions = emit_shipped(quick)
    names = ",\n".join(f'    "{name}"' for name in functions)
    return {
        "emitted.h": library_source(functions),
        "emitted_names.h": "// The names of emitted functions, in their order.\n#pragma once\n\n"
        f"const char* const EMITTED_NAMES[] = {{\n{names},\n}};\n",
    }


def write(folder: Path, sources: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        # what is the same keeps its time, so that it is not compiled again
        if not (folder / name).exists() or (folder / name).read_text() != source:
            (folder / name).write_text(source)


if __name__ == "__main__":
    only_codecs = "--codecs" in sys.argv
    write(
        Path(sys.argv[1]),
        {"codecs.h": codecs_source()} if only_codecs else emitted_sources(quick="--quick" in sys.argv),
    )
