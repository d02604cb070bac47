"""The recipes of Transformer Engine, with its names, fields and defaults; `forward_override` and `sums` are ours."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxlowprec.arguments import is_one_of, shown
from jaxlowprec.arrays.formats import MXFP8, NVFP4, Float8, Float8Block, Float8Tensor, ScaleRule
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.sums.kinds import SumKind
from jaxlowprec.recipes.fields import Sums, backward_override, check_field, check_one_override, check_sums, flag
from jaxlowprec.recipes.roles import (
    BackwardOverride,
    ForwardOverride,
    MMParams,
    QParams,
    Recipe,
    Role,
    Roles,
    for_all_layers,
)

Fp8Format = Literal["E4M3", "HYBRID"]
FourOverSix = Literal["none", "weights", "activations", "all"]


def check_common(recipe: Any) -> None:
    """Checks the fields that several recipes share."""
    fields = {f.name for f in dataclasses.fields(recipe)}
    name = type(recipe).__name__
    check_field(recipe, "backward_override", (None, "high_precision", "dequantized"))
    check_sums(recipe)
    if "fp8_format" in fields:
        if is_one_of(recipe.fp8_format, ("E5M2",)):
            raise ValueError(
                f'{name}: fp8_format="E5M2"; no GEMM takes E5M2 x E5M2: use "E4M3", or "HYBRID" for gradients'
            )
        check_field(recipe, "fp8_format", ("E4M3", "HYBRID"))
    for field in ("fp8_dpa", "fp8_mha"):
        if field in fields:
            check_field(recipe, field, (True, False))
            if getattr(recipe, field):
                raise NotImplementedError(f"{name}: {field}=True; attention is not quantised here: leave it False")
    for field in fields:
        value = getattr(recipe, field)
        if field.startswith("fp8_gemm_") and not isinstance(value, MMParams):
            raise TypeError(f"{name}: {field}={shown(value)}; needs a jaxlowprec.MMParams")
        if field.startswith("fp8_quant_") and value is not None and not isinstance(value, QParams):
            raise TypeError(f"{name}: {field}={shown(value)}; needs a jaxlowprec.QParams or None")
    for field in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight"):
        if field in fields and (given := getattr(recipe, field)) is not None and given.stochastic_rounding:
            raise ValueError(f"{name}: {field} has stochastic_rounding=True; it is only for gradients")
    if "fp8_quant_fwd_inp" in fields:
        rotated = [getattr(recipe, f"fp8_quant_{r}") or QParams() for r in ("fwd_inp", "fwd_weight", "bwd_grad")]
        x, w, dy = (q.random_hadamard_transform for q in rotated)
        if w or x != dy:
            raise ValueError(
                f"{name}: random_hadamard_transform of input, weight and gradient is {x}, {w}, {dy}; it cancels in "
                "wgrad: set it for input and gradient, or for none"
            )


def elements_of(fp8_format: Fp8Format) -> tuple[Float8, Float8]:
    """Element types of the forward operands and of the gradients."""
    return "e4m3", "e5m2" if fp8_format == "HYBRID" else "e4m3"


@dataclasses.dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """NVIDIA's NVFP4 training recipe: all three GEMMs of a linear on 4-bit operands.

    | role | blocks | rounding | rotated in wgrad |
    |---|---|---|---|
    | input | 1x16 | nearest | yes |
    | weight | 16x16 | nearest | no |
    | gradient | 1x16 | stochastic | yes |

    Arguments:
        disable_rht: no random Hadamard transform of the wgrad operands.
        disable_stochastic_rounding: gradients round to nearest.
        disable_2d_quantization: weights have 1x16 blocks, and are quantised separately for fprop and dgrad.
        row_scaled_activation: fprop's input has an amax for each row ("per-token") instead of one for the tensor. So
            tokens do not couple: a token's result does not depend on the tokens beside it. wgrad's input stays as in
            the table.
        nvfp4_4over6: which tensors take the better of two scales in each block, see `NVFP4.scale_rule`: "none",
            "weights", "activations" (the inputs; needs disable_rht=True) or "all". Never gradients.
        nvfp4_4over6_err_mode: what they are compared by: "MAE", absolute errors, or "MSE", squared ones.
        backward_override: see `Recipe`.
        forward_override: "high_precision": fprop reads the original operands, in the input's dtype; dgrad and wgrad are
            quantised as ever. For the last steps of a run, see `recipe_schedule`. For other recipes, give
            `PerGemm` no recipe for fprop: `PerGemm(dgrad=recipe, wgrad=recipe)`.
        sums: how devices add up partial sums: `Sums`, or one of its values for all GEMMs.

    The default of a flag is 0, unless the environment sets it when the recipe is made: JAXLOWPREC_NVFP4_DISABLE_RHT,
    JAXLOWPREC_NVFP4_DISABLE_STOCHASTIC_ROUNDING, JAXLOWPREC_NVFP4_DISABLE_2D_QUANTIZATION,
    JAXLOWPREC_NVFP4_ROW_SCALED_ACTIVATION, JAXLOWPREC_BACKWARD_OVERRIDE.

    Raises:
        TypeError: a field that is not listed here, or is not a bool.
        ValueError: a field has another value; an environment variable that is neither 0 nor 1; or both overrides are
            given, so that nothing would be quantised.

    Source: "Pretraining Large Language Models with NVFP4", arXiv 2509.25149; "Four Over Six", arXiv 2512.02010.
    """

    disable_rht: bool = flag("NVFP4_DISABLE_RHT")
    disable_stochastic_rounding: bool = flag("NVFP4_DISABLE_STOCHASTIC_ROUNDING")
    disable_2d_quantization: bool = flag("NVFP4_DISABLE_2D_QUANTIZATION")
    row_scaled_activation: bool = flag("NVFP4_ROW_SCALED_ACTIVATION")
    nvfp4_4over6: FourOverSix = "none"
    nvfp4_4over6_err_mode: Literal["MAE", "MSE"] = "MAE"
    backward_override: BackwardOverride = backward_override()
    forward_override: ForwardOverride = None
    sums: Sums | SumKind = Sums()

    def __post_init__(self) -> None:
        check_common(self)
        for field in ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization", "row_scaled_activation"):
            check_field(self, field, (True, False))
        check_field(self, "nvfp4_4over6", ("none", "weights", "activations", "all"))
        check_field(self, "nvfp4_4over6_err_mode", ("MAE", "MSE"))
        if self.nvfp4_4over6 in ("activations", "all") and not self.disable_rht:
            raise ValueError(
                f'NVFP4BlockScaling: nvfp4_4over6="{self.nvfp4_4over6}" and disable_rht=False; scales are not chosen '
                'for inputs that are rotated for wgrad: use nvfp4_4over6="weights", or disable_rht=True'
            )
        check_one_override(self)
        if self.forward_override is not None and self.row_scaled_activation:
            raise ValueError(
                f"NVFP4BlockScaling: forward_override={self.forward_override!r} and row_scaled_activation=True, which "
                "says how fprop quantises its input; leave one of them out"
            )

    @for_all_layers
    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """The roles of the table above, for every layer."""
        rotation = None if self.disable_rht else Hadamard()
        chosen: ScaleRule = "four_over_six" if self.nvfp4_4over6_err_mode == "MAE" else "four_over_six_mse"

        def rule(tensors: FourOverSix) -> ScaleRule:
            return chosen if self.nvfp4_4over6 in (tensors, "all") else "six"

        weight = Role(NVFP4((1, 16) if self.disable_2d_quantization else (16, 16), rule("weights")))
        rows = Role(NVFP4(scale_rule=rule("activations"), row_scaled=True))
        return Roles(
            Role(NVFP4(scale_rule=rule("activations")), hadamard=rotation),
            weight,
            Role(NVFP4(), "nearest" if self.disable_stochastic_rounding else "stochastic", rotation),
            fprop=(rows, weight) if self.row_scaled_activation else self.forward_override,
        )


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8: 8-bit floats with a power of two per 32 elements, in all three GEMMs.

    Arguments:
        fp8_format: "E4M3" for all operands, or "HYBRID": gradients are E5M2.
        enable_2d_quantization: weights have 32x32 blocks, so that fprop and dgrad use the same weight.
        margin, fp8_dpa, fp8_mha: exist for Transformer Engine's signature; values other than the defaults raise.
        backward_override: see `Recipe`; default: the environment's JAXLOWPREC_BACKWARD_OVERRIDE.
        sums: how devices add up partial sums: `Sums`, or one of its values for all GEMMs.

    Raises:
        TypeError, ValueError, NotImplementedError: a field has a value without effect or is of another type.

    Source: "Recipes for Pre-training LLMs with MXFP8", arXiv 2506.08027.
    """

    margin: int = 0
    fp8_format: Fp8Format = "E4M3"
    fp8_dpa: bool = False
    fp8_mha: bool = False
    enable_2d_quantization: bool = False
    backward_override: BackwardOverride = backward_override()
    sums: Sums | SumKind = Sums()

    def __post_init__(self) -> None:
        check_common(self)
        check_field(self, "enable_2d_quantization", (True, False))
        if not is_one_of(self.margin, (0,)):
            raise ValueError(f"MXFP8BlockScaling: margin={shown(self.margin)}; block scales have no margin: leave it 0")

    @for_all_layers
    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """Roles with blocks of 1x32, the same for all layers."""
        forward, gradient = elements_of(self.fp8_format)
        weight = MXFP8(forward, (32, 32) if self.enable_2d_quantization else (1, 32))
        return Roles(Role(MXFP8(forward)), Role(weight), Role(MXFP8(gradient)))


