"""State in the host's memory: the same numbers to the bit, and errors that change nothing."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cases import EVERY, Case
from lanes import by_turns, one_in

torch = pytest.importorskip("torch")

from simulated_lanes import SimulatedLanes, simulated  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg import NonFiniteError, OptionError, ResumeWarning, StateError  # noqa: E402
from thalweg.check import parametrize  # noqa: E402
from thalweg.kernels import staging  # noqa: E402
from thalweg.torch.offload import host  # noqa: E402
from thalweg.torch.step.turns import Turns  # noqa: E402

SHAPES = {"a": (64, 64), "b": (64, 64), "c": (70, 96), "d": (130,), "e": (64, 64), "f": ()}
#: What rules need so that they keep something for every one of these.
MORE: dict[str, dict[str, Any]] = {
    "SGD": dict(momentum=0.9),
    "Adafactor": dict(momentum=0.9),
    "Muon": dict(vectors="row"),
}
#: A little more than the moments of one (64, 64) in float32.
SMALL = 36_000


@pytest.fixture
def lanes() -> Iterator[SimulatedLanes]:
    with simulated() as found:
        yield found


def in_small_chunks(optimizer: Any, most: int = SMALL) -> Any:
    optimizer._turns = Turns(most)
    return optimizer


def problem(dtype: Any = None, seed: int = 0) -> list[tuple[str, Any]]:
    draw = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=draw).to(dtype or torch.float32) for name, shape in SHAPES.items()}
    return [(name, torch.nn.Parameter(x)) for name, x in made.items()]


def train(optimizer: Any, named: list[tuple[str, Any]], steps: range, *, without: str = "") -> None:
    for step in steps:
        for (name, p), (_, g) in zip(named, problem(seed=100 + step), strict=True):
            p.grad = None if name == without else g.detach().to(p.dtype)
        optimizer.step()


def snapshot(optimizer: Any, named: list[tuple[str, Any]]) -> dict[str, Any]:
    found = {name: p.detach() for name, p in named}
    found |= {f"{name}.{key}": e for name, p in named for key, e in optimizer.state[p].items()}
    return {name: x.clone() for name, x in found.items()}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        assert torch.equal(ours[name], theirs[name]), name


def both(make: Any, dtype: Any = None) -> tuple[Any, list, Any, list]:
    """Two optimizers of the same parameters, the second with its state on the host."""
    plain, moved = problem(dtype), problem(dtype)
    return make(plain, False), plain, make(moved, True), moved


@by_turns("dtype", first=2)
@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("dtype", "beside"),
    [
        ("float32", dict(engine="foreach", max_grad_norm=1.0)),
        ("bfloat16", dict(state_dtype="int8", rounding="compensated", on_nonfinite="skip")),
        ("float32", dict(on_nonfinite="raise")),
    ],
    ids=["lists", "lean", "raise"],
)
def test_every_rule_takes_the_same_steps(lanes: SimulatedLanes, case: Case, dtype: str, beside: dict) -> None:
    options = MORE.get(case.name, {})

    def make(named: list, offload_state: bool) -> Any:
        cls = getattr(thalweg.torch, case.name)
        return in_small_chunks(cls(named, case.lr, offload_state=offload_state, **options, **beside))

    plain, named, moved, others = both(make, getattr(torch, dtype))
    for optimizer, own in ((plain, named), (moved, others)):
        train(optimizer, own, range(3))
        train(optimizer, own, range(3, 4), without="b")
        train(optimizer, own, range(4, 6))
    assert_same(snapshot(moved, others), snapshot(plain, named))
    assert moved.stats().keys() == plain.stats().keys()
    places = {e.untyped_storage().data_ptr() for s in moved.state.values() for e in s.values()}
    assert moved._turns.homes.keys() <= places
    assert len(moved._turns.chunks) > 1


def lamb(named: list, offload_state: bool = True, **options: Any) -> Any:
    return in_small_chunks(thalweg.torch.LAMB(named, lr=0.01, offload_state=offload_state, **options))


def test_the_device_holds_three_chunks_and_the_largest_tensor(lanes: SimulatedLanes) -> None:
    """And as little is copied as there is state, in few pieces."""
    named = problem()
    optimizer = lamb(named)
    train(optimizer, named, range(2))
    told = optimizer.explain()
    assert told.host_bytes == sum(e.nbytes for s in optimizer.state.values() for k, e in s.items() if k != "step")
    assert told.host_bytes <= sum(lanes.pinned) < told.host_bytes + 2 * len(SHAPES) * staging.ALIGNED
    slots = {id(chunk.slot): chunk.slot.room.numel() for chunk in optimizer._turns.chunks}
    assert sum(slots.values()) <= 2 * SMALL + 2 * 4 * 70 * 96 + 4 * staging.ALIGNED < told.host_bytes
    copies = [len(lane.queue) // 2 for lane in (lanes.inward, lanes.outward)]
    assert copies == [2 * len(lanes.pinned)] * 2


def test_reading_state_waits_for_it(lanes: SimulatedLanes) -> None:
    named = problem()
    optimizer = lamb(named)
    train(optimizer, named, range(1))
    p, beneath = named[4][1], optimizer.__dict__["state"]
    assert not beneath[p]["exp_avg"].any()  # on its way
    assert optimizer.state[p]["exp_avg"].all()
    train(optimizer, named, range(1, 2))
    before = beneath[p]["exp_avg"].clone()
    assert not torch.equal(optimizer.state_dict()["state"][4]["exp_avg"], before)


@pytest.mark.parametrize("saved_from", [False, True])
def test_checkpoints_go_both_ways(lanes: SimulatedLanes, saved_from: bool) -> None:
    straight = problem()
    expected = lamb(straight, False, state_dtype="int8")
    train(expected, straight, range(4))
    named = problem()
    optimizer = lamb(named, saved_from, state_dtype="int8")
    train(optimizer, named, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    for loaded_into in (False, True):
        file.seek(0)
        again = [(name, torch.nn.Parameter(p.detach().clone())) for name, p in named]
        fresh = lamb(again, loaded_into, state_dtype="int8")
        train(fresh, again, range(10, 11))  # which loading forgets
        for (_, p), (_, q) in zip(again, named, strict=True):
            p.data.copy_(q)
        fresh.load_state_dict(torch.load(file, weights_only=True))
        assert not fresh._turns.chunks  # the memory of the state that was replaced is free
        train(fresh, again, range(2, 4))
        assert_same(snapshot(fresh, again), snapshot(expected, straight))
        assert bool(fresh._turns.chunks) == loaded_into


def test_what_users_put_into_state_is_taken(lanes: SimulatedLanes) -> None:
    plain, named, moved, others = both(lamb)
    for optimizer, own in ((plain, named), (moved, others)):
        train(optimizer, own, range(2))
        first, second = own[0][1], own[2][1]
        optimizer.state[first]["exp_avg"].mul_(0.5)
        optimizer.state[second]["exp_avg_sq"] = torch.full_like(second, 0.25)
        del optimizer.state[own[3][1]]
        train(optimizer, own, range(2, 4))
        optimizer.param_groups[0]["state_dtype"] = "int8"
        with pytest.warns(ResumeWarning):
            train(optimizer, own, range(4, 5))
    assert_same(snapshot(moved, others), snapshot(plain, named))
    assert all(chunk.slot.room.numel() for chunk in moved._turns.chunks)


# ---- training loops


def adamw_in_turns(params: Any, **options: Any) -> Any:
    """With chunks of one parameter of those that `thalweg check` has."""
    return in_small_chunks(thalweg.torch.AdamW(params, offload_state=True, **options), 2 * 4 * 30)


@pytest.mark.parametrize("check", one_in(8, parametrize(adamw_in_turns, only="contract,state,memory").args[1]))
def test_what_users_rely_on(check: Callable[[], Any], lanes: SimulatedLanes) -> None:
    check()


def in_the_backward_pass(optimizer: Any, named: list) -> None:
    model = torch.nn.Module()
    for name, p in named:
        model.register_parameter(name, p)
    with thalweg.torch.step_in_backward(model, optimizer):
        for step in range(3):
            sum(((p - step) ** 2).sum() for _, p in named).backward()


def with_a_hook(optimizer: Any, named: list) -> None:
    seen: list[Any] = []
    last = named[4][1]
    optimizer.register_step_post_hook(lambda own, *_: seen.append(own.state[last]["exp_avg"].clone()))
    train(optimizer, named, range(2))
    assert seen[0].all()
    assert torch.equal(seen[1], optimizer.state[last]["exp_avg"])


def begun_anew(optimizer: Any, named: list) -> None:
    train(optimizer, named, range(2))
    optimizer.clear_state()
    optimizer.make_state()
    train(optimizer, named, range(2, 4))


@pytest.mark.parametrize("use", [in_the_backward_pass, with_a_hook, begun_anew])
def test_training_loops(lanes: SimulatedLanes, use: Callable[[Any, list], Any]) -> None:
    found = []
    for offload_state in (False, True):
        named = problem()
        optimizer = lamb(named, offload_state)
        use(optimizer, named)
        assert bool(optimizer._turns.chunks) == offload_state
        found.append(snapshot(optimizer, named))
    assert_same(*found)


# ---- errors


def test_an_error_changes_nothing_in_any_turn(lanes: SimulatedLanes) -> None:
    named = problem()
    optimizer = lamb(named, on_nonfinite="raise")
    train(optimizer, named, range(2))
    before = snapshot(optimizer, named)
    for _, p in named:
        p.grad = torch.full_like(p, float("inf")) if p.shape in ((70, 96), ()) else torch.ones_like(p)
    with pytest.raises(NonFiniteError, match="'c', 'f'"):
        optimizer.step()
    assert_same(snapshot(optimizer, named), before)
    new = problem()
    fresh = lamb(new, on_nonfinite="raise")
    new[0][1].grad = torch.full_like(new[0][1], float("nan"))
    with pytest.raises(NonFiniteError, match="'a'"):
        fresh.step()
    assert not fresh.state


@pytest.mark.nightly
def test_one_by_one_and_compiled(lanes: SimulatedLanes) -> None:
    plain, named, moved, others = both(lamb)
    for optimizer, own in ((plain, named), (moved, others)):
        for (_, p), (_, g) in zip(own, problem(seed=7), strict=True):
            p.grad = g.detach()
            optimizer.step_parameter(p)
        optimizer.step()
    torch.compile(moved.step, backend="eager")()
    plain.step()
    assert_same(snapshot(moved, others), snapshot(plain, named))


def test_a_captured_step_is_refused_before_anything_is_written(
    lanes: SimulatedLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before state is made and pinned, which no graph can record either."""
    named = problem()
    optimizer, fresh = lamb(named), lamb(problem())
    train(optimizer, named, range(1))
    before, pinned = snapshot(optimizer, named), list(lanes.pinned)
    monkeypatch.setattr(host, "is_capturing", lambda: True)
    for each in (optimizer, fresh):
        with pytest.raises(OptionError, match="offload_state=True cannot be captured in a CUDA graph"):
            each.step()
    assert_same(snapshot(optimizer, named), before)
    assert (lanes.pinned, len(fresh.state)) == (pinned, 0)


