"""Steps over ranks have the numbers of one process: parameters, state, figures and errors.

`thalweg check --ranks` has every rule with its defaults in small models; here is what it leaves out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import strategies
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tolerances import FLIPPED, SPACE
from world import world
from world_layouts import SHAPES
from world_steps import EXACT, Run, differences, flipped, in_one_process, run_of, told

import thalweg.rules
from thalweg.rules import AdamW, Spikes

pytestmark = pytest.mark.slow

#: Layouts of two axes; all others are tried over two ranks.
OVER_FOUR = ("meshes", "two axes", "strided", "copies of shards", "HSDP")
#: What kernels that are interpreted step, and those that need whole tensors.
FEW = ("matrix", "even", "row")
INTERPRETED = ("scalar", "short", "matrix", "kernel")
#: FSDP2 has no parameters without axes.
WITH_AXES = ("one", "short", "vector", "matrix", "even", "cube")
OF_MUON = ("row", "column", "matrix", "even", "cube", "kernel")
TWO, THREE = (1.0, 0.5), (1.0, 1.0, 0.5)


def check(run: Run, layout: str, size: int | None = None, **how: Any) -> None:
    """That no rank finds a difference to one process."""
    size = size or (4 if layout in OVER_FOUR or layout.startswith("by chance") else 2)
    assert world(size).run(differences, run, layout, **how) == [[]] * size


def beside(rule: str, **options: Any) -> Run:
    """Two steps with an option that every rule has."""
    return run_of(rule, options=options, rates=TWO)


def spoilt(rule: str, number: float, policy: str) -> Run:
    where = ((1, "matrix", number), (2, "vector", number), (2, "large", number))
    return run_of(rule, options=dict(on_nonfinite=policy), spoilt=where)


def overflowing(rule: str, policy: str) -> Run:
    """Squares overflow in the sum of all ranks alone: each rank can still square what it has."""
    guarded = dict(on_nonfinite=policy, max_grad_norm=1.0)
    return run_of(rule, "float32", guarded, names=("even", "vector"), huge=(1, "even", 8e18))


def spiked(rule: str, action: Any) -> Run:
    """What is large is on one rank, and all of them skip or clip."""
    spikes = dict(spikes=Spikes(window=4, z=3.0, action=action))
    return run_of(rule, options=spikes, rates=(1.0,) * 5, spoilt=((3, "matrix", 1e4),))


def interpreted(rule: str, names: tuple[str, ...] = INTERPRETED, options: Any = None, **how: Any) -> Run:
    """Kernels for GPUs step what ranks hold."""
    how = {"engine": "fused", "rates": TWO, **how}
    return run_of(rule, "float32", options, interpreted=True, names=names, **how)


def kron(*names: str, options: Any = None, **how: Any) -> Run:
    """With factors that are refreshed in the second step of three."""
    options = dict(precond_update_probability=0.5, **(options or {}))
    return run_of("Kron", "float32", options, names=names, rates=THREE, **how)


def divided(rule: str, **how: Any) -> Run:
    """Replicas divide the work. slot: elements that an owner receives at a time."""
    options = dict(divide_work=True, **how.pop("options", {}))
    return run_of(rule, options=options, replicated=True, **how)


def muon(**how: Any) -> Run:
    """With products in bfloat16."""
    return Run("Muon", "float32", **{"options": dict(weight_decay=0.01), "names": OF_MUON, "rates": TWO, **how})


def experts(**how: Any) -> Run:
    return run_of("Muon", options=dict(stacked_axes=1, **how.pop("options", {})), names=("cube", "experts"), **how)


def trained(rule: str, **how: Any) -> Run:
    return Run(rule, names=WITH_AXES, **how)


MANY_OVERRIDES = (("*e*", dict(weight_decay=0.2)), ("matrix", dict(lr_scale=0.1)), ("kernel", dict(stacked_axes=1)))
ABSENT = {0: ("matrix", "vector"), 1: ("matrix", "scalar"), 2: ("large",)}
SPOILT: dict[str, Any] = dict(spoilt=((1, "matrix", math.nan),), absent={2: ("cube",)})
#: The moments of a lone number may cancel, and then have no digits left to compare.
SKIPPING: dict[str, Any] = dict(options=dict(on_nonfinite="skip"), spoilt=((0, "matrix", math.nan),))
#: Nothing of a step that may not be taken is left with the owner: the next one refreshes, and finds the factors.
KRON_SKIPPING: dict[str, Any] = dict(
    options=dict(on_nonfinite="skip", init_scale=1.0), spoilt=((1, "matrix", math.nan),)
)
#: What was refreshed in a step that a scaler refuses is forgotten, by owners too.
REFUSED = kron("matrix", overrides=(("matrix", dict(precond_update_probability=1.0)),), events={1: "refused"})
BLOCKS = (("even", dict(split=(3, 1))), ("cube", dict(split=(1, 2), transposed=True, stacked_axes=1)))
#: The gradient is finite everywhere, and what would be written is not: float16 ends at 65504.
BEYOND_FLOAT16: dict[str, Any] = dict(spoilt=((1, "matrix", 60000.0),), names=("matrix", "even"))
FUSED: dict[str, Any] = dict(engine="fused")
KERNELS: dict[str, Any] = dict(tolerance=SPACE["float32"], engine="fused")

#: What is done, in which layout, and what else is asked of it.
STEPS: dict[str, tuple[Any, ...]] = {
    # layouts and engines
    "LARS by the reference": (Run("LARS", engine="reference"), "first axis"),
    "LAMB in float32": (Run("LAMB", "float32"), "mixed"),
    "LAMB by native code": (Run("LAMB", engine="fused"), "mixed"),
    "LAMB by default": (Run("LAMB"), "first axis", FUSED),
    "LARS, not contiguous on one rank": (Run("LARS"), "odd memory", FUSED),
    "MARS by lists": (Run("MARS", engine="foreach"), "last axis"),
    "Adafactor": (Run("Adafactor"), "second axis"),
    "Muon": (Run("Muon"), "mixed"),
    "Kron": (Run("Kron"), "first axis"),
    "SOAP": (Run("SOAP"), "third axis"),
    "a mixture": (Run("kron_and_others"), "mixed"),
    "a rule of one's own": (Run("Layerwise", engine="foreach"), "first axis"),
    "a whole rule of one's own": (Run("Centred", names=OF_MUON[2:]), "mixed"),
    "a whole rule that measures": (Run("Measured", names=OF_MUON[2:]), "mixed"),
    "LAMB, meshes": (Run("LAMB"), "meshes"),
    "Adafactor, two axes": (Run("Adafactor"), "two axes"),
    "Kron, strided": (Run("Kron", "float32"), "strided"),
    # ways to step
    "maximize": (beside("LARS", maximize=True), "mixed"),
    "clipped": (beside("LAMB", max_grad_norm=0.5), "mixed"),
    "below the norm": (beside("MARS", max_grad_norm=1e6), "mixed"),
    "skip and clipped": (beside("Kron", on_nonfinite="skip", max_grad_norm=0.5), "mixed"),
    "raise and clipped": (beside("SOAP", on_nonfinite="raise", max_grad_norm=0.5), "mixed"),
    "state in float32": (beside("LARS", state_dtype="float32"), "mixed"),
    # one step from values that are the same to the bit: later ones would round to neighbours now and then
    "momentum in bfloat16": (run_of("Muon", options=dict(momentum_dtype="bfloat16"), rates=(1.0,)), "mixed"),
    "state in bfloat16": (run_of("Adafactor", options=dict(state_dtype="bfloat16"), rates=(1.0,)), "mixed"),
    "factors in bfloat16": (Run("Kron", options=dict(precond_dtype="bfloat16")), "mixed"),
    "groups": (Run("Muon", groups=({}, dict(weight_decay=0.3), dict(lr=0.001, momentum=0.5))), "mixed"),
    "overrides": (Run("Kron", overrides=MANY_OVERRIDES), "mixed"),
    # some divide the stacked axis, so that each rank has slices of its own, or none
    "stacked": (run_of("SOAP", options=dict(stacked_axes=1), names=OF_MUON), "second axis"),
    "stacked twice": (run_of("LARS", options=dict(stacked_axes=2), names=("cube", "kernel")), "second axis"),
    "partial gradients": (Run("LAMB", gradients="partial"), "first axis"),
    "partial gradients over two axes": (Run("Muon", gradients="partial"), "two axes"),
    "copied gradients": (Run("MARS", gradients="copies"), "first axis"),
    "gradients elsewhere": (Run("Adafactor", gradients="elsewhere"), "first axis"),
    "a rate in a tensor": (Run("Muon", tensor_rate=True), "mixed"),
    "one by one": (Run("Kron", one_by_one=True), "first axis"),
    "one by one by a tensor": (Run("SOAP", tensor_rate=True, one_by_one=True), "mixed"),
    "without gradients": (Run("MARS", absent=ABSENT), "meshes"),
    "two dtypes": (Run("LAMB", narrow=("matrix", "vector")), "first axis"),
    "nan, skip": (spoilt("LAMB", math.nan, "skip"), "last axis"),
    "nan, raise": (spoilt("MARS", math.nan, "raise"), "last axis"),
    "inf, skip": (spoilt("Adafactor", math.inf, "skip"), "mixed"),
    "inf, propagate": (spoilt("Muon", math.inf, "propagate"), "last axis"),
    "overflow, skip": (overflowing("LAMB", "skip"), "first axis"),
    "overflow, raise": (overflowing("Adafactor", "raise"), "first axis"),
    **{
        f"beyond float16 on one rank, {policy}": (
            Run("LARS", "float16", dict(trust=False, momentum=0.0, on_nonfinite=policy), **BEYOND_FLOAT16),
            "first axis",
            dict(tolerance=0.0),
        )
        for policy in ("skip", "raise")
    },
    "spikes, clip": (spiked("LAMB", "clip"), "mixed"),
    "spikes, skip": (spiked("Muon", "skip"), "first axis"),
    # what all ranks keep has all its digits beside messages in bfloat16
    "rows normalized": (Run("Muon", options=dict(normalize="rows", vectors="row")), "first axis"),
    "blocks": (Run("Kron", options=dict(block_size=4, max_skew=None, merge=None)), "mixed"),
    "a rate of its own": (Run("Adafactor", rates=(1.0,) * 4, own_rate=True), "mixed"),
    "grafted": (run_of("Muon", options=dict(graft=AdamW(), weight_decay=0.1), rates=THREE), "mixed"),
    "around Kron": (run_of("Kron", options=dict(cautious=True, averaged=0.7, graft=AdamW()), rates=THREE), "mixed"),
    # whole tensors and their owners, in slots and narrow messages, by replicas too
    "divided": (divided("Muon"), "plain"),
    "divided in slots": (divided("Kron", slot=60), "mixed"),
    "divided, SOAP": (divided("SOAP", dtype="float32", slot=60), "plain"),
    "divided, a mixture": (divided("kron_and_others", slot=60), "first axis"),
    "divided over shards": (divided("Kron"), "copies of shards"),
    "divided over meshes": (divided("Muon", dtype="float32", slot=60), "meshes"),
    "divided, skip": (divided("Muon", options=dict(on_nonfinite="skip"), slot=60, **SPOILT), "plain"),
    "divided, raise": (divided("SOAP", options=dict(on_nonfinite="raise"), **SPOILT), "plain"),
    "divided, clipped": (divided("Kron", options=dict(max_grad_norm=1.0), **SPOILT), "copies of shards"),
    "a rank without work still answers": (divided("Muon", names=("matrix",)), "plain"),
    "products in bfloat16": (muon(), "mixed"),
    "Gram iterations, by whole shapes": (muon(options=dict(weight_decay=0.01, ns_method="auto")), "mixed"),
    "blocks of unequal size, cut anywhere": (muon(overrides=BLOCKS), "mixed"),
    "figures of slices": (muon(options=dict(stacked_axes=1), names=("cube", "kernel")), "second axis"),
    # of five experts the last rank of four has none
    "experts": (experts(), "first axis", dict(size=4)),
    "experts, raise": (experts(options=dict(on_nonfinite="raise")), "first axis"),
    "experts, clipped": (experts(options=dict(max_grad_norm=1.0)), "first axis"),
    "experts, skip": (experts(options=dict(on_nonfinite="skip"), spoilt=((1, "experts", math.nan),)), "first axis"),
    # torch's wrappers add gradients up, over ranks and over several passes; a step in the backward pass is last
    "DDP": (trained("LARS", passes=2), "DDP", FUSED),
    "FSDP2, offloaded": (trained("Adafactor", passes=2), "FSDP2, offloaded"),
    "HSDP": (trained("SOAP"), "HSDP"),
    "in the backward pass": (trained("LAMB", passes=2, in_backward=True), "FSDP2", FUSED),
    "in the backward pass, Kron": (trained("Kron", in_backward=True), "FSDP2"),
    "in the backward pass, offloaded": (trained("Muon", in_backward=True), "FSDP2, offloaded"),
    # what owners keep of factors, and forget
    "Kron, skip": (kron("vector", "matrix", **KRON_SKIPPING), "first axis"),
    "Kron, state is loaded": (kron("matrix", events={0: "reloaded"}), "first axis"),
    "Kron, refused by a scaler": (REFUSED, "first axis"),
    # kernels for GPUs, interpreted, with sums and owners between them
    "kernels: Adafactor": (interpreted("Adafactor"), "last axis", KERNELS),
    "kernels: LARS, skip": (interpreted("LARS", INTERPRETED[1:], **SKIPPING), "first axis", KERNELS),
    "kernels: shards in other memory": (
        *(interpreted("LAMB", FEW, rates=(1.0,) * 3, events={0: "exchanged"}), "first axis"),
        KERNELS,
    ),
    # all ranks take the same engine, or they would wait for messages that never come
    "kernels: odd memory": (interpreted("LAMB", FEW), "odd memory", KERNELS),
    # they write momentum before owners transform it, and parameters then
    "kernels: Muon": (interpreted("Muon", (*FEW, "column", "kernel"), rates=(1.0, 0.5, 0.25)), "last axis", KERNELS),
    # each replica writes all momentum, transforms its share, and writes what others have made
    "kernels: replicas": (
        *(interpreted("Muon", FEW, dict(divide_work=True), engine="auto", replicated=True, slot=40), "plain"),
        KERNELS,
    ),
}


@pytest.mark.parametrize("what", STEPS)
def test_the_numbers_of_one_process(what: str) -> None:
    run, layout, *how = STEPS[what]
    if run.interpreted:
        pytest.importorskip("triton")
    check(run, layout, **(how[0] if how else {}))


def test_spikes_are_met() -> None:
    """Or the rows above would show nothing of them."""
    for what, skipped in (("spikes, skip", 1), ("spikes, clip", 0)):
        run = STEPS[what][0]
        clipped, plain = in_one_process(run), in_one_process(run_of(run.rule, rates=run.rates, spoilt=run.spoilt))
        assert clipped.optimizer.skipped == skipped
        assert any(bool((p != plain.params[name]).any()) for name, p in clipped.params.items())


#: What rounds, so that sums in another order may be seen.
WITHOUT = ("state_dtype", "momentum_dtype", "precond_dtype", "state_rounding", "rounding", "compile")


@settings(max_examples=max(1, settings.default.max_examples // 8), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_whatever_is_drawn(data: Any) -> None:
    """Rules, options, layouts and gradients that nobody thought of, over four ranks."""
    rule = data.draw(st.sampled_from(sorted(thalweg.rules.RULES)))
    fixed = {name: option for name, option in EXACT.items() if rule == "Muon"}
    options = data.draw(strategies.options(thalweg.rules.RULES[rule], most=3, without=WITHOUT, **fixed))
    names = data.draw(st.lists(st.sampled_from(list(SHAPES)), min_size=2, max_size=6, unique=True))
    run = Run(
        rule,
        options={name: option for name, option in options.items() if name != "lr"},
        engine=data.draw(st.sampled_from(("auto", "foreach"))),
        groups=data.draw(st.sampled_from((({},), ({}, dict(weight_decay=0.2))))),
        gradients=data.draw(st.sampled_from(("alike", "partial", "copies", "elsewhere"))),
        absent={1: tuple(data.draw(st.lists(st.sampled_from(names), max_size=2)))},
        names=tuple(names),
        rates=(1.0, 0.5, 0.5),
    )
    check(run, f"by chance {data.draw(st.integers(0, 99))}")


# ---- what ranks say


def test_ranks_choose_engines_alike_whatever_their_memory() -> None:
    """Else they would wait for messages that never come."""
    for rounding in ("nearest", "stochastic"):
        run = Run("LAMB", "bfloat16", dict(rounding=rounding), names=("matrix", "even"))
        first, second = world(2).run(told, run, "odd memory")
        assert first == second


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (
            Run("InOnePart", names=("matrix", "even")),
            "InOnePart needs whole tensors, and parameter 'matrix' is sharded: derive the rule from",
        ),
        (
            interpreted("Kron", ("matrix",)),
            "engine='fused' cannot run for parameter 'matrix': it is sharded, and owners have library products for "
            "Kron with these options; use engine='auto', which takes the fastest engine that can run",
        ),
    ],
    ids=lambda value: value.rule if isinstance(value, Run) else "",
)
def test_what_cannot_be_stepped_is_told(run: Run, words: str) -> None:
    for (first, *_), _ in world(2).run(told, run, "first axis"):
        assert words in first


# ---- bits: chance depends on the seed, the name, the step and the place in the whole tensor


def of_elements(rule: str, dtype: str, rounding: str) -> Run:
    """A run that computes element by element."""
    return Run(rule, dtype, dict(trust=False, weight_decay=0.01, rounding=rounding), rates=(0.01, 0.01, 0.001))


def with_sums(rule: str, dtype: str, rounding: str) -> Run:
    """A trust ratio may differ in its last digit, and with it, rarely, the neighbour to which an element is rounded."""
    return run_of(rule, dtype, dict(rounding=rounding), rates=(0.1, 0.1), names=("large",))


#: Runs of 16 bits, and the share of elements that may have other bits than in one process.
NARROW: dict[str, tuple[Run, str, float]] = {
    "nearest": (of_elements("LARS", "bfloat16", "nearest"), "first axis", 0.0),
    "float16": (of_elements("LAMB", "float16", "stochastic"), "last axis", 0.0),
    "mixed": (of_elements("LARS", "bfloat16", "stochastic"), "mixed", 0.0),
    "strided": (of_elements("LAMB", "bfloat16", "stochastic"), "strided", 0.0),
    "sums, nearest": (with_sums("LAMB", "float16", "nearest"), "mixed", FLIPPED),
    "sums by rows": (with_sums("Adafactor", "bfloat16", "stochastic"), "mixed", FLIPPED),
    "owners": (with_sums("Kron", "bfloat16", "stochastic"), "mixed", FLIPPED),
    "kernels": (
        replace(of_elements("LAMB", "bfloat16", "stochastic"), names=FEW, interpreted=True, engine="fused"),
        *("last axis", FLIPPED),
    ),
}


@pytest.mark.parametrize("what", NARROW)
def test_bits_are_those_of_one_process(what: str) -> None:
    run, layout, most = NARROW[what]
    if run.interpreted:
        pytest.importorskip("triton")
    for shares in world(4 if layout in OVER_FOUR else 2).run(flipped, run, layout):
        looked_at = ["large"] if run.names == ("large",) else list(shares)  # of few elements one may be a large share
        assert all(shares[key] <= most for key in looked_at), shares


def test_chance_makes_a_difference() -> None:
    """What the tests above compare is not the same anyway."""
    seeds = [Run("LAMB", "bfloat16", dict(rounding="stochastic", seed=seed), rates=(1.0,)) for seed in (0, 1)]
    for shares in world(2).run(flipped, seeds[0], "first axis", seeds[1]):
        assert shares["large"] > FLIPPED, shares


# ---- state in eight bits: groups of codes are of places in the whole tensor

LEAN = dict(state_dtype="int8", state_rounding="stochastic")
CODED = ("coded", "coded kernel", "bias")


@pytest.mark.parametrize(
    ("run", "size", "layout"),
    [
        (Run("LAMB", "float32", LEAN, names=CODED), 2, "second axis"),
        (Run("LAMB", "float32", LEAN, names=CODED), 4, "two axes"),
        (Run("Kron", "float32", LEAN, names=CODED), 2, "first axis"),
        (Run("LAMB", "float32", LEAN, names=("uncut",), rates=TWO, interpreted=True, engine="fused"), 2, "first axis"),
    ],
    ids=["columns", "both", "Kron by rows", "kernels"],
)
def test_the_same_codes_in_every_layout(run: Run, size: int, layout: str) -> None:
    if run.interpreted:
        pytest.importorskip("triton")
    for shares in world(size).run(flipped, run, layout, alike=True):
        codes = {key: share for key, share in shares.items() if "." in key and (run.rule == "LAMB" or "mom" in key)}
        assert codes
        assert not any(codes.values()), codes


def test_a_shard_that_cuts_a_group_is_refused_on_every_rank() -> None:
    runs = {name: Run("LAMB", "float32", LEAN, names=(name,), rates=(1.0,)) for name in ("cut", "uncut")}
    for (error,), _ in world(2).run(told, runs["cut"], "second axis"):
        for words in ("'cut' of shape (64, 192) is sharded with", "groups of 64", "state_dtype='bfloat16'"):
            assert words in error
    assert [errors for errors, _ in world(2).run(told, runs["uncut"], "second axis")] == [[""]] * 2
