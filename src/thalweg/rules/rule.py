"""What an update rule is: options, a first state, and one step, all without side effects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeAlias

from thalweg.arrays import A, Axes, Scalar, Shape, Space, Squares, State, Truth, is_number
from thalweg.errors import OptionError
from thalweg.rules.blocks import is_zero
from thalweg.rules.checks import check_number, require
from thalweg.rules.entries import Entry
from thalweg.rules.options import Mask, check_options, idle_options, is_structure, number_options, option
from thalweg.rules.schedules import Annealed

#: Gives standard normal noise of the parameter's shape. Called only where noise is needed.
Noise: TypeAlias = Callable[[], A]


class Update(NamedTuple):
    """What a rule answers for one parameter and one step."""

    #: What is to be added to the parameter, sign included.
    delta: Any
    #: The parameter's next state; the old one is left as it was.
    state: State[Any]
    #: Whether all that entered and left was finite, from sums that were computed anyway. None: the gradient tells.
    finite: Truth | None = None
    #: Figures the step computed anyway, for users to look at: trust ratios, norms, RMS.
    stats: Mapping[str, Scalar] = MappingProxyType({})
    #: An array that points, element by element, against the step without decay, whatever its size. None: -delta does.
    direction: Any = None


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """An update rule. Its fields are its options; ``lr`` and the step are arguments.

    The first ``stacked_axes`` axes of every parameter index independent tensors (layers under
    a scan, stacked experts): norms, averages and factors are then taken slice by slice.
    """

    stacked_axes: int = option(
        0,
        "The number of leading axes that index independent tensors (layers, experts); each is stepped separately.",
        low=0,
    )

    #: Whether the rule works on whole tensors, and not on sums over their parts.
    needs_whole: ClassVar[bool] = False
    #: Whether the rule has a step size of its own, for an ``lr`` of None.
    lr_optional: ClassVar[bool] = False
    #: The learning rate that optimizers take without one. None: it must be given, or is optional.
    default_lr: ClassVar[float | None] = None
    #: A learning rate at which models from thousands to millions of parameters train well: a search begins around it.
    #: None: it begins around the default.
    typical_lr: ClassVar[float | None] = None
    #: Of its state: checkpoints carry it, and one of another version is refused.
    version: ClassVar[int] = 1
    #: The variant that was the default in thalweg 0.1.0, where the default has changed since.
    first_default: ClassVar[str | None] = None
    #: Whether it keeps factors, which ``precond_dtype`` is for.
    has_factors: ClassVar[bool] = False
    #: The options that torch's optimizer of this name takes by position after ``lr``, in its order.
    TORCH: ClassVar[tuple[str, ...]] = ()
    #: Options that make the rule equal to a published implementation, by its name.
    VARIANTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    #: The arguments of optax's function, in its order, each with its option here; "betas[0]" is a part of it.
    #: Defaults are those of VARIANTS["optax"], unless one stands beside the option. After "*" they go by keyword.
    OPTAX: ClassVar[Mapping[str, str | Mask | tuple[str, Any]]] = {}
    #: Names of other libraries that the function of ``thalweg.optax`` understands beside those it shows.
    ALSO_NAMED: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    #: What other libraries have that is no field here, and how to say it; fields say so of themselves.
    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        **{"learning_rate": "lr", "alpha": "lr"},
        **{"decay": "weight_decay", "wd": "weight_decay", "weight_decay_rate": "weight_decay"},
    }

    def validate(self) -> None:
        """Raise an OptionError for options that are out of range, each by itself or one beside another.

        Numbers are checked; values that are traced or live on a device pass through.
        """
        check_options(self)

    def entries(self, shape: Shape) -> dict[str, Entry]:
        """What is kept for a parameter of this shape between steps, under its checkpoint keys."""
        return {}

    def init(self, xp: Space[A], p: A) -> State[A]:
        """The state of a parameter that has not been stepped yet."""
        return {key: entry.first(xp, p, self.stacked_axes) for key, entry in self.entries(xp.shape(p)).items()}

    def keys(self, shape: Shape, role: type[Entry]) -> list[str]:
        """The keys of the entries of a role that are kept for a parameter of this shape."""
        return [key for key, entry in self.entries(shape).items() if isinstance(entry, role)]

    @abstractmethod
    def update(
        self,
        xp: Space[A],
        g: A,
        s: State[A],
        p: A,
        *,
        t: Scalar,
        lr: Scalar | None,
        lr_scale: Scalar = 1.0,
        noise: Noise[A] | None = None,
    ) -> Update:
        """One step.

        g: gradient, p: parameter, s: state, all in the precision of the arithmetic.
        t: the number of this step, from 1.
        lr: step size; what None means is the rule's own affair.
        lr_scale: multiplies whatever step size results, decay that is scaled by it included.
        noise: standard normals, for rules whose ``needs_noise`` says so.
        """

    def validate_lr(self, lr: Scalar | None) -> None:
        """Raise an OptionError for a learning rate that the rule cannot use."""
        if lr is None and self.lr_optional:
            return
        require(lr is not None, f"{type(self).__name__} needs a learning rate: give lr a number, such as 1e-3")
        check_number("lr", lr, low=0.0)

    def check_shape(self, name: object, shape: Shape) -> None:
        """Raise an OptionError, or a ParameterError, for a parameter whose shape the rule cannot serve."""
        if self.stacked_axes > len(shape):
            raise OptionError(
                f"stacked_axes={self.stacked_axes}, but parameter {name!r} has shape {shape}: "
                f"it must be at most {len(shape)}"
            )

    def idle(self, lr: Scalar | None) -> dict[str, str]:
        """Options that have no effect beside the others, each with what would give it one."""
        return idle_options(self) | ({} if self.has_factors else {"precond_dtype": "Kron or SOAP, which have factors"})

    @property
    def needs_noise(self) -> bool:
        return False

    @property
    def looks_at_shapes(self) -> bool:
        """Whether a step depends on which numbers form one tensor, and not on each number by itself."""
        return True

    @property
    def is_decay_apart(self) -> bool:
        """Whether delta is a step and, apart from it, a share of the parameter: ``decay_share``."""
        return False

    def decay_share(self, xp: Space[A], update: Update, *, t: Scalar, lr: Scalar | None, lr_scale: Scalar) -> Scalar:
        """The share of the parameter that a step takes off it as decay, where that is apart."""
        weight_decay: Scalar = getattr(self, "weight_decay", 0.0)
        return 0.0 if not self.is_decay_apart or is_zero(weight_decay) else lr * lr_scale * weight_decay

    def treatment(self, shape: Shape) -> str:
        """How a parameter of this shape is treated, in a few words."""
        return "elementwise"

    def expected_rms(self, lr: float | None, p_rms: float) -> float:
        """The RMS of a typical step for a parameter of this RMS, to tell whether rounding would lose it."""
        return lr or 0.0

    def for_storage(self, dtype: str | None) -> Rule:
        """The rule as it is best for factors stored in this dtype; None: as they are computed."""
        return self

    @classmethod
    def first_options(cls) -> Mapping[str, Any]:
        """The options whose defaults have changed since thalweg 0.1.0, as they were there."""
        return cls.VARIANTS[cls.first_default] if cls.first_default else {}

    def for_shape(self, shape: Shape) -> Rule:
        """The rule as it holds for a parameter of this shape, where an option leaves that to the shape."""
        return self

    def kind(self, shape: Shape) -> Hashable:
        """Tensors whose shapes are of equal kind may be stepped together as one list."""
        return len(shape) if self.stacked_axes else ()

    def own_axes(self, shape: Shape) -> Axes:
        """The axes of one tensor: all of them, or those that are not stacked."""
        return tuple(range(self.stacked_axes, len(shape))) if self.stacked_axes else None


def guarded(xp: Space[A], rule: Rule, g: A, update: Update) -> Update:
    """An update that says whether it is finite: where its rule does not, the squares of the gradient tell."""
    if not isinstance(update, Update) or update.finite is not None:
        return update
    (squares,) = xp.sums(Squares(g, rule.own_axes(xp.shape(g))))
    return update._replace(finite=xp.isfinite(squares))


def replaced_numbers(rule: Rule, replacement: Callable[[str], Any]) -> dict[str, Any]:
    """The options that are numbers, each with what takes its place; that is asked by names such as "betas[0]".

    Numbers that are 0 stay so: a rule may ask whether they are off.
    """

    def replace_in(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(replace_in(f"{name}[{i}]", entry) for i, entry in enumerate(value))
        return replacement(name) if is_number(value) and not is_structure(value) else value

    numbers = number_options(type(rule))
    return {name: replace_in(name, value) for name, value in vars(rule).items() if name in numbers}


def structure_of(rule: Rule) -> tuple[Any, ...]:
    """A rule without its numbers: those that are not 0 are given to its code at every step."""
    return (type(rule), *(vars(rule) | replaced_numbers(rule, lambda name: "number")).values())


def stand_in(rule: Rule) -> Rule:
    """A rule of the same structure that is equal for all values of its numbers, those on a device included.

    A schedule that the rule computes itself stays: its step follows from it.
    """

    def hide(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(hide, value))
        return value if is_structure(value) or isinstance(value, Annealed) else 0.5

    return replace(rule, **{name: hide(getattr(rule, name)) for name in number_options(type(rule))})
