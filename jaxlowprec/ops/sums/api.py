"""Sums over devices whose terms travel quantised, for use inside `jax.shard_map`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxlowprec import wiring
from jaxlowprec.arguments import shown
from jaxlowprec.arrays.formats import MXFP8
from jaxlowprec.ops.byte_collectives import Axes, names_of, size_along
from jaxlowprec.ops.checks import axis_from_the_front, float_array, mesh_axes
from jaxlowprec.ops.quantize.random_bits import key_words
from jaxlowprec.ops.sums import quantized


def reduce_scatter_quantized(
    x: Float[Array, "..."], axis_name: Hashable, *, axis: int = 0, key: jax.Array, fmt: MXFP8 = quantized.FORMAT
) -> Float[Array, "..."]:
    """The sum of all devices' arrays, of which each device keeps its part: `jax.lax.psum_scatter(x, axis_name,
    scatter_dimension=axis, tiled=True)`, with terms that travel as MXFP8.

    Each device quantises the parts that it sends, rounding stochastically, and adds up those that it receives in
    float32, in the order of the devices along `axis_name`. It sends 1.03 bytes for each number that `psum_scatter`
    sends 2 or 4 for. For n devices with terms of equal size the relative error of the sum is that of one MXFP8 array,
    3.7 % (Frobenius norm), unbiased over keys. A NaN or an infinity makes its block of 32 of the sum NaN.

    The gradient of x is the gathered gradient of the result, in its own dtype.

    Arguments:
        x: bfloat16, float16 or float32; its size along `axis` is a multiple of the number of devices.
        axis_name: the mesh axis along which the terms lie, or a tuple of mesh axes with the major one first.
        axis: the axis of x that is scattered.
        key: a JAX key of two 32-bit words, the same on all devices: each device and each part draws bits of its own.
            Another one in each step.
        fmt: MXFP8, of either element, in blocks of 1x32 whose scales are rounded up. Sums in other formats are biased:
            where scales are rounded to nearest or down, the largest elements of a block saturate.

    Returns:
        x's dtype and shape, but for `axis`, which is divided by the number of devices.

    Raises:
        TypeError: x is not such an array, or the key is not usable.
        ValueError: there is no such axis or mesh axis, its size does not fit, or another format.

    Source: numerics.md 16.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> from jax.sharding import PartitionSpec as P
    >>> def summed(gradient):  # [K, N] on each device -> [K / n, N]
    ...     return jlp.reduce_scatter_quantized(gradient, "data", key=jax.random.key(0))
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=P(), out_specs=P("data")))(jnp.ones((64, 32))).shape
    (64, 32)
    """
    who = "reduce_scatter_quantized"
    x, names, words = _checked(who, x, axis_name, key, fmt)
    dim, devices = axis_from_the_front(who, axis, x.ndim), size_along(names)
    if x.shape[dim] % devices:
        raise ValueError(
            f"{who}: x {x.shape} has {x.shape[dim]} along axis {axis}, and there are {devices} devices along "
            f"{shown(axis_name)}; needs a multiple of that: pad x"
        )
    return _reduce_scatter(names, dim, fmt, x, words)


def all_reduce_quantized(
    x: Float[Array, "..."], axis_name: Hashable, *, key: jax.Array, fmt: MXFP8 = quantized.FORMAT
) -> Float[Array, "..."]:
    """The sum of all devices' arrays on each device: `jax.lax.psum(x, axis_name)`, with numbers that travel as MXFP8.

    A `reduce_scatter_quantized` of the flattened x, whose sums are quantised once more, rounding stochastically, and
    gathered. The relative error is 5.3 %, unbiased over keys. All devices have the same bytes.

    The gradient of x is the sum of the devices' gradients of the result, in their dtype, as for `psum` of an array that
    each device has its own copy of.

    Arguments:
        x: bfloat16, float16 or float32, of any shape.
        axis_name, key, fmt: see `reduce_scatter_quantized`.

    Raises:
        TypeError, ValueError: see `reduce_scatter_quantized`.

    Source: numerics.md 16.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> def summed(gradient):
    ...     return jlp.all_reduce_quantized(gradient, "data", key=jax.random.key(0))
    >>> summed = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    >>> float(summed(jnp.ones((64, 32)))[0, 0])
    1.0
    """
    x, names, words = _checked("all_reduce_quantized", x, axis_name, key, fmt)
    return _all_reduce(names, fmt, x, words)


def _checked(who: str, x: Any, axis_name: Any, key: Any, fmt: Any) -> tuple[jax.Array, Axes, jax.Array]:
    """x, the mesh axes, and the words of the key."""
    x = float_array(who, "x", x)
    mesh_axes(who, axis_name)
    if not isinstance(fmt, MXFP8) or fmt.tiles or fmt.scale_rule != "up":
        raise ValueError(
            f'{who}: fmt={shown(fmt)}; needs MXFP8 in blocks of 1x32 with scale_rule="up": sums in other formats are '
            "biased, because the largest elements of a block saturate"
        )
    if key is None:
        raise ValueError(f"{who}: key=None; terms are rounded stochastically: pass one, such as jax.random.key(step)")
    return x, names_of(axis_name), key_words(who, key, ())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _reduce_scatter(names: Axes, dim: int, fmt: MXFP8, x: jax.Array, words: jax.Array) -> jax.Array:
    x, words = wiring.align_varying(x, words)
    return quantized.reduce_scatter(x, names, dim, words, fmt=fmt).astype(x.dtype)


def _gathered(names: Axes, dim: int, fmt: MXFP8, residuals: None, dy: jax.Array) -> tuple[jax.Array, None]:
    return jax.lax.all_gather(dy, tuple(names), axis=dim, tiled=True), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _all_reduce(names: Axes, fmt: MXFP8, x: jax.Array, words: jax.Array) -> jax.Array:
    x, words = wiring.align_varying(x, words)
    return quantized.all_reduce(x, names, words, fmt=fmt).astype(x.dtype)


def _summed(names: Axes, fmt: MXFP8, residuals: None, dy: jax.Array) -> tuple[jax.Array, None]:
    return wiring.align_varying(jax.lax.psum(dy, tuple(names)), dy)[0], None


def _without_residuals(function: Callable) -> Callable:
    return lambda *args: (function(*args), None)


_reduce_scatter.defvjp(_without_residuals(_reduce_scatter), _gathered)
_all_reduce.defvjp(_without_residuals(_all_reduce), _summed)
