"""Kernels of experts that were quantised once, for several calls: the bits of kernels that each call quantises."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, often
from tests.layers.fused.layers import KEY
from tests.layers.grouped.experts import NAMES, SIZES, TAKEN, E, F, K, N, mlp_operands, step

OFTEN = ("nvfp4", "mxfp8", "int4_qat")
QUANTIZED = {  # recipes that quantise the kernels of experts
    name: recipe
    for name, recipe in TAKEN.items()
    if recipe is not None and all(recipe.roles("grouped_linear", n).quantizes_weight for n in NAMES)
}
by_recipe = pytest.mark.parametrize("name", often(OFTEN, QUANTIZED))
EXPERT = {"module_type": "grouped_linear"}


def quantized(kernels, recipe):
    return [jlp.quantize_kernel(w, recipe, name=n, **EXPERT) for w, n in zip(kernels, NAMES, strict=True)]


@pytest.mark.sampled(5)
@by_recipe
def test_a_training_step(name):
    x, kernels, biases, dy = mlp_operands()
    options = {"recipe": QUANTIZED[name], "key": KEY, "names": NAMES}
    expected = step(jlp.grouped_mlp, x, kernels, biases, dy, **options)
    once = quantized(kernels, QUANTIZED[name])
    found = step(jlp.grouped_mlp, x, kernels, biases, dy, quantized_kernels=once, **options)
    assert_same_bytes(found, expected)


@by_recipe
def test_without_the_kernels(name):
    x, kernels, _, _ = mlp_operands()
    recipe, sizes = QUANTIZED[name], jnp.asarray(SIZES["uneven"], jnp.int32)
    once = jlp.quantize_kernel(kernels[0], recipe, name=NAMES[0], **EXPERT)
    product = functools.partial(jlp.grouped_matmul, x, recipe=recipe, name=NAMES[0])
    if once.columnwise is None:  # fprop reads the kernels themselves
        with pytest.raises(ValueError, match="fprop is in high precision; pass the kernel, too"):
            product(rhs=None, group_sizes=sizes, quantized_kernel=once)
        return
    y = jax.jit(lambda once: product(rhs=None, group_sizes=sizes, quantized_kernel=once))(once)
    assert_same_bytes(y, jax.jit(lambda w: product(rhs=w, group_sizes=sizes))(kernels[0]))


def test_nothing_is_quantised_again():
    x, kernels, _, _ = mlp_operands()
    recipe, sizes = jlp.NVFP4BlockScaling(), jnp.asarray(SIZES["uneven"], jnp.int32)
    once = quantized(kernels, recipe)

    def count(once):
        step = jax.jit(lambda x, w: jlp.grouped_mlp(x, w, sizes, recipe=recipe, quantized_kernels=once))
        return len(re.findall(r"\"jaxlowprec_quantize\"", step.lower(x, kernels).compile().as_text()))

    assert count(None) == 3 and count(once) == 0


@pytest.mark.parametrize(
    ("once", "recipe", "message"),
    [
        ("mxfp8", jlp.NVFP4BlockScaling(), "quantized_kernel is MXFP8.* but the recipe wants NVFP4"),
        ("mxfp8", None, "quantized_kernel= without a recipe that quantises"),
        (
            "other kernels",
            jlp.MXFP8BlockScaling(),
            r"quantized_kernel has shape \(5, 64, 32\), the kernel \(5, 64, 96\)",
        ),
    ],
)
def test_what_does_not_fit_is_named(once, recipe, message):
    x, (kernels, *_), *_ = mlp_operands()
    kernel = kernels[..., :32] if once == "other kernels" else kernels
    given = jlp.quantize_kernel(kernel, jlp.MXFP8BlockScaling(), **EXPERT)
    with pytest.raises(ValueError, match=f"grouped_matmul: {message}"):
        jlp.grouped_matmul(x, kernels, np.asarray(SIZES["uneven"]), recipe=recipe, quantized_kernel=given)


def test_neither_kernels_nor_quantised_ones():
    with pytest.raises(ValueError, match="rhs is None; without quantized_kernel= there is no weight"):
        jlp.grouped_matmul(jnp.ones((4, 64)), None, np.asarray([4]), recipe=jlp.MXFP8BlockScaling())


def test_another_kind_of_layer():
    with pytest.raises(ValueError, match="quantize_kernel: module_type='experts'; needs"):
        jlp.quantize_kernel(jnp.ones((2, 64, 64)), jlp.MXFP8BlockScaling(), module_type="experts")


class TestLayers:
    """Of Flax: `nnx.quantized_kernels`, and Linen's collection "quantized"."""

    recipe = jlp.NVFP4BlockScaling()

    @pytest.mark.slow
    def test_nnx(self):
        moe = jlp.nnx.MoE(E, K, F, top_k=2, rngs=nnx.Rngs(0))
        x = mlp_operands()[0]

        def trained(moe, x):
            loss = nnx.value_and_grad(lambda moe, x: moe(x)[0].astype(jnp.float32).sum())
            return loss(moe, x)

        with jlp.autocast(self.recipe):
            expected = nnx.jit(trained)(moe, x)
            with jlp.nnx.quantized_kernels(moe):
                assert moe.experts.gate_proj.quantized is not None
                assert_same_bytes(jax.tree.leaves(nnx.jit(trained)(moe, x)), jax.tree.leaves(expected))
                moe.experts.gate_proj.kernel[...] = jnp.zeros((E, K, F))  # is not read
                assert_same_bytes(nnx.jit(trained)(moe, x)[0], expected[0])
        assert moe.experts.gate_proj.quantized is None

    def test_linen(self):
        layer, sizes = jlp.linen.GroupedDense(E, N), jnp.asarray(SIZES["uneven"], jnp.int32)
        x = mlp_operands()[0]
        variables = layer.init(jax.random.key(0), x, sizes)
        with jlp.autocast(self.recipe):
            expected = layer.apply(variables, x, sizes)
            y, once = layer.apply(variables, x, sizes, mutable="quantized")
            bias = {"params": {"bias": variables["params"]["bias"]}}
            without_kernels = layer.apply(bias | once, x, sizes)
        assert_same_bytes(y, expected)
        assert_same_bytes(without_kernels, expected)
