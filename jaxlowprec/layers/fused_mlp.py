"""The MLP of a Transformer block as one function, which keeps little for its backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxlowprec import wiring
from jaxlowprec.arguments import one_of, shown
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers import delayed_scaling
from jaxlowprec.layers.fused_mlp_product import (
    Activation,
    MlpSpec,
    Saved,
    activated_from_8bit,
    called,
    operands_of,
    quantized_mlp,
)
from jaxlowprec.layers.layer_call import LayerCall
from jaxlowprec.layers.linear import features_of
from jaxlowprec.layers.low_rank import LoRAKernel
from jaxlowprec.layers.options import MlpOptions
from jaxlowprec.layers.producers import NormedInput
from jaxlowprec.layers.product import QuantizedKernel
from jaxlowprec.layers.residuals import QUANTIZED_WEIGHT, in_profiles
from jaxlowprec.layers.shared_input import (
    Layer,
    alone_in_any_case,
    check_list,
    joined,
    layers_of,
    linears_of,
    share_their_input,
    tokens_of,
)
from jaxlowprec.layers.watched import is_watched
from jaxlowprec.ops.activations.api import ACTIVATIONS
from jaxlowprec.ops.checks import a_sharding, float_array
from jaxlowprec.ops.norms.api import Norm
from jaxlowprec.recipes.autocast import FROM_CONTEXT
from jaxlowprec.recipes.roles import Recipe
from jaxlowprec.wiring.sharding_rule import ShardingLike, resharded


@overload
def mlp(
    x: Float[Array, "*T K"],
    kernels: Sequence[Float[Array, "I O"] | QuantizedArray | LoRAKernel | None],
    biases: Sequence[Float[Array, "O"] | None] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    states: None = None,
    **options: Unpack[MlpOptions],
) -> Float[Array, "*T N"]: ...


@overload
def mlp(
    x: Float[Array, "*T K"],
    kernels: Sequence[Float[Array, "I O"] | QuantizedArray | LoRAKernel | None],
    biases: Sequence[Float[Array, "O"] | None] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    states: Sequence[delayed_scaling.State | None],
    **options: Unpack[MlpOptions],
) -> tuple[Float[Array, "*T N"], tuple[delayed_scaling.State | None, ...]]: ...


def mlp(
    x: Float[Array, "*T K"],
    kernels: Sequence[Float[Array, "I O"] | QuantizedArray | LoRAKernel | None],
    biases: Sequence[Float[Array, "O"] | None] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    key: jax.Array | None = None,
    activation: Activation = "swiglu",
    saved: Saved = "quantized",
    quantized_kernels: Sequence[QuantizedKernel | None] | None = None,
    names: Sequence[str] | None = None,
    states: Sequence[delayed_scaling.State | None] | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*T N"] | tuple[Float[Array, "*T N"], tuple[delayed_scaling.State | None, ...]]:
    """`linear(activation(linear(x, gate), linear(x, up)), down)`, which keeps little for its backward pass.

    The result and the gradients of kernels and biases are those of `linears`, the activation and `linear`, bit for bit
    unless `saved="8bit"`. x is quantised once. What the backward pass reads of the activation is computed and quantised
    again there, from what is kept of the hidden layer:

    | saved | kept of the hidden layer, for each of F features and a gated activation in bfloat16 |
    |---|---|
    | "quantized" | gate and up: 4 bytes |
    | "8bit" | gate and up as MXFP8: 2.06 bytes. The backward pass uses these, so gradients differ |
    | "recompute" | nothing: gate and up are multiplied again from x as fprop read it, which is kept, too |

    XLA's CPU compiler takes what is computed again from the forward pass where it sees both passes at once, outside of
    `jax.lax.scan`, as it does with `jax.checkpoint`; `xla_disable_hlo_passes=cse_barrier_expander` among the
    `compiler_options` of `jax.jit` forbids that.

    Beside that, x is kept as wgrad reads it, and the kernels as dgrad reads them. Where the recipe quantises weights
    alone, or nothing, what is kept stays in high precision: gate and up, their 8-bit copies and the activation, or x.

    Arguments:
        x: [..., K], bfloat16, float16 or float32: the dtype of the hidden layer and the result.
        kernels: gate [K, F], up [K, F] and down [F, N]; up and down if the activation has one operand. See `linear`.
        biases: of each layer, or None. None: no layer has one.
        recipe: default: the context's (`autocast`). None: high precision.
        key: see `linear`; each layer has another one that is derived from it.
        activation: "swiglu" or "geglu"; with one operand "silu", "gelu" or "relu_squared". Or a function that JAX can
            differentiate, of gate and up or of up alone, elementwise; it is traced anew for each function object.
        saved: what is kept of the hidden layer.
        quantized_kernels, names, states: those of each layer, see `linear`.
        out_sharding: of the result, see `linear`.
        precision: see `linear`.

    Returns:
        [..., N]. With `states`, a pair of it and the tuple of states for the next call.

    Raises:
        TypeError: dtypes do not fit, or the recipe is not a recipe.
        ValueError: an unknown activation or `saved`; shapes do not fit, or the number of kernels not the activation.

    Source: numerics.md 3 and 12; arXiv 2002.05202.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> x, gate, up, down = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((64, 96)), jnp.ones((64, 96)), jnp.ones((96, 64))
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     jlp.mlp(x, [gate, up, down], saved="recompute").shape
    (8, 64)
    """
    who = "mlp"
    a_sharding(who, "out_sharding", out_sharding)
    check_mlp(who, activation, saved, len(check_list(who, "kernels", kernels)))
    x = float_array(who, "x", x)
    of_each = {"biases": biases, "quantized_kernels": quantized_kernels, "names": names, "states": states}
    layers = layers_of(who, kernels, recipe, key, precision, of_each)
    y, new_states = mlp_of(who, x, layers, activation, saved, out_sharding)
    return y if states is None else (y, new_states)


def mlp_of(
    who: str,
    x: jax.Array | Norm,
    layers: Sequence[Layer],
    activation: Activation,
    saved: Saved,
    out_sharding: ShardingLike = None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """The MLP of these layers, down's last, and their states for the next call.

    Of a norm without a residual, too: see `linears_of`.
    """
    arguments = layers, activation, saved
    like = x.x if isinstance(x, Norm) else x
    checked = None if alone_in_any_case(layers) else _checked(who, like, layers)
    if checked is not None and _is_quantized(checked):
        return _fused(x, like, checked, arguments, out_sharding)
    return _composed(who, x.alone()[0] if isinstance(x, Norm) else x, arguments, out_sharding)


_Checked = tuple[Any, Any, LayerCall]
"""A layer's kernel, bias and call."""

