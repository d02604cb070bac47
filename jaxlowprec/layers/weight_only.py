"""The linear with only its weight quantised: for quantisation-aware training, and for loaded weights.

    fprop   y  = x @ q            the weight-only product that serves, with the same bits
    dgrad   dx = dy @ q decoded   in high precision
    wgrad   dw = x transposed @ dy, through the straight-through estimator to the master weight

The backward pass keeps x and the quantised weight, whose arrays have the name `CHECKPOINT_NAMES[1]`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.quantized_array import QuantizedArray, check_quantized
from jaxlowprec.layers.measured import measured_weight
from jaxlowprec.layers.operands import Shard, rounded_to
from jaxlowprec.layers.residuals import (
    CHECKPOINT_NAMES,
    bias_gradient,
    differentiated_once,
    dtype_marker,
    in_profiles,
    plain_wgrad,
    read,
    tag_product,
    tag_residual,
)
from jaxlowprec.ops.fake_quantize import fake_quantize
from jaxlowprec.ops.quantize.api import quantize
from jaxlowprec.ops.scaled_matmul.api import scaled_matmul
from jaxlowprec.ops.weight_only_matmul.api import weight_only_matmuls
from jaxlowprec.ops.weight_only_matmul.op import weight_only_dgrad
from jaxlowprec.recipes.roles import Recipe, Roles, StraightThrough
from jaxlowprec.telemetry.probes import Probe
from jaxlowprec.wiring.sharding_rule import ShardingLike, sharding_of


class WeightServing(NamedTuple):
    """How a weight is served, and how its gradient reaches the master weight.

    Attributes:
        format: the format that it is quantised to.
        ste: the straight-through estimator, see `fake_quantize`.
        served_dtype: the dtype that the master weight is rounded to before, or None.
    """

    format: Format
    ste: StraightThrough
    served_dtype: str | None


def served_by(loaded: QuantizedArray | None, roles: Roles | None) -> WeightServing:
    """How a recipe's roles serve a weight; without roles it was loaded."""
    if roles is None or roles.weight is None or roles.ste is None:
        assert loaded is not None
        return WeightServing(loaded.format, "identity", None)
    return WeightServing(roles.weight.format, roles.ste, roles.served_dtype)


@dataclasses.dataclass(frozen=True)
class _WeightOnlySpec:
    """The static description of a product. It does not contain the layer's name: equal layers are traced once.

    Attributes:
        shardings: those of x, w and bias, which their gradients get, too; see `out_sharding.sharding_of`.
        out_sharding: the sharding of the result, in explicit mode.
        rows_split: x is [..., S, T, K] for a weight without S.
        precision: precision of the backward GEMMs, checked; the forward GEMM always has float32 sums.
    """

    served: WeightServing
    out_dtype: jax.typing.DTypeLike
    shardings: tuple[Any, Any, Any]
    out_sharding: ShardingLike
    rows_split: bool
    precision: jax.lax.PrecisionLike


def matmul(
    x: Float[Array, "*B T K"],
    w: Float[Array, "*B K N"] | None,
    bias: Float[Array, "N"] | None,
    q: QuantizedArray | None,
    served: WeightServing,
    result: tuple[Any, Any, bool],
    precision: jax.lax.PrecisionLike,
    *,
    probe: Probe | None = None,
) -> Float[Array, "*B T N"]:
    """x times a weight as it is served: given the master weight w, its quantised form q, or both.

    `result`: the dtype, the sharding in explicit mode, and `rows_split` (see `_WeightOnlySpec`). `probe`: telemetry's.
    """
    out_dtype, out_sharding, rows_split = result
    shardings = sharding_of(x), sharding_of(w), sharding_of(bias)
    spec = _WeightOnlySpec(served, jnp.dtype(out_dtype), shardings, out_sharding, rows_split, precision)
    return _matmul_jit(spec, *wiring.align_varying(x, w, bias, q), probe)


def matmuls(
    x: Float[Array, "*B T K"],
    loaded: Sequence[tuple[QuantizedArray, Float[Array, "N"] | None]],
    out_dtype: jax.typing.DTypeLike,
    rows_split: bool,
    precision: jax.lax.PrecisionLike,
) -> tuple[Float[Array, "*B T N"], ...]:
    """`matmul` of x by several loaded weights [K, N], each with its bias or None: the same bytes and gradients.

    Not in explicit mode.
    """
    specs = tuple(
        _WeightOnlySpec(served_by(q, None), jnp.dtype(out_dtype), (None, None, None), None, rows_split, precision)
        for q, _ in loaded
    )
    x, weights, biases = wiring.align_varying(x, *(tuple(part) for part in zip(*loaded, strict=True)))
    return _matmuls_jit(specs, (x,) * len(specs), weights, biases)


