"""What JAX makes of ops for AMD GPUs: plain operations of XLA, and dots of the operands that docs/how-to/rocm.md names.
ROCm's compiler is not here, and nothing ran on such a GPU."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import format_name
from tests.sharding.meshes import mesh_of

# All lengths differ, or JAX 0.12 makes one function of products of the same shapes.
X = jax.ShapeDtypeStruct((128, 256), jnp.bfloat16)
W = jax.ShapeDtypeStruct((256, 384), jnp.float32)
DY = jax.ShapeDtypeStruct((128, 384), jnp.bfloat16)
BF16, FLOAT32, CODES = ("bf16", "bf16"), ("f32", "f32"), ("f8E4M3FN", "f8E4M3FN")
DOTS = {
    jlp.NVFP4(): BF16,
    jlp.NVFP4((16, 16)): BF16,
    jlp.MXFP4(): BF16,
    jlp.MXFP8(): BF16,
    jlp.Float8Block(): BF16,
    jlp.Float8Block(power_of_two=False): FLOAT32,
    jlp.Float8Tensor(): CODES,
}
WEIGHTS = {fmt: FLOAT32 if dots == FLOAT32 else BF16 for fmt, dots in DOTS.items()} | {
    jlp.Int4(): BF16,
    jlp.Int4(scale_dtype="float16"): FLOAT32,
}
RECIPES = {
    jlp.NVFP4BlockScaling(): [BF16] * 3,
    jlp.MXFP8BlockScaling(): [BF16] * 3,
    jlp.Float8BlockScaling(): [BF16] * 3,
    jlp.Float8CurrentScaling(): [CODES, ("f8E5M2", "f8E4M3FN"), ("f8E4M3FN", "f8E5M2")],
}


class Program(NamedTuple):
    """StableHLO.

    Attributes:
        dots: the dtypes of each dot's operands.
        calls: the targets of custom calls.
        loops: how many there are.
    """

    dots: list[tuple[str, ...]]
    calls: list[str]
    loops: int


def lowered(function, *args):
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("rocm",)).as_text()
    dots = re.findall(r"stablehlo\.dot_general .* : \(tensor<(?:\d+x)*(\w+)>, tensor<(?:\d+x)*(\w+)>\)", text)
    assert len(dots) == text.count("stablehlo.dot_general")
    return Program(dots, re.findall(r"custom_call @([\w$.]+)", text), text.count("stablehlo.while"))


def quantized(fmt):
    return jax.eval_shape(lambda x: jlp.quantize(x, fmt), X)


def step_of(layer):
    """The result and the gradients of a layer of two arguments."""

    def step(dy, *args):
        y, pullback = jax.vjp(layer, *args)
        return y, pullback(dy)

    return step


@pytest.mark.parametrize("fmt", WEIGHTS, ids=format_name)
def test_quantising_is_neither_a_call_nor_a_loop(fmt):
    assert lowered(lambda x: jlp.dequantize(jlp.quantize(x, fmt)), X) == ([], [], 0)


@pytest.mark.parametrize("fmt", DOTS, ids=format_name)
def test_training_quantises_without_a_call_or_a_loop(fmt):
    def both(x, key):
        options = {"rounding": "stochastic", "hadamard_columnwise": fmt.packed and not fmt.tiles}
        return jlp.quantize_both(x, fmt, key=key, **options)

    assert lowered(both, X, jax.ShapeDtypeStruct((2,), jnp.uint32)) == ([], [], 0)


@pytest.mark.parametrize(
    "op", [jlp.hadamard_transform, jlp.gelu, lambda x: jlp.swiglu(x, x), lambda x: jlp.rms_norm(x, x[0])]
)
def test_other_ops_are_neither(op):
    assert lowered(step_of(op), X, X) == ([], [], 0)


@pytest.mark.parametrize("fmt", DOTS, ids=format_name)
def test_a_product_is_one_dot(fmt):
    q = quantized(fmt)
    assert lowered(lambda a, b: jlp.scaled_matmul(a, b), q, q) == ([DOTS[fmt]], [], 0)
    more_exact = [BF16 if DOTS[fmt] == CODES else DOTS[fmt]]
    assert lowered(lambda a, b: jlp.scaled_matmul(a, b, precision="highest"), q, q) == (more_exact, [], 0)


@pytest.mark.parametrize("fmt", WEIGHTS, ids=format_name)
def test_a_product_with_a_quantised_weight_is_one_dot(fmt):
    assert lowered(lambda x, w: jlp.scaled_matmul(x, w), X, quantized(fmt)) == ([WEIGHTS[fmt]], [], 0)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_a_training_step_is_three_dots(recipe):
    step = step_of(lambda x, w: jlp.linear(x, w, recipe=recipe))
    assert lowered(step, DY, X, W) == (RECIPES[recipe], [], 0)


@pytest.mark.parametrize("recipe", [*RECIPES][1:], ids=lambda recipe: type(recipe).__name__)
def test_rows_in_groups_are_multiplied_in_loops(recipe):
    """One for each product, of the same operands."""
    w, sizes = jax.ShapeDtypeStruct((4, *W.shape), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)

    def step(dy, x, w, sizes):
        return step_of(lambda x, w: jlp.grouped_matmul(x, w, sizes, recipe=recipe))(dy, x, w)

    dots, calls, loops = lowered(step, DY, X, w, sizes)
    assert set(dots) == set(RECIPES[recipe]) and calls == [] and loops == 3


def test_on_several_devices():
    """JAX's own call for partitioning, which `shard_map` over all axes does without."""
    mesh = mesh_of((4,), names="x")
    layer = lambda x, w: jlp.linear(x, w, recipe=jlp.MXFP8BlockScaling())  # noqa: E731
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=jax.NamedSharding(mesh, P("x")))
    w = jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=jax.NamedSharding(mesh, P()))
    assert set(lowered(layer, x, w).calls) == {"CustomSPMDPartitioning"}
    manual = jax.shard_map(layer, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    assert lowered(manual, x, w) == ([BF16], [], 0)
