"""Arrays without elements: every op gives what jnp would, nothing or zeros, natively and by reference."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.ops.grouped_matmul.plain import rows_product
from tests.helpers import ONE_OF_EACH, assert_same_bytes, format_name, often
from tests.low_precision import STRUCTURES, recipes, state_for, without_state

RECIPES = STRUCTURES | recipes("fp8_block", "fp8_current")
RECIPES |= {
    "int4_qat": jlp.Int4QAT(group_size=4),
    "int4_qat clipped": jlp.Int4QAT(group_size=4, symmetric=False, ste="clipped"),
}

OFTEN = ("nvfp4", "fp8_block")
NOTHING = [(0, 4, 32), (0, 0, 32), (2, 4, 0, 32), (0, 0), (2, 0, 4, 32), (4, 0)]
IMPLEMENTATIONS = ("ffi", "reference")
OF_EACH_SCALING = (
    jlp.NVFP4(),
    jlp.MXFP8(),
    jlp.Float8Block("e5m2", (128, 128), False),
    jlp.Float8Tensor(),
    jlp.Int4(16),
)


def ones(shape, dtype=np.float32):
    return np.ones(shape, dtype)


def assert_as_in_jnp(ours, theirs, *operands):
    """A result and its gradients have the shapes that jnp's have, the operands' dtypes, and zeros where those have."""

    @jax.jit
    def both(*operands):
        results = []
        for function in (ours, theirs):
            y, vjp = jax.vjp(function, *operands)
            results.append([y, *vjp(jnp.ones_like(y))])
        return results

    got, wanted = jax.device_get(both(*operands))
    assert [g.dtype for g in got[1:]] == [o.dtype for o in operands]
    for g, w in zip(got, wanted, strict=True):
        assert g.shape == w.shape
        np.testing.assert_array_equal(np.float32(g) != 0, np.float32(w) != 0)


class TestProducts:
    @pytest.mark.sampled(7)
    @pytest.mark.parametrize(  # of all recipes no rows, and no contraction; of two any shape
        ("recipe", "shape"),
        often(
            list(itertools.product(OFTEN, NOTHING)),
            [
                *itertools.product(OFTEN, NOTHING),
                *((name, shape) for name in RECIPES if name not in OFTEN for shape in NOTHING[-2:]),
            ],
            2,
        ),
        ids=str,
    )
    def test_linear(self, recipe, shape):
        recipe = RECIPES[recipe]
        x, w, bias = ones(shape, jnp.bfloat16), ones((shape[-1], 8)), ones(8)
        state = None if recipe is None else state_for(recipe)

        def ours(x, w, bias):
            return without_state(jlp.linear(x, w, bias, recipe=recipe, state=state), state)

        assert_as_in_jnp(ours, lambda x, w, bias: x @ w.astype(x.dtype) + bias.astype(x.dtype), x, w, bias)

    @pytest.mark.slow
    @pytest.mark.sampled(5)
    @pytest.mark.parametrize("recipe", often([RECIPES["nvfp4"]], RECIPES.values()), ids=RECIPES)
    @pytest.mark.parametrize(
        "lhs, rhs, dims",
        [
            ((2, 0, 4, 32), (2, 32, 8), (((3,), (1,)), ((0,), (0,)))),
            ((0, 3, 4, 32), (0, 32, 8), (((3,), (1,)), ((0,), (0,)))),
            ((32, 0), (32, 8), (((0,), (0,)), ((), ()))),
        ],
        ids=str,
    )
    def test_dot_general(self, recipe, lhs, rhs, dims):
        if isinstance(recipe, jlp.Int4QAT) and rhs[0] == 0:
            pytest.skip("no weights at all")
        x, w = ones(lhs, jnp.bfloat16), ones(rhs, jnp.bfloat16)
        state = None if recipe is None else state_for(recipe)

        def ours(x, w):
            return without_state(jlp.dot_general(x, w, dims, recipe=recipe, state=state), state)

        assert_as_in_jnp(ours, lambda x, w: jax.lax.dot_general(x, w, dims), x, w)

    @pytest.mark.parametrize(
        "name",
        often(["mxfp8"], ["mxfp8", "nvfp4", "fp8_block", "fp8_current", "int4_qat"]),
    )
    @pytest.mark.parametrize("rows, depth, features", [(0, 32, 8), (6, 0, 8), (6, 32, 0), (0, 0, 8)])
    def test_grouped_matmul(self, name, rows, depth, features):
        x, w = ones((rows, depth), jnp.bfloat16), ones((3, depth, features))
        sizes = jnp.asarray([2, 0, 4], jnp.int32)

        def ours(x, w):
            return jlp.grouped_matmul(x, w, sizes, recipe=RECIPES[name])

        assert_as_in_jnp(ours, lambda x, w: rows_product(x, w.astype(x.dtype), sizes, x.dtype), x, w)

    @pytest.mark.parametrize("fmt", often(OF_EACH_SCALING, [*ONE_OF_EACH, jlp.Int4(16)]), ids=format_name)
    @pytest.mark.parametrize("sizes", often([(6, 0, 8)], [(0, 32, 8), (6, 0, 8), (6, 32, 0)]), ids=str)
    def test_scaled_matmul_over_nothing_is_the_bias(self, fmt, sizes):
        m, k, n = sizes

        @jax.jit
        def products(x, w, bias):
            q = jlp.quantize(w, fmt)
            return [jlp.scaled_matmul(x, q, bias, implementation=i) for i in IMPLEMENTATIONS]

        for y in products(ones((2, m, k)), ones((2, n, k)), ones(n)):
            assert y.shape == (2, m, n)
            assert k or (np.asarray(y) == 1).all()


SHAPES = often([(0, 32), (2, 128, 0)], [(0, 32), (2, 128, 0), (0,), (32, 0), (2, 0, 32), (0, 0, 128, 32)])


class TestArrays:
    @pytest.mark.sampled(7)
    @pytest.mark.parametrize("fmt", [*ONE_OF_EACH, jlp.Int4(16), jlp.Int4(3, False, pad=True)], ids=format_name)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_quantise_and_dequantise(self, fmt, shape):
        if len(shape) == 1 and fmt.tiles:
            pytest.skip("vectors have no tiles")
        axes = (-1, -2)[: len(shape)]

        @jax.jit
        def run(x):
            gradient = jax.grad(lambda x: jlp.fake_quantize(x, fmt, ste="clipped").sum())(x)
            found = [[jlp.quantize(x, fmt, axis=axis, implementation=i) for axis in axes] for i in IMPLEMENTATIONS]
            decoded = [jlp.dequantize(q, implementation=i) for i in IMPLEMENTATIONS for q in found[0]]
            return found, [gradient, *decoded]

        (native, reference), arrays = run(ones(shape))
        assert {a.shape for a in (*native, *arrays)} == {shape}
        assert_same_bytes(native, reference)

    @pytest.mark.parametrize("fmt", often(OF_EACH_SCALING, ONE_OF_EACH), ids=format_name)
    @pytest.mark.parametrize("shape", often([(0, 128, 32)], [(0, 128, 32), (2, 0, 32)]), ids=str)
    def test_split_rows(self, fmt, shape):
        x = ones(shape)
        options = [{"rows_split": True, "implementation": i} for i in IMPLEMENTATIONS]
        both = jax.jit(lambda x: [jlp.quantize_both(x, fmt, **given) for given in options])
        results = both(x)
        assert_same_bytes(*results)
        assert [q.shape for q in results[0]] == [shape] * 2

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_the_scale_of_a_tensor_without_elements_is_one(self, implementation):
        q = jlp.quantize(jnp.ones((3, 0, 32)), jlp.Float8Tensor(), implementation=implementation)
        np.testing.assert_array_equal(q.scale, 1)


class TestLayers:
    @pytest.mark.parametrize("name", often(["fp8_block"], ["fp8_block", "nvfp4"]))
    @pytest.mark.parametrize("lead", often([(0,), (2, 0)], [(0,), (2, 0), (0, 3)]), ids=str)
    def test_nnx(self, name, lead):
        layers = [
            jlp.nnx.Linear(32, 8, rngs=nnx.Rngs(0)),
            jlp.nnx.LinearGeneral(32, (2, 4), rngs=nnx.Rngs(0)),
            jlp.nnx.Einsum("...d,dh->...h", (32, 8), (8,), rngs=nnx.Rngs(0)),
        ]

        @nnx.jit
        def gradients(layers, x):
            return nnx.grad(lambda layers: sum(layer(x).astype(jnp.float32).sum() for layer in layers))(layers)

        with jlp.autocast(RECIPES[name]):
            found = gradients(nnx.List(layers), jnp.ones((*lead, 32), jnp.bfloat16))
        assert not any(leaf.any() for leaf in jax.tree.leaves(found))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["nvfp4", "fp8_block"])
    def test_experts_without_tokens(self, name):
        moe = jlp.nnx.MoE(2, 32, 16, top_k=2, shared_hidden_features=8, rngs=nnx.Rngs(0))
        x = jnp.ones((2, 0, 32), jnp.bfloat16)
        with jlp.autocast(RECIPES[name]):
            y, aux = nnx.jit(lambda moe, x: moe(x))(moe, x)
            replayed, _ = nnx.jit(lambda moe, x, tape: moe(x, tape=tape))(moe, x, aux.tape)
        assert y.shape == replayed.shape == x.shape
        assert aux.tape.shape == (2, 0, 2) and not aux.group_sizes.any()

    def test_tapes_without_tokens(self):
        tape = jlp.moe.RoutingTape.afresh(3, (2, 0), k=2)
        tape.check(num_experts=4)
        assert jlp.moe.overlap(tape, tape).tokens.tolist() == [0, 0, 0]
        assert jlp.moe.RoutingTape.afresh(0, 8, k=2).experts.shape == (0, 8, 2)
