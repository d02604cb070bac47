"""Hugging Face folders as decoders, and back."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxlowprec import checkpoints
from jaxlowprec.checkpoints import CheckpointError, TreeMapping, mapping_for
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.models.decoder.config import FAMILIES, DecoderConfig
from jaxlowprec.models.decoder.model import Decoder

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
    with CheckpointFolder(folder) as source:
        require_counts(source, config)
    decoder = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
    nnx.update(decoder, checkpoints.load(folder, decoder, mapping_of(config)))
    return decoder


def copy_tokenizer(source: pathlib.Path, destination: pathlib.Path) -> None:
    """Copies the files of a tokenizer, and of generation, as far as the source has them."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)
