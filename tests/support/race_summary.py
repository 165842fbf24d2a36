"""A race that never took place, with everything a report may have to show: many courses, and runs that diverged."""

from __future__ import annotations

from typing import Any

import numpy as np

from thalweg.race.verdict import verdict

CONTESTANTS = [
    {"name": "SGD", "colour": "#858585", "baseline": True, "options": "LARS(momentum=0.9, trust=False)"},
    {"name": "AdamW", "colour": "#2b2b2b", "baseline": True, "options": "LAMB(trust=False)"},
    {"name": "LARS", "colour": "#e69f00", "baseline": False, "options": "LARS(momentum=0.9)"},
    {"name": "LAMB", "colour": "#0072b2", "baseline": False, "options": "LAMB()"},
    {"name": "Adafactor", "colour": "#009e73", "baseline": False, "options": "Adafactor(min_dim_size_to_factor=0)"},
    {"name": "Kron", "colour": "#d55e00", "baseline": False, "options": "Kron()"},
]
#: Name: best rate, final loss at batches of 64, final score, seconds a step, bytes of state a parameter.
CHARACTERS = {
    "Kron": (0.007, 8.8e-5, 0.981, 0.0120, 10.3),
    "AdamW": (0.03, 4.4e-3, 0.976, 0.0019, 8.0),
    "LAMB": (0.03, 5.4e-3, 0.976, 0.0021, 8.0),
    "SGD": (0.3, 1.0e-2, 0.981, 0.0016, 4.0),
    "LARS": (15.0, 1.1e-2, 0.985, 0.0017, 4.0),
    "Adafactor": (0.15, 1.2e-2, 0.985, 0.0024, 0.13),
}
LAYERS = ["hidden.0.weight", "hidden.0.bias", "hidden.1.weight", "hidden.1.bias", "output.weight", "output.bias"]
SEEDS = [0, 1, 2]
TARGET = 0.05


def race_summary() -> dict[str, Any]:
    """Handwritten digits at three batch sizes, and a valley with a map."""
    return {
        "version": 1,
        "title": "Handwritten digits",
        "command": "thalweg race digits,valley --batch-sizes 64,256,1024",
        "made": "2026-11-15T12:00:00+00:00",
        "machine": {"cpu": "Imaginary 9000", "cores": 2, "system": "Linux x86_64"},
        "versions": {"python": "3.11.7", "thalweg": "0.1.0", "numpy": "2.4.6"},
        "contestants": [dict(contestant) for contestant in CONTESTANTS],
        "missing": 3,
        "near": 0.02,
        "courses": [
            {**course, "verdict": verdict(course)} for course in (digits(64), digits(256), digits(1024), valley())
        ],
    }


def digits(batch_size: int) -> dict[str, Any]:
    """One course on digits; with the largest batches SGD diverges and LARS was not run."""
    random = np.random.default_rng(batch_size)
    names = [name for name in CHARACTERS if batch_size < 1024 or name != "LARS"]
    results = [digits_result(name, batch_size, random) for name in names]
    return {
        "name": f"digits@{batch_size}",
        "task": "digits",
        "title": "Handwritten digits",
        "about": "A network of two hidden layers learns to read 1,437 handwritten digits of 8 x 8 pixels.",
        "batch_size": batch_size,
        "steps": 220,
        "seeds": SEEDS,
        "loss_name": "training loss",
        "score_name": "test accuracy",
        "best_score": "most",
        "target": TARGET,
        "results": best_first(results),
        "search": "Everyone tried 5 learning rates. 6 of 60 runs were hopeless and stopped early.",
        "contours": None,
    }


def digits_result(name: str, batch_size: int, random: np.random.Generator) -> dict[str, Any]:
    rate, final, score, pace, state = CHARACTERS[name]
    final = final * (batch_size / 64) ** (0.3 if name in ("LAMB", "Kron") else 0.8)
    diverges = name == "SGD" and batch_size == 1024
    steps = np.arange(0, 221, 10)
    progress = steps / steps[-1]
    smooth = np.log(2.3) + (np.log(final) - np.log(2.3)) * progress ** (0.75 if name != "Kron" else 0.9)
    wobble = 0.35 * np.sin(np.pi * progress) * random.standard_normal((3, len(steps))).cumsum(1) / 2.5
    losses = np.exp(smooth + wobble + 0.12 * progress * random.standard_normal((3, 1)))
    losses[:, 0] = 2.3
    if diverges:
        losses[:, 10:] = np.nan
        losses[:, 1:10] = 2.3 * np.exp(np.arange(9))
    scores = score - (score - 0.1) * np.exp(-random.uniform(5, 14) * progress)
    seconds = progress * 220 * pace * (1 + batch_size / 2000)
    sweep = final * np.array([4.1, 1.7, 1.0, 2.2, 30.0])
    sweep[-1] = np.nan if name in ("SGD", "Kron") else 1e200 if name == "LAMB" else sweep[-1]
    reached = np.flatnonzero(losses.mean(0) <= TARGET)
    return (
        result(name, rate, steps, seconds, losses)
        | {
            "score": None if diverges else float(scores[-1]),
            "score_low": None if diverges else float(scores[-1] - 0.004),
            "score_high": None if diverges else float(scores[-1] + 0.003),
            "steps_to_target": int(steps[reached[0]]) if len(reached) else None,
            "seconds_to_target": float(seconds[reached[0]]) if len(reached) else None,
            "state_bytes": round(state * 26122),
            "parameters": 26122,
            "sweep": {
                "lr": numbers(rate * np.array([1 / 4, 1 / 2, 1, 2, 4])),
                "loss": [None] * 5 if diverges else numbers(sweep),
                "stopped": [55, None, None, None, None],
            },
            "near": None if diverges else {"low": float(rate), "high": float(2 * rate), "open": name == "LAMB"},
            "layers": layers(name, random),
        }
        | {"curve": curve_of(steps, seconds, losses, np.where(np.isfinite(losses[0]), scores, np.nan))}
    )