@dataclasses.dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """Blockwise FP8, as in DeepSeek-V3: a float32 scale per 1x128 or 128x128 elements, in all three GEMMs.

    Arguments:
        use_f32_scales: scales may be any float32, not only powers of two; default:
            JAXLOWPREC_FP8_BLOCK_SCALING_FP32_SCALES.
        fp8_format: "E4M3" for all operands, or "HYBRID": gradients are E5M2.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1 for 1x128 blocks, 2 for 128x128; no GEMM
            takes 128x128 on both sides.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: the split accumulator is always on.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: `QParams` of an operand; None: the recipe's scales.
            Both operands of a GEMM must agree in power_2_scale.
        fp8_dpa, fp8_mha: True raises.
        backward_override: see `Recipe`; default: the environment's JAXLOWPREC_BACKWARD_OVERRIDE.
        sums: how devices add up partial sums: `Sums`, or one of its values for all GEMMs.

    Raises:
        TypeError, ValueError, NotImplementedError: a field has a value without effect or is of another type.

    Source: "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.3.
    """

    use_f32_scales: bool = flag("FP8_BLOCK_SCALING_FP32_SCALES")
    fp8_format: Fp8Format = "E4M3"
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = backward_override()
    sums: Sums | SumKind = Sums()

    def __post_init__(self) -> None:
        check_common(self)
        check_field(self, "use_f32_scales", (True, False))
        dims = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
        for dim in dims:
            check_field(self, dim, (1, 2))
        two = [dim for dim in dims if getattr(self, dim) == 2]
        if len(two) > 1:
            raise ValueError(
                f"Float8BlockScaling: {' and '.join(two)} are 2; no GEMM takes 128x128 blocks on both sides: use 1"
            )
        for gemm in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            if not getattr(self, gemm).use_split_accumulator:
                raise ValueError(f"Float8BlockScaling: {gemm} has use_split_accumulator=False; it is always on here")
        scales = {self._quantization(role).power_2_scale for role in ("fwd_inp", "fwd_weight", "bwd_grad")}
        if len(scales) > 1:
            raise ValueError(
                "Float8BlockScaling: fp8_quant_* differ in power_2_scale; operands of a GEMM must agree in it"
            )

    def _quantization(self, role: str) -> QParams:
        return getattr(self, f"fp8_quant_{role}") or QParams(power_2_scale=not self.use_f32_scales)

    @for_all_layers
    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """The roles of every layer: they do not depend on its kind or name."""
        forward, gradient = elements_of(self.fp8_format)

        def role(role: str, element: Float8, dim: int) -> Role:
            return self._quantization(role).role(Float8Block(element, (128, 128) if dim == 2 else (1, 128)))

        return Roles(
            role("fwd_inp", forward, self.x_block_scaling_dim),
            role("fwd_weight", forward, self.w_block_scaling_dim),
            role("bwd_grad", gradient, self.grad_block_scaling_dim),
        )


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """Per-tensor FP8, each tensor scaled by its own amax, in all three GEMMs.

    Arguments:
        use_power_2_scales: scales are powers of two; default: JAXLOWPREC_FP8_CURRENT_SCALING_POWER_2_SCALES.
        fp8_format: "HYBRID": gradients are E5M2; "E4M3" for all operands.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: see `MMParams`.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: `QParams` of an operand; None: the recipe's scales.
        fp8_dpa, fp8_mha: True raises.
        backward_override: see `Recipe`; default: the environment's JAXLOWPREC_BACKWARD_OVERRIDE.
        sums: how devices add up partial sums: `Sums`, or one of its values for all GEMMs.

    Raises:
        TypeError, ValueError, NotImplementedError: a field has a value without effect or is of another type.

    Source: "FP8 Formats for Deep Learning", arXiv 2209.05433.
    """

    use_power_2_scales: bool = flag("FP8_CURRENT_SCALING_POWER_2_SCALES")
    fp8_format: Fp8Format = "HYBRID"
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = backward_override()
    sums: Sums | SumKind = Sums()

    def __post_init__(self) -> None:
        check_common(self)
        check_field(self, "use_power_2_scales", (True, False))

    @for_all_layers
    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """The roles of every layer: they do not depend on its kind or name."""
        forward, gradient = elements_of(self.fp8_format)

        def role(given: QParams | None, element: Float8) -> Role:
            return (given or QParams(power_2_scale=self.use_power_2_scales)).role(Float8Tensor(element))

        return Roles(
            role(self.fp8_quant_fwd_inp, forward),
            role(self.fp8_quant_fwd_weight, forward),
            role(self.fp8_quant_bwd_grad, gradient),
        )


