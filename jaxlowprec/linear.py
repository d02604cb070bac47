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
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxlowprec import delayed_scaling, weight_only, wiring
from jaxlowprec.autocast import FROM_CONTEXT, resolve
from jaxlowprec.formats import BLOCK
from jaxlowprec.ops.amax.api import amax as tensor_amax
from jaxlowprec.ops.checks import float_array
from jaxlowprec.ops.quantize.api import quantize, quantize_both, whole_slices
from jaxlowprec.ops.quantize.keys import key_words, keyless_words, slice_words
from jaxlowprec.ops.scaled_matmul.api import scaled_matmul, scaled_matmul_of_slices
from jaxlowprec.ops.slices import merged_rows, sliced_rows
from jaxlowprec.out_sharding import dimensions_of, resharded, sharding_of, sharding_of_product
from jaxlowprec.quantized_array import QuantizedArray
from jaxlowprec.recipes import Calibrating, DelayedScaling, Recipe, Roles
from jaxlowprec.residuals import (
    CHECKPOINT_NAMES,
    bias_gradient,
    decoded,
    differentiated_once,
    dtype_marker,
    named,
    plain_matmul,
    plain_wgrad,
)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("rowwise", "columnwise"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class QuantizedKernel:
    """A kernel [..., K, N] quantised once, for every GEMM that reads it.

    Attributes:
        rowwise: blocks along N, for dgrad; None where the weight alone is quantised, and dgrad decodes the other.
        columnwise: blocks along K, for fprop.
    """

    rowwise: QuantizedArray | None
    columnwise: QuantizedArray

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., K, N]."""
        return self.columnwise.shape

    @property
    def weight_only(self) -> bool:
        """Whether it is multiplied by inputs in high precision."""
        return self.rowwise is None


def quantize_kernel(
    kernel: Float[Array, "*B K N"],
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    name: str = "",
    state: delayed_scaling.State | None = None,
) -> QuantizedKernel:
    """Quantises a weight once, to be reused over microbatches and inference steps.

    Pass it to `linear` as `quantized_kernel=`: the gradient still reaches the kernel, the master weight. It stands for
    the kernel's value of now: after an optimizer step, quantise again.

    Arguments:
        kernel: the master weight, bfloat16, float16 or float32.
        recipe: whose weight role to follow; default: the context's.
        name: the layer's, for recipes that treat layers differently (`Custom`).
        state: of delayed scaling, see `linear`.

    Raises:
        ValueError: no recipe, or one that keeps this weight in high precision.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> jlp.quantize_kernel(jnp.ones((64, 32)), jlp.NVFP4BlockScaling()).shape
    (64, 32)
    """
    recipe, given = resolve("quantize_kernel", recipe, name), resolve("quantize_kernel", recipe)
    if given is None:
        raise ValueError("quantize_kernel: no recipe; pass recipe= or call it within jaxlowprec.autocast(recipe)")
    kernel = float_array("quantize_kernel", "kernel", kernel)
    if kernel.ndim < 2:
        raise ValueError(f"quantize_kernel: kernel has shape {kernel.shape}; needs [..., K, N]")
    roles = given.roles("linear", name)
    role = roles.weight
    if recipe is None or role is None:
        raise ValueError(f"quantize_kernel: {given} keeps the weight of layer {name!r} in high precision")
    if roles.ste is not None:
        weight_only.check_whole_groups("quantize_kernel", name, kernel, role.format)
        return QuantizedKernel(None, weight_only.quantize_weight(kernel, role.format, roles.served_dtype))
    encode = None
    if recipe.delayed is not None:
        state = delayed_scaling.check_state("quantize_kernel", recipe.delayed, state)
        encode = delayed_scaling.encode_scale(recipe.delayed, state, "kernel", role.format.maximum)
    return QuantizedKernel(*quantize_both(kernel, role.format, encode_scale=encode))


def kernel_matrices(kernel: Any, batch: int, contracted: int) -> jax.Array:
    """A kernel [batch..., contracted..., features...] as matrices [batch..., K, N], by the number of those axes."""
    sizes, rest = kernel.shape[:batch], kernel.shape[batch:]
    return kernel.reshape(*sizes, math.prod(rest[:contracted]), math.prod(rest[contracted:]))


def linear(
    x: Float[Array, "*T K"],
    kernel: Float[Array, "K N"] | QuantizedArray | None,
    bias: Float[Array, "N"] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    key: jax.Array | None = None,
    *,
    quantized_kernel: QuantizedKernel | None = None,
    name: str = "",
    state: delayed_scaling.State | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Any:
    """`x @ kernel + bias`, its three GEMMs on operands quantised as the recipe says.

    Gradients have the dtype of what they are gradients of: a float32 master weight gets a float32 gradient, rounded
    once. The bias is added in float32 before the one rounding of the result, and its gradient is the sum of the
    unquantised gradient.

    Arguments:
        x: [..., K], bfloat16, float16 or float32: the dtype of the result.
        kernel: [K, N], any of those dtypes, quantised from its own. None: `quantized_kernel` alone, for inference. Or a
            loaded QuantizedArray [K, N], quantised along K (axis=-2), for inputs in high precision: it needs no recipe,
            gives what quantisation-aware training gives for the kernel it was made from, bit for bit, and is a constant
            to autodiff, as for adapters on a frozen weight.
        bias: [N].
        recipe: default: the context's (`autocast`). None: high precision, the kernel cast to x's dtype.
        key: for recipes that round gradients stochastically; see `quantize`. None: the bits come from the gradient
            itself (its amax), its shape and `name`, deterministically.
        quantized_kernel: `quantize_kernel(kernel)`, to save doing it again.
        name: the layer's, for the keyless bits and recipes that treat layers differently.
        state: of delayed scaling, as `jaxlowprec.delayed_scaling.init_state` makes it; its gradient is its new value.
        out_sharding: of the result [..., N], in JAX's explicit-sharding mode, as for `jnp.matmul`.

    Returns:
        [..., N]. With `state` a pair of it and the state, unchanged in value: handing this one to the layer's next call
        combines the new values of both calls by max.

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
    kernel, quantized_kernel, recipe = operands_and_recipe(who, kernel, quantized_kernel, recipe, name)
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
    if in_high_precision(recipe, kernel, quantized_kernel):
        kernel = high_precision_weight(who, kernel, quantized_kernel)
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        y = jax.lax.dot_general(x, kernel.astype(x.dtype), dims, out_sharding=out_sharding)
        y = y if bias is None else y + bias.astype(x.dtype)
        if isinstance(recipe, Calibrating):
            y, state = recorded(who, recipe, x, kernel, y, state)
        return y if state is None else (y, state)
    tokens = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]) if x.ndim > 2 else x.reshape(-1, x.shape[-1])
    fits = out_sharding if x.ndim in (2, 3) else None
    y, out_state = matmul(
        who, tokens, kernel, bias, recipe, key, quantized_kernel, name, x.dtype, state, fits, slices=x.ndim > 2
    )
    y = resharded(y.reshape(*x.shape[:-1], shape[1]), out_sharding)
    return y if state is None else (y, out_state)


