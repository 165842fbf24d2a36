"""Names and defaults are the same everywhere: rules, front ends, types and documented tables."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from thalweg import numpy as front_end
from thalweg.errors import OptionError
from thalweg.given import GONE
from thalweg.rules import AROUND, RULES, Annealed
from thalweg.rules.options import options_of
from thalweg.settings import Numerics, option_names

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("fields_tool", ROOT / "tools" / "fields.py")
fields_tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fields_tool)
#: The options of what may be around every rule.
AROUND_DEFAULTS: dict[str, Any] = {
    **{"graft": None, "cautious": False, "schedule_free": False, "schedule_free_warmup": None},
    **{"averaged": None, "averaged_warmup": False, "averaged_from": None},
}
NAMES = pytest.mark.parametrize("name", RULES)


def defaults(kind: Any) -> dict[str, Any]:
    assert all(f.default is not MISSING for f in fields(kind)), "every option has a default"
    return {f.name: f.default for f in fields(kind)}


@NAMES
def test_the_front_end_shows_every_option_with_the_default_of_its_rule(name: str) -> None:
    shown = inspect.signature(getattr(front_end, name)).parameters
    beside = {"variant": None, "overrides": (), "global_step": False, "engine": "auto"}
    expected = {**defaults(RULES[name]), **AROUND_DEFAULTS, **defaults(Numerics), **beside}
    assert {key: p.default for key, p in shown.items() if key != "lr"} == expected
    assert all(p.kind is p.KEYWORD_ONLY for key, p in shown.items() if key != "lr")


@NAMES
def test_the_torch_front_end_shows_every_option_with_the_default_of_its_rule(name: str) -> None:
    torch = pytest.importorskip("thalweg.torch")
    cls = getattr(torch, name)
    beside = {"variant": None, "overrides": (), "engine": "auto", "capturable": False}
    beside |= {"replicas": None, "divide_work": None}
    beside |= {"foreach": None, "fused": None, "differentiable": False}
    expected = {**defaults(RULES[name]), **AROUND_DEFAULTS, **defaults(Numerics), **beside}
    for shown in (inspect.signature(cls), inspect.signature(cls.__init__)):
        named = {key: p for key, p in shown.parameters.items() if key not in ("self", "params", "lr")}
        assert {key: p.default for key, p in named.items()} == expected
        by_position = [key for key, p in shown.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert [key for key in by_position if key != "self"] == ["params", "lr", *RULES[name].TORCH]
        assert all(p.kind is p.KEYWORD_ONLY for key, p in named.items() if key not in by_position)
    theirs = getattr(pytest.importorskip("torch.optim"), name, None)
    in_order = [*inspect.signature(theirs).parameters][2:] if theirs else []
    assert list(RULES[name].TORCH) == in_order[: len(RULES[name].TORCH)]
    made = cls(pytest.importorskip("torch.nn").Linear(2, 2, bias=False).parameters(), lr=0.1)
    group, own = made.param_groups[0], {**defaults(RULES[name]), **defaults(Numerics)}
    assert not made.defaults.keys() & {*AROUND_DEFAULTS, "spikes"}, "groups show what is around a rule where it is on"
    own_affair = "precond_update_probability"  # of Kron, which shows that of the step
    assert all(group[key] == default for key, default in own.items() if key in group and key != own_affair)
    # a momentum of None is not shown, so that schedulers do not give it another value
    assert own.keys() - group.keys() == {"spikes", *(["momentum"] if own.get("momentum", 0) is None else [])}


@pytest.mark.parametrize("module", ["numpy", "torch", "optax"])
@NAMES
def test_what_is_shown_has_types_and_no_text_in_their_place(module: str, name: str) -> None:
    front_end = pytest.importorskip(f"thalweg.{module}")
    shown = getattr(front_end, name.lower() if module == "optax" else name)
    annotations = {key: p.annotation for key, p in inspect.signature(shown).parameters.items()}
    assert not [key for key, hint in annotations.items() if hint is inspect.Parameter.empty or isinstance(hint, str)]
    assert typing.get_type_hints(shown if module == "optax" else shown.__init__)
    assert annotations["maximize"] is bool
    assert float in typing.get_args(annotations["max_grad_norm"])


def test_a_schedule_that_is_a_default_comes_before_functions_among_its_types() -> None:
    """jsonargparse tries them in their order, and writes what it takes for a function as one that cannot be read."""
    hint = inspect.signature(front_end.Kron).parameters["precond_update_probability"].annotation
    assert typing.get_args(hint)[0] is Annealed


@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_a_class_that_derives_from_an_optimizer_shows_its_own_arguments(module: str) -> None:
    base = pytest.importorskip(f"thalweg.{module}").LAMB

    class Mine(base):
        def __init__(self, depth: int) -> None:
            super().__init__()

    assert list(inspect.signature(Mine).parameters) == ["depth"]
    assert "betas" in inspect.signature(base).parameters


@NAMES
def test_a_command_line_that_gives_every_option_leaves_a_variant_what_it_is(name: str) -> None:
    """Those that are made of a signature hand over every default."""
    shown = inspect.signature(getattr(front_end, name)).parameters
    every = {key: p.default for key, p in shown.items() if key not in ("lr", "variant")}
    for variant, changed in RULES[name].VARIANTS.items():
        if "bfloat16" in changed.values():
            pytest.importorskip("ml_dtypes")
        meant = getattr(front_end, name)(0.1, variant=variant)
        assert eval(repr(meant), dict(vars(front_end))).options == meant.options
        assert getattr(front_end, name)(0.1, variant=variant, **every).options == meant.options
        other = getattr(front_end, name)(0.1, variant=variant, **{**every, "weight_decay": 0.3})
        assert other.options == {**meant.options, "weight_decay": 0.3}
        # and whoever gives one option, means it
        assert getattr(front_end, name)(0.1, variant=variant, weight_decay=0.0).options["weight_decay"] == 0.0


@pytest.mark.parametrize("file", fields_tool.FILES)
def test_files_for_editors_are_what_the_tool_makes_of_the_fields(file: str) -> None:
    for package in ("torch", "optax"):
        if file.startswith(package):
            pytest.importorskip(package)
    assert (fields_tool.PACKAGE / file).read_text(encoding="utf-8") == fields_tool.FILES[file](), (
        "run python tools/fields.py"
    )


@pytest.mark.parametrize("page", fields_tool.PAGES)
def test_tables_of_options_are_what_the_tool_makes_of_the_fields(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert fields_tool.page(page) == text, "run python tools/fields.py"
    every = {f.name for kind in fields_tool.PAGES[page] for f in fields(kind)}
    every -= {"stacked_axes"} if page != "options.md" else set()
    section = text.split("\n## Options\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == every


@NAMES
def test_every_option_says_what_it_means_and_pages_have_the_learning_rate_and_the_variants_of_a_rule(name: str) -> None:
    kinds = (RULES[name], *AROUND, Numerics)
    assert {option for kind in kinds for option in options_of(kind)} == set(option_names(RULES[name]))
    assert all(known.doc.endswith(".") for kind in kinds for known in options_of(kind).values())
    default = inspect.signature(getattr(front_end, name)).parameters["lr"].default
    assert getattr(front_end, name)().lr == default
    text = (ROOT / "docs" / f"{name.lower()}.md").read_text()
    assert f"`lr` is `{default!r}` by default in numpy and torch" in text.split("\n## Options\n", 1)[1]
    for variant in RULES[name].VARIANTS:
        assert f'"{variant}"' in text or f"`{variant}`" in text, variant
    opening, _, rest = (ROOT / "docs/options.md").read_text().partition("\n## Options\n")
    assert f"({name.lower()}.md)" in opening
    table = rest.split("\n## Variants\n")[1].split("\n## ")[0]
    (row,) = (row for row in table.splitlines() if re.match(rf"\| ([\w, ]+, )?{name}[, ]", row))
    assert re.findall(r'`"(\w+)"`', row) == list(RULES[name].VARIANTS)


@NAMES
def test_the_optax_front_end_has_an_option_for_every_option_of_its_rule(name: str) -> None:
    optax = pytest.importorskip("thalweg.optax")
    shown = inspect.signature(getattr(optax, name.lower())).parameters
    arguments = pytest.importorskip("thalweg.optax.functions").arguments_of(RULES[name])
    renamed = {each.option: argument for argument, each in reversed(arguments.items()) if not each.is_mask}
    factors = {"precond_dtype"} if name != "Kron" else set()
    assert {renamed.get(option, option) for option in option_names(RULES[name]) if option not in factors} <= set(shown)


NAMED_AS_IN_OPTAX = [*((name, "optax") for name in ("adafactor", "adamw", "lamb", "lars", "lion", "sgd"))]
NAMED_AS_IN_OPTAX += [("ademamix", "optax.contrib")]


@pytest.mark.parametrize(("name", "package"), NAMED_AS_IN_OPTAX)
def test_the_optax_front_end_begins_with_the_parameters_of_optax(name: str, package: str) -> None:
    ours, theirs = (
        list(inspect.signature(getattr(pytest.importorskip(module), name)).parameters.values())
        for module in ("thalweg.optax", package)
    )
    same = [(p.name, p.default, p.kind) for p in ours[: len(theirs)]]
    assert same == [(p.name, p.default, p.kind) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


@pytest.mark.parametrize("name", ["Adafactor", "AdamW", "LAMB", "LARS", "Muon", "SGD"])
def test_the_page_of_jax_documents_the_parameters_of_optax_with_their_defaults(name: str) -> None:
    shown = inspect.signature(getattr(pytest.importorskip("thalweg.optax"), name.lower())).parameters
    section = (ROOT / "docs" / "jax.md").read_text().split(f"\n### `{name.lower()}`\n", 1)[1].split("\n### ", 1)[0]
    table, _, beside = section.partition("Beside them")
    rows = dict(re.findall(r"^\| `([^`|]+)`[^|]*\| `([^`|]+)`[^|]*\|", table, re.MULTILINE))
    assert {*RULES[name].OPTAX} - {"*"} <= set(rows)
    other = {option for option in RULES[name].VARIANTS["optax"] if option in shown and option not in rows}
    assert other <= set(re.findall(r"`([a-z_0-9]+)`", beside))
    for option, default in rows.items():
        expected = shown[option].default
        assert default == (
            expected.__name__ if isinstance(expected, type) else getattr(expected, "__name__", repr(expected))
        )


# ---- annotations can be asked for at run time, as documentation tools do


def functions(module: Any) -> list[Any]:
    """Every public function of a module, and every method of its classes that the module itself wrote."""
    found = []
    for public in module.__all__:
        value = getattr(module, public)
        members = [m for _, m in inspect.getmembers(value)] if inspect.isclass(value) else [value]
        members += [m.fget for m in members if isinstance(m, property)]
        found += [f for f in members if inspect.isfunction(f) and f.__module__.startswith("thalweg.")]
    return found


@pytest.mark.parametrize("front_end", ["thalweg.numpy", "thalweg.optax"])
def test_hints_can_be_asked_for(front_end: str) -> None:
    found = functions(pytest.importorskip(front_end))
    assert len(found) > 20
    for function in found:
        assert isinstance(typing.get_type_hints(function), dict)


@pytest.mark.parametrize("extensions", ["None", "types.SimpleNamespace(Unpack=Unpack)"])
def test_hints_work_where_typing_has_no_unpack(extensions: str) -> None:
    """As on Python 3.10, without typing_extensions and with it."""
    program = (
        "import sys, types, typing\n"
        "Unpack = typing.__dict__.pop('Unpack', typing.List)\n"
        f"sys.modules['typing_extensions'] = {extensions}\n"
        "import thalweg.numpy\n"
        "assert typing.get_type_hints(thalweg.numpy.LAMB.__init__)['trust'] is bool\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


# ---- options that are gone: refused as unknown ones are, in every front end, with what to use instead


def calls(front_end: str, given: dict[str, Any]) -> list[Callable[[], Any]]:
    """All ways to give options to an optimizer."""
    module = pytest.importorskip(f"thalweg.{front_end}")
    if front_end == "numpy":
        return [lambda: module.AdamW(0.1, **given), lambda: module.AdamW(0.1).with_options(**given)]
    if front_end == "optax":
        return [lambda: module.adamw(0.1, **given)]
    weight = pytest.importorskip("torch").zeros(3, requires_grad=True)
    return [
        lambda: module.AdamW([weight], lr=0.1, **given),
        lambda: module.AdamW([{"params": [weight], **given}], lr=0.1),
        lambda: module.AdamW([weight], lr=0.1, overrides=[("*", given)]),
    ]


@pytest.mark.parametrize("front_end", ["numpy", "torch", "optax"])
def test_what_is_gone_is_refused_with_what_to_use(front_end: str) -> None:
    for option, instead in GONE.items():
        assert all(option not in option_names(rule) for rule in RULES.values())
        for call in calls(front_end, {option: 1}):
            with pytest.raises(
                OptionError, match=rf"no option '{option}': it is gone since 0\.3: {re.escape(instead)}"
            ):
                call()


def test_rules_are_pure_formulas() -> None:
    """No rule asks for a framework, a dtype, a device or a generator, or changes anything in place."""
    assert (ROOT / "src/thalweg/py.typed").exists()
    words = ("import numpy", "import torch", "import jax", ".device", "random.", " += ", " -= ", " *= ", " /= ")
    for path in (ROOT / "src/thalweg/rules").glob("*.py"):
        assert [word for word in words if word in path.read_text()] == [], path.name
