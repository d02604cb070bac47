"""The quantised linear, and kernels that are quantised once for many calls of it."""

from __future__ import annotations

import functools
import math
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxlowprec.arguments import one_of
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers import delayed_scaling, weight_only
from jaxlowprec.layers.layer_call import LayerCall, layer_call, quantized_weight
from jaxlowprec.layers.low_rank import LoRAKernel, add_product, check_adapter
from jaxlowprec.layers.operands import Shard
from jaxlowprec.layers.options import LayerSettings, LinearOptions
from jaxlowprec.layers.product import QuantizedKernel
from jaxlowprec.layers.residuals import in_profiles, tag_product
from jaxlowprec.layers.watched import watched
from jaxlowprec.ops.checks import a_sharding, float_array
from jaxlowprec.ops.quantize.random_bits import check_key
from jaxlowprec.recipes.autocast import FROM_CONTEXT, resolve
from jaxlowprec.recipes.roles import MODULE_TYPES, ModuleType, Recipe
from jaxlowprec.wiring.sharding_rule import ShardingLike, resharded


def quantize_kernel(
    kernel: Float[Array, "*B K N"],
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    name: str = "",
    state: delayed_scaling.State | None = None,
    key: jax.Array | None = None,
    module_type: ModuleType = "linear",
) -> QuantizedKernel:
    """Quantises a weight once, to be reused over microbatches and inference steps.

    Pass it to `linear` or `grouped_matmul` as `quantized_kernel=`: the gradient still reaches the kernel, the master
    weight. It has the kernel's present value: after an optimizer step, quantise again.

    Arguments:
        kernel: the master weight, bfloat16, float16 or float32.
        recipe: the recipe whose weight role is used; default: the context's.
        name: the layer's name, for recipes that treat layers differently (`Custom`).
        state: the state of delayed scaling, see `linear` and `grouped_matmul`.
        key: for recipes that rotate dgrad's operands by drawn signs (`NVFP4Eden`), or round its weight with random
            bits, as `linear` takes it; give another one in each step. None: they come from the kernel itself (its
            amax), its shape and `name`.
        module_type: "grouped_linear" for kernels [E, K, N] of experts: recipes may treat them differently.

    Raises:
        ValueError: there is no recipe, it keeps this weight in high precision, or another module_type.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> jlp.quantize_kernel(jnp.ones((64, 32)), jlp.NVFP4BlockScaling()).shape
    (64, 32)
    """
    who = "quantize_kernel"
    if resolve(who, recipe) is None:
        raise ValueError(f"{who}: no recipe; pass recipe= or call it within jaxlowprec.autocast(recipe)")
    kernel = check_kernel_to_quantize(who, kernel, key, module_type)
    found = quantized_once(who, kernel, recipe, name=name, state=state, key=key, module_type=module_type)
    if found is None:
        raise ValueError(f"{who}: {resolve(who, recipe)!r} keeps the weight of layer {name!r} in high precision")
    return found


def check_kernel_to_quantize(who: str, kernel: Any, key: Any, module_type: Any) -> jax.Array:
    """The kernel. Raises TypeError or ValueError if one of these cannot be quantised, or is none."""
    kernel = float_array(who, "kernel", kernel)
    if kernel.ndim < 2:
        raise ValueError(f"{who}: kernel has shape {kernel.shape}; needs [..., K, N]")
    one_of(who, "module_type", module_type, *MODULE_TYPES)
    check_key(who, key)
    return kernel


