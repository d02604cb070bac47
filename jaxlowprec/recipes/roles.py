"""Recipes: what a linear layer quantises, and how.

A recipe is a frozen, hashable description. Its `roles` give the format, rounding and rotation of each operand (input,
weight, gradient) as data. `linear` reads nothing else, so a new recipe is a new set of roles. Because it is hashable,
it is part of jit's cache key, and a changed recipe is never ignored. Field names and defaults are Transformer
Engine's where it has them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from jaxlowprec.arguments import is_one_of, one_of, shown
from jaxlowprec.arrays.formats import Format, check_amax_epsilon
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.quantize.checks import ROUNDINGS, Rounding, check_eden
from jaxlowprec.recipes.fields import Sums, Use, check_field

if TYPE_CHECKING:
    from jaxlowprec.recipes.transformer_engine import DelayedScaling


BackwardOverride = Literal["high_precision", "dequantized"] | None
ForwardOverride = Literal["high_precision"] | None


StraightThrough = Literal["identity", "clipped"]
ModuleType = Literal["linear", "grouped_linear"]
MODULE_TYPES: tuple[ModuleType, ...] = ("linear", "grouped_linear")
"""The kinds of layers, see `QuantizerRole`."""


@dataclasses.dataclass(frozen=True)
class Role:
    """How the tensors of one role are quantised.

    Attributes:
        format: the format that they are quantised to.
        rounding: see `quantize`; "stochastic" only for gradients, "eden" only for operands that `hadamard` rotates, in
            roles of their GEMM's own: `Roles.dgrad` and `Roles.wgrad`.
        hadamard: rotation along the contracted axis, or None. A role that a tensor has in all of its GEMMs rotates
            wgrad's operands alone; a GEMM's own roles, `Roles.dgrad` and `Roles.wgrad`, rotate theirs. Drawn signs come
            from the layer's key, or without one from the amax of the input or of the weight (numerics.md 15).

    Raises:
        TypeError, ValueError: a field has another value.

    >>> import jaxlowprec as jlp
    >>> def rotated_anew(role):  # in each step, for jlp.Custom
    ...     if role.tensor_type == "weight":
    ...         return jlp.NVFP4((16, 16))
    ...     rounding = "stochastic" if role.tensor_type == "grad_output" else "nearest"
    ...     return jlp.Role(jlp.NVFP4(), rounding, jlp.Hadamard(128, signs="drawn"))
    >>> jlp.Custom(rotated_anew).roles().gradient.hadamard
    Hadamard(size=128, signs='drawn')
    """

    format: Format
    rounding: Rounding = "nearest"
    hadamard: Hadamard | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format):
            raise TypeError(f"Role: format={shown(self.format)}; needs a format such as NVFP4()")
        one_of("Role", "rounding", self.rounding, *ROUNDINGS)
        random = self.rounding == "stochastic"
        if self.hadamard is not None and not isinstance(self.hadamard, Hadamard):
            raise TypeError(f"Role: hadamard={shown(self.hadamard)}; needs a jaxlowprec.Hadamard or None")
        check_eden("Role", self.format, self.hadamard, self.rounding)
        if self.rounding != "eden" and self.format.chooses_scales and (random or self.hadamard is not None):
            given, why = (
                ('rounding="stochastic"', "a choice among random outcomes is biased")
                if random
                else (f"hadamard={self.hadamard}", "scales of the least error shorten what is rotated")
            )
            raise ValueError(
                f"Role: {given} and format={self.format}; {why}, and so the gradients: leave it out, or use "
                'scale_rule="six"' + (' or rounding="eden"' if self.hadamard is not None else "")
            )

    @property
    def draws_signs(self) -> bool:
        """Whether it is rotated with signs that are drawn."""
        return self.hadamard is not None and self.hadamard.drawn

    @functools.cached_property
    def without_rotation(self) -> Role:
        """A copy of this role without `hadamard`."""
        return self if self.hadamard is None else dataclasses.replace(self, hadamard=None)


GEMMS = {"fprop": ("input", "weight"), "dgrad": ("gradient", "weight"), "wgrad": ("input", "gradient")}
"""The operands of a linear's three GEMMs."""

