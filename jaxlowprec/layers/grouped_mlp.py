"""The MLP of experts, over rows in groups, as one function that keeps little for its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack, overload

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxlowprec import wiring
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers import delayed_scaling
from jaxlowprec.layers.fused_mlp import check_hidden, check_mlp, composed
from jaxlowprec.layers.fused_mlp_product import Activation, MlpSpec, Saved, quantized_mlp
from jaxlowprec.layers.grouped_matmul import checked_groups, checked_sizes, groups_product, prepared_groups
from jaxlowprec.layers.layer_call import LayerCall, PreparedProduct
from jaxlowprec.layers.linear import features_of
from jaxlowprec.layers.options import GroupedMlpOptions
from jaxlowprec.layers.product import QuantizedKernel
from jaxlowprec.layers.residuals import in_profiles
from jaxlowprec.layers.shared_input import Layer, check_list, joined, layers_of, share_their_input
from jaxlowprec.layers.watched import is_watched
from jaxlowprec.ops.checks import float_array, float_dtype
from jaxlowprec.recipes.autocast import FROM_CONTEXT
from jaxlowprec.recipes.roles import Recipe
from jaxlowprec.wiring.sharding_rule import sharding_of

_Checked = tuple[Any, Any, LayerCall]
"""A layer's kernels, bias and call."""


@overload
def grouped_mlp(
    x: Float[Array, "T K"],
    kernels: Sequence[Float[Array, "E I O"] | QuantizedArray | None],
    group_sizes: Int[Array, "E"],
    biases: Sequence[Float[Array, "E O"] | None] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    states: None = None,
    **options: Unpack[GroupedMlpOptions],
) -> Float[Array, "T N"]: ...


@overload
def grouped_mlp(
    x: Float[Array, "T K"],
    kernels: Sequence[Float[Array, "E I O"] | QuantizedArray | None],
    group_sizes: Int[Array, "E"],
    biases: Sequence[Float[Array, "E O"] | None] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    states: Sequence[delayed_scaling.State | None],
    **options: Unpack[GroupedMlpOptions],
) -> tuple[Float[Array, "T N"], tuple[delayed_scaling.State | None, ...]]: ...


def grouped_mlp(
    x: Float[Array, "T K"],
    kernels: Sequence[Float[Array, "E I O"] | QuantizedArray | None],
    group_sizes: Int[Array, "E"],
    biases: Sequence[Float[Array, "E O"] | None] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    key: jax.Array | None = None,
    activation: Activation = "swiglu",
    saved: Saved = "quantized",
    quantized_kernels: Sequence[QuantizedKernel | None] | None = None,
    names: Sequence[str] | None = None,
    states: Sequence[delayed_scaling.State | None] | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "T N"] | tuple[Float[Array, "T N"], tuple[delayed_scaling.State | None, ...]]:
    """`mlp` of rows in groups, each group by kernels of its own: the experts of a mixture.

    The result and the gradients of kernels and biases are those of `grouped_matmul` for gate, up and down with the
    activation in between, bit for bit unless `saved="8bit"`. The gradient of x is summed in float32 and rounded once.
    x is quantised once. What is kept of the hidden layer, and what is computed again, is said at `mlp`; each group has
    amaxes of its own.

    Arguments:
        x, group_sizes: see `grouped_matmul`. Rows after the last group give zeros and get zero gradients.
        kernels: gate [E, K, F], up [E, K, F] and down [E, F, N]; up and down if the activation has one operand. See
            `grouped_matmul`.
        biases: of each layer, [E, F] or [E, N], or None. None: no layer has one.
        recipe: default: the context's (`autocast`). None: high precision.
        key: see `grouped_matmul`; each layer has another one that is derived from it.
        activation, saved: see `mlp`.
        quantized_kernels, names, states: those of each layer, see `grouped_matmul`.
        preferred_element_type: the dtype of the result; default: x's, which the hidden layer has, too.
        precision: see `grouped_matmul`.

    Returns:
        [T, N]. With `states`, a pair of it and the tuple of states for the next call.

    Raises:
        TypeError: dtypes do not fit, or the recipe is not a recipe.
        ValueError: an unknown activation or `saved`; shapes do not fit, or the number of kernels not the activation; a
            recipe that rows in groups cannot follow, see `grouped_matmul`.

    Source: numerics.md 3, 4, 9 and 12 for each group; arXiv 2002.05202.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> x, sizes = jnp.ones((8, 64), jnp.bfloat16), jnp.array([5, 0, 3])
    >>> gate, up, down = jnp.ones((3, 64, 96)), jnp.ones((3, 64, 96)), jnp.ones((3, 96, 64))
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     jlp.grouped_mlp(x, [gate, up, down], sizes, saved="recompute").shape
    (8, 64)
    """
    who = "grouped_mlp"
    check_mlp(who, activation, saved, len(check_list(who, "kernels", kernels)))
    x = float_array(who, "x", x)
    wanted = x.dtype if preferred_element_type is None else preferred_element_type
    dtype = float_dtype(who, "preferred_element_type", wanted)
    of_each = {"biases": biases, "quantized_kernels": quantized_kernels, "names": names, "states": states}
    layers = layers_of(who, kernels, recipe, key, precision, of_each)
    options: Any = {"activation": activation, "saved": saved, "out_dtype": dtype}
    y, new_states = grouped_mlp_of(who, x, group_sizes, layers, **options)
    return y if states is None else (y, new_states)