def test_state_that_does_not_fit_is_refused_before_any_turn(lanes: SimulatedLanes) -> None:
    named = problem()
    optimizer = lamb(named)
    train(optimizer, named, range(2))
    last = named[4][1]
    for key, wrong in (("exp_avg", torch.zeros(3)), ("exp_avg_sq", torch.zeros(64, 64, 1))):
        right = optimizer.state[last][key]
        before = snapshot(optimizer, named)
        optimizer.state[last][key] = wrong
        with pytest.raises(StateError, match="the state of 'e' does not fit its options"):
            optimizer.step()
        optimizer.state[last][key] = right
        assert_same(snapshot(optimizer, named), before)
    train(optimizer, named, range(2, 3))


def test_memory_that_cannot_be_pinned(lanes: SimulatedLanes) -> None:
    """The step is not taken, and can be taken when there is memory."""
    plain, named, moved, others = both(lamb)
    lanes.most_pinned = 2 * SMALL
    with pytest.raises(OptionError, match=r"cannot pin [\d,]+ bytes of the host's memory: Cannot allocate"):
        train(moved, others, range(1))
    assert not moved.state
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(others, named, strict=True))
    lanes.most_pinned = 2**40
    for optimizer, own in ((plain, named), (moved, others)):
        train(optimizer, own, range(2))
    assert_same(snapshot(moved, others), snapshot(plain, named))


