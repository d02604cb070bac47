"""The common part of the linears around their GEMMs: names in profiles, residuals, and reading these."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxlowprec import wiring
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops.checks import no_derivative, wider_dtype
from jaxlowprec.ops.sum_over_rows import sum_over_rows_op
from jaxlowprec.wiring.sharding_rule import ShardingLike, resharded

QUANTIZED_INPUT = "jaxlowprec_quantized_input"
"""The checkpoint_name of data, scale, amax and drawn signs of the input, in the form that the backward pass reads."""

QUANTIZED_WEIGHT = "jaxlowprec_quantized_weight"
"""The checkpoint_name of data, scale and amax of the weight, in the form that the backward pass reads."""

PRODUCT = "jaxlowprec_product"
"""The checkpoint_name of the result of a layer's forward GEMM, of layers in high precision too."""

CHECKPOINT_NAMES = (QUANTIZED_INPUT, QUANTIZED_WEIGHT)
"""The checkpoint_names of residuals: data, scale and amax of the columnwise input, and of the weight."""


def in_profiles(layer: str, part: str = "") -> contextlib.AbstractContextManager:
    """A context in which operations are named `layer/part` in profiles and in the metadata of compiled code.

    Without a layer's name, or without a part, the other one is the whole name.
    """
    name = "/".join(filter(None, (layer, part)))
    return jax.named_scope(name) if name else contextlib.nullcontext()


@functools.partial(jax.tree_util.register_dataclass, data_fields=("arrays",), meta_fields=("dtypes", "structure"))
@dataclasses.dataclass(frozen=True)
class ResidualBytes:
    """A quantised residual, whose 8-bit floats are kept as bytes; see `read`.

    XLA's CPU compiler writes to a stack of 8-bit floats by converting all of it to a wider type and back. A stack is
    what `jax.lax.scan` over layers keeps, so each layer would take the time of all.

    Attributes:
        arrays: the leaves of the residual.
        dtypes, structure: theirs, and of the tree that they come from.
    """

    arrays: tuple[jax.Array, ...]
    dtypes: tuple[Any, ...]
    structure: Any


def tag_residual(residual: Any, name: str) -> Any:
    """A residual whose arrays get a checkpoint name if it is quantised, for `read`; otherwise the residual itself."""
    if residual is None or isinstance(residual, jax.Array):
        return residual
    leaves, structure = jax.tree.flatten(residual)
    arrays = tuple(checkpoint_name(wiring.as_bytes(leaf), name) for leaf in leaves)
    return ResidualBytes(arrays, tuple(leaf.dtype for leaf in leaves), structure)


def _is_bytes(residual: Any) -> bool:
    return isinstance(residual, ResidualBytes)


def read(residuals: Any) -> Any:
    """A tree of residuals, with what `tag_residual` was given in the place of what it gave."""

    def one(residual: Any) -> Any:
        if not _is_bytes(residual):
            return residual
        return jax.tree.unflatten(residual.structure, wiring.from_bytes(residual.arrays, residual.dtypes))

    return jax.tree.map(one, residuals, is_leaf=_is_bytes)


def tag_product(y: jax.Array) -> jax.Array:
    """The result of a forward GEMM, with its checkpoint name."""
    return checkpoint_name(y, PRODUCT)


def decoded(x: Any, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A residual decoded to an array of `dtype`."""
    return x.dequantize(dtype) if isinstance(x, QuantizedArray) else x.astype(dtype)


def dtype_marker(x: jax.Array | None) -> np.ndarray | None:
    """An empty array that carries x's dtype to the backward pass, because a dtype cannot be a residual."""
    return None if x is None else np.zeros((), x.dtype)


def plain_matmul(
    a: jax.Array,
    b: jax.Array,
    out_dtype: jax.typing.DTypeLike,
    out_sharding: ShardingLike = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """a [..., M, K] @ b [..., K, N] in high precision, accumulated in float32."""
    dtype = wider_dtype(a.dtype, b.dtype)
    options: Any = {"precision": precision, "preferred_element_type": jnp.float32, "out_sharding": out_sharding}
    return jnp.matmul(a.astype(dtype), b.astype(dtype), **options).astype(out_dtype)


def plain_wgrad(
    x: jax.Array,
    dy: jax.Array,
    rows_split: bool,
    out_dtype: jax.typing.DTypeLike,
    out_sharding: ShardingLike = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """x [..., T, K] transposed @ dy [..., T, N], as `plain_matmul`; `rows_split`: also sums over the axis before T."""
    dtype = wider_dtype(x.dtype, dy.dtype)
    terms = "...stk,...stn->...kn" if rows_split else "...tk,...tn->...kn"
    options: Any = {"precision": precision, "preferred_element_type": jnp.float32, "out_sharding": out_sharding}
    return jnp.einsum(terms, x.astype(dtype), dy.astype(dtype), **options).astype(out_dtype)


def bias_gradient(
    dy: jax.Array | None, marker: jax.Array | None, sharding: ShardingLike, row_sums: jax.Array | None = None
) -> jax.Array | None:
    """The gradient of a bias that is added to every row, in float32.

    Arguments:
        marker: the bias's `dtype_marker`; None: it gets no gradient.
        sharding: see `out_sharding.sharding_of`.
        row_sums: those of dy, float32, if they are known; dy is not read then.
    """
    if marker is None:
        return None
    if row_sums is None:
        assert dy is not None
        parts = dy.reshape(-1, *dy.shape[-2:]) if dy.ndim > 3 else dy
        (row_sums,) = sum_over_rows_op(rows_split=dy.ndim > 2)(parts)
    return resharded(row_sums.astype(marker.dtype), sharding)


differentiated_once = no_derivative(
    "linear: there is no second derivative under a recipe; pass recipe=None, or use autocast(enabled=False), "
    "where a gradient is differentiated again"
)
"""Marks the operands of both rules, which are constants to autodiff: else it would find a second derivative of 0."""