_MARGINS = -112, 134


"""Margins for which the largest element times 2**-margin is finite for E5M2 and normal for E4M3."""


@dataclasses.dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Per-tensor FP8, each tensor scaled by the amaxes of earlier steps, in all three GEMMs.

    It needs state: see `jaxlowprec.delayed_scaling`.

    Arguments:
        margin: scales are 2**-margin times the scale that maps the amax to the largest element; from -112 to 134, so
            that the largest element times 2**-margin is a normal float32 number.
        fp8_format: "HYBRID": gradients are E5M2; "E4M3" for all operands.
        amax_history_len: the number of steps that are remembered, up to 2^20.
        amax_compute_algo: "max" of the history, or "most_recent".
        scaling_factor_compute_algo: only None; a function raises.
        reduce_amax: True: the amax is that of the whole array, for any sharding; False raises.
        fp8_dpa, fp8_mha: True raises.
        backward_override: None; delayed scaling has no other backward pass.
        sums: how devices add up partial sums: `Sums`, or one of its values for all GEMMs.

    Raises:
        TypeError, ValueError, NotImplementedError: a field has a value without effect or is of another type.

    Source: "FP8 Formats for Deep Learning", arXiv 2209.05433; numerics.md 7.
    """

    margin: int = 0
    fp8_format: Fp8Format = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    scaling_factor_compute_algo: None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    sums: Sums | SumKind = Sums()

    def __post_init__(self) -> None:
        check_common(self)
        check_field(self, "amax_compute_algo", ("max", "most_recent"))
        if self.backward_override is not None:
            raise ValueError(f"DelayedScaling: backward_override={shown(self.backward_override)}; needs None")
        if self.scaling_factor_compute_algo is not None:
            raise NotImplementedError("DelayedScaling: scaling_factor_compute_algo is fixed here; needs None")
        if self.reduce_amax is not True:
            raise NotImplementedError(
                f"DelayedScaling: reduce_amax={shown(self.reduce_amax)}; amaxes are of whole arrays: True"
            )
        for field, least, most in (("margin", *_MARGINS), ("amax_history_len", 1, 2**20)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"DelayedScaling: {field}={shown(value)}; needs an int from {least} to {most}")

    @for_all_layers
    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """The roles of every layer: they do not depend on its kind or name."""
        forward, gradient = elements_of(self.fp8_format)
        return Roles(Role(Float8Tensor(forward)), Role(Float8Tensor(forward)), Role(Float8Tensor(gradient)))

    @property
    def delayed(self) -> DelayedScaling:
        """The recipe itself."""
        return self


@dataclasses.dataclass(frozen=True)
class Calibrating(Recipe):
    """High precision that records amaxes for delayed scaling; `autocast(recipe, calibrating=True)` makes it."""

    recipe: DelayedScaling
    backward_override: BackwardOverride = None

    @for_all_layers
    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """No roles: nothing is quantised."""
        return Roles(None, None, None)

    @property
    def delayed(self) -> DelayedScaling:
        """The recipe whose histories are recorded."""
        return self.recipe
