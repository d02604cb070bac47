"""Kernels that are split over devices, gathered as codes: FSDP by hand, within `jax.shard_map`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlowprec import wiring
from jaxlowprec.arguments import a_text
from jaxlowprec.layers.collectives import all_gather_quantized
from jaxlowprec.layers.layer_call import sum_randomness
from jaxlowprec.layers.linear import check_kernel_to_quantize, quantized_once
from jaxlowprec.layers.operands import Shard, sum_over_devices
from jaxlowprec.layers.product import QuantizedKernel
from jaxlowprec.layers.residuals import in_profiles
from jaxlowprec.ops.byte_collectives import Axes, names_of
from jaxlowprec.ops.checks import last_axis, mesh_axes
from jaxlowprec.ops.sums.kinds import SumKind, adder_of
from jaxlowprec.recipes.autocast import FROM_CONTEXT, resolve
from jaxlowprec.recipes.fields import IN_FLOAT32
from jaxlowprec.recipes.roles import ModuleType, Recipe


def all_gather_kernel(
    kernel: Float[Array, "*B K N"],
    axis_name: Hashable,
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    axis: int = -2,
    name: str = "",
    key: jax.Array | None = None,
    module_type: ModuleType = "linear",
) -> tuple[Float[Array, "*B K N"], QuantizedKernel | None]:
    """The whole kernel from this device's shard, for a layer's call: FSDP that gathers 4- or 8-bit codes.

    The shard is quantised as the recipe says, with the amax of the whole kernel, and its codes and scales are gathered:
    those of the quantised whole kernel, bit for bit. The gradient of the shard is its part of the sum of all devices'
    gradients, which travels as the recipe's `sums.wgrad` says.

    The whole kernel in high precision is returned, too, for what reads it: without a recipe, in GEMMs in high
    precision, for "clipped" gradients and for telemetry. Where nothing does, XLA does not gather it.

    Arguments:
        kernel: this device's shard, [..., K / n, N] or [..., K, N / n]; bfloat16, float16 or float32. Along the split
            axis it has whole blocks of the recipe's formats.
        axis_name: the mesh axis along which the shards lie, or a tuple of mesh axes with the major one first.
        recipe: default: the context's. None: nothing is quantised.
        axis: -2 if K is split, -1 if N is.
        name: the layer's name, for recipes that treat layers differently.
        key: for sums that draw (`Sums`), the same on all devices. None: random bits come from the kernel's scales.
        module_type: "grouped_linear" for kernels [E, K, N] of experts.

    Returns:
        The kernel and the quantised kernel, None if the recipe keeps it in high precision: the arguments `kernel` and
            `quantized_kernel` of `linear` and `grouped_matmul`.

    Raises:
        TypeError: kernel is not such an array, or the recipe is not a recipe.
        ValueError: there is no such axis or mesh axis; a shard ends within a block; a recipe that draws signs or bits
            for the weight (`NVFP4Eden`), or whose scale is a layer's state (`DelayedScaling`).

    Source: numerics.md 2 to 6 and 16; ZeRO, arXiv 1910.02054.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> from jax.sharding import PartitionSpec as P
    >>> def layer(x, shard):  # [T / n, K] and [K / n, N]
    ...     kernel, quantized = jlp.all_gather_kernel(shard, "fsdp")
    ...     return jlp.linear(x, kernel, quantized_kernel=quantized)
    >>> mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> on_all = jax.shard_map(layer, mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=P("fsdp"))
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     on_all(jnp.ones((8, 64)), jnp.ones((64, 32))).shape
    (8, 32)
    """
    who = "all_gather_kernel"
    a_text(who, name=name)
    kernel = check_kernel_to_quantize(who, kernel, key, module_type)
    axis = last_axis(who, axis, kernel.ndim)
    mesh_axes(who, axis_name)
    axes = names_of(axis_name)
    own = resolve(who, recipe, name)
    if own is not None and own.delayed is not None:
        raise ValueError(
            f"{who}: {own} scales by a state of the layer, which is not known here; use current scaling "
            "(Float8CurrentScaling)"
        )
    shard = jax.lax.stop_gradient(kernel)
    options: Any = {"name": name, "state": None, "key": key, "module_type": module_type}
    part = quantized_once(who, shard, recipe, shard=Shard(axis_name, axis), **options)
    if part is None or own is None:
        return jax.lax.all_gather(kernel, axes, axis=kernel.ndim + axis, tiled=True), None
    with in_profiles(name, "gather weight"):
        rowwise, columnwise = (
            None if form is None else all_gather_quantized(form, axis_name, axis=axis)
            for form in (part.rowwise, part.columnwise)
        )
    quantized = dataclasses.replace(part, rowwise=rowwise, columnwise=columnwise)
    sums = IN_FLOAT32
    if isinstance(own.roles(module_type, name).operands("wgrad", own.backward_override), tuple):
        sums = own.sums
    rows, columns = quantized.shape[-2:]
    source = sum_randomness(who, sums, key, (rows, columns), name)
    how = sum_over_devices(sums, "wgrad", source, columnwise if rowwise is None else rowwise)
    return _gathered(axes, kernel.ndim + axis, how.kind, kernel, how.words), quantized


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gathered(axes: Axes, dim: int, kind: SumKind, kernel: jax.Array, words: jax.Array | None) -> jax.Array:
    return jax.lax.all_gather(kernel, axes, axis=dim, tiled=True)


def _gathered_forward(
    axes: Axes, dim: int, kind: SumKind, kernel: jax.Array, words: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    return _gathered(axes, dim, kind, kernel, words), words


def _scattered(axes: Any, dim: int, kind: SumKind, words: jax.Array | None, dw: jax.Array) -> tuple[jax.Array, None]:
    total = adder_of(kind).add_up(dw.astype(jnp.float32), wiring.Partials({dim: axes}, (), ()), words)
    return total.astype(dw.dtype), None


_gathered.defvjp(_gathered_forward, _scattered)
