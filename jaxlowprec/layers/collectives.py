"""Collectives of quantised arrays, for use inside `jax.shard_map`: they send 4 or 8 bits per element instead of 16."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arguments import shown
from jaxlowprec.arrays.quantized_array import QuantizedArray, check_quantized
from jaxlowprec.ops.byte_collectives import exchanged, gathered, names_of, size_along
from jaxlowprec.ops.checks import axis_from_the_front, mesh_axes
from jaxlowprec.ops.rounding import from_bits, magnitude_bits, widened
from jaxlowprec.wiring.defining import varying_axes

AxisName = Hashable


def all_gather_quantized(q: QuantizedArray, axis_name: AxisName, *, axis: int = 0) -> QuantizedArray:
    """Gathers the quantised shards of an array: `jax.lax.all_gather(x, axis_name, axis=axis, tiled=True)` of the arrays
    that they stand for.

    The bytes are those of quantising the gathered array, rowwise or columnwise, so quantising before the gather changes
    only what is sent: codes and block scales, for NVFP4 0.5625 bytes per element. Shards of a format with a tensor
    scale must share it: quantise them with `axis_name=`, or with the `amax=` of the whole array. So must shards of
    Float8Rows and Int8Rows along the quantised axis, whose lines go on from one to the next.

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
    names = _checked(who, q, axis_name)
    from_the_end = axis_from_the_front(who, axis, q.ndim, f"a QuantizedArray of shape {q.shape}") - q.ndim
    if from_the_end < -len(q.matrix_shape):
        return jax.tree.map(lambda leaf: gathered(leaf, names, from_the_end + q.ndim), q)
    along_blocks = _is_along_blocks(q, from_the_end)
    _check_whole_blocks(who, q, from_the_end, q.matrix_shape[from_the_end])
    dim = -1 if along_blocks else -2
    sizes = list(q.matrix_shape)
    sizes[from_the_end] *= jax.lax.axis_size(axis_name)
    shares = q.format.scaling == "tensor" or (q.format.scaling == "rows" and along_blocks)
    scale = _shared(q.scale, q.data, axis_name) if shares else gathered(q.scale, names, dim)
    scale, signs = _with_shared_signs(scale, q, axis_name)
    return dataclasses.replace(
        q,
        data=gathered(q.data, names, dim),
        scale=scale,
        amax=None if q.amax is None else _shared(q.amax, q.data, axis_name),
        zero_point=None if q.zero_point is None else gathered(q.zero_point, names, dim),
        matrix_shape=tuple(sizes),
        signs=signs,
    )


def _checked(who: str, q: Any, axis_name: AxisName) -> tuple[AxisName, ...]:
    """The mesh axes. Raises unless q is a QuantizedArray and there are such axes."""
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"{who}: q is a {type(q).__name__}; needs a QuantizedArray: quantise it first")
    check_quantized(who, "q", q)
    mesh_axes(who, axis_name)
    return names_of(axis_name)


def all_to_all_quantized(
    q: QuantizedArray, axis_name: AxisName, split_axis: int = 0, concat_axis: int = 0
) -> QuantizedArray:
    """Sends a part of a quantised array to each device: `jax.lax.all_to_all(x, axis_name, split_axis, concat_axis,
    tiled=True)` of the arrays that they stand for.

    What travels are codes and block scales, and nothing is quantised again: what is decoded afterwards has the bits
    that it would have had before.

    Arguments:
        q: this device's array. Its length along `split_axis`, divided by the number of devices, and along `concat_axis`
            is a multiple of what `all_gather_quantized` needs.
        axis_name: the mesh axis along which the devices lie, or a tuple of mesh axes with the major one first.
        split_axis: the logical axis of q that is cut into as many parts as there are devices.
        concat_axis: the logical axis along which the parts that came are joined, in the order of their devices. With a
            tensor scale in the format, both are axes of the matrix, and all devices share it, or both are batch axes.

    Returns:
        A QuantizedArray. If the devices do not share a tensor scale, or drawn signs of a rotation, it decodes to NaN.

    Raises:
        TypeError: q is not a QuantizedArray.
        ValueError: q does not have those axes, there is no such mesh axis, a part ends within a block, or a tensor
            scale's slices would have to be joined.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> from jax.sharding import PartitionSpec as P
    >>> def dispatched(rows):  # [n * C, D]: C rows for each device -> [n * C, D], C rows of each device
    ...     return jlp.all_to_all_quantized(jlp.quantize(rows, jlp.MXFP8()), "expert")
    >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> jax.shard_map(dispatched, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))(jnp.ones((8, 64))).shape
    (8, 64)
    """
    who = "all_to_all_quantized"
    names = _checked(who, q, axis_name)
    of = f"a QuantizedArray of shape {q.shape}"
    split, together = (axis_from_the_front(who, axis, q.ndim, of) - q.ndim for axis in (split_axis, concat_axis))
    _check_parts(who, q, split, together, size_along(names), axis_name)
    matrix = -len(q.matrix_shape)
    batches = split < matrix

    def dim_of(axis: int, ndim: int) -> int:
        """The dimension of codes or block scales, which are stored along the blocks, for a logical axis."""
        if axis < matrix:
            return axis + q.ndim
        return ndim - 1 if _is_along_blocks(q, axis) else ndim - 2

    def moved(leaf: jax.Array) -> jax.Array:
        return exchanged(leaf, names, dim_of(split, leaf.ndim), dim_of(together, leaf.ndim))

    def of_slices(leaf: jax.Array) -> jax.Array:
        """Exchanges a leaf that has one value per slice, if batch axes are split; otherwise shares it."""
        if batches:
            return exchanged(leaf, names, split + q.ndim, together + q.ndim)
        return _shared(leaf, q.data, axis_name)

    scale, signs, amax = q.scale, q.signs, q.amax
    scale = of_slices(scale) if q.format.scaling == "tensor" else moved(scale)
    if signs is not None and batches:
        signs = of_slices(signs)
    elif signs is not None:
        scale, signs = _with_shared_signs(scale, q, axis_name)
    if amax is not None:
        lines = q.format.row_scaled and not batches and not _is_along_blocks(q, split)
        amax = exchanged(amax, names, amax.ndim - 1, amax.ndim - 1) if lines else of_slices(amax)
    sizes = list(q.matrix_shape)
    if split >= matrix:
        sizes[split] //= size_along(names)
    if together >= matrix:
        sizes[together] *= size_along(names)
    return dataclasses.replace(
        q,
        data=moved(q.data),
        scale=scale,
        amax=amax,
        zero_point=None if q.zero_point is None else moved(q.zero_point),
        matrix_shape=tuple(sizes),
        signs=signs,
    )


