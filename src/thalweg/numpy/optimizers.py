"""The four optimizers for raw arrays, in order of increasing complexity."""

from __future__ import annotations

from thalweg.numpy.optimizer import Optimizer, Rate
from thalweg.numpy.stepping import Engine
from thalweg.options import AdafactorOptions, KronOptions, LAMBOptions, LARSOptions, Unpack, with_signature


@with_signature
class LARS(Optimizer):
    """SGD with momentum whose step size follows each layer's norm: stable at very large batches.

    ``trust=False`` makes it SGD with momentum. Options: docs/lars.md.

    >>> import numpy
    >>> weights, gradient = numpy.ones((2, 2)), numpy.full((2, 2), 0.5)
    >>> LARS(lr=1.0, trust_coefficient=0.1).update("layer", weights, gradient)
    >>> weights
    array([[0.9, 0.9],
           [0.9, 0.9]])
    """

    rule_name = "LARS"

    def __init__(
        self, lr: Rate = 1.0, *, global_step: bool = False, engine: Engine = "auto", **options: Unpack[LARSOptions]
    ) -> None:
        super().__init__(lr, global_step=global_step, engine=engine, **options)


@with_signature
class LAMB(Optimizer):
    """Adam whose step size follows each layer's norm: stable at very large batches.

    ``trust=False`` makes it AdamW. Options: docs/lamb.md.

    >>> import numpy
    >>> weights, gradient = numpy.ones((2, 2)), numpy.full((2, 2), 0.5)
    >>> LAMB(lr=0.1).update("layer", weights, gradient)
    >>> weights
    array([[0.9, 0.9],
           [0.9, 0.9]])
    """

    rule_name = "LAMB"

    def __init__(
        self, lr: Rate = 1e-3, *, global_step: bool = False, engine: Engine = "auto", **options: Unpack[LAMBOptions]
    ) -> None:
        super().__init__(lr, global_step=global_step, engine=engine, **options)


@with_signature
class Adafactor(Optimizer):
    """Adaptive step sizes with memory for rows and columns only. Works without a learning rate.

    ``lr=None`` takes the paper's relative step. Options: docs/adafactor.md.

    >>> import numpy
    >>> weights, gradient = numpy.ones((2, 2)), numpy.full((2, 2), 0.5)
    >>> Adafactor(lr=0.1).update("layer", weights, gradient)
    >>> weights
    array([[0.9, 0.9],
           [0.9, 0.9]])
    """

    rule_name = "Adafactor"

    def __init__(
        self,
        lr: Rate = None,
        *,
        global_step: bool = False,
        engine: Engine = "auto",
        **options: Unpack[AdafactorOptions],
    ) -> None:
        super().__init__(lr, global_step=global_step, engine=engine, **options)


@with_signature
class Kron(Optimizer):
    """SGD with momentum on gradients whitened by a learned Kronecker product (Kron-PSGD).

    Options: docs/kron.md.

    >>> import numpy
    >>> weights, gradient = numpy.ones((2, 2)), numpy.eye(2)
    >>> Kron(lr=0.1).update("layer", weights, gradient)
    >>> weights.round(6)
    array([[0.9, 1. ],
           [1. , 0.9]])
    """

    rule_name = "Kron"

    def __init__(
        self, lr: Rate = 1e-3, *, global_step: bool = False, engine: Engine = "auto", **options: Unpack[KronOptions]
    ) -> None:
        super().__init__(lr, global_step=global_step, engine=engine, **options)
