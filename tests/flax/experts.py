"""The block of experts of either library."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.flax.libraries import weighted

EXPERTS, WIDTH, HIDDEN, K = 8, 64, 32, 2
X = np.random.default_rng(0).standard_normal((8, 16, WIDTH)).astype(jnp.bfloat16)


def block(library, experts=EXPERTS, k=K, **options):
    return library.maker("MoE", experts, WIDTH, HIDDEN, k, **{"dtype": jnp.bfloat16} | options)


def made(library, experts=EXPERTS, k=K, **options):
    return library.model(block(library, experts, k, **options), X)


def compiled(model):
    return jax.jit(model.apply)


def total(output):
    """A loss of all that the block gives."""
    y, aux = output
    return weighted(y) + aux.load_balance_loss
