"""What kernels for GPUs do not step: who insists is told which parameter and why; else lists or the reference do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from on_device import DEVICE, gradients, parameters, train
from own_rules import Signed

import thalweg.torch
from thalweg.errors import OptionError
from thalweg.rules import RULES, Spikes
from thalweg.rules.ademamix import AdEMAMix
from thalweg.rules.entries import Entry, Moment

pytestmark = pytest.mark.slow  # programs are interpreted


class Crowded(Signed):
    def entries(self, shape: Any) -> dict[str, Entry]:
        return {"exp_avg": Moment(), **{f"average_{i}": Moment() for i in range(6)}}

    def update(self, xp: Any, g: Any, s: Any, p: Any, **given: Any) -> Any:
        update = super().update(xp, g, s, p, **given)
        return update._replace(state={**s, **update.state})


class Largest(Signed):
    def update(self, xp: Any, g: Any, s: Any, p: Any, **given: Any) -> Any:
        return super().update(xp, g / xp.amax(xp.abs(g), None), s, p, **given)


CAUTIOUS: dict[str, Any] = dict(cautious=True, averaged=0.5, weight_decay=0.1)
RANDOM: dict[str, Any] = dict(state_rounding="stochastic", state_dtype="int8")
TILES: dict[str, Any] = dict(momentum=0.9, momentum_dtype="int8", min_dim_size_to_factor=32)
#: (rule, shape, dtype, options, words).
REFUSED: list[tuple[Any, tuple[int, ...], str, dict[str, Any], str]] = [
    ("LAMB", (3,), "float64", {}, "cannot run for parameter 'w': there is no fused kernel for float64"),
    ("AdEMAMix", (34, 20), "float32", dict(graft=AdEMAMix(), averaged=0.5), "room for 6"),
    ("Muon", (34, 20), "float32", dict(on_nonfinite="skip"), "no fused kernel of Muon for on_nonfinite='skip'"),
    ("Muon", (34, 20), "float32", CAUTIOUS, "engine='fused' cannot run"),
    ("Kron", (34, 20), "float32", CAUTIOUS, "engine='fused' cannot run"),
    ("SOAP", (34, 20), "float32", CAUTIOUS, "engine='fused' cannot run"),
    ("Kron", (6, 5), "float32", dict(on_nonfinite="skip"), "no fused kernel of Kron for on_nonfinite='skip'"),
    ("Kron", (6, 5), "float32", dict(precond_dtype="float16"), "factors of float16"),
    ("Kron", (6, 5), "float32", dict(spikes=Spikes(action="skip")), "the host counts the steps of Kron"),
    ("Kron", (64, 64), "float32", RANDOM, "no fused kernel of Kron for state_rounding='stochastic'"),
    ("Muon", (64, 64), "float32", RANDOM, "no fused kernel of Muon for state_rounding='stochastic'"),
    ("Adafactor", (64, 64, 3, 3), "float32", TILES, "tiles of rows and columns .* cut its groups of codes"),
    (Crowded, (3, 4), "float32", {}, "keeps 7 entries .* room for 6"),
    (Largest, (3, 4), "float32", {}, r"needs amax over axes \(0, 1\)"),
]


def make(rule: Any, named: Any, engine: str, options: dict[str, Any]) -> Any:
    kind = RULES[rule] if isinstance(rule, str) else rule
    return thalweg.torch.optimizer(kind)(named, 0.01, engine=engine, **options)


@pytest.mark.parametrize(("rule", "shape", "dtype", "options", "words"), REFUSED, ids=str)
def test_what_is_not_served_is_stepped_otherwise(
    rule: Any, shape: Any, dtype: str, options: dict[str, Any], words: str
) -> None:
    named, steps = parameters(dtype, {"w": shape}), gradients(2, dtype, {"w": shape})
    before = named[0][1].detach().clone()
    with pytest.raises(OptionError, match=words):
        train(make(rule, named, "fused", options), named, steps)
    assert torch.equal(named[0][1], before)
    optimizer = make(rule, named, "auto", options)
    train(optimizer, named, steps)
    assert "fused" not in optimizer.engine
    assert not torch.equal(named[0][1], before)
    if rule != "LAMB":
        assert re.search(words.removeprefix("engine='fused' cannot run"), str(optimizer.explain(code=True)))


def test_matrices_that_lie_by_columns() -> None:
    """Kernels would take them in the order of memory, which is that of another matrix."""
    named = [("a", torch.nn.Parameter(torch.ones(34, 20, device=DEVICE).t()))]
    with pytest.raises(OptionError, match="is not contiguous in memory"):
        train(make("Muon", named, "fused", {}), named, [{"a": torch.ones_like(named[0][1])}])
