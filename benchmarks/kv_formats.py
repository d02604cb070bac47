"""What each format of a cache of keys and values costs: how far log-probabilities are from those of a float32 cache.

    python benchmarks/kv_formats.py [--steps 300] [--seeds 3] [--save]

A small Llama with heads of 32 learns the pages of docs/ in float32. Its full pass then reads keys and values as a cache
in the format would keep them. k3 estimates the divergence from the plain pass, over bytes that it has not learned.
"Rotated": keys are turned by a Hadamard matrix before they are quantised, as queries could be, which leaves scores as
they are; values are not.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from calibration import CONTEXT, MODEL, corpus, trained
from timing import save

import jaxlowprec as jlp
from jaxlowprec.decoder import Decoder

HELD_OUT = 64  # rows
NVFP4, OVER = jlp.NVFP4(row_scaled=True), jlp.NVFP4(scale_rule="four_over_six", row_scaled=True)
SIDES: dict[str, tuple[Any, bool]] = {
    "FP8, per token and head": (jlp.Float8Rows(rule="cache"), False),
    "FP8, per token and head, rotated": (jlp.Float8Rows(rule="cache"), True),
    "FP8, a static scale for a layer": ("layer", False),
    "FP8, a static scale for a head": ("head", False),
    "FP8, 1.0 for a static scale": ("one", False),
    "INT8, per token and head": (jlp.Int8Rows(rule="cache"), False),
    "MXFP8 1x32": (jlp.MXFP8(), False),
    "NVFP4 1x16, an amax per token and head": (NVFP4, False),
    "NVFP4 1x16, rotated": (NVFP4, True),
    "NVFP4 1x16, 4 over 6": (OVER, False),
    "NVFP4 1x16, 4 over 6, rotated": (OVER, True),
    "MXFP4 1x32": (jlp.MXFP4(scale_rule="even"), False),
}
FIRST = next(iter(SIDES))


@dataclasses.dataclass(frozen=True)
class Studied(jlp.KVCache):
    """A cache in any format, whose keys may be rotated first: only for full passes."""

    rotated: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", self.key)

    def as_kept(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `KVCache`."""
        k, v = k.astype(jnp.float32), v.astype(jnp.float32)
        if self.rotated:
            turned = self._through(jlp.hadamard_transform(k, size=k.shape[-1], signs=None))
            return jlp.hadamard_transform(turned, size=k.shape[-1], signs=None, inverse=True), self._through(v)
        return self._through(k), self._through(v)

    def _through(self, rows: jax.Array) -> jax.Array:
        return jlp.quantize(rows, self.key).dequantize(jnp.float32)


def log_probabilities(decoder: Decoder, tokens: jax.Array) -> jax.Array:
    """[sequences, time - 1] of the tokens that follow."""
    hidden = decoder.hidden(tokens[:, :-1])[0]
    logits = jax.nn.log_softmax(decoder.logits(hidden).astype(jnp.float32))
    return jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]


def cache_of(fmt: Any, rotated: bool, decoder: Decoder, learned: np.ndarray) -> jlp.KVCache:
    """The cache of a side; static scales are put into the decoder."""
    if not isinstance(fmt, str):
        return Studied(fmt, rotated=rotated)
    jlp.kv.calibrate(decoder, learned, per_head=fmt == "head")
    for layer in decoder.layers if fmt == "one" else ():
        layer.self_attn.k_scale[...] = layer.self_attn.v_scale[...] = jnp.ones(1)
    return jlp.KVCache(jlp.Float8Tensor())


def measured(decoder: Decoder, tokens: jax.Array, learned: np.ndarray) -> dict[str, dict[str, float]]:
    """Of each format: k3, and the largest difference of a log-probability. Static scales are those of `learned`."""
    plain = jax.jit(lambda tokens: log_probabilities(decoder, tokens))(tokens)
    found = {}
    for name, (fmt, rotated) in SIDES.items():
        with jlp.autocast(kv_cache=cache_of(fmt, rotated, decoder, learned)):
            kept = jax.jit(lambda tokens: log_probabilities(decoder, tokens))(tokens)
        mismatch = jlp.rl.mismatch(kept, plain, jnp.ones(plain.shape, bool))
        found[name] = {"k3": float(mismatch.k3), "largest": float(jnp.abs(kept - plain).max())}
    return found


def main() -> None:
    """Trains a model for each seed, and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    text, runs, size = corpus(), [], HELD_OUT * CONTEXT
    pages = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    learned, tokens = (part.reshape(HELD_OUT, CONTEXT) for part in (pages[:size], pages[-size:]))
    for seed in range(options.seeds):
        runs.append(measured(trained(text, options.steps, seed), jnp.asarray(tokens), learned))
    medians = {name: {m: statistics.median(run[name][m] for run in runs) for m in runs[0][name]} for name in SIDES}
    for name, found in medians.items():
        ratio = found["k3"] / medians[FIRST]["k3"]
        print(f"{name:40} k3 {found['k3']:.1e}, {ratio:5.2f}x, largest difference {found['largest']:.2g}")
    if options.save:
        settings = {"steps": options.steps, "seeds": options.seeds, "context": CONTEXT, "held_out_rows": HELD_OUT}
        save("kv_formats", {"model": MODEL, "settings": settings, "medians": medians, "runs": runs})


if __name__ == "__main__":
    main()
