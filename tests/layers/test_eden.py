"""Recipes whose wgrad has operands of eden rounding (numerics.md 14)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec import Role
from jaxlowprec.ops.quantize.random_bits import further_words, slice_words
from tests.helpers import assert_same_bytes, random_array
from tests.layers.fused.layers import EXACT, composed_mlp

KEY = jax.random.key(3)
X, W, DY = random_array((64, 48)), random_array((48, 32), "float32", 1), random_array((64, 32), seed=2)


@functools.cache
def with_eden(rule="six", wgrad="eden"):
    """The default NVFP4 recipe, but for wgrad's operands."""

    def factory(role):
        operand = Role(jlp.NVFP4(scale_rule=rule), wgrad, jlp.Hadamard())
        return {
            "input": {"fprop": jlp.NVFP4(), "wgrad": operand},
            "weight": jlp.NVFP4((16, 16)),
            "grad_output": {"dgrad": Role(jlp.NVFP4(), "stochastic"), "wgrad": operand},
        }[role.tensor_type]

    return jlp.Custom(factory)


@functools.partial(jax.jit, static_argnames="recipe")
def of_linear(recipe, key, x, w, dy):
    return jax.vjp(lambda x, w: jlp.linear(x, w, recipe=recipe, key=key), x, w)[1](dy)


def gradients(recipe, key=KEY, x=X, w=W, dy=DY):
    return jax.device_get(of_linear(recipe, key, x, w, dy))


@pytest.mark.parametrize("rule", ["six", "search"])
def test_wgrad_multiplies_the_operands_that_quantize_gives(rule):
    words = slice_words(jax.random.key_data(KEY), ())
    fmt = jlp.NVFP4(scale_rule=rule)
    x = jlp.quantize(X, fmt, axis=-2, hadamard=True, rounding="eden", key=further_words(words))
    dy = jlp.quantize(DY, fmt, axis=-2, hadamard=True, rounding="eden", key=words)
    dx, dw = gradients(with_eden(rule))
    assert_same_bytes(dw, jlp.scaled_matmul(x.mT, dy.mT, preferred_element_type=jnp.float32))
    assert_same_bytes(dx, gradients(jlp.NVFP4BlockScaling())[0])  # dgrad is as it was


def test_both_operands_have_bits_of_their_own():
    words = jnp.array([1, 2], jnp.uint32)
    assert (further_words(words) != words).all()
    assert (further_words(jnp.stack([words, words + 1]))[0] == further_words(words)).all()


def test_the_key_decides_and_without_one_the_operands_do():
    recipe = with_eden()
    assert_same_bytes(gradients(recipe), gradients(recipe))
    others = [gradients(recipe, jax.random.key(4))[1], gradients(recipe, None)[1]]
    assert all((other != gradients(recipe)[1]).any() for other in others)
    assert_same_bytes(gradients(recipe, None), gradients(recipe, None))
    further = gradients(recipe, None, x=np.asarray(X) * jnp.bfloat16(1.5))[1]
    assert (further != 1.5 * gradients(recipe, None)[1]).any()  # other bits, since the amax is another


def test_the_weights_gradient_has_a_smaller_error():
    """Squared error over that of the exact product, by 1000: 27.5 and 18.8 (frontier of NVFP4 training)."""
    x, dy = jax.device_get(jax.jit(lambda: [jax.random.normal(jax.random.key(i), (2048, 128)) for i in range(2)])())
    exact = x.T @ dy

    def error(recipe):
        dw = gradients(recipe, x=x, w=np.zeros((128, 128), np.float32), dy=dy)[1]
        return 1000 * np.sum((dw - exact) ** 2) / np.sum(exact**2)

    assert error(jlp.NVFP4BlockScaling()) == pytest.approx(27.5, abs=0.8)
    assert error(with_eden()) == pytest.approx(18.8, abs=0.8)
    assert error(with_eden("search")) == pytest.approx(15.5, abs=0.8)


def test_groups_have_the_bits_of_slices_of_a_batch():
    """Rows of experts, each a tensor of its own."""
    recipe, kernels = with_eden(), np.stack([W, np.asarray(W) + 1])

    def of_groups(x, kernels):
        return jlp.grouped_matmul(x, kernels, jnp.array([32, 32]), recipe=recipe, key=KEY)

    def of_slices(x, kernels):
        return jlp.einsum("etk,ekn->etn", x, kernels, recipe=recipe, key=KEY)

    @jax.jit
    def both():
        dx, dw = jax.vjp(of_slices, X.reshape(2, 32, 48), kernels)[1](DY.reshape(2, 32, 32))
        return jax.vjp(of_groups, X, kernels)[1](DY), (dx.reshape(64, 48), dw)

    assert_same_bytes(*both())


def test_vmap_gives_each_the_bits_of_its_key():
    recipe, keys = with_eden(), jax.random.split(KEY, 2)
    found = jax.device_get(jax.jit(jax.vmap(lambda key: of_linear(recipe, key, X, W, DY)))(keys))
    for i, key in enumerate(keys):
        assert_same_bytes([g[i] for g in found], gradients(recipe, key))


