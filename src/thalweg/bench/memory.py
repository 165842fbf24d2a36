"""The peak of memory during a step, beyond what there was before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thalweg.bench.contestants import Contestant, Ready, Stepping
from thalweg.plan.models import Model, Tensor
from thalweg.show import registered
from thalweg.show.arguments import Given, freeze
from thalweg.show.devices import Device

if TYPE_CHECKING:
    from thalweg.bench.workload import Workload

#: Freed memory goes back to the system at once: else what an earlier step left behind would count as there before.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
WARM_UP = 2


@dataclass(frozen=True)
class Memory:
    """Bytes of the peak beyond what was there before, and how that is known; or None, and why it is not."""

    extra: int | None
    how: str


def measure_in_process(workload: Workload, contestant: Contestant, stepping: Stepping) -> Memory:
    """Measure on a CPU, where memory can only be told apart from that of others in a process of its own."""
    asked = {
        "tensors": [(tensor.name, tensor.shape) for tensor in workload.model.tensors],
        "dtype": workload.dtype,
        "rule": spell_reference(contestant.rule),
        "name": contestant.name,
        "own_front_end": contestant.front_end if contestant.package == "thalweg" else "",
        "options": dict(contestant.options),
        "stepping": asdict(stepping),
    }
    run = subprocess.run(
        [sys.executable, "-m", "thalweg.bench.memory"],
        input=json.dumps(asked),
        env={**os.environ, **GIVE_BACK},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        return Memory(None, (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1])
    return Memory(int(run.stdout.splitlines()[-1]), "most memory of a process of its own, beyond what it had")


def spell_reference(rule: str) -> str:
    """A rule as another process finds it: a user's own by its module."""
    own = {**registered.OWN, **registered.OWN_MIXTURES}
    return ":".join(registered.place(own[rule])) if rule in own else rule


def measure_on_gpu(contestant: Contestant, ready: Ready) -> Memory:
    """Measure on a GPU: what torch's allocator counts, or what JAX's compiler has set aside for temporaries."""
    if contestant.front_end == "optax":
        return Memory(int(ready.compiled["temporary_bytes"]), "temporaries of the compiled program")
    device = Device("cuda")
    ready.prepare()
    device.wait()
    device.forget_peak()
    before = device.count_bytes_in_use()
    ready.step()
    device.wait()
    return Memory(max(0, (device.peak_bytes() or 0) - before), "torch.cuda.max_memory_allocated")


def status(key: str) -> int:
    """An entry of /proc/self/status, in bytes: VmRSS is what is in memory now, VmHWM the most there has been."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def measure(asked: dict[str, Any]) -> int:
    """Measure the bytes in this process, which should have nothing else to do."""
    from thalweg.bench.ours import enter
    from thalweg.bench.peers import PEERS
    from thalweg.bench.workload import Workload
    from thalweg.plan.optimizers import resolve_optimizer

    model = Model("", "", tuple(Tensor(name, tuple(shape)) for name, shape in asked["tensors"]))
    rule = resolve_optimizer(asked["rule"])
    owner = rule if registered.is_mixture(rule) else ""
    options = [Given(owner, name, freeze(value)) for name, value in asked["options"].items()]
    if front_end := asked["own_front_end"]:  # its name there depends on what other rules were asked for
        contestant = next(each for each in enter(rule, options) if each.front_end == front_end)
    else:
        contestant = next(each for each in PEERS if each.name == asked["name"])
    device = Device("cpu")
    ready = contestant.make(Workload(model, device, asked["dtype"]), Stepping(**asked["stepping"]))
    for _ in range(WARM_UP):  # state is made, functions are compiled
        ready.prepare()
        ready.step()
        ready.wait()
    ready.prepare()
    device.release_memory()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
    before = status("VmRSS")
    ready.step()
    ready.wait()
    return max(0, status("VmHWM") - before)


if __name__ == "__main__":
    sys.stdout.write(f"\n{measure(json.load(sys.stdin))}\n")
