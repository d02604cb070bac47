"""What the layers of Transformer blocks in NNX and Linen have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arguments import one_of, shown
from jaxlowprec.layers.watching.seeing import calls_are_seen
from jaxlowprec.ops.checks import layer_inputs
from jaxlowprec.ops.norms.api import Norm, checked_norm


def norm_of(
    kind: str,
    who: str,
    inputs: Any,
    residual: Any,
    parameters: tuple[jax.Array | None, jax.Array | None],
    epsilon: float,
    dtype: Any,
) -> Norm:
    """The norm of kind "rms" or "layer" of a layer's inputs in its dtype, or in their own.

    `parameters`: scale and bias [C], or None.
    """
    inputs = layer_inputs(who, inputs)
    inputs, residual = (None if x is None else jnp.asarray(x, dtype or inputs.dtype) for x in (inputs, residual))
    scale, bias = parameters
    scale = jnp.ones(inputs.shape[-1:], jnp.float32) if scale is None else scale
    return checked_norm(kind, (inputs, residual, scale, bias), epsilon)


def alone(norm: Norm) -> Any:
    """What a norm's layer gives: the normed inputs; with a residual a pair of them and the sum."""
    y, total = norm.alone()
    return y if total is None else (y, total)


def check_features(who: str, normalization: str, out_features: int | Mapping[str, int]) -> Mapping[str, int]:
    """The features of each linear after a norm, by name.

    Raises:
        TypeError, ValueError: the norm is unknown, or a name cannot be that of a layer.
    """
    one_of(who, "normalization", normalization, "rms", "layer")
    if isinstance(out_features, int):
        return {"linear": out_features}
    if not isinstance(out_features, Mapping) or not out_features:
        raise TypeError(f"{who}: out_features={shown(out_features)}; needs a number, or a dict of names and numbers")
    for name in out_features:
        if not isinstance(name, str) or not name.isidentifier() or name in ("norm", "names", "several"):
            raise ValueError(f"{who}: out_features has a layer named {shown(name)}; needs names such as 'query'")
    return out_features


def array_of(inputs: jax.Array | Norm) -> jax.Array:
    """The inputs, or an array with the shape and the dtype of the norm's result."""
    return inputs.x if isinstance(inputs, Norm) else inputs


def common(inputs: Any, promoted: Iterable[jax.Array | None]) -> Any:
    """The inputs as all of several layers take them, so that one function can compute for them.

    Arguments:
        inputs: an array, or a norm that is still to be computed, which is taken as it is or not at all.
        promoted: the inputs, or `array_of` them, in the dtype in which each layer takes them, or None for one that has
            to be called.

    Returns:
        None if a layer has to be called, the dtypes differ, or each layer's call is to be seen.
    """
    if calls_are_seen():
        return None
    found = list(promoted)
    alike = all(x is not None for x in found) and len({x.dtype for x in found if x is not None}) == 1
    if not alike or not isinstance(inputs, Norm):
        return found[0] if alike else None
    return inputs if found[0].dtype == inputs.x.dtype else None  # type: ignore[union-attr]
