"""What a contestant is, and how one is stepped in torch, numpy and JAX."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thalweg.bench.workload import Workload

#: Eight weights of the largest tensor, compared before and after: a step that does not move them did not do the work.
PROBE = 8


@dataclass(frozen=True)
class Stepping:
    """How steps are taken."""

    #: The engine of our optimizers.
    engine: str = "auto"
    #: Steps in a row in one measurement; in JAX they are one compiled program.
    inner: int = 1
    #: Whether each measurement finds its gradients in new tensors at other addresses; in JAX they always stay.
    moving_grads: bool = True


@dataclass
class Ready:
    """A contestant with its parameters and gradients in memory."""

    #: Takes as many steps as one measurement has.
    step: Callable[[], object]
    #: Reads a few of its weights.
    probe: Callable[[], list[float]]
    #: The engine of the last step, where there is a choice.
    engine: Callable[[], str] = lambda: ""
    #: Called at the end of a measurement: returns when everything that was begun is done.
    wait: Callable[[], object] = lambda: None
    #: Called before each measurement, and not timed: gives it its gradients.
    prepare: Callable[[], object] = lambda: None
    #: What the compiler told: seconds to trace and to compile, bytes of temporaries.
    compiled: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Contestant:
    """One optimizer in a comparison."""

    name: str
    #: The rule that it follows, or the mixture that it is.
    rule: str
    #: The package it comes from: thalweg, timm, ...
    package: str
    #: The framework of its arrays: torch, numpy or optax.
    front_end: str
    #: Raises if it cannot run here.
    make: Callable[[Workload, Stepping], Ready]
    #: Copies of the parameters in memory, the parameters themselves included.
    copies: int
    #: Options that change how many bytes its rule must move.
    options: Mapping[str, Any] = field(default_factory=dict)


def ready_torch(
    build: Callable[[list[Any]], Any], workload: Workload, stepping: Stepping, *, writes_grads: bool = False
) -> Ready:
    """Build an optimizer of torch for new parameters. One that writes into its gradients gets copies of them."""
    import torch

    params = [torch.nn.Parameter(p) for p in workload.params("torch")]
    turns = itertools.count()

    def give_grads() -> None:
        """Put new tensors at other addresses, as zero_grad() and backward() do, or leave those of the first turn."""
        turn = next(turns)
        if turn and not stepping.moving_grads:
            if writes_grads:
                torch._foreach_copy_([p.grad for p in params if p.grad is not None], workload.grads("torch")[0])
            return
        for p, g in zip(params, workload.grads("torch")[turn % len(workload.grads("torch"))], strict=True):
            p.grad = g.clone() if writes_grads else g.detach()

    optimizer = build(params)
    return Ready(
        repeat_step(optimizer.step, stepping.inner),
        probe=lambda: [float(x) for x in params[workload.largest].detach().flatten()[:PROBE].tolist()],
        engine=lambda: str(getattr(optimizer, "engine", "")),
        prepare=give_grads,
    )


def ready_numpy(optimizer: Any, workload: Workload, stepping: Stepping) -> Ready:
    """Step a dict of arrays."""
    params = workload.params("numpy")
    largest = params[workload.names[workload.largest]]
    turns = itertools.count()
    grads: dict[str, Any] = {}

    def give_grads() -> None:
        turn = next(turns)
        if stepping.moving_grads or turn == 0:
            shared = workload.grads("numpy")[turn % len(workload.grads("numpy"))]
            grads.update({name: g.view() for name, g in shared.items()})

    return Ready(
        repeat_step(lambda: optimizer.step(params, grads), stepping.inner),
        probe=lambda: [float(x) for x in largest.flat[:PROBE]],
        engine=lambda: str(optimizer.engine),
        prepare=give_grads,
    )


def ready_optax(transformation: Any, workload: Workload, stepping: Stepping) -> Ready:
    """Compile update and apply_updates into one program, which may overwrite parameters and state."""
    import jax
    import numpy as np
    import optax

    grads, params = workload.grads("jax")[0], workload.params("jax")
    kept = [params, jax.jit(transformation.init)(params)]
    del params

    def advance(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def program(params: Any, state: Any, grads: Any) -> Any:
        if stepping.inner == 1:
            return advance(params, state, grads)
        return jax.lax.fori_loop(
            0, stepping.inner, lambda _, carry: advance(carry[0], carry[1], grads), (params, state)
        )

    begin = time.perf_counter()
    lowered = jax.jit(program, donate_argnums=(0, 1)).lower(*kept, grads)
    traced = time.perf_counter()
    executable = lowered.compile()
    done = time.perf_counter()
    memory = executable.memory_analysis()

    def step() -> None:
        kept[:] = executable(*kept, grads)

    return Ready(
        step,
        wait=lambda: jax.block_until_ready(kept),
        probe=lambda: [float(x) for x in np.asarray(kept[0][workload.largest]).flat[:PROBE]],
        compiled={
            "trace_s": traced - begin,
            "compile_s": done - traced,
            "temporary_bytes": float(getattr(memory, "temp_size_in_bytes", 0)),
        },
    )


def repeat_step(step: Callable[[], object], times: int) -> Callable[[], object]:
    """The step itself, or several in a row."""
    if times == 1:
        return step

    def repeat() -> None:
        for _ in range(times):
            step()

    return repeat
