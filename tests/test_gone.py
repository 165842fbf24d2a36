"""Options that are gone: refused as unknown ones are, in every front end, with what to use instead."""

from __future__ import annotations

import re

import numpy as np
import pytest

import thalweg.numpy
from thalweg.errors import OptionError
from thalweg.given import GONE
from thalweg.rules import RULES
from thalweg.settings import option_names

every_option = pytest.mark.parametrize("option", GONE)


def words(option: str) -> str:
    return rf"has no option '{option}': it is gone since 0\.3: {re.escape(GONE[option])}"


@every_option
def test_no_rule_has_it_and_numpy_says_what_to_use(option: str) -> None:
    for rule in RULES.values():
        assert option not in option_names(rule)
    with pytest.raises(OptionError, match=words(option)):
        thalweg.numpy.AdamW(lr=0.1, **{option: 1})
    optimizer = thalweg.numpy.AdamW(lr=0.1)
    with pytest.raises(OptionError, match=words(option)):
        optimizer.with_options(**{option: 1})
    optimizer.update("w", np.ones(3), np.ones(3))


@every_option
def test_torch_says_what_to_use(option: str) -> None:
    torch = pytest.importorskip("torch")
    import thalweg.torch

    weight = torch.nn.Parameter(torch.ones(3))
    for params, options in (([weight], {option: 1}), ([{"params": [weight], option: 1}], {})):
        with pytest.raises(OptionError, match=words(option)):
            thalweg.torch.AdamW(params, lr=0.1, **options)
    with pytest.raises(OptionError, match=words(option)):
        thalweg.torch.AdamW([weight], lr=0.1, overrides=[("*", {option: 1})])


@every_option
def test_jax_says_what_to_use(option: str) -> None:
    pytest.importorskip("optax")
    import thalweg.optax

    with pytest.raises(OptionError, match=words(option)):
        thalweg.optax.adamw(0.1, **{option: 1})
