"""Prints, as JSON, by which share log-probabilities in bfloat16 of a generator have the bits of the full pass.

    XLA_FLAGS=--xla_allow_excess_precision=false python -m tests.models.decoder.equal_bits

There are 384 of them for each kind of weights and cache, whose full pass reads keys and values as the cache keeps them.
"""

import json

import jax.numpy as jnp
import numpy as np

import jaxlowprec as jlp
from jaxlowprec.models.decoder.generate import Generator
from tests.models.decoder import tiny
from tests.models.decoder.test_generate import scored

SEQUENCES, PROMPT, COUNT = 16, 8, 24
RECIPE = jlp.Int4QAT(group_size=32)
CACHES = ("bfloat16", "float8_e4m3fn", "int8")


def measured(decoder, served, recipe, cache):
    """Of `served` with this cache, and the full pass of `decoder` under the recipe: the share of equal bits, and k3."""
    prompts = np.random.default_rng(0).integers(0, decoder.config.vocabulary, (SEQUENCES, PROMPT)).tolist()
    written = Generator(served, PROMPT + COUNT, cache)(prompts, COUNT, temperature=1.0)
    text, engine = np.concatenate([prompts, written.tokens], axis=1), np.stack(written.log_probabilities)
    with jlp.autocast(recipe, kv_cache=cache):
        trainer = np.asarray(scored(decoder, text)[0])[:, PROMPT - 1 :]
    found = jlp.rl.mismatch(jnp.asarray(trainer), jnp.asarray(engine), jnp.ones(engine.shape, bool))
    return {"equal": float((trainer == engine).mean()), "k3": float(found.k3)}


def main():
    decoder = tiny.decoder("llama3", dtype=jnp.bfloat16, num_hidden_layers=4)
    kinds = {"bfloat16": (decoder, None), "int4": (jlp.quantize_params(decoder, RECIPE), RECIPE)}
    print(json.dumps({f"{w} {c}": measured(decoder, *kinds[w], c) for w in kinds for c in CACHES}))


if __name__ == "__main__":
    main()
