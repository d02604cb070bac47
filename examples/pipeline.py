"""Pipeline parallelism with shard_map: each device holds one stage, and microbatches go through them (GPipe).

    python examples/pipeline.py --stages 4 --microbatches 8

In each step, every device works on the microbatch that its predecessor sent, and sends its result on with lax.ppermute.
In the first and last `stages - 1` steps some devices wait. Autodiff runs the same steps backwards. Each microbatch is
quantised by itself, so the losses are the same as if one device ran the stages one after the other.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp


def initial_parameters(stages: int, width: int, seed: int = 0) -> dict[str, jax.Array]:
    """The stages' kernels, stacked: up [stages, width, 4 * width] and down [stages, 4 * width, width]."""
    up, down = jax.random.split(jax.random.key(seed))
    return {
        "up": jax.random.normal(up, (stages, width, 4 * width)) / width**0.5,
        "down": jax.random.normal(down, (stages, 4 * width, width)) / (4 * width) ** 0.5,
    }


def pipeline_mesh(stages: int) -> Mesh:
    """A mesh with one device per stage along "pipe"."""
    return jax.make_mesh((stages,), ("pipe",), axis_types=(AxisType.Auto,), devices=jax.devices()[:stages])


def stage(parameters: dict[str, jax.Array], x: jax.Array, recipe: jlp.Recipe | None) -> jax.Array:
    """A residual MLP, [rows, width] to [rows, width]."""
    hidden = jax.nn.gelu(jlp.linear(x, parameters["up"], recipe=recipe))
    return x + jlp.linear(hidden, parameters["down"], recipe=recipe)


def loss_of(y: jax.Array, target: jax.Array) -> jax.Array:
    """The mean squared difference."""
    return jnp.mean((y - target) ** 2)


def sequential_loss(parameters: Any, x: jax.Array, target: jax.Array, recipe: jlp.Recipe | None) -> jax.Array:
    """The loss of microbatches [count, rows, width], each through all stages, on one device."""

    def through(x):
        for i in range(parameters["up"].shape[0]):
            x = stage({name: p[i] for name, p in parameters.items()}, x, recipe)
        return x

    return loss_of(jnp.stack([through(microbatch) for microbatch in x]), target)


def pipelined_loss(
    parameters: Any, x: jax.Array, target: jax.Array, recipe: jlp.Recipe | None, mesh: Mesh
) -> jax.Array:
    """The loss of the same microbatches, with stage i on device i of the mesh's axis "pipe".

    Raises:
        ValueError: the number of stages is not that of devices.
    """
    stages, count = mesh.shape["pipe"], x.shape[0]
    if parameters["up"].shape[0] != stages:
        raise ValueError(f"pipelined_loss: {parameters['up'].shape[0]} stages on {stages} devices; needs one each")

    def local(parameters, x):
        parameters = jax.tree.map(lambda p: p[0], parameters)
        here, last = jax.lax.axis_index("pipe"), stages - 1

        def step(carry, time):
            received, results = carry
            mine = jnp.where(here == 0, x[jnp.minimum(time, count - 1)], received)
            y = stage(parameters, mine, recipe)
            done = time - last  # the microbatch that the last stage has just finished
            kept = results.at[jnp.maximum(done, 0)].set(y)
            results = jnp.where((here == last) & (done >= 0), kept, results)
            return (jax.lax.ppermute(y, "pipe", [(i, (i + 1) % stages) for i in range(stages)]), results), None

        start = jax.lax.pcast((jnp.zeros_like(x[0]), jnp.zeros_like(x)), "pipe", to="varying")
        (_, results), _ = jax.lax.scan(step, start, jnp.arange(count + last))
        return jax.lax.psum(jnp.where(here == last, results, 0), "pipe")

    pipeline = jax.shard_map(local, mesh=mesh, in_specs=(P("pipe"), P()), out_specs=P())
    return loss_of(pipeline(parameters, x), target)


def main() -> None:
    """Prints the losses of a few steps of gradient descent, computed in both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4, help="and devices; a CPU is divided into that many")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if jax.config.jax_num_cpu_devices < 0:
        jax.config.update("jax_num_cpu_devices", options.stages)
    if len(jax.devices()) < options.stages:
        parser.error(f"--stages {options.stages}: there are {len(jax.devices())} devices of {jax.default_backend()}")
    mesh = pipeline_mesh(options.stages)
    recipe, width = jlp.MXFP8BlockScaling(), 64
    x = jax.random.normal(jax.random.key(1), (options.microbatches, 32, width))
    target = jnp.roll(x, 1, axis=-1)
    ways = {
        "one after the other": lambda p: sequential_loss(p, x, target, recipe),
        "pipelined": lambda p: pipelined_loss(p, x, target, recipe, mesh),
    }
    for name, function in ways.items():
        parameters, losses = initial_parameters(options.stages, width), []
        for _ in range(options.steps):
            value, gradients = jax.jit(jax.value_and_grad(function))(parameters)
            parameters = jax.tree.map(lambda p, g: p - 0.05 * g, parameters, gradients)
            losses.append(f"{value:.6f}")
        print(f"{name:>20}: {' '.join(losses)}")


if __name__ == "__main__":
    main()
