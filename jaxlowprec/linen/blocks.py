"""Linen layers of Transformer blocks: norms, a norm before linears, and the MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlowprec.layers.blocks import LayersOf, check_features, norm_of
from jaxlowprec.layers.fused_mlp import check_mlp, hidden_layers, separate_mlp
from jaxlowprec.layers.fused_mlp_product import Activation, Saved
from jaxlowprec.linen.layers import Dense, function_arguments, handed_on, parameter_of, promoted_inputs
from jaxlowprec.ops.checks import layer_inputs
from jaxlowprec.ops.norms.api import Norm
from jaxlowprec.recipes.autocast import FROM_CONTEXT


class RMSNorm(nn.Module):
    """The RMSNorm of the last axis with defined bits: `jaxlowprec.rms_norm`, whatever the recipe.

    The parameter, `scale`, is that of `flax.linen.RMSNorm`. The result has `dtype`, by default that of the inputs, and
    is rounded once. Flax's own layer has the dtype of the inputs and the scale by default, and rounds the normed inputs
    before it multiplies them by the scale.

    Attributes:
        epsilon, dtype, param_dtype, use_scale: Flax's.
        scale_init: default: ones, or zeros if the scale is centred at zero.
        zero_centered_scale: rows are multiplied by 1 + scale, as in Gemma; see `jaxlowprec.rms_norm`.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> y, _ = jlp.linen.RMSNorm().init_with_output(jax.random.key(0), jnp.ones((8, 64), jnp.bfloat16))
    >>> y.dtype
    dtype(bfloat16)
    """

    epsilon: float = 1e-6
    dtype: Any = None
    param_dtype: Any = jnp.float32
    use_scale: bool = True
    scale_init: Any = None
    zero_centered_scale: bool = False

    @nn.compact
    def __call__(self, inputs: jax.Array, residual: jax.Array | None = None) -> Any:
        """[..., C] -> [..., C]; with `residual` a pair, see `jaxlowprec.rms_norm`."""
        return _called(self, inputs, residual)


class LayerNorm(nn.Module):
    """The LayerNorm of the last axis with defined bits: `jaxlowprec.layer_norm`; see `RMSNorm`.

    The parameters, `scale` and `bias`, are those of `flax.linen.LayerNorm`.

    Attributes:
        epsilon, dtype, param_dtype, use_bias, use_scale, bias_init, scale_init: Flax's.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> y, _ = jlp.linen.LayerNorm().init_with_output(jax.random.key(0), jnp.ones((8, 64), jnp.bfloat16))
    >>> y.dtype
    dtype(bfloat16)
    """

    epsilon: float = 1e-6
    dtype: Any = None
    param_dtype: Any = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Any = nn.initializers.zeros
    scale_init: Any = nn.initializers.ones

    @nn.compact
    def __call__(self, inputs: jax.Array, residual: jax.Array | None = None) -> Any:
        """[..., C] -> [..., C]; with `residual` a pair, see `jaxlowprec.layer_norm`."""
        return _called(self, inputs, residual)


_NORMS: dict[str, Any] = {"rms": RMSNorm, "layer": LayerNorm}


def _norm_of(layer: RMSNorm | LayerNorm, inputs: jax.Array, residual: Any, parameter: Callable[..., Any]) -> Norm:
    """A layer's norm. `parameter`: of a name and an initialiser, gives the parameter."""
    kind = "layer" if isinstance(layer, LayerNorm) else "rms"
    centred = isinstance(layer, RMSNorm) and layer.zero_centered_scale
    init = layer.scale_init or (nn.initializers.zeros if centred else nn.initializers.ones)
    scale, bias = parameter("scale", init) if layer.use_scale else None, None
    if isinstance(layer, LayerNorm) and layer.use_bias:
        bias = parameter("bias", layer.bias_init)
    parameters, who = (scale, bias), type(layer).__name__
    return norm_of(kind, who, inputs, residual, parameters, layer.epsilon, layer.dtype, zero_centered=centred)


def _called(layer: RMSNorm | LayerNorm, inputs: jax.Array, residual: jax.Array | None) -> Any:
    """The result of a norm's layer."""
    shape = layer_inputs(type(layer).__name__, inputs).shape[-1:]
    norm = _norm_of(layer, inputs, residual, lambda name, init: layer.param(name, init, shape, layer.param_dtype))
    return norm.result()


def _prepared(layer: RMSNorm | LayerNorm, inputs: jax.Array, residual: jax.Array | None = None) -> Norm:
    """The norm of a layer with parameters, for a function that computes it with what reads it.

    It is not a method of the layer, because Flax would see a call of it.
    """
    return _norm_of(layer, inputs, residual, lambda name, _: parameter_of(layer, name))


_LAYERS = LayersOf(
    promoted=promoted_inputs,
    features=lambda layer: layer.features,
    arguments=function_arguments,
    hand_on=handed_on,
)


