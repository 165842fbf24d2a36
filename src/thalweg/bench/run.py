"""The plain function behind ``thalweg bench``."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from thalweg.bench.bandwidth import Yardstick, make_yardstick
from thalweg.bench.contestants import Contestant, Stepping
from thalweg.bench.ours import ALL, USUAL, enter, options_of
from thalweg.bench.peers import CONTROL, PEERS
from thalweg.bench.quiet import WAIT
from thalweg.bench.record import Bench, Comparison
from thalweg.bench.rounds import Contest, Method, Progress
from thalweg.errors import CommandError
from thalweg.kernels.cpu.library import level_used
from thalweg.plan.models import Model
from thalweg.plan.optimizers import resolve_optimizer, resolve_owners
from thalweg.plan.sources import resolve
from thalweg.rules import RULES
from thalweg.show.arguments import Given, check_options, check_word
from thalweg.show.devices import Device, machine, versions
from thalweg.show.published import PACKAGES, how_to_install, is_installed
from thalweg.show.registered import DEVICES, ENGINES, FRONT_ENDS

DTYPES = ("float32", "bfloat16")
#: Packages whose versions a record has, beside those that take part.
VERSIONS = ("thalweg", "numpy", "jax", "jaxlib", "ml_dtypes", "triton")
#: The share of the free memory that is used by default.
SHARE_OF_MEMORY = 0.6


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with what was finished before it."""

    def __init__(self, finished: Bench) -> None:
        super().__init__()
        self.finished = finished


def bench(
    model: str | Model | Sequence[str | Model] = "gpt2",
    *,
    optimizers: Sequence[Any] | None = None,
    rules: Sequence[Any] | None = None,
    options: Sequence[Given] = (),
    device: str = "cpu",
    against: Sequence[str] | None = None,
    front_ends: Sequence[str] | None = None,
    reference: str | None = None,
    engine: str = "auto",
    dtype: str = "float32",
    moving_grads: bool = True,
    repeats: int = 7,
    inner: int = 1,
    budget: float | None = None,
    memory: bool = True,
    wait: float = WAIT,
    on_progress: Callable[[Progress], object] = lambda progress: None,
    on_comparison: Callable[[Comparison], object] = lambda comparison: None,
    **pace: Any,
) -> Bench:
    """Time steps of our optimizers and of installed peers in turns, on real shapes.

    model: one or several of whatever ``thalweg plan`` takes, or of its ``Model``; "small" has 148 small tensors.
    optimizers: names, rules or mixtures of your own as ``module:MyRule`` and ``module:function``, or classes; ["all"]
    takes every rule. ``rules`` is another name of it. against: packages, all of which must be installed; None takes
    those that are. reference: the contestant that others are compared with, by a part of its name; None takes torch's
    fused AdamW, or the first that runs. moving_grads: whether each step finds its gradients at other addresses, as
    after ``zero_grad()``. inner: steps of one measurement. budget: bytes of memory to stay below. pace: other fields of
    ``rounds.Method``, such as seconds of ``rest``. Ctrl-C raises ``Stopped``, which has what was finished.
    """
    from thalweg.bench.workload import Workload

    if optimizers is not None and rules is not None:
        raise CommandError("optimizers and rules are two names of one argument: give one of them")
    for what, given, known in (
        ("package", against or (), PACKAGES),
        ("front end", front_ends or (), FRONT_ENDS),
        ("engine", [engine], ENGINES),
        ("dtype", [dtype], DTYPES),
        ("device", [device], DEVICES),
    ):
        for word in given:
            check_word(what, word, known)
    for what, count in (("repeats", repeats), ("inner", inner)):
        if count < 1:
            raise CommandError(f"{what} must be at least 1, got {count}")
    names = resolve_optimizers(optimizers if optimizers is not None else rules if rules is not None else USUAL)
    options = resolve_owners(options)
    check_options(options, {name: options_of(name) for name in names})
    models = [resolve_model(each, dtype) for each in ([model] if isinstance(model, str | Model) else model)]
    where = Device(device)
    contestants = put_first(list_contestants(names, options, where, against, front_ends), reference)
    stepping = Stepping(engine=engine, inner=inner, moving_grads=moving_grads)
    found = Bench(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        device=where.name,
        device_about=where.describe(),
        machine={**machine(), "native_core": level_used()},
        versions=versions([*VERSIONS, *PACKAGES]),
        dtype=dtype,
        **asdict(stepping),
        repeats=repeats,
        absent=[package for package in PACKAGES if not is_installed(package)],
    )
    method = Method(
        stepping=stepping,
        repeats=repeats,
        budget=SHARE_OF_MEMORY * where.count_free_bytes() if budget is None else budget,
        memory=memory,
        wait=wait,
        on_progress=on_progress,
        **pace,
    )
    try:
        yardstick: Yardstick | None = None
        for workload in (Workload(each, where, dtype) for each in models):
            is_large = workload.nbytes >= method.large
            if is_large and yardstick is None:
                yardstick = make_yardstick(where, method.yardstick_bytes)
            contest = Contest(workload, yardstick if is_large else None, method)
            found.comparisons.append(contest.found)
            contest.run(contestants)
            on_comparison(contest.found)
    except KeyboardInterrupt as interrupt:
        found.comparisons = [comparison for comparison in found.comparisons if comparison.rows]
        found.stopped = True
        raise Stopped(found) from interrupt
    return found


def list_contestants(
    names: Sequence[str],
    options: Sequence[Given],
    device: Device,
    against: Sequence[str] | None,
    front_ends: Sequence[str] | None,
) -> list[Contestant]:
    """Ours, each followed by its peers. Packages that were not named are left out where they are missing."""
    for option, asked in (("--against", against), ("--front-ends", front_ends)):
        for package in asked or ():
            if not is_installed(package):
                how = how_to_install(package)
                raise CommandError(f"{package} is not installed, and {option} asks for it: {how}")
    own = [front_end for front_end in front_ends or FRONT_ENDS if is_installed(front_end)]
    if device.cuda is not None:
        if "numpy" in (front_ends or ()):
            raise CommandError("thalweg.numpy steps on CPUs only: take --device cpu, or --front-ends torch,optax")
        own = [front_end for front_end in own if front_end != "numpy"]
    packages = [package for package in (PACKAGES if against is None else against) if is_installed(package)]
    found: list[Contestant] = []
    for name in names:
        ours = list(enter(name, options))
        found += [contestant for front_end in own for contestant in ours if contestant.front_end == front_end]
        found += [c for c in PEERS if c.rule == name and c.package in packages and is_installed(c.front_end)]
    if CONTROL.package in packages and CONTROL not in found:
        found.append(CONTROL)
    return found


def put_first(contestants: list[Contestant], reference: str | None) -> list[Contestant]:
    """The reference, then all others."""
    if reference is None:
        chosen = [contestant for contestant in contestants if contestant is CONTROL]
    else:
        chosen = [contestant for contestant in contestants if reference.lower() in contestant.name.lower()][:1]
        if not chosen:
            check_word("contestant", reference, [contestant.name for contestant in contestants])
    return [*chosen, *(contestant for contestant in contestants if contestant not in chosen)]


def resolve_optimizers(asked: Sequence[Any]) -> list[str]:
    """Names of rules and mixtures, each once."""
    named = [RULES if each == ALL else [resolve_optimizer(each)] for each in asked]
    return list(dict.fromkeys(name for names in named for name in names))


def resolve_model(model: str | Model, dtype: str) -> Model:
    if isinstance(model, str):
        model = resolve(model, dtype)
    if model.parameters == 0:
        raise CommandError(f"{model.name} has no parameters to step")
    return model