_Arguments = tuple[Sequence[Layer], Activation, Saved]


def check_mlp(who: str, activation: Any, saved: Any, layers: int) -> None:
    """Raises ValueError unless these are an activation, the number of layers that it needs, and what can be kept."""
    one_of(who, "saved", saved, "quantized", "8bit", "recompute")
    if callable(activation):
        if layers not in (2, 3):
            raise ValueError(f"{who}: {layers} kernels; needs gate, up and down, or up and down")
        return
    if not (isinstance(activation, str) and activation in ACTIVATIONS):
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{who}: activation={shown(activation)}; needs one of {known}, or a function such as jnp.tanh")
    if layers != (needed := operands_of(activation) + 1):
        order = "gate, up and down" if needed == 3 else "up and down"
        raise ValueError(f"{who}: {layers} kernels; activation={activation!r} needs {needed}: {order}")


def _checked(who: str, x: jax.Array, layers: Sequence[Layer]) -> list[_Checked]:
    """The layers' kernels, biases and calls, whose shapes fit each other."""
    *hidden, down = layers
    checked = [layer.checked(who, x) for layer in hidden]
    features = check_hidden(who, [features_of(call, kernel) for kernel, _, call in checked])
    like: Any = jax.ShapeDtypeStruct((*x.shape[:-1], features), x.dtype)
    return [*checked, down.checked(who, like)]


def check_hidden(who: str, features: Sequence[int]) -> int:
    """The features of the hidden layer. Raises ValueError unless gate and up have the same number."""
    if len(set(features)) > 1:
        raise ValueError(f"{who}: gate has {features[0]} features and up {features[1]}; needs the same number")
    return features[0]


def _is_quantized(checked: Sequence[_Checked]) -> bool:
    """Whether all products are quantised, those of the hidden layer by equal roles."""
    *hidden, down = checked
    return all(share_their_input([call for *_, call in part], [w for w, *_ in part]) for part in (hidden, [down]))


