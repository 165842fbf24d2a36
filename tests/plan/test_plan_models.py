"""Models that are built in."""

from __future__ import annotations

import pytest

from thalweg.plan.models import BUILTIN, builtin


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        ("gpt2", 124_439_808, 148),
        ("bert-large", 335_141_888, 391),
        ("resnet50", 25_557_032, 161),
        ("llama-1b", 1_235_814_400, 146),
        ("llama-8b", 8_030_261_248, 291),
        ("llama-70b", 70_553_706_496, 723),
        ("small", 894_848, 148),
    ],
)
def test_counts_are_those_published(name: str, parameters: int, tensors: int) -> None:
    model = builtin(name)
    assert (model.name, model.parameters, len(model.tensors)) == (name, parameters, tensors)
    assert len({tensor.name for tensor in model.tensors}) == tensors
    assert {tensor.dtype for tensor in model.tensors} == {"float32"}


def test_all_that_is_built_in_is_listed() -> None:
    assert BUILTIN == ("gpt2", "bert-large", "resnet50", "llama-1b", "llama-8b", "llama-70b", "small")


@pytest.mark.parametrize(
    ("spelling", "name"), [("bert_large", "bert-large"), ("llama1b", "llama-1b"), ("GPT2", "gpt2")]
)
def test_other_spellings_are_understood(spelling: str, name: str) -> None:
    assert builtin(spelling).name == name
