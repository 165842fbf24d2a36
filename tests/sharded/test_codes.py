"""Messages of eight bits: how many bytes, what error, and that all ranks read the same."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from lanes import one_in
from world import world
from world_codes import bytes_sent, trained
from world_layouts import torch
from world_replicas import bits
from world_steps import TYPICAL, Run

import thalweg.torch
from thalweg.errors import OptionError

pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_bytes_of_a_step() -> None:
    """Of P elements over w ranks at most 4 P / w bytes with Muon in bfloat16, and 2 P / w in codes."""
    for sent, elements in world(4).run(bytes_sent, "Muon", None, (64, 128), 4):
        assert sent <= 4 * elements / 4
    for sent, elements in world(4).run(bytes_sent, "Muon", "int8", (64, 128), 4):
        assert sent <= 2 * elements / 4


@pytest.mark.parametrize("layout", one_in(2, ["plain", "copies of shards"]))
def test_all_ranks_read_the_same(layout: str) -> None:
    options = dict(TYPICAL["Muon"], divide_work=True, message_dtype="int8")
    found = world(4).run(bits, Run("Muon", "float32", options=options, replicated=True), layout)
    for place in found[0]["held"]:
        blocks = dict(own["held"][place] for own in found)
        assert all(own["held"][place][1] == blocks[own["held"][place][0]] for own in found)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", ["Muon", "Kron"])
@pytest.mark.parametrize("layout", ["shards", "replicas"])
def test_training_for_300_steps(rule: str, layout: str, seed: int) -> None:
    (wide, *_), (narrow, *_) = (world(2).run(trained, rule, dtype, layout, 300, seed) for dtype in (None, "int8"))
    assert wide[-1] < wide[0] / 4
    assert narrow[-1] < 1.05 * wide[-1]  # seeds differ by more


def test_other_codes_are_refused() -> None:
    with pytest.raises(OptionError, match="message_dtype must be one of None, 'int8', got 'int4'"):
        thalweg.torch.Muon([torch.nn.Parameter(torch.ones(3, 3))], lr=0.1, message_dtype="int4")