def _fused(
    x: jax.Array | Norm, like: jax.Array, checked: Sequence[_Checked], arguments: _Arguments, out_sharding: ShardingLike
) -> tuple[Any, Any]:
    layers, activation, saved = arguments
    *hidden, (down, down_bias, down_call) = checked
    tokens, rows_split = tokens_of(like, [(call, kernel) for kernel, _, call in checked])
    prepared = [call.prepared(tokens, w, bias, (like.dtype, None, rows_split)) for w, bias, call in hidden]
    features = features_of(hidden[0][2], hidden[0][0])
    sharding = prepared[0].spec.out_sharding
    between: Any = jax.ShapeDtypeStruct((*tokens.shape[:-1], features), like.dtype, sharding=sharding)
    fits = out_sharding if like.ndim == tokens.ndim else None
    prepared.append(down_call.prepared(between, down, down_bias, (like.dtype, fits, rows_split)))
    *specs, down_spec = (p.spec for p in prepared)
    spec = MlpSpec(activation, tuple(specs), down_spec, saved)
    given = NormedInput.of(x, tokens) if isinstance(x, Norm) else tokens
    given, products = wiring.align_varying(given, tuple(p.product for p in prepared))
    with in_profiles(joined([layer.name for layer in layers])):
        y, _ = quantized_mlp(spec, given, products, tuple(p.states for p in prepared))
    return resharded(y.reshape(*like.shape[:-1], y.shape[-1]), out_sharding), tuple(p.state for p in prepared)


def hidden_layers(who: str, activation: Activation, gated: bool | None) -> tuple[str, ...]:
    """The names of the layers whose results the activation takes.

    Raises:
        ValueError: `gated` is given for a named activation that says otherwise, or not a bool.
    """
    one_of(who, "gated", gated, True, False, None)
    if isinstance(activation, str) and activation in ACTIVATIONS:
        is_gated = operands_of(activation) == 2
        if gated not in (None, is_gated):
            raise ValueError(f"{who}: gated={gated} and activation={activation!r}; leave gated= out: the name says it")
        gated = is_gated
    return ("gate_proj", "up_proj") if gated else ("up_proj",)


def separate_mlp(x: jax.Array, hidden: Sequence[Any], down: Any, activation: Activation) -> jax.Array:
    """The MLP whose layers compute by themselves."""
    function: Any = activation if callable(activation) else ACTIVATIONS[activation]
    return down(function(*(layer(x) for layer in hidden)))


def _composed(who: str, x: jax.Array, arguments: _Arguments, out_sharding: ShardingLike) -> tuple[Any, Any]:
    """The MLP from separate layers."""
    layers, activation, saved = arguments
    *hidden, down = layers

    def multiply(x: jax.Array) -> tuple[Any, Any]:
        operands, _, new_states = linears_of(who, x, hidden)
        return operands, new_states

    def finish(a: jax.Array) -> tuple[jax.Array, Any]:
        return down.alone(a, out_sharding)

    return composed(x, multiply, finish, activation, saved, who=who)


def composed(
    x: jax.Array,
    multiply: Callable[..., Any],
    finish: Callable[..., Any],
    activation: Activation,
    saved: Saved,
    *,
    who: str,
) -> tuple[Any, Any]:
    """An MLP from separate products; what JAX's checkpointing does not keep is computed again.

    Arguments:
        multiply: of x, gives the operands of the activation, and the states of their layers.
        finish: of the activation, gives the result, and the state of its layer.
    """
    function: Any = functools.partial(called, activation, who=who) if callable(activation) else ACTIVATIONS[activation]
    if saved == "8bit":
        function = functools.partial(_activated_from_8bit, activation)

    def finished(operands: Any) -> tuple[jax.Array, Any]:
        return finish(function(*operands))

    def whole(x: jax.Array) -> tuple[jax.Array, Any]:
        operands, new_states = multiply(x)
        y, new_state = finished(operands)
        return y, (*new_states, new_state)

    if is_watched() or saved == "8bit":
        return whole(x)
    if saved == "quantized":
        finished = _keeps_weights(finished)
    return _keeps_weights(whole)(x) if saved == "recompute" else whole(x)


def _keeps_weights(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, of which the backward pass keeps the arguments and quantised weights."""
    return jax.checkpoint(function, policy=jax.checkpoint_policies.save_only_these_names(QUANTIZED_WEIGHT))


def _activated_from_8bit(activation: Activation, *operands: jax.Array) -> jax.Array:
    aligned = wiring.align_varying(*map(jnp.atleast_2d, operands))
    return activated_from_8bit(activation, aligned).reshape(operands[0].shape)
