"""Whom to check: an optimizer with its options, and what its author declares of it."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from thalweg.errors import CommandError
from thalweg.rules import Rule
from thalweg.show.extras import extra
from thalweg.show.modules import describe_error, import_attribute

with extra("check"):
    import pytest

#: Where an author declares facts: an attribute of the class or function.
DECLARED = "check_facts"
#: Facts that some checks cannot do with, and what is said of an optimizer that has them.
EXCLUDED = {"couples_parameters": "steps depend on other parameters", "needs_matrices": "only matrices are taken"}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What an author declares of an optimizer, where it differs from what most of them do."""

    #: Nothing moves with a learning rate of 0.
    lr_zero_is_no_step: bool = True
    #: Only two-dimensional parameters are taken. An optimizer that refuses a vector has declared it by that.
    needs_matrices: bool = False
    #: Steps depend on other parameters too, as with clipping by a global norm.
    couples_parameters: bool = False
    #: A step of sharded parameters takes at most so many collectives, however many parameters there are.
    collectives: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """An optimizer that is checked: checks make as many instances of it as they need."""

    name: str
    #: What its user gave: the class or function, or where it is.
    given: Any
    factory: Callable[..., Any]
    options: Mapping[str, Any]
    facts: Facts
    #: ``torch`` or ``optax``: which checks are run.
    kind: str

    def make(self, *params: Any, **more: Any) -> Any:
        """An instance with the subject's options, and others beside them or instead."""
        return self.factory(*params, **{**self.options, **more})

    def require_not(self, fact: str) -> None:
        """Skip the check where this fact, one of ``EXCLUDED``, is declared."""
        if getattr(self.facts, fact):
            pytest.skip(EXCLUDED[fact])

    def __reduce__(self) -> Any:
        """Sent to other processes as it was given: a class that is made of a rule has no place to be imported from."""
        return untried_subject, (self.given, dict(self.options), asdict(self.facts))


def subject_of(given: Any, options: Mapping[str, Any] | None = None, facts: Mapping[str, Any] | None = None) -> Subject:
    """A subject from ``package.Class``, ``module:Class``, ``package.Class(lr=0.1)``, or from the class itself.

    It is constructed, and what it tells by that is among its facts: one that refuses a vector needs matrices.
    """
    subject = untried_subject(given, options, facts)
    with keep_surroundings(subject.kind):
        try:
            step_once(subject, (4, 3))
        except Exception as error:
            said = f"{json.dumps(dict(subject.options), default=str)}: {describe_error(error)}"
            raise CommandError(f"{subject.name} cannot be tried with the options {said}") from error
        try:
            step_once(subject, (4,))
        except Exception:
            return replace(subject, facts=replace(subject.facts, needs_matrices=True))
    return subject


def step_once(subject: Any, shape: tuple[int, ...]) -> None:
    """Construct the optimizer, and step a parameter of this shape."""
    if subject.kind == "torch":
        subject.run_steps([shape])
        return
    import jax.numpy as jnp

    made, tree = subject.make(), {"weight": jnp.ones(shape)}
    if not (hasattr(made, "init") and hasattr(made, "update")):
        raise TypeError(f"it takes no params and makes no gradient transformation, but {type(made).__name__}")
    made.update(tree, made.init(tree), tree)


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
    names = [field.name for field in fields(Facts)]
    if unknown := sorted(set(declared) - set(names)):
        raise CommandError(f"{name}: unknown facts {', '.join(unknown)}; there are {', '.join(names)}")
    # classes of optimizers, and functions that take parameters first, are for torch; others make transformations
    for_torch = inspect.isclass(factory) or [*inspect.signature(factory).parameters][:1] in (["params"], ["parameters"])
    told: Any = dict(name=name, given=given, factory=factory, options={**written, **(options or {})})
    if not for_torch:
        return Subject(**told, facts=Facts(**declared), kind="optax")
    from thalweg.check.problem import TorchSubject

    return TorchSubject(**told, facts=Facts(**declared), kind="torch")


def parse_json(text: str | None, option: str) -> dict[str, Any]:
    """Read a JSON object, such as the value of --options."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{option} {text!r:.200} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise CommandError(f'{option} must be a JSON object such as {{"lr": 0.1}}, got {text!r}')
    return value


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


def resolve(reference: str) -> Any:
    """Import what ``module:Name`` or ``package.module.Name`` stands for."""
    parts = reference.replace(":", ".", 1).split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise CommandError(f"{reference!r} is no optimizer: write module:Class, such as torch.optim:AdamW")
    module, _, attribute = reference.partition(":") if ":" in reference else reference.rpartition(".")
    return import_attribute(f"{module}:{attribute}", "optimizer", "torch.optim:Adam", callable)[0]


@contextlib.contextmanager
def keep_surroundings(kind: str) -> Iterator[None]:
    """Generators, warnings and torch's modes stay as they were; nothing is printed, logged or compiled meanwhile."""
    state, level = random.getstate(), logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if kind == "torch":
            import torch

            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            random.setstate(state)
            logging.disable(level)
