"""Eight bits by rows: recipes whose operands are scaled along what their GEMM does not contract, as servers do."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxlowprec.arrays.row_formats import LEAST_SCALE_SERVED, Float8Rows, Int8Rows
from jaxlowprec.ops.sums.kinds import SumKind
from jaxlowprec.recipes.fields import Sums, backward_override, check_field
from jaxlowprec.recipes.roles import BackwardOverride, Recipe, Role, Roles, for_all_layers
from jaxlowprec.recipes.transformer_engine import Fp8Format, check_common, elements_of

Served = Literal["bfloat16", "float16", "float32"]
SERVED = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Float8RowScaling(Recipe):
    """FP8 with a float32 scale per row or column, in all three GEMMs: what vLLM serves as FP8_DYNAMIC, in training.

    | GEMM | contracts | operands, and what has a scale |
    |---|---|---|
    | fprop | K | input: each token; weight: each output channel |
    | dgrad | N | gradient: each token; weight: each input channel |
    | wgrad | tokens | input, gradient: each feature |

    fprop is, to the bit of its operands, what the exported checkpoint computes: the weight is rounded to
    `served_dtype` before it is quantised, and so is its scale; the input has vLLM's least scale.

    Arguments:
        fp8_format: "E4M3" for all operands, or "HYBRID": gradients are E5M2.
        high_precision_wgrad: wgrad reads the original input and gradient.
        served_dtype: of the checkpoint that is exported: "bfloat16", "float16" or "float32".
        backward_override: see `Recipe`; default: the environment's JAXLOWPREC_BACKWARD_OVERRIDE.
        sums: how devices add up partial sums: `Sums`, or one of its values for all GEMMs.

    Raises:
        TypeError, ValueError: a field has another value.

    Source: "FP8 Formats for Deep Learning", arXiv 2209.05433; torchao's "rowwise" and "rowwise_with_gw_hp"; numerics.md
        18.

    >>> import jaxlowprec as jlp
    >>> [str(role.format) for role in jlp.Float8RowScaling().roles().operands("fprop")]
    ['Float8Rows', 'Float8Rows bfloat16']
    """

    fp8_format: Fp8Format = "E4M3"
    high_precision_wgrad: bool = False
    served_dtype: Served = "bfloat16"
    backward_override: BackwardOverride = backward_override()
    sums: Sums | SumKind = Sums()

    def __post_init__(self) -> None:
        check_common(self)
        check_field(self, "high_precision_wgrad", (True, False))
        check_field(self, "served_dtype", SERVED)

    @for_all_layers
    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """The roles of the table above, for every layer."""
        forward, gradient = elements_of(self.fp8_format)
        plain, dy = Role(Float8Rows(forward)), Role(Float8Rows(gradient))
        x = Role(Float8Rows(forward, least_scale=LEAST_SCALE_SERVED))
        return _roles(self, (x, Role(Float8Rows(forward, self.served_dtype))), plain, dy)


@dataclasses.dataclass(frozen=True)
class Int8RowScaling(Recipe):
    """INT8 with a float32 scale per row or column, in all three GEMMs; operands as in `Float8RowScaling`.

    Sums are exact, in int32, so that the products of a step have the same bits on every platform and mesh; fprop is, to
    the bit, what vLLM computes from the exported checkpoint (W8A8).

    Arguments:
        disable_stochastic_rounding: gradients are rounded to nearest.
        high_precision_wgrad, served_dtype: see `Float8RowScaling`.
        backward_override: see `Recipe`; default: the environment's JAXLOWPREC_BACKWARD_OVERRIDE.
        sums: how devices add up partial sums: `Sums`, or one of its values for all GEMMs. "float32" adds up integers.

    Raises:
        TypeError, ValueError: a field has another value.

    Source: "Accurate Quantized Training" (AQT), "SwitchBack", arXiv 2304.13013; numerics.md 18.

    >>> import jaxlowprec as jlp
    >>> [(str(role.format), role.rounding) for role in jlp.Int8RowScaling().roles().operands("wgrad")]
    [('Int8Rows', 'nearest'), ('Int8Rows', 'stochastic')]
    """

    disable_stochastic_rounding: bool = False
    high_precision_wgrad: bool = False
    served_dtype: Served = "bfloat16"
    backward_override: BackwardOverride = backward_override()
    sums: Sums | SumKind = Sums()

    def __post_init__(self) -> None:
        check_common(self)
        check_field(self, "disable_stochastic_rounding", (True, False))
        check_field(self, "high_precision_wgrad", (True, False))
        check_field(self, "served_dtype", SERVED)

    @for_all_layers
    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """The roles of the table of `Float8RowScaling`, for every layer."""
        plain = Role(Int8Rows())
        dy = plain if self.disable_stochastic_rounding else Role(Int8Rows(), "stochastic")
        return _roles(self, (plain, Role(Int8Rows(self.served_dtype))), plain, dy)


def _roles(recipe: Float8RowScaling | Int8RowScaling, fprop: tuple[Role, Role], plain: Role, dy: Role) -> Roles:
    """`plain`: of an input or a weight in the backward pass; `dy`: of a gradient."""
    served = None if recipe.served_dtype == "float32" else recipe.served_dtype
    wgrad: Any = "high_precision" if recipe.high_precision_wgrad else (plain, dy)
    return Roles(None, None, None, served_dtype=served, fprop=fprop, dgrad=(dy, plain), wgrad=wgrad)
