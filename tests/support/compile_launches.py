"""Compiles, for GPUs that need not be here, every kernel that some steps would launch, as they would launch it.

Run by itself, without Triton's interpreter: ``compile_launches.py`` with a list of [rule, options] as JSON. Prints as
JSON, for each of them, the kernels that were compiled for all targets, with the registers that their threads have at
most on NVIDIA's, and how often these read 16 bytes; or what was raised.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import traceback
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature, mangle_type

import thalweg.torch
from thalweg.kernels import triton as kernels
from thalweg.kernels.triton import numbers

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHAPES = {"vector": (130,), "matrix": (70, 40), "kernel": (9, 7, 3, 2), "long": (3000,), "grouped": (64, 64)}
#: Of a case: for what it is compiled, and the most registers that a thread of each kernel has.
targets: dict[str, GPUTarget] = {}
compiled: dict[str, int] = {}


def compile_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """What a launch would compile, without a GPU to run it on."""
    own = {name: named.pop(name) for name in [p.name for p in kernel.params] if name in named}
    values = dict(zip([p.name for p in kernel.params if p.name not in own], args, strict=False)) | own
    kinds = {
        p.name: "constexpr" if p.is_constexpr else mangle_type(values[p.name], not p.do_not_specialize)
        for p in kernel.params
    }
    constants = {(i,): values[p.name] for i, p in enumerate(kernel.params) if kinds[p.name] == "constexpr"}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, p in enumerate(kernel.params)
        if isinstance(values[p.name], torch.Tensor) and values[p.name].data_ptr() % 16 == 0
    }
    name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
    for target in targets.values():
        for (i,) in constants:  # products by descriptors, where they are made for it
            if kernel.params[i].name == "DESCRIBED":
                constants[(i,)] = target.backend == "cuda" and target.arch >= 90
        numbers.PTX.value = target.backend == "cuda"
        create_function_from_signature(kernel.signature, kernel.params, make_backend(target))
        binary = triton.compile(ASTSource(kernel, kinds, constants, aligned), target=target, options=named).asm
        compiled[name] = max(compiled.get(name, 0), registers_of(binary.get("cubin")))
        compiled[f"{name} in 16 bytes"] = len(re.findall(r"ld\.global[^;]*v4\.b32", str(binary.get("ptx"))))


def registers_of(cubin: bytes | None) -> int:
    """Of a thread of the only kernel."""
    if cubin is None:
        return 0
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"REG:(\d+)", told)[0])


def launches(rule: str, options: dict[str, Any]) -> Any:
    targets.update({name: TARGETS[name] for name in options.pop("targets", TARGETS)})
    dtype = getattr(torch, options.pop("dtype", "float32"))
    lr = torch.tensor(0.1) if options.pop("tensor_rate", False) else 0.1
    named = [(name, torch.nn.Parameter(torch.ones(shape).to(dtype))) for name, shape in SHAPES.items()]
    try:
        optimizer = getattr(thalweg.torch, rule)(named, lr=lr, engine="fused", **options)
        for _, p in named:
            p.grad = torch.ones_like(p)
        optimizer.step()
        return dict(compiled)
    except Exception:
        return traceback.format_exc()
    finally:
        targets.clear()
        compiled.clear()


if __name__ == "__main__":
    kernels.DEVICES.add("cpu")
    JITFunction.run = compile_instead
    json.dump([launches(*case) for case in json.loads(sys.argv[1])], sys.stdout)
