"""What grouped_mlp keeps for its backward pass, to the byte, and what it computes again there."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, often
from tests.layers.fused.layers import (
    KEEP_BARRIERS,
    SAVED,
    gradients_of_layers,
    loss_of_layers,
    nbytes,
    traced_calls,
    weights,
)
from tests.layers.grouped.experts import SIZES, E, F, K, N, mlp_operands, separate_mlp
from tests.products import calls_of, kept

NVFP4, MXFP8, FP8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling(), jlp.Float8CurrentScaling()
MULTIPLY, WGRAD = "jaxlowprec_grouped_matmul", "jaxlowprec_grouped_wgrad"
OF_ROWS, OF_WEIGHTS, ACTIVATE = "jaxlowprec_grouped_quantize", "jaxlowprec_quantize", "jaxlowprec_activation"
T = 128
UNEVEN = jnp.asarray([40, 0, 1, 64, 20], jnp.int32)


def operands(gated=True):
    x, kernels, _, dy = mlp_operands(gated=gated)
    return x[:T], kernels, dy[:T]


def ways(recipe, sizes=UNEVEN):
    """Separate products, and an MLP for each way to save."""

    def way(function, **options):
        return lambda x, kernels: function(x, kernels, sizes, recipe=recipe, **options)

    return {"separate": way(separate_mlp)} | {saved: way(jlp.grouped_mlp, saved=saved) for saved in SAVED}


def blocks(lines, columns, tiles=False):
    """Bytes of NVFP4's codes and scales."""
    return lines * columns // 2 + lines * columns // (256 if tiles else 16)


