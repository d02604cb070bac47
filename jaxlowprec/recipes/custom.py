"""A recipe made from a function of the layer and the tensor, like Transformer Engine's CustomRecipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal

from jaxlowprec.arguments import shown
from jaxlowprec.arrays.formats import Format
from jaxlowprec.ops.sums.kinds import SumKind
from jaxlowprec.recipes.fields import Sums, backward_override
from jaxlowprec.recipes.roles import GEMMS, BackwardOverride, Recipe, Role, Roles
from jaxlowprec.recipes.transformer_engine import check_common


@dataclasses.dataclass(frozen=True)
class QuantizerRole:
    """The tensor that a `Custom` recipe is asked about.

    Attributes:
        module_type: the kind of layer: "linear", for Dense, Linear, their general forms, einsum and dot_general, or
            "grouped_linear", for `grouped_matmul` and its layers.
        tensor_type: "input", "weight" or "grad_output".
        name: the layer's name, or "".
    """

    module_type: str
    tensor_type: Literal["input", "weight", "grad_output"]
    name: str


@dataclasses.dataclass(frozen=True)
class Custom(Recipe):
    """A recipe of your own: a function from role to format.

    Arguments:
        factory: takes a `QuantizerRole`; returns a format, a `Role`, or None to keep that operand, and the GEMMs that
            it is in, in high precision. Or a dict of these by GEMM: {"fprop": ..., "wgrad": ...} for the input,
            {"fprop": ..., "dgrad": ...} for the weight, {"dgrad": ..., "wgrad": ...} for the gradient. It must be
            hashable and always return the same for the same role: it is called whenever a function is traced. Two
            lambdas are two recipes.
        backward_override: see `Recipe`; default: the environment's JAXLOWPREC_BACKWARD_OVERRIDE.
        sums: how devices add up partial sums: `Sums`, or one of its values for all GEMMs.

    Raises:
        TypeError: the factory is not a hashable function, or returns something else.

    >>> import jaxlowprec as jlp
    >>> def mixed(role):
    ...     return jlp.MXFP4() if role.tensor_type == "weight" else jlp.MXFP8()
    >>> jlp.Custom(mixed).roles("linear", "up").weight.format
    MXFP4(block=(1, 32), scale_rule='up')
    """

    factory: Callable[[QuantizerRole], Format | Role | None | Mapping[str, Format | Role | None]]
    backward_override: BackwardOverride = backward_override()
    sums: Sums | SumKind = Sums()

    def __post_init__(self) -> None:
        check_common(self)
        if not callable(self.factory) or not isinstance(self.factory, Hashable):
            raise TypeError(f"Custom: factory={shown(self.factory)}; needs a hashable function of a QuantizerRole")

    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """The roles that the factory returns."""
        tensor_types: Any = {"input": "input", "weight": "weight", "gradient": "grad_output"}
        asked = {tensor: QuantizerRole(module_type, kind, name) for tensor, kind in tensor_types.items()}
        answers = {tensor: self.factory(role) for tensor, role in asked.items()}
        if not any(isinstance(answer, Mapping) for answer in answers.values()):
            return Roles(**{tensor: _role(asked[tensor], answers[tensor]) for tensor in asked})  # type: ignore[arg-type]

        def role(tensor: str, gemm: str) -> Role | None:
            answer = answers[tensor]
            if not isinstance(answer, Mapping):
                given = _role(asked[tensor], answer)
                return given if given is None or gemm == "wgrad" else given.without_rotation
            needs = [gemm for gemm, operands in GEMMS.items() if tensor in operands]
            if set(answer) != set(needs):
                raise TypeError(
                    f"Custom: the factory answered {shown(answer)} to {asked[tensor]}; a dict needs the keys "
                    f"{' and '.join(map(repr, needs))}"
                )
            return _role(asked[tensor], answer[gemm])

        def pair(gemm: str, operands: tuple[str, str]) -> Any:
            a, b = (role(tensor, gemm) for tensor in operands)
            return "high_precision" if a is None or b is None else (a, b)

        return Roles(None, None, None, **{gemm: pair(gemm, operands) for gemm, operands in GEMMS.items()})


def _role(asked: QuantizerRole, answer: Any) -> Role | None:
    """The role that an answer stands for."""
    if isinstance(answer, Format):
        return Role(answer)
    if answer is not None and not isinstance(answer, Role):
        raise TypeError(
            f"Custom: the factory answered {shown(answer)} to {asked}; needs a format, a Role or None, or a dict of "
            "these by GEMM"
        )
    if answer is not None and answer.rounding == "stochastic" and asked.tensor_type != "grad_output":
        raise ValueError(f"Custom: {asked} rounds {answer.rounding}; that is only for grad_output")
    return answer
