"""Linears that read the same input, which is quantised once for all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack, overload

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxlowprec import wiring
from jaxlowprec.arguments import shown
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers import delayed_scaling, weight_only
from jaxlowprec.layers.layer_call import LayerCall, must_merge
from jaxlowprec.layers.linear import checked_call, linear
from jaxlowprec.layers.low_rank import LoRAKernel
from jaxlowprec.layers.options import LayerSettings, LinearsOptions
from jaxlowprec.layers.producers import NormedInput
from jaxlowprec.layers.product import QuantizedKernel
from jaxlowprec.layers.quantized_matmul import quantized_matmuls
from jaxlowprec.layers.residuals import in_profiles
from jaxlowprec.layers.watched import is_watched
from jaxlowprec.ops.checks import a_sharding, float_array
from jaxlowprec.ops.norms.api import Norm
from jaxlowprec.ops.quantize.random_bits import check_key, folded
from jaxlowprec.ops.split_rows import merged_rows
from jaxlowprec.recipes.autocast import FROM_CONTEXT
from jaxlowprec.recipes.roles import Recipe
from jaxlowprec.wiring.sharding_rule import ShardingLike, resharded, sharding_of


class Layer(NamedTuple):
    """The arguments of one of several linears; see `linear`."""

    kernel: Any
    bias: Any
    quantized_kernel: QuantizedKernel | None
    recipe: Any
    key: jax.Array | None
    name: str
    state: delayed_scaling.State | None
    precision: jax.lax.PrecisionLike

    @property
    def settings(self) -> LayerSettings:
        """Keyword arguments of `layer_call`."""
        return {
            "recipe": self.recipe,
            "key": self.key,
            "name": self.name,
            "state": self.state,
            "precision": self.precision,
        }

    def alone(self, x: Any, out_sharding: ShardingLike = None) -> tuple[jax.Array, Any]:
        """The layer's own product, and its state for the next call, or None."""
        options: Any = {**self.settings, "quantized_kernel": self.quantized_kernel, "out_sharding": out_sharding}
        y = linear(x, self.kernel, self.bias, **options)
        return (y, None) if self.state is None else y

    def checked(self, who: str, x: jax.Array) -> tuple[Any, Any, LayerCall]:
        """See `checked_call`."""
        return checked_call(who, x, self.kernel, self.bias, self.quantized_kernel, self.settings)


@overload
def linears(
    x: Float[Array, "*T K"],
    kernels: Sequence[Float[Array, "K N"] | QuantizedArray | LoRAKernel | None],
    biases: Sequence[Float[Array, "N"] | None] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    states: None = None,
    **options: Unpack[LinearsOptions],
) -> tuple[Float[Array, "*T N"], ...]: ...


@overload
def linears(
    x: Float[Array, "*T K"],
    kernels: Sequence[Float[Array, "K N"] | QuantizedArray | LoRAKernel | None],
    biases: Sequence[Float[Array, "N"] | None] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    states: Sequence[delayed_scaling.State | None],
    **options: Unpack[LinearsOptions],
) -> tuple[tuple[Float[Array, "*T N"], ...], tuple[delayed_scaling.State | None, ...]]: ...


