"""The quantised linear: fprop, dgrad and wgrad on quantised operands, and its custom_vjp.

    fprop   y  = x row-quantised            @ w            contracted over K
    dgrad   dx = dy row-quantised           @ w transposed contracted over N
    wgrad   dw = x column-quantised, transposed @ dy column-quantised   contracted over tokens

Each GEMM has its own pair of operands (numerics.md 3). The backward pass keeps x columnwise and w, quantised, instead
of x and w: they carry the checkpoint names below, for `jax.checkpoint` policies such as
`jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxlowprec import wiring
from jaxlowprec.autocast import FROM_CONTEXT, resolve
from jaxlowprec.formats import BLOCK
from jaxlowprec.ops.amax.api import amax as tensor_amax
from jaxlowprec.ops.checks import float_array
from jaxlowprec.ops.quantize.api import key_words, quantize, quantize_both
from jaxlowprec.ops.quantize.op import has_tensor_scale
from jaxlowprec.ops.quantize.philox import philox4x32
from jaxlowprec.ops.rounding import magnitude_bits
from jaxlowprec.ops.scaled_matmul.api import scaled_matmul
from jaxlowprec.quantized_array import QuantizedArray
from jaxlowprec.recipes import Recipe, Roles

CHECKPOINT_NAMES = ("jaxlowprec_quantized_input", "jaxlowprec_quantized_weight")
"""checkpoint_name of the residuals: data, scale and amax of the columnwise input, and of the weight."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("rowwise", "columnwise"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class QuantizedKernel:
    """A kernel [..., K, N] quantised once, for every GEMM that reads it.

    Attributes:
        rowwise: blocks along N, for dgrad.
        columnwise: blocks along K, for fprop.
    """

    rowwise: QuantizedArray
    columnwise: QuantizedArray

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., K, N]."""
        return self.rowwise.shape


def quantize_kernel(
    kernel: Float[Array, "*B K N"],
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    name: str = "",
) -> QuantizedKernel:
    """Quantises a weight once, to be reused over microbatches and inference steps.

    Pass it to `linear` as `quantized_kernel=`: the gradient still reaches the kernel, the master weight. It stands for
    the kernel's value of now: after an optimizer step, quantise again.

    Arguments:
        kernel: the master weight, bfloat16, float16 or float32.
        recipe: whose weight role to follow; default: the context's.
        name: the layer's, for recipes that treat layers differently (`Custom`).

    Raises:
        ValueError: no recipe, or one that keeps this weight in high precision.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> jlp.quantize_kernel(jnp.ones((64, 32)), jlp.NVFP4BlockScaling()).shape
    (64, 32)
    """
    recipe = resolve("quantize_kernel", recipe)
    if recipe is None:
        raise ValueError("quantize_kernel: no recipe; pass recipe= or call it within jaxlowprec.autocast(recipe)")
    kernel = float_array("quantize_kernel", "kernel", kernel)
    if kernel.ndim < 2:
        raise ValueError(f"quantize_kernel: kernel has shape {kernel.shape}; needs [..., K, N]")
    role = recipe.roles("linear", name).weight
    if role is None:
        raise ValueError(f"quantize_kernel: {recipe} keeps the weight of layer {name!r} in high precision")
    return QuantizedKernel(*quantize_both(kernel, role.format))


def linear(
    x: Float[Array, "*T K"],
    kernel: Float[Array, "K N"] | None,
    bias: Float[Array, "N"] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    key: jax.Array | None = None,
    *,
    quantized_kernel: QuantizedKernel | None = None,
    name: str = "",
) -> Float[Array, "*T N"]:
    """`x @ kernel + bias`, its three GEMMs on operands quantised as the recipe says.

    Gradients have the dtype of what they are gradients of: a float32 master weight gets a float32 gradient, rounded
    once. The bias is added in float32 before the one rounding of the result, and its gradient is the sum of the
    unquantised gradient.

    Arguments:
        x: [..., K], bfloat16, float16 or float32: the dtype of the result.
        kernel: [K, N], any of those dtypes, quantised from its own. None: `quantized_kernel` alone, for inference.
        bias: [N].
        recipe: default: the context's (`autocast`). None: high precision, the kernel cast to x's dtype.
        key: for recipes that round gradients stochastically; see `quantize`. None: the bits come from the gradient
            itself (its amax), its shape and `name`, deterministically.
        quantized_kernel: `quantize_kernel(kernel)`, to save doing it again.
        name: the layer's, for the keyless bits.

    Raises:
        TypeError: dtypes that do not fit, a recipe that is none.
        ValueError: shapes that do not fit.

    Source: numerics.md 3 and 4; arXiv 2509.25149.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> x, w = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((64, 32))
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     dw = jax.grad(lambda w: jlp.linear(x, w).sum())(w)
    >>> dw.shape, dw.dtype
    ((64, 32), dtype('float32'))
    """
    who = "linear"
    recipe = resolve(who, recipe)
    x = float_array(who, "x", x)
    if kernel is not None:
        kernel = float_array(who, "kernel", kernel)
        shape = kernel.shape
    elif quantized_kernel is not None:
        shape = quantized_kernel.shape
    else:
        raise ValueError(f"{who}: kernel is None; without quantized_kernel= there is no weight")
    if len(shape) != 2 or x.ndim < 1 or x.shape[-1] != shape[0]:
        raise ValueError(f"{who}: x {x.shape} and kernel {shape}: needs x [..., K] and kernel [K, N]")
    if bias is not None and (bias := float_array(who, "bias", bias)).shape != shape[1:]:
        raise ValueError(f"{who}: bias has shape {bias.shape}; needs {shape[1:]}, the kernel's N")
    if recipe is None:
        if kernel is None or quantized_kernel is not None:
            raise ValueError(f"{who}: quantized_kernel= without a recipe; pass the recipe it was quantised for")
        y = jax.lax.dot_general(x, kernel.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())))
        return y if bias is None else y + bias.astype(x.dtype)
    tokens = x.reshape(-1, x.shape[-1])
    y = matmul(who, tokens, kernel, bias, recipe, key, quantized_kernel, name, x.dtype)
    return y.reshape(*x.shape[:-1], shape[1])


def matmul(
    who: str,
    x: Float[Array, "*B T K"],
    w: Float[Array, "*B K N"] | None,
    bias: Float[Array, "N"] | None,
    recipe: Recipe,
    key: jax.Array | None,
    quantized: QuantizedKernel | None,
    name: str,
    out_dtype: Any,
) -> Float[Array, "*B T N"]:
    """What `linear`, `dot_general` and `einsum` come down to: x in the input's role, w in the weight's."""
    roles = recipe.roles("linear", name)
    if quantized is not None:
        if roles.weight is None or quantized.rowwise.format != roles.weight.format:
            wants = "high precision" if roles.weight is None else roles.weight.format
            raise ValueError(
                f"{who}: quantized_kernel is {quantized.rowwise.format} but the recipe wants {wants}; "
                "quantise it again under this recipe"
            )
        if w is not None and quantized.shape != w.shape:
            raise ValueError(f"{who}: quantized_kernel has shape {quantized.shape}, the kernel {w.shape}")
    words = None
    if key is not None and rounds_stochastically(roles):
        words = _slice_words(key_words(who, key, ()), x.shape[:-2])
    plan = _Plan(roles, recipe.backward_override, name, jnp.dtype(out_dtype))
    return _matmul_jit(plan, *wiring.align_varying(x, w, bias, words, quantized))


def rounds_stochastically(roles: Roles) -> bool:
    """Whether a key is of use."""
    return roles.gradient is not None and roles.gradient.rounding == "stochastic"


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a linear is traced with: captured in the forward pass, so that the backward pass never reads the context."""

    roles: Any
    backward_override: str | None
    name: str
    out_dtype: Any

    @property
    def fprop(self) -> bool:
        """Whether this GEMM is quantised."""
        return self.roles.input is not None and self.roles.weight is not None

    @property
    def dgrad(self) -> bool:
        return self.backward_override is None and self.roles.gradient is not None and self.roles.weight is not None

    @property
    def wgrad(self) -> bool:
        return self.backward_override is None and self.roles.gradient is not None and self.roles.input is not None


