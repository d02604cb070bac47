"""Recipes to test with: one of each kind, with their options, and one for each structure of a layer's program."""

import jax
import numpy as np

import jaxlowprec as jlp
from jaxlowprec.layers import delayed_scaling


def mxfp4_weight(role):
    return jlp.MXFP4() if role.tensor_type == "weight" else jlp.MXFP8()


def mxfp4(role):
    return jlp.MXFP4()


ROTATED = jlp.QParams(random_hadamard_transform=True)
ROTATED_AND_STOCHASTIC = jlp.QParams(random_hadamard_transform=True, stochastic_rounding=True)

BASE = {
    "mxfp8": jlp.MXFP8BlockScaling(),
    "fp8_block": jlp.Float8BlockScaling(),
    "fp8_current": jlp.Float8CurrentScaling(),
    "fp8_delayed": jlp.DelayedScaling(amax_history_len=3),
}
OPTIONS = {
    "mxfp8 hybrid 2d": jlp.MXFP8BlockScaling(fp8_format="HYBRID", enable_2d_quantization=True),
    "fp8_block hybrid float32 scales": jlp.Float8BlockScaling(use_f32_scales=True, fp8_format="HYBRID"),
    "fp8_block input 2d": jlp.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "fp8_block gradient 2d": jlp.Float8BlockScaling(w_block_scaling_dim=1, grad_block_scaling_dim=2),
    "fp8_current powers of two": jlp.Float8CurrentScaling(use_power_2_scales=True, fp8_format="E4M3"),
    "fp8_current rotated stochastic": jlp.Float8CurrentScaling(
        fp8_quant_fwd_inp=ROTATED, fp8_quant_bwd_grad=ROTATED_AND_STOCHASTIC
    ),
    "fp8_delayed margin": jlp.DelayedScaling(
        margin=2, amax_history_len=3, amax_compute_algo="most_recent", fp8_format="E4M3"
    ),
    "mxfp4 weight": jlp.Custom(mxfp4_weight),
    "mxfp4": jlp.Custom(mxfp4),
}
ALL = BASE | OPTIONS


def of_dgrad(role):
    gemms = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
    return {gemm: jlp.MXFP8() if gemm == "dgrad" else None for gemm in gemms[role.tensor_type]}


RECIPES = {
    "bf16": None,
    "nvfp4": jlp.NVFP4BlockScaling(),
    "nvfp4 row-scaled": jlp.NVFP4BlockScaling(row_scaled_activation=True),
    **ALL,
    "mxfp8 hybrid": jlp.MXFP8BlockScaling(fp8_format="HYBRID"),
    "int4_qat": jlp.Int4QAT(group_size=16),
    "int4_qat clipped": jlp.Int4QAT(group_size=16, symmetric=False, ste="clipped"),
    "nvfp4_qat": jlp.WeightQAT(jlp.NVFP4()),
    "nvfp4_qat 2d": jlp.WeightQAT(jlp.NVFP4((16, 16))),
    "nvfp4 four over six": jlp.NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all"),
    "nvfp4_qat search": jlp.WeightQAT(jlp.NVFP4(scale_rule="search")),
    "mxfp8_qat clipped": jlp.WeightQAT(jlp.MXFP8(scale_rule="floor"), ste="clipped"),
    "high precision forward": jlp.NVFP4BlockScaling(forward_override="high_precision"),
    "high precision backward": jlp.NVFP4BlockScaling(backward_override="high_precision"),
    "dequantized backward": jlp.MXFP8BlockScaling(backward_override="dequantized"),
    "dgrad only": jlp.Custom(of_dgrad),
}


def recipes(*names):
    """Some of RECIPES, by name."""
    return {name: RECIPES[name] for name in names}


STRUCTURES = recipes(
    *("bf16", "nvfp4", "nvfp4 row-scaled", "mxfp8", "fp8_delayed", "int4_qat clipped", "nvfp4_qat"),
    *("high precision forward", "high precision backward", "dequantized backward", "dgrad only"),
)
"""A recipe for each structure of a layer's program. Recipes of one structure differ in what operations do, which their
own tests try; tests/recipes/test_structures.py says which recipe has which structure and which formats."""


def structure_of(recipe):
    """What a layer does under a recipe. Formats, roundings and rotations it hands to the operations, whose tests have
    each of them."""
    if recipe is None:
        return "high precision"
    roles = recipe.roles()
    if roles.ste is not None:
        return "weight only" + (f", served in {roles.served_dtype}" if roles.served_dtype else "")
    if recipe.delayed is not None:
        return "delayed scaling"
    if roles.fprop is not None:
        if roles.fprop != "high_precision":
            return "forward with roles of its own"
        return "dgrad only" if roles.wgrad == "high_precision" else "forward in high precision"
    if recipe.backward_override is not None:
        return f"backward {recipe.backward_override}"
    amaxes = any(role.format.scaling in ("two_level", "tensor") for role in (roles.input, roles.weight, roles.gradient))
    return "amaxes, then three GEMMs" if amaxes else "three GEMMs"


def state_for(recipe):
    """A state of delayed scaling whose histories know an amax each, where the recipe has any; else None."""
    if recipe.delayed is None:
        return None
    state = delayed_scaling.init_state(recipe)
    for tensor, amax in (("input", 48.0), ("kernel", 50.0), ("output_grad", 30.0)):
        state[f"{tensor}_amax_history"] = jax.device_put(np.float32([amax, 0.0, amax / 3]))
    return state


def encode_scales(recipe, state):
    """What each tensor is multiplied by under delayed scaling, else None."""
    if state is None:
        return dict.fromkeys(delayed_scaling.TENSORS)
    roles = recipe.roles()
    formats = (roles.input.format, roles.weight.format, roles.gradient.format)
    return {
        tensor: delayed_scaling.encode_scale(recipe, state, tensor, fmt.maximum)
        for tensor, fmt in zip(delayed_scaling.TENSORS, formats, strict=True)
    }


def without_state(result, state):
    """The product of a call with this state."""
    return result if state is None else result[0]
