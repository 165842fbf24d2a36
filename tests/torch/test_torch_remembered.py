"""A step that repeats is remembered: whatever changes between two steps, the next is as if nothing were remembered."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from side_by_side import needs_core
from side_by_side_torch import agree

import thalweg.torch
from thalweg.check.problem import draw
from thalweg.errors import OptimError, StateError

pytestmark = needs_core

#: torch's table of functions that describe tensors, by DLPack.
TABLE = "__dlpack_c_exchange_api__"
SHAPES = {"w": (3, 4), "b": (5,), "v": (3, 4), "u": (4, 3)}
#: Steps of moderate size, with all that a rule keeps and sums up.
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": dict(lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": dict(lr=0.01, weight_decay=0.1),
    "Lion": dict(lr=0.01, weight_decay=0.1),
    "LARS": dict(lr=1.0, weight_decay=0.1),
    "LAMB": dict(lr=0.05, weight_decay=0.1),
    "Adafactor": dict(lr=0.05, min_dim_size_to_factor=2, momentum=0.9, weight_decay=0.1),
}
MIXED = [
    ("w", thalweg.torch.LAMB.options(**OPTIONS["LAMB"])),
    ("*", thalweg.torch.AdamW.options(**OPTIONS["AdamW"])),
]


class Training:
    """Named parameters and the optimizer that steps them."""

    def __init__(self, rule: str, engine: str, **options: Any) -> None:
        self.params = {name: torch.nn.Parameter(draw(shape, 0, i)) for i, (name, shape) in enumerate(SHAPES.items())}
        #: Those that get no gradient for now.
        self.idle: set[str] = set()
        self.one_by_one, self.time, self.hooks = False, 0, list[Any]()
        given: Any = self.params.items()
        if rule == "Mixture":
            self.optimizer: Any = thalweg.torch.Mixture(given, MIXED, engine=engine, **options)
        else:
            self.optimizer = getattr(thalweg.torch, rule)(given, **{**OPTIONS[rule], **options}, engine=engine)

    @property
    def groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def give_gradients(self) -> None:
        self.time += 1
        for i, (name, p) in enumerate(self.params.items()):
            p.grad = None if name in self.idle else draw(p.shape, 1, i, self.time).to(p.dtype)

    def step(self) -> str:
        """Take a step; tell what it raised."""
        before = {name: p.detach().clone() for name, p in self.params.items()}
        counts = {name: self.count(name) for name in self.params}
        try:
            if self.one_by_one:
                for p in self.params.values():
                    self.optimizer.step_parameter(p)
            else:
                self.optimizer.step()
        except OptimError as error:
            for name, p in self.params.items():
                assert torch.equal(p, before[name]), f"{name} was changed by a step that raised"
                assert self.count(name) == counts[name]
            return f"{type(error).__name__}: {error}"
        finally:
            for name in ("grad_scale", "found_inf"):  # a GradScaler takes them away again
                vars(self.optimizer).pop(name, None)
        return ""

    def count(self, name: str) -> int:
        state = self.optimizer.state.get(self.params[name])
        return int(state["step"]) if state else 0

    def forget(self) -> None:
        """Go on with a copy, which has seen nothing yet, and is hooked alike."""
        hooks = self.hooks
        pickle_all(self)
        for doubles in hooks:
            doubles(self)


#: Done to a training before its gradients are given, or after.
Change: TypeAlias = Callable[[Training], None]


class Both:
    """A training by native code and one by the reference, which remembers nothing."""

    def __init__(self, rule: str, engine: str = "auto", **options: Any) -> None:
        self.ours, self.theirs = Training(rule, engine, **options), Training(rule, "reference", **options)

    def step(self, change: Change | None = None, *, late: Change | None = None) -> str:
        """A step of both after a change; late: with its gradients there. Tells what it raised."""
        said = []
        for training in (self.ours, self.theirs):
            if change is not None:
                change(training)
            if training is self.theirs:
                training.forget()
            training.give_gradients()
            if late is not None:
                late(training)
            said.append(training.step())
        assert said[0] == said[1]
        ours, theirs = ([(name, p) for name, p in each.params.items()] for each in (self.ours, self.theirs))
        agree(self.ours.optimizer, ours, self.theirs.optimizer, theirs)
        return said[0]


# ---- what is changed


def nothing(training: Training) -> None:
    pass


def set_option(index: int = 0, **news: Any) -> Change:
    def change(training: Training) -> None:
        known = {name: copy.copy(value) for name, value in news.items() if name in training.groups[index]}
        training.groups[index].update(known)

    return change


def edit_betas(beta: float) -> Change:
    return lambda training: training.groups[0]["betas"].__setitem__(0, beta)


def add_group(training: Training) -> None:
    name = f"new{len(training.params)}"
    training.params[name] = torch.nn.Parameter(draw((2, 3), 2, len(training.params)))
    training.optimizer.add_param_group({"params": [(name, training.params[name])]})


def swap_order(training: Training) -> None:
    for key in ("params", "param_names"):
        training.groups[-1][key] = training.groups[-1][key][::-1]


def put_in_tuple(training: Training) -> None:
    training.groups[0]["params"] = tuple(training.groups[0]["params"])


def exchange(training: Training) -> None:
    """As trainers do: another tensor, with the state of the one before."""
    old, new = training.params["v"], torch.nn.Parameter(training.params["v"].detach().clone())
    if old in training.optimizer.state:
        training.optimizer.state[new] = training.optimizer.state.pop(old)
    for group in training.groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    training.params["v"] = new


def set_data(value: Callable[[Any], Any]) -> Change:
    def change(training: Training) -> None:
        p = training.params["w"]
        p.grad, p.data = None, value(p.data)

    return change


def load_own_state(training: Training) -> None:
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def of_state(how: Callable[[dict[str, Any], str], Any]) -> Change:
    """Do something to an entry of a state, if there is one."""

    def change(training: Training) -> None:
        state = training.optimizer.state.get(training.params["v"], {})
        for key in list(state)[1:2]:
            how(state, key)

    return change


def move_entry(state: dict[str, Any], key: str) -> None:
    state[key].data = state[key].data.clone()


def set_idle(*names: str) -> Change:
    return lambda training: setattr(training, "idle", set(names))


def copy_by(how: Callable[[Any], Any]) -> Change:
    def change(training: Training) -> None:
        training.params, training.optimizer = how((training.params, training.optimizer))
        training.hooks = []  # which copies do not have

    return change


pickle_all = copy_by(lambda both: pickle.loads(pickle.dumps(both)))


def hook(training: Training) -> None:
    """Somebody scales all gradients before each step."""

    def double(optimizer: Any, *_: Any) -> None:
        for p in training.params.values():
            if p.grad is not None:
                p.grad.data = p.grad.data * 2

    training.optimizer.register_step_pre_hook(double)
    training.hooks = [*training.hooks, hook]


def move_between_groups(training: Training) -> None:
    """A parameter of a mixture has another rule from now on."""
    first, last = training.groups
    for key in ("params", "param_names"):
        first[key], last[key] = [*first[key], last[key][0]], last[key][1:]
    training.optimizer.state.pop(first["params"][-1])


def set_threads(n: int) -> Change:
    def change(training: Training) -> None:
        torch.set_num_threads(n)
        thalweg.set_num_threads(n + 1 if n > 1 else None)

    return change


def gradient(how: Callable[[Any], Any], *names: str) -> Change:
    def change(training: Training) -> None:
        for name in names or training.params:
            p = training.params[name]
            if p.grad is not None:
                p.grad = how(p.grad)

    return change


def set_gradient(how: Callable[[Any], Any]) -> Change:
    """Of a gradient that stays: what torch refuses to assign as one."""

    def change(training: Training) -> None:
        g = training.params["w"].grad
        if g is not None:
            g.data = how(g.data)

    return change


def turned(g: Any) -> Any:
    return g.t().contiguous().t() if g.ndim == 2 else g


def scaler_says(scale: float) -> Change:
    """Of gradients that are finite; else: test_torch_joint.py."""

    def change(training: Training) -> None:
        training.optimizer.grad_scale, training.optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)

    return change


clone_entry = of_state(lambda state, key: state.update({key: state[key].clone()}))
#: By what is changed before the gradients of a step are there: for which rule, and how.
CHANGES: dict[str, tuple[str, Change]] = {
    "nothing": ("LAMB", nothing),
    "a group is added": ("AdamW", add_group),
    "maximize": ("AdamW", set_option(maximize=True)),
    "weight decay is no longer 0": ("Lion", set_option(weight_decay=0.2)),
    "weight decay becomes 0": ("LAMB", set_option(weight_decay=0.0)),
    "nesterov": ("SGD", set_option(nesterov=True)),
    "trust": ("LARS", set_option(trust=False)),
    "lr": ("LARS", set_option(lr=0.3)),
    "lr becomes 0": ("LAMB", set_option(lr=0.0)),
    "lr is a tensor": ("AdamW", set_option(lr=torch.tensor(0.02, dtype=torch.float64))),
    "betas": ("AdamW", set_option(betas=(0.8, 0.9))),
    "betas in a list": ("AdamW", set_option(betas=[0.8, 0.9])),
    "momentum": ("SGD", set_option(momentum=0.5)),
    "another weight decay": ("LAMB", set_option(weight_decay=0.5)),
    "eps": ("LAMB", set_option(eps=1e-3)),
    "order of parameters": ("LAMB", swap_order),
    "another name": ("LAMB", lambda training: training.groups[-1]["param_names"].__setitem__(-1, "another")),
    "parameters in a tuple": ("LAMB", put_in_tuple),
    "another parameter": ("Adafactor", exchange),
    "other storage": ("LAMB", set_data(torch.clone)),
    "cast": ("AdamW", set_data(lambda x: x.float())),
    "turned in memory": ("AdamW", set_data(turned)),
    "gaps in memory": ("LARS", set_data(lambda x: torch.repeat_interleave(x, 2, dim=1)[:, ::2])),
    "another shape": ("AdamW", set_data(lambda x: x[:2].clone())),
    "another shape of the same size": ("AdamW", set_data(lambda x: x.reshape(4, 3))),
    "a state is loaded": ("LAMB", load_own_state),
    "a state is deleted": ("LAMB", lambda training: training.optimizer.state.pop(training.params["b"], None)),
    "an entry is a clone": ("LAMB", clone_entry),
    "an entry has other storage": ("Adafactor", of_state(move_entry)),
    "an entry has other numbers": ("LAMB", of_state(lambda state, key: state[key].zero_())),
    "a count": ("AdamW", of_state(lambda state, _: state["step"].add_(3))),
    "fewer gradients": ("LAMB", set_idle("w", "u")),
    "no gradients": ("LAMB", set_idle(*SHAPES)),
    "frozen": ("LAMB", lambda training: training.params["b"].requires_grad_(not training.params["b"].requires_grad)),
    "state is cleared": ("LAMB", lambda training: training.optimizer.clear_state()),
    "a deep copy": ("LAMB", copy_by(copy.deepcopy)),
    "pickled": ("LAMB", pickle_all),
    "a hook": ("AdamW", hook),
    "another entry of a mixture": ("Mixture", move_between_groups),
    "lr of a mixture's entry": ("Mixture", set_option(1, lr=0.3)),
    "three threads": ("LAMB", set_threads(3)),
    "one thread": ("LAMB", set_threads(1)),
}
#: The same for what is changed when gradients are there.
GRADIENTS: dict[str, tuple[str, Change]] = {
    "turned": ("AdamW", gradient(turned)),
    "strided": ("LAMB", gradient(lambda g: torch.stack([g, g], -1)[..., 0])),
    "expanded": ("Adafactor", gradient(lambda g: g[:1].expand_as(g))),
    "negative views": ("LAMB", gradient(torch._neg_view, "v")),
    "another dtype": ("AdamW", set_gradient(lambda g: g.float())),
    "a sparse gradient": ("AdamW", gradient(lambda g: g.to_sparse(), "v")),
    "a gradient of another shape": ("AdamW", set_gradient(lambda g: g.reshape(4, 3))),
    "a GradScaler's scale": ("LARS", scaler_says(4.0)),
    "not finite": ("LAMB", gradient(lambda g: g.index_fill(0, torch.tensor([0]), torch.inf), "b")),
    "not finite, and skipped": ("AdamW", gradient(lambda g: g.index_fill(0, torch.tensor([0]), torch.inf), "b")),
    "above the largest norm": ("LAMB", gradient(lambda g: g * 100)),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    thalweg.set_num_threads(None)


#: Options before a change.
BEFORE: dict[str, dict[str, Any]] = {
    "weight decay is no longer 0": dict(weight_decay=0.0),
    "not finite": dict(on_nonfinite="raise"),
    "not finite, and skipped": dict(on_nonfinite="skip"),
    "above the largest norm": dict(max_grad_norm=0.5),
}
#: What is said of changes that are refused.
REFUSED = {
    "another shape": "StateError: the state of 'w' does not fit its options",
    "another shape of the same size": "StateError: the state of 'w' does not fit its options",
    "a gradient of another shape": "ParameterError: the gradient of 'w' has shape (4, 3), and its parameter (3, 4)",
    "a sparse gradient": "ParameterError: the gradient of 'v' is sparse",
    "not finite": "NonFiniteError: ",
}


def make_one_change(name: str) -> None:
    rule, change = (CHANGES | GRADIENTS)[name]
    both = Both(rule, **BEFORE.get(name, {}))
    assert [both.step() for _ in range(3)] == [""] * 3
    said = both.step(change) if name in CHANGES else both.step(late=change)
    assert said.startswith(REFUSED.get(name, ""))
    assert bool(said) == (name in REFUSED)
    if name in GRADIENTS:
        assert both.step() == "", "the next has the gradients of before"
    elif not said:
        assert [both.step() for _ in range(2)] == ["", ""], "it is remembered again"


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES | GRADIENTS)
def test_one_change_between_two_steps(name: str) -> None:
    make_one_change(name)


@pytest.mark.slow
def test_one_change_where_torch_describes_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a torch that is older than 2.13."""
    monkeypatch.delattr(torch.Tensor, TABLE, raising=False)
    for name in CHANGES | GRADIENTS:
        make_one_change(name)


