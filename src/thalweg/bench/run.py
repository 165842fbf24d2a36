"""The plain function behind ``thalweg bench``."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence

from thalweg.bench.contestants import Contestant, Stepping
from thalweg.bench.devices import Device, device_called
from thalweg.bench.ours import FRONT_ENDS, every
from thalweg.bench.peers import PEERS
from thalweg.bench.quiet import WAIT
from thalweg.bench.record import Bench, Comparison
from thalweg.bench.rounds import Method, Progress, compare
from thalweg.bench.rules import RULES, USUAL
from thalweg.errors import CommandError
from thalweg.kernels.cpu.library import level_used
from thalweg.plan.models import Model
from thalweg.plan.sources import resolve
from thalweg.show.lists import suggestion
from thalweg.show.published import PACKAGES, how_to_install, installed
from thalweg.show.registered import OWN, named
from thalweg.show.surroundings import machine, versions

ENGINES = ("auto", "reference", "foreach", "fused")
DTYPES = ("float32", "bfloat16")
#: Whose versions a record carries, beside those of the packages that take part.
VERSIONS = ("thalweg", "numpy", "jax", "jaxlib", "ml_dtypes", "triton")
#: Of the free memory, what is used where nothing else is said.
SHARE_OF_MEMORY = 0.6


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with what was finished before it."""

    def __init__(self, finished: Bench) -> None:
        super().__init__()
        self.finished = finished


def bench(
    model: str | Model | Sequence[str | Model] = "gpt2",
    *,
    rules: Sequence[str] = USUAL,
    device: str = "cpu",
    against: Sequence[str] | None = None,
    front_ends: Sequence[str] | None = None,
    engine: str = "auto",
    dtype: str = "float32",
    repeats: int = 7,
    inner: int = 1,
    budget: float | None = None,
    memory: bool = True,
    wait: float = WAIT,
    on_progress: Callable[[Progress], object] = lambda progress: None,
    on_comparison: Callable[[Comparison], object] = lambda comparison: None,
) -> Bench:
    """Time steps of ours and of installed peers in turns, on real shapes.

    ``model`` is one or several of whatever ``thalweg plan`` takes, or of its ``Model``. ``against`` names packages,
    all of which must be installed; None takes those that are. ``inner`` steps make one measurement. ``budget`` is the
    memory to stay below, in bytes. ``memory=False`` saves the time to measure peaks. Ctrl-C raises ``Stopped``, which
    has what was finished.
    """
    rules = [str(named(rule)) for rule in rules]
    rules = [rule.lower() if rule in OWN else rule for rule in rules]
    for what, given, known in (
        ("rule", rules, RULES),
        ("package", against or (), PACKAGES),
        ("front end", front_ends or (), FRONT_ENDS),
        ("engine", [engine], ENGINES),
        ("dtype", [dtype], DTYPES),
    ):
        check(what, given, known)
    for what, count in (("repeats", repeats), ("inner", inner)):
        if count < 1:
            raise CommandError(f"{what} must be at least 1, got {count}")
    models = [resolve(each, dtype) if isinstance(each, str) else each for each in listed(model)]
    for each in models:
        if each.parameters == 0:
            raise CommandError(f"{each.name} has no parameters to step")
    where = device_called(device)
    taking_part = contestants(where, against, front_ends)
    found = Bench(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        device=where.name,
        device_about=where.about(),
        machine={**machine(), "native_core": level_used()},
        versions=versions([*VERSIONS, *PACKAGES]),
        dtype=dtype,
        engine=engine,
        inner=inner,
        repeats=repeats,
        absent=[package for package in PACKAGES if not installed(package)],
    )
    method = Method(
        stepping=Stepping(engine=engine, inner=inner),
        repeats=repeats,
        budget=SHARE_OF_MEMORY * where.free_bytes() if budget is None else budget,
        memory=memory,
        wait=wait,
        on_progress=on_progress,
    )
    try:
        for comparison in measured(models, rules, taking_part, where, dtype, method):
            found.comparisons.append(comparison)
            on_comparison(comparison)
    except KeyboardInterrupt as interrupt:
        found.stopped = True
        raise Stopped(found) from interrupt
    return found


def measured(
    models: Iterable[Model],
    rules: Sequence[str],
    taking_part: Sequence[Contestant],
    device: Device,
    dtype: str,
    method: Method,
) -> Iterator[Comparison]:
    """Every rule on every model."""
    from thalweg.bench.bandwidth import yardstick
    from thalweg.bench.workload import Workload

    stick = yardstick(device)
    for model in models:
        workload = Workload(model, device, dtype)
        for rule in rules:
            yield compare(workload, rule, taking_part, stick, method)


def contestants(device: Device, against: Sequence[str] | None, front_ends: Sequence[str] | None) -> list[Contestant]:
    """Ours first, then the peers. Who is not asked for by name is left out where it cannot be had."""
    for option, asked in (("--against", against), ("--front-ends", front_ends)):
        for package in asked or ():
            if not installed(package):
                how = how_to_install(package)
                raise CommandError(f"{package} is not installed, and {option} asks for it: {how}")
    if device.name != "cpu" and "numpy" in (front_ends or ()):
        raise CommandError("thalweg.numpy steps on CPUs alone: ask for --device cpu, or for --front-ends torch,optax")
    own = [front_end for front_end in front_ends or FRONT_ENDS if installed(front_end)]
    if device.name != "cpu":
        own = [front_end for front_end in own if front_end != "numpy"]
    peers = [package for package in (PACKAGES if against is None else against) if installed(package)]
    # in the order of the front ends as they were asked for: the first is the reference
    everyone = [
        *(c for front_end in own for c in every() if c.front_end == front_end),
        *(c for c in PEERS if c.package in peers and installed(c.front_end)),
    ]
    return [c for c in everyone if c.device in ("", device.name)]


def listed(model: str | Model | Sequence[str | Model]) -> Sequence[str | Model]:
    return [model] if isinstance(model, str | Model) else model


def check(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise CommandError(f"there is no {what} {name!r}: {suggestion(name, known)}")
