"""The policy as the rollout serves it: made of the tensors that came over, and of nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.checkpoints.tree_paths import leaves, rebuilt
from jaxlowprec.weight_sync import WeightSource
from rl.policy import RECIPE, Config, Policy

PARTS = ("data", "scale", "zero_point", "amax")


def served(config: Config, tensors: Mapping[str, Any]) -> Policy:
    """The policy with 4-bit kernels that needs no recipe.

    Arguments:
        config: its sizes; no parameter is ever initialised.
        tensors: by their names, as a `WeightSource` of the exported policy sends them: of a 4-bit kernel its packed
            codes, `data`, and its `scale`; float leaves by their paths.

    Raises:
        ValueError: a tensor that is missing, left over, or of another dtype or shape.
    """
    model = nnx.eval_shape(lambda: jlp.quantize_params(Policy(config, nnx.Rngs(0)), RECIPE))
    left = dict(tensors)

    def taken(name: str, like: Any) -> jax.Array:
        tensor = left.pop(name, None)
        given = "nothing" if tensor is None else f"{tensor.dtype} {tensor.shape}"
        if tensor is None or (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise ValueError(f"served: {name} came as {given}; the policy needs {like.dtype} {like.shape}")
        return jnp.array(tensor)

    found: dict[str, Any] = {}
    for path, leaf in leaves(model).items():
        if isinstance(leaf, jlp.QuantizedArray):
            parts = [part for part in PARTS if getattr(leaf, part) is not None]
            found[path] = dataclasses.replace(leaf, **{p: taken(f"{path}.{p}", getattr(leaf, p)) for p in parts})
        else:
            found[path] = taken(path, leaf)
    if left:
        raise ValueError(f"served: {', '.join(sorted(left))} came over; the policy has no such tensors")
    nnx.update(model, rebuilt(model, found))
    return model


def digests(model: Policy) -> dict[str, str]:
    """SHA-256 of the dtype, shape and bytes of each tensor that stands for the policy, by their names."""
    return {
        name: hashlib.sha256(f"{array.dtype.name} {array.shape} ".encode() + array.tobytes()).hexdigest()
        for name, array in WeightSource(model).arrays()
    }
