"""Parts that the Transformer layers of NNX and Linen share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arguments import one_of, shown
from jaxlowprec.layers.fused_mlp import mlp_of, separate_mlp
from jaxlowprec.layers.fused_mlp_product import Activation, Saved
from jaxlowprec.layers.shared_input import Layer, linears_of
from jaxlowprec.layers.watched import calls_are_seen
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
    *,
    zero_centered: bool = False,
) -> Norm:
    """The norm of kind "rms" or "layer" of a layer's inputs in its dtype, or in their own.

    `parameters`: scale and bias [C], or None. `zero_centered`: rows are multiplied by 1 + scale.
    """
    inputs = layer_inputs(who, inputs)
    inputs, residual = (None if x is None else jnp.asarray(x, dtype or inputs.dtype) for x in (inputs, residual))
    scale, bias = parameters
    if scale is None:
        scale = jnp.full(inputs.shape[-1:], 1 - zero_centered, jnp.float32)
    return checked_norm(kind, (inputs, residual, scale, bias), epsilon, zero_centered)


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


@dataclasses.dataclass(frozen=True)
class LayersOf:
    """How functions compute for several linear layers of NNX or Linen.

    Attributes:
        promoted: of a layer and inputs: the inputs in the dtype in which a function takes them that computes for this
            layer, or None if it has to be called.
        features: of a layer, the number of its result's features.
        arguments: of a layer, such inputs and the number of its own input's features: its arguments for the function.
        hand_on: of a layer, what its call returned and its state before the call: keeps the state for the next call.
    """

    promoted: Callable[[Any, jax.Array], jax.Array | None]
    features: Callable[[Any], int]
    arguments: Callable[[Any, jax.Array, int], Layer]
    hand_on: Callable[[Any, Any, Any], Any]

    def linears(
        self, who: str, inputs: jax.Array | Norm, layers: Sequence[Any]
    ) -> tuple[Sequence[jax.Array], jax.Array | None]:
        """The layers' results, and the sum of a norm with a residual, or None."""
        x = self._common(inputs, layers)
        if x is None and isinstance(inputs, Norm):
            h, total = inputs.alone()
            return self.linears(who, h, layers)[0], total
        if x is None:
            return [layer(inputs) for layer in layers], None
        given = [self.arguments(layer, _array(x), _array(x).shape[-1]) for layer in layers]
        ys, total, states = linears_of(who, x, given)
        self._keep(layers, given, states)
        return ys, total

    def mlp(
        self, who: str, inputs: jax.Array | Norm, layers: Sequence[Any], activation: Activation, saved: Saved
    ) -> jax.Array:
        """The MLP of the layers of gate, up and down, or of up and down; a norm of its inputs has no residual."""
        *hidden, down = layers
        x = common_of_all(inputs, [functools.partial(self.promoted, layer) for layer in layers])
        if x is None and isinstance(inputs, Norm):
            return self.mlp(who, inputs.alone()[0], layers, activation, saved)
        if x is None:
            return separate_mlp(_array(inputs), hidden, down, activation)
        given = [self.arguments(layer, _array(x), _array(x).shape[-1]) for layer in hidden]
        given.append(self.arguments(down, _array(x), self.features(hidden[0])))
        y, states = mlp_of(who, x, given, activation, saved)
        self._keep(layers, given, states)
        return y

    def _common(self, inputs: jax.Array | Norm, layers: Sequence[Any]) -> Any:
        return _common(inputs, (self.promoted(layer, _array(inputs)) for layer in layers))

    def _keep(self, layers: Sequence[Any], given: Sequence[Layer], states: Sequence[Any]) -> None:
        for layer, arguments, state in zip(layers, given, states, strict=True):
            self.hand_on(layer, (None, state), arguments.state)


def _array(inputs: jax.Array | Norm) -> jax.Array:
    """The inputs, or an array with the shape and the dtype of the norm's result."""
    return inputs.x if isinstance(inputs, Norm) else inputs


def common_of_all(inputs: Any, promoted: Sequence[Callable[[jax.Array], jax.Array | None]]) -> Any:
    """The inputs of an MLP as all of its layers take them, so that one function can compute for them; else None.

    Arguments:
        inputs: see `_common`.
        promoted: of each layer, down's last, gives inputs in the dtype in which it takes them, or None.
    """
    x = _common(inputs, (promote(_array(inputs)) for promote in promoted[:-1]))
    return None if x is None else _common(x, (promote(_array(x)) for promote in promoted))


def _common(inputs: Any, promoted: Iterable[jax.Array | None]) -> Any:
    """The inputs as all of several layers take them, so that one function can compute for them.

    Arguments:
        inputs: an array, or a norm that is still to be computed, which is taken as it is or not at all.
        promoted: the inputs, or an array like the norm's result, in the dtype in which each layer takes them, or None
            for one that has to be called.

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