def operands_and_recipe(
    who: str, kernel: Any, quantized: QuantizedKernel | None, recipe: Any, name: str
) -> tuple[jax.Array | None, QuantizedKernel | None, Recipe | None]:
    """The kernel, in high precision or loaded, and the recipe that its layer follows here."""
    if not isinstance(kernel, QuantizedArray):
        return kernel, quantized, resolve(who, recipe, name)
    if quantized is not None:
        raise ValueError(f"{who}: kernel is quantised and quantized_kernel= is given; needs one of them")
    weight_only.check_loaded(who, name, kernel, resolve(who, recipe))
    return None, QuantizedKernel(None, kernel), None


def in_high_precision(recipe: Recipe | None, w: Any, quantized: QuantizedKernel | None) -> bool:
    """Whether a product is computed without quantising anything; a loaded weight is quantised without a recipe."""
    loaded = w is None and quantized is not None and quantized.weight_only
    return isinstance(recipe, Calibrating) or (recipe is None and not loaded)


def matmul(
    who: str,
    x: Float[Array, "*B T K"],
    w: Float[Array, "*B K N"] | None,
    bias: Float[Array, "N"] | None,
    recipe: Recipe | None,
    key: jax.Array | None,
    quantized: QuantizedKernel | None,
    name: str,
    out_dtype: Any,
    state: delayed_scaling.State | None,
    out_sharding: Any = None,
    slices: bool = False,
) -> tuple[Float[Array, "*B T N"], delayed_scaling.State | None]:
    """What `linear`, `dot_general` and `einsum` come down to: x in the input's role, w in the weight's.

    Without a recipe `quantized` is a loaded weight. `slices`: x is [..., S, T, K] for a weight without S, and so is the
    result; that S and T stay two axes lets a mesh split both. Where a block would lie on two slices they are merged.
    """
    if slices and _must_merge(who, x, w if w is not None else quantized, _rows_together(recipe, name)):
        merged = matmul(who, merged_rows(x), w, bias, recipe, key, quantized, name, out_dtype, state)
        return resharded(sliced_rows(merged[0], x.shape[-3]), out_sharding), merged[1]
    if out_sharding is None and sharding_of(x):  # the same type whatever is kept for the backward pass
        loaded: Any = quantized
        features = dimensions_of(w)[-1] if w is not None else dimensions_of(loaded.columnwise.data)[-2]
        out_sharding = sharding_of_product(x, features)
    if recipe is None:
        q: Any = None if quantized is None else quantized.columnwise
        served: tuple[Any, Any, None] = (q.format, "identity", None)
        return weight_only.matmul(who, name, x, None, bias, q, *served, out_dtype, out_sharding, slices), state
    if recipe.delayed is not None:
        state = delayed_scaling.check_state(who, recipe.delayed, state)
    roles = recipe.roles("linear", name)
    if quantized is not None:
        has, wants = (quantized.columnwise.format, quantized.weight_only), "high precision"
        if roles.weight is not None:
            wants = f"{roles.weight.format} for {_inputs(roles.ste is not None)}"
        if roles.weight is None or has != (roles.weight.format, roles.ste is not None):
            raise ValueError(
                f"{who}: quantized_kernel is {has[0]} for {_inputs(has[1])} but the recipe wants {wants}; "
                "quantise it again under this recipe"
            )
        if w is not None and quantized.shape != w.shape:
            raise ValueError(f"{who}: quantized_kernel has shape {quantized.shape}, the kernel {w.shape}")
    if roles.ste is not None and roles.weight is not None:
        loaded = None if quantized is None else quantized.columnwise
        how = (roles.weight.format, roles.ste, roles.served_dtype)
        return weight_only.matmul(who, name, x, w, bias, loaded, *how, out_dtype, out_sharding, slices), state
    words = None
    if key is not None and rounds_stochastically(roles):
        words = slice_words(key_words(who, key, ()), x.shape[: -3 if slices else -2])
    shardings = sharding_of(x), sharding_of(w), sharding_of(bias)
    result = jnp.dtype(out_dtype), shardings, out_sharding
    plan = _Plan(roles, recipe.backward_override, recipe.delayed, name, *result, slices)
    operands = wiring.align_varying(x, w, bias, words, quantized)
    if recipe.delayed is None:
        return _matmul_jit(plan, *operands, None), state
    used, state = delayed_scaling.used_and_handed_on(state)
    return _matmul_jit(plan, *operands, used), state


