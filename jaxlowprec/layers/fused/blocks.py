"""What the layers of Transformer blocks in NNX and Linen have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arguments import one_of, shown
from jaxlowprec.layers.watching.seeing import calls_are_seen
from jaxlowprec.ops.checks import layer_inputs
from jaxlowprec.ops.norms.api import layer_norm, rms_norm


def normed(
    kind: str,
    who: str,
    inputs: Any,
    residual: Any,
    parameters: tuple[jax.Array | None, jax.Array | None],
    epsilon: float,
    dtype: Any,
) -> Any:
    """The norm of kind "rms" or "layer" of a layer's inputs in its dtype, or in their own.

    `parameters`: scale and bias [C], or None.
    """
    inputs = layer_inputs(who, inputs)
    inputs, residual = (None if x is None else jnp.asarray(x, dtype or inputs.dtype) for x in (inputs, residual))
    scale, bias = parameters
    scale = jnp.ones(inputs.shape[-1:], jnp.float32) if scale is None else scale
    if kind == "rms":
        return rms_norm(inputs, scale, residual, epsilon=epsilon)
    return layer_norm(inputs, scale, bias, residual, epsilon=epsilon)


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


def common(promoted: Iterable[jax.Array | None]) -> jax.Array | None:
    """The inputs as all of several layers take them, so that one function can compute for them.

    `promoted`: the inputs in the dtype in which each layer takes them, or None for one that has to be called. None if
    there is such a layer, the dtypes differ, or each layer's call is to be seen.
    """
    if calls_are_seen():
        return None
    found = list(promoted)
    alike = all(x is not None for x in found) and len({x.dtype for x in found if x is not None}) == 1
    return found[0] if alike else None