_FORMS = {  # the GEMM that reads a tensor rowwise, and the one that reads it columnwise
    "input": ("fprop", "wgrad"),
    "weight": ("dgrad", "fprop"),
    "gradient": ("dgrad", "wgrad"),
}


def _drawn(role: Role | None) -> bool:
    return role is not None and role.draws_signs


@dataclasses.dataclass(frozen=True)
class Roles:
    """The three operands of a linear. An operand that is None stays in high precision, and so do its GEMMs.

    A linear has three GEMMs, each with its own pair of operands: fprop: input rowwise x weight; dgrad: gradient rowwise
    x weight transposed; wgrad: input columnwise x gradient columnwise. A GEMM with a field of its own follows that one.

    Attributes:
        input, weight, gradient: the operands, for every GEMM whose own field is None.
        fprop, dgrad, wgrad: None; or the GEMM's own pair of roles, in the order of the line above; or "high_precision":
            it reads the original operands. "dequantized", not for fprop: the same, but input and weight are the decoded
            ones that fprop has read.
        ste: None; or, if only the weight is quantised, quantisation-aware training: fprop and dgrad use the quantised
            weight, and this straight-through estimator (see `fake_quantize`) takes the gradient to the master weight.
        served_dtype: the dtype that the master weight is rounded to before it is quantised, like its exported copy;
            None: none, or the format itself rounds (`Int4`).
        requantized: tensors, "input" or "weight", whose form for the backward pass is quantised from what fprop reads,
            decoded to bfloat16, where fprop quantises them: then the backward pass differentiates what the forward pass
            has computed.

    Raises:
        TypeError, ValueError: a field has another value.
    """

    input: Role | None
    weight: Role | None
    gradient: Role | None
    ste: StraightThrough | None = None
    served_dtype: str | None = None
    fprop: tuple[Role, Role] | ForwardOverride = None
    dgrad: tuple[Role, Role] | BackwardOverride = None
    wgrad: tuple[Role, Role] | BackwardOverride = None
    requantized: tuple[Literal["input", "weight"], ...] = ()

    def __post_init__(self) -> None:
        for field in ("input", "weight", "gradient"):
            if (role := getattr(self, field)) is not None and not isinstance(role, Role):
                raise TypeError(f"Roles: {field}={shown(role)}; needs a jaxlowprec.Role or None")
        for gemm, operands in GEMMS.items():
            own = getattr(self, gemm)
            pair = isinstance(own, tuple) and len(own) == 2 and all(isinstance(role, Role) for role in own)
            words = (None, "high_precision", *(["dequantized"] if gemm != "fprop" else []))
            if not pair and not is_one_of(own, words):
                raise TypeError(
                    f"Roles: {gemm}={shown(own)}; needs a pair of jaxlowprec.Role, for {' and '.join(operands)}, or "
                    f"{', '.join(map(repr, words))}"
                )
            if own is not None and self.ste is not None:
                raise ValueError(f"Roles: {gemm} and ste are given; quantisation-aware training has its own GEMMs")
        if not isinstance(self.requantized, tuple) or not {*self.requantized} <= {"input", "weight"}:
            raise ValueError(
                f'Roles: requantized={shown(self.requantized)}; needs a tuple of "input", "weight" or both'
            )
        self._check_eden()
        self._check_row_scaled()
        self._check_rotations()
        one_of("Roles", "ste", self.ste, "identity", "clipped", None)
        one_of("Roles", "served_dtype", self.served_dtype, "bfloat16", "float16", None)

    def _check_row_scaled(self) -> None:
        """Raises ValueError if another operand than fprop's input is row-scaled."""
        for gemm, pair in GEMMS.items():
            for tensor in pair:
                role = self.operand(tensor, gemm)
                if role is not None and role.format.row_scaled and (gemm, tensor) != ("fprop", "input"):
                    raise ValueError(
                        f"Roles: {tensor} is {role.format} in {gemm}; only fprop's input can be row-scaled: "
                        "fprop=(Role(NVFP4(row_scaled=True)), the weight's role)"
                    )

    def _check_rotations(self) -> None:
        """Raises ValueError if a rotation would not cancel."""
        if self.weight is not None and self.weight.hadamard is not None:
            raise ValueError(
                f"Roles: weight has hadamard={self.weight.hadamard}; the rotation of a weight belongs to dgrad alone: "
                "give it in dgrad=, to the gradient and the weight"
            )
        if isinstance(self.fprop, tuple) and (rotated := [r for r in self.fprop if r.hadamard is not None]):
            raise ValueError(
                f"Roles: fprop has an operand with hadamard={rotated[0].hadamard}; only operands of dgrad and wgrad "
                "are rotated"
            )
        for gemm in ("dgrad", "wgrad"):
            (first, a), (second, b) = ((tensor, self.operand(tensor, gemm)) for tensor in GEMMS[gemm])
            if a is None or b is None or a.hadamard == b.hadamard:
                continue
            raise ValueError(
                f"Roles: {first} has hadamard={a.hadamard} in {gemm} and {second} has {b.hadamard}; a rotation cancels "
                "only if both operands have it, with the same signs"
            )

    @property
    def draws_signs(self) -> bool:
        """Whether wgrad's operands are rotated with signs that are drawn."""
        return _drawn(self.operand("input", "wgrad"))

    @property
    def draws_for_weight(self) -> bool:
        """Whether quantising the weight takes random bits, or signs that are drawn, which dgrad's gradient shares."""
        role = self.operand("weight", "dgrad")
        return role is not None and (role.rounding != "nearest" or _drawn(role))

    def _check_eden(self) -> None:
        """Raises ValueError if an operand that is not rotated has the rounding that needs it."""
        for gemm in ("fprop", "dgrad"):
            for tensor in GEMMS[gemm]:
                own = isinstance(getattr(self, gemm), tuple)
                role = self.operand(tensor, gemm) if own else getattr(self, tensor)
                if role is not None and role.rounding == "eden" and not (own and gemm == "dgrad"):
                    raise ValueError(
                        f'Roles: {tensor} has rounding="eden" in {gemm}, whose operands are not rotated; give such '
                        'roles to a GEMM of the backward pass alone: wgrad=(Role(NVFP4(), "eden", Hadamard()), the '
                        "gradient's alike)"
                    )

    @property
    def drawn(self) -> bool:
        """Whether any operand needs random bits."""
        return any(self.draws(tensor) for tensor in ("input", "gradient"))

    def draws(self, tensor: str) -> bool:
        """Whether a tensor needs random bits."""
        return any(role is not None and role.rounding != "nearest" for role in self.forms(tensor))

    def operands(
        self, gemm: str, backward_override: BackwardOverride = None
    ) -> tuple[Role, Role] | Literal["high_precision", "dequantized"]:
        """The roles of a GEMM's two operands, or where it reads them in high precision.

        `backward_override` is the recipe's; it comes before what the roles say of dgrad and wgrad.
        """
        if gemm != "fprop" and backward_override is not None:
            return backward_override
        if (own := getattr(self, gemm)) is not None:
            return own
        a, b = (self.operand(tensor, gemm) for tensor in GEMMS[gemm])
        return "high_precision" if a is None or b is None else (a, b)

    def forms(self, tensor: str) -> tuple[Role | None, Role | None]:
        """The roles of a tensor ("input", "weight" or "gradient") rowwise and columnwise, whatever its partners are."""
        return self.operand(tensor, _FORMS[tensor][0]), self.operand(tensor, _FORMS[tensor][1])

    def operand(self, tensor: str, gemm: str) -> Role | None:
        """The role of a tensor in one of its GEMMs, whatever its partner there is."""
        own = getattr(self, gemm)
        if own is None:
            role = getattr(self, tensor)
            return role if role is None or gemm == "wgrad" else role.without_rotation
        return own[GEMMS[gemm].index(tensor)] if isinstance(own, tuple) else None

    @property
    def served(self) -> Role | None:
        """The role of the weight, if training computes what serving does: quantisation-aware training."""
        return self.weight if self.ste is not None or self.serves_inputs else None

    @property
    def serves_inputs(self) -> bool:
        """Whether it does so with quantised inputs; their gradients, and the weight's, pass the rounding unchanged."""
        return self.weight is not None and isinstance(self.fprop, tuple) and self.dgrad == self.wgrad == "dequantized"

    @property
    def quantizes_weight(self) -> bool:
        """Whether any GEMM may read a quantised weight."""
        return self.forms("weight") != (None, None)

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats of all operands, each once."""
        roles = (role for tensor in _FORMS for role in self.forms(tensor))
        return tuple(dict.fromkeys(role.format for role in roles if role is not None))


@dataclasses.dataclass(frozen=True)
class MMParams:
    """Settings of one GEMM.

    Attributes:
        use_split_accumulator: True: every product is accumulated in float32. False lets a GPU's tensor cores use their
            faster, less precise accumulator if they have one; a GEMM without one (all on the CPU) is unchanged.
    """

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        check_field(self, "use_split_accumulator", (True, False))


@dataclasses.dataclass(frozen=True)
class QParams:
    """How one operand is quantised, as far as it differs from the recipe's default.

    Attributes:
        power_2_scale: scales are powers of two.
        amax_epsilon: the smallest amax that is used for scales.
        random_hadamard_transform: rotate the columnwise form.
        stochastic_rounding: round codes stochastically.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        for field in ("power_2_scale", "random_hadamard_transform", "stochastic_rounding"):
            check_field(self, field, (True, False))
        check_amax_epsilon("QParams", self.amax_epsilon)

    def role(self, fmt: Any) -> Role:
        """The role of an operand in this format."""
        fmt = dataclasses.replace(fmt, power_of_two=self.power_2_scale, amax_epsilon=self.amax_epsilon)
        rounding: Literal["nearest", "stochastic"] = "stochastic" if self.stochastic_rounding else "nearest"
        return Role(fmt, rounding, Hadamard() if self.random_hadamard_transform else None)


