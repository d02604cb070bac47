"""The quantised linear, and what `linear`, `dot_general` and `einsum` share: which recipe, which layout, which product.

The product itself is `quantized_matmul`, or `weight_only` where the weight alone is quantised. Residuals carry
checkpoint names (`residuals`), for policies such as `jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxlowprec import wiring
from jaxlowprec.arguments import a_text, shown
from jaxlowprec.arrays.quantized_array import QuantizedArray, check_quantized
from jaxlowprec.linears import delayed_scaling, weight_only
from jaxlowprec.linears.quantized_matmul import Plan, QuantizedKernel, quantized_matmul, recording
from jaxlowprec.linears.residuals import in_profiles
from jaxlowprec.ops.checks import a_sharding, float_array
from jaxlowprec.ops.precision import checked_precision
from jaxlowprec.ops.quantize.api import quantize_both
from jaxlowprec.ops.quantize.checks import whole_slices
from jaxlowprec.ops.quantize.keys import check_key, key_words, slice_words
from jaxlowprec.ops.slices import merged_rows, sliced_rows
from jaxlowprec.recipes.autocast import FROM_CONTEXT, resolve
from jaxlowprec.recipes.roles import Recipe, Roles
from jaxlowprec.recipes.transformer_engine import Calibrating
from jaxlowprec.wiring.out_sharding import dimensions_of, resharded, sharding_of, sharding_of_product


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
        with in_profiles(name, "quantize weight"):
            return QuantizedKernel(None, weight_only.quantize_weight(kernel, role.format, roles.served_dtype))
    encode = None
    if recipe.delayed is not None:
        state = delayed_scaling.check_state("quantize_kernel", recipe.delayed, state)
        encode = delayed_scaling.encode_scale(recipe.delayed, state, "kernel", role.format.maximum)
    with in_profiles(name, "quantize weight"):
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
    precision: Any = None,
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
        precision: of the three GEMMs, as for `jax.lax.dot`; quantised ones see `scaled_matmul`.

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
    precision = checked_precision(who, precision)
    a_sharding(who, "out_sharding", out_sharding)
    kernel, quantized_kernel, recipe = operands_and_recipe(who, kernel, quantized_kernel, recipe, key, name, state)
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
        with in_profiles(name):
            y = jax.lax.dot_general(x, kernel.astype(x.dtype), dims, precision, out_sharding=out_sharding)
            y = y if bias is None else y + jnp.broadcast_to(bias.astype(x.dtype), y.shape)
        if isinstance(recipe, Calibrating):
            y, state = recorded(who, recipe, x, kernel, y, state)
        return y if state is None else (y, state)
    lines = [math.prod(x.shape[:-2]), x.shape[-2]] if x.ndim > 2 else [math.prod(x.shape[:-1])]
    tokens = x.reshape(*lines, shape[0])
    fits = out_sharding if x.ndim in (2, 3) else None
    options = (quantized_kernel, name, x.dtype, state, precision, fits, x.ndim > 2)
    y, out_state = matmul(who, tokens, kernel, bias, recipe, key, *options)
    y = resharded(y.reshape(*x.shape[:-1], shape[1]), out_sharding)
    return y if state is None else (y, out_state)


def operands_and_recipe(
    who: str, kernel: Any, quantized: Any, recipe: Any, key: Any, name: Any, state: Any
) -> tuple[jax.Array | None, QuantizedKernel | None, Recipe | None]:
    """The kernel, in high precision or loaded, and the recipe that its layer follows here; the rest is checked too."""
    a_text(who, name=name)
    check_key(who, key)
    if state is not None:
        delayed_scaling.check_mapping(who, state)
    if quantized is not None:
        check_kernel(who, quantized)
    if not isinstance(kernel, QuantizedArray):
        return kernel, quantized, resolve(who, recipe, name)
    if quantized is not None:
        raise ValueError(f"{who}: kernel is quantised and quantized_kernel= is given; needs one of them")
    weight_only.check_loaded(who, name, kernel, resolve(who, recipe))
    return None, QuantizedKernel(None, kernel), None


def check_kernel(who: str, quantized: Any) -> None:
    """Raises unless it is what `quantize_kernel` makes."""
    if not isinstance(quantized, QuantizedKernel):
        raise TypeError(f"{who}: quantized_kernel={shown(quantized)}; needs what jaxlowprec.quantize_kernel makes")
    check_quantized(who, "quantized_kernel.columnwise", quantized.columnwise)
    if quantized.rowwise is not None:
        check_quantized(who, "quantized_kernel.rowwise", quantized.rowwise)


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
    precision: Any,
    out_sharding: Any = None,
    slices: bool = False,
) -> tuple[Float[Array, "*B T N"], delayed_scaling.State | None]:
    """What `linear`, `dot_general` and `einsum` come down to: x in the input's role, w in the weight's.

    Without a recipe `quantized` is a loaded weight. `precision` is checked. `slices`: x is [..., S, T, K] for a weight
    without S, and so is the result; that S and T stay two axes lets a mesh split both. Where a block would lie on two
    slices they are merged.
    """
    if slices and _must_merge(who, x, w if w is not None else quantized, recipe, name):
        merged = matmul(who, merged_rows(x), w, bias, recipe, key, quantized, name, out_dtype, state, precision)
        return resharded(sliced_rows(merged[0], *x.shape[-3:-1]), out_sharding), merged[1]
    if out_sharding is None and sharding_of(x):  # the same type whatever is kept for the backward pass
        loaded: Any = quantized
        features = dimensions_of(w)[-1] if w is not None else dimensions_of(loaded.columnwise.data)[-2]
        out_sharding = sharding_of_product(x, features)
    if recipe is None:
        q: Any = None if quantized is None else quantized.columnwise
        served: tuple[Any, Any, None] = (q.format, "identity", None)
        options = (out_dtype, out_sharding, slices, precision)
        return weight_only.matmul(who, name, x, None, bias, q, *served, *options), state
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
        options = (out_dtype, out_sharding, slices, precision)
        return weight_only.matmul(who, name, x, w, bias, loaded, *how, *options), state
    words = None
    if key is not None and rounds_stochastically(roles):
        words = slice_words(key_words(who, key, ()), x.shape[: -3 if slices else -2])
    shardings = sharding_of(x), sharding_of(w), sharding_of(bias)
    result = jnp.dtype(out_dtype), shardings, out_sharding
    plan = Plan(roles, recipe.backward_override, recipe.delayed, name, *result, slices, precision)
    operands = wiring.align_varying(x, w, bias, words, quantized)
    if recipe.delayed is None:
        return quantized_matmul(plan, *operands, None), state
    used, state = delayed_scaling.used_and_handed_on(state)
    return quantized_matmul(plan, *operands, used), state


def _must_merge(who: str, x: jax.Array, weight: Any, recipe: Recipe | None, name: str) -> bool:
    """Whether slices [..., S, T, K] have to be merged, lest a block of x, or of its gradient, lie on two of them.

    Raises ValueError where that cannot be: two split axes would be strided.
    """
    roles = None if recipe is None else recipe.roles("linear", name)
    if roles is None or roles.ste is not None:  # x is not quantised
        return len(weight.shape) > 2  # a weight for each of further axes needs matrices
    quantised = [role for role in (roles.input, roles.gradient) if role is not None]
    together = math.lcm(*(whole_slices(r.format, r.hadamard, r.rounding, columnwise=True) for r in quantised))
    if x.size > 0 and x.shape[-2] % together == 0:
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
    return recording(recipe.delayed, *wiring.align_varying(x, w, y), used), state


def rounds_stochastically(roles: Roles) -> bool:
    """Whether a key is of use."""
    return roles.gradient is not None and roles.gradient.rounding == "stochastic"
