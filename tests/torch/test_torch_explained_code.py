"""``explain(code=True)`` shows the fused code of each treatment, as engines have it."""

from __future__ import annotations

import importlib.util

import pytest

torch = pytest.importorskip("torch")

from thalweg.kernels.cpu.compiled import emit_kind, kind_of  # noqa: E402
from thalweg.rules import RULES  # noqa: E402
from thalweg.torch import LAMB, Adafactor, Kron  # noqa: E402


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape)) for shape in ((130, 140), (140, 130), (7,))]


def test_code_is_shown_when_it_is_asked_for() -> None:
    assert LAMB(parameters(), exempt=None).explain().code == {}
    found = LAMB(parameters(), exempt=None).explain(code=True)
    (title,) = found.code
    assert title == "LAMB, trust ratio, float32 on cpu:"
    functions = emit_kind(kind_of(RULES["LAMB"](), (3,))).functions
    assert all(each.source in found.code[title] for each in functions)
    assert "load<X>(exp_avg_tile + i)" in str(found)


def test_each_treatment_has_its_own() -> None:
    found = Adafactor(parameters()).explain(code=True).code
    factored, plain = found.values()
    assert "between_" in factored
    assert "between_" not in plain
    assert all("computed by its own formulas" in text for text in Kron(parameters()).explain(code=True).code.values())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton here")
def test_of_kernels_for_gpus() -> None:
    from interpreter import serving

    with serving():
        factored, plain = Adafactor(parameters()).explain(code=True).code.values()
        of_kron = str(Kron(parameters()).explain(code=True))
    assert factored.startswith('"""Adafactor(')
    assert "read and write row_var, col_var" in factored
    assert "def pass_1(" in plain
    assert "written by hand" in of_kron