def test_kernels_that_share_an_input_share_its_bits():
    """Those of the first kernel's key; gradients have their own."""
    kernels, dys = (W, random_array((48, 16), "float32", 5)), (DY, random_array((64, 16), seed=6))
    both = lambda *kernels: jlp.linears(X, kernels, recipe=with_eden(), key=KEY)  # noqa: E731
    dws = jax.jit(lambda kernels, dys: jax.vjp(both, *kernels)[1](dys))(kernels, dys)
    words = [jax.random.key_data(jax.random.fold_in(KEY, i)) for i in range(2)]
    x = jlp.quantize(X, jlp.NVFP4(), axis=-2, hadamard=True, rounding="eden", key=further_words(words[0]))
    for own, dy, dw in zip(words, dys, dws, strict=True):
        q = jlp.quantize(dy, jlp.NVFP4(), axis=-2, hadamard=True, rounding="eden", key=own)
        assert_same_bytes(dw, jlp.scaled_matmul(x.mT, q.mT, preferred_element_type=jnp.float32))


def test_kernels_that_share_an_input_without_a_key():
    """Gradients have the bits of separate calls."""
    kernels, dys = (W, random_array((48, 16), "float32", 5)), (DY, random_array((64, 16), seed=6))

    @jax.jit
    def both(kernels, dys):
        shared = lambda *kernels: jlp.linears(X, kernels, recipe=with_eden(), names=["a", "b"])  # noqa: E731
        alone = []
        for name, w, dy in zip("ab", kernels, dys, strict=True):
            alone += jax.vjp(lambda w, name=name: jlp.linear(X, w, recipe=with_eden(), name=name), w)[1](dy)
        return jax.vjp(shared, *kernels)[1](dys), tuple(alone)

    assert_same_bytes(*both(kernels, dys))


@pytest.mark.parametrize("saved", ["quantized", pytest.param("recompute", marks=pytest.mark.slow)])
def test_an_mlp_has_the_gradients_of_its_layers(saved):
    kernels, dy = (W, np.asarray(W) + 1, random_array((32, 48), "float32", 7)), random_array((64, 48), seed=8)
    options = {"recipe": with_eden(), "key": KEY}

    def of(function, **further):
        step = jax.jit(lambda *kernels: jax.vjp(lambda *k: function(X, k, **options, **further), *kernels)[1](dy))
        return step.lower(*kernels).compile(EXACT)(*kernels)

    assert_same_bytes(of(jlp.mlp, saved=saved), of(composed_mlp))


@pytest.mark.slow
def test_telemetry_measures_a_recipe_with_eden():
    def loss(w):
        return jnp.mean(jlp.linear(X, w, name="layer").astype(jnp.float32) ** 2)

    with jlp.autocast(with_eden("search")):
        _, seen = jax.jit(jlp.telemetry.value_and_grad(loss, what_if={"search": with_eden("search")}))(W)
    found = jlp.telemetry.read(seen)
    found = found["layer"]["input columnwise"], found["layer"]["input columnwise, search"]
    assert all(18 < float(one.sqnr) < 25 for one in found)


# --- refusals


def test_a_role_needs_a_rotation_and_blocks_of_16():
    with pytest.raises(ValueError, match='Role: rounding="eden" without hadamard='):
        Role(jlp.NVFP4(), "eden")
    for fmt in (jlp.NVFP4((16, 16)), jlp.MXFP4(), jlp.Float8Block()):
        with pytest.raises(ValueError, match="it corrects the E4M3 scale of each 16 elements"):
            Role(fmt, "eden", jlp.Hadamard())
    with pytest.raises(ValueError, match="only rounds to nearest"):
        Role(jlp.NVFP4(row_scaled=True), "eden", jlp.Hadamard())


def test_scales_that_are_chosen_are_rotated_only_with_eden():
    with pytest.raises(ValueError, match='or use scale_rule="six" or rounding="eden"'):
        Role(jlp.NVFP4(scale_rule="search"), hadamard=jlp.Hadamard())
    Role(jlp.NVFP4(scale_rule="search"), "eden", jlp.Hadamard())


def test_only_a_gemms_own_operands_take_it():
    eden, plain = Role(jlp.NVFP4(), "eden", jlp.Hadamard()), Role(jlp.NVFP4())
    with pytest.raises(ValueError, match='Roles: input has rounding="eden" in fprop, whose operands are not rotated'):
        jlp.Roles(eden, plain, plain)
    with pytest.raises(ValueError, match='Roles: gradient has rounding="eden" in dgrad'):
        jlp.Roles(plain, plain, eden)
    with pytest.raises(ValueError, match=r"Roles: fprop has an operand with hadamard=Hadamard\(16\)"):
        jlp.Roles(plain, plain, plain, fprop=(plain, Role(jlp.NVFP4(), hadamard=jlp.Hadamard())))
    with pytest.raises(ValueError, match='Roles: weight has rounding="eden" in fprop'):
        jlp.Roles(plain, plain, plain, fprop=(plain, eden))
    jlp.Roles(plain, plain, plain, dgrad=(eden, eden), wgrad=(eden, eden))