def _both_ways(x, role: Any, rowwise: bool, columnwise: bool, words=None, amax=None) -> tuple[Any, Any]:
    """x quantised in the wanted directions, None for the other; one pass for both."""
    if role is None:
        return None, None
    rotation = role.hadamard or False
    if rowwise and columnwise:
        return quantize_both(x, role.format, rotation, role.rounding, words, amax=amax)
    row_amax, column_amax = amax or (None, None)
    row = quantize(x, role.format, -1, False, role.rounding, words, row_amax) if rowwise else None
    column = quantize(x, role.format, -2, rotation, role.rounding, words, column_amax) if columnwise else None
    return row, column


def _plain_matmul(a, b, out_dtype):
    """a [..., M, K] @ b [..., K, N] in high precision, accumulated in float32."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    y = jnp.matmul(a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)
    return y.astype(out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(plan: _Plan, x, w, bias, words, quantized):
    return _fprop(plan, x, w, bias, quantized, False, False)[0]


def _fprop(plan: _Plan, x, w, bias, quantized: QuantizedKernel | None, keep_column: bool, keep_row: bool):
    """The result, x row- and columnwise, and the kernel, each quantised as far as it is needed now or is to be kept."""
    roles = plan.roles
    x_row, x_column = _both_ways(x, roles.input, plan.fprop, keep_column)
    if quantized is not None:
        w_row, w_column = quantized.rowwise, quantized.columnwise
    else:
        w_row, w_column = _both_ways(w, roles.weight, keep_row, plan.fprop)
    if plan.fprop:
        y = scaled_matmul(x_row, w_column.mT, bias, out_dtype=plan.out_dtype)
    else:
        y = _plain_matmul(x, (w if w is not None else w_column.dequantize()).astype(x.dtype), jnp.float32)
        y = (y if bias is None else y + bias.astype(jnp.float32)).astype(plan.out_dtype)
    return y, (x_row, x_column), (w_row, w_column)


@jax.custom_jvp
def _differentiated_once(arrays):
    """The arrays. Both rules are constant to autodiff, which would find a second derivative of zero."""
    return arrays


@_differentiated_once.defjvp
def _second_derivative(primals, tangents):
    raise NotImplementedError(
        "linear: there is no second derivative under a recipe; pass recipe=None, or use autocast(enabled=False), "
        "where a gradient is differentiated again"
    )


def _forward(plan: _Plan, x, w, bias, words, quantized):
    x, w, bias = _differentiated_once((x, w, bias))
    y, (x_row, x_column), (w_row, w_column) = _fprop(plan, x, w, bias, quantized, plan.wgrad, plan.dgrad)
    dequantized = plan.backward_override == "dequantized" and plan.fprop
    kept_x = x_column if plan.wgrad else x_row if dequantized else x
    kept_w = w_row if plan.dgrad else w_column if dequantized or w is None else w
    kept = tuple(
        jax.tree.map(lambda leaf, name=name: checkpoint_name(leaf, name), q) if isinstance(q, QuantizedArray) else q
        for q, name in zip((kept_x, kept_w), CHECKPOINT_NAMES, strict=True)
    )
    like = tuple(None if a is None else jnp.zeros((), a.dtype) for a in (x, w, bias))  # a dtype is no residual; this is
    return y, (kept, like, words)


def _backward(plan: _Plan, residuals, dy):
    (x, w), (like_x, like_w, like_bias), words = residuals
    dy = _differentiated_once(dy)
    dy_row: Any = None
    dy_column: Any = None
    if plan.dgrad or plan.wgrad:
        role = plan.roles.gradient
        amaxes = None
        if has_tensor_scale(role.format) and (role.hadamard is None or role.hadamard.size == BLOCK):
            found = tensor_amax(dy, True, role.hadamard)
            amaxes = found[0], found[-1]
        if role.rounding == "stochastic" and words is None:
            (amax,) = amaxes[:1] if amaxes else tensor_amax(dy, True, None)
            words = _keyless_words(amax, dy.shape, plan.name)
        dy_row, dy_column = _both_ways(dy, role, plan.dgrad, plan.wgrad and like_w is not None, words, amaxes)
    # JAX does not check these dtypes: they must be those of the primals.
    if plan.dgrad:
        dx = scaled_matmul(dy_row, w, out_dtype=like_x.dtype)
    else:
        dx = _plain_matmul(dy, jnp.swapaxes(_decoded(w, dy.dtype), -1, -2), like_x.dtype)
    dw = None
    if like_w is not None and plan.wgrad:
        dw = scaled_matmul(x.mT, dy_column.mT, out_dtype=like_w.dtype)
    elif like_w is not None:
        dw = _plain_matmul(jnp.swapaxes(_decoded(x, dy.dtype), -1, -2), dy, like_w.dtype)
    db = None
    if like_bias is not None:
        db = dy.sum(axis=tuple(range(dy.ndim - 1)), dtype=jnp.float32).astype(like_bias.dtype)
    return dx, dw, db, None, None


def _decoded(x, dtype):
    """A residual as an array of `dtype`."""
    return x.dequantize(dtype) if isinstance(x, QuantizedArray) else x.astype(dtype)


_matmul.defvjp(_forward, _backward)
_matmul_jit = jax.jit(_matmul, static_argnums=0)  # equal layers are traced once


# --- random bits


def _slice_words(words: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Words for each slice of the batch axes: one key would give all of them the same bits."""
    if not batch:
        return words
    index = jnp.arange(math.prod(batch), dtype=jnp.uint32)
    zero = jnp.zeros_like(index)
    out = philox4x32((index, zero, zero, zero + 1), (words[0], words[1]))
    return jnp.stack(out[:2], axis=-1).reshape(*batch, 2)


def _keyless_words(amax: jax.Array, shape: tuple[int, ...], name: str) -> jax.Array:
    """A 64-bit mix of a gradient's amax bits, its shape and the layer's name, for each slice."""
    seed = zlib.crc32(repr((shape[-2:], name)).encode())
    bits = magnitude_bits(amax)
    index = jnp.arange(bits.size, dtype=jnp.uint32).reshape(bits.shape)
    counter = (bits, jnp.full_like(bits, seed), index, jnp.full_like(bits, 2))
    out = philox4x32(counter, (jnp.uint32(0x6A6C7021), jnp.uint32(0x6E766634)))
    return jnp.stack(out[:2], axis=-1)
