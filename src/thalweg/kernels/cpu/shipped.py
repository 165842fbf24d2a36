"""The code of the rules that come with the package, for its build: python -m thalweg.kernels.cpu.shipped FOLDER.

With --quick only that of the most used options: any other is compiled at its first use. With --codecs only the
constants of codes, for which no rule has to be traced.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from thalweg.arrays import Shape
from thalweg.codecs import CODECS, FIFTH, FIFTH_SHIFT, LEAST_SCALE
from thalweg.kernels.cpu.compiled import emit_kind, kind_of
from thalweg.kernels.cpu.emit import library_source
from thalweg.kernels.cpu.lines import Function
from thalweg.rules import RULES, Rule

#: One that is factored, if a rule factors, and one that never is. What has more axes has the same code.
SHAPES: tuple[Shape, ...] = ((3,), (3, 3))
NUMBER = 0.5


def choices(rule: type[Rule]) -> dict[str, list[Any]]:
    """Of each option that may decide what a rule computes, the values that do: names, flags, on and off."""
    hints = get_type_hints(rule)
    values: dict[str, list[Any]] = {}
    for f in fields(rule):
        if f.name in ("stacked_axes", "min_dim_size_to_factor"):
            continue
        options = options_of_type(hints[f.name], f.default)
        if len(options) > 1:
            values[f.name] = options
    return values


def options_of_type(hint: Any, default: Any) -> list[Any]:
    parts = list(get_args(hint)) if get_origin(hint) is not Literal else [hint]
    candidates: list[Any] = [default]
    for part in parts or [hint]:
        if part is bool:
            candidates += [False, True]
        elif part is type(None):
            candidates.append(None)
        elif get_origin(part) is Literal:
            candidates += get_args(part)
        elif get_origin(part) is tuple:
            candidates.append((NUMBER / 2, NUMBER))
        elif isinstance(default, (int, float)) or default is None:
            candidates += [0.0, NUMBER]
    unique: list[Any] = []
    for value in candidates:
        if not any(value is other or (type(value) is type(other) and value == other) for other in unique):
            unique.append(value)
    return unique


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


def find_telling(rule: type[Rule]) -> dict[str, list[Any]]:
    """The options that change the code of passes, alone or beside one other; the rest changes numbers alone."""
    options = choices(rule)

    @functools.cache
    def code(given: frozenset[tuple[str, Any]]) -> frozenset[str]:
        instance = make_rule(rule, dict(given))
        return frozenset(functions_for(instance, [(True, True, False)]) if instance else ())

    bases = [frozenset[Any](), *(frozenset({(key, value)}) for key, values in options.items() for value in values[1:])]
    telling = {}
    for name, values in options.items():
        others = [base for base in bases if name not in dict(base)]
        known = {base: code(base) for base in others}
        differing = values[:1]
        for value in values[1:]:
            changed = {base: code(base | {(name, value)}) for base in others}
            if any(changed[base] - known[base] for base in others if known[base]):
                differing.append(value)
                known = {base: known[base] | changed[base] for base in others}
        if len(differing) > 1:
            telling[name] = differing
    return telling


def rules_of(rule: type[Rule]) -> Iterator[Rule]:
    options = find_telling(rule)
    for values in itertools.product(*options.values()):
        instance = make_rule(rule, dict(zip(options, values, strict=True)))
        if instance is not None:
            yield instance


def usual_rules_of(rule: type[Rule]) -> Iterator[Rule]:
    """The rule with its defaults, and with one option that differs from them."""
    options = choices(rule)
    for given in ({}, *({name: value} for name, values in options.items() for value in values[1:])):
        instance = make_rule(rule, given)
        if instance is not None:
            yield instance


def emit_shipped(quick: bool = False) -> dict[str, Function]:
    functions: dict[str, Function] = {}
    kinds = [(True, True, False), (True, True, True)] if quick else list(itertools.product((True, False), repeat=3))
    for rule in RULES.values():
        if not rule.needs_whole:
            for variant in (usual_rules_of if quick else rules_of)(rule):
                functions.update(functions_for(variant, kinds))
    return functions


def codecs_source() -> str:
    """The constants of codes of eight bits."""
    lines = [
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
    top = "// The constants of thalweg/codecs.py.\n#pragma once\n\n#include <cstdint>\n\nnamespace codecs {\n"
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
