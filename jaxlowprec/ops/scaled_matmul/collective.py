"""Collective matmul: products of what is spread over devices, in steps that overlap with what travels."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlowprec.arguments import shown
from jaxlowprec.arrays.quantized_array import QuantizedArray, check_quantized
from jaxlowprec.ops.byte_collectives import names_of, passed_on, size_along
from jaxlowprec.ops.checks import mesh_axes
from jaxlowprec.ops.scaled_matmul.api import scaled_matmul


def all_gather_matmul(
    lhs: QuantizedArray, rhs: QuantizedArray, axis_name: Hashable, **options: Any
) -> Float[Array, "M_all N"]:
    """`scaled_matmul(all_gather_quantized(lhs, axis_name), rhs)`; shards are multiplied while the next ones travel.

    The shards go around a ring of the devices: in each of n steps a device multiplies the shard that it has, and passes
    its codes and scales on. Rows of a product do not depend on each other, so the bits are those of the product of the
    gathered array. For sequence parallelism: lhs is this device's part of the activations, rhs its part of the
    kernel.

    Arguments:
        lhs: this device's shard [M, K], quantised rowwise.
        rhs: [N, K], quantised along K, see `scaled_matmul`.
        axis_name: the mesh axis along which the shards lie, or a tuple of mesh axes with the major one first.
        options: `bias`, `activation`, `preferred_element_type`, `implementation` and `precision` of `scaled_matmul`.

    Returns:
        [n * M, N] on each device, the rows in the order of the devices.

    Raises:
        TypeError: an operand is not a QuantizedArray, or another option.
        ValueError: operands that do not fit, or no such mesh axis.

    Source: "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS
        2023; numerics.md 9.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> from jax.sharding import PartitionSpec as P
    >>> def hidden(x, kernel):  # [T / n, K] and [N / n, K]
    ...     return jlp.all_gather_matmul(jlp.quantize(x, jlp.MXFP8()), jlp.quantize(kernel, jlp.MXFP8()), "tensor")
    >>> mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> on_all = jax.shard_map(hidden, mesh=mesh, in_specs=(P("tensor"), P("tensor")), out_specs=P(None, "tensor"))
    >>> on_all(jnp.ones((8, 64)), jnp.ones((32, 64))).shape
    (8, 32)
    """
    who = "all_gather_matmul"
    axes = _checked(who, lhs, rhs, axis_name, options)
    devices, index = size_along(axes), jax.lax.axis_index(axes)
    rows = lhs.shape[0]
    whole: Any = None
    for step in range(devices):
        y: Any = scaled_matmul(lhs, rhs, **options)
        whole = _like(y, (devices * rows, y.shape[1])) if whole is None else whole
        place = (index - step) % devices * rows  # the shard came from as many devices before this one
        whole = jax.lax.dynamic_update_slice_in_dim(whole, y, place, axis=0)
        if step + 1 < devices:
            lhs = jax.tree.map(lambda leaf: passed_on(leaf, axes), lhs)
    return whole


def matmul_reduce_scatter(
    lhs: QuantizedArray,
    rhs: QuantizedArray,
    axis_name: Hashable,
    *,
    preferred_element_type: jax.typing.DTypeLike = jnp.bfloat16,
    **options: Any,
) -> Float[Array, "M_part N"]:
    """The sum of `scaled_matmul(lhs, rhs)` over devices, of whose rows each keeps its part, while products go on.

    The sums of a part go around a ring of the devices: each adds its product of the part's rows, in float32, and passes
    the sum on. Part j begins on device j + 1 and ends on device j, so its terms are added in that order, and rounded
    once. For sequence parallelism: lhs and rhs are this device's parts of activations and kernel along K.

    Arguments:
        lhs: [M, K], quantised rowwise; M is a multiple of the number of devices, and of square tiles in each part.
        rhs: [N, K], quantised along K, see `scaled_matmul`.
        axis_name: see `all_gather_matmul`.
        preferred_element_type: dtype of the result.
        options: `implementation` and `precision` of `scaled_matmul`.

    Returns:
        [M / n, N]: this device's part of the rows.

    Raises:
        TypeError: an operand is not a QuantizedArray, or another option.
        ValueError: operands that do not fit, or no such mesh axis.

    Source: see `all_gather_matmul`.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> from jax.sharding import PartitionSpec as P
    >>> def down(x, kernel):  # [T, K / n] and [N, K / n]
    ...     return jlp.matmul_reduce_scatter(jlp.quantize(x, jlp.MXFP8()), jlp.quantize(kernel, jlp.MXFP8()), "tensor")
    >>> mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> split = P(None, "tensor")
    >>> on_all = jax.shard_map(down, mesh=mesh, in_specs=(split, split), out_specs=P("tensor"))
    >>> on_all(jnp.ones((8, 64)), jnp.ones((32, 64))).shape
    (8, 32)
    """
    who = "matmul_reduce_scatter"
    axes = _checked(who, lhs, rhs, axis_name, options, allowed=("implementation", "precision"))
    devices = size_along(axes)
    rows, unit = lhs.shape[0] // devices, lhs.format.length if lhs.format.tiles else 1
    if lhs.shape[0] % devices or rows % unit:
        raise ValueError(
            f"{who}: lhs {lhs.shape} has {lhs.shape[0]} rows for {devices} devices along {shown(axis_name)}; needs a "
            f"multiple of {unit} rows for each"
        )
    index = jax.lax.axis_index(axes)
    total: Any = None
    for step in range(1, devices + 1):
        part = (index - step) % devices  # which arrives at its device in the last step
        y: Any = scaled_matmul(_rows_of(lhs, part, rows), rhs, preferred_element_type=jnp.float32, **options)
        total = y if total is None else passed_on(total, axes) + y
    return total.astype(preferred_element_type)


_OPTIONS = ("bias", "activation", "preferred_element_type", "implementation", "precision")


def _checked(
    who: str, a: Any, b: Any, axis_name: Any, options: dict[str, Any], allowed: tuple[str, ...] = _OPTIONS
) -> tuple[Hashable, ...]:
    """The mesh axes."""
    for name, q in (("lhs", a), ("rhs", b)):
        check_quantized(who, name, q)
        if q.ndim != 2:
            raise ValueError(f"{who}: {name} has shape {q.shape}; needs a matrix: map over batch axes with jax.vmap")
    if a.axis != -1:
        raise ValueError(f"{who}: lhs is quantised along axis {a.axis}; needs -1, the contracted one")
    if further := [name for name in options if name not in allowed]:
        raise TypeError(f"{who}: {further[0]}= is not among its options; needs {', '.join(allowed)}")
    mesh_axes(who, axis_name)
    return names_of(axis_name)


def _like(y: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Zeros of y's dtype, which vary over the mesh axes that y varies over."""
    return jnp.zeros(shape, y.dtype) + jnp.zeros_like(y[:1, :1])


def _rows_of(a: QuantizedArray, part: jax.Array, rows: int) -> QuantizedArray:
    """Part number `part` of the rows."""

    def cut(leaf: jax.Array, size: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(leaf, part * size, size, axis=0)

    tiled = rows // a.format.length if a.format.tiles else rows
    per_tensor = a.format.scaling == "tensor"
    amax = a.amax
    if amax is not None and a.format.row_scaled:
        amax = cut(amax, rows)
    return dataclasses.replace(
        a,
        data=cut(a.data, rows),
        scale=a.scale if per_tensor else cut(a.scale, tiled),
        amax=amax,
        zero_point=None if a.zero_point is None else cut(a.zero_point, tiled),
        matrix_shape=(rows, a.matrix_shape[1]),
    )
