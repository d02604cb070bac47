"""Hugging Face folders as decoders, and back."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxlowprec import checkpoints
from jaxlowprec.checkpoints import TreeMapping, mapping_for
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
    decoder = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
    nnx.update(decoder, checkpoints.load(folder, decoder, mapping_of(config)))
    return decoder


def copy_tokenizer(source: pathlib.Path, destination: pathlib.Path) -> None:
    """Copies the files of a tokenizer, and of generation, as far as the source has them."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)
