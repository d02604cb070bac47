"""A few blocks of experts one after the other, over one set of parameters: what the tests of replay run."""

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp

LAYERS, EXPERTS, K, WIDTH, HIDDEN, TOKENS = 2, 8, 2, 64, 64, (8, 16)

RECIPES = {
    "bf16": None,
    "nvfp4": jlp.NVFP4BlockScaling(),
    "mxfp8": jlp.MXFP8BlockScaling(),
    "fp8_block": jlp.Float8BlockScaling(),
    "fp8_current": jlp.Float8CurrentScaling(),
    "int4_qat": jlp.Int4QAT(group_size=32),
    "nvfp4_qat": jlp.WeightQAT(jlp.NVFP4()),
}
# The others share the code of these two around their products; tests/linears/test_grouped.py has all products.
OFTEN = ("bf16", "nvfp4")
each_recipe = pytest.mark.parametrize(
    "recipe",
    [pytest.param(RECIPES[name], marks=[] if name in OFTEN else pytest.mark.slow, id=name) for name in RECIPES],
)


def block(recipe=None, **options):
    options = {"shared_hidden_features": 32, "dtype": jnp.bfloat16, "load_balance_coef": 0.01} | options
    return jlp.linen.MoE(EXPERTS, HIDDEN, K, recipe=recipe, **options)


def tokens(seed=0, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), (*TOKENS, WIDTH), dtype)


def parameters(seed=0):
    """Of all layers, stacked."""
    keys = jax.random.split(jax.random.key(seed), LAYERS)
    return jax.vmap(lambda key: block().init(key, tokens())["params"])(keys)


def run(moe, params, x, tape=None, *, scan=True, remat=False):
    """The output, the load-balance losses and the tape that was used."""

    def layer(x, params_and_tape):
        params, tape = params_and_tape
        y, aux = moe.apply({"params": params}, x, tape)
        return x + y, aux

    layer = jax.checkpoint(layer) if remat else layer
    layers = params, None if tape is None else tape.experts
    if scan:
        x, aux = jax.lax.scan(layer, x, layers)
        return x, aux.load_balance_loss, jlp.moe.RoutingTape(aux.tape)
    auxes = []
    for i in range(LAYERS):
        x, aux = layer(x, jax.tree.map(lambda leaf: leaf[i], layers))
        auxes.append(aux)
    tape = jlp.moe.RoutingTape.of_layers([aux.tape for aux in auxes])
    return x, jnp.stack([aux.load_balance_loss for aux in auxes]), tape


def loss(moe, params, x, tape=None, **how):
    y, balance, tape = run(moe, params, x, tape, **how)
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    return jnp.sum(y.astype(jnp.float32) * weights) + jnp.sum(balance), (y, tape)


def step(moe, params, x, tape=None, **how):
    """Output, tape and gradients of the parameters and of x, under jit."""

    @jax.jit
    def both(params, x, tape):
        return jax.value_and_grad(lambda p, x: loss(moe, p, x, tape, **how), argnums=(0, 1), has_aux=True)(params, x)

    (_, (y, used)), gradients = both(params, x, tape)
    return y, used, gradients
