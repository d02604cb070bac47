"""grouped_mlp: the bits of grouped products with the activation in between, whatever its backward pass keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, often
from tests.layers.fused.layers import ACTIVATIONS, KEY, SAVED, relative_error
from tests.layers.grouped.experts import (
    NAMES,
    SIZES,
    TAKEN,
    F,
    K,
    mlp_operands,
    separate_mlp,
    step,
)

OFTEN = ("nvfp4", "mxfp8", "fp8_current", "int4_qat", "decoded nvfp4", "down by itself", "bf16")
EXACTLY = ("quantized", "recompute")
each_exact = pytest.mark.parametrize("saved", EXACTLY)


def cube(x):
    return x * x * x


def exp_times(gate, up):
    """Not zero where its operands are: rows in no group must not count."""
    return jnp.exp(jnp.minimum(gate, 1)) * (up + 1)


def name_of(activation):
    return activation if isinstance(activation, str) else activation.__name__


@functools.cache
def expected_of(recipe, activation="swiglu", case="uneven", dtype="bfloat16"):
    """Operands, options, and the step of separate products, which several ways to save are compared with."""
    gated = activation in ("swiglu", "geglu", exp_times)
    x, kernels, biases, dy = mlp_operands(gated=gated, dtype=dtype)
    options = {"recipe": TAKEN[recipe], "key": KEY, "names": NAMES if gated else NAMES[1:]}
    options |= {"activation": activation, "sizes": SIZES[case]}
    given = x, kernels, biases, dy
    return given, options, step(separate_mlp, *given, **options)


def assert_agree(found, expected, gated):
    """All bits; but separate products round each one's gradient of x, and add up in x's dtype."""
    exact = not gated or found[1].dtype == jnp.float32
    assert_same_bytes(found if exact else (found[0], *found[2:]), expected if exact else (expected[0], *expected[2:]))
    dx, wanted = np.float32(found[1]), np.float32(expected[1])
    np.testing.assert_allclose(dx, wanted, rtol=2**-6, atol=2**-7 * np.abs(wanted).max())


@pytest.mark.sampled(5)
@each_exact
@pytest.mark.parametrize("recipe", often(OFTEN, TAKEN))
def test_bits_are_those_of_products(recipe, saved):
    given, options, expected = expected_of(recipe)
    found = step(jlp.grouped_mlp, *given, **options, saved=saved)
    assert_agree(found, expected, gated=True)
    assert not np.float32(found[1])[138:].any()  # rows after the last group


@pytest.mark.sampled(3)
@each_exact
@pytest.mark.parametrize("recipe", often(["fp8_current"], ["nvfp4", "mxfp8", "fp8_current", "int4_qat", "bf16"]))
@pytest.mark.parametrize("activation", [*list(ACTIVATIONS)[1:], cube, exp_times], ids=name_of)
def test_any_activation(recipe, activation, saved):
    given, options, expected = expected_of(recipe, activation)
    gated = activation in ("geglu", exp_times)
    assert_agree(step(jlp.grouped_mlp, *given, **options, saved=saved), expected, gated)


@pytest.mark.sampled(3)
@each_exact
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("recipe", often(["fp8_current"], ["nvfp4", "mxfp8", "fp8_current", "fp8_block", "int4_qat"]))
def test_any_sizes(recipe, case, saved):
    """In float32, where the gradient of x has the bits of separate products, too."""
    given, options, expected = expected_of(recipe, case=case, dtype="float32")
    assert_agree(step(jlp.grouped_mlp, *given, **options, saved=saved), expected, gated=True)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("recipe", often(OFTEN, TAKEN))
def test_eight_bits_change_gradients_a_little(recipe):
    given, options, expected = expected_of(recipe)
    found = step(jlp.grouped_mlp, *given, **options, saved="8bit")
    assert_same_bytes(found[0], expected[0])
    for actual, like in zip(jax.tree.leaves(found[1:]), jax.tree.leaves(expected[1:]), strict=True):
        assert (actual.shape, actual.dtype) == (like.shape, like.dtype)
        assert relative_error(actual, like) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
def test_eight_bits_are_what_the_backward_pass_reads(recipe):
    """The gradients are those of products and the activation at gate and up decoded from MXFP8."""
    (x, kernels, biases, dy), options, _ = expected_of(recipe)
    recipe, sizes = options["recipe"], jnp.asarray(options["sizes"])

    def run(x, kernels, biases, dy):
        def hidden(x, kernels, biases):
            calls = zip(kernels, biases, range(2), strict=True)
            return [
                jlp.grouped_matmul(x, w, sizes, b, recipe, key=jax.random.fold_in(KEY, i), name=NAMES[i])
                for w, b, i in calls
            ]

        def down(a, kernel, bias):
            key = jax.random.fold_in(KEY, 2)
            return jlp.grouped_matmul(a, kernel, sizes, bias, recipe, key=key, name=NAMES[2])

        operands, first_back = jax.vjp(hidden, x, kernels[:2], biases[:2])
        decoded = [jlp.quantize(v, jlp.MXFP8()).dequantize() for v in operands]
        da, d_down, d_bias = jax.vjp(down, jlp.swiglu(*decoded), kernels[2], biases[2])[1](dy)
        _, d_kernels, d_biases = first_back(list(jax.vjp(jlp.swiglu, *decoded)[1](da)))
        return [*d_kernels, d_down], [*d_biases, d_bias]

    found = step(jlp.grouped_mlp, x, kernels, biases, dy, **options, saved="8bit")
    assert_same_bytes(found[2:], jax.jit(run)(x, kernels, biases, dy))


@pytest.mark.parametrize("saved", often(["quantized"], SAVED))
def test_the_result_has_another_dtype(saved):
    x, kernels, biases, dy = mlp_operands()
    options = {"recipe": TAKEN["mxfp8"], "preferred_element_type": "float32"}
    sizes = jnp.asarray(SIZES["uneven"])
    found = step(jlp.grouped_mlp, x, kernels, biases, np.float32(dy), **options, saved=saved)

    @jax.jit
    def expected(x, kernels, biases):
        product = functools.partial(jlp.grouped_matmul, group_sizes=sizes, recipe=options["recipe"])
        hidden = (product(x, w, bias=b) for w, b in zip(kernels[:2], biases[:2], strict=True))
        return product(jlp.swiglu(*hidden), kernels[2], bias=biases[2], preferred_element_type="float32")

    assert found[0].dtype == jnp.float32
    assert_same_bytes(found[0], expected(x, kernels, biases))


@pytest.mark.slow
@pytest.mark.parametrize("saved", SAVED)
def test_loaded_kernels_are_served(saved):
    x, kernels, biases, dy = mlp_operands()
    recipe = jlp.Int4QAT(group_size=16)
    loaded = [jlp.quantize_kernel(w, recipe).columnwise for w in kernels]

    def run(function, kernels, **options):
        sizes = jnp.asarray(SIZES["uneven"])
        y, pullback = jax.vjp(lambda x: function(x, kernels, sizes, biases, **options), x)
        return y, pullback(dy)

    found = run(jlp.grouped_mlp, loaded, saved=saved, recipe=None)
    assert_same_bytes(found[0], run(jlp.grouped_mlp, kernels, saved=saved, recipe=recipe)[0])
    if saved != "8bit":
        assert_same_bytes(found, run(separate_mlp, loaded))


NVFP4 = TAKEN["nvfp4"]
X, KERNELS, BIASES, _ = mlp_operands()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"activation": "relu"}, ValueError, "activation='relu'; needs one of 'geglu'"),
        ({"activation": "gelu"}, ValueError, "3 kernels; activation='gelu' needs 2: up and down"),
        (
            {"activation": lambda gate, up: gate[:, :48]},
            ValueError,
            r"gives bfloat16 \(150, 48\); needs bfloat16 \(150, 96\)",
        ),
        (
            {"activation": lambda gate, up: gate.astype(jnp.float32), "recipe": None},
            ValueError,
            r"gives float32 \(150, 96\); needs bfloat16 \(150, 96\)",
        ),
        ({"saved": "all"}, ValueError, "saved='all'; needs"),
        ({"kernels": KERNELS[0]}, TypeError, "kernels=.*; needs a list or tuple"),
        ({"biases": BIASES[:2]}, ValueError, "biases has 2 elements for 3 kernels"),
        ({"names": NAMES[:2]}, ValueError, "names has 2 elements for 3 kernels"),
        ({"names": [1, 2, 3]}, TypeError, "name=1; needs a string"),
        ({"x": X[None]}, ValueError, r"needs x \[T, K\], kernels \[E, K, N\]"),
        ({"x": X.astype(jnp.int32)}, TypeError, "x .*int32.*float32"),
        ({"group_sizes": jnp.ones(4, jnp.int32)}, ValueError, r"group_sizes \(4,\): needs"),
        ({"group_sizes": np.full(5, 100)}, ValueError, "sum up to 500, and there are 150 rows"),
        ({"group_sizes": jnp.ones(5)}, TypeError, "needs integers"),
        ({"kernels": [KERNELS[0], KERNELS[1][..., :80], KERNELS[2]]}, ValueError, "gate has 96 features and up 80"),
        ({"kernels": [*KERNELS[:2], KERNELS[2][:, :80]]}, ValueError, rf"x \(150, {F}\), kernels \(5, 80, 48\)"),
        ({"biases": [None, BIASES[2], None]}, ValueError, r"bias has shape \(5, 48\); needs \(5, 96\)"),
        ({"recipe": "nvfp4"}, TypeError, "recipe='nvfp4'"),
        ({"recipe": jlp.DelayedScaling()}, ValueError, r"pass state=.*init_state\(recipe, num_experts=5\)"),
        ({"states": [None]}, ValueError, "states has 1 elements for 3 kernels"),
        ({"recipe": jlp.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)}, ValueError, "square tiles"),
        ({"recipe": jlp.Int4QAT(group_size=128)}, ValueError, "not a multiple of the group of 128"),
        ({"key": 5}, TypeError, "key=5"),
        ({"preferred_element_type": "int8"}, TypeError, "preferred_element_type"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_errors_say_what_is_needed(change, error, message):
    given = {"x": X, "kernels": KERNELS, "group_sizes": jnp.asarray(SIZES["uneven"]), "recipe": NVFP4} | change
    with pytest.raises(error, match=f"grouped_mlp: .*{message}"):
        jlp.grouped_mlp(**given)
    assert X.shape[1] == K
