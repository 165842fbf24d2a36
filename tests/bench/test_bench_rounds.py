"""Turns: everyone once in a round, each after the yardstick; who cannot run is left out."""

from __future__ import annotations

import gc
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from bench_cases import RATE, TINY, FakeCuda, compare, failing, made_up, method, yardstick

from thalweg.bench import bandwidth, quiet
from thalweg.bench.contestants import Contestant, Ready, Stepping
from thalweg.bench.quiet import PATIENCE, count_busy_elsewhere, run_undisturbed, wait_for_quiet
from thalweg.bench.rounds import HOLD, WARM_UP, Contest, Progress, choose_heat, measure_turn
from thalweg.bench.workload import Workload
from thalweg.show.devices import Device


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rest between steps, and no other process on the machine."""
    monkeypatch.setattr(Device, "release_memory", lambda self: None)
    monkeypatch.setattr(quiet, "count_busy_elsewhere", lambda: 0.0)


@pytest.fixture
def workload() -> Workload:
    return Workload(TINY, Device())


def test_contestants_take_turns(workload: Workload) -> None:
    log: list[str] = []
    everyone = [made_up(name, log) for name in ("one", "two", "three")]
    found = compare(workload, everyone, yardstick(log), method(repeats=3))
    warming = [name for name in ("one", "two", "three") for _ in range(WARM_UP)]
    one_round = ["bandwidth", "one", "bandwidth", "two", "bandwidth", "three"]
    assert log == warming + one_round * (WARM_UP + 3)
    assert [len(row.seconds) for row in found.rows] == [3, 3, 3]
    assert found.reference == "one"
    assert found.bandwidths == [RATE] * 9
    assert found.rows[0].engine == "made up"


def test_a_small_model_has_several_steps_a_turn_and_no_yardstick(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    took = iter([9.0, 1.0, 2.0] * 10)
    monkeypatch.setattr(Device, "time", lambda self, action: (action(), next(took))[1])
    own = made_up("one", log)

    def waiting(workload: Workload, stepping: Stepping) -> Ready:
        return replace(
            own.make(workload, stepping), prepare=lambda: log.append("gradients"), wait=lambda: log.append("wait")
        )

    found = compare(workload, [replace(own, make=waiting)], None, method(repeats=2, calls=3, turn=1e9))
    assert log[2 * WARM_UP :] == ["gradients", "one", "wait"] * 3 * (WARM_UP + 2)
    assert found.rows[0].seconds == [2.0, 2.0], "the median of three"
    assert (found.rows[0].bandwidth, found.rows[0].share_of_floor, found.yardstick) == (None, None, "")


def test_a_turn_of_long_steps_ends_early() -> None:
    steps: list[float] = []
    ready = Ready(lambda: None, probe=lambda: [0.0])

    def take() -> float:
        steps.append(0.4)
        return 0.4

    assert measure_turn(ready, take, calls=20, turn=1.0) == 0.4
    assert len(steps) == 3


def test_on_a_gpu_host_and_device_have_times_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's with an empty queue, the device's in a queue that is held until the host is done."""
    torch = pytest.importorskip("torch")
    cuda = FakeCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    one = replace(made_up("one", cuda.log), front_end="torch")
    two = made_up("two", cuda.log)
    workload = Workload(TINY, Device("cuda"))
    ready = {c.name: c.make(workload, Stepping()) for c in (one, two)}
    times = Contest(workload, yardstick(cuda.log), method(calls=1)).take_turns([one, two], ready)
    in_torch = ["bandwidth", "wait", "one", "wait", "wait", "sleep", "event", "one", "event", "wait"]
    elsewhere = ["bandwidth", "wait", "two", "wait", "wait", "two", "wait"]
    assert cuda.log == in_torch + elsewhere
    assert times.seconds["one"] == cuda.ELAPSED / 1e3
    assert set(times.host) == {"one", "two"}
    assert 2 * times.host["one"] + HOLD == pytest.approx(cuda.slept / 2e9, rel=1e-3)


