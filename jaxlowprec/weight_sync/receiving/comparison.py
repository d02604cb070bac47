"""Received weights beside the trainer's: as a tree like its own, and the tensors that differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.trees.tree_paths import leaves, rebuilt
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.receiving.weights import Weights
from jaxlowprec.weight_sync.sending.source import PARTS, WeightSource, check_arrays


def to_tree(weights: Mapping[str, Any], like: Any) -> Any:
    """A tree with these weights in its leaves, QuantizedArrays included. No parameter needs to be initialised for it.

    For weights of a `WeightSource` without a mapping, whose names are the leaves' paths. For weights with a mapping,
    see `TreeMapping.from_tensors`.

    Arguments:
        weights: by their names, as `Receiver.weights` in published form has them; a QuantizedArray has one per part.
        like: the tree to fill: structure, shapes and dtypes count. Its leaves may be abstract (`jax.ShapeDtypeStruct`,
            as `jax.eval_shape` and `nnx.eval_shape` give).

    Returns:
        A tree of JAX arrays like `like`; for an NNX module the state of its parameters and quantised kernels, for
        `nnx.update`.

    Raises:
        TypeError: leaves of `like` that are not arrays. ValueError: weights that are missing or left over, or of
            another dtype or shape.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> from jaxlowprec.weight_sync import InProcess, Receiver, WeightSource, push
    >>> tree = {"up": jlp.quantize(jnp.ones((32, 64)), jlp.Int4(32), axis=-2), "norm": jnp.ones(64)}
    >>> receiver = Receiver()
    >>> version = push(WeightSource(tree), InProcess(receiver))
    >>> sorted(receiver.weights)
    ['norm', 'up.data', 'up.scale']
    >>> to_tree(receiver.weights, jax.eval_shape(lambda: tree))["up"].dequantize().shape
    (32, 64)
    """
    check_arrays("to_tree", "`like`", like)
    left, missing = dict(weights), []

    def taken(name: str, leaf: Any) -> Any:
        if name not in left:
            missing.append(name)
            return None
        found = left.pop(name)
        if (tuple(found.shape), found.dtype) != (tuple(leaf.shape), leaf.dtype):
            given, needed = f"{found.dtype} {tuple(found.shape)}", f"{leaf.dtype} {tuple(leaf.shape)}"
            raise ValueError(
                f"to_tree: {name} came as {given}, and `like` has {needed}; needs the tree that was sent: its sizes, "
                "formats and dtypes"
            )
        return as_array(found)

    found: dict[str, Any] = {}
    for path, leaf in leaves(like).items():
        if isinstance(leaf, QuantizedArray):
            parts = [part for part in PARTS if getattr(leaf, part) is not None]
            found[path] = dataclasses.replace(leaf, **{p: taken(f"{path}.{p}", getattr(leaf, p)) for p in parts})
        else:
            found[path] = taken(path, leaf)
    problems = [f"did not get {', '.join(missing)}"] * bool(missing)
    problems += [f"got {', '.join(sorted(left))}, for which `like` has no place"] * bool(left)
    if problems:
        raise ValueError(f"to_tree: {', and '.join(problems)}; needs the tree that was sent, without a mapping")
    return rebuilt(like, found)


def differences(source: WeightSource, receiver: Receiver | Weights) -> list[str]:
    """Names of tensors that differ in a byte, a dtype or a shape, or that one side lacks.

    >>> from jaxlowprec.weight_sync.transports.transport import InProcess
    >>> from jaxlowprec.weight_sync.sending.session import push
    >>> receiver = Receiver()
    >>> _ = push(WeightSource({"a": np.ones(2), "b": np.ones(2)}), InProcess(receiver))
    >>> differences(WeightSource({"a": np.ones(2), "b": np.zeros(2), "c": np.ones(1)}), receiver)
    ['b', 'c']
    """
    live = receiver.dump()
    differ = []
    for name, sent in source.arrays():
        served = live.pop(name, None)
        if served is None or not _same(sent, served):
            differ.append(name)
    return differ + list(live)


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = f"u{one.dtype.itemsize}"
    return np.array_equal(one.view(bits), other.view(bits))