# ---- what is remembered with it


OVERRIDES = [("b", dict(weight_decay=0.3)), ("u", dict(lr_scale=0.5))]
TURNS = [set_idle(*idle) for _ in range(4) for idle in (("w",), ("b", "u"), ())]
ONE_BY_ONE = [lambda training: setattr(training, "one_by_one", True), nothing, nothing, clone_entry]
#: Runs of several changes: the rule, options, and what comes before each step.
RUNS: dict[str, tuple[str, dict[str, Any], list[Change]]] = {
    "sets of gradients take turns": ("LAMB", {}, TURNS),
    "sets of gradients of a mixture": ("Mixture", {}, TURNS),
    "parameters one by one": ("AdamW", {}, ONE_BY_ONE),
    "factored parameters one by one": ("Adafactor", {}, ONE_BY_ONE),
    "lists of torch": ("LAMB", dict(engine="foreach"), [nothing, nothing, set_option(weight_decay=0.0), clone_entry]),
    # what a scheduler writes reaches all but those that an override gives another; 0.3 is the number of both
    "numbers of single parameters": (
        "LAMB",
        dict(overrides=OVERRIDES),
        [set_option(weight_decay=number, lr=number / 10) for number in (0.1, 0.1, 0.2, 0.4, 0.3, 0.2)],
    ),
    "a list of options is edited": ("AdamW", {}, [set_option(betas=[0.8, 0.9]), *map(edit_betas, (0.8, 0.5, 0.5))]),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run(name: str) -> None:
    rule, options, changes = RUNS[name]
    both = Both(rule, **options)
    for change in changes:
        assert both.step(change) == ""


# ---- what this rank has of DTensors


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Two ranks, of which only this one is there: no message is answered."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def exchange_shard(p: Any, state: Any) -> None:
    p._local_tensor = p._local_tensor.clone()  # as FSDP2 does


def exchange_entry(p: Any, state: Any) -> None:
    state["exp_avg"] = state["exp_avg"] * 2


def turn_gradient(p: Any, state: Any) -> None:
    p.grad._local_tensor = p.grad._local_tensor.t().contiguous().t()


def drop_state(p: Any, state: Any) -> None:
    state.clear()


SHARDED = (exchange_shard, exchange_entry, turn_gradient, drop_state)


@pytest.mark.parametrize("plainly", [False, True], ids=["native", "plain"])
def test_changes_of_shards(mesh: Any, plainly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    if plainly:
        monkeypatch.delattr(torch.Tensor, TABLE, raising=False)

    def place(x: Any, how: Any) -> Any:
        return DTensor.from_local(x, mesh, [how], run_check=False)

    first, second, third = (draw((4, 3), 0) for _ in range(3))
    whole, shard = (torch.nn.Parameter(x) for x in (first, place(second, Shard(0))))
    optimizers = [(p, thalweg.torch.AdamW([p], lr=0.1)) for p in (whole, shard)]
    for t, change in enumerate([None, None, *SHARDED, None]):
        for p, optimizer in optimizers:
            p.grad = draw((4, 3), 1, t) if p is whole else place(draw((4, 3), 1, t), Shard(0))
            if change is not None and (p is shard or change in (exchange_entry, drop_state)):
                change(p, optimizer.state[p])
            optimizer.step()
        assert torch.equal(shard.to_local(), whole), change
    copied = torch.nn.Parameter(place(third, Replicate()))
    optimizer = thalweg.torch.AdamW([copied], lr=0.1)
    for how, messages in ((Replicate(), 0), (Replicate(), 0), (Partial(), 1)):
        copied.grad = place(draw((4, 3), 1), how)
        with CommDebugMode() as seen:
            optimizer.step()
        assert seen.get_total_counts() == messages, "gradients are summed where they begin to be parts of a sum"


# ---- what a step costs


@contextmanager
def calls_counted(found: list[str]) -> Iterator[None]:
    """Note the functions of thalweg that are called."""
    home = str(Path(thalweg.__file__).parent)

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(home):
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def schedule(optimizer: Any, t: int) -> None:
    optimizer.param_groups[0].update(lr=0.1 / (t + 1), weight_decay=0.1 / (t + 1))


def take_turns(optimizer: Any, t: int) -> None:
    for p in optimizer.param_groups[0]["params"][: 5 * (t % 2)]:
        p.grad = None


def leave_alone(optimizer: Any, t: int) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "options", "before_each", "most"),
    [
        *((rule, {}, leave_alone, 120) for rule in OPTIONS),
        ("LAMB", dict(on_nonfinite="raise"), leave_alone, 120),
        ("AdamW", dict(max_grad_norm=1.0), leave_alone, 120),
        ("LAMB", {}, schedule, 400),  # whose settings are made anew
        ("AdamW", {}, take_turns, 120),
    ],
)
def test_a_step_calls_few_functions_however_many_tensors_there_are(
    rule: str, options: dict[str, Any], before_each: Callable[[Any, int], None], most: int
) -> None:
    counts = []
    for tensors in (10, 100):
        params = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(tensors)]
        optimizer = getattr(thalweg.torch, rule)(params, **OPTIONS[rule], **options)
        for t in range(5):
            calls: list[str] = []
            kept = [p.grad for p in params]  # so that new ones are elsewhere
            for p in params:
                p.grad = torch.ones(2, 3)
            before_each(optimizer, t)
            with calls_counted(calls):
                optimizer.step()
        del kept
        counts.append(len(calls))
    assert counts[0] == counts[1]
    assert counts[0] <= most