class NormLinear(nn.Module):
    """A norm and one or several linears of its result, which is quantised once for all of them.

    The parameters are those of the layers that it has: `norm` with `scale` (and `bias` of "layer"), and `linear`, or
    layers of the given names, with `kernel` and `bias`. So checkpoints of separate layers load into it, and back.

    Attributes:
        features: the features of the linear; or a dict of names and features, such as {"query": 64, "key": 32}.
        normalization: "rms" or "layer", see `RMSNorm` and `LayerNorm`.
        epsilon: the norm's.
        norm_options: further attributes of the norm.
        use_bias, dtype, param_dtype, precision, kernel_init, bias_init, recipe: see `Dense`.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> layer, x = jlp.linen.NormLinear({"query": 64, "key": 32}), jnp.ones((8, 64), jnp.bfloat16)
    >>> variables = layer.init(jax.random.key(0), x)
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     y = layer.apply(variables, x)
    >>> {name: y.shape for name, y in y.items()}
    {'query': (8, 64), 'key': (8, 32)}
    """

    features: int | Mapping[str, int]
    normalization: str = "rms"
    epsilon: float = 1e-6
    norm_options: Mapping[str, Any] | None = None
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = nn.initializers.lecun_normal()
    bias_init: Any = nn.initializers.zeros
    recipe: Any = FROM_CONTEXT

    @nn.compact
    def __call__(self, inputs: jax.Array, residual: jax.Array | None = None) -> Any:
        """The results of the linears.

        Arguments:
            inputs: [..., in].
            residual: of that shape and dtype; it is added to the inputs before the norm.

        Returns:
            [..., features], or a dict of the names. With `residual` a pair of that and the sum, for the next one.
        """
        who = type(self).__name__
        features = check_features(who, self.normalization, self.features)
        options = {"epsilon": self.epsilon, "dtype": self.dtype} | dict(self.norm_options or {})
        norm = _NORMS[self.normalization](name="norm", **options)
        layers = [Dense(size, name=name, **dense_options(self)) for name, size in features.items()]
        if self.is_initializing():  # calls make the parameters
            h, total = (norm(inputs), None) if residual is None else norm(inputs, residual)
            ys: Any = [layer(h) for layer in layers]
        else:
            ys, total = _LAYERS.linears(who, _prepared(norm, inputs, residual), layers)
        found = ys[0] if isinstance(self.features, int) else dict(zip(features, ys, strict=True))
        return found if residual is None else (found, total)


class MLP(nn.Module):
    """The MLP of a Transformer block: `down_proj(activation(gate_proj(x), up_proj(x)))`; see `jaxlowprec.mlp`.

    The parameters are those of its layers: `gate_proj` (with a gated activation), `up_proj` and `down_proj` with
    `kernel` and `bias`, and `norm` if there is one. So checkpoints of separate layers load into it, and back.

    Attributes:
        hidden_features: the features of the hidden layer.
        features: of the result; default: those of the inputs.
        activation: "swiglu", "geglu", "silu", "gelu", "relu_squared", or a function; see `jaxlowprec.mlp`.
        gated: whether a function takes the results of gate_proj and up_proj. Not for named activations.
        saved: "quantized", "8bit" or "recompute": what is kept of the hidden layer, see `jaxlowprec.mlp`.
        normalization: None; or "rms" or "layer": a norm of the inputs.
        epsilon, norm_options: of the norm, see `NormLinear`.
        down_kernel_init: initialiser of down_proj's kernel; default: that of the others.
        use_bias, dtype, param_dtype, precision, kernel_init, bias_init, recipe: see `Dense`.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> mlp, x = jlp.linen.MLP(96, saved="recompute"), jnp.ones((8, 64), jnp.bfloat16)
    >>> variables = mlp.init(jax.random.key(0), x)
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     mlp.apply(variables, x).shape
    (8, 64)
    """

    hidden_features: int
    features: int | None = None
    activation: Activation = "swiglu"
    gated: bool | None = None
    saved: Saved = "quantized"
    normalization: str | None = None
    epsilon: float = 1e-6
    norm_options: Mapping[str, Any] | None = None
    down_kernel_init: Any = None
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = nn.initializers.lecun_normal()
    bias_init: Any = nn.initializers.zeros
    recipe: Any = FROM_CONTEXT

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """[..., in] -> [..., features]."""
        who = type(self).__name__
        inputs = layer_inputs(who, inputs)
        names = hidden_layers(who, self.activation, self.gated)
        check_mlp(who, self.activation, self.saved, 1 + len(names))
        features = inputs.shape[-1] if self.features is None else self.features
        norm = None
        if self.normalization is not None:
            check_features(who, self.normalization, features)
            norm_options = {"epsilon": self.epsilon, "dtype": self.dtype} | dict(self.norm_options or {})
            norm = _NORMS[self.normalization](name="norm", **norm_options)
        options = dense_options(self)
        hidden = [Dense(self.hidden_features, name=name, **options) for name in names]
        options |= {} if self.down_kernel_init is None else {"kernel_init": self.down_kernel_init}
        down = Dense(features, name="down_proj", **options)
        if self.is_initializing():  # calls make the parameters
            return separate_mlp(inputs if norm is None else norm(inputs), hidden, down, self.activation)
        h = inputs if norm is None else _prepared(norm, inputs)
        return _LAYERS.mlp(who, h, [*hidden, down], self.activation, self.saved)


def dense_options(layer: Any) -> dict[str, Any]:
    """The options that a block hands to each Dense in it."""
    names = ("use_bias", "dtype", "param_dtype", "precision", "kernel_init", "bias_init", "recipe")
    return {name: getattr(layer, name) for name in names}
