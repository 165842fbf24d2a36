"""The only place where a tolerance may be written.

An error is the largest difference over the largest displacement of the parameter, unless a name
here says otherwise. Where bits must be equal, tests compare with ``==`` and need nothing from here.
"""

from __future__ import annotations

#: Two float64 computations of one formula, after tens of steps.
FLOAT64 = 1e-11
#: The same in float32, after 20 steps.
FLOAT32 = 2e-5
#: float64 of optax.adafactor: it computes the decay of squares in float32.
OPTAX_ADAFACTOR = 2e-7
#: One step of one formula in float64, in another order of operations.
ONE_STEP_FLOAT64 = 1e-13
#: Spaces against the numpy reference, relative to the size of each array.
SPACE = {"float64": 1e-11, "float32": 2e-5}
#: Monte Carlo averages of 20,000 draws.
MONTE_CARLO = 0.03
#: One step rounded to float16.
ROUNDED_STEP = 0.05
#: Share of elements for which two engines may round to different neighbours: a chance fell between their results.
FLIPPED = 0.05
#: Native code against its rule after a few steps, relative to the size of each array (parameters of float64: to how
#: far they went).
FUSED = {"float64": 1e-12, "float32": 2e-6}
#: Share of elements of 16 bits that native code may round to the other neighbour than its rule.
FUSED_FLIPPED = 0.01
#: Share of codes of eight bits that two compiled programs may round by chance to other neighbours, after three steps:
#: numbers that differ by some units of float32 do so with a chance of 127 such units a step, at most one in 2,000, and
#: where it falls on the largest number of a group, all of its 64 codes change.
FLIPPED_CODES = 0.01
#: Kron's kernels on a GPU against its rule after a few steps, by dtype of factors, relative to the size of each array:
#: tensor cores keep 11 binary digits of float32; of bfloat16 there are 8, on CPUs too.
TENSOR_CORES = {"float32": 5e-3, "bfloat16": 2e-2}
#: Muon with products in bfloat16 beside another Muon, after ten steps: where one of two sums in another order rounds to
#: the other neighbour, all later products see it. One unit of bfloat16 for each of the five steps of an iteration.
BFLOAT16_PRODUCTS = 5 * 2.0**-8
#: A derivative against central differences in float64, relative: their steps of 1e-5 leave errors of that square and of
#: rounding over them.
FINITE_DIFFERENCES = 1e-6
#: A step over several devices against one, after a few steps: parameters relative to how far they went, state relative
#: to the size of each array.
SHARDED = {"float64": 2e-14, "float32": 1e-5}
#: Steps over ranks against one process, after a few steps, relative to the size of each array (parameters of float64:
#: to how far they went).
WORLD = {"float64": 1e-12, "float32": 1e-6}
#: Training over ranks against one process, after a few steps in float64: gradients are summed in another order too, and
#: those that are nearly zero are divided by their own size.
WORLD_TRAINED = 1e-9
#: Losses of float32 that are written with three decimals.
PRINTED = 2e-3
#: A sum or mean of millions of numbers of float32 that do not cancel, relative: the result is rounded once or twice.
SUMMED = 3e-7
#: A run continued from another optimizer's state against that optimizer itself, five steps later: parameters relative
#: to their size (of float64: to how far they went).
CONTINUED = {"float64": 1e-11, "float32": 1e-6}
#: A product of matrices by kernels, relative to its largest element: one rounding of the result, and sums of float32.
#: Tensor cores cut float32 operands to 11 binary digits ("tf32"), each off by one unit at most.
STACK_PRODUCTS = {"float32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-10, "tf32": 2.0**-9}
