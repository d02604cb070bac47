"""NNX layers of Transformer blocks: norms, a norm before linears, and the MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlowprec.arguments import a_text, shown
from jaxlowprec.layers.blocks import LayersOf, check_features, norm_of
from jaxlowprec.layers.fused_mlp import check_mlp, hidden_layers
from jaxlowprec.layers.fused_mlp_product import Activation, Saved
from jaxlowprec.layers.shared_input import check_list
from jaxlowprec.nnx.layers import Linear
from jaxlowprec.ops.checks import layer_inputs
from jaxlowprec.ops.norms.api import Norm
from jaxlowprec.recipes.autocast import FROM_CONTEXT


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm` of the last axis with defined bits: `jaxlowprec.rms_norm`, whatever the recipe.

    The result has `dtype`, by default that of the inputs, and is rounded once. Flax's own layer has the dtype of the
    inputs and the scale by default, and rounds the normed inputs before it multiplies them by the scale.

    Arguments:
        num_features, epsilon, dtype, param_dtype, use_scale, scale_metadata: Flax's.
        scale_init: default: ones, or zeros if the scale is centred at zero.
        zero_centered_scale: rows are multiplied by 1 + scale, as in Gemma; see `jaxlowprec.rms_norm`.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> from flax import nnx
    >>> jlp.nnx.RMSNorm(64, rngs=nnx.Rngs(0))(jnp.ones((8, 64), jnp.bfloat16)).dtype
    dtype(bfloat16)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        use_scale: bool = True,
        scale_init: Any = None,
        scale_metadata: Mapping[str, Any] | None = None,
        zero_centered_scale: bool = False,
        rngs: nnx.Rngs,
    ):
        scale_init = scale_init or (nnx.initializers.zeros if zero_centered_scale else nnx.initializers.ones)
        options: Any = {} if scale_metadata is None else {"scale_metadata": scale_metadata}
        options |= {"epsilon": epsilon, "dtype": dtype, "param_dtype": param_dtype, "use_scale": use_scale}
        super().__init__(num_features, scale_init=scale_init, rngs=rngs, **options)
        self.zero_centered_scale = zero_centered_scale

    def __call__(self, inputs: jax.Array, residual: jax.Array | None = None) -> Any:
        """[..., num_features] -> [..., num_features]; with `residual` a pair, see `jaxlowprec.rms_norm`."""
        return self.prepared(inputs, residual).result()

    def prepared(self, inputs: jax.Array, residual: jax.Array | None = None) -> Norm:
        """The norm for a function that computes it with what reads it."""
        scale = None if self.scale is None else self.scale[...]
        parameters, centred = (scale, None), self.zero_centered_scale
        who = type(self).__name__
        return norm_of("rms", who, inputs, residual, parameters, self.epsilon, self.dtype, zero_centered=centred)


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm` of the last axis with defined bits: `jaxlowprec.layer_norm`; see `RMSNorm`.

    Arguments:
        num_features, epsilon, dtype, param_dtype, use_bias, use_scale, bias_init, scale_init: Flax's.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> from flax import nnx
    >>> jlp.nnx.LayerNorm(64, rngs=nnx.Rngs(0))(jnp.ones((8, 64), jnp.bfloat16)).dtype
    dtype(bfloat16)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Any = nnx.initializers.zeros,
        scale_init: Any = nnx.initializers.ones,
        rngs: nnx.Rngs,
    ):
        options: Any = {"epsilon": epsilon, "dtype": dtype, "param_dtype": param_dtype}
        options |= {"use_bias": use_bias, "use_scale": use_scale, "bias_init": bias_init, "scale_init": scale_init}
        super().__init__(num_features, rngs=rngs, **options)

    def __call__(self, inputs: jax.Array, residual: jax.Array | None = None) -> Any:  # type: ignore[override]
        """[..., num_features] -> [..., num_features]; with `residual` a pair, see `jaxlowprec.layer_norm`."""
        return self.prepared(inputs, residual).result()

    def prepared(self, inputs: jax.Array, residual: jax.Array | None = None) -> Norm:
        """The norm for a function that computes it with what reads it."""
        scale, bias = (None if p is None else p[...] for p in (self.scale, self.bias))
        return norm_of("layer", type(self).__name__, inputs, residual, (scale, bias), self.epsilon, self.dtype)


_NORMS: dict[str, Any] = {"rms": RMSNorm, "layer": LayerNorm}


def linears(inputs: jax.Array, layers: Sequence[Any]) -> tuple[jax.Array, ...]:
    """The results of several Linear layers of one input, which is quantised once for all; see `jaxlowprec.linears`.

    Layers of another class, or with a product of their own, are called.

    Arguments:
        inputs: [..., in_features].
        layers: a list of modules, such as those of query, key and value.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> from flax import nnx
    >>> query, key = (jlp.nnx.Linear(64, n, rngs=nnx.Rngs(0)) for n in (64, 32))
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     [y.shape for y in jlp.nnx.linears(jnp.ones((8, 64)), [query, key])]
    [(8, 64), (8, 32)]
    """
    inputs = layer_inputs("linears", inputs)
    return tuple(_LAYERS.linears("linears", inputs, _checked_layers("linears", layers))[0])


def mlp(
    inputs: jax.Array, layers: Sequence[Any], *, activation: Activation = "swiglu", saved: Saved = "quantized"
) -> jax.Array:
    """The MLP of separate Linear layers as one function that keeps little for its backward pass; see `jaxlowprec.mlp`.

    If a layer is of another class, or has a product of its own, all are called.

    Arguments:
        inputs: [..., in_features].
        layers: the modules of gate, up and down, or of up and down.
        activation, saved: see `jaxlowprec.mlp`.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> from flax import nnx
    >>> up, down = (jlp.nnx.Linear(*sizes, rngs=nnx.Rngs(0)) for sizes in ((64, 96), (96, 64)))
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     jlp.nnx.mlp(jnp.ones((8, 64)), [up, down], activation="gelu").shape
    (8, 64)
    """
    inputs = layer_inputs("mlp", inputs)
    check_mlp("mlp", activation, saved, len(_checked_layers("mlp", layers)))
    return _LAYERS.mlp("mlp", inputs, layers, activation, saved)


def _checked_layers(who: str, layers: Any) -> Sequence[Any]:
    """The layers of a function. Raises TypeError unless it is a list of modules."""
    for layer in check_list(who, "layers", layers):
        if not callable(layer):
            raise TypeError(f"{who}: layers has {shown(layer)}; needs modules; jaxlowprec.{who} takes kernels")
    return layers


_LAYERS = LayersOf(
    promoted=lambda layer, inputs: layer.promoted(inputs) if type(layer) is Linear else None,
    features=lambda layer: layer.out_features,
    arguments=lambda layer, inputs, _: layer.arguments(inputs),
    hand_on=lambda layer, result, before: layer._handed_on(result, before),
)


def _normed(norm: Any, inputs: jax.Array, residual: jax.Array | None = None) -> tuple[Any, jax.Array | None]:
    """A norm's result and the sum of inputs and residual; this library's norms are prepared, not computed yet."""
    if type(norm) in (RMSNorm, LayerNorm):
        return norm.prepared(inputs, residual), None
    return (norm(inputs), None) if residual is None else norm(inputs, residual)


class NormLinear(nnx.Module):
    """A norm and one or several linears of its result, which is quantised once for all of them.

    The parameters are those of the layers that it has: `norm` with `scale` (and `bias` of "layer"), and `linear`, or
    layers of the given names, with `kernel` and `bias`. So checkpoints of separate layers load into it, and back.

    Arguments:
        in_features: the features of the inputs.
        out_features: those of the linear; or a dict of names and features, such as {"query": 64, "key": 32}.
        normalization: "rms" or "layer", see `RMSNorm` and `LayerNorm`.
        epsilon: the norm's.
        norm_options: further arguments of the norm.
        recipe, name: see `Linear`; layers are named name/query and so on.
        rngs: of the parameters, see `Linear`.
        Further arguments are those of each `Linear`, such as use_bias, dtype and kernel_init.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> from flax import nnx
    >>> layer = jlp.nnx.NormLinear(64, {"query": 64, "key": 32, "value": 32}, rngs=nnx.Rngs(0))
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     y = layer(jnp.ones((8, 64), jnp.bfloat16))
    >>> {name: y.shape for name, y in y.items()}
    {'query': (8, 64), 'key': (8, 32), 'value': (8, 32)}
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        normalization: str = "rms",
        epsilon: float = 1e-6,
        norm_options: Mapping[str, Any] | None = None,
        dtype: Any = None,
        recipe: Any = FROM_CONTEXT,
        name: str = "",
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        who = type(self).__name__
        a_text(who, name=name)
        features = check_features(who, normalization, out_features)
        self.norm = _NORMS[normalization](in_features, epsilon=epsilon, dtype=dtype, rngs=rngs, **(norm_options or {}))
        self.names, self.several = tuple(features), not isinstance(out_features, int)
        for part, size in features.items():
            own = f"{name}/{part}" if name else ""
            setattr(self, part, Linear(in_features, size, dtype=dtype, recipe=recipe, name=own, rngs=rngs, **kwargs))

    def __call__(self, inputs: jax.Array, residual: jax.Array | None = None) -> Any:
        """The results of the linears.

        Arguments:
            inputs: [..., in_features].
            residual: of that shape and dtype; it is added to the inputs before the norm.

        Returns:
            [..., out_features], or a dict of the names. With `residual` a pair of that and the sum, for the next one.
        """
        layers = [getattr(self, name) for name in self.names]
        h, total = _normed(self.norm, inputs, residual)
        ys, of_norm = _LAYERS.linears(type(self).__name__, h, layers)
        total = of_norm if total is None else total
        found: Any = dict(zip(self.names, ys, strict=True)) if self.several else ys[0]
        return found if residual is None else (found, total)