def _check_parts(who: str, q: QuantizedArray, split: int, together: int, devices: int, axis_name: AxisName) -> None:
    """Raises ValueError if q cannot be cut along one axis and joined along another, both counted from the end."""
    matrix = -len(q.matrix_shape)
    if q.shape[split] % devices:
        raise ValueError(
            f"{who}: q {q.shape} has {q.shape[split]} along axis {split + q.ndim}, and there are {devices} devices "
            f"along {shown(axis_name)}; needs a multiple of that"
        )
    for axis, size in ((split, q.shape[split] // devices), (together, q.shape[together])):
        if axis >= matrix:
            _check_whole_blocks(who, q, axis, size)
    of_slices = q.format.has_tensor_scale or q.signs is not None
    alike = split == together or not q.format.row_scaled
    if not alike or (of_slices and (split < matrix) != (together < matrix)):
        needs = "one axis for both" if q.format.row_scaled else "two axes of the matrix, or two batch axes"
        raise ValueError(
            f"{who}: q {q.shape} in {q.format} would be cut along axis {split + q.ndim} and joined along axis "
            f"{together + q.ndim}, but its slices or rows have amaxes or signs of their own; needs {needs}"
        )


def _is_along_blocks(q: QuantizedArray, axis: int) -> bool:
    """Whether a logical axis of the matrix, counted from the end, is the one that blocks run along."""
    return len(q.matrix_shape) == 1 or axis == q.axis


def _check_whole_blocks(who: str, q: QuantizedArray, axis: int, size: int) -> None:
    """Raises ValueError if a part of this size along an axis of the matrix ends within a block."""
    fmt, along_blocks = q.format, _is_along_blocks(q, axis)
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


def _shared(x: jax.Array, shards: jax.Array, axis_name: AxisName) -> jax.Array:
    """A number that all shards should have; NaN if they differ."""
    if _is_shared(x, shards, axis_name):
        return x
    largest, alike = _agreed(magnitude_bits(widened(x)), axis_name)
    return jnp.where(alike, from_bits(largest), jnp.nan).astype(x.dtype)


def _with_shared_signs(scale: jax.Array, q: QuantizedArray, axis_name: AxisName) -> tuple[jax.Array, jax.Array | None]:
    """The scale, NaN where shards differ in the signs of their rotation, and the signs."""
    if q.signs is None or _is_shared(q.signs, q.data, axis_name):
        return scale, q.signs
    signs, alike = _agreed(q.signs, axis_name)
    alike = alike.all(axis=-1)
    return jnp.where(jnp.expand_dims(alike, tuple(range(alike.ndim, scale.ndim))), scale, jnp.nan), signs


def _is_shared(x: jax.Array, shards: jax.Array, axis_name: AxisName) -> bool:
    """Whether the type of x says that all shards have the same."""
    names = set(names_of(axis_name))
    return bool(names & varying_axes(shards)) and not names & varying_axes(x)


def _agreed(bits: jax.Array, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """The largest of the shards' unsigned integers, and where all shards have it."""
    largest, inverted = jax.lax.pmax((bits, ~bits), axis_name)
    return largest, largest == ~inverted