def _rows_together(recipe: Recipe | None, name: str) -> int:
    """What the rows of a slice of x, and of its gradient, are a multiple of, so that no block lies on two slices."""
    roles = None if recipe is None else recipe.roles("linear", name)
    if roles is None or roles.ste is not None:
        return 1  # x is not quantised
    quantised = [role for role in (roles.input, roles.gradient) if role is not None]
    return math.lcm(*(whole_slices(r.format, r.hadamard, r.rounding, columnwise=True) for r in quantised))


def _must_merge(who: str, x: jax.Array, weight: Any, together: int) -> bool:
    """Whether x [..., S, T, K] has to be merged.

    Raises ValueError where that cannot be: two split axes would be strided.
    """
    if x.size > 0 and x.shape[-2] % together == 0 and (together > 1 or len(weight.shape) == 2):
        return False
    rows = dimensions_of(x)[-2] if sharding_of(x) else ()
    if rows and x.shape[-3] > 1:
        raise ValueError(
            f"{who}: x {x.shape} is split over {rows} along its second last axis and has {x.shape[-2]} rows in a "
            f"slice, where blocks need a multiple of {together}; reshard x to leave that axis whole, or pad it"
        )
    return True


def _inputs(high_precision: bool) -> str:
    return f"{'high-precision' if high_precision else 'quantised'} inputs"