def for_all_layers(roles: Callable[..., Roles]) -> Callable[..., Roles]:
    """The method `roles` of recipes that say the same of all layers: equal recipes are asked once."""
    asked_once = functools.lru_cache(maxsize=64)(roles)

    @functools.wraps(roles)
    def of_layer(self: Any, module_type: str = "linear", name: str = "") -> Roles:
        return asked_once(self)

    return of_layer


class Recipe:
    """The base class of all recipes.

    Attributes:
        backward_override: None: the backward GEMMs are quantised as the roles say. "high_precision": they are not, and
            read the original input and weight. "dequantized": they are not, and read the decoded operands of the
            forward pass.
        sums: how devices add up the partial sums of the GEMMs.
    """

    backward_override: BackwardOverride
    sums: Any = Sums()

    @property
    def delayed(self) -> DelayedScaling | None:
        """The recipe whose amax histories the layers keep; None for recipes without state."""
        return None

    def applies_to(self, name: str) -> bool:
        """Whether a layer of this name follows the recipe; other layers are computed without one."""
        return True

    def at(self, name: str) -> Recipe | None:
        """The recipe that a layer of this name follows; None for high precision."""
        return self if self.applies_to(name) else None

    def within(self, name: str, use: Use = Use.UNKNOWN) -> Recipe | None:
        """The recipe of a layer of this name and use that is not among the ends of its stack; see `ends`."""
        return self.at(name)

    def ends(self, name: str) -> tuple[int, int] | None:
        """How many of the first and of the last layers of a stack of this name stay in high precision; None: none."""
        return None

    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """The roles of a layer, by its kind (see `QuantizerRole`) and its name."""
        raise NotImplementedError