def result(name: str, rate: float, steps: Any, seconds: Any, losses: Any) -> dict[str, Any]:
    """What one contestant reached, without a score; losses: by seed and measure."""
    return {
        "contestant": name,
        "lr": float(rate),
        "seeds": len(losses),
        "loss": number(losses[:, -1].mean()),
        "loss_low": number(losses[:, -1].min()),
        "loss_high": number(losses[:, -1].max()),
        **dict.fromkeys(("score", "score_low", "score_high", "steps_to_target", "seconds_to_target")),
        **dict.fromkeys(("peak_bytes", "layers", "path")),
        "seconds": number(seconds[-1]),
        "state_bytes": 16,
        "parameters": 2,
        "engine": "reference",
        "curve": curve_of(steps, seconds, losses, None),
    }


def curve_of(steps: Any, seconds: Any, losses: Any, scores: Any) -> dict[str, Any]:
    return {
        "step": steps.tolist(),
        "seconds": numbers(seconds),
        "loss": numbers(losses.mean(0)),
        "low": numbers(losses.min(0)),
        "high": numbers(losses.max(0)),
        "score": None if scores is None else numbers(scores),
    }


def layers(name: str, random: np.random.Generator) -> dict[str, Any]:
    """Update sizes that fall with the learning rate; trust ratios for the two rules that have them."""
    steps = np.arange(10, 221, 10)
    level = {"Kron": 0.02, "AdamW": 0.08, "SGD": 0.01, "Adafactor": 0.05, "LARS": 0.03, "LAMB": 0.03}[name]
    depth = 10 ** random.uniform(-0.8, 0.8, (len(LAYERS), 1))
    decay = 1 - 0.98 * steps / steps[-1]
    noise = 10 ** (0.12 * random.standard_normal((len(LAYERS), len(steps))))
    update = level * depth * decay * noise
    update[1, 0] = np.inf  # a bias that was 0 before its first step
    trust = 10 ** random.uniform(-3, 1, (len(LAYERS), 1)) * noise
    if name == "SGD":  # a rule that has trust ratios, with them turned off
        trust = np.ones_like(noise)
    return {
        "names": list(LAYERS),
        "step": steps.tolist(),
        "update": [numbers(row) for row in update],
        "trust": [numbers(row) for row in trust] if name in ("LAMB", "LARS", "SGD") else None,
    }


def valley() -> dict[str, Any]:
    """Rosenbrock's function of two variables, walked down by plain gradient descent of several lengths of step."""
    x, y = np.linspace(-2, 2, 21), np.linspace(-1, 3, 21)
    rates = {"SGD": 2e-4, "AdamW": 8e-4, "LARS": 1.2e-3, "LAMB": 5e-4, "Kron": 1.6e-3}
    return {
        "name": "rosenbrock",
        "task": "rosenbrock",
        "title": "Rosenbrock's valley",
        "about": "A curved valley with steep walls and a flat floor.",
        "batch_size": None,
        "steps": 300,
        "seeds": [0],
        "loss_name": "value",
        "score_name": None,
        "best_score": "most",
        "target": None,
        "results": best_first([valley_result(name, rate) for name, rate in rates.items()]),
        "search": "Everyone tried 3 learning rates.",
        "contours": {
            "x": numbers(x),
            "y": numbers(y),
            "value": [numbers(row) for row in rosenbrock(x[None, :], y[:, None])],
            "minima": [[1.0, 1.0]],
            "log": True,
        },
    }


def rosenbrock(x: Any, y: Any) -> Any:
    return (1 - x) ** 2 + 100 * (y - x * x) ** 2


def valley_result(name: str, rate: float) -> dict[str, Any]:
    """Down the gradient, its length held back so that no walk leaves the map."""
    point, velocity, path = np.array([-1.4, 2.0]), np.zeros(2), []
    for _ in range(301):
        path.append(point)
        x, y = point
        slope = np.array([-2 * (1 - x) - 400 * x * (y - x * x), 200 * (y - x * x)])
        velocity = 0.9 * velocity - rate * slope / (1 + np.linalg.norm(slope) / 60)
        point = point + velocity
    walk, steps = np.array(path), np.arange(0, 301, 20)
    losses = rosenbrock(walk[:, 0], walk[:, 1])
    return result(name, rate, steps, steps * 7e-5, losses[None, steps]) | {
        "sweep": {
            "lr": [rate / 2, rate, rate * 2],
            "loss": [number(losses[-1] * k) for k in (3, 1, np.nan)],
            "stopped": [None] * 3,
        },
        "near": {"low": rate, "high": rate, "open": False},
        "path": walk.tolist(),
    }


def best_first(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(results, key=lambda result: np.inf if result["loss"] is None else result["loss"])


def number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def numbers(values: Any) -> list[float | None]:
    return [number(value) for value in values]