def linears(
    x: Float[Array, "*T K"],
    kernels: Sequence[Float[Array, "K N"] | QuantizedArray | LoRAKernel | None],
    biases: Sequence[Float[Array, "N"] | None] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    key: jax.Array | None = None,
    quantized_kernels: Sequence[QuantizedKernel | None] | None = None,
    names: Sequence[str] | None = None,
    states: Sequence[delayed_scaling.State | None] | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> (
    tuple[Float[Array, "*T N"], ...] | tuple[tuple[Float[Array, "*T N"], ...], tuple[delayed_scaling.State | None, ...]]
):
    """`linear` of one input by several kernels, such as query, key and value: x is quantised once, and kept once.

    Results and gradients of kernels and biases have the bits of separate calls, except that signs that are drawn for a
    rotation of x are the first layer's for all. The gradient of x is summed in float32 and rounded once. Where layers
    quantise x differently, because the recipe treats their names differently, or not at all, each is a call of its own.

    Arguments:
        x, recipe, out_sharding, precision: see `linear`.
        kernels: a [K, N] for each layer, each with its own N; see `linear`.
        biases: [N] or None for each layer. None: no layer has one.
        key: see `linear`; each layer has another one that is derived from it. An x that is rounded by random bits
            (`Role.rounding` "eden") takes those of the first.
        quantized_kernels, names, states: those of each layer, see `linear`.

    Returns:
        A tuple of [..., N]. With `states`, a pair of that and the tuple of states for the next call.

    Raises:
        TypeError: dtypes do not fit, or the recipe is not a recipe.
        ValueError: shapes do not fit, or an argument has not as many elements as there are kernels.

    Source: numerics.md 3.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> x, kernels = jnp.ones((8, 64), jnp.bfloat16), [jnp.ones((64, n)) for n in (64, 32, 32)]
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     query, key, value = jlp.linears(x, kernels)
    >>> query.shape, key.shape
    ((8, 64), (8, 32))
    """
    who = "linears"
    a_sharding(who, "out_sharding", out_sharding)
    x = float_array(who, "x", x)
    of_each = {"biases": biases, "quantized_kernels": quantized_kernels, "names": names, "states": states}
    layers = layers_of(who, kernels, recipe, key, precision, of_each)
    ys, _, new_states = linears_of(who, x, layers, out_sharding)
    return ys if states is None else (ys, new_states)


def linears_of(
    who: str, x: jax.Array | Norm, layers: Sequence[Layer], out_sharding: ShardingLike = None
) -> tuple[tuple[jax.Array, ...], jax.Array | None, tuple[Any, ...]]:
    """The products of x by each layer's kernel, the sum of a norm with a residual, and the states for the next call.

    Where one quantised input serves all products, nothing else reads a norm's result: then it is quantised, or its
    amaxes are found, in the pass that makes it.
    """
    found = _shared(who, x, layers, out_sharding)
    if found is not None:
        return found
    x, total = x.alone() if isinstance(x, Norm) else (x, None)
    ys = _by_loaded(who, x, layers, out_sharding)
    if ys is not None:
        return ys, total, tuple(layer.state for layer in layers)
    ys, states = zip(*[layer.alone(x, out_sharding) for layer in layers], strict=True)
    return ys, total, states


def _by_loaded(
    who: str, x: jax.Array, layers: Sequence[Layer], out_sharding: ShardingLike
) -> tuple[jax.Array, ...] | None:
    """The products by weights that were all loaded quantised, as one call, whose bytes are those of separate ones.

    None if they are something else, or in explicit mode.
    """
    if alone_in_any_case(layers) or out_sharding is not None or sharding_of(x):
        return None
    checked = [layer.checked(who, x) for layer in layers]
    loaded = [(q, bias) for w, bias, call in checked if (q := call.loaded(w)) is not None]
    if len({call.precision for *_, call in checked}) > 1 or len(loaded) < len(layers):
        return None
    tokens, rows_split = tokens_of(x, [(call, w) for w, _, call in checked])
    with in_profiles(joined([layer.name for layer in layers])):
        ys = weight_only.matmuls(tokens, loaded, x.dtype, rows_split, checked[0][2].precision)
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in ys)