def test_parameters_that_move_to_the_host_find_their_state() -> None:
    """Where no lane waits for what is on its way."""
    plain, named, moved, others = both(lamb)
    train(plain, named, range(3))
    with simulated():
        train(moved, others, range(2))
    train(moved, others, range(2, 3))
    assert_same(snapshot(moved, others), snapshot(plain, named))


def test_on_a_cpu_it_has_no_effect_and_explain_says_so() -> None:
    plain, named, moved, others = both(lamb)
    train(plain, named, range(2))
    train(moved, others, range(2))
    assert_same(snapshot(moved, others), snapshot(plain, named))
    assert not moved._turns.chunks
    assert "lr 0.01; offload_state has no effect: parameters on cpu have their state there" in str(moved.explain())
    assert "offload_state" not in str(plain.explain())
    with pytest.raises(OptionError, match="offload_state must be True or False, got 1"):
        thalweg.torch.LAMB(problem(), offload_state=1)


def test_explain_shows_what_is_on_the_host(lanes: SimulatedLanes) -> None:
    told = thalweg.torch.Kron(problem(), lr=0.01, offload_state=True).explain()
    assert told.rows[0].host_bytes == 4 * 64 * 64  # the momentum, and no factor
    assert told.rows[0].state_bytes > 3 * 4 * 64 * 64
    lines = str(told).splitlines()
    assert lines[0].endswith("state bytes  on host")
    assert lines[1].endswith("16,384")


