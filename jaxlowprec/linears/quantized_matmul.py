"""A product of quantised operands with its custom_vjp and its residuals: the core of `linear`.

    fprop   y  = x row-quantised            @ w            contracted over K
    dgrad   dx = dy row-quantised           @ w transposed contracted over N
    wgrad   dw = x column-quantised, transposed @ dy column-quantised   contracted over tokens

Each GEMM has its own pair of operands (numerics.md 3). The backward pass keeps x columnwise and w, both quantised,
instead of x and w. They have the checkpoint names of `residuals`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import BLOCK
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.linears import delayed_scaling
from jaxlowprec.linears.operands import Gemms, both_ways, role_of
from jaxlowprec.linears.residuals import (
    CHECKPOINT_NAMES,
    bias_gradient,
    decoded,
    differentiated_once,
    dtype_marker,
    in_profiles,
    named,
    plain_matmul,
    plain_wgrad,
    product,
)
from jaxlowprec.linears.watching.measured import measured_backward, measured_forward
from jaxlowprec.ops.amax.api import amax as tensor_amax
from jaxlowprec.ops.scaled_matmul.api import scaled_matmul, scaled_matmul_of_split_rows
from jaxlowprec.recipes.transformer_engine import DelayedScaling


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("rowwise", "columnwise"), meta_fields=("weight_only",)
)
@dataclasses.dataclass(frozen=True)
class QuantizedKernel:
    """A kernel [..., K, N] quantised once, for every GEMM that reads it. It has one of the two forms, or both.

    Attributes:
        rowwise: blocks along N, for dgrad; None if dgrad is not quantised: it decodes `columnwise` where it has no
            other kernel.
        columnwise: blocks along K, for fprop; None if fprop is not quantised.
        weight_only: whether it is multiplied by inputs in high precision.
    """

    rowwise: QuantizedArray | None
    columnwise: QuantizedArray | None
    weight_only: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., K, N]."""
        form: Any = self.rowwise if self.columnwise is None else self.columnwise
        return form.shape


@dataclasses.dataclass(frozen=True)
class ProductSpec(Gemms):
    """The static description of a product, captured in the forward pass: the backward pass never reads the context.

    It does not contain the layer's name, so equal layers are traced once.

    Attributes:
        delayed: the recipe's `delayed`.
        out_dtype: the dtype of the result.
        shardings: those of x, w and bias, which their gradients get, too; see `out_sharding.sharding_of`.
        out_sharding: the sharding of the result, in explicit mode.
        rows_split: x is [..., S, T, K] for a weight without S.
        precision: precision of all three GEMMs, checked.
    """

    delayed: Any
    out_dtype: Any
    shardings: tuple[Any, Any, Any]
    out_sharding: Any
    rows_split: bool
    precision: Any = None


def _multiply(spec: ProductSpec, a: QuantizedArray, b: QuantizedArray, bias, out_dtype, out_sharding):
    if spec.rows_split:
        return scaled_matmul_of_split_rows(a, b, bias, out_dtype, out_sharding, spec.precision)
    return scaled_matmul(a, b, bias, out_dtype=out_dtype, out_sharding=out_sharding, precision=spec.precision)


def _encode_scale(spec: ProductSpec, state, tensor: str):
    """The encode scale of delayed scaling, if the spec has it."""
    if spec.delayed is None:
        return None
    return delayed_scaling.encode_scale(spec.delayed, state, tensor, _maximum(spec.delayed, tensor))


def _recorded(delayed: DelayedScaling, state, tensor: str, x, rows_split=False):
    """The state with the tensor's new history and scale."""
    (amax,) = tensor_amax(jnp.atleast_2d(x), True, None, rows_split=rows_split)
    return state | delayed_scaling.updated(delayed, state, tensor, _maximum(delayed, tensor), amax)


def _maximum(delayed: DelayedScaling, tensor: str) -> float:
    roles: Any = delayed.roles()
    return {"input": roles.input, "kernel": roles.weight, "output_grad": roles.gradient}[tensor].format.maximum


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(spec: ProductSpec, x, w, bias, randomness, quantized, states):
    return _fprop(spec, x, w, bias, quantized, states[0])[0]


def _fprop(spec: ProductSpec, x, w, bias, quantized, state, *, keep: bool = False):
    """The result, x row- and columnwise, and the kernel, quantised as far as they are needed now or have to be kept."""
    with in_profiles("quantize input"):
        encode = _encode_scale(spec, state, "input")
        forms = role_of(spec.fprop, 0), role_of(spec.wgrad, 0, keep)
        x_row, x_column = both_ways(x, *forms, encode=encode, rows_split=spec.rows_split)
    if quantized is not None:
        w_row, w_column = quantized.rowwise, quantized.columnwise
    else:
        with in_profiles("quantize weight"):
            encode = _encode_scale(spec, state, "kernel")
            w_row, w_column = both_ways(w, role_of(spec.dgrad, 1, keep), role_of(spec.fprop, 1), encode=encode)
    with in_profiles("fprop"):
        if spec.fprop:
            y = _multiply(spec, x_row, w_column.mT, bias, spec.out_dtype, spec.out_sharding)
        else:
            w = (w if w is not None else w_column.dequantize()).astype(x.dtype)
            y = plain_matmul(x, w, jnp.float32, spec.out_sharding, spec.precision)
            y = (y if bias is None else y + bias.astype(jnp.float32)).astype(spec.out_dtype)
    return y, (x_row, x_column), (w_row, w_column)


