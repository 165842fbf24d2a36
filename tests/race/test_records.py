"""Records: what is finished is never lost, what is damaged never trusted, and what came to nothing leaves nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thalweg.errors import CommandError
from thalweg.race.array_task import ArrayTask
from thalweg.race.contest import PROGRAMME, RECORDS, Race, load_race, race
from thalweg.race.records import Book
from thalweg.race.task import Run
from thalweg.race.workers import Workers, count_workers
from thalweg.show.devices import machine

TASK = ArrayTask(
    name="parabola",
    init=lambda seed: {"x": np.full(3, 1.0 + seed)},
    gradients=lambda params, batch: {"x": 2 * params["x"]},
    evaluate=lambda params: (float(np.square(params["x"]).sum()), 0.5),
    score_name="luck",
    steps=4,
    seeds=2,
)


def ready(folder: Path, task: ArrayTask = TASK, **options: object) -> Race:
    return race(task, optimizers=["SGD", "LAMB"], rates={"": [0.1, 1e200]}, folder=folder, **options)  # type: ignore[arg-type]


def counted(race: Race) -> list[Run]:
    """The runs that were really run."""
    ran: list[Run] = []
    race.run(on_run=ran.append)
    return ran


def test_what_is_recorded_is_not_run_again(tmp_path: Path) -> None:
    first = ready(tmp_path)
    assert len(counted(first)) == 8
    again = ready(tmp_path)
    assert again.records == first.records
    assert any(None in record.result.loss for record in again.records.values()), "one that diverged is among them"
    assert counted(again) == []
    where = json.loads((tmp_path / RECORDS).read_text().splitlines()[0])["where"]
    assert where["versions"].keys() >= {"python", "numpy", "thalweg"}
    assert where["machine"] == machine()
    assert where["date"].startswith("20")


class Stop(Exception):
    pass


def test_a_race_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    def stop_after_three(run: Run, seen: list[Run] = []) -> None:  # noqa: B006
        seen.append(run)
        if len(seen) == 3:
            raise Stop

    with pytest.raises(Stop):
        ready(tmp_path).run(on_run=stop_after_three)
    rest = ready(tmp_path)
    assert len(rest.waiting) == 5
    assert len(counted(rest)) == 5
    alone = ready(tmp_path / "other").run()
    assert rest.records == alone.records


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda line: line[: len(line) // 2], "it is not JSON"),
        (lambda line: line.replace(b'"lr": 0.1', b'"lr": 0.2'), "its checksum does not match its content"),
        (lambda line: line.replace(b'"seed": 0', b'"seed": 0, "more": 1'), "its checksum does not match"),
        (lambda line: b"\xff\xfe" + line, "codec can't decode"),
        (lambda line: b"{}", "it is not a record of a run"),
        (lambda line: b"[1, 2]", "it is not a record of a run"),
    ],
)
def test_a_damaged_record_is_told_and_done_again(tmp_path: Path, damage: object, words: str) -> None:
    whole = ready(tmp_path).run()
    path = tmp_path / RECORDS
    lines = path.read_bytes().splitlines()
    lines[0] = damage(lines[0])  # type: ignore[operator]
    path.write_bytes(b"\n".join(lines) + b"\n")
    mended = ready(tmp_path)
    (told,) = mended.damaged
    assert told.line == 1
    assert words in told.why
    assert len(counted(mended)) == 1
    assert mended.records == whole.records
    assert Book(path).damaged == []


def test_a_line_that_was_not_finished_is_done_again_even_if_it_reads_well(tmp_path: Path) -> None:
    ready(tmp_path).run()
    path = tmp_path / RECORDS
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    again = ready(tmp_path)
    assert [damage.line for damage in again.damaged] == [8]
    assert len(counted(again)) == 1


def test_a_record_of_another_version_is_not_trusted(tmp_path: Path) -> None:
    from thalweg.race.records import compute_checksum

    ready(tmp_path).run()
    path = tmp_path / RECORDS
    first, *rest = path.read_text().splitlines()
    content = json.loads(first)
    del content["checksum"], content["result"]["engine"]
    path.write_text("\n".join([json.dumps({**content, "checksum": compute_checksum(content)}), *rest]) + "\n")
    (told,) = ready(tmp_path).damaged
    assert "another version" in told.why


def test_what_changes_a_run_makes_it_another(tmp_path: Path) -> None:
    ready(tmp_path).run()
    assert ready(tmp_path).waiting == []
    for changed in (
        ready(tmp_path, steps=5),
        ready(tmp_path, engine="reference"),
        ready(tmp_path, replace(TASK, fingerprint="edited")),
        ready(tmp_path, replace(TASK, options={"SGD": dict(momentum=0.5), "LAMB": dict(eps=1e-3)})),
    ):
        assert len(changed.waiting) == 8


def test_a_race_can_be_drawn_without_its_task_and_before_its_end(tmp_path: Path) -> None:
    whole = ready(tmp_path).run()
    outcome, damaged = load_race(tmp_path)
    assert damaged == []
    assert {**outcome.summary, "made": ""} == {**whole.summary, "made": ""}
    path = tmp_path / RECORDS
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    part, _ = load_race(tmp_path)
    assert part.summary["missing"] == 6
    assert [result["contestant"] for result in part.summary["courses"][0]["results"]] == ["SGD"]


def test_a_folder_without_a_race_or_with_a_spoilt_one_is_told(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="has no recorded race to draw"):
        load_race(tmp_path)
    for spoilt in ("{", "null", '{"title": "", "command": "", "contestants": {"Nobody": ""}, "courses": []}'):
        (tmp_path / PROGRAMME).write_text(spoilt)
        with pytest.raises(CommandError, match=r"race\.json is damaged"):
            load_race(tmp_path)


def test_a_folder_that_cannot_be_written_is_found_out_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(PermissionError) as caught:
        ready(tmp_path / "report").run(on_measure=lambda *progress: pytest.fail("something was run"))
    assert caught.value.filename == str(tmp_path / "report")


def test_mending_keeps_what_another_race_has_added_meanwhile(tmp_path: Path) -> None:
    ready(tmp_path).run()
    path = tmp_path / RECORDS
    *lines, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, b"half a li"]))
    late = ready(tmp_path)
    path.write_bytes(b"".join([*lines, last, b"half a li"]))
    late.book.mend()
    assert path.read_bytes() == b"".join([*lines, last])


# ---- races that come to nothing


def interrupt(*progress: Any) -> None:
    raise KeyboardInterrupt


def fail(*arguments: Any) -> Any:
    raise RuntimeError("no")


#: Why a race came to nothing: what was asked for, what is done at each measure, and what is raised.
FAILURES: dict[str, tuple[dict[str, Any], Any, type[BaseException]]] = {
    "a task whose init raises": (dict(task=replace(TASK, init=fail)), None, CommandError),
    "a task whose gradients raise": (dict(task=replace(TASK, gradients=fail)), None, CommandError),
    "an engine that is not there": (dict(engine="warp"), None, CommandError),
    "a device that is not there": (dict(device="moon"), None, CommandError),
    "Ctrl-C in the first run": ({}, interrupt, KeyboardInterrupt),
}


@pytest.mark.parametrize("why", FAILURES)
def test_a_race_that_came_to_nothing_leaves_folders_as_they_were(why: str, tmp_path: Path) -> None:
    options, on_measure, error = FAILURES[why]
    empty, full, earlier = (tmp_path / name for name in ("empty", "full", "earlier"))
    empty.mkdir()
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    ready(earlier).run()
    for folder in (empty, full, full / "new" / "report", earlier):
        with pytest.raises(error):
            race(**{"task": TASK, **options}, optimizers=["Kron"], folder=folder).run(*filter(None, [on_measure]))
    assert list(empty.iterdir()) == []
    assert [path.name for path in full.iterdir()] == ["notes.txt"]
    outcome, _ = load_race(earlier)  # which is still there to be drawn
    assert outcome.summary["missing"] == 0


# ---- several processes


@pytest.mark.nightly
def test_workers_record_what_one_process_records(tmp_path: Path) -> None:
    """With rates among which some are hopeless: who stops depends on who came before."""
    rates = {"": [0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0]}
    asked: dict[str, Any] = dict(task="digits", optimizers=["SGD", "AdamW", "Lion"], steps=12, seeds=2, rates=rates)
    alone = race(**asked).run()
    assert any(record.stopped for record in alone.records.values())
    told: list[object] = []
    with Workers(2, asked) as workers:
        shared = race(**asked, folder=tmp_path).run(lambda *seen: told.append(seen), told.append, workers)
    assert shared.records == alone.records
    assert Book(tmp_path / RECORDS).records == alone.records
    assert len(told) == 2 * len(alone.records)


def test_short_races_need_no_workers() -> None:
    assert count_workers(race("digits", optimizers=["SGD"], steps=2)) == 1