def test_who_cannot_run_is_left_out_with_the_reason(workload: Workload) -> None:
    everyone = [
        failing("broken", ImportError("no module\nat all")),
        failing("speechless", RuntimeError()),
        made_up("one", []),
        made_up("idle", [], moves=False),
    ]
    found = compare(workload, everyone, yardstick(), method())
    assert [row.contestant for row in found.rows] == ["one"]
    assert found.left_out == {
        "broken": "ImportError: no module",
        "speechless": "RuntimeError",
        "idle": "RuntimeError: its step leaves the parameters as they were",
    }


def test_nobody_can_run(workload: Workload) -> None:
    found = compare(workload, [failing("broken", OSError("no"))], yardstick(), method(memory=True))
    assert (found.heats, found.rows, found.reference) == ([], [], "")


def test_heats_when_memory_is_short_share_the_reference(workload: Workload) -> None:
    log: list[str] = []
    everyone = [made_up(name, log) for name in ("one", "two", "three", "four")]
    found = compare(workload, everyone, yardstick(), method(budget=1.0))
    assert [list(heat.rounds[0].result.seconds) for heat in found.heats] == [
        ["one", "two"],
        ["one", "three"],
        ["one", "four"],
    ]
    assert [row.contestant for row in found.rows] == ["one", "two", "three", "four"]
    assert [len(row.seconds) for row in found.rows] == [6, 2, 2, 2]


def test_whoever_has_no_reference_beside_it_is_left_out(workload: Workload) -> None:
    made = iter(range(10))

    def once(workload: object, stepping: Stepping) -> Ready:
        if next(made):
            raise MemoryError("no second time")
        return made_up("first", []).make(workload, stepping)  # type: ignore[arg-type]

    first = Contestant("first", "SGD", "thalweg", "numpy", once, 2)
    everyone = [first, made_up("second", []), made_up("third", [])]
    found = compare(workload, everyone, yardstick(), method(budget=1.0))
    assert [row.contestant for row in found.rows] == ["first", "second"]
    assert found.left_out == {"first": "MemoryError: no second time", "third": "first could not run beside it"}


def test_heats_count_what_everyone_keeps(workload: Workload) -> None:
    everyone = [made_up(name, [], copies=copies) for name, copies in (("a", 1), ("b", 1), ("c", 1), ("d", 100))]
    fixed = 7 * workload.nbytes + 2.2 * bandwidth.SIZE
    heat, rest = choose_heat(everyone, workload, fixed + 3 * workload.nbytes)
    assert [c.name for c in heat] == ["a", "b", "c"]
    assert [c.name for c in rest] == ["d"]
    assert choose_heat(everyone, workload, fixed + 103 * workload.nbytes)[1] == []


def test_times_are_of_one_step(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "time", lambda self, action: 10.0 if action() is None else 0.0)
    found = compare(workload, [made_up("one", [])], yardstick(), method(stepping=Stepping(inner=5)))
    assert found.rows[0].seconds == [2.0, 2.0]


def test_a_contestant_that_goes_astray_is_left_out(workload: Workload) -> None:
    def make(workload: object, stepping: Stepping) -> Ready:
        weights = [1.0]
        return Ready(lambda: weights.__setitem__(0, weights[0] * 1e9), probe=lambda: list(weights))

    astray = Contestant("astray", "SGD", "other", "numpy", make, 1)
    found = compare(workload, [astray, made_up("steady", [])], yardstick(), method())
    assert [row.contestant for row in found.rows] == ["steady"]
    assert found.reference == "steady"
    assert "no longer finite" in found.left_out["astray"]
    assert gc.isenabled()


def test_whoever_keeps_more_than_is_free_does_not_even_begin(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "count_free_bytes", lambda self: 3 * workload.nbytes)
    begun: list[str] = []
    everyone = [made_up("large", begun, copies=4), made_up("small", begun, copies=3)]
    found = compare(workload, everyone, yardstick(), method())
    assert [row.contestant for row in found.rows] == ["small"]
    assert found.left_out["large"].startswith("MemoryError: it keeps 928 B, and 696 B are free")
    assert "large" not in begun


