"""A checkpoint of some ranks is resumed by any number of others, whatever the options, whenever it was made.

`thalweg check --ranks` has more layouts and all forms of a state, for every rule with the options it comes with.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from world import world
from world_checkpoints import continued, misfit, resume, resumed, save
from world_steps import TYPICAL, Run

from thalweg import Spikes

pytestmark = pytest.mark.slow

FINE = [[], []]


def run_of(rule: str, **options: Any) -> Run:
    """Six steps, of which the half are taken when a checkpoint is written."""
    names = ("short", "vector", "matrix", "even", "cube")
    return Run(rule, options={**TYPICAL[rule], **options}, names=names, rates=(1.0, 1.0, 0.5, 0.5, 0.25, 0.25))


#: Cases whose state or options are of other kinds.
SPIKES = run_of("LAMB", spikes=Spikes(window=2, z=0.1, action="clip"))
GROUPS = replace(run_of("LAMB"), groups=({}, dict(weight_decay=0.1, betas=(0.5, 0.9)), dict(lr=0.01)))
SOME_FACTORED = replace(
    run_of("Adafactor"), overrides=(("matrix", dict(min_dim_size_to_factor=128)), ("*e*", dict(momentum=0.5)))
)
UNFACTORED = run_of("Adafactor", min_dim_size_to_factor=128)
NARROW = run_of("LARS", momentum_dtype="bfloat16")
GUARDED = run_of("LAMB", max_grad_norm=1.0, on_nonfinite="skip", capturable=True)
RATE = replace(run_of("LAMB"), tensor_rate=True)
BY_CHANCE = replace(run_of("Muon", rounding="stochastic"), dtype="bfloat16")
FROZEN = replace(run_of("LAMB"), frozen=("matrix",))
LATE = dict.fromkeys(range(3), ("matrix",))
DIVIDED = replace(run_of("Kron", divide_work=True), replicated=True)
CODED = replace(
    Run("AdamW", "float32", dict(state_dtype="int8", state_rounding="stochastic"), engine="foreach"),
    names=("coded", "coded kernel", "bias"),
)


@pytest.mark.parametrize(
    ("run", "before", "after", "how"),
    [
        pytest.param(GROUPS, "plain", "FSDP2", {}, id="groups"),
        pytest.param(SOME_FACTORED, "FSDP2", "mixed", {}, id="some factored"),
        pytest.param(SPIKES, "FSDP2", "mixed", {}, id="spikes"),
        # what owners learned in steps before, they forget
        pytest.param(run_of("Kron"), "FSDP2", "mixed", {}, id="Kron"),
        pytest.param(run_of("Kron"), "FSDP2", "FSDP2", dict(begun=2, exact=True), id="Kron, to the bit"),
        pytest.param(FROZEN, "FSDP2", "FSDP2", {}, id="frozen"),
        pytest.param(RATE, "FSDP2", "FSDP2", {}, id="a rate in a tensor"),
        pytest.param(run_of("Adafactor"), "mixed", "FSDP2", dict(at=0, exact=True), id="before the first step"),
        pytest.param(GUARDED, "FSDP2", "FSDP2", dict(begun=2, exact=True), id="guarded, to the bit"),
        pytest.param(run_of("MARS"), "FSDP2", "FSDP2", dict(begun=2, exact=True), id="MARS, to the bit"),
        pytest.param(BY_CHANCE, "first axis", "first axis", dict(begun=2, exact=True), id="by chance"),
        pytest.param(
            replace(run_of("SOAP"), absent=LATE), "first axis", "first axis", dict(exact=True), id="late gradient"
        ),
        pytest.param(run_of("SOAP"), "FSDP2", "FSDP2", dict(exact=True, meanwhile=True), id="while steps are taken"),
        pytest.param(CODED, "first axis", "second axis", dict(exact=True), id="codes"),
    ],
)
def test_in_other_layouts(tmp_path: Path, run: Run, before: str, after: str, how: dict[str, Any]) -> None:
    assert world(2).run(resumed, tmp_path, run, before, after, **how) == FINE


@pytest.mark.parametrize(
    ("run", "before", "ranks", "after", "others", "exact"),
    [
        (DIVIDED, "copies of shards", 4, "plain", 2, False),
        (run_of("LAMB"), "HSDP", 4, "FSDP2", 2, False),
        (CODED, "first axis", 2, "two axes", 4, True),
    ],
    ids=["divided work", "HSDP", "codes"],
)
def test_by_another_number_of_ranks(
    tmp_path: Path, run: Run, before: str, ranks: int, after: str, others: int, exact: bool
) -> None:
    world(ranks).run(save, tmp_path, run, before)
    assert world(others).run(resume, tmp_path, run, after, exact=exact) == [[]] * others


@pytest.mark.parametrize(("case", "before", "after"), [("AdamW", "FSDP2", "FSDP2"), ("Adafactor", "plain", "FSDP2")])
def test_runs_of_torch_are_continued(case: str, before: str, after: str) -> None:
    assert world(2).run(continued, case, before, after) == FINE


# ---- what does not fit


MISFITS = {
    "options that need more state": (
        *(run_of("LARS"), run_of("LARS", momentum=0.0)),
        "StateError: the state of 'short' does not fit its options: they need {'momentum_buffer': (3,)}, and the state "
        "has {};",
    ),
    "a narrower dtype": (
        *(run_of("LARS"), NARROW),
        "StateError: the state of 'short' does not fit: it was saved with 'momentum_buffer' in torch.float64, and "
        "read into torch.bfloat16; construct this optimizer with the saved options",
    ),
    "other overrides": (
        *(SOME_FACTORED, UNFACTORED),
        "StateError: the state of 'matrix' does not fit its options: they need {'row_var': (7, 1), 'col_var': (1, 5), ",
    ),
    "another rule": (run_of("LAMB"), run_of("LARS"), "this is a state of LAMB and cannot be loaded into LARS"),
    "another rule's files": (run_of("LAMB"), run_of("LARS"), "Missing key in checkpoint state_dict: optim.state"),
    "other shapes": (
        *(replace(run_of("LAMB"), names=("matrix",)), replace(run_of("LAMB"), names=("matrix", "even"))),
        "Missing key in checkpoint state_dict: ",
    ),
}


@pytest.mark.parametrize(("saved", "loading", "words"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_told_on_every_rank(tmp_path: Path, saved: Run, loading: Run, words: str) -> None:
    for said in world(2).run(misfit, tmp_path, saved, loading):
        assert any(words in each for each in said)
