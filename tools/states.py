"""Write states as this version saves them into tests/data/VERSION, where tests load them for ever. Once for a release.

python tools/states.py

For each case there are NAME.npz of thalweg.numpy's ``save`` and NAME.pt of ``torch.save`` of thalweg.torch's
``state_dict()``, both after three steps. run.npz has parameters, a gradient, and what the fourth step makes of them;
options.json the rule of each case and all of its options, so that later defaults change nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import thalweg.numpy
import thalweg.torch
from thalweg.rules import RULES

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
#: Shapes of parameters, where they are not those of all cases.
SMALL = {"matrix": (3, 2), "vector": (4,)}
SHAPES = {"Muon": {"matrix": (3, 2)}, "LAMB-int8": {"table": (64, 64)}}
#: Of each case, named after its rule, options that are not the defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {} for name in RULES},
    "SGD": {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
    "AdamW": {"amsgrad": True},
    "Lion": {"weight_decay": 0.1},
    "AdEMAMix": {"alpha_warmup": 8, "beta3_warmup": 8},
    "MARS": {"amsgrad": True},
    "LAMB": {"weight_decay": 0.1},
    "Adafactor": {"momentum": 0.9, "min_dim_size_to_factor": 0},
    "Muon": {"ns_dtype": None},
    "Kron": {"precond_update_probability": 1.0},
    "SOAP": {"precondition_frequency": 2, "one_sided": True},
    "LAMB-int8": {"state_dtype": "int8"},
}

folder = DATA / thalweg.__version__
folder.mkdir(parents=True)
run: dict[str, Any] = {}
told = {}
for name, given in OPTIONS.items():
    rule, shapes = name.partition("-")[0], SHAPES.get(name, SMALL)
    options = {**vars(RULES[rule]()), **given}
    del options["stacked_axes"]
    told[name] = {"rule": rule, "options": options}
    random = np.random.default_rng(0)
    # eighths, which take few bytes in a compressed file
    gradients = [{key: random.integers(-16, 17, shape) / 8 for key, shape in shapes.items()} for _ in range(4)]
    params = {key: random.integers(-16, 17, shape) / 8 for key, shape in shapes.items()}
    tensors = {key: torch.nn.Parameter(torch.tensor(p)) for key, p in params.items()}
    ours = getattr(thalweg.numpy, rule)(lr=0.01, **options)
    theirs = getattr(thalweg.torch, rule)(tensors.items(), lr=0.01, engine="reference", **options)
    for gradient in gradients[:3]:
        ours.step(params, gradient)
        for key, p in tensors.items():
            p.grad = torch.tensor(gradient[key])
        theirs.step()
    ours.save(folder / f"{name}.npz")
    torch.save(theirs.state_dict(), folder / f"{name}.pt")
    for p in params.values():
        p[...] = random.integers(-16, 17, p.shape) / 8
    run |= {f"{name}.before.{key}": p.copy() for key, p in params.items()}
    run |= {f"{name}.gradient.{key}": g for key, g in gradients[3].items()}
    ours.step(params, gradients[3])
    run |= {f"{name}.after.{key}": p for key, p in params.items()}
np.savez_compressed(folder / "run.npz", **run)
(folder / "options.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
