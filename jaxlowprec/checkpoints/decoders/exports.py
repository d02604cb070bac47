"""Trained decoders as the folders that other programs serve."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

import jaxlowprec as jlp
from jaxlowprec import checkpoints
from jaxlowprec.checkpoints.decoders.folders import copy_tokenizer, mapping_of
from jaxlowprec.models.decoder.config import CONFIG
from jaxlowprec.models.decoder.model import Decoder

_WEIGHTS = nnx.Any(nnx.Param, jlp.nnx.Quantized)
_QUANTIZATION = ("quantization_config", "compression_config")


def export(source: pathlib.Path, destination: pathlib.Path, decoder: Decoder, scheme: Any = None) -> None:
    """Writes a decoder as a Hugging Face folder, float tensors in bfloat16.

    Arguments:
        source: the folder that it was loaded from, whose config and tokenizer are kept.
        destination: a new or empty folder.
        scheme: the format of quantised kernels; None: they are decoded.
    """
    content = json.loads((source / CONFIG).read_text())
    config = {key: value for key, value in content.items() if key not in (*_QUANTIZATION, "torch_dtype")}
    state = nnx.state(decoder, _WEIGHTS)
    state = state if scheme is not None else decoded(state)
    mapping = mapping_of(decoder.config)
    checkpoints.save(destination, state, mapping, config | {"dtype": "bfloat16"}, scheme=scheme, dtype=jnp.bfloat16)
    copy_tokenizer(source, destination)


def export_adapters(source: pathlib.Path, destination: pathlib.Path, decoder: Decoder, rank: int, alpha: float) -> None:
    """Writes the adapters of a decoder in the form of the package peft, float32."""
    tensors, targets = {}, set()
    for path, layer in nnx.iter_modules(decoder):
        if not isinstance(layer, jlp.nnx.LoRALinear):
            continue
        module = ".".join(map(str, path))
        targets.add(str(path[-1]))
        for name, matrix in (("lora_A", layer.lora.lora_a), ("lora_B", layer.lora.lora_b)):
            array = np.ascontiguousarray(np.asarray(matrix[...], np.float32).T)
            tensors[f"base_model.model.model.{module}.{name}.weight"] = array
    destination.mkdir(parents=True, exist_ok=True)
    save_file(tensors, destination / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(targets),
    }
    (destination / "adapter_config.json").write_text(json.dumps(said, indent=2) + "\n")


def decoded(state: Any) -> Any:
    """The state with arrays in place of QuantizedArrays, in the dtypes that they were quantised from."""

    def decode(leaf: Any) -> Any:
        return leaf.dequantize() if isinstance(leaf, jlp.QuantizedArray) else leaf

    return jax.tree.map(decode, state, is_leaf=lambda leaf: isinstance(leaf, jlp.QuantizedArray))
