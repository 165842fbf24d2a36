"""Optimizers of other libraries, by their import names: of torch, and functions of optax."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from thalweg.errors import CommandError
from thalweg.race.contestants import CONTESTANTS, MIXTURES, Contestant
from thalweg.show.extras import need
from thalweg.show.modules import digest, digest_source
from thalweg.show.published import PUBLISHED, how_to_install, import_optimizer, is_installed
from thalweg.show.registered import RATE_NAMES

#: Packages that thalweg's extras install.
EXTRAS = {"torch": "torch", "optax": "jax", "jax": "jax"}
WANTED = (
    "it must be a class derived from torch.optim.Optimizer, a function (params, lr=...) that returns such an "
    "optimizer, or an optax function (learning_rate=...)"
)


#: Options that make those of a package comparable with ours: momentum, no decay, no clipping of gradients.
COMPARABLE: Mapping[str, Mapping[str, Any]] = {
    "torch.optim.SGD": dict(momentum=0.9),
    "torch.optim.AdamW": dict(weight_decay=0.0),
    "timm.optim.lars.Lars": dict(momentum=0.9),
    "timm.optim.lamb.Lamb": dict(max_grad_norm=None),
    "transformers.optimization.Adafactor": dict(relative_step=False),
    "optax.sgd": dict(momentum=0.9),
    "optax.adamw": dict(weight_decay=0.0),
    "apex.optimizers.FusedLAMB": dict(weight_decay=0.0, max_grad_norm=float("inf")),
}


class Entry(NamedTuple):
    """A requested contestant: the name, where to import it from, and what is known of it."""

    name: str
    reference: str
    #: The thalweg optimizer of its kind, whose rates it gets; and its options.
    like: str = ""
    options: Mapping[str, Any] = {}


def list_rivals(words: Sequence[str], optimizers: Sequence[str]) -> list[Entry]:
    """Everyone who is asked for: by import name, or by package, all of it that is like one of these optimizers."""
    packages = {word: word.strip().replace("-", "_") for word in words}
    single = name_references([word for word in words if packages[word] not in PUBLISHED])
    together = [
        each for package in packages.values() if package in PUBLISHED for each in list_package(package, optimizers)
    ]
    return [*(Entry(*each) for each in single.items()), *together]


def list_package(package: str, optimizers: Sequence[str]) -> list[Entry]:
    """Optimizers of a package that are like one of these, under short names such as timm.Lamb."""
    if not is_installed(package):
        raise CommandError(f"{package} is not installed, and --against asks for it: {how_to_install(package)}")
    found = [
        Entry(f"{package}.{reference.rpartition('.')[2]}", reference, rule, COMPARABLE.get(reference, {}))
        for rule, reference in PUBLISHED[package].items()
        if rule in optimizers
    ]
    if not found:
        rules = ", ".join(PUBLISHED[package])
        raise CommandError(f"{package} has {rules}, of which none takes part: name an optimizer, as in module.Class")
    return found


def name_references(references: Sequence[str]) -> dict[str, str]:
    """References by the names they race under: the last part, or all of it where others are called so.

    >>> name_references(["torch.optim.Adam", "torch.optim.AdamW", "mine:Sharp"])
    {'Adam': 'torch.optim.Adam', 'torch.optim.AdamW': 'torch.optim.AdamW', 'Sharp': 'mine:Sharp'}
    """
    whole = {dotted(reference): reference for reference in references}
    lasts = [full.rpartition(".")[2].lower() for full in whole]
    taken = {name.lower() for name in (*CONTESTANTS, *MIXTURES)} | {last for last in lasts if lasts.count(last) > 1}
    return {
        full if last in taken else full.rpartition(".")[2]: reference
        for (full, reference), last in zip(whole.items(), lasts, strict=True)
    }


def names_by_word(asked: Sequence[Entry]) -> dict[str, str]:
    """Names of contestants by what they may be called: their names, and those of other libraries by import name too."""
    words = {dotted(entry.reference): entry.name for entry in asked}
    return {**words, **{name: name for name in (*CONTESTANTS, *MIXTURES, *(entry.name for entry in asked))}}


def dotted(reference: str) -> str:
    """A reference as it would be imported: ``module.Class``."""
    full = reference.strip().replace(":", ".", 1)
    parts = full.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise CommandError(
            f"{reference!r} is not an import name: write module.Class or module:Class, such as torch.optim.Adam, "
            f"or a package: {', '.join(PUBLISHED)}"
        )
    return full


def enter_rival(entry: Entry) -> Contestant:
    """Import an optimizer that the user asks for, and see how it is made."""
    reference = entry.reference.strip()
    make, module = import_reference(reference)
    kind = kind_of(reference, make)
    signature = parameters_of(make)
    parameters = [] if signature is None else list(signature.values())
    closed = signature is not None and not any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    rate = "lr" if kind == "torch" else "learning_rate"
    if closed and rate not in names:
        raise CommandError(f"{reference} takes no {rate}: {WANTED}")
    rule = dotted(reference)
    namesakes = [name for name in CONTESTANTS if name.lower() == rule.rpartition(".")[2].lower()]
    return Contestant(
        name=entry.name,
        rule=rule,
        options=entry.options,
        like=entry.like or next(iter(namesakes), "AdamW"),
        kind=kind,
        make=make,
        known=[option for option in names if option not in (*RATE_NAMES, "params")],
        closed=closed,
        fingerprint=digest(version_of(module).encode(), digest_source(module).encode()),
    )


def import_reference(reference: str) -> tuple[Any, Any]:
    """What a reference names, and its module."""
    package = dotted(reference).partition(".")[0]
    if package in EXTRAS:
        need(EXTRAS[package], package)
    try:
        return import_optimizer(reference)
    except CommandError as error:
        raise CommandError(f"{reference}: {error}") from error


def kind_of(reference: str, make: Any) -> Literal["torch", "optax"]:
    if not callable(make):
        raise CommandError(f"{reference} is a {type(make).__name__}, not an optimizer: {WANTED}")
    if not inspect.isclass(make):
        parameters = parameters_of(make) or {}
        return "optax" if "learning_rate" in parameters and "params" not in parameters else "torch"
    need("torch", "torch")
    torch: Any = importlib.import_module("torch")
    if not issubclass(make, torch.optim.Optimizer):
        raise CommandError(f"{reference} is a class, but not an optimizer: {WANTED}")
    return "torch"


def parameters_of(make: Any) -> Mapping[str, inspect.Parameter] | None:
    """What it is called with; None where Python cannot tell."""
    try:
        return inspect.signature(make).parameters
    except (ValueError, TypeError):
        return None


def version_of(module: Any) -> str:
    package = importlib.import_module(module.__name__.partition(".")[0])
    return str(getattr(package, "__version__", ""))
