"""How a layer is called: by the path of its parameter in a tree."""

from __future__ import annotations

from typing import Any

import jax

_KERNELS = ("kernel", "w", "weight", "embedding")  # a layer's name is its path without what its matrix is called


def layer_name(path: Any) -> str:
    """The name of the layer of a leaf with this path of keys, such as "block_0/mlp/up"."""
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and names[-1] == "value":  # of an NNX variable
        names.pop()
    if len(names) > 1 and isinstance(path[-1], jax.tree_util.FlattenedIndexKey) and names[-2] in _KERNELS:
        names.pop()  # the array of a container, such as Haliax's NamedArray
    if len(names) > 1 and names[-1] in _KERNELS:
        names.pop()
    if len(names) > 1 and names[0] == "params":  # Linen's collection
        del names[0]
    return "/".join(names)
