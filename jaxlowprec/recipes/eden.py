"""NVFP4 with less noise in the gradients of weights than Transformer Engine's recipe has."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxlowprec.arrays.formats import NVFP4, ScaleRule
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.recipes.fields import backward_override, check_field, check_one_override
from jaxlowprec.recipes.roles import BackwardOverride, ForwardOverride, Recipe, Role, Roles


@dataclasses.dataclass(frozen=True)
class NVFP4Eden(Recipe):
    """NVFP4 whose wgrad reads operands of MS-EDEN, and whose block scales are chosen for the least error.

    | GEMM | operand | blocks | scales | rounding | rotated |
    |---|---|---|---|---|---|
    | fprop | input | 1x16 | by `scale_rule` | nearest | no |
    | fprop, dgrad | weight | 16x16 | by `scale_rule` | nearest | no |
    | dgrad | gradient | 1x16 | "six" | stochastic | no |
    | wgrad | input, gradient | 1x16 | by `scale_rule` | eden | yes |

    Codes of eden round to nearest, and scales, which make up for the codes' errors, stochastically: so the product is
    unbiased over rotations, and its noise is about 0.6 of that of `NVFP4BlockScaling`. The signs of the rotation are
    drawn anew from the layer's key, which should be another one in each step; without a key, from the input's amax.

    Layers of experts need `rotation=16, signs="fixed"`.

    Arguments:
        disable_2d_quantization: weights have 1x16 blocks, and are quantised separately for fprop and dgrad.
        scale_rule: see `NVFP4`.
        rotation: elements that a rotation of wgrad's operands mixes: 16, 32, 64 or 128.
        signs: "drawn"; or "fixed", the same in all steps: then a part of the error is the same, too.
        backward_override: see `Recipe`; default: the environment's JAXLOWPREC_BACKWARD_OVERRIDE.
        forward_override: see `NVFP4BlockScaling`.

    Raises:
        TypeError, ValueError: a field has another value.

    Source: "Quartet II", arXiv 2601.22813; "Four Over Six", arXiv 2512.02010; numerics.md 13 to 15.

    >>> import jaxlowprec as jlp
    >>> jlp.NVFP4Eden().roles().operands("wgrad")[0].hadamard
    Hadamard(size=128, signs='drawn')
    """

    disable_2d_quantization: bool = False
    scale_rule: ScaleRule = "four_over_six_mse"
    rotation: Literal[16, 32, 64, 128] = 128
    signs: Literal["drawn", "fixed"] = "drawn"
    backward_override: BackwardOverride = backward_override()
    forward_override: ForwardOverride = None

    def __post_init__(self):
        check_field(self, "disable_2d_quantization", (True, False))
        check_field(self, "scale_rule", ("six", "four_over_six", "four_over_six_mse", "search"))
        check_field(self, "rotation", (16, 32, 64, 128))
        check_field(self, "signs", ("drawn", "fixed"))
        check_field(self, "backward_override", (None, "high_precision", "dequantized"))
        check_one_override(self)

    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """The roles of the table above, for every layer."""
        fmt = NVFP4(scale_rule=self.scale_rule)
        weight = NVFP4((1, 16) if self.disable_2d_quantization else (16, 16), self.scale_rule)
        rotation = Hadamard(self.rotation, "drawn") if self.signs == "drawn" else Hadamard(self.rotation)
        operand = Role(fmt, "eden", rotation)
        return Roles(
            Role(fmt),
            Role(weight),
            Role(NVFP4(), "stochastic"),
            fprop=self.forward_override,
            wgrad=(operand, operand),
        )
