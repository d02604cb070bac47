"""`NVFP4BlockScaling(row_scaled_activation=True)`: a token's result does not depend on the tokens beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, random_array

ROW_SCALED = jlp.NVFP4BlockScaling(row_scaled_activation=True)
DEFAULT = jlp.NVFP4BlockScaling()
ROWS = jlp.NVFP4(row_scaled=True)


def tokens(count=24, features=64):
    """Tokens of very different sizes: by the tensor's one amax the small ones would lose their bits."""
    scale = np.exp2(np.arange(count, dtype=np.float32) * 5 % 22 - 11)[:, None]
    return (np.asarray(random_array((count, features), "float32")) * scale).astype(jnp.bfloat16)


def kernel(sizes=(64, 48), seed=1):
    return random_array(sizes, "float32", seed)


def hidden():
    return [kernel((64, 96), 2), kernel((64, 96), 3), kernel((96, 64), 4)]


LAYERS = {  # functions of tokens [T, 64]
    "linear": lambda x: jlp.linear(x, kernel()),
    "batched": lambda x: jlp.linear(x[:, None], kernel())[:, 0],
    "linears": lambda x: jnp.concatenate(jlp.linears(x, [kernel(), kernel((64, 32), 5)]), -1),
    "mlp": lambda x: jlp.mlp(x, hidden()),
    "NormLinear": lambda x: jlp.nnx.NormLinear(64, 48, rngs=nnx.Rngs(0))(x),
    "MLP": lambda x: jlp.nnx.MLP(64, 96, normalization="rms", rngs=nnx.Rngs(0))(x),
    "experts": lambda x: jlp.grouped_matmul(x, kernel((1, 64, 48)), jnp.array([x.shape[0]])),
}


@pytest.mark.parametrize("name", LAYERS)
def test_tokens_do_not_couple(name):
    x, parts = tokens(), (slice(0, 1), slice(5, 13))

    @jax.jit
    def results(x):
        with jlp.autocast(ROW_SCALED):
            found = [LAYERS[name](x), *(LAYERS[name](x[part]) for part in parts)]
        with jlp.autocast(DEFAULT):
            return found, LAYERS[name](x), LAYERS[name](x[:1])

    (y, *of_parts), plain, plain_alone = jax.device_get(results(x))
    for part, own in zip(parts, of_parts, strict=True):
        assert_same_bytes(own, y[part])
    if "orm" not in name and name != "MLP":  # a norm makes tokens alike
        assert np.any(plain_alone != plain[:1])


def test_the_forward_pass_is_the_product_of_row_scaled_input():
    x, w = tokens(), kernel()

    @jax.jit
    def both(x, w):
        pair = jlp.quantize(x, ROWS), jlp.quantize(w, jlp.NVFP4((16, 16)), axis=-2).mT
        return jlp.linear(x, w, recipe=ROW_SCALED), jlp.scaled_matmul(*pair, preferred_element_type=x.dtype)

    assert_same_bytes(*both(x, w))


def test_the_backward_pass_is_that_of_the_default_recipe():
    x, w, dy, key = tokens(), kernel(), random_array((24, 48), seed=7), jax.random.key(3)

    def gradients(recipe):
        return jax.vjp(lambda x, w: jlp.linear(x, w, recipe=recipe, key=key), x, w)[1](dy)

    assert_same_bytes(*jax.jit(lambda: (gradients(ROW_SCALED), gradients(DEFAULT)))())


def test_experts_have_the_bits_of_separate_products():
    x, w, sizes, bias = tokens(30), kernel((3, 64, 48)), jnp.array([10, 0, 15]), random_array((3, 48), "float32", 9)
    groups = ((0, slice(0, 10)), (2, slice(10, 25)))

    @jax.jit
    def both():
        alone = [jlp.linear(x[rows], w[group], bias[group], recipe=ROW_SCALED) for group, rows in groups]
        return jlp.grouped_matmul(x, w, sizes, bias, recipe=ROW_SCALED), alone

    y, alone = jax.device_get(both())
    for (_, rows), own in zip(groups, alone, strict=True):
        assert_same_bytes(y[rows], own)
    assert not y[25:].any()


def test_rows_in_no_group_may_hold_nan():
    w, sizes = kernel((2, 64, 48)), np.array([4, 5])
    with_nan, with_zeros = tokens(12), tokens(12)
    with_nan[9:], with_zeros[9:] = np.nan, 0
    product = jax.jit(lambda x: jlp.grouped_matmul(x, w, sizes, recipe=ROW_SCALED))
    assert_same_bytes(product(with_nan), product(with_zeros))


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_gradients_of_overridden_backward_passes(override):
    recipe = jlp.NVFP4BlockScaling(row_scaled_activation=True, backward_override=override)
    x, w, dy = tokens(), kernel(), random_array((24, 48), seed=7)
    dx, dw = jax.jit(lambda x, w, dy: jax.vjp(lambda x, w: jlp.linear(x, w, recipe=recipe), x, w)[1](dy))(x, w, dy)
    read = jlp.quantize(x, ROWS).dequantize() if override == "dequantized" else x
    expected = np.float32(read).T @ np.float32(dy)
    np.testing.assert_allclose(dw, expected, rtol=2e-2, atol=1e-2 * np.abs(expected).max())
    assert dx.shape == x.shape


@pytest.mark.parametrize("tensor", ["input", "weight", "gradient"])
def test_only_the_input_of_fprop_can_be_row_scaled(tensor):
    plain = {name: jlp.Role(jlp.NVFP4()) for name in ("input", "weight", "gradient")}
    with pytest.raises(ValueError, match=f"{tensor} is NVFP4 1x16 row-scaled in .*only fprop's input"):
        jlp.Roles(**plain | {tensor: jlp.Role(ROWS)})
    jlp.Roles(**plain, fprop=(jlp.Role(ROWS), plain["weight"]))


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True])
def test_telemetry_measures_what_it_did_to_each_row(experts):
    x, w = tokens(), kernel()

    def loss(w, x):
        if experts:
            y = jlp.grouped_matmul(x, jnp.stack([w, w]), jnp.array([10, 14]), recipe=ROW_SCALED, name="up")
        else:
            y = jlp.linear(x, w, recipe=ROW_SCALED, name="up")
        return y.astype(jnp.float32).sum()

    expected = jax.value_and_grad(loss)(w, x)
    actual, found = jlp.telemetry.value_and_grad(loss)(w, x)
    assert_same_bytes(actual, expected)
    found = jlp.telemetry.read(found)["up"]
    exact, decoded = (x.astype(jnp.float32) for x in (x, jlp.quantize(x, ROWS).dequantize(jnp.float32)))
    error = jnp.sqrt(((decoded - exact) ** 2).sum() / (exact**2).sum())
    assert found["input rowwise"].relative_error == pytest.approx(float(error), rel=1e-3)
    y, y_exact = (jlp.linear(x, w, recipe=recipe).astype(jnp.float32) for recipe in (ROW_SCALED, None))
    error = float(jnp.linalg.norm(y - y_exact) / jnp.linalg.norm(y_exact))
    assert error / 2 < found["fprop"].relative_error < error * 2  # of a sample of the rows
