"""Saves whole parameter trees as checkpoint folders and loads them, with the scales of activations that calibration
found and no parameter holds.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.conversion.modules import is_quantised, scheme_of
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.config import quantization_of, with_quantization
from jaxlowprec.checkpoints.files.folder import CONFIG_FILE, SINGLE_FILE, CheckpointFolder, LazyTensors, write_index
from jaxlowprec.checkpoints.files.safetensors_file import write_tensors
from jaxlowprec.checkpoints.files.written_whole import write_json
from jaxlowprec.checkpoints.schemes import Scheme, from_config
from jaxlowprec.checkpoints.schemes.base import FLOATS
from jaxlowprec.checkpoints.trees.kv_scales import says_only_the_cache, with_kv_cache
from jaxlowprec.checkpoints.trees.mapping import TreeMapping

Folder = str | os.PathLike[str]

NAMES = ("input_scale", "input_global_scale")
"""The last parts of their names in all schemes."""
Scales = Mapping[str, np.ndarray]


def save(
    folder: Folder,
    tree: Any,
    mapping: TreeMapping,
    config: Mapping[str, Any],
    *,
    scheme: Scheme | None = None,
    dtype: Any = None,
    shard_bytes: int = 5_000_000_000,
    activation_scales: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes a tree as a Hugging Face checkpoint.

    Arguments:
        folder: a new or empty folder.
        tree, mapping, scheme, dtype: see `TreeMapping.to_tensors`.
        config: the content of config.json; the scheme replaces what it says about quantisation, and every kernel that
            is not quantised is ignored by name.
        shard_bytes: the size of files that tensors are spread over, with at least one tensor in each.
        activation_scales: static scales of activations by their tensors' names, such as `activation_scales(folder,
            scheme)` reads, in place of the scheme's. Those of modules without such a tensor are left out.

    Raises:
        CheckpointError: the folder is not empty.
        ValueError: see `TreeMapping.to_tensors`; `activation_scales` that are none; layers that the config counts and
            the tree lacks.
    """
    check_scales("save", activation_scales or {})
    path = pathlib.Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path}: holds something already; save to a new or empty folder")
    tensors = with_scales(mapping.to_tensors(tree, scheme, dtype), activation_scales or {})
    _require_layers(tensors, config)
    content = dict(config)
    entry = None if scheme is None else scheme.quantization_config(mapping.float_modules(tree))
    entry = with_kv_cache("save", entry, scheme, {name: tensor.shape for name, tensor in tensors.items()})
    if entry is not None:
        content = with_quantization(content, entry)
    path.mkdir(parents=True, exist_ok=True)
    files = _files(tensors, shard_bytes)
    for file, names in files.items():
        write_tensors(path / file, {name: tensors[name] for name in names})
    if len(files) > 1:
        shard_of = {name: file for file, names in files.items() for name in names}
        write_index(path, shard_of, sum(tensor.nbytes for tensor in tensors.values()))
    write_json(path / CONFIG_FILE, content)


def _require_layers(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raises ValueError if a layer that the config counts has no tensor: some loaders then draw it at random."""
    count = config.get("num_hidden_layers")
    found = {int(number[1]) for name in tensors if (number := re.match(r"model\.layers\.(\d+)\.", name))}
    absent = (i for i in range(count) if i not in found) if found and isinstance(count, int) else ()
    missing = list(itertools.islice(absent, 10))  # a config may say any number
    if missing:
        raise ValueError(
            f"save: the config's num_hidden_layers is {count}, and the tree has no layer {missing}; give the "
            "config of this tree, or a tree of all layers"
        )


def load(folder: Folder, like: Any, mapping: TreeMapping, *, scheme: Scheme | None = None) -> Any:
    """Reads a tree from a Hugging Face checkpoint.

    Arguments:
        folder: the checkpoint's folder.
        like, mapping: see `TreeMapping.from_tensors`.
        scheme: the format of quantised weights. None: the one that the checkpoint's config names.

    Raises:
        CheckpointError: files are missing or wrong; see also `TreeMapping.from_tensors` and `schemes.from_config`.
    """
    with CheckpointFolder(folder) as source:
        try:
            quantization = quantization_of(source.config())
            if scheme is None and quantization and not says_only_the_cache(quantization):
                scheme = from_config(quantization)
            return mapping.from_tensors(LazyTensors(source), like, scheme)
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{source.path}: {error}") from error


def _files(tensors: Mapping[str, np.ndarray], shard_bytes: int) -> dict[str, list[str]]:
    """Maps file names to the names of the tensors in each."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    count = len(shards)
    return {f"model-{i:05}-of-{count:05}.safetensors": names for i, names in enumerate(shards, 1)}


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
