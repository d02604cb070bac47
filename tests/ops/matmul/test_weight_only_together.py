"""Several weight-only products of the same activations as one call: its bytes are those of separate calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlowprec.ops.weight_only_matmul.api import weight_only_matmuls
from tests.eager import evaluated, jlp
from tests.helpers import assert_same_bytes, random_array
from tests.sharding.meshes import collectives, mesh_of, place

FORMATS = (jlp.Int4(32), jlp.Int4(32, symmetric=False), jlp.NVFP4(), jlp.NVFP4((16, 16)), jlp.MXFP4(), jlp.MXFP8())
COLUMNS = (64, 16, 48)
over_formats = pytest.mark.parametrize("fmt", FORMATS, ids=str)


def operands(fmt, rows=(3,), depth=64, columns=COLUMNS, dtype="bfloat16"):
    """x [*rows, K] and weights [N, K] of different ranges: those of two levels differ in amax."""
    weights = [jlp.quantize(random_array((n, depth), seed=i + 1) * 2.0**i, fmt) for i, n in enumerate(columns)]
    return random_array((*rows, depth), dtype), weights


def biases_of(weights):
    return [random_array((q.shape[0],), "float32", 7 + i) for i, q in enumerate(weights)]


def together(x, weights, biases=None, preferred_element_type=jnp.bfloat16):
    return evaluated(weight_only_matmuls)("test", x, weights, biases or [None] * len(weights), preferred_element_type)


def apart(x, weights, biases=None, **options):
    biases = biases or [None] * len(weights)
    return [jlp.scaled_matmul(x, q, bias, **options) for q, bias in zip(weights, biases, strict=True)]


def assert_all_same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert_same_bytes(one, other)


def calls(function, *args):
    """The targets of the native calls in what `function` is compiled to."""
    text = jax.jit(function).lower(*args).as_text()
    return [line.split("@jaxlowprec_")[1].split("(")[0] for line in text.splitlines() if "@jaxlowprec_" in line]


@over_formats
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_are_those_of_separate_products(isa, fmt, dtype):
    for rows in ((1,), (5,), (2, 3), (70,)):
        x, weights = operands(fmt, rows, dtype=dtype)
        biases = biases_of(weights)
        assert_all_same(together(x, weights), apart(x, weights))
        assert_all_same(
            together(x, weights, biases, jnp.float32), apart(x, weights, biases, preferred_element_type=jnp.float32)
        )


def test_it_is_one_call_for_weights_of_one_format():
    x, weights = operands(jlp.NVFP4())
    assert calls(together, x, weights) == ["weight_only_matmuls"]
    _, others = operands(jlp.Int4(32))
    mixed = [weights[0], others[1], weights[2]]
    assert calls(together, x, mixed) == ["weight_only_matmul"] * 3
    assert_all_same(together(x, mixed), apart(x, mixed))


def test_a_bias_of_one_weight_only():
    x, weights = operands(jlp.MXFP4())
    biases = [None, *biases_of(weights)[1:]]
    assert_all_same(together(x, weights, biases), apart(x, weights, biases))


def test_large_weights_share_the_threads():
    x, weights = operands(jlp.Int4(128), (1,), 1024, (1000, 16, 700, 1))
    assert_all_same(together(x, weights), apart(x, weights))


@pytest.mark.parametrize(("rows", "depth", "columns"), [((0,), 64, (4, 8)), ((3,), 0, (4, 8)), ((3,), 64, (4, 0, 8))])
def test_empty(rows, depth, columns):
    x, weights = operands(jlp.NVFP4(), rows, depth, columns)
    assert_all_same(together(x, weights), apart(x, weights))


@pytest.mark.parametrize("fmt", [jlp.Int4(32, symmetric=False), jlp.NVFP4()], ids=str)
def test_mapped_over(fmt):
    x, weights = operands(fmt, (4, 3))
    assert_all_same(jax.vmap(lambda x: together(x, weights))(x), apart(x, weights))
    assert "4x64x32xui8" not in jax.jit(jax.vmap(lambda x: together(x, weights))).lower(x).as_text()
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), weights, weights)
    found = jax.vmap(lambda w: together(x, w))(stacked)
    assert_all_same([y[1] for y in found], apart(x, weights))
    bias = jnp.stack([jnp.ones(COLUMNS[0]), jnp.zeros(COLUMNS[0])])
    found = jax.vmap(lambda b: together(x, weights, [b, *biases_of(weights)[1:]]))(bias)
    assert_all_same([y[0] for y in found], apart(x, weights, [bias[0], *biases_of(weights)[1:]]))


def test_there_is_no_derivative():
    x, weights = operands(jlp.NVFP4())
    with pytest.raises(NotImplementedError, match="no derivative of a product with a quantised weight"):
        jax.grad(lambda x: sum(y.sum() for y in together(x, weights)))(x.astype(jnp.float32))


@pytest.mark.parametrize("fmt", [jlp.Int4(32, symmetric=False), jlp.NVFP4(), jlp.NVFP4((16, 16))], ids=str)
class TestSharding:
    def test_split_rows_and_columns(self, fmt):
        x, weights = operands(fmt, (8,), columns=(64, 32, 96))
        mesh = mesh_of((2, 2))
        wanted = apart(x, weights, biases_of(weights))
        with jax.set_mesh(mesh):
            split = [jax.tree.map(lambda leaf: place(leaf, mesh, P("b") if leaf.ndim else P()), q) for q in weights]
            function = jax.jit(lambda x, w: together(x, w, biases_of(weights)))
            placed = place(x, mesh, P("a", None)), split
            compiled = function.lower(*placed).compile()
            found = compiled(*placed)
            assert_all_same(function(placed[0], [split[0], weights[1], split[2]]), wanted)
        assert_all_same(found, wanted)
        assert collectives(compiled) == [] and all(y.sharding.spec == P("a", "b") for y in found)

    def test_a_split_contraction_adds_biases_once(self, fmt):
        x, weights = operands(fmt, (8,), 512)
        mesh = mesh_of((4,))
        biases = [jnp.full(n, 100.0) for n in COLUMNS]
        function = functools.partial(together, preferred_element_type=jnp.float32)
        with jax.set_mesh(mesh):
            split = [jax.tree.map(lambda v: place(v, mesh, P(None, "a") if v.ndim else P()), q) for q in weights]
            found = jax.jit(function)(place(x, mesh, P(None, "a")), split, biases)
        for y, wanted in zip(found, map(np.asarray, function(x, weights, biases)), strict=True):
            np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