def test_bytes_kept_under_nvfp4():
    """Columnwise, rows lie in T / 16 + E slots of 16. Sizes and amaxes, a number for each group, are left out."""
    x, kernels, _ = operands()
    slots = T + 16 * E
    weights = E * (2 * blocks(K, F, tiles=True) + blocks(F, N, tiles=True))
    always = blocks(K, slots) + weights
    found = {
        name: nbytes(leaf for leaf in kept(f, x, kernels) if leaf.shape != (E,)) for name, f in ways(NVFP4).items()
    }
    assert found == {
        "separate": always + blocks(K, slots) + 2 * 2 * T * F + blocks(F, slots),
        "quantized": always + 2 * 2 * T * F,
        "8bit": always + 2 * (T * F + T * F // 32),
        "recompute": always + blocks(T, K) + E * 2 * blocks(F, K, tiles=True),
    }


@pytest.mark.parametrize("recipe", [jlp.Int4QAT(group_size=16), None], ids=["int4_qat", "none"])
def test_where_rows_are_not_quantised(recipe):
    """Of the hidden layer: gate, up and the activation, of two bytes; gate and up in 8 bits; or nothing."""
    x, kernels, _ = operands()
    found = {
        name: sorted(leaf.dtype.name for leaf in kept(f, x, kernels) if leaf.shape == (T, F))
        for name, f in ways(recipe).items()
    }
    assert found["quantized"] == ["bfloat16"] * 2
    assert found["8bit"] == ["bfloat16", "uint8", "uint8"]
    assert found["recompute"] == []


def gradient_of(function):
    def run(x, kernels, dy):
        y, pullback = jax.vjp(function, x, kernels)
        return y, pullback(dy)

    return run


def compiled_calls(function):
    """Kernels that a gradient's compiled program calls where XLA's CPU compiler keeps barriers."""
    program = jax.jit(gradient_of(function)).lower(*operands()).compile(compiler_options=KEEP_BARRIERS)
    calls = calls_of(program)
    return tuple(calls[name] for name in (MULTIPLY, WGRAD, OF_ROWS, OF_WEIGHTS, ACTIVATE))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", [NVFP4, MXFP8], ids=["nvfp4", "mxfp8"])
@pytest.mark.parametrize(
    ("way", "wanted"),
    [  # products of rows, wgrads, quantisations of rows and of weights and copies, activations
        ("separate", (6, 3, 5, 3, 1)),
        ("quantized", (6, 3, 6, 3, 2)),
        ("8bit", (6, 3, 6, 5, 2)),
        ("recompute", (8, 3, 6, 3, 2)),
    ],
)
def test_what_runs_again(recipe, way, wanted):
    """x is quantised once for gate and up; so are the activation, twice, and three gradients."""
    assert compiled_calls(ways(recipe)[way]) == wanted


def test_without_a_gradient_nothing_more_is_called():
    x, kernels, _ = operands()
    calls = traced_calls(ways(NVFP4)["quantized"], x, kernels)
    assert (calls[MULTIPLY], calls[OF_ROWS], calls[OF_WEIGHTS]) == (3, 2, 3)


def stacked(layers):
    x, kernels, _ = operands()
    kernels[-1] = weights((E, F, K), 9)
    kernels = jax.device_get(kernels)
    return x, [np.stack([w * np.float32(1 + i / 8) for i in range(layers)]) for w in kernels]


@functools.cache
def gradients(saved, policy=None):
    return gradients_of_layers(ways(FP8)[saved], policy, *stacked(2))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("policy", ["nothing_saveable", "save_quantized", "save_products", "offload"])
@pytest.mark.parametrize("saved", SAVED)
def test_checkpointed_ones_have_the_same_bits(policy, saved):
    """`quantized` and `recompute` have the same bits, too."""
    without = "quantized" if saved == "recompute" else saved
    assert_same_bytes(gradients(saved, policy), gradients(without))


def test_sizes_are_no_reason_to_compile_again():
    x, kernels, dy = operands()
    step = jax.jit(lambda sizes: gradient_of(ways(MXFP8, sizes)["quantized"])(x, kernels, dy))
    for sizes in (UNEVEN, *SIZES.values()):
        step(np.asarray(sizes, np.int32))
    assert step._cache_size() == 1


@pytest.mark.slow
def test_a_training_step_holds_less_and_less():
    """By what a layer keeps, eight times, as XLA counts it."""
    x, kernels = stacked(8)
    temporary, keeps = {}, {}
    for name, function in ways(NVFP4).items():
        compiled = jax.jit(jax.grad(loss_of_layers(function))).lower(kernels, x).compile()
        temporary[name] = compiled.memory_analysis().temp_size_in_bytes
        keeps[name] = nbytes(kept(function, x, [w[0] for w in kernels]))
    for more, less in (("separate", "quantized"), ("quantized", "8bit")):
        assert temporary[more] - temporary[less] > 0.8 * 8 * (keeps[more] - keeps[less]) > 0, (temporary, keeps)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", often([MXFP8], [NVFP4, MXFP8, FP8]), ids=["nvfp4", "mxfp8", "fp8"])
@pytest.mark.parametrize("saved", SAVED)
def test_a_scan_stacks_bytes_instead_of_8_bit_floats(recipe, saved):
    """XLA's CPU compiler would convert the whole stack in each step."""
    x, kernels = stacked(3)
    program = jax.jit(jax.grad(loss_of_layers(ways(recipe)[saved]))).lower(kernels, x).compile().as_text()
    written = re.findall(r"= (\w+)\[3,[\d,]+\]\S* dynamic-update-slice", program)
    assert "u8" in written and not {"f8e4m3fn", "f8e5m2", "f8e8m0fnu", "f16"} & set(written)


def test_shapes_and_dtypes_need_no_data():
    x = jax.ShapeDtypeStruct((1 << 20, 4096), jnp.bfloat16)
    kernels = [jax.ShapeDtypeStruct((E, *s), jnp.float32) for s in ((4096, 16384), (4096, 16384), (16384, 4096))]
    for saved in SAVED:
        run = functools.partial(gradient_of(ways(NVFP4)[saved]))
        y, (dx, dw) = jax.eval_shape(run, x, kernels, x)
        assert (y.shape, y.dtype) == (dx.shape, dx.dtype) == (x.shape, x.dtype)
        assert [(g.shape, g.dtype) for g in dw] == [(w.shape, w.dtype) for w in kernels]
