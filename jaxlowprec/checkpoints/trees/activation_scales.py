"""Scales of activations, which calibration found and no parameter of a tree holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.conversion.modules import is_quantised, scheme_of
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.schemes.base import FLOATS, Scheme

NAMES = ("input_scale", "input_global_scale")
"""The last parts of their names in all schemes."""

Scales = Mapping[str, np.ndarray]


def activation_scales(folder: str | os.PathLike[str], scheme: Scheme) -> dict[str, np.ndarray]:
    """The static scales of activations that a checkpoint holds, by their tensors' names.

    Arguments:
        folder: the checkpoint's folder.
        scheme: the scheme that they are wanted for: modules that have another one in the checkpoint are left out.

    Returns:
        float arrays of one number each; none if the checkpoint is not quantised.

    Raises:
        CheckpointError: files are missing or wrong.
    """
    with CheckpointFolder(folder) as source:
        if not is_quantised(source):
            return {}
        own = scheme_of(source)
        found = [name for name in source.shard_of if name.rpartition(".")[2] in NAMES]
        return {name: source.read(name) for name in found if _alike(own, scheme, name.rpartition(".")[0])}


def _alike(one: Scheme, other: Scheme, module: str) -> bool:
    a, b = one.of_module(module), other.of_module(module)
    return a is not None and b is not None and a.name == b.name


def check_scales(who: str, scales: Scales) -> None:
    """Raises ValueError unless these are scales of activations.

    >>> check_scales("save", {"up_proj.weight_scale": np.ones(1)})
    Traceback (most recent call last):
    ValueError: save: activation_scales has 'up_proj.weight_scale'; needs names that end with input_scale or \
input_global_scale
    """
    for name, scale in scales.items():
        if name.rpartition(".")[2] not in NAMES:
            raise ValueError(f"{who}: activation_scales has {name!r}; needs names that end with {' or '.join(NAMES)}")
        if scale.dtype.name not in FLOATS or scale.size != 1 or scale.ndim > 1:
            raise ValueError(
                f"{who}: activation_scales has {name!r} of {scale.dtype} {list(scale.shape)}; needs one float number"
            )


def with_scales(tensors: Mapping[str, Any], scales: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors, with these scales in place of those that the scheme writes; others are not added.

    >>> made = with_scales({"up.weight": 1, "up.input_scale": 2}, {"up.input_scale": 3, "down.input_scale": 4})
    >>> made
    {'up.weight': 1, 'up.input_scale': 3}
    """
    return {name: scales.get(name, tensor) for name, tensor in tensors.items()}
