"""LoRA for trees of parameters: small trainable adapters beside frozen weights, which may be quantised (QLoRA).

    base = {"up": jlp.quantize(w, jlp.NVFP4(), axis=-2), ...}        # frozen, in 4 bits
    adapters = jlp.lora.init(jax.random.key(0), base, rank=16)       # what is trained

    def loss(adapters, batch):
        params = jlp.lora.apply(base, adapters)
        return ... jlp.linear(x, params["up"]) ...

`linear`, `dot_general`, `einsum` and the Linen layers of this library, those that `linen.convert` makes included, take
such weights; `quantize_matmuls` makes any function take them. NNX models have `jaxlowprec.nnx.add_lora`.
"""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arguments import shown, whole_number
from jaxlowprec.layers.low_rank import Adapter, LoRAKernel, check_adapter, checked_alpha, new_adapter
from jaxlowprec.models.kernels import chosen_weights, is_weight, is_whole, layer_name, listed, matrices, weights
from jaxlowprec.ops.checks import float_dtype
from jaxlowprec.ops.quantize.random_bits import folded
from jaxlowprec.recipes.fields import check_patterns, is_chosen
from jaxlowprec.recipes.qat import DEFAULT_EXCLUDE

__all__ = ["Adapter", "LoRAKernel", "apply", "init", "merge"]

Adapters = Mapping[str, Adapter]


def init(
    key: jax.Array,
    params: Any,
    *,
    rank: int,
    alpha: float | None = None,
    include: Sequence[str] = (".*",),
    exclude: Sequence[str] = DEFAULT_EXCLUDE,
    axes: Mapping[str, tuple[int, int]] | None = None,
    dtype: Any = jnp.bfloat16,
) -> dict[str, Adapter]:
    """Makes adapters for the weights of a tree of parameters.

    A weight is a QuantizedArray, or a float array two axes of which are longer than 1. It gets its layer's name: its
    path in the tree without a last "kernel", "w", "weight" or "embedding", such as "block_0/mlp/up".

    Arguments:
        key: of `jax.random`; each layer has its own random numbers, whatever other layers there are.
        params: a tree of arrays and QuantizedArrays; or of `jax.ShapeDtypeStruct`.
        rank: of the adapters.
        alpha: their strength, divided by the rank; default: the rank, for a strength of 1.
        include, exclude: regular expressions, searched for in a layer's name. A weight gets an adapter if a pattern of
            `include` matches and none of `exclude` does; biases get none.
        axes: for arrays of more than two axes: by a regular expression that matches the whole name, how many of the
            axes are batch axes, and how many are contracted. Default: all but the last two are batch axes, as in a
            stack of layers; {".*/(query|key|value)": (0, 1), ".*/out": (0, 2)} is for Flax's attention.
        dtype: of the adapters.

    Returns:
        A dict from the layers' names to `Adapter`s: a tree for any optimizer. `b` is zero, so that training starts
        from the frozen weights; `a` is uniform, as in Flax's `nnx.LoRA`.

    Raises:
        TypeError, ValueError: an argument is invalid, or no weight is chosen.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> base = {"up": jlp.quantize(jnp.ones((64, 32)), jlp.NVFP4(), axis=-2)}
    >>> adapters = jlp.lora.init(jax.random.key(0), base, rank=4)
    >>> adapters["up"].a.shape, adapters["up"].b.shape
    ((64, 4), (4, 32))
    >>> jlp.linear(jnp.ones((8, 64)), jlp.lora.apply(base, adapters)["up"]).shape
    (8, 32)
    """
    who = "lora.init"
    rank = whole_number(who, "rank", rank, least=1)
    alpha = checked_alpha(who, alpha, rank)
    dtype = float_dtype(who, "dtype", dtype)
    chosen = check_patterns(who, "include", include), check_patterns(who, "exclude", exclude)
    by = f"include={shown(include)} and exclude"
    adapters: dict[str, Adapter] = {}
    for name, leaf in chosen_weights(who, params, lambda name, _: is_chosen(name, *chosen), by).items():
        batch, k, n = matrices(who, name, leaf, {} if axes is None else axes)
        adapters[name] = new_adapter(folded(who, key, zlib.crc32(name.encode())), (*batch, k, n), rank, alpha, dtype)
    return adapters


def apply(params: Any, adapters: Adapters) -> Any:
    """The tree of parameters with each adapted weight and its adapter as a `LoRAKernel`.

    Arguments:
        params: the tree that `init` was given.
        adapters: its adapters, perhaps trained since.

    Raises:
        ValueError: an adapter's layer is not in the tree, or has another size.
    """
    return _adapted("lora.apply", params, adapters, lambda kernel: kernel)


def merge(params: Any, adapters: Adapters, *, dtype: Any = None) -> Any:
    """The tree of parameters with the adapters' products added to their weights, in float32 and rounded once.

    Merged weights are arrays; `jaxlowprec.quantize` gives them few bits again.

    Arguments:
        params, adapters: see `apply`.
        dtype: of the merged weights; default: the weight's own, or what it was quantised from.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> params = {"up": jnp.ones((64, 32))}
    >>> jlp.lora.merge(params, jlp.lora.init(jax.random.key(0), params, rank=4))["up"].shape
    (64, 32)
    """
    dtype = None if dtype is None else float_dtype("lora.merge", "dtype", dtype)
    return _adapted("lora.merge", params, adapters, lambda kernel: kernel.merged(dtype))


def _adapted(who: str, params: Any, adapters: Adapters, made: Any) -> Any:
    if not isinstance(adapters, Mapping) or not all(isinstance(name, str) for name in adapters):
        raise TypeError(f"{who}: adapters={shown(adapters)}; needs the dict that lora.init makes")
    left = dict(adapters)

    def one(path: Any, leaf: Any) -> Any:
        adapter = left.pop(layer_name(path), None) if is_weight(leaf) else None
        if adapter is None:
            return leaf
        kernel = LoRAKernel(leaf, adapter)
        check_adapter(f"{who}: {layer_name(path)!r}", kernel)
        return made(kernel)

    result = jax.tree_util.tree_map_with_path(one, params, is_leaf=is_whole)
    if left:
        names = [name for name, _ in weights(params)]
        nearest = difflib.get_close_matches(next(iter(left)), names, 3, 0.3) or names
        raise ValueError(
            f"{who}: no weight has the name {next(iter(left))!r}; needs params as lora.init was given them; the "
            f"nearest ones are {listed(nearest)}"
        )
    return result
