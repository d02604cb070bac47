"""What sharding itself costs: the same work on eight virtual devices and on one, with the same threads.

    python benchmarks/mesh_overhead.py

XLA's virtual CPU devices share one pool of threads, so nothing is won by splitting the work; what is lost is the cost
of splitting it: smaller pieces, dispatch to eight devices, and collectives, which are copies here.
"""

from __future__ import annotations

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from timing import Cases, keep_memory, save

import jaxlowprec as jlp

TOKENS, K, N = 8192, 2048, 2048
RECIPE = jlp.NVFP4BlockScaling()
LEAST = 0.9  # speed against one device: an overhead of 10 %


def step(x, w, dy):
    """The result of a linear and both gradients."""
    y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=RECIPE), x, w)
    return y, *pullback(dy)


def plain_step(x, w, dy):
    """The same in bfloat16, by XLA."""
    y, pullback = jax.vjp(lambda x, w: x @ w.astype(x.dtype), x, w)
    return y, *pullback(dy)


def main() -> None:
    """Measures and prints; writes benchmarks/results with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    keep_memory()
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = (jax.random.normal(k, (TOKENS, n), jnp.bfloat16) for k, n in ((keys[0], K), (keys[1], N)))
    w = jax.random.normal(keys[2], (K, N))
    rows, both = P(("a", "b")), P("a", "b")
    cases = Cases()

    def compare(name, function, operands, specs, least=LEAST):
        jitted = jax.jit(function)
        with jax.set_mesh(mesh):
            placed = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip(operands, specs, strict=True)]
            on_mesh = jitted.lower(*placed).compile()
        on_one = jitted.lower(*operands).compile()
        cases.add(name, "one device", least, lambda: on_mesh(*placed), lambda: on_one(*operands), 25)

    a, b = jlp.quantize(x, jlp.NVFP4()), jlp.quantize(w, jlp.NVFP4((16, 16)), axis=-2)

    def multiply(data, scale):
        return jlp.scaled_matmul(dataclasses.replace(a, data=data, scale=scale), b.mT)

    compare("quantize rowwise, by rows", lambda x: jlp.quantize(x, jlp.NVFP4()), [x], [rows])
    compare(
        "quantize_both, RHT columnwise, by both",
        lambda x: jlp.quantize_both(x, jlp.NVFP4(), hadamard_columnwise=True),
        [x],
        [both],
    )
    compare("scaled_matmul, by rows", multiply, [a.data, a.scale], [rows, rows])
    compare("linear, forward and backward, data parallel", step, [x, w, dy], [rows, P(), rows])
    compare("linear, forward and backward, FSDP", step, [x, w, dy], [rows, P(("a", "b")), rows])
    # Along the tensor axis each device quantises the same x: four times the work, so nothing is promised.
    tensor = "linear, forward and backward, data 2 by tensor 4"
    compare(tensor, step, [x, w, dy], [P("a"), P(None, "b"), both], None)
    compare(f"{tensor}, sequence parallel", step, [x, w, dy], [rows, P(None, "b"), both], None)
    # What JAX and XLA alone lose: dispatch and collectives.
    compare("XLA's 2 * x, by rows", lambda x: 2 * x, [x], [rows], None)
    compare("XLA's max(x), by rows", lambda x: jnp.max(x), [x], [rows], None)
    compare("XLA's bfloat16 linear, data 2 by tensor 4", plain_step, [x, w, dy], [P("a"), P(None, "b"), both], None)
    if options.save:
        print(save("mesh_overhead", {"tokens": TOKENS, "kernel": [K, N], "devices": 8, "cases": cases.found}))


if __name__ == "__main__":
    main()