def _forward(spec: ProductSpec, x, w, bias, randomness, quantized, states):
    state, probe = states
    x, w, bias = differentiated_once((x, w, bias))
    y, (x_row, x_column), (w_row, w_column) = _fprop(spec, x, w, bias, quantized, state, keep=True)
    kept_x = x_column if spec.wgrad else x_row if spec.decodes("wgrad") else x
    kept_w = w_row if spec.dgrad else w_column if spec.decodes("dgrad") or w is None else w
    kept = tuple(named(q, name) for q, name in zip((kept_x, kept_w), CHECKPOINT_NAMES, strict=True))
    like = tuple(dtype_marker(a) for a in (x, w, bias))
    new_state = state
    if spec.delayed is not None:
        new_state = _recorded(spec.delayed, state, "input", x, spec.rows_split)
        new_state = new_state if w is None else _recorded(spec.delayed, new_state, "kernel", w)
    found = None
    if probe is not None:
        found = measured_forward(probe, x, w, (x_row, x_column), (w_row, w_column), spec.rows_split)
    return product(y), (kept, like, randomness, new_state, found)


def _quantized_gradient(spec: ProductSpec, dy, weight_learns: bool, randomness, state):
    """The gradient of the result row- and columnwise, as dgrad and wgrad need it."""
    row, column = role_of(spec.dgrad, 0), role_of(spec.wgrad, 1)
    tensor_scales = [role for role in (row, column) if role is not None and role.format.has_tensor_scale]
    rotation = column.hadamard if column in tensor_scales else None
    amaxes = None
    if spec.delayed is None and tensor_scales and (rotation is None or rotation.size == BLOCK):
        found = tensor_amax(dy, True, rotation, rows_split=spec.rows_split)
        amaxes = found[0], found[-1]
    words = None
    if randomness is not None:
        words = randomness.words_for(lambda: (amaxes or tensor_amax(dy, True, None, rows_split=spec.rows_split))[0])
    encode = _encode_scale(spec, state, "output_grad")
    options = {"words": words, "amax": amaxes, "encode": encode, "rows_split": spec.rows_split}
    return both_ways(dy, row, column if weight_learns else None, **options)


def _backward(spec: ProductSpec, residuals, dy):
    (x, w), (like_x, like_w, like_bias), randomness, state, found = residuals
    x_sharding, w_sharding, bias_sharding = spec.shardings
    dy = differentiated_once(dy)
    dy_row: Any = None
    dy_column: Any = None
    if spec.dgrad or spec.wgrad:
        with in_profiles("quantize gradient"):
            dy_row, dy_column = _quantized_gradient(spec, dy, like_w is not None, randomness, state)
    # JAX does not check these dtypes: they must be those of the primals.
    with in_profiles("dgrad"):
        if spec.dgrad:
            dx = _multiply(spec, dy_row, w, None, like_x.dtype, x_sharding)
        else:
            transposed = jnp.swapaxes(decoded(w, dy.dtype), -1, -2)
            dx = plain_matmul(dy, transposed, like_x.dtype, x_sharding, spec.precision)
    dw = None
    with in_profiles("wgrad"):
        if like_w is not None and spec.wgrad:
            dw = _multiply(spec, x.mT, dy_column.mT, None, like_w.dtype, w_sharding)
        elif like_w is not None:
            dw = plain_wgrad(decoded(x, dy.dtype), dy, spec.rows_split, like_w.dtype, w_sharding, spec.precision)
    if spec.delayed is not None:
        state = _recorded(spec.delayed, state, "output_grad", dy, spec.rows_split)
    if found is not None:
        found = measured_backward(found, (x, w), dy, (dy_row, dy_column), spec.rows_split)
    return dx, dw, bias_gradient(dy, like_bias, bias_sharding), None, None, (state, found)


_matmul.defvjp(_forward, _backward)
quantized_matmul = jax.jit(_matmul, static_argnums=0)  # layers with equal specs are traced once, whatever their names
"""ProductSpec, x [..., T, K], w [..., K, N], bias, Randomness, QuantizedKernel, (delayed scaling's state, telemetry's
Probe) -> [..., T, N]. All but the first two may be None; w is None if there is a QuantizedKernel."""


# --- calibrating


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recording(delayed: DelayedScaling, x, w, y, state):
    """y, for calibrating: x, w and the gradient of y give the state's gradient."""
    del delayed, x, w, state
    return y


def _recording_forward(delayed: DelayedScaling, x, w, y, state):
    return y, _recorded(delayed, _recorded(delayed, state, "input", x), "kernel", w)


def _recording_backward(delayed: DelayedScaling, state, dy):
    return None, None, dy, _recorded(delayed, state, "output_grad", dy)


recording.defvjp(_recording_forward, _recording_backward)