def _shared(
    who: str, x: jax.Array | Norm, layers: Sequence[Layer], out_sharding: ShardingLike
) -> tuple[tuple[jax.Array, ...], jax.Array | None, tuple[Any, ...]] | None:
    """The products, the norm's sum, and states; None if layers cannot share their input."""
    if alone_in_any_case(layers):
        return None
    like = x.x if isinstance(x, Norm) else x
    checked = [layer.checked(who, like) for layer in layers]
    if not share_their_input([call for *_, call in checked], [kernel for kernel, *_ in checked]):
        return None
    tokens, rows_split = tokens_of(like, [(call, kernel) for kernel, _, call in checked])
    result = like.dtype, out_sharding if like.ndim == tokens.ndim else None, rows_split
    prepared = [call.prepared(tokens, kernel, bias, result) for kernel, bias, call in checked]
    given = NormedInput.of(x, tokens) if isinstance(x, Norm) else tokens
    aligned, products = wiring.align_varying(given, tuple(p.product for p in prepared))
    with in_profiles(joined([layer.name for layer in layers])):
        specs, states = tuple(p.spec for p in prepared), tuple(p.states for p in prepared)
        ys, further = quantized_matmuls(specs, aligned, products, states)
    ys = tuple(resharded(y.reshape(*like.shape[:-1], y.shape[-1]), out_sharding) for y in ys)
    return ys, further[0].reshape(like.shape) if further else None, tuple(p.state for p in prepared)


def layers_of(
    who: str,
    kernels: Any,
    recipe: Any,
    key: jax.Array | None,
    precision: jax.lax.PrecisionLike,
    of_each: dict[str, Any],
) -> list[Layer]:
    """The arguments of each layer. `of_each`: lists with an element for each, or None.

    Raises:
        TypeError, ValueError: an argument is no list, or has not as many elements as there are kernels.
    """
    check_key(who, key)
    count = len(check_list(who, "kernels", kernels))
    if count == 0:
        raise ValueError(f"{who}: kernels is empty; needs one kernel or more")
    for argument, given in of_each.items():
        if given is not None and len(check_list(who, argument, given)) != count:
            raise ValueError(f"{who}: {argument} has {len(given)} elements for {count} kernels; needs one for each")

    def layer(i: int) -> Layer:
        bias, quantized, name, state = (
            None if of_each[argument] is None else of_each[argument][i]
            for argument in ("biases", "quantized_kernels", "names", "states")
        )
        own = None if key is None else folded(who, key, i)
        return Layer(kernels[i], bias, quantized, recipe, own, "" if name is None else name, state, precision)

    return [layer(i) for i in range(count)]


def check_list(who: str, argument: str, given: Any) -> Any:
    """The argument. Raises TypeError unless it is a list or tuple."""
    if not isinstance(given, list | tuple):
        raise TypeError(f"{who}: {argument}={shown(given)}; needs a list or tuple with an element for each layer")
    return given


def alone_in_any_case(layers: Sequence[Layer]) -> bool:
    """Whether the layers have to be calls of their own, whatever the recipe."""
    return is_watched() or any(isinstance(layer.kernel, LoRAKernel) for layer in layers)


def share_their_input(calls: Sequence[LayerCall], kernels: Sequence[Any]) -> bool:
    """Whether all products are quantised by equal roles, so that one quantised input serves all."""
    if any(call.in_high_precision(w) or call.roles is None for call, w in zip(calls, kernels, strict=True)):
        return False
    found = {_of_input(call) for call in calls}
    return len(found) == 1 and calls[0].roles is not None and calls[0].roles.ste is None


def _of_input(call: LayerCall) -> tuple[Any, ...]:
    """The settings that decide how a call quantises its input; calls with equal ones share it."""
    recipe: Any = call.recipe
    return call.roles, recipe.backward_override, recipe.delayed


def tokens_of(x: jax.Array, layers: Sequence[tuple[LayerCall, Any]]) -> tuple[jax.Array, bool]:
    """x as the products take it, and whether its rows are split; see `LayerCall.matmul`."""
    if x.ndim <= 2:
        return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), False
    parts = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    for call, w in layers:
        if must_merge(call.who, parts, w if w is not None else call.quantized, call.roles):
            return merged_rows(parts), False
    return parts, True


def joined(names: Sequence[str]) -> str:
    """The name of several layers in profiles: attention/query, attention/key is attention/query+key."""
    names = [name for name in names if name]
    parents = {name.rpartition("/")[0] for name in names}
    if len(parents) != 1 or len(names) == 1:
        return "+".join(names)
    (parent,) = parents
    return "/".join(filter(None, (parent, "+".join(name.rpartition("/")[2] for name in names))))
