"""Tiny Llamas that vLLM's kernels take, and our own log-probabilities of them."""

import jax
import numpy as np
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.arrays.row_formats import LEAST_SCALE_SERVED
from jaxlowprec.checkpoints.decoders import load
from tests.models.decoder import tiny

VOCABULARY, LONGEST = 512, 16384
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, 48).tolist()
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": LONGEST,
}


def folder(path, seed=0):
    """A folder of a Llama in bfloat16."""
    return tiny.folder(path, "llama2", seed=seed, **SIZES)


decoder = load

QUANTISED_INPUTS = {
    "int8_channel": jlp.WeightQAT(jlp.Int8Rows("bfloat16", "compressed-tensors"), activation_format=jlp.Int8Rows()),
    "fp8_channel": jlp.WeightQAT(
        jlp.Float8Rows(scale_dtype="bfloat16"), activation_format=jlp.Float8Rows(least_scale=LEAST_SCALE_SERVED)
    ),
}
"""By name of the scheme: the recipes under which a decoder quantises each token, as vLLM does."""


def log_probabilities(decoder, tokens, scheme=None):
    """Of each token but the first, in float32 [tokens - 1, vocabulary]. `scheme`: of the decoder's weights."""
    recipe = QUANTISED_INPUTS.get(scheme)
    with jlp.autocast(recipe, enabled=recipe is not None):
        logits = nnx.jit(lambda decoder, tokens: decoder(tokens))(decoder, np.array([tokens], np.int32))[0]
    return np.asarray(jax.nn.log_softmax(logits))[:-1]


def of_prompt(path):
    """Those of the tokens of the prompt but the first [len(TOKENS) - 1]."""
    rows = log_probabilities(decoder(path), TOKENS)
    return rows[range(len(rows)), TOKENS[1:]]