def quantized_once(
    who: str,
    kernel: jax.Array,
    recipe: Any,
    *,
    name: str,
    state: Any,
    key: Any,
    module_type: ModuleType,
    shard: Shard | None = None,
) -> QuantizedKernel | None:
    """A kernel [..., K, N] quantised as a recipe says, or None if the recipe keeps it in high precision.

    `shard`: how it is one.
    """
    recipe, given = resolve(who, recipe, name), resolve(who, recipe)
    if recipe is None or given is None or not (roles := given.roles(module_type, name)).quantizes_weight:
        return None
    if shard is not None and roles.draws_for_weight:
        raise ValueError(
            f"{who}: {given} draws signs or bits for the weight, which would differ from shard to shard; gather the "
            "kernel in high precision, or use another recipe"
        )
    _, column = roles.forms("weight")
    if roles.ste is not None and column is not None:
        weight_only.check_whole_blocks(who, name, kernel, column.format)
        with in_profiles(name, "quantize weight"):
            served = weight_only.quantize_weight(kernel, column.format, roles.served_dtype, shard)
            return QuantizedKernel(None, served, weight_only=True)
    encode = None
    if recipe.delayed is not None and column is not None:
        experts = kernel.shape[0] if module_type == "grouped_linear" and kernel.ndim > 2 else None
        state = delayed_scaling.check_state(who, recipe.delayed, state, experts)
        encode = delayed_scaling.encode_scale(recipe.delayed, state, "kernel", column.format.maximum)
    with in_profiles(name, "quantize weight"):
        return quantized_weight(who, roles, kernel, key, name, encode, shard)


def kernel_matrices(kernel: Any, batch: int, contracted: int) -> jax.Array:
    """A kernel [batch..., contracted..., features...] as matrices [batch..., K, N], by the numbers of these axes."""
    sizes, rest = kernel.shape[:batch], kernel.shape[batch:]
    return kernel.reshape(*sizes, math.prod(rest[:contracted]), math.prod(rest[contracted:]))


@overload
def linear(
    x: Float[Array, "*T K"],
    kernel: Float[Array, "K N"] | QuantizedArray | LoRAKernel | None,
    bias: Float[Array, "N"] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    state: None = None,
    **options: Unpack[LinearOptions],
) -> Float[Array, "*T N"]: ...


@overload
def linear(
    x: Float[Array, "*T K"],
    kernel: Float[Array, "K N"] | QuantizedArray | LoRAKernel | None,
    bias: Float[Array, "N"] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    state: delayed_scaling.State,
    **options: Unpack[LinearOptions],
) -> tuple[Float[Array, "*T N"], delayed_scaling.State]: ...


