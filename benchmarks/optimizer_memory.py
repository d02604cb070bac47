"""The bytes that training keeps for Llama 3 8B between steps, and its gradients, by how the optimizer keeps its states.

    PYTHONPATH=. python benchmarks/optimizer_memory.py --save

The trees of parameters and states are described, not made, so nothing depends on the machine.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from lora_memory import LAYERS, WIDTH, parameters, size
from timing import save

import jaxlowprec as jlp


def matrices(params: Any) -> Any:
    """Muon's matrices: the last two axes of the kernels, which are stacked, and of the embeddings; not norms."""
    two = optax.contrib.MuonDimensionNumbers(-2, -1)
    is_norm = lambda path: "norm" in path[-1].key  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, _: None if is_norm(path) else two, params)


ADAMW, MUON = optax.adamw(1e-4), optax.contrib.muon(1e-4, muon_weight_dimension_numbers=matrices)


def with_masters(inner: Any, bits: int) -> Any:
    """Both wrappers."""
    return jlp.optim.master_weights(jlp.optim.quantized_state(inner), bits=bits)


CHOICES: dict[str, tuple[str, Any]] = {  # the dtype of parameters and gradients, and the transformation
    "float32": ("float32", ADAMW),
    "`quantized_state`": ("float32", jlp.optim.quantized_state(ADAMW)),
    "bfloat16, masters of 32 bits": ("bfloat16", jlp.optim.master_weights(ADAMW, bits=32)),
    **{f"both wrappers, {bits} bits": ("bfloat16", with_masters(ADAMW, bits)) for bits in (32, 24, 16)},
    "both wrappers, 24 bits, Muon": ("bfloat16", with_masters(MUON, 24)),
}


def kept(dtype: str, tx: Any) -> dict[str, int]:
    """Bytes of parameters and gradients, of what masters keep beside parameters, and of the rest of the state."""
    params = parameters(dtype)
    leaves = jlp.optim.explain_state(tx, params).leaves
    masters = sum(leaf.nbytes for leaf in leaves if leaf.path.startswith("remainders/"))
    states = sum(leaf.nbytes for leaf in leaves) - masters
    return {"parameters": size(params), "gradients": size(params), "masters": masters, "states": states}


def with_float32_masters() -> dict[str, int]:
    """bfloat16 parameters and gradients beside float32 weights, without this library."""
    params, full = parameters("bfloat16"), parameters("float32")
    states = size(jax.eval_shape(ADAMW.init, full))
    return {"parameters": size(params), "gradients": size(params), "masters": size(full), "states": states}


def counted() -> dict[str, dict[str, int]]:
    """All rows, those without this library first."""
    rows = {name: kept(*choice) for name, choice in CHOICES.items()}
    return {"float32": rows.pop("float32"), "bfloat16 and float32 masters": with_float32_masters(), **rows}


def main() -> None:
    """Counts and prints; writes benchmarks/results with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    results = counted()
    params = parameters(jnp.bfloat16)
    model = {
        "elements": size(params) // 2,
        "kernels": sum(math.prod(p.shape) for name, p in params["layers"].items() if not name.startswith("norm")),
        "layers": LAYERS,
        "width": WIDTH,
    }
    for name, parts in results.items():
        each = (f"{part}: {count / model['elements']:5.2f} B " for part, count in parts.items())
        print(f"{name:32}", *each, f"{sum(parts.values()) / 2**30:6.1f} GiB")
    if options.save:
        print(save("optimizer_memory", {"model": model, "results": results}))


if __name__ == "__main__":
    main()