class MLP(nnx.Module):
    """The MLP of a Transformer block: `down_proj(activation(gate_proj(x), up_proj(x)))`; see `jaxlowprec.mlp`.

    The parameters are those of its layers: `gate_proj` (with a gated activation), `up_proj` and `down_proj` with
    `kernel` and `bias`, and `norm` if there is one. So checkpoints of separate layers load into it, and back.

    Arguments:
        in_features, hidden_features: the features of the inputs and of the hidden layer.
        out_features: of the result; default: in_features.
        activation: "swiglu", "geglu", "silu", "gelu", "relu_squared", or a function; see `jaxlowprec.mlp`.
        gated: whether a function takes the results of gate_proj and up_proj. Not for named activations.
        saved: "quantized", "8bit" or "recompute": what is kept of the hidden layer, see `jaxlowprec.mlp`.
        normalization: None; or "rms" or "layer": a norm of the inputs.
        use_bias: whether layers have biases.
        down_kernel_init: initialiser of down_proj's kernel; default: that of the others.
        epsilon, norm_options, recipe, name, rngs: see `NormLinear`.
        Further arguments are those of each `Linear`.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> from flax import nnx
    >>> mlp = jlp.nnx.MLP(64, 96, saved="recompute", rngs=nnx.Rngs(0))
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     mlp(jnp.ones((8, 64), jnp.bfloat16)).shape
    (8, 64)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Activation = "swiglu",
        gated: bool | None = None,
        saved: Saved = "quantized",
        normalization: str | None = None,
        epsilon: float = 1e-6,
        norm_options: Mapping[str, Any] | None = None,
        use_bias: bool = False,
        down_kernel_init: Any = None,
        dtype: Any = None,
        recipe: Any = FROM_CONTEXT,
        name: str = "",
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        who = type(self).__name__
        a_text(who, name=name)
        self.names = hidden_layers(who, activation, gated)
        check_mlp(who, activation, saved, 1 + len(self.names))
        self.activation, self.saved = activation, saved
        if normalization is not None:
            check_features(who, normalization, hidden_features)
            self.norm = _NORMS[normalization](
                in_features, epsilon=epsilon, dtype=dtype, rngs=rngs, **(norm_options or {})
            )
        else:
            self.norm = nnx.data(None)
        out_features = in_features if out_features is None else out_features
        options = {"use_bias": use_bias, "dtype": dtype, "recipe": recipe, "rngs": rngs} | kwargs
        for part in self.names:
            setattr(self, part, Linear(in_features, hidden_features, name=f"{name}/{part}" if name else "", **options))
        options |= {} if down_kernel_init is None else {"kernel_init": down_kernel_init}
        self.down_proj = Linear(hidden_features, out_features, name=f"{name}/down_proj" if name else "", **options)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """[..., in_features] -> [..., out_features]."""
        layers = [getattr(self, name) for name in (*self.names, "down_proj")]
        who = type(self).__name__
        h = layer_inputs(who, inputs) if self.norm is None else _normed(self.norm, inputs)[0]
        return _LAYERS.mlp(who, h, layers, self.activation, self.saved)
