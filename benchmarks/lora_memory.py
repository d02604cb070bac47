"""The bytes that fine-tuning keeps for Llama 3 8B: in full, with adapters, and with adapters beside quantised kernels.

    PYTHONPATH=. python benchmarks/lora_memory.py --save

The trees of parameters, gradients and optimizer are described, not made, so nothing depends on the machine.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from timing import save

import jaxlowprec as jlp

LAYERS, WIDTH, HIDDEN, KEYS, VOCABULARY = 32, 4096, 14336, 1024, 128256
RANK = 16
FORMATS = {"NVFP4": jlp.NVFP4(), "MXFP4": jlp.MXFP4(), "Int4, groups of 128": jlp.Int4(128), "MXFP8": jlp.MXFP8()}
optimizer = optax.adamw(1e-4)


def parameters(dtype: Any, fmt: Any = None) -> dict[str, Any]:
    """Llama's parameters, those of a block stacked; kernels quantised along K if there is a format."""

    def made() -> dict[str, Any]:
        sizes = {"q": (WIDTH, WIDTH), "k": (WIDTH, KEYS), "v": (WIDTH, KEYS), "o": (WIDTH, WIDTH)}
        sizes |= {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
        kernels: dict[str, Any] = {name: jnp.zeros((LAYERS, *size), dtype) for name, size in sizes.items()}
        if fmt is not None:
            kernels = {name: jlp.quantize(kernel, fmt, axis=-2) for name, kernel in kernels.items()}
        norms = {f"norm{i}": jnp.zeros((LAYERS, WIDTH), dtype) for i in (1, 2)}
        ends = {name: jnp.zeros((VOCABULARY, WIDTH), dtype) for name in ("embedding", "head")}
        return {"layers": kernels | norms, **ends, "norm": jnp.zeros(WIDTH, dtype)}

    return jax.eval_shape(made)


def size(tree: Any) -> int:
    """Bytes of a tree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def kept(frozen: Any, trained: Any) -> dict[str, int]:
    """Bytes during a step: what is frozen, what is trained, its gradients, and the optimizer's state."""
    state = jax.eval_shape(optimizer.init, trained)
    parts = {"frozen": frozen, "trained": trained, "gradients": trained, "optimizer": state}
    return {name: size(tree) for name, tree in parts.items()}


def with_adapters(base: Any) -> dict[str, int]:
    """The same of adapters beside frozen parameters."""
    return kept(base, jax.eval_shape(lambda: jlp.lora.init(jax.random.key(0), base, rank=RANK)))


def main() -> None:
    """Counts and prints; writes benchmarks/results with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    results = {f"all parameters, {dtype}": kept({}, parameters(dtype)) for dtype in ("float32", "bfloat16")}
    results["LoRA, bfloat16 kernels"] = with_adapters(parameters("bfloat16"))
    for name, fmt in FORMATS.items():
        results[f"QLoRA, {name}"] = with_adapters(parameters("bfloat16", fmt))
    for name, parts in results.items():
        print(f"{name:28}", *(f"{part}: {count / 2**30:7.2f} GiB " for part, count in parts.items()))
    if options.save:
        print(save("lora_memory", {"rank": RANK, "results": results}))


if __name__ == "__main__":
    main()
