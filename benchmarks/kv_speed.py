"""Generation with caches of keys and values in 8 bits against one in bfloat16: steps of one sequence, in turn.

    python benchmarks/kv_speed.py [--layers 8] [--save]

The model is that of generation.py, with kernels in INT4. The cache has room for all tokens. What it holds is random or
zero, which takes as long.
"""

from __future__ import annotations

import argparse
import time

from generation import FORMATS, SHAPE, TOKENS, alternated, quantized_decoder, steps, timed
from timing import keep_memory, save

from jaxlowprec.decoder import DecoderConfig, Generator

CACHES = ("bfloat16", "float8_e4m3fn", "int8")
TARGETS = {128: 0.95, 4096: 1.1}  # by the number of tokens that the cache has: the speed by that of bfloat16


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    keep_memory()
    config = DecoderConfig.of(SHAPE | {"num_hidden_layers": options.layers, "max_position_embeddings": 8192})
    decoder = quantized_decoder(config, FORMATS["INT4"])
    cases = []
    for length, target in TARGETS.items():
        generators = {cache: Generator(decoder, length + TOKENS, cache) for cache in CACHES}
        sides = {c: timed(steps(g, length), time.perf_counter, TOKENS) for c, g in generators.items()}
        seconds = {name: found["median"] for name, found in alternated(sides, options.rounds).items()}
        for cache in CACHES[1:]:
            ratio = seconds["bfloat16"] / seconds[cache]
            cases.append({"tokens": length, "cache": cache, "ratio": ratio, "target": target, "seconds": seconds})
            print(f"{length} tokens, {cache}: {ratio:.2f}x of bfloat16's speed, target {target}x", flush=True)
    if options.save:
        print(save("kv_speed", {"layers": options.layers, "cases": cases}))


if __name__ == "__main__":
    main()
