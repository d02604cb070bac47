"""What lies between the start and the end of FSDP's collectives in the order in which described H100s would work.
Skipped as test_described_gpu.py is."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.cuda_without_gpu.described_gpu import described

LAYERS, WIDTH, TOKENS = 4, 4096, 16384
# As docs/explanation/scaling.md says. XLA joins reduce-scatters by default, which then wait for the last gradient.
SEPARATE = {"xla_gpu_reduce_scatter_combine_threshold_bytes": 0}
PIPELINED = {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in ("all_gather", "reduce_scatter")}
SUMS = {"bfloat16": "reduce-scatter", "quantized": "all-to-all"}
RECIPES = {"NVFP4": jlp.NVFP4BlockScaling, "MXFP8": jlp.MXFP8BlockScaling}

_START = re.compile(r"\s*(?:ROOT )?%(\S+) = .* ([a-z-]+)-start\(")
_DONE = re.compile(r" [a-z-]+-done\((?:\([^)]*\) )?%([\w.-]+)")
_OURS = re.compile(r'custom_call_target="jaxlowprec_(\w+)"')


def between(program):
    """(kind, our kernels between its start and its end) of each collective that other work can hide."""
    running, found = {}, []
    for line in program.splitlines():
        if start := _START.match(line):
            running[start[1]] = start[2], set()
        elif (done := _DONE.search(line)) and done[1] in running:
            found.append(running.pop(done[1]))
        elif ours := _OURS.search(line):
            for _, kernels in running.values():
                kernels.add(ours[1])
    assert not running
    return found


def scheduled(recipe, scan, options, devices):
    """A training step of linears, whose kernels and gradients are split over the devices, as XLA orders it."""
    mesh = Mesh(np.array(devices), ("a",), axis_types=(AxisType.Auto,))

    def layer(h, kernel):
        return jnp.tanh(jlp.linear(h, kernel)), None

    def loss(kernels, x):
        if scan:
            x = jax.lax.scan(layer, x, kernels)[0]
        else:
            for kernel in kernels:
                x, _ = layer(x, kernel)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(kernels, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, kernels, jax.grad(loss)(kernels, x))

    def shape(dims, dtype, *spec):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(*spec)))

    kernels = [shape((WIDTH, WIDTH), jnp.float32, "a")] * LAYERS
    if scan:
        kernels = shape((LAYERS, WIDTH, WIDTH), jnp.float32, None, "a")
    x = shape((TOKENS, WIDTH), jnp.bfloat16, "a")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jlp.autocast(recipe):
        traced = jax.jit(step, out_shardings=jax.tree.map(lambda s: s.sharding, kernels)).trace(kernels, x)
        return traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=options).as_text()


each_recipe = pytest.mark.parametrize("name", RECIPES)


@pytest.mark.parametrize("sums", SUMS)
@each_recipe
def test_layers_one_after_the_other(name, sums):
    with described("H100", 8) as devices:
        program = scheduled(RECIPES[name](sums=sums), False, SEPARATE, devices)
    found = between(program)
    assert " all-gather(" not in program  # each has a start and an end
    gathers = [kernels for kind, kernels in found if kind == "all-gather"]
    assert gathers and all(gathers)  # something of ours goes on beside each
    of_gradients = [kernels for kind, kernels in found if kind == SUMS[sums]]
    assert sum("scaled_matmul" in kernels for kernels in of_gradients) >= LAYERS - 2


@each_recipe
def test_layers_in_a_scan(name):
    with described("H100", 8) as devices:
        found = between(scheduled(RECIPES[name](sums="bfloat16"), True, PIPELINED, devices))
    for collective in ("all-gather", "reduce-scatter"):
        assert any(kind == collective and "scaled_matmul" in kernels for kind, kernels in found)
