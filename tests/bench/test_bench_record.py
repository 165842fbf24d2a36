"""The figures: what follows from samples that are known."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from thalweg.bench import report
from thalweg.bench.memory import Memory
from thalweg.bench.quiet import QUIET, Round
from thalweg.bench.record import Bench, Comparison, Heat, Row, Times

PARAMETERS = 1_000_000
FLOOR = 40 * PARAMETERS


def row(name: str, **found: Any) -> Row:
    about: dict[str, Any] = dict(package="timm", front_end="torch", rule="LAMB", engine="fused", floor=FLOOR)
    return Row(contestant=name, reference="ours", **{**about, **found})


def compare(heat: Heat, *rows: Row) -> Comparison:
    found = Comparison(model="small", about="Made up", parameters=PARAMETERS, tensors=3, itemsize=4, rows=list(rows))
    found.add(heat)
    return found


def times(ours: float, theirs: float, bandwidth: float, others: float = 0.0) -> Round[Times]:
    return Round(Times({"ours": ours, "theirs": theirs}, [bandwidth, bandwidth]), others)


@pytest.fixture
def comparison() -> Comparison:
    """Ours takes 1, 2 and 4 ms; theirs 3, 4 and 20 ms; memory moves 40, 80 and 60 GB/s."""
    rounds = [times(1e-3, 3e-3, 40e9), times(2e-3, 4e-3, 80e9, 0.01), times(4e-3, 20e-3, 60e9)]
    ours = row("ours", package="thalweg", memory=Memory(500_000, "made up"))
    found = compare(Heat(rounds, [times(9.0, 9.0, 1.0, 0.9)]), ours, row("theirs"))
    found.yardstick, found.left_out = "a pass", {"nobody": "ImportError: not here"}
    return found


def bench(*comparisons: Comparison) -> Bench:
    return Bench(
        date="2026-01-01T00:00:00+00:00",
        device="cpu",
        device_about="a processor, 2 threads",
        machine={"cores": 2},
        versions={"python": "3.11.0"},
        dtype="float32",
        engine="auto",
        inner=1,
        moving_grads=True,
        repeats=3,
        absent=["apex"],
        comparisons=list(comparisons),
    )


def test_what_follows_from_samples(comparison: Comparison) -> None:
    ours, theirs = comparison.rows
    assert ours.ratio == 1
    assert theirs.ratio == pytest.approx(3)  # of 3, 2 and 5 in the same rounds; the ratio of the medians would be 2
    assert theirs.median / ours.median == pytest.approx(2)
    assert ours.bandwidth == 60e9
    # 40 bytes for each of 1,000,000 parameters in 2 ms are 20 GB/s, and 60 were possible in the same run
    assert ours.share_of_floor == pytest.approx(1 / 3)
    assert theirs.share_of_floor == pytest.approx(1 / 6)
    assert ours.quartiles == pytest.approx((1.5e-3, 3e-3))
    assert compare(Heat([times(1e-3, 3e-3, 40e9)]), row("ours")).rows[0].quartiles == (1e-3, 1e-3)
    assert max(ours.seconds) == 4e-3, "rounds left out do not count"
    assert comparison.others == [0.0, 0.01, 0.0]
    assert not comparison.disturbed


def test_a_contestant_of_a_later_heat_is_compared_within_that_heat(comparison: Comparison) -> None:
    later = [Round(Times({"ours": 10e-3, "late": 20e-3}, [20e9, 20e9]), 0.0)]
    comparison.rows.append(late := row("late", package="optax"))
    comparison.add(Heat(later))
    assert (late.ratio, late.bandwidth) == (2.0, 20e9)
    assert comparison.rows[0].seconds == [1e-3, 2e-3, 4e-3, 10e-3]


def test_what_memory_does_not_limit_has_no_share(comparison: Comparison) -> None:
    comparison.rows[1].floor = None
    assert comparison.rows[1].share_of_floor is None
    assert report.make_columns(comparison)["share of the floor"] == ["33%", ""]


def test_columns_that_nobody_has_are_left_out(comparison: Comparison) -> None:
    columns = ["contestant", "engine", "ms", "quartiles", "ratio", "bytes a parameter", "share of the floor"]
    assert list(report.make_columns(comparison)) == [*columns, "extra memory", "of the parameters"]
    small = compare(Heat([Round(Times({"ours": 1.0, "theirs": 2.0}), 0.0)]), row("ours"), row("theirs"))
    assert list(report.make_columns(small)) == columns[:-2]
    assert "Bandwidth" not in report.describe_method(small)


def test_on_a_gpu_host_and_device_are_columns_of_their_own(comparison: Comparison) -> None:
    host = [{"ours": 1e-3, "theirs": 4e-3}, {"ours": 1e-3, "theirs": 3e-3}, {"ours": 2e-3, "theirs": 1e-3}]
    rounds = zip(comparison.rounds, host, strict=True)
    heat = Heat([replace(each, result=replace(each.result, host=own)) for each, own in rounds])
    comparison = compare(heat, row("ours"), row("theirs"))
    columns = report.make_columns(comparison)
    shown = {title: columns[title] for title in ("host ms", "host ratio", "device ms", "device ratio")}
    assert shown == {
        "host ms": ["1", "3"],
        "host ratio": ["1.00", "3.00"],
        "device ms": ["2", "4"],
        "device ratio": ["1.00", "3.00"],
    }
    assert "ms" not in columns
    assert comparison.rows[1].figures()["host_median_s"] == 3e-3


def test_markdown_has_every_figure(comparison: Comparison) -> None:
    comparison.rows[1].engine, comparison.rows[1].memory = "", Memory(None, "no such file")
    text = report.as_markdown(bench(comparison))
    assert "| ours | fused | 2 | 1.5 to 3 | 1.00 | 40 | 33% | 500 kB | 12.5% |" in text
    assert "| theirs |  | 4 | 3.5 to 12.0 | 3.00 | 40 | 17% | not known |  |" in text
    assert "Left out: nobody (ImportError: not here)" in text
    assert "Memory of theirs is not known (no such file)" in text
    assert "Bandwidth: 60 GB/s (best 80) by a pass." in text
    assert "Rounds: 3, and 1 left out as more disturbed" in text
    assert report.NOT_TO_BE_QUOTED not in text


@pytest.mark.parametrize(
    ("device", "machine", "said"),
    [
        pytest.param("cpu", {}, "", id="an old record"),
        ("cpu", {"architecture": "arm64", "native_core": "baseline"}, ", arm64, native core at level baseline"),
        ("cpu", {"architecture": "x86-64", "native_core": None}, ", x86-64, no native core"),
        ("cuda", {"architecture": "x86-64", "native_core": "avx512"}, ", x86-64"),
    ],
)
def test_the_platform_is_named(comparison: Comparison, device: str, machine: dict[str, Any], said: str) -> None:
    found = bench(comparison)
    found.device, found.machine = device, {"cores": 2, **machine}
    whole = f"00:00. a processor, 2 threads, 2 cores{said}; float32, gradients that move; python 3.11.0."
    assert whole in report.as_markdown(found)


def test_a_disturbed_run_says_so_everywhere() -> None:
    found = bench(compare(Heat([times(1e-3, 3e-3, 40e9, QUIET + 0.01)]), row("ours")))
    assert found.disturbed
    assert f"**{report.NOT_TO_BE_QUOTED}**" in report.as_markdown(found)
    assert found.plain()["comparisons"][0]["disturbed"]


def test_a_record_has_all_samples_and_is_json(comparison: Comparison) -> None:
    read = json.loads(json.dumps(bench(comparison).plain()))
    (one,) = read["comparisons"]
    assert read["absent"] == ["apex"]
    assert [each["result"]["seconds"]["theirs"] for each in one["heats"][0]["rounds"]] == [3e-3, 4e-3, 20e-3]
    assert one["heats"][0]["left_out"][0]["others"] == 0.9
    assert [row["share_of_floor"] for row in one["rows"]] == pytest.approx([1 / 3, 1 / 6])
    assert one["rows"][0]["memory"] == {"extra": 500_000, "how": "made up"}


def test_nobody_is_no_error(comparison: Comparison) -> None:
    comparison.heats, comparison.rows = [], []
    assert "No contestant could run." in report.table_in_markdown(comparison)
    assert comparison.plain()["rows"] == []