def quantize_weight(
    w: Float[Array, "*B K N"], fmt: Format, served_dtype: str | None, shard: Shard | None = None
) -> QuantizedArray:
    """A weight as it is served: rounded to the served model's dtype, then quantised along K. `shard`: how w is one."""
    q = quantize(rounded_to(w, served_dtype), fmt, axis=-2, axis_name=shard and shard.axis_name_of(fmt, -2))
    return dataclasses.replace(q, dtype=w.dtype)


def through_estimator(dw: jax.Array, w: jax.Array, served: WeightServing) -> jax.Array:
    """The gradient of the master weight w from that of its quantised form, in the gradient's dtype."""
    as_served = rounded_to(w, served.served_dtype).astype(jnp.float32)
    _, estimator = jax.vjp(lambda w: fake_quantize(w, served.format, axis=-2, ste=served.ste), as_served)
    return estimator(dw.astype(jnp.float32))[0].astype(dw.dtype)


def check_whole_blocks(who: str, name: str, kernel: Any, fmt: Format) -> None:
    """Raises ValueError unless K of a kernel [..., K, N], or of its shape, and each shard of K end with a whole block.

    A block on two shards would be another block than the one that is served. Shards are checked as far as they are
    known here: local arrays of shard_map, arrays outside jit, axes in explicit mode. In automatic mode the op gathers
    what does not divide.
    """
    length, shard, block = kernel.shape[-2], _shard_of_k(kernel), fmt.length
    given = f"{who}: layer {name!r} has a kernel of shape {kernel.shape}, K = {length}"
    if not fmt.pad and length % block:
        raise ValueError(
            f"{given}, which is not a multiple of the group of {block} of {fmt}: use a group_size that divides it, or "
            "leave the layer out with exclude= (within shard_map this is a shard's K: or shard N instead)"
        )
    if shard != length and shard % block:
        raise ValueError(
            f"{given}, in shards of {shard}, which is not a multiple of the group of {block} of {fmt}: a group would "
            "lie on two shards; use a group_size that divides it, or shard N instead"
        )


def _shard_of_k(kernel: Any) -> int:
    sharding = jax.typeof(kernel).sharding if isinstance(kernel, jax.core.Tracer) else kernel.sharding
    if not isinstance(sharding, NamedSharding):
        return kernel.shape[-2]
    axes = [*sharding.spec, *[None] * kernel.ndim][kernel.ndim - 2] or ()
    return kernel.shape[-2] // math.prod(sharding.mesh.shape[a] for a in (axes if isinstance(axes, tuple) else (axes,)))