def high_precision_weight(who: str, w: jax.Array | None, quantized: QuantizedKernel | None) -> jax.Array:
    """The weight of a product in high precision."""
    if w is None or quantized is not None:
        raise ValueError(
            f"{who}: quantized_kernel= without a recipe that quantises; pass the recipe it was quantised for"
        )
    return w


def recorded(
    who: str, recipe: Calibrating, x: jax.Array, w: jax.Array, y: jax.Array, state: delayed_scaling.State | None
) -> tuple[jax.Array, delayed_scaling.State]:
    """A product and its state; the state's gradient is what x, w and the gradient of y make of it (calibrating)."""
    state = delayed_scaling.check_state(who, recipe.delayed, state)
    used, state = delayed_scaling.used_and_handed_on(state)
    return _recording(recipe.delayed, *wiring.align_varying(x, w, y), used), state


def rounds_stochastically(roles: Roles) -> bool:
    """Whether a key is of use."""
    return roles.gradient is not None and roles.gradient.rounding == "stochastic"


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a linear is traced with: captured in the forward pass, so that the backward pass never reads the context."""

    roles: Any
    backward_override: str | None
    delayed: Any
    name: str
    out_dtype: Any
    shardings: tuple[Any, Any, Any]
    out_sharding: Any
    slices: bool

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


def _both_ways(
    x, role: Any, rowwise: bool, columnwise: bool, words=None, amax=None, encode=None, slices=False
) -> tuple[Any, Any]:
    """x quantised in the wanted directions, None for the other; one pass for both."""
    if role is None:
        return None, None
    rotation, options = role.hadamard or False, {"encode_scale": encode, "slices": slices}
    if rowwise and columnwise:
        return quantize_both(x, role.format, rotation, role.rounding, words, amax=amax, **options)
    row_amax, column_amax = amax or (None, None)
    row = column = None
    if rowwise:
        row = quantize(x, role.format, -1, False, role.rounding, words, row_amax, **options)
    if columnwise:
        column = quantize(x, role.format, -2, rotation, role.rounding, words, column_amax, **options)
    return row, column


def _multiply(plan: _Plan, a: QuantizedArray, b: QuantizedArray, bias, out_dtype, out_sharding):
    if plan.slices:
        return scaled_matmul_of_slices(a, b, bias, out_dtype, out_sharding)
    return scaled_matmul(a, b, bias, out_dtype=out_dtype, out_sharding=out_sharding)


def _encode_scale(plan: _Plan, state, tensor: str):
    """Of delayed scaling, if that is the plan."""
    if plan.delayed is None:
        return None
    return delayed_scaling.encode_scale(plan.delayed, state, tensor, _maximum(plan.delayed, tensor))


def _recorded(delayed: DelayedScaling, state, tensor: str, x, slices=False):
    """The state with the tensor's new history and scale."""
    (amax,) = tensor_amax(jnp.atleast_2d(x), True, None, slices=slices)
    return state | delayed_scaling.updated(delayed, state, tensor, _maximum(delayed, tensor), amax)


def _maximum(delayed: DelayedScaling, tensor: str) -> float:
    roles: Any = delayed.roles()
    return {"input": roles.input, "kernel": roles.weight, "output_grad": roles.gradient}[tensor].format.maximum


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(plan: _Plan, x, w, bias, words, quantized, state):
    return _fprop(plan, x, w, bias, quantized, state, False, False)[0]


def _fprop(plan: _Plan, x, w, bias, quantized: QuantizedKernel | None, state, keep_column: bool, keep_row: bool):
    """The result, x row- and columnwise, and the kernel, each quantised as far as it is needed now or is to be kept."""
    roles = plan.roles
    encode = _encode_scale(plan, state, "input")
    x_row, x_column = _both_ways(x, roles.input, plan.fprop, keep_column, encode=encode, slices=plan.slices)
    if quantized is not None:
        w_row, w_column = quantized.rowwise, quantized.columnwise
    else:
        encode = _encode_scale(plan, state, "kernel")
        w_row, w_column = _both_ways(w, roles.weight, keep_row, plan.fprop, encode=encode)
    if plan.fprop:
        y = _multiply(plan, x_row, w_column.mT, bias, plan.out_dtype, plan.out_sharding)
    else:
        y = plain_matmul(
            x, (w if w is not None else w_column.dequantize()).astype(x.dtype), jnp.float32, plan.out_sharding
        )
        y = (y if bias is None else y + bias.astype(jnp.float32)).astype(plan.out_dtype)
    return y, (x_row, x_column), (w_row, w_column)


