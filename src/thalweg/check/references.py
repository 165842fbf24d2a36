"""Optimizers by their references, ready to be checked."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from thalweg.check.subject import Facts, Subject, keep_surroundings
from thalweg.errors import CommandError
from thalweg.rules import Rule
from thalweg.show.modules import describe_error, import_attribute

#: Where an author declares facts: an attribute of the class or function.
DECLARED = "check_facts"


class ConstructionError(CommandError):
    """An optimizer that exists and cannot be constructed, or cannot take a first step."""


def subject_of(given: Any, options: Mapping[str, Any] | None = None, facts: Mapping[str, Any] | None = None) -> Subject:
    """A subject from ``package.Class``, ``module:Class``, ``package.Class(lr=0.1)``, or from the class itself.

    It is constructed and stepped once, and what it tells by that is among its facts.
    """
    subject = untried_subject(given, options, facts)
    with keep_surroundings(subject.kind):
        return probe(subject)


def untried_subject(given: Any, options: Mapping[str, Any] | None, facts: Mapping[str, Any] | None) -> Subject:
    """A subject of which nothing has been constructed yet."""
    written: dict[str, Any] = {}
    name, factory = getattr(given, "__qualname__", str(given)), given
    if isinstance(given, str):
        name = given.strip()
        reference, written = parse_call(name)
        factory = resolve(reference)
    if inspect.isclass(factory) and issubclass(factory, Rule):
        import thalweg.torch

        factory = thalweg.torch.optimizer(factory)
    if not callable(factory):
        raise CommandError(f"{name}: this is neither a class nor a function")
    declared = {**getattr(factory, DECLARED, {}), **(facts or {})}
    known = [field.name for field in fields(Facts)]
    if unknown := sorted(set(declared) - set(known)):
        raise CommandError(f"{name}: unknown facts {', '.join(unknown)}; there are {', '.join(known)}")
    kind, made = "optax", Subject
    if is_for_torch(factory):
        from thalweg.check.problem import TorchSubject

        kind, made = "torch", TorchSubject
    return made(
        name=name,
        factory=factory,
        options={**written, **(options or {})},
        facts=Facts(**declared),
        kind=kind,
    )


def is_for_torch(factory: Any) -> bool:
    """Classes of optimizers, and functions that take parameters first; others make transformations."""
    first = next(iter(inspect.signature(factory).parameters), "")
    return inspect.isclass(factory) or first in ("params", "parameters")


def probe(subject: Subject) -> Subject:
    """Construct and step the subject; return it with the facts that it tells by that."""
    if subject.kind == "optax":
        made = attempt(subject, subject.make)
        if not (hasattr(made, "init") and hasattr(made, "update")):
            raise CommandError(
                f"{subject.name}: takes no params and makes no gradient transformation, but {type(made).__name__}"
            )
        import jax.numpy as jnp

        vectors = {"vector": jnp.ones(4)}
        return try_vectors(subject, lambda: made.update(vectors, made.init(vectors), vectors))
    stepped: Any = subject  # a TorchSubject
    attempt(subject, lambda: stepped.run_steps([(4, 3)]))
    return try_vectors(subject, lambda: stepped.run_steps([(4,)]))


def try_vectors(subject: Subject, step_a_vector: Callable[[], Any]) -> Subject:
    """Step a vector; where that is refused, the subject needs matrices."""
    try:
        step_a_vector()
    except Exception:
        return replace(subject, facts=replace(subject.facts, needs_matrices=True))
    return subject


def attempt(subject: Subject, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        given = json.dumps(dict(subject.options), default=str)
        raise ConstructionError(
            f"{subject.name} cannot be tried with the options {given}: {describe_error(error)}"
        ) from error


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Split what is written like a call into the reference and the options.

    >>> parse_call("torch.optim.SGD(lr=0.1, nesterov=True)")
    ('torch.optim.SGD', {'lr': 0.1, 'nesterov': True})
    """
    reference, bracket, _ = text.partition("(")
    if not bracket:
        return text, {}
    try:
        call = ast.parse("made" + text[len(reference) :], mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("options go by name")
        return reference, {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError):
        raise CommandError(f"{text!r}: write options as Name(lr=0.1, betas=(0.9, 0.95))") from None


def split_references(text: str) -> list[str]:
    """Split at the commas between references, which may have options in brackets.

    >>> split_references("torch.optim.SGD(lr=0.1, momentum=0.9), optax:lamb(learning_rate=0.1)")
    ['torch.optim.SGD(lr=0.1, momentum=0.9)', 'optax:lamb(learning_rate=0.1)']
    """
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def resolve(reference: str) -> Any:
    """Import what ``module:Name`` or ``package.module.Name`` stands for."""
    parts = reference.replace(":", ".", 1).split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise CommandError(f"{reference!r} is no optimizer: write module:Class, such as torch.optim:AdamW")
    module, _, attribute = reference.partition(":") if ":" in reference else reference.rpartition(".")
    return import_attribute(f"{module}:{attribute}", "optimizer", "torch.optim:Adam", callable)[0]
