"""LoRA adapters as a folder in the form of the package peft, which servers load beside the model's own folder."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.files.safetensors_file import write_tensors

_WHO, _END = "save_adapters", ".weight"


def save_adapters(
    folder: str | os.PathLike[str],
    adapters: Mapping[str, tuple[Any, Any]],
    *,
    rank: int,
    alpha: float,
    base: str | os.PathLike[str] = "",
) -> None:
    """Writes LoRA adapters in the form of the package peft, float32: adapter_model.safetensors and adapter_config.json.

    Arguments:
        folder: to be made, or whose files of these names are replaced.
        adapters: the two arrays of each adapter, by the name that the weight has in the model's checkpoint, such as
            "model.layers.0.mlp.up_proj.weight": A [K..., rank] and B [rank, N...]. Several axes of inputs or outputs
            count as one, in their order.
        rank: of the adapters. One of another rank is named in the config.
        alpha: an adapter adds alpha / rank times x A B to its layer's output, also one of another rank.
        base: the name or the folder of the model.

    Raises:
        ValueError: there are no adapters, a name does not end with ".weight", or A and B have different ranks.

    >>> import jax.numpy as jnp, jaxlowprec as jlp, tempfile
    >>> pair = jnp.ones((64, 8)), jnp.zeros((8, 4, 32))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     adapters = {"model.layers.0.self_attn.q_proj.weight": pair}
    ...     jlp.checkpoints.save_adapters(folder, adapters, rank=8, alpha=16)
    """
    if not adapters:
        raise ValueError(f"{_WHO}: there are no adapters; needs one or more")
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, dict[str, int]] = {}
    for name, pair in adapters.items():
        if not name.endswith(_END):
            raise ValueError(f"{_WHO}: needs the names of weights, which end with '{_END}'; got {name!r}")
        a, b = (np.asarray(half, np.float32) for half in pair)
        own = a.shape[-1]
        if min(a.ndim, b.ndim) < 2 or b.shape[0] != own:
            raise ValueError(
                f"{_WHO}: {name} needs A [K..., rank] and B [rank, N...]; got shapes {a.shape} and {b.shape}"
            )
        module = name.removesuffix(_END)
        for letter, matrix in (("A", a.reshape(-1, own)), ("B", b.reshape(own, -1))):
            tensors[f"base_model.model.{module}.lora_{letter}{_END}"] = np.ascontiguousarray(matrix.T)
        ranks.setdefault(module.rpartition(".")[2], {})[module] = own
    others: dict[str, int] = {}
    for last, found in ranks.items():  # modules of one name that share a rank are one entry
        entries = found if len(set(found.values())) > 1 else {last: next(iter(found.values()))}
        others |= {module: own for module, own in entries.items() if own != rank}
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(ranks),
        "rank_pattern": others,
        "alpha_pattern": {module: alpha * own / rank for module, own in others.items()},
    }
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    write_tensors(path / "adapter_model.safetensors", tensors)
    (path / "adapter_config.json").write_text(json.dumps(said, indent=2) + "\n")