@pytest.mark.parametrize("filled", [0.0, 2.0])
def test_new_entries_on_the_host_are_laid_out_as_they_were(filled: float) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        entry = torch.full((6, 5, 3, 2), filled, dtype=dtype).to(memory_format=torch.channels_last)
        for own in (entry, entry[:0], entry[:1, :1, :1, :1]):
            found = host.on_host(own, large=1)
            assert (found.dtype, found.shape) == (own.dtype, own.shape)
            assert found.stride() == torch.empty_like(own).stride()
            assert torch.equal(found, own)


@pytest.mark.parametrize(
    "options", one_in(2, [dict(averaged=0.7), dict(schedule_free=True, betas=(0.0, 0.9))]), ids=str
)
def test_averages_on_the_host_are_evaluated_on_the_device(lanes: SimulatedLanes, options: dict[str, Any]) -> None:
    found = []
    for offload_state in (True, False):
        named = problem()
        optimizer = in_small_chunks(thalweg.torch.AdamW(named, lr=0.01, offload_state=offload_state, **options))
        train(optimizer, named, range(3))
        before = {name: p.detach().clone() for name, p in named}
        with optimizer.averaged():
            found.append({name: p.detach().clone() for name, p in named})
        assert all(torch.equal(p, before[name]) for name, p in named)
    for name, p in found[0].items():
        assert torch.equal(p, found[1][name])
        assert not torch.equal(p, before[name])
