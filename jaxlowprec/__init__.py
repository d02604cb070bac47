"""Low-precision training and serving for JAX: the same bits on every machine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxlowprec import checkpoint_policies, delayed_scaling, layouts, ops, telemetry
from jaxlowprec.arrays.formats import MXFP4, MXFP8, NVFP4, Float8Block, Float8Tensor, Int4
from jaxlowprec.arrays.hadamard import DEFAULT_SIGNS, Hadamard
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.arrays.row_formats import Float8Rows, Int8Rows
from jaxlowprec.layers.dot_general import dot_general, einsum
from jaxlowprec.layers.linear import linear, quantize_kernel
from jaxlowprec.layers.product import QuantizedKernel
from jaxlowprec.layers.residuals import CHECKPOINT_NAMES
from jaxlowprec.ops.dequantize import dequantize
from jaxlowprec.ops.fake_quantize import fake_quantize
from jaxlowprec.ops.hadamard import hadamard_transform
from jaxlowprec.ops.kv_cache import KVCache
from jaxlowprec.ops.norms.api import layer_norm, rms_norm
from jaxlowprec.ops.quantize.api import quantize, quantize_both
from jaxlowprec.ops.scaled_matmul.api import scaled_matmul
from jaxlowprec.recipes.autocast import FROM_CONTEXT, autocast, current_kv_cache, current_recipe
from jaxlowprec.recipes.composed import PerGemm, PerLayer
from jaxlowprec.recipes.custom import Custom, QuantizerRole
from jaxlowprec.recipes.eden import NVFP4Eden
from jaxlowprec.recipes.fields import Sums
from jaxlowprec.recipes.qat import DEFAULT_EXCLUDE, Int4QAT, WeightQAT
from jaxlowprec.recipes.roles import MMParams, QParams, Recipe, Role, Roles
from jaxlowprec.recipes.rows import Float8RowScaling, Int8RowScaling
from jaxlowprec.recipes.schedules import RecipeSchedule, recipe_schedule
from jaxlowprec.recipes.transformer_engine import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

if TYPE_CHECKING:
    from jaxlowprec import checkpoints, debug, decoder, kv, linen, lora, moe, nnx, optim, rl, traffic, weight_sync
    from jaxlowprec.diagnostics.support import Supported, supported
    from jaxlowprec.layers.collectives import all_gather_quantized, all_to_all_quantized
    from jaxlowprec.layers.fused_mlp import mlp
    from jaxlowprec.layers.gathered_kernel import all_gather_kernel
    from jaxlowprec.layers.grouped_matmul import grouped_matmul, ragged_dot
    from jaxlowprec.layers.grouped_mlp import grouped_mlp
    from jaxlowprec.layers.shared_input import linears
    from jaxlowprec.linen.hooks import flax_dot_general_cls
    from jaxlowprec.models.accumulation import accumulate_gradients
    from jaxlowprec.models.explain import explain
    from jaxlowprec.models.find_policy import Policy, find_policy
    from jaxlowprec.models.oscillation import OsciReset
    from jaxlowprec.models.quantize_matmuls import quantize_matmuls
    from jaxlowprec.models.serving import quantize_params
    from jaxlowprec.ops.activations.api import geglu, gelu, relu_squared, silu, swiglu
    from jaxlowprec.ops.scaled_matmul.collective import all_gather_matmul, matmul_reduce_scatter
    from jaxlowprec.ops.sums.api import all_reduce_quantized, reduce_scatter_quantized
    from jaxlowprec.wiring.native import disabled_checks

__all__ = [
    "CHECKPOINT_NAMES",
    "DEFAULT_EXCLUDE",
    "DEFAULT_SIGNS",
    "FROM_CONTEXT",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "Custom",
    "DelayedScaling",
    "Float8Block",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowScaling",
    "Float8Rows",
    "Float8Tensor",
    "Hadamard",
    "Int4",
    "Int4QAT",
    "Int8RowScaling",
    "Int8Rows",
    "KVCache",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "NVFP4Eden",
    "OsciReset",
    "PerGemm",
    "PerLayer",
    "Policy",
    "QParams",
    "QuantizedArray",
    "QuantizedKernel",
    "QuantizerRole",
    "Recipe",
    "RecipeSchedule",
    "Role",
    "Roles",
    "Sums",
    "Supported",
    "WeightQAT",
    "accumulate_gradients",
    "all_gather_kernel",
    "all_gather_matmul",
    "all_gather_quantized",
    "all_reduce_quantized",
    "all_to_all_quantized",
    "autocast",
    "checkpoint_policies",
    "checkpoints",
    "current_kv_cache",
    "current_recipe",
    "debug",
    "decoder",
    "delayed_scaling",
    "dequantize",
    "disabled_checks",
    "dot_general",
    "einsum",
    "explain",
    "fake_quantize",
    "find_policy",
    "flax_dot_general_cls",
    "geglu",
    "gelu",
    "grouped_matmul",
    "grouped_mlp",
    "hadamard_transform",
    "kv",
    "layer_norm",
    "layouts",
    "linear",
    "linears",
    "linen",
    "lora",
    "matmul_reduce_scatter",
    "mlp",
    "moe",
    "nnx",
    "ops",
    "optim",
    "quantize",
    "quantize_both",
    "quantize_kernel",
    "quantize_matmuls",
    "quantize_params",
    "ragged_dot",
    "recipe_schedule",
    "reduce_scatter_quantized",
    "relu_squared",
    "rl",
    "rms_norm",
    "scaled_matmul",
    "silu",
    "supported",
    "swiglu",
    "telemetry",
    "traffic",
    "weight_sync",
]


_MODULES = {
    *("checkpoints", "debug", "decoder", "kv", "linen", "lora", "moe", "nnx", "optim", "rl", "traffic", "weight_sync"),
}
_FROM = {
    "OsciReset": "models.oscillation",
    "Policy": "models.find_policy",
    "Supported": "diagnostics.support",
    "accumulate_gradients": "models.accumulation",
    "all_gather_kernel": "layers.gathered_kernel",
    "all_gather_matmul": "ops.scaled_matmul.collective",
    "all_gather_quantized": "layers.collectives",
    "all_reduce_quantized": "ops.sums.api",
    "all_to_all_quantized": "layers.collectives",
    "disabled_checks": "wiring.native",
    "explain": "models.explain",
    "find_policy": "models.find_policy",
    "flax_dot_general_cls": "linen.hooks",
    "geglu": "ops.activations.api",
    "gelu": "ops.activations.api",
    "grouped_matmul": "layers.grouped_matmul",
    "grouped_mlp": "layers.grouped_mlp",
    "linears": "layers.shared_input",
    "matmul_reduce_scatter": "ops.scaled_matmul.collective",
    "mlp": "layers.fused_mlp",
    "quantize_matmuls": "models.quantize_matmuls",
    "quantize_params": "models.serving",
    "ragged_dot": "layers.grouped_matmul",
    "reduce_scatter_quantized": "ops.sums.api",
    "relu_squared": "ops.activations.api",
    "silu": "ops.activations.api",
    "supported": "diagnostics.support",
    "swiglu": "ops.activations.api",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used, if it needs Flax, or sockets and files, or few programs use it."""
    if name in _MODULES:
        return importlib.import_module(f"jaxlowprec.{name}")
    if name in _FROM:
        return getattr(importlib.import_module(f"jaxlowprec.{_FROM[name]}"), name)
    if name == "__version__":
        from importlib import metadata  # it loads the parser of e-mails

        return metadata.version("jaxlowprec")
    raise AttributeError(f"module 'jaxlowprec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
