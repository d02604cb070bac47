"""Time to trace, to compile and to run the gradient of a tunix model's loss, under a recipe and without.

    python benchmarks/tunix_step.py [--layers 8] [--rounds 3] [--recipe nvfp4]

Needs google-tunix (docs/how-to/tunix.md). Seconds are the processor's for this process, so that others do not count;
both sides run in turn, with cleared caches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer, utils

import jaxlowprec as jlp

RECIPES = {"nvfp4": jlp.NVFP4BlockScaling(), "mxfp8": jlp.MXFP8BlockScaling(), "int4_qat": jlp.Int4QAT(32)}
WIDTH, TOKENS, BATCH = 256, 128, 4


def measured(layers: int, recipe: Any) -> dict[str, float]:
    """Seconds of the processor to trace, to compile and to run the gradient of the trainer's loss."""
    sizes = {"vocab_size": 512, "embed_dim": WIDTH, "hidden_dim": 3 * WIDTH, "rope_theta": 1_000_000, "norm_eps": 1e-6}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    config = qwen3.ModelConfig(num_layers=layers, **sizes, **heads, use_tied_embedding=True, dtype=jnp.bfloat16)
    graph, params = nnx.split(qwen3.Qwen3(config, rngs=nnx.Rngs(0)))
    mask = jnp.ones((BATCH, TOKENS), bool)
    batch = {
        "input_tokens": jnp.ones((BATCH, TOKENS), jnp.int32),
        "input_mask": mask,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }
    own = peft_trainer._default_loss_fn  # what PeftTrainer(...).loss_fn is
    rules = recipe and jlp.PerLayer.keep_ends(recipe, layers, 0, 0, block="layers/{}")
    loss = own if recipe is None else jlp.quantize_matmuls(own, rules)

    def gradient(params: Any, batch: Any) -> Any:
        return nnx.to_pure_dict(nnx.grad(lambda model: loss(model, **batch))(nnx.merge(graph, params)))

    jax.clear_caches()
    begun = time.process_time()
    traced = jax.jit(gradient).trace(params, batch)
    ended = time.process_time()
    step = traced.lower().compile()
    compiled = time.process_time()
    jax.block_until_ready(step(params, batch))
    warm = time.process_time()
    jax.block_until_ready([step(params, batch) for _ in range(3)])
    return {"trace": ended - begun, "compile": compiled - ended, "step": (time.process_time() - warm) / 3}


def main() -> None:
    """Measures both sides in turn and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recipe", choices=RECIPES, default="nvfp4")
    options = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    sides = {"plain": None, options.recipe: RECIPES[options.recipe]}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for recipe in sides.values():
        measured(1, recipe)  # loads modules
    for _ in range(options.rounds):
        for name, recipe in sides.items():
            found[name].append(measured(options.layers, recipe))
    medians = {name: {k: statistics.median(run[k] for run in runs) for k in runs[0]} for name, runs in found.items()}
    for name, times in medians.items():
        print(name, *(f"{k} {v:.2f} s ({v / medians['plain'][k]:.2f}x)" for k, v in times.items()), sep="  ")


if __name__ == "__main__":
    main()
