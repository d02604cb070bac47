"""Hugging Face folders as decoders of `jaxlowprec.models.decoder`, and trained decoders as folders to serve."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec import checkpoints
from jaxlowprec.checkpoints import CheckpointError, TreeMapping, mapping_for
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.trees.kv_scales import IN_PROJECTIONS, cache_scales
from jaxlowprec.checkpoints.trees.mapping import Rule
from jaxlowprec.models.decoder.config import CONFIG, FAMILIES, DecoderConfig
from jaxlowprec.models.decoder.model import Decoder

__all__ = ["export", "export_adapters", "load"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)

_WEIGHTS = nnx.Any(nnx.Param, jlp.nnx.Quantized, jlp.nnx.SelectionBias, jlp.nnx.KVScale)
_QUANTIZATION = ("quantization_config", "compression_config")
_DRAFTS = ("num_nextn_predict_layers", "num_mtp_layers")


def mapping_of(config: DecoderConfig) -> TreeMapping:
    """The names of a decoder's parameters in its family's checkpoints."""
    architecture = FAMILIES[config.family]
    said = {"architectures": [architecture], "tie_word_embeddings": config.tied, "num_hidden_layers": config.layers}
    return mapping_for(said)


def require_counts(source: CheckpointFolder, config: DecoderConfig) -> None:
    """Raises CheckpointError if a config says more layers or experts than the folder's tensors can hold."""
    count = len(source.shard_of)
    specs = [source.spec(name) for name in source.shard_of]
    arrays = sum(spec.shape[0] for spec in specs if len(spec.shape) > 2 and spec.nbytes)
    experts = 0 if config.experts is None else config.experts.number * sum(config.sparse)
    for said, what, most in ((config.layers, "layers", count), (experts, "experts in all layers", count + arrays)):
        if said > most:
            raise CheckpointError(f"{source.path}: config.json says {said} {what}; the folder has {count} tensors")


def load(folder: pathlib.Path, *, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32) -> Decoder:
    """The decoder of a Hugging Face folder. Kernels that the folder holds quantised become QuantizedArrays.

    Arguments:
        folder: config.json and safetensors files.
        dtype, param_dtype: see `Decoder`. `param_dtype` is the folder's dtype, or float32, which holds it exactly.

    Raises:
        ValueError: the config asks for what the decoder does not have, or tensors are missing, left over or of another
            shape.
        CheckpointError: files are missing or wrong.
    """
    config = DecoderConfig.of_folder(folder)
    mapping = mapping_of(config)
    with CheckpointFolder(folder) as source:
        require_counts(source, config)
        scales = cache_scales({name: source.spec(name).shape for name in source.shard_of})
    decoder = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
    nnx.update(decoder, checkpoints.load(folder, with_scales(decoder, scales), reading(mapping, scales)))
    for attention in (layer.self_attn for layer in decoder.layers):
        for scale in (attention.k_scale, attention.v_scale):
            if scale is not None:  # files also have [] and [key_heads, 1, 1]
                scale.set_value(scale.get_value().reshape(-1))
    return decoder


def with_scales(decoder: Decoder, scales: Mapping[str, tuple[int, ...]]) -> Decoder:
    """The decoder, with a place for each of a file's static scales of a cache, by their names and shapes."""
    for name, shape in scales.items():
        layer = re.search(r"\.(\d+)\.self_attn\.", name)
        if layer is None or int(layer[1]) >= len(decoder.layers):
            raise CheckpointError(f"{name} is a scale of a cache that no layer of the decoder has")
        attention = decoder.layers[int(layer[1])].self_attn
        scale = jlp.nnx.KVScale(jax.ShapeDtypeStruct(shape, jnp.float32))
        setattr(attention, name.rpartition(".")[2], nnx.data(scale))
    return decoder


def reading(mapping: TreeMapping, scales: Iterable[str]) -> TreeMapping:
    """The mapping, with ModelOpt's names of these scales if they have them."""
    if not any(IN_PROJECTIONS.search(name) for name in scales):
        return mapping
    names = {f"self_attn.{kind}_scale": f"self_attn.{kind}_proj.{kind}_scale" for kind in "kv"}
    rules = [Rule(f"layers.{{i}}.{ours}", f"model.layers.{{i}}.{theirs}") for ours, theirs in names.items()]
    return dataclasses.replace(mapping, rules=(*rules, *mapping.rules))


def copy_tokenizer(source: pathlib.Path, destination: pathlib.Path) -> None:
    """Copies the files of a tokenizer, and of generation, as far as the source has them."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def export(source: pathlib.Path, destination: pathlib.Path, decoder: Decoder, scheme: Any = None) -> None:
    """Writes a decoder as a Hugging Face folder, float tensors in bfloat16. Layers that predict further tokens, which
    the decoder leaves out, are not in the export, and its config says so. Static scales of activations that the source
    has for modules of the same scheme are kept.

    Arguments:
        source: the folder that it was loaded from, whose config and tokenizer are kept.
        destination: a new or empty folder.
        scheme: the format of quantised kernels; None: they are decoded.
    """
    content = json.loads((source / CONFIG).read_text())
    config = {key: value for key, value in content.items() if key not in (*_QUANTIZATION, "torch_dtype")}
    config |= {key: 0 for key in _DRAFTS if key in config}
    state = nnx.state(decoder, _WEIGHTS)
    state = state if scheme is not None else decoded(state)
    mapping = mapping_of(decoder.config)
    config |= {"dtype": "bfloat16"}
    scales = None if scheme is None else checkpoints.activation_scales(source, scheme)
    options: dict[str, Any] = {"scheme": scheme, "dtype": jnp.bfloat16, "activation_scales": scales}
    checkpoints.save(destination, state, mapping, config, **options)
    copy_tokenizer(source, destination)


def export_adapters(source: pathlib.Path, destination: pathlib.Path, decoder: Decoder, rank: int, alpha: float) -> None:
    """Writes the adapters of a decoder in the form of the package peft, float32.

    Adapters of layers that the file joins to one matrix become one of the sum of their ranks, which is the same update.
    """
    pairs = mapping_of(decoder.config).adapters(decoder)
    checkpoints.save_adapters(destination, pairs, rank=rank, alpha=alpha, base=source)


def decoded(state: Any) -> Any:
    """The state with arrays in place of QuantizedArrays, in the dtypes that they were quantised from."""

    def decode(leaf: Any) -> Any:
        return leaf.dequantize() if isinstance(leaf, jlp.QuantizedArray) else leaf

    return jax.tree.map(decode, state, is_leaf=lambda leaf: isinstance(leaf, jlp.QuantizedArray))