def _forward(plan: _Plan, x, w, bias, words, quantized, state):
    x, w, bias = differentiated_once((x, w, bias))
    y, (x_row, x_column), (w_row, w_column) = _fprop(plan, x, w, bias, quantized, state, plan.wgrad, plan.dgrad)
    dequantized = plan.backward_override == "dequantized" and plan.fprop
    kept_x = x_column if plan.wgrad else x_row if dequantized else x
    kept_w = w_row if plan.dgrad else w_column if dequantized or w is None else w
    kept = tuple(named(q, name) for q, name in zip((kept_x, kept_w), CHECKPOINT_NAMES, strict=True))
    like = tuple(dtype_marker(a) for a in (x, w, bias))
    new_state = state
    if plan.delayed is not None:
        new_state = _recorded(plan.delayed, state, "input", x, plan.slices)
        new_state = new_state if w is None else _recorded(plan.delayed, new_state, "kernel", w)
    return y, (kept, like, words, new_state)


def _backward(plan: _Plan, residuals, dy):
    (x, w), (like_x, like_w, like_bias), words, state = residuals
    x_sharding, w_sharding, bias_sharding = plan.shardings
    dy = differentiated_once(dy)
    dy_row: Any = None
    dy_column: Any = None
    if plan.dgrad or plan.wgrad:
        role = plan.roles.gradient
        amaxes = None
        if (
            plan.delayed is None
            and role.format.has_tensor_scale
            and (role.hadamard is None or role.hadamard.size == BLOCK)
        ):
            found = tensor_amax(dy, True, role.hadamard, slices=plan.slices)
            amaxes = found[0], found[-1]
        if role.rounding == "stochastic" and words is None:
            (amax,) = amaxes[:1] if amaxes else tensor_amax(dy, True, None, slices=plan.slices)
            words = keyless_words(amax, (math.prod(dy.shape[-3 if plan.slices else -2 : -1]), dy.shape[-1]), plan.name)
        encode = _encode_scale(plan, state, "output_grad")
        columnwise = plan.wgrad and like_w is not None
        dy_row, dy_column = _both_ways(dy, role, plan.dgrad, columnwise, words, amaxes, encode, plan.slices)
    # JAX does not check these dtypes: they must be those of the primals.
    if plan.dgrad:
        dx = _multiply(plan, dy_row, w, None, like_x.dtype, x_sharding)
    else:
        dx = plain_matmul(dy, jnp.swapaxes(decoded(w, dy.dtype), -1, -2), like_x.dtype, x_sharding)
    dw = None
    if like_w is not None and plan.wgrad:
        dw = _multiply(plan, x.mT, dy_column.mT, None, like_w.dtype, w_sharding)
    elif like_w is not None:
        dw = plain_wgrad(decoded(x, dy.dtype), dy, plan.slices, like_w.dtype, w_sharding)
    if plan.delayed is not None:
        state = _recorded(plan.delayed, state, "output_grad", dy, plan.slices)
    return dx, dw, bias_gradient(dy, like_bias, bias_sharding), None, None, state


_matmul.defvjp(_forward, _backward)
_matmul_jit = jax.jit(_matmul, static_argnums=0)  # equal layers are traced once


# --- calibrating


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recording(delayed: DelayedScaling, x, w, y, state):
    del delayed, x, w, state
    return y


def _recording_forward(delayed: DelayedScaling, x, w, y, state):
    return y, _recorded(delayed, _recorded(delayed, state, "input", x), "kernel", w)


def _recording_backward(delayed: DelayedScaling, state, dy):
    return None, None, dy, _recorded(delayed, state, "output_grad", dy)


_recording.defvjp(_recording_forward, _recording_backward)
