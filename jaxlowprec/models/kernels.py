"""Names of layers in a tree of parameters, which of its leaves are their weights, and the matrices of these."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxlowprec.arguments import shown
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers.low_rank import LoRAKernel
from jaxlowprec.layers.subscripts import has_matrices
from jaxlowprec.ops.checks import FLOATS
from jaxlowprec.recipes.fields import check_pattern

# A layer's name is its path without what its matrix is called.
_KERNELS = ("kernel", "w", "weight", "weights", "embedding", "embeddings")


def layer_name(path: Any) -> str:
    """The name of the layer of a leaf with this path of keys, such as "block_0/mlp/up"."""
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey):
        if names[-1] == "data_array" and len(names) > 1:  # the array of Penzai's NamedArray
            names.pop()
        if names[-1] == "value":  # of an NNX variable, or of a Penzai parameter
            names.pop()
    if len(names) > 1 and isinstance(path[-1], jax.tree_util.FlattenedIndexKey) and names[-2] in _KERNELS:
        names.pop()  # the array of a container, such as Haliax's NamedArray
    if len(names) > 1 and names[-1] in _KERNELS:
        names.pop()
    if len(names) > 1 and names[0] == "params":  # Linen's collection
        del names[0]
    return "/".join(names)


def weights(params: Any) -> Iterator[tuple[str, Any]]:
    """The names of the layers, and their weights."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_whole):
        name = layer_name(path)
        if is_weight(leaf) and name.rpartition("/")[2] != "bias":
            yield name, leaf


def chosen_weights(who: str, params: Any, chosen: Callable[[str, Any], bool], by: str) -> dict[str, Any]:
    """The weights that are chosen, by their layers' names.

    Arguments:
        chosen: whether the weight of that name is.
        by: what chooses, for the message.

    Raises:
        ValueError: two of them have one name, or there are none.
    """
    found: dict[str, Any] = {}
    names = []
    for name, leaf in weights(params):
        names.append(name)
        if not chosen(name, leaf):
            continue
        if name in found:
            raise ValueError(f"{who}: two weights have the name {name!r}; rename one, or leave it out with exclude=")
        found[name] = leaf
    if not found:
        raise ValueError(f"{who}: {by} leave none of the weights {listed(names)}")
    return found


def is_whole(node: Any) -> bool:
    """Whether a node of a tree is one weight, though it has leaves."""
    return isinstance(node, QuantizedArray | LoRAKernel)


def is_weight(leaf: Any) -> bool:
    """Whether a leaf is a QuantizedArray, or a float array two axes of which are longer than 1."""
    if is_whole(leaf):
        return isinstance(leaf, QuantizedArray)
    shape = getattr(leaf, "shape", None)
    return isinstance(shape, tuple) and getattr(leaf, "dtype", None) in FLOATS and has_matrices(shape)


def matrices(who: str, name: str, weight: Any, axes: Mapping[str, tuple[int, int]]) -> tuple[tuple[int, ...], int, int]:
    """The sizes of a weight's matrices: the batch shape, K and N.

    `axes`: by a regular expression that matches the layer's whole name, how many of the axes of its weight are batch
    axes, and how many are contracted; all but the last two are batch axes otherwise.

    Raises:
        TypeError, ValueError: `axes` says something else, or does not fit the weight.
    """
    if not isinstance(axes, Mapping):
        raise TypeError(f'{who}: axes={shown(axes)}; needs a dict such as {{".*/out": (0, 2)}}')
    batch, contracted = weight.ndim - 2, 1
    for pattern, given in axes.items():
        check_pattern(f"{who}: axes", pattern)
        if not isinstance(weight, QuantizedArray) and re.fullmatch(pattern, name):
            batch, contracted = checked_numbers(who, pattern, given)
            break
    shape = weight.shape
    if batch < 0 or contracted < 1 or batch + contracted >= len(shape):
        raise ValueError(
            f"{who}: axes={(batch, contracted)} for {name!r} of shape {shape}; needs batch axes, contracted axes and "
            "at least one more"
        )
    return shape[:batch], math.prod(shape[batch : batch + contracted]), math.prod(shape[batch + contracted :])


def checked_numbers(who: str, pattern: str, given: Any) -> tuple[int, int]:
    """How many axes are batch axes, and how many are contracted; raises TypeError unless these are two ints."""
    if not isinstance(given, tuple | list) or len(given) != 2 or not all(type(n) is int for n in given):
        raise TypeError(f"{who}: axes[{pattern!r}]={shown(given)}; needs two whole numbers, such as (0, 1)")
    return given[0], given[1]


def listed(names: list[str]) -> str:
    """The first names, for messages."""
    return ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "") or "(none)"
