"""What goes wrong, said so that a user can mend it."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., None])

#: The packages whose lines no user has written: this one, and those that call it.
NO_USERS = ("thalweg", "torch", "jax", "optax", "contextlib", "functools")


class OptimError(ValueError):
    """An input that cannot be served; the message names it and says what would be right."""


class OptionError(OptimError):
    """An option that is unknown, out of range, or without effect beside the others."""


class ParameterError(OptimError):
    """A parameter or gradient whose type, dtype, shape or memory cannot be served."""


class RuleError(OptimError):
    """An update rule that does what no fused code can be made of; the message names the line."""


class NonFiniteError(OptimError):
    """A gradient or update with NaN or infinity, under ``on_nonfinite="raise"``."""


class StateError(OptimError):
    """A saved state that does not fit this optimizer or this parameter."""


class Refused(Exception):
    """An engine refuses a parameter, and says why. Others take it then, unless the user asked for this one."""


class UnusedOverrideWarning(UserWarning):
    """An entry of ``overrides`` matched no parameter: most likely a typing mistake."""


class ResumeWarning(UserWarning):
    """A saved state was loaded into an optimizer with other overrides, engine or options around a rule than it had."""


class IdleWarning(UserWarning):
    """An optimizer trains nothing: it has no parameters, or none of them has gradients."""


class FallbackWarning(UserWarning):
    """What a fast engine needs is missing or of an unknown version, and slower code does its work."""


class HintWarning(UserWarning):
    """What an optimizer has assumed and may be wrong, as ``explain()`` tells it: about a parameter, or a rate."""


class CommandError(OptimError):
    """Something that the command line was asked for and that it cannot do."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's that led here, however many calls lie between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in NO_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def refusal(admit: Callable[..., object], *args: Any, **named: Any) -> str:
    """Why something is refused, "" if it is admitted."""
    try:
        admit(*args, **named)
    except (Refused, RuleError) as error:
        return str(error)
    return ""


def asked_once(admit: F) -> F:
    """A check whose answers are remembered, refusals too: an ``lru_cache`` alone forgets what is raised."""
    answer = functools.lru_cache(maxsize=1024)(functools.partial(refusal, admit))

    @functools.wraps(admit)
    def remembered(*args: Any) -> None:
        if reason := answer(*args):
            raise Refused(reason)

    return cast(F, remembered)


def no_fused_code(where: str, reason: str) -> OptionError:
    """The error where a user asked for fused code. where: what is refused, after a space."""
    better = "use engine='auto', which takes the fastest engine that can run"
    return OptionError(f"engine='fused' cannot run{where}: {reason}; {better}")


@contextmanager
def say_where(where: str) -> Iterator[None]:
    """A context in which errors of options say where the options were given."""
    try:
        yield
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from None


@contextmanager
def read_as(what: str) -> Iterator[None]:
    """A context in which errors from values of no sensible type or size name what is read, such as a file."""
    try:
        yield
    except OptimError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StateError(f"{what} is damaged: {type(error).__name__}, {error}") from error
