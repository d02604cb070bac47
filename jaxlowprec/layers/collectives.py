"""Collectives of quantised arrays, for use inside `jax.shard_map`: they send 4 or 8 bits per element instead of 16."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.quantized_array import QuantizedArray, check_quantized
from jaxlowprec.ops.checks import axis_from_the_front, mesh_axes
from jaxlowprec.ops.rounding import from_bits, magnitude_bits
from jaxlowprec.wiring.defining import as_bytes, from_bytes, varying_axes

AxisName = Hashable


def all_gather_quantized(q: QuantizedArray, axis_name: AxisName, axis: int = 0) -> QuantizedArray:
    """Gathers the quantised shards of an array: `jax.lax.all_gather(x, axis_name, axis=axis, tiled=True)` of the arrays
    that they stand for.

    The bytes are those of quantising the gathered array, rowwise or columnwise, so quantising before the gather changes
    only what is sent: codes and block scales, for NVFP4 0.5625 bytes per element. Shards of a format with a tensor
    scale must share it: quantise them with `axis_name=`, or with the `amax=` of the whole array.

    Arguments:
        q: this device's shard. Along the quantised axis its length is a multiple of the block (and of the rotation's
            size); if blocks are square tiles, so is the length of the other axis.
        axis_name: the mesh axis along which the shards lie, or a tuple of mesh axes with the major one first.
        axis: the logical axis of q along which the shards are joined.

    Returns:
        A QuantizedArray with the shape of q, but the size of `axis` multiplied by that of `axis_name`. If the shards do
            not share their tensor scale, or signs of their rotation that were drawn, all of it decodes to NaN.

    Raises:
        TypeError: q is not a QuantizedArray.
        ValueError: q does not have that axis, there is no such mesh axis, or a shard ends within a block.

    Source: numerics.md 2 to 6 for what the bytes are.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> from jax.sharding import PartitionSpec as P
    >>> def gathered_kernel(shard):  # [K / n, N] of a kernel [K, N]
    ...     q = jlp.quantize(shard, jlp.NVFP4((16, 16)), axis=-2, axis_name="fsdp")
    ...     return jlp.all_gather_quantized(q, "fsdp")
    >>> mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> on_all = jax.shard_map(gathered_kernel, mesh=mesh, in_specs=P("fsdp"), out_specs=P(), check_vma=False)
    >>> on_all(jnp.ones((64, 32))).shape
    (64, 32)
    """
    who = "all_gather_quantized"
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"{who}: q is a {type(q).__name__}; needs a QuantizedArray: quantise the shard first")
    check_quantized(who, "q", q)
    mesh_axes(who, axis_name)
    from_the_end = axis_from_the_front(who, axis, q.ndim, f"a QuantizedArray of shape {q.shape}") - q.ndim
    if from_the_end < -len(q.matrix_shape):

        def together(leaf: jax.Array) -> jax.Array:
            return _gathered(leaf, axis_name, from_the_end + q.ndim)

        return jax.tree.map(together, q)
    along_blocks = len(q.matrix_shape) == 1 or from_the_end == q.axis
    _check_whole_blocks(who, q, from_the_end, along_blocks)
    dim = -1 if along_blocks else -2
    sizes = list(q.matrix_shape)
    sizes[from_the_end] *= jax.lax.axis_size(axis_name)
    per_tensor = q.format.scaling == "tensor"
    scale = _shared(q.scale, q.data, axis_name) if per_tensor else _gathered(q.scale, axis_name, dim)
    scale, signs = _with_shared_signs(scale, q, axis_name)
    return dataclasses.replace(
        q,
        data=_gathered(q.data, axis_name, dim),
        scale=scale,
        amax=None if q.amax is None else _shared(q.amax, q.data, axis_name),
        zero_point=None if q.zero_point is None else _gathered(q.zero_point, axis_name, dim),
        matrix_shape=tuple(sizes),
        signs=signs,
    )


def _check_whole_blocks(who: str, q: QuantizedArray, axis: int, along_blocks: bool) -> None:
    fmt, size = q.format, q.matrix_shape[axis]
    unit = fmt.length if along_blocks or fmt.tiles else 1
    what = f"blocks of {fmt}"
    if along_blocks and fmt.packed:
        unit = math.lcm(unit, 2)
    if along_blocks and q.hadamard is not None:
        unit, what = math.lcm(unit, q.hadamard.size), f"{what}, rotated by {q.hadamard.size}"
    if size % unit:
        raise ValueError(
            f"{who}: the shard of shape {q.shape} has {size} along axis {axis}; {what} need a multiple of {unit}, or "
            "gather before quantising"
        )


def _gathered(x: jax.Array, axis_name: AxisName, axis: int) -> jax.Array:
    """Gathers an array as bytes, because some collectives would widen 8-bit floats."""
    together = jax.lax.all_gather(as_bytes(x), axis_name, axis=axis % x.ndim, tiled=True)
    return from_bytes([together], [x.dtype])[0]


def _shared(x: jax.Array, shards: jax.Array, axis_name: AxisName) -> jax.Array:
    """A number that all shards should have; NaN if they differ."""
    if _is_shared(x, shards, axis_name):
        return x
    largest, alike = _agreed(magnitude_bits(x), axis_name)
    return jnp.where(alike, from_bits(largest), jnp.nan)


def _with_shared_signs(scale: jax.Array, q: QuantizedArray, axis_name: AxisName) -> tuple[jax.Array, jax.Array | None]:
    """The scale, NaN where shards differ in the signs of their rotation, and the signs."""
    if q.signs is None or _is_shared(q.signs, q.data, axis_name):
        return scale, q.signs
    signs, alike = _agreed(q.signs, axis_name)
    alike = alike.all(axis=-1)
    return jnp.where(jnp.expand_dims(alike, tuple(range(alike.ndim, scale.ndim))), scale, jnp.nan), signs


def _is_shared(x: jax.Array, shards: jax.Array, axis_name: AxisName) -> bool:
    """Whether the type of x says that all shards have the same."""
    names = set(axis_name) if isinstance(axis_name, tuple) else {axis_name}
    return bool(names & varying_axes(shards)) and not names & varying_axes(x)


def _agreed(bits: jax.Array, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """The largest of the shards' unsigned integers, and where all shards have it."""
    largest, inverted = jax.lax.pmax((bits, ~bits), axis_name)
    return largest, largest == ~inverted
