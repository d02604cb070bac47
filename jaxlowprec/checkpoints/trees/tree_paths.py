"""Trees of arrays as maps from paths to leaves, and gathering of arrays that are spread over devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.checkpoints.files.strict_json import repeated
from jaxlowprec.nnx import KVScale, Quantized
from jaxlowprec.nnx.moe import SelectionBias


def leaves(tree: Any) -> dict[str, Any]:
    """The tree's arrays and QuantizedArrays by their paths, whose parts are joined by dots.

    Arguments:
        tree: an NNX module or state, Linen's variables or parameters, or any pytree.

    Raises:
        ValueError: two leaves have the same path, as of {"a.b": x, "a": {"b": y}}.

    >>> leaves({"params": {"layers": [np.ones(1), np.zeros(1)]}})
    {'layers.0': array([1.]), 'layers.1': array([0.])}
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(_as_tree(tree), is_leaf=_is_leaf)
    found = {_path(keys): leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf for keys, leaf in flat}
    if len(found) < len(flat):
        twice = brief(repeated(_path(keys) for keys, _ in flat))
        raise ValueError(f"two leaves of the tree have the path {twice}; needs other names, without dots")
    return found


def rebuilt(like: Any, found: Mapping[str, Any]) -> Any:
    """`like` with other arrays in its leaves.

    >>> rebuilt({"a": 1, "b": [2]}, {"a": 3, "b.0": 4})
    {'a': 3, 'b': [4]}
    """

    def fill(keys: Any, leaf: Any) -> Any:
        new = found[_path(keys)]
        return leaf.replace(new) if isinstance(leaf, nnx.Variable) else new

    tree = _as_tree(like)
    filled = jax.tree_util.tree_map_with_path(fill, tree, is_leaf=_is_leaf)
    return {"params": filled} if isinstance(like, Mapping) and tree is not like else filled


def on_host(path: str, array: Any) -> np.ndarray:
    """Any array as a numpy array, gathered from its devices. The given array does not keep the gathered copy.

    Arguments:
        path: the leaf's path, for errors.
        array: a numpy or JAX array.

    Raises:
        ValueError: parts of it are in other processes.

    >>> on_host("a", jax.numpy.arange(3))
    array([0, 1, 2], dtype=int32)
    """
    if not isinstance(array, jax.Array):
        return np.asarray(array)
    if not array.is_fully_addressable:
        raise ValueError(f"{path}: some of it lies in other processes; gather it first (multihost_utils)")
    shards = array.addressable_shards
    if array.is_fully_replicated:
        return _on_host(shards[0].data)
    # np.asarray(array) would do the same, but then every array would keep the gathered copy as long as it lives
    whole = np.empty(array.shape, array.dtype)
    for shard in shards:
        if shard.replica_id == 0:
            whole[shard.index] = _on_host(shard.data)
    return whole


def _on_host(single: jax.Array) -> np.ndarray:
    """The array of a single device; on the CPU a view of it."""
    if next(iter(single.devices())).platform != "cpu":
        single = jax.device_put(single, jax.local_devices(backend="cpu")[0])
    return np.asarray(single)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, nnx.Variable | QuantizedArray)


def _as_tree(tree: Any) -> Any:
    if isinstance(tree, nnx.Module):
        return nnx.state(tree, nnx.Any(nnx.Param, Quantized, SelectionBias, KVScale))
    return tree["params"] if isinstance(tree, Mapping) and set(tree) == {"params"} else tree


def _path(keys: Any) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)
