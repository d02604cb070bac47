"""The bytes of AdamW's and Lion's updates on a GPU are the CPU's: every way to keep moments and weights."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxlowprec.ops.optimizer_update import optimizer_update
from tests.gpu.sides import assert_same_bytes_on
from tests.ops.optimizer_update.cases import CODES, ROUNDINGS, WEIGHTS, operands

UPDATES = [("adamw", codes) for codes in CODES] + [("lion", (rounding, None)) for rounding in ROUNDINGS]
WHOLE, RAGGED = ((5, 96), (64, 1024), (3, 4, 32)), ((4, 300), (2, 3, 40, 264), (1, 1))  # rows end with a block, or not


def steps(count, codes, bits, result, args, rule="adamw"):
    """The results of each of several steps, each from the last one's."""
    g, *kept, scalars, words = args
    step = functools.partial(optimizer_update, rule=rule, codes=codes, bits=bits, implementation="ffi")
    made = []
    for _ in range(count):
        if result == "update":
            made.append(step(g, *kept, scalars, words, result="update").parameter)
        new = step(g, *kept, scalars, words)
        kept = list(new)
        made.append(new)
    return made


@pytest.mark.parametrize("hostile", [False, True], ids=["usual", "hostile"])
@pytest.mark.parametrize("g_dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("rule", "codes"), UPDATES, ids=str)
def test_optimizer_update(cpu, gpu, rule, codes, g_dtype, hostile):
    for seed, (dtype, bits) in enumerate(WEIGHTS):
        for result, shapes in (("parameter", WHOLE), ("update", RAGGED), ("update", WHOLE)):
            args = operands(shapes[seed % 3], codes, dtype, bits, g_dtype, seed, hostile, rule)
            assert_same_bytes_on((cpu, gpu), functools.partial(steps, 2, codes, bits, result, rule=rule), args)


def test_gradients_of_every_size(cpu, gpu):
    """Quotients whose remainders would be subnormal, second moments near 1 and above, and zeros."""
    codes, bits = ("stochastic", "stochastic"), 32
    for power in range(-130, 128, 6):
        args = list(operands((32, 512), codes, jnp.bfloat16, bits, jnp.bfloat16, power % 7, False))
        args[0] = jax.random.normal(jax.random.key(0), (32, 512), jnp.bfloat16) * jnp.bfloat16(2.0**power)
        assert_same_bytes_on((cpu, gpu), functools.partial(steps, 4, codes, bits, "parameter"), args)


@pytest.mark.parametrize("bits", [32, 24, 16])
def test_many_steps_of_a_large_matrix(cpu, gpu, bits):
    codes = ("stochastic", "stochastic")
    args = operands((2048, 4096), codes, jnp.bfloat16, bits, jnp.bfloat16, 1, False)
    assert_same_bytes_on((cpu, gpu), functools.partial(steps, 5, codes, bits, "update"), args)


@pytest.mark.sanitize
def test_every_kernel_once(cpu, gpu):
    for dtype, bits in WEIGHTS:
        for rule, codes in UPDATES:
            if rule == "lion" or codes[0] == codes[1]:
                for shape in ((9, 64), (3, 40)):
                    for g_dtype in (jnp.float32, jnp.bfloat16):
                        args = operands(shape, codes, dtype, bits, g_dtype, 1, True, rule)
                        assert_same_bytes_on(
                            (cpu, gpu), functools.partial(steps, 1, codes, bits, "update", rule=rule), args
                        )
