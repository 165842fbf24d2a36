"""Copies are independent, pickles go on where they stopped, and what is shown can be read back."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from lanes import one_in
from raw_arrays import (
    CASES,
    FRONT_END,
    OPTIONS,
    VARIANTS,
    Make,
    bits,
    copies,
    every_case,
    fingerprint,
    gradients,
    model,
    shown,
    train,
)

from thalweg import Spikes
from thalweg.numpy import LAMB, LARS, Adafactor, Annealed, Kron, Optimizer

WORDS = {**FRONT_END, "Annealed": Annealed, "Spikes": Spikes, "re": re, "inf": math.inf}


def read_back(optimizer: Optimizer) -> Any:
    return eval(repr(optimizer), dict(WORDS))


COPIERS: dict[str, Callable[[Optimizer], Optimizer]] = {
    "copy()": lambda optimizer: optimizer.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "with_options()": lambda optimizer: optimizer.with_options(),
}


def halving(t: int) -> float:
    return 0.1 / t


class TestCopies:
    @every_case
    def test_a_copy_goes_on_from_the_same_place_on_its_own(self, make: Make) -> None:
        optimizer, params, grads = make(overrides=[("conv", dict(lr_scale=0.5))]), model(), gradients(6)
        train(optimizer, params, grads[:3])
        optimizer.end_iteration()
        before, others = fingerprint(optimizer), [copier(optimizer) for copier in COPIERS.values()]
        ends = []
        for other in others:
            weights = copies(params)
            assert type(other) is type(optimizer)
            assert fingerprint(other) == before
            train(other, weights, grads[3:])
            assert fingerprint(optimizer) == before
            ends.append(bits(weights))
        train(optimizer, params, grads[3:])
        assert ends == [bits(params)] * len(COPIERS)
        assert {str(fingerprint(other)) for other in others} == {str(fingerprint(optimizer))}

    @pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)
    def test_setting_and_clearing_do_not_reach_the_other(self, copier: Any) -> None:
        optimizer = LARS(halving)
        optimizer.update("w", np.ones(3), np.ones(3))
        other = copier(optimizer)
        assert other.lr is halving
        other.lr = 0.5
        other.clear_state()
        assert optimizer.lr is halving
        assert optimizer.num_parameters == 1

    def test_a_lambda_can_be_copied_though_not_pickled(self) -> None:
        optimizer = LARS(lambda t: 0.1, overrides=[(lambda name, x: True, dict(momentum=0.5))])
        assert shown(copy.deepcopy(optimizer)) == shown(optimizer.copy()) == shown(optimizer)

    def test_warnings_already_given_are_not_given_again(self) -> None:
        optimizer = LARS(0.1, overrides=[("nothing", dict(momentum=0.5))])
        with pytest.warns(UserWarning, match="nothing"):
            optimizer.step(model(), gradients(1)[0])
        train(optimizer.copy(), model(), gradients(1))

    def test_subclasses_stay_what_they_are(self) -> None:
        class Mine(LARS):
            def lr_scale(self, name: str | int) -> float:
                return 0.5

        half, plain = np.ones(3), np.ones(3)
        Mine(0.1).with_momentum(0.0).copy().update("w", half, np.ones(3))
        LARS(0.05, momentum=0.0).update("w", plain, np.ones(3))
        assert bits(half) == bits(plain)
        assert repr(Mine(0.1)) == "Mine(lr=0.1)"


REPRS = [
    pytest.param(LARS(0.5), "LARS(lr=0.5)", id="LARS"),
    pytest.param(LAMB(lr=1e-3, betas=[0.9, 0.95]), "LAMB(lr=0.001, betas=(0.9, 0.95))", id="LAMB"),
    pytest.param(Adafactor(), "Adafactor()", id="Adafactor"),
    pytest.param(Kron(1), "Kron(lr=1)", id="Kron"),
    pytest.param(
        LARS(0.5, overrides=[("*.bias", dict(weight_decay=0.0))], global_step=True),
        "LARS(lr=0.5, overrides=[('*.bias', {'weight_decay': 0.0})], global_step=True)",
        id="overrides",
    ),
    pytest.param(
        LARS(0.5, overrides=[(re.compile("bias$"), dict(lr_scale=2))]),
        "LARS(lr=0.5, overrides=[(re.compile('bias$'), {'lr_scale': 2})])",
        id="regular expression",
    ),
    pytest.param(
        Kron(0.1, precond_update_probability=Annealed(low=0.1)),
        "Kron(lr=0.1, precond_update_probability=Annealed(high=1.0, low=0.1, decay=0.001, flat=500))",
        id="annealed",
    ),
    pytest.param(
        LARS(0.5, variant="optax", eps=0.25),
        "LARS(lr=0.5, variant='optax', eps=0.25, norm_mode='combined')",
        id="variant",
    ),
    pytest.param(LAMB(0.1, phi=(0.5, math.inf)), "LAMB(lr=0.1, phi=(0.5, inf))", id="infinity"),
    pytest.param(LAMB(0.1, maximize=True, seed=3), "LAMB(lr=0.1, maximize=True, seed=3)", id="around the rule"),
]


class TestRepr:
    @pytest.mark.parametrize(("optimizer", "text"), REPRS)
    def test_it_shows_what_differs_from_the_defaults(self, optimizer: Optimizer, text: str) -> None:
        def parts(text: str) -> list[str]:
            return sorted(re.split(r"[(), ]+", text))

        assert parts(repr(optimizer)) == parts(text)
        assert fingerprint(read_back(optimizer)) == fingerprint(optimizer)

    @pytest.mark.parametrize(("name", "variant"), one_in(3, VARIANTS))
    def test_every_variant_is_read_back_and_pickled(self, name: str, variant: str) -> None:
        for lr in (0.1, None) if name == "Adafactor" else (0.1,):
            optimizer = FRONT_END[name](lr, variant=variant)
            again = read_back(optimizer)
            assert again.options == optimizer.options
            assert again.with_weight_decay(0.5).options == optimizer.with_weight_decay(0.5).options
            assert shown(again) == shown(pickle.loads(pickle.dumps(optimizer))) == shown(optimizer)

    @pytest.mark.parametrize("name", OPTIONS)
    def test_every_option_can_be_read_back(self, name: str) -> None:
        for option, (value, beside) in OPTIONS[name].items():
            given = {k: v for k, v in beside.items() if k in ("lr", "variant") or k in OPTIONS[name]}
            optimizer = FRONT_END[name](**{"lr": 0.1, **given, option: value})
            again = read_back(optimizer)
            assert again.lr == optimizer.lr
            assert repr(again) == repr(optimizer)
            assert again.options == optimizer.options, option

    @pytest.mark.parametrize(
        "optimizer",
        [
            LARS(0.1, trust=False, clip=True, overrides=[("matrix", dict(trust=True))]),
            LARS(0.5, variant="larc", clip=False, eps=0.0),
            *(make() for make in CASES.values()),
        ],
        ids=repr,
    )
    def test_what_overrides_alone_use_and_what_a_variant_would_not_have(self, optimizer: Optimizer) -> None:
        again = read_back(optimizer)
        assert again.options == optimizer.options
        assert repr(optimizer.copy()) == repr(optimizer) == repr(again)
        assert shown(again) == shown(optimizer)

    def test_functions_are_shown(self) -> None:
        text = repr(LARS(halving, momentum=halving))
        assert text.count("function halving") == 2