# ---- many changes


def load_if_it_fits(training: Training) -> None:
    with suppress(StateError):
        load_own_state(training)


NOT_ANY_TIME = ("cast", "another shape", "another entry of a mixture", "lr of a mixture's entry")
#: What can be done at any time, and leaves something that both engines step in float64.
ANY_TIME: dict[str, Change] = {
    **{name: change for name, (_, change) in CHANGES.items() if name not in NOT_ANY_TIME},
    "a state is loaded": load_if_it_fits,
    "all gradients": set_idle(),
    "descend": set_option(maximize=False),
    "lr of the last group": set_option(-1, lr=0.02),
    "turned back in memory": set_data(lambda x: x.contiguous()),
    "the old shape": set_data(lambda x: x.reshape(SHAPES["w"])),
}
NOT_LATE = ("another dtype", "not finite", "not finite, and skipped")
LATE = {name: change for name, (_, change) in GRADIENTS.items() if name not in NOT_LATE}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::thalweg.errors.IdleWarning")
@settings(max_examples=15)
@given(
    rule=st.sampled_from(["LAMB", "AdamW", "Adafactor", "Mixture"]),
    options=st.sampled_from([{}, {}, dict(max_grad_norm=1.0), dict(on_nonfinite="raise")]),
    steps=st.lists(
        st.tuples(st.lists(st.sampled_from(list(ANY_TIME)), max_size=3), st.sampled_from([None, None, None, *LATE])),
        min_size=6,
        max_size=10,
    ),
)
def test_many_changes(rule: str, options: dict[str, Any], steps: list[tuple[list[str], str | None]]) -> None:
    both = Both(rule, **options)
    both.step()
    for names, late in steps:

        def change(training: Training, names: Sequence[str] = names) -> None:
            for name in names:
                ANY_TIME[name](training)

        both.step(change, late=LATE.get(late or ""))
