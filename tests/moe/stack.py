"""A few blocks of experts one after the other, over one set of parameters: what the tests of replay run."""

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp
from tests.helpers import often
from tests.low_precision import recipes

LAYERS, EXPERTS, K, WIDTH, HIDDEN, TOKENS = 2, 8, 2, 64, 64, (8, 16)

RECIPES = recipes("bf16", "nvfp4", "mxfp8", "fp8_block", "fp8_current", "int4_qat", "nvfp4_qat")
# Experts do the same around the products of every recipe, all of which tests/layers/grouped has.
OFTEN, SLOWLY = ("bf16", "nvfp4"), ("fp8_current", "int4_qat")
each_recipe = pytest.mark.parametrize(
    "recipe",
    often([RECIPES[name] for name in OFTEN], [RECIPES[name] for name in (*OFTEN, *SLOWLY)]),
    ids=[*OFTEN, *SLOWLY],
)


def block(recipe=None, **options):
    options = {"shared_hidden_features": 32, "dtype": jnp.bfloat16} | options
    return jlp.linen.MoE(EXPERTS, HIDDEN, K, recipe=recipe, **options)


def tokens(seed=0, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), (*TOKENS, WIDTH), dtype)


def parameters(seed=0):
    """Of all layers, stacked."""
    keys = jax.random.split(jax.random.key(seed), LAYERS)
    return jax.jit(jax.vmap(lambda key: block().init(key, tokens())["params"]))(keys)  # one program, not a hundred


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
