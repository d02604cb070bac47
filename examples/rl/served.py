"""The policy as the rollout serves it, made only from the tensors that it received."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.weight_sync import WeightSource, to_tree
from rl.policies import AnyPolicy, made
from rl.policy import RECIPE, Config


def served(config: Config, tensors: Mapping[str, Any]) -> AnyPolicy:
    """The policy with 4-bit kernels that needs no recipe.

    Arguments:
        config: the policy's sizes; no parameter is initialised.
        tensors: by their names, as a `WeightSource` of the exported policy sends them.

    Raises:
        ValueError: a tensor is missing or left over, or has another dtype or shape.
    """
    model = nnx.eval_shape(lambda: jlp.quantize_params(made(config, nnx.Rngs(0)), RECIPE))
    nnx.update(model, to_tree(tensors, model))
    return model


def digests(model: nnx.Module) -> dict[str, str]:
    """SHA-256 of the dtype, shape and bytes of each tensor of the policy, by their names."""
    return {
        name: hashlib.sha256(f"{array.dtype.name} {array.shape} ".encode() + array.tobytes()).hexdigest()
        for name, array in WeightSource(model).arrays()
    }


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Returns the names of tensors whose digests differ, or that only one side has.

    >>> differing({"a": "1", "b": "2"}, {"b": "3", "c": "4"})
    ['a', 'b', 'c']
    """
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
