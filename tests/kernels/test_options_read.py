"""Options reach kernels: those made from a rule have all of them, those written by hand say which they read."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from thalweg import rules
from thalweg.kernels import triton
from thalweg.kernels.triton.served import reason_against
from thalweg.rules import Rule, refresh
from thalweg.settings import Handling, Setting


@pytest.mark.parametrize("kind", triton.READS, ids=lambda kind: kind.__name__)
def test_every_option_of_a_rule_is_read(kind: type[Rule]) -> None:
    """A new option is to be read by kernels written by hand: until then no engine uses them."""
    assert sorted(triton.READS[kind].split()) == sorted(f.name for f in fields(kind))


@pytest.mark.parametrize("kind", triton.READS, ids=lambda kind: kind.__name__)
def test_kernels_for_gpus_name_what_they_are_said_to_read(kind: type[Rule]) -> None:
    folder = Path(inspect.getfile(triton)).parent
    files = [*folder.glob(f"{kind.__name__.lower()}*.py"), folder / "passes.py", folder / "tables.py"]
    files += [Path(inspect.getfile(refresh))]  # of whose functions kernels are made
    named = set(re.findall(r"rule\.(\w+)", "".join(path.read_text() for path in files)))
    while methods := [name for name in named if inspect.isfunction(getattr(kind, name, None))]:
        named -= set(methods)
        named |= {name for m in methods for name in re.findall(r"self\.(\w+)", inspect.getsource(getattr(kind, m)))}
    assert named >= set(triton.READS[kind].split())


@dataclass(frozen=True, kw_only=True)
class Adafactor(rules.Adafactor):
    """With an option that no kernel knows."""

    toy: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Kron(rules.Kron):
    toy: float = 0.0


def test_an_option_that_a_rule_adds_is_known_to_kernels_that_are_made_from_it_alone() -> None:
    """What it does, native code of LARS with an option more shows: test_native_derived.py."""
    reason = reason_against(Setting(Kron(), Handling()), (3, 4), "float32", {})
    assert reason == "there is no fused kernel of Kron with the option toy"
    for rule in (Adafactor(), Adafactor(min_dim_size_to_factor=2)):
        assert reason_against(Setting(rule, Handling()), (3, 4), "float32", {}) == ""
