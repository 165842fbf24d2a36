"""Weights that are not trained: they take memory, and neither gradients nor state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from thalweg.cli import run
from thalweg.plan import plan
from thalweg.plan.models import Model, Tensor


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["plan", *arguments]) == 0
    found = capsys.readouterr()
    assert found.err == ""
    return found.out


def test_frozen_weights_take_memory_alone(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--optimizers", "lamb", "--device", "cpu", "--engine", "foreach"]
    text = printed(capsys, "gpt2", "--frozen", "*.wte.*", "--frozen", "*.wpe.*", *arguments)
    frozen = 768 * (50257 + 1024)
    assert f"frozen: {frozen:,} parameters in 2 tensors, float32, take 158 MB, without gradients and state" in text
    assert "all together: parameters, gradients, frozen weights, state and peak" in text
    assert f"{124_439_808 - frozen:,} parameters in 146 tensors" in text
    record = json.loads(printed(capsys, "gpt2", "--frozen", "*.w[tp]e.*", *arguments, "--json"))
    found = record["optimizers"][0]
    assert found["frozen_bytes"] == 4 * frozen
    assert found["parameter_bytes"] == 4 * (124_439_808 - frozen)
    assert found["state_bytes"] == 8 * (124_439_808 - frozen) + 4 * 146
    parts = ("parameter", "gradient", "frozen", "state", "peak")
    assert found["total_bytes"] == sum(found[f"{part}_bytes"] for part in parts)
    assert record["model"]["frozen_parameters"] == frozen
    # what fits is told with them
    for memory, fits in ((found["total_bytes"], True), (found["total_bytes"] - 1, False)):
        record = json.loads(
            printed(capsys, "gpt2", "--frozen", "*.w[tp]e.*", *arguments, "--memory", f"{memory}B", "--json")
        )
        assert record["optimizers"][0]["fits"] is fits


@pytest.mark.parametrize("optimizer", ["LAMB", "Kron"])
def test_frozen_weights_are_divided_over_ranks(optimizer: str) -> None:
    given = {"optimizers": [optimizer], "device": "cpu", "world": 4, "layout": "fsdp2"}
    trained, frozen = Tensor("w", (6, 4)), Tensor("f", (10, 3), "bfloat16")
    bare = plan(Model("m", "", (trained,)), **given)  # type: ignore[arg-type]
    share = plan(Model("m", "", (trained, frozen)), frozen=["f"], **given).costs[0].share  # type: ignore[arg-type]
    assert share.frozen_bytes == 2 * 3 * 3
    assert share.total_bytes == bare.costs[0].share.total_bytes + share.frozen_bytes


@pytest.mark.nightly
def test_a_picture_shows_what_is_frozen(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for folder, more in (("with", ["--frozen", "*.wte.*"]), ("without", [])):
        assert run(["plan", "gpt2", "--front-end", "optax", "--out", str(tmp_path / folder), *more]) == 0
    assert "frozen" in (tmp_path / "with" / "plan.svg").read_text()
    assert "frozen" not in (tmp_path / "without" / "plan.svg").read_text()