def test_peers_are_not_heard_and_ours_is(workload: Workload, capsys: pytest.CaptureFixture[str]) -> None:
    def noisy(package: str) -> Contestant:
        def make(workload: object, stepping: Stepping) -> Ready:
            sys.stdout.write(f"{package} speaks\n")
            warnings.warn(f"{package} warns", stacklevel=2)
            return made_up("quiet", []).make(workload, stepping)  # type: ignore[arg-type]

        return Contestant(package, "SGD", package, "numpy", make, 1)

    with pytest.warns(UserWarning, match="thalweg warns") as warned:
        found = compare(workload, [noisy("thalweg"), noisy("peer")], yardstick(), method())
    assert [row.contestant for row in found.rows] == ["thalweg", "peer"]
    assert len(warned) == 1
    assert capsys.readouterr().out == "thalweg speaks\n"


def test_progress_goes_forward(workload: Workload) -> None:
    seen: list[Progress] = []
    everyone = [made_up(name, []) for name in ("one", "two", "three")]
    compare(workload, everyone, yardstick(), method(on_progress=seen.append, budget=1.0))
    parts = [progress.done for progress in seen]
    assert parts == sorted(parts)
    assert (parts[0], parts[-1]) == (0.0, 1.0)
    assert seen[0].doing == "warming up one"
    assert seen[-1].doing == "2 of 2 rounds"


def test_a_disturbed_round_is_told(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(quiet, "count_busy_elsewhere", lambda: 1e3 * next(clock))
    seen: list[Progress] = []
    found = compare(workload, [made_up("one", [])], yardstick(), method(on_progress=seen.append))
    assert found.disturbed
    assert "disturbed: other processes took" in seen[-1].doing
    assert len(found.heats[0].left_out) == 2 * (PATIENCE - 1)


# ---- rounds are chosen by what other processes took, and by nothing else


def disturbed_by(monkeypatch: pytest.MonkeyPatch, shares: list[float]) -> None:
    """The rounds to come have these shares of the cores taken by others."""
    left = iter(shares)
    monkeypatch.setattr(quiet, "watch_round", lambda run: quiet.Round(run(), next(left)))


def test_quiet_rounds_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed_by(monkeypatch, [0.0, 0.5, 0.01, 0.02])
    numbers = iter(range(10))
    seen: list[tuple[int, float]] = []
    counted, left_out = run_undisturbed(
        lambda: next(numbers), 3, wait=0, on_round=lambda done, others: seen.append((done, others))
    )
    assert [each.result for each in counted] == [0, 2, 3]
    assert [each.result for each in left_out] == [1]
    assert seen == [(1, 0.0), (1, 0.5), (2, 0.01), (3, 0.02)]


def test_patience_ends_and_the_least_disturbed_count(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed_by(monkeypatch, [0.9, 0.2, 0.8, 0.7, 0.3, 0.6])
    numbers = iter(range(10))
    counted, left_out = run_undisturbed(lambda: next(numbers), 2, wait=0)
    assert [each.result for each in counted] == [1, 4]
    assert len(left_out) == 2 * (PATIENCE - 1)


def test_waiting_ends_when_it_is_quiet_or_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[float] = []
    monkeypatch.setattr(time, "sleep", looked.append)
    disturbed_by(monkeypatch, [0.9, 0.9, 0.0])
    wait_for_quiet(60.0)
    assert len(looked) == 3
    wait_for_quiet(0.0)
    assert len(looked) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells it on Linux alone")
def test_what_this_process_does_is_not_others_work() -> None:
    if not any(map(int, Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:])):
        pytest.skip("this system does not count")
    begin, own = count_busy_elsewhere(), time.process_time()
    while time.process_time() - own < 0.2:
        pass
    busy = time.process_time() - own
    # others may be busy meanwhile, on as many cores as there are; less than nothing they cannot be
    assert count_busy_elsewhere() - begin > -0.5 * busy