def check_loaded(who: str, name: str, q: QuantizedArray, recipe: Recipe | None) -> None:
    """Raises ValueError unless q is a kernel [..., K, N] quantised along K, in the recipe's format if there is one."""
    check_quantized(who, "kernel", q)
    if len(q.matrix_shape) != 2 or q.axis != -2:
        remedy = "pass kernel.mT" if len(q.matrix_shape) == 2 else "needs two dimensions"
        raise ValueError(
            f"{who}: layer {name!r} has a quantised kernel of shape {q.shape}, quantised along axis {q.axis}; needs "
            f"[K, N] quantised along K (axis=-2): {remedy}"
        )
    if recipe is None:
        return
    roles = recipe.roles("linear", name)
    role = roles.forms("weight")[1]
    wants = "high precision" if role is None else str(role.format)
    if roles.served is None and role is not None:
        wants += " with quantised activations"
    if roles.served is None or role is None or role.format != q.format:
        raise ValueError(
            f"{who}: layer {name!r} has a kernel in {q.format}, but the recipe wants {wants}; a loaded kernel needs no "
            "recipe: pass recipe=None or use autocast(enabled=False), or load what the recipe wants"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(
    spec: _WeightOnlySpec,
    x: jax.Array,
    w: jax.Array | None,
    bias: jax.Array | None,
    q: QuantizedArray | None,
    probe: Probe | None,
) -> jax.Array:
    return _fprop(spec, x, w, bias, q)[0]


def _fprop(
    spec: _WeightOnlySpec, x: jax.Array, w: jax.Array | None, bias: jax.Array | None, q: QuantizedArray | None
) -> tuple[jax.Array, QuantizedArray]:
    if q is None:
        assert w is not None
        with in_profiles("quantize weight"):
            q = quantize_weight(w, spec.served.format, spec.served.served_dtype)
    kept = tag_residual(
        q, CHECKPOINT_NAMES[1]
    )  # before fprop reads it, so that nothing quantises it again if it is kept
    with in_profiles("fprop"):
        return scaled_matmul(
            x,
            read(kept).mT,
            bias,
            preferred_element_type=spec.out_dtype,
            out_sharding=spec.out_sharding,
        ), kept


def _forward(
    spec: _WeightOnlySpec,
    x: jax.Array,
    w: jax.Array | None,
    bias: jax.Array | None,
    q: QuantizedArray | None,
    probe: Probe | None,
) -> tuple[jax.Array, Any]:
    x, w, bias = differentiated_once((x, w, bias))
    y, q = _fprop(spec, x, w, bias, q)
    markers = tuple(dtype_marker(a) for a in (x, w, bias))
    found = None
    if probe is not None:
        found = probe.gradient(probe.state) if w is None else measured_weight(probe, x, w, read(q), spec.rows_split)
    return tag_product(y), (
        None if w is None else x,
        q,
        w if spec.served.ste == "clipped" else None,
        markers,
        found,
    )


def _backward(spec: _WeightOnlySpec, residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
    x, kept, clipped, (x_marker, w_marker, bias_marker), found = residuals
    x_sharding, w_sharding, bias_sharding = spec.shardings
    dy = differentiated_once(dy)
    # JAX does not check these dtypes: they must be those of the primals.
    with in_profiles("dgrad"):
        dx = weight_only_dgrad(dy, read(kept).mT, x_marker.dtype, x_sharding, spec.precision)
    dw: Any = None
    if w_marker is not None:
        with in_profiles("wgrad"):
            dw = plain_wgrad(x, dy, spec.rows_split, w_marker.dtype, w_sharding, spec.precision)
    if clipped is not None:
        dw = through_estimator(dw, clipped, spec.served)
    return dx, dw, bias_gradient(dy, bias_marker, bias_sharding), None, found


_matmul.defvjp(_forward, _backward)
_matmul_jit = jax.jit(_matmul, static_argnums=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmuls(
    specs: tuple[_WeightOnlySpec, ...],
    xs: tuple[jax.Array, ...],
    weights: tuple[QuantizedArray, ...],
    biases: tuple[jax.Array | None, ...],
) -> tuple[jax.Array, ...]:
    """The products of one x, which is given for each: so autodiff adds up its gradients as those of separate calls."""
    return _fprops(specs, xs, [tag_residual(q, CHECKPOINT_NAMES[1]) for q in weights], biases)


def _fprops(
    specs: tuple[_WeightOnlySpec, ...],
    xs: tuple[jax.Array, ...],
    kept: Sequence[QuantizedArray],
    biases: tuple[jax.Array | None, ...],
) -> tuple[jax.Array, ...]:
    with in_profiles("fprop"):
        weights = [read(q).mT for q in kept]
        return weight_only_matmuls("scaled_matmul", xs[0], weights, biases, specs[0].out_dtype)


def _matmuls_forward(
    specs: tuple[_WeightOnlySpec, ...],
    xs: tuple[jax.Array, ...],
    weights: tuple[QuantizedArray, ...],
    biases: tuple[jax.Array | None, ...],
) -> tuple[tuple[jax.Array, ...], Any]:
    xs, biases = differentiated_once((xs, biases))
    kept = [tag_residual(q, CHECKPOINT_NAMES[1]) for q in weights]
    ys = tuple(tag_product(y) for y in _fprops(specs, xs, kept, biases))
    all_markers = [(dtype_marker(x), None, dtype_marker(bias)) for x, bias in zip(xs, biases, strict=True)]
    return ys, [(None, q, None, markers, None) for q, markers in zip(kept, all_markers, strict=True)]


def _matmuls_backward(
    specs: tuple[_WeightOnlySpec, ...], residuals: Any, dys: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], tuple[None, ...], tuple[Any, ...]]:
    found = [_backward(*own) for own in zip(specs, residuals, dys, strict=True)]
    return tuple(dx for dx, *_ in found), (None,) * len(specs), tuple(dbias for _, _, dbias, *_ in found)


_matmuls.defvjp(_matmuls_forward, _matmuls_backward)
_matmuls_jit = jax.jit(_matmuls, static_argnums=0)
