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
from jaxlowprec.ops.amax.api import amax as tensor_amax
from jaxlowprec.ops.checks import float_array
from jaxlowprec.ops.quantize.api import key_words, quantize, quantize_both
from jaxlowprec.ops.quantize.philox import philox4x32
from jaxlowprec.ops.rounding import magnitude_bits
from jaxlowprec.ops.scaled_matmul.api import scaled_matmul
from jaxlowprec.quantized_array import QuantizedArray
from jaxlowprec.recipes import Recipe

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


def quantize_kernel(kernel: Float[Array, "*B K N"], recipe: Recipe | None = FROM_CONTEXT) -> QuantizedKernel:
    """Quantises a weight once, to be reused over microbatches and inference steps.

    Pass it to `linear` as `quantized_kernel=`: the gradient still reaches the kernel, the master weight. It stands for
    the kernel's value of now: after an optimizer step, quantise again.

    Arguments:
        kernel: the master weight, bfloat16, float16 or float32.
        recipe: whose weight role to follow; default: the context's.

    Raises:
        ValueError: no recipe.

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
    return QuantizedKernel(*quantize_both(kernel, recipe.weight.format))


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
    if quantized is not None and quantized.rowwise.format != recipe.weight.format:
        raise ValueError(
            f"{who}: quantized_kernel is {quantized.rowwise.format} but the recipe wants {recipe.weight.format}; "
            "quantise it again under this recipe"
        )
    if quantized is not None and w is not None and quantized.shape != w.shape:
        raise ValueError(f"{who}: quantized_kernel has shape {quantized.shape}, the kernel {w.shape}")
    words = None
    if key is not None and recipe.gradient.rounding == "stochastic":
        words = _slice_words(key_words(who, key, ()), x.shape[:-2])
    spec = _Spec(recipe, name, jnp.dtype(out_dtype))
    return _matmul_jit(spec, *wiring.align_varying(x, w, bias, words, quantized))


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What a linear is traced with: captured in the forward pass, so that the backward pass never reads the context."""

    recipe: Recipe
    name: str
    out_dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(spec: _Spec, x, w, bias, words, quantized):
    recipe = spec.recipe
    x_row = quantize(x, recipe.input.format, -1, rounding=recipe.input.rounding)
    w_column = quantized.columnwise if quantized else quantize(w, recipe.weight.format, -2)
    return scaled_matmul(x_row, w_column.mT, bias, out_dtype=spec.out_dtype)


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


def _forward(spec: _Spec, x, w, bias, words, quantized):
    recipe = spec.recipe
    x, w, bias = _differentiated_once((x, w, bias))
    x_row, x_column = quantize_both(x, recipe.input.format, recipe.input.hadamard or False, recipe.input.rounding)
    kernel = quantized or QuantizedKernel(*quantize_both(w, recipe.weight.format))
    y = scaled_matmul(x_row, kernel.columnwise.mT, bias, out_dtype=spec.out_dtype)
    kept = tuple(
        jax.tree.map(lambda leaf, name=name: checkpoint_name(leaf, name), q)
        for q, name in zip((x_column, kernel.rowwise), CHECKPOINT_NAMES, strict=True)
    )
    like = tuple(None if a is None else jnp.zeros((), a.dtype) for a in (x, w, bias))  # a dtype is no residual; this is
    return y, (kept, like, words)


def _backward(spec: _Spec, residuals, dy):
    (x_column, w_row), (like_x, like_w, like_bias), words = residuals
    dy = _differentiated_once(dy)
    role = spec.recipe.gradient
    amaxes = tensor_amax(dy, True, role.hadamard)
    if role.rounding == "stochastic" and words is None:
        words = _keyless_words(amaxes[0], dy.shape, spec.name)
    dy_row, dy_column = quantize_both(
        dy, role.format, role.hadamard or False, role.rounding, words, amax=(amaxes[0], amaxes[-1])
    )
    # JAX does not check these dtypes: they must be those of the primals.
    dx = scaled_matmul(dy_row, w_row, out_dtype=like_x.dtype)
    dw = None if like_w is None else scaled_matmul(x_column.mT, dy_column.mT, out_dtype=like_w.dtype)
    db = None
    if like_bias is not None:
        db = dy.sum(axis=tuple(range(dy.ndim - 1)), dtype=jnp.float32).astype(like_bias.dtype)
    return dx, dw, db, None, None


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
