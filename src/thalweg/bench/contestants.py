"""What a contestant is, and how one is stepped in torch, numpy and JAX."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thalweg.bench.workload import Workload

#: Eight weights of the largest tensor, looked at before and after: whoever does not move them has not done the work.
PROBE = 8
#: Steps that load kernels and make state, which no graph can hold.
CAPTURED_AFTER = 2


@dataclass(frozen=True)
class Stepping:
    """How ours are to be stepped, and everyone's steps to be taken."""

    engine: str = "auto"
    #: Steps one after the other in one measurement; in JAX they are one compiled program.
    inner: int = 1


@dataclass
class Ready:
    """A contestant with its parameters and gradients in memory."""

    #: As many steps as one measurement has.
    step: Callable[[], object]
    #: A few of its weights.
    probe: Callable[[], list[float]]
    #: The engine of the last step, where there is a choice.
    engine: Callable[[], str] = lambda: ""
    #: Called at the end of a measurement: returns when all that was begun is done.
    wait: Callable[[], object] = lambda: None
    #: Called before each measurement, and not timed.
    prepare: Callable[[], object] = lambda: None
    #: What its compiler told: seconds to trace and to compile, bytes of temporaries.
    compiled: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Contestant:
    """One optimizer in one comparison."""

    name: str
    #: Whose comparison it is in.
    rule: str
    #: The package it comes from: thalweg, timm, ...
    package: str
    #: What its arrays are: torch, numpy or optax.
    front_end: str
    #: Raises if it cannot run here.
    make: Callable[[Workload, Stepping], Ready]
    #: Copies of the parameters in memory, the parameters themselves included.
    copies: int
    #: The rule that it follows itself, where that is another: its floor is that one's.
    follows: str = ""
    #: The only device that it runs on; any unless told.
    device: str = ""

    @property
    def own_rule(self) -> str:
        return self.follows or self.rule


def torch_ready(
    build: Callable[[list[Any]], Any], workload: Workload, stepping: Stepping, *, writes_grads: bool = False
) -> Ready:
    """Whoever writes into gradients gets its own, made good again before each measurement."""
    import torch

    params = [torch.nn.Parameter(p) for p in workload.torch_params()]
    grads = [g.clone() for g in workload.torch_grads] if writes_grads else workload.torch_grads
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    optimizer = build(params)
    ready = Ready(
        several(optimizer.step, stepping.inner),
        probe=lambda: [float(x) for x in params[workload.largest].detach().flatten()[:PROBE].tolist()],
        engine=lambda: str(getattr(optimizer, "engine", "")),
    )
    if writes_grads:
        ready.prepare = lambda: torch._foreach_copy_(grads, workload.torch_grads)
    return ready


def captured_ready(build: Callable[[list[Any]], Any], workload: Workload, stepping: Stepping) -> Ready:
    """Steps that are captured in a CUDA graph once, and replayed."""
    import torch

    params = [torch.nn.Parameter(p) for p in workload.torch_params()]
    for p, g in zip(params, workload.torch_grads, strict=True):
        p.grad = g
    optimizer = build(params)
    beside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(CAPTURED_AFTER):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(beside)
    with torch.cuda.graph(graph):
        optimizer.step()
    return Ready(
        several(graph.replay, stepping.inner),
        probe=lambda: [float(x) for x in params[workload.largest].detach().flatten()[:PROBE].tolist()],
        engine=lambda: str(optimizer.engine),
    )


def numpy_ready(optimizer: Any, workload: Workload, stepping: Stepping) -> Ready:
    params, grads = workload.numpy_params(), workload.numpy_grads
    largest = params[workload.names[workload.largest]]
    return Ready(
        several(lambda: optimizer.step(params, grads), stepping.inner),
        probe=lambda: [float(x) for x in largest.flat[:PROBE]],
        engine=lambda: str(optimizer.engine),
    )


def optax_ready(transformation: Any, workload: Workload, stepping: Stepping) -> Ready:
    """One compiled program for update and apply_updates, which may overwrite parameters and state."""
    import jax
    import numpy as np
    import optax

    grads, params = workload.jax_grads, workload.jax_params()
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


def several(step: Callable[[], object], times: int) -> Callable[[], object]:
    """The step itself, or a row of them."""
    if times == 1:
        return step

    def row() -> None:
        for _ in range(times):
            step()

    return row


def torch_contestant(
    rule: str,
    package: str,
    name: str,
    build: Callable[[list[Any]], Any],
    copies: int,
    *,
    writes_grads: bool = False,
    follows: str = "",
) -> Contestant:
    """An optimizer of torch; what is built may also import its package."""
    make = functools.partial(peer_ready, build, writes_grads)
    return Contestant(name, rule, package, "torch", make, copies + writes_grads, follows)


def peer_ready(build: Callable[[list[Any]], Any], writes_grads: bool, workload: Workload, stepping: Stepping) -> Ready:
    return torch_ready(build, workload, stepping, writes_grads=writes_grads)
