"""NVFP4 with less noise in the gradients of weights than Transformer Engine's recipe has."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxlowprec.arrays.formats import NVFP4, ScaleRule
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.sums.kinds import SumKind
from jaxlowprec.recipes.fields import Sums, backward_override, check_field, check_one_override, check_sums
from jaxlowprec.recipes.roles import BackwardOverride, ForwardOverride, Recipe, Role, Roles, for_all_layers


@dataclasses.dataclass(frozen=True)
class NVFP4Eden(Recipe):
    """NVFP4 whose backward GEMMs read operands of MS-EDEN, and whose block scales are chosen for the least error.

    | GEMM | operand | blocks | scales | rounding | rotated |
    |---|---|---|---|---|---|
    | fprop | input, weight | 1x16 | by `scale_rule` | nearest | no |
    | dgrad | gradient, weight as fprop reads it | 1x16 | by `scale_rule` | eden | yes |
    | wgrad | input, gradient | 1x16 | by `scale_rule` | eden | yes |

    Codes of eden round to nearest, and scales, which make up for the codes' errors, stochastically: so the product is
    unbiased over rotations, and its noise is about 0.6 of that of `NVFP4BlockScaling`. The signs of the rotations are
    drawn anew from the layer's key, which should be another one in each step; without a key, from the amax of the
    input and of the weight. The weight of dgrad is quantised from the codes that fprop reads, decoded: so the gradient
    is that of the weight that was used.

    With `weight_block="16x16"` only the scales and wgrad differ from `NVFP4BlockScaling`: fprop and dgrad read one
    weight, in square blocks, and dgrad's gradient is rounded stochastically, by scales of the rule "six". Layers of
    experts need that, `rotation=16` and `signs="fixed"`.

    Arguments:
        weight_block: "1x16"; or "16x16", see above.
        scale_rule: see `NVFP4`.
        eden: "both" operands of dgrad and wgrad; or the "gradient" alone: then the other one rounds to nearest, by
            scales of the rule "six".
        rotation: elements that a rotation mixes: 16, 32, 64 or 128.
        signs: "drawn"; or "fixed", the same in all steps: then a part of the error is the same, too.
        requantize_input: wgrad's input, too, is quantised from the codes that fprop reads, as in Quartet II: with more
            error.
        backward_override: see `Recipe`; default: the environment's JAXLOWPREC_BACKWARD_OVERRIDE.
        forward_override: see `NVFP4BlockScaling`. The weight of dgrad then is quantised from the master weight.
        sums: how devices add up partial sums: `Sums`, or one of its values for all GEMMs.

    Raises:
        TypeError, ValueError: a field has another value.

    Source: "Quartet II", arXiv 2601.22813; "Four Over Six", arXiv 2512.02010; numerics.md 13 to 15. With
        `scale_rule="six", eden="gradient"` the operands are those of torchao's NVFP4Recipe.V2; with
        `scale_rule="four_over_six", requantize_input=True` those of Quartet II.

    >>> import jaxlowprec as jlp
    >>> jlp.NVFP4Eden().roles().operands("wgrad")[0].hadamard
    Hadamard(size=128, signs='drawn')
    """

    weight_block: Literal["1x16", "16x16"] = "1x16"
    scale_rule: ScaleRule = "four_over_six_mse"
    eden: Literal["both", "gradient"] = "both"
    rotation: Literal[16, 32, 64, 128] = 128
    signs: Literal["drawn", "fixed"] = "drawn"
    requantize_input: bool = False
    backward_override: BackwardOverride = backward_override()
    forward_override: ForwardOverride = None
    sums: Sums | SumKind = Sums()

    def __post_init__(self) -> None:
        check_field(self, "weight_block", ("1x16", "16x16"))
        check_field(self, "scale_rule", ("six", "four_over_six", "four_over_six_mse", "search"))
        check_field(self, "eden", ("both", "gradient"))
        check_field(self, "rotation", (16, 32, 64, 128))
        check_field(self, "signs", ("drawn", "fixed"))
        check_field(self, "requantize_input", (True, False))
        check_field(self, "backward_override", (None, "high_precision", "dequantized"))
        check_one_override(self)
        check_sums(self)

    @for_all_layers
    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """The roles of the table above, for every layer."""
        rows = NVFP4(scale_rule=self.scale_rule)
        tiled = self.weight_block == "16x16"
        weight = Role(NVFP4((16, 16), self.scale_rule) if tiled else rows)
        rotation = Hadamard(self.rotation, "drawn") if self.signs == "drawn" else Hadamard(self.rotation)
        gradient = Role(rows, "eden", rotation)
        other = gradient if self.eden == "both" else Role(NVFP4(), "nearest", rotation)
        again: tuple[Literal["input", "weight"], ...] = ("input",) if self.requantize_input else ()
        return Roles(
            Role(rows),
            weight,
            Role(NVFP4(), "stochastic"),
            fprop=self.forward_override,
            dgrad=None if tiled else (gradient, other),
            wgrad=(other, gradient),
            requantized=again if tiled else (*again, "weight"),
        )
