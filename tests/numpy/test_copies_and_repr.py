"""Copies with other options, and what is shown. test_every_option.py has copies that go on where a run was."""

from __future__ import annotations

import copy
import math
import re

import numpy as np
import pytest
from raw_arrays import CASES, FRONT_END, bits, copies, fingerprint, gradients, model, train

from thalweg import Spikes
from thalweg.errors import OptionError
from thalweg.numpy import LARS, Adafactor, Annealed, Kron, Optimizer

WORDS = {**FRONT_END, "Annealed": Annealed, "Spikes": Spikes, "re": re, "inf": math.inf}


def halving(t: int) -> float:
    return 0.1 / t


class TestCopies:
    def test_a_changed_copy_takes_the_state_along(self) -> None:
        original, params, grads = CASES["Kron"](), model(), gradients(4)
        train(original, params, grads[:2])
        again, twin = copies(params), CASES["Kron"](lr=0.25, weight_decay=0.5)
        train(original.with_lr(0.25).with_weight_decay(0.5), params, grads[2:])
        twin.load_state_dict({**original.state_dict(), "lr": 0.25})
        assert bits(train(twin, again, grads[2:])) == bits(params)

    def test_the_variant_and_overrides_change_too(self) -> None:
        assert LARS(0.1).with_variant("larc").options["trust_coefficient"] == 0.02
        assert LARS(0.1, variant="larc").with_variant(None).options == LARS(0.1).options
        assert LARS(0.1, variant="larc", eps=0.5).with_variant("timm").options["eps"] == 0.5
        params = train(LARS(0.1).with_overrides([("conv", dict(lr_scale=0.0))]), model(), gradients(1))
        assert bits(params["conv"]) == bits(model()["conv"])

    def test_functions_are_copied_and_shown_and_warnings_are_given_once(self) -> None:
        optimizer = LARS(lambda t: 0.1, overrides=[(lambda name, x: name == "nothing", dict(momentum=0.5))])
        with pytest.warns(UserWarning, match="match no parameter"):
            optimizer.step(model(), gradients(1)[0])
        for other in (optimizer.copy(), copy.deepcopy(optimizer)):
            assert other.lr is optimizer.lr
            train(other, model(), gradients(1))  # silent: warnings are errors here
        assert repr(LARS(halving, momentum=halving)).count("function halving") == 2

    def test_subclasses_stay_what_they_are(self) -> None:
        class Mine(LARS):
            def lr_scale(self, name: str | int) -> float:
                return 0.5

        half, plain = np.ones(3), np.ones(3)
        Mine(0.1).with_momentum(0.0).copy().update("w", half, np.ones(3))
        LARS(0.05, momentum=0.0).update("w", plain, np.ones(3))
        assert bits(half) == bits(plain)
        assert repr(Mine(0.1)) == "Mine(lr=0.1)"

    def test_what_is_no_option_cannot_be_changed(self) -> None:
        with pytest.raises(OptionError, match="LARS has no option 'betas'"):
            LARS(0.1).with_options(betas=(0.9, 0.99))
        with pytest.raises(AttributeError, match="with_betas"):
            _ = LARS(0.1).with_betas
        assert not hasattr(LARS(0.1), "momentum")


SHOWN: dict[str, Optimizer] = {
    "Adafactor()": Adafactor(),
    "LARS(lr=0.5, overrides=[('*.bias', {'weight_decay': 0.0})], global_step=True)": LARS(
        0.5, overrides=[("*.bias", dict(weight_decay=0.0))], global_step=True
    ),
    "LARS(lr=0.5, overrides=[(re.compile('bias$'), {'lr_scale': 2})])": LARS(
        0.5, overrides=[(re.compile("bias$"), dict(lr_scale=2))]
    ),
    "Kron(lr=0.1, precond_update_probability=Annealed(high=1.0, low=0.1, decay=0.001, flat=500))": Kron(
        0.1, precond_update_probability=Annealed(low=0.1)
    ),
    "LARS(lr=0.5, variant='optax', eps=0.25, norm_mode='combined')": LARS(0.5, variant="optax", eps=0.25),
}


@pytest.mark.parametrize("text", SHOWN)
def test_it_shows_what_differs_from_the_defaults(text: str) -> None:
    """test_every_option.py has what is drawn; these are overrides, variants and schedules."""

    def parts(text: str) -> list[str]:
        return sorted(re.split(r"[(), ]+", text))

    assert parts(repr(SHOWN[text])) == parts(text)
    assert fingerprint(eval(text, dict(WORDS))) == fingerprint(SHOWN[text])
