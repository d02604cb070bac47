"""Words that follow from a key's: those of the NumPy oracle under every transformation, as loops and unrolled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, PartitionSpec

from jaxlowprec.ops.quantize.random_bits import words_at
from tests import numpy_oracle
from tests.cuda_without_gpu.claiming_cuda import forget_ops
from tests.helpers import assert_same_bytes
from tests.sharding.meshes import mesh_of, place

KEY = np.array([0x243F6A88, 0x85A308D3], np.uint32)
FIRST = np.arange(8, dtype=np.uint32) * np.uint32(0x9E3779B9)


def expected(first=FIRST, second=0, third=0, stream=5):
    numbers = np.broadcast_arrays(first, second, third, stream)
    counter = np.stack(numbers, axis=-1).astype(np.uint32)
    return numpy_oracle.philox(counter, np.broadcast_to(KEY, (*counter.shape[:-1], 2)))[..., :2]


words = functools.partial(words_at, stream=5)


def test_numbers_broadcast():
    assert_same_bytes(words(KEY, 3, 4, 5), expected(3, 4, 5))
    assert_same_bytes(words(KEY, FIRST[:, None], FIRST, 7), expected(FIRST[:, None], FIRST, 7))


def test_transformations():
    assert_same_bytes(jax.vmap(words, (None, 0))(KEY, FIRST), expected())
    with jax.disable_jit():
        assert_same_bytes(words(KEY, FIRST), expected())
    slope = jax.grad(lambda x: x * words(KEY, x.astype(jnp.uint32))[0])(2.0)
    assert slope == expected(2)[0].astype(np.float32)


@pytest.mark.parametrize("sharded", ["first", "second"])
def test_explicit_mesh(sharded):
    mesh = mesh_of((2, 4), AxisType.Explicit)
    with jax.set_mesh(mesh):
        one, other = place(FIRST, mesh, PartitionSpec("b")), place(FIRST, mesh, PartitionSpec())
        given = (one, other) if sharded == "first" else (other, one)
        found = jax.jit(words)(KEY, *given)
    assert jax.typeof(found).sharding.spec == PartitionSpec("b", None)
    assert_same_bytes(found, expected(FIRST, FIRST))


@pytest.mark.parametrize("varying", ["key", "number"])
def test_shard_map(varying):
    mesh = mesh_of((8,))
    specs = (PartitionSpec("a"), PartitionSpec()) if varying == "key" else (PartitionSpec(), PartitionSpec("a"))
    keys, numbers = (np.tile(KEY, (8, 1)), np.uint32([3])) if varying == "key" else (KEY[None], FIRST)
    found = jax.jit(jax.shard_map(words, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("a")))(keys, numbers)
    assert_same_bytes(found, expected(np.full(8, 3)) if varying == "key" else expected())


def test_programs_of_a_gpu_are_unrolled():
    """Each round of a loop would launch a kernel. On CPUs a call of ours is compiled faster than a loop."""
    checks = [export.DisabledSafetyCheck.custom_call("jaxlowprec_random_words")]
    exported = functools.partial(export.export, jax.jit(words), disabled_checks=checks)
    made = exported(platforms=["cpu", "cuda"])(KEY, FIRST)
    assert_same_bytes(made.call(KEY, FIRST), expected())
    text = {name: exported(platforms=[name])(KEY, FIRST).mlir_module() for name in made.platforms}
    assert not any("stablehlo.while" in module for module in text.values())
    assert ["@jaxlowprec_random_words(" in text[name] for name in ("cpu", "cuda")] == [True, False]


def test_the_loop_of_rounds_where_there_is_no_kernel(monkeypatch):
    monkeypatch.setenv("JAXLOWPREC_IMPLEMENTATION", "reference")
    forget_ops()
    try:
        assert "while" in jax.jit(words).lower(KEY, FIRST).as_text()
        assert_same_bytes(words(KEY, FIRST), expected())
    finally:
        forget_ops()