def grouped_mlp_of(
    who: str,
    x: jax.Array,
    group_sizes: Any,
    layers: Sequence[Layer],
    *,
    activation: Activation,
    saved: Saved,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """The MLP of these layers, down's last, and their states for the next call."""
    sizes = checked_sizes(who, group_sizes, x)
    checked = _checked(who, x, sizes, layers)
    if is_watched() or not _is_quantized(checked):
        return _composed(who, x, checked, sizes, activation, saved, out_dtype)
    spec, prepared = _prepared(x, checked, sizes, activation, saved, out_dtype)
    tokens, products = wiring.align_varying(x, tuple(p.product for p in prepared))
    with in_profiles(joined([layer.name for layer in layers])):
        y, _ = quantized_mlp(spec, tokens, products, tuple(p.states for p in prepared))
    return y, tuple(p.state for p in prepared)


def _checked(who: str, x: jax.Array, sizes: jax.Array, layers: Sequence[Layer]) -> list[_Checked]:
    """The layers' kernels, biases and calls, whose shapes fit each other."""
    *hidden, down = layers
    checked = [_checked_layer(who, x, sizes, layer) for layer in hidden]
    features = check_hidden(who, [features_of(call, kernel) for kernel, _, call in checked])
    like = jax.ShapeDtypeStruct((x.shape[0], features), x.dtype)
    return [*checked, _checked_layer(who, like, sizes, down)]


def _checked_layer(who: str, x: Any, sizes: jax.Array, layer: Layer) -> _Checked:
    return checked_groups(who, x, sizes, layer.kernel, layer.bias, layer.quantized_kernel, layer.settings)


def _is_quantized(checked: Sequence[_Checked]) -> bool:
    """Whether all products are quantised, those of the hidden layer by equal roles."""
    *hidden, down = checked
    return all(share_their_input([call for *_, call in part], [w for w, *_ in part]) for part in (hidden, [down]))


def _prepared(
    x: jax.Array,
    checked: Sequence[_Checked],
    sizes: jax.Array,
    activation: Any,
    saved: Any,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[MlpSpec, list[PreparedProduct]]:
    """The spec of the MLP, and its products."""
    *hidden, (down, down_bias, down_call) = checked
    gate, _, gate_call = hidden[0]
    sharding = _sharding_of_hidden(x, gate_call.dimension_of_features(gate))
    prepared = [prepared_groups(call, x, w, b, sizes, x.dtype, out_sharding=sharding) for w, b, call in hidden]
    like: Any = jax.ShapeDtypeStruct((x.shape[0], features_of(gate_call, gate)), x.dtype, sharding=sharding)
    prepared.append(prepared_groups(down_call, like, down, down_bias, sizes, out_dtype))
    *specs, down_spec = (p.spec for p in prepared)
    return MlpSpec(activation, tuple(specs), down_spec, saved), prepared


def _sharding_of_hidden(x: jax.Array, features: Any) -> NamedSharding | None:
    """The sharding of the hidden layer in explicit mode: rows are whole, and features as the kernel has them."""
    sharding = sharding_of(x)
    return None if sharding is None else sharding.update(spec=PartitionSpec(None, features))


def _composed(
    who: str,
    x: jax.Array,
    checked: Sequence[_Checked],
    sizes: jax.Array,
    activation: Any,
    saved: Any,
    dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """The MLP from separate products."""
    *hidden, (down, down_bias, down_call) = checked

    def multiply(x: jax.Array) -> tuple[Any, Any]:
        ys, states = zip(*(groups_product(call, x, w, bias, sizes, x.dtype) for w, bias, call in hidden), strict=True)
        return ys, states

    def finish(a: jax.Array) -> tuple[jax.Array, Any]:
        return groups_product(down_call, a, down, down_bias, sizes, dtype)

    return composed(x, multiply, finish, activation, saved, who=who)
