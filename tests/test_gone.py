"""Options that are gone: refused as unknown ones are, in every front end, with what to use instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from thalweg.errors import OptionError
from thalweg.given import GONE
from thalweg.rules import RULES
from thalweg.settings import option_names


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