def linear(
    x: Float[Array, "*T K"],
    kernel: Float[Array, "K N"] | QuantizedArray | LoRAKernel | None,
    bias: Float[Array, "N"] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    key: jax.Array | None = None,
    quantized_kernel: QuantizedKernel | None = None,
    name: str = "",
    state: delayed_scaling.State | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*T N"] | tuple[Float[Array, "*T N"], delayed_scaling.State]:
    """`x @ kernel + bias`, with the operands of its three GEMMs quantised as the recipe says.

    A gradient has the dtype of its argument: a float32 master weight gets a float32 gradient, rounded once. The bias is
    added in float32 before the result is rounded once, and its gradient is the sum of the unquantised gradient.

    Arguments:
        x: [..., K], bfloat16, float16 or float32: the dtype of the result.
        kernel: [K, N], any of those dtypes, quantised from its own dtype. None with `quantized_kernel`, for inference.
            Or a loaded QuantizedArray [K, N], quantised along K (axis=-2), for inputs in high precision: it needs no
            recipe, gives bit for bit what quantisation-aware training gives for the kernel that it was made from, and
            is a constant to autodiff. Or one of both with an adapter, see `jaxlowprec.lora`.
        bias: [N].
        recipe: default: the context's (`autocast`). None: high precision, the kernel cast to x's dtype.
        key: for recipes that round gradients stochastically, or draw the signs of a rotation; see `quantize`. None:
            the bits are derived from the gradient itself (its amax), its shape and `name`, deterministically, and signs
            likewise from the input.
        quantized_kernel: `quantize_kernel(kernel)`, so that it is not quantised again.
        name: the layer's name, for the bits without a key and for recipes that treat layers differently.
        state: the state of delayed scaling, of `jaxlowprec.delayed_scaling.init_state`; its gradient is its new value.
        out_sharding: the sharding of the result [..., N], in JAX's explicit-sharding mode, as for `jnp.matmul`.
        precision: precision of the three GEMMs, as for `jax.lax.dot`; for quantised ones see `scaled_matmul`.

    Returns:
        [..., N]. With `state`, a pair of that and the state with an unchanged value: pass this one to the layer's next
            call, and the new values of both calls are combined by max.

    Raises:
        TypeError: dtypes do not fit, or the recipe is not a recipe.
        ValueError: shapes do not fit.

    Source: numerics.md 3 and 4; arXiv 2509.25149.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> x, w = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((64, 32))
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     dw = jax.grad(lambda w: jlp.linear(x, w).sum())(w)
    >>> dw.shape, dw.dtype
    ((64, 32), dtype('float32'))
    """
    who = "linear"
    a_sharding(who, "out_sharding", out_sharding)
    settings: LayerSettings = {"recipe": recipe, "key": key, "name": name, "state": state, "precision": precision}
    if isinstance(kernel, LoRAKernel):
        check_adapter(who, kernel)
        again: Any = {**settings, "quantized_kernel": quantized_kernel, "out_sharding": out_sharding}
        y: Any = linear(x, kernel.kernel, bias, **again)
        out_state: Any
        y, out_state = (y, None) if state is None else y
        y = add_product(y, jnp.atleast_2d(x), kernel.adapter, name)
        return y if state is None else (y, out_state)
    x = float_array(who, "x", x)
    kernel, bias, call = checked_call(who, x, kernel, bias, quantized_kernel, settings)
    compute = functools.partial(_linear, bias=bias, out_sharding=out_sharding)
    features = features_of(call, kernel)
    y, out_state = watched(call, x, kernel, compute, lambda: x.size * features)
    return y if state is None else (y, out_state)


def checked_call(
    who: str, x: jax.Array, kernel: Any, bias: Any, quantized_kernel: Any, settings: LayerSettings
) -> tuple[jax.Array | None, jax.Array | None, LayerCall]:
    """The kernel in high precision and the bias of a linear layer, if it has them, and its call.

    `settings`: what `layer_call` takes by name.
    """
    kernel, call = layer_call(who, kernel, quantized_kernel, **settings)
    if kernel is not None:
        kernel = float_array(who, "kernel", kernel)
        shape = kernel.shape
    elif call.quantized is not None:
        shape = call.quantized.shape
    else:
        raise ValueError(f"{who}: kernel is None; without quantized_kernel= there is no weight")
    if len(shape) != 2 or x.ndim < 1 or x.shape[-1] != shape[0]:
        raise ValueError(f"{who}: x {x.shape} and kernel {shape}: needs x [..., K] and kernel [K, N]")
    if bias is not None and (bias := float_array(who, "bias", bias)).shape != shape[1:]:
        raise ValueError(f"{who}: bias has shape {bias.shape}; needs {shape[1:]}, the kernel's N")
    return kernel, bias, call


def features_of(call: LayerCall, kernel: jax.Array | None) -> int:
    """N of the call's kernel [K, N]."""
    weight: Any = call.quantized if kernel is None else kernel
    return weight.shape[-1]


def _linear(call: LayerCall, x: Any, kernel: Any, bias: Any, out_sharding: ShardingLike) -> tuple[jax.Array, Any]:
    """The product, and the state of delayed scaling if there is one."""
    if call.in_high_precision(kernel):
        kernel = call.high_precision_weight(kernel)
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        with in_profiles(call.name):
            y = jax.lax.dot_general(x, kernel.astype(x.dtype), dims, call.precision, out_sharding=out_sharding)
            y = tag_product(y if bias is None else y + jnp.broadcast_to(bias.astype(x.dtype), y.shape))
        return call.recorded(x, kernel, y) if call.calibrates else (y, call.state)
    lines = [math.prod(x.shape[:-2]), x.shape[-2]] if x.ndim > 2 else [math.prod(x.shape[:-1])]
    tokens = x.reshape(*lines, x.shape[-1])
    fits = out_sharding if x.ndim in (2, 3) else None
    y, out_state = call.matmul(tokens, kernel, bias, x.dtype, fits, x.ndim > 2)
    return resharded(y.reshape(*x.shape[:-1], y.shape[-1]), out_sharding), out_state
