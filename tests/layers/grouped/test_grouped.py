"""grouped_matmul under every recipe: a loop of linear, bit for bit, in one call."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.layers.residuals import CHECKPOINT_NAMES
from jaxlowprec.ops.quantize.random_bits import key_words, slice_words
from jaxlowprec.recipes.roles import GEMMS
from tests.helpers import assert_same_bytes, often, random_array
from tests.low_precision import STRUCTURES, recipes
from tests.products import kept
from tests.sharding.meshes import by_axis_type, mesh_of, place

RECIPES = {name: recipe for name, recipe in STRUCTURES.items() if name not in ("bf16", "fp8_delayed")}
RECIPES |= {
    "int8_rows": jlp.Int8RowScaling(),
    "fp8_rows": jlp.Float8RowScaling(fp8_format="HYBRID"),
    "w4a8": jlp.WeightQAT(jlp.Int4(32), activation_format=jlp.Int8Rows()),
}
ON_MESHES = recipes("nvfp4", "mxfp8", "fp8_block", "fp8_current", "int4_qat")
by_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
SIZES = {
    "uneven": (40, 0, 1, 64, 33),
    "one takes all": (0, 150, 0, 0, 0),
    "single tokens": (1, 1, 1, 1, 1),
}
ROWS, K, N, E = 150, 96, 80, 5
KEY = jax.random.key(3)


@functools.cache
def operands(dtype="bfloat16"):
    """X, the kernels, the bias and the gradient of the result."""
    return (
        random_array((ROWS, K), dtype),
        random_array((E, K, N), "float32", 1),
        random_array((E, N), "float32", 2),
        random_array((ROWS, N), dtype, 3),
    )


@functools.partial(jax.jit, static_argnames="recipe")
def step(recipe, x, w, bias, dy, sizes, key):
    y, vjp = jax.vjp(lambda *a: jlp.grouped_matmul(*a[:2], sizes, a[2], recipe=recipe, key=key), x, w, bias)
    return y, *vjp(dy)


def results(recipe, sizes, key=KEY, values=None):
    """y, dx, dw and the gradient of the bias: one program for all sizes, keys and values of a shape."""
    x, w, bias, dy = values or operands()
    return jax.device_get(step(recipe, x, w, bias, dy, np.asarray(sizes, np.int32), key))


@functools.partial(jax.jit, static_argnames=("recipe", "sizes"))
def step_of_linears(recipe, sizes, x, w, bias, dy):
    words = slice_words(key_words("test", KEY, ()), (E,))
    y, dx, dw, dbias = (jnp.zeros_like(a) for a in (dy, x, w, bias))
    first = 0
    for e, size in enumerate(sizes):
        if size == 0:
            continue
        rows = slice(first, first + size)
        one, vjp = jax.vjp(
            lambda *a, e=e: jlp.linear(*a, recipe=recipe, key=words[e]), x[rows], w[e], bias[e]
        )  # fmt: skip
        gx, gw, gb = vjp(dy[rows])
        y, dx, dw, dbias = y.at[rows].set(one), dx.at[rows].set(gx), dw.at[e].set(gw), dbias.at[e].set(gb)
        first += size
    return y, dx, dw, dbias


def loop_of_linear(recipe, sizes):
    return jax.device_get(step_of_linears(recipe, sizes, *operands()))


class TestAgainstALoopOfLinear:
    @pytest.mark.sampled(7)
    @by_recipe
    @pytest.mark.parametrize("case", often(["uneven"], SIZES))
    def test_results_and_gradients_have_the_same_bytes(self, recipe, case):
        """XLA adds products in high precision up in an order that depends on their shape."""
        ours, theirs = results(recipe, SIZES[case]), loop_of_linear(recipe, SIZES[case])
        roles = recipe.roles("grouped_linear", "")
        quantized = [isinstance(roles.operands(gemm, recipe.backward_override), tuple) for gemm in GEMMS]
        quantized[0] |= roles.ste is not None and roles.weight is not None
        for a, b in itertools.compress(zip(ours, theirs, strict=True), quantized):
            assert_same_bytes(a, b)
        for a, b in zip(ours, theirs, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            a, b = np.float32(a), np.float32(b)
            np.testing.assert_allclose(a, b, rtol=2**-7, atol=2**-7 * np.abs(b).max())

    def test_without_a_recipe(self):
        """The bias's gradient is summed in float32, where XLA's of a bfloat16 sum is not."""
        ours, theirs = results(None, SIZES["uneven"]), loop_of_linear(None, SIZES["uneven"])
        for a, b in zip(ours[:3], theirs[:3], strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2**-6, atol=2**-5)
        dy = np.float64(operands()[3])
        np.testing.assert_allclose(ours[3][3], dy[41:105].sum(axis=0), rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    def test_other_dtypes(self, dtype):
        x, w, bias, dy = operands(dtype)
        y, dx, dw, dbias = results(RECIPES["nvfp4"], SIZES["uneven"], values=(x, w, bias, dy))
        assert [a.dtype.name for a in (y, dx, dw, dbias)] == [dtype, dtype, "float32", "float32"]
        first = jax.jit(lambda: jlp.linear(x[:40], w[0], bias[0], recipe=RECIPES["nvfp4"]))
        assert_same_bytes(y[:40], first())


class TestGroups:
    @pytest.mark.sampled(7)
    @by_recipe
    @pytest.mark.parametrize("key", [KEY, None], ids=["key", "keyless"])
    def test_an_expert_does_not_depend_on_the_others_tokens(self, recipe, key):
        """Nor does it if they are not even numbers."""
        x, w, bias, dy = operands()
        other_x, other_dy = np.array(x), np.array(dy)
        other_x[:40], other_x[41:105] = -3 * other_x[:40], np.nan
        other_dy[:40], other_dy[41:105] = 7, np.inf
        other = other_x, w, bias, other_dy
        a, b = results(recipe, SIZES["uneven"], key), results(recipe, SIZES["uneven"], key, other)
        for i, rows in ((0, slice(40, 41)), (0, slice(105, 138)), (1, slice(40, 41)), (1, slice(105, 138))):
            assert_same_bytes(a[i][rows], b[i][rows])
        for i in (2, 3):
            assert_same_bytes(a[i][[1, 2, 4]], b[i][[1, 2, 4]])
        assert not np.isfinite(np.float32(b[0][50])).any()

    @by_recipe
    def test_rows_in_no_group_and_empty_groups_give_zeros(self, recipe):
        y, dx, dw, dbias = results(recipe, SIZES["uneven"])
        for nothing in (y[138:], dx[138:], dw[1], dbias[1]):
            assert not np.float32(nothing).any()
        for something in (y[:138], dx[:138], dw[0], dbias[0]):
            assert np.float32(something).any()

    @pytest.mark.parametrize("recipe", often([RECIPES["mxfp8"]], RECIPES.values()), ids=RECIPES)
    def test_no_rows_at_all(self, recipe):
        x, w, bias, dy = operands()
        y, dx, dw, dbias = results(recipe, (0,) * E, values=(x[:0], w, bias, dy[:0]))
        assert (y.shape, dx.shape, dw.shape, dbias.shape) == ((0, N), (0, K), w.shape, bias.shape)
        assert not np.float32(dw).any() and not np.float32(dbias).any()

    def test_sizes_are_no_reason_to_compile_again(self):
        x, w, *_ = operands()
        step = jax.jit(lambda sizes: jlp.grouped_matmul(x, w, sizes, recipe=RECIPES["mxfp8"]))
        for sizes in SIZES.values():
            step(np.asarray(sizes, np.int32))
        assert step._cache_size() == 1

    @pytest.mark.parametrize(
        ("sizes", "cut"), [((200, 1, 1, 1, 1), (150, 0, 0, 0, 0)), ((-5, 40, -1, 0, 500), (0, 40, 0, 0, 110))]
    )
    def test_senseless_sizes_on_the_device_are_cut_to_the_rows(self, sizes, cut):
        assert_same_bytes(*(results(RECIPES["mxfp8"], given)[0] for given in (sizes, cut)))

    @pytest.mark.parametrize(
        "dtype, sizes, cut",
        [
            ("int64", (2**32 + 5, 1, 1, 1, 1), (150, 0, 0, 0, 0)),
            ("int64", (40, -(2**32) + 7, 2**40, 0, 3), (40, 0, 110, 0, 0)),
            ("uint32", (3_000_000_000, 1, 0, 0, 0), (150, 0, 0, 0, 0)),
            ("uint64", (0, 2**63 + 3, 1, 0, 0), (0, 150, 0, 0, 0)),
            ("int8", (100, -128, 30, 127, 0), (100, 0, 30, 20, 0)),
            ("uint8", (40, 0, 1, 200, 0), (40, 0, 1, 109, 0)),
        ],
    )
    def test_sizes_of_any_width_are_cut_not_wrapped(self, dtype, sizes, cut):
        x, w, *_ = operands()
        with jax.enable_x64(True):
            run = jax.jit(lambda sizes: jlp.grouped_matmul(x, w, sizes, recipe=None))
            assert_same_bytes(run(np.asarray(sizes, dtype)), run(np.asarray(cut, dtype)))

    @pytest.mark.parametrize("make", [np.asarray, tuple, list])
    def test_known_sizes_are_checked_before_they_are_narrowed(self, make):
        x, w, *_ = operands()
        for sizes in ((2**32 + 5, 0, 0, 0, 0), (2**62, 2**62, 2**62, 2**62, 1)):
            with pytest.raises(ValueError, match=f"group_sizes sum up to {sum(sizes)}, and there are 150 rows"):
                jlp.grouped_matmul(x, w, make(sizes), recipe=None)


class TestKeys:
    def test_keys_and_no_key_give_different_bits_each_reproducibly(self):
        runs = [results(RECIPES["nvfp4"], SIZES["uneven"], key)[2] for key in (KEY, KEY, None, None, jax.random.key(4))]
        assert_same_bytes(runs[0], runs[1])
        assert_same_bytes(runs[2], runs[3])
        assert len({np.asarray(r).tobytes() for r in runs}) == 3

    def test_keyless_bits_differ_between_layers_of_different_names(self):
        x, w, _, dy = operands()
        sizes = jnp.asarray(SIZES["uneven"])

        def dw(name):
            loss = lambda w: jlp.grouped_matmul(x, w, sizes, recipe=RECIPES["nvfp4"], name=name)  # noqa: E731
            return jax.vjp(loss, w)[1](dy)[0]

        assert jax.jit(lambda: (dw("a") != dw("b")).any())()


class TestTransformations:
    @pytest.mark.sampled(7)
    @by_recipe
    def test_remat_gives_the_same_bytes(self, recipe):
        x, w, bias, dy = operands()
        sizes = jnp.asarray(SIZES["uneven"])
        layer = lambda x, w: jlp.grouped_matmul(x, w, sizes, bias, recipe=recipe)  # noqa: E731
        policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
        _, *plain, _ = results(recipe, SIZES["uneven"], None)
        for remat in (jax.checkpoint(layer), jax.checkpoint(layer, policy=policy)):
            assert_same_bytes(jax.jit(lambda f=remat: jax.vjp(f, x, w)[1](dy))(), plain)

    def test_scan_over_layers_and_vmap(self):
        x, w, _, _ = operands()
        recipe, sizes = RECIPES["nvfp4"], jnp.asarray([SIZES["uneven"], SIZES["one takes all"]])
        kernels = jnp.stack([w[..., :K], w[..., ::-1][..., :K]]) if N >= K else jnp.stack([w, w[::-1]])
        layer = jax.jit(functools.partial(jlp.grouped_matmul, recipe=recipe))
        expected = np.stack([layer(x, kernels[i], sizes[i]) for i in range(2)])
        _, scanned = jax.lax.scan(lambda c, a: (c, layer(x, *a)), 0, (kernels, sizes))
        assert_same_bytes(scanned, expected)
        assert_same_bytes(jax.vmap(lambda w, s: layer(x, w, s))(kernels, sizes), expected)

    def test_what_is_kept_for_the_backward_pass_is_quantised(self):
        x, w, *_ = operands()
        sizes = jnp.asarray(SIZES["uneven"])
        found = kept(lambda x, w: jlp.grouped_matmul(x, w, sizes, recipe=RECIPES["nvfp4"]), x, w)
        assert sum(leaf.size * leaf.dtype.itemsize for leaf in found) < 0.4 * (x.nbytes + w.nbytes / 2)

    def test_high_precision_is_differentiated_twice(self):
        x, w = (a.astype(jnp.float32) for a in operands()[:2])
        sizes = jnp.asarray(SIZES["uneven"], jnp.int32)

        def masked(x, w, sizes):
            """JAX differentiates its ragged_dot once."""
            ends = jnp.cumsum(sizes)
            row = jnp.arange(ROWS)[:, None]
            mine = ((row >= ends - sizes) & (row < ends)).astype(jnp.float32)
            return jnp.einsum("te,tk,ekn->tn", mine, x, w)

        def gradient_norm(product):
            loss = lambda x, w: jnp.sin(product(x, w, sizes)).sum()  # noqa: E731
            return lambda x, w: sum(jnp.vdot(g, g) for g in jax.grad(loss, (0, 1))(x, w))

        ours, theirs = (
            jax.jit(jax.grad(gradient_norm(product), (0, 1)))(x / 10, w)
            for product in (functools.partial(jlp.grouped_matmul, recipe=None), masked)
        )
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3 * float(jnp.abs(b).max()))

    def test_a_second_derivative_under_a_recipe_is_an_error(self):
        x, w, *_ = operands()
        loss = lambda x: jlp.grouped_matmul(x, w, jnp.asarray(SIZES["uneven"]), recipe=RECIPES["mxfp8"]).sum()  # noqa: E731
        with pytest.raises(NotImplementedError, match="no second derivative"):
            jax.eval_shape(jax.grad(lambda x: jax.grad(loss)(x).astype(jnp.float32).sum()), x)


class TestRaggedDot:
    @pytest.mark.parametrize("preferred", [None, "float32"])
    @pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")])
    def test_is_jaxs_without_a_recipe(self, dtypes, preferred):
        x, w = (np.asarray(a).astype(d) for a, d in zip(operands()[:2], map(jnp.dtype, dtypes), strict=True))
        sizes = np.asarray(SIZES["uneven"], np.int32)
        both = (jlp.ragged_dot, jax.lax.ragged_dot)
        ours, theirs = jax.jit(lambda: [f(x, w, sizes, preferred_element_type=preferred) for f in both])()
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=2**-6, atol=1e-2)

    def test_follows_the_contexts_recipe(self):
        x, w, *_ = operands()
        sizes = jnp.asarray(SIZES["uneven"])
        recipe = RECIPES["mxfp8"]

        @jax.jit
        def both():
            with jlp.autocast(recipe):
                ours = jlp.ragged_dot(x, w, sizes)
            return ours, jlp.grouped_matmul(x, w, sizes, recipe=recipe, preferred_element_type=jnp.float32)

        ours, expected = both()
        assert ours.dtype == jnp.float32
        assert_same_bytes(ours, expected)

    @pytest.mark.parametrize("recipe", [None, RECIPES["mxfp8"]], ids=["bf16", "mxfp8"])
    def test_is_split_as_out_sharding_says(self, recipe):
        mesh, (x, w, *_) = mesh_of((2,), AxisType.Explicit), operands()
        sizes = jnp.asarray(SIZES["uneven"])
        with contextlib.nullcontext() if recipe is None else jlp.autocast(recipe):
            expected = jax.jit(jlp.ragged_dot)(x, w, sizes)
            with jax.set_mesh(mesh):
                split = jax.jit(functools.partial(jlp.ragged_dot, out_sharding=P(None, "a")))
                found = split(*(place(a, mesh, P()) for a in (x, w, sizes)))
        assert found.sharding.spec == P(None, "a")
        if recipe is None:  # the bytes of XLA's own product depend on its shape, on some processors
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
        else:
            assert_same_bytes(found, expected)
        with pytest.raises(TypeError, match="ragged_dot: out_sharding="):
            jlp.ragged_dot(x, w, sizes, out_sharding="a")


class TestLoadedKernels:
    def test_serve_what_quantisation_aware_training_trains(self):
        x, w, bias, _ = operands()
        recipe, sizes = jlp.Int4QAT(group_size=16), jnp.asarray(SIZES["uneven"])
        loaded = jlp.quantize_kernel(w, recipe).columnwise

        @jax.jit
        def results():
            products = [jlp.grouped_matmul(x, w, sizes, bias, recipe=recipe)]
            products += [jlp.grouped_matmul(x, loaded, sizes, bias, recipe=r) for r in (None, recipe)]
            return products, jax.grad(lambda x: jlp.grouped_matmul(x, loaded, sizes).astype(jnp.float32).sum())(x)

        (trained, *served), dx = results()
        for y in served:
            assert_same_bytes(y, trained)
        assert dx.dtype == x.dtype and np.float32(dx[:138]).any()


class TestMeshes:
    """Rows and groups stay whole; features and what is contracted are split."""

    @pytest.mark.sampled(7)
    @by_axis_type
    @pytest.mark.parametrize("name", often(["nvfp4"], ON_MESHES))
    @pytest.mark.parametrize("spec", [P(None, None, "a"), P(None, "a"), P("a")], ids=str)
    def test_split_kernels_give_the_numbers_of_one_device(self, name, spec, axis_type):
        x, w = random_array((ROWS, 256)), random_array((4, 256, 512), "float32", 1)
        dy, sizes, mesh = random_array((ROWS, 512), seed=2), jnp.asarray([40, 0, 77, 33]), mesh_of((2,), axis_type)

        def run(x, w, dy, sizes):
            y, vjp = jax.vjp(lambda x, w: jlp.grouped_matmul(x, w, sizes, recipe=ON_MESHES[name], key=KEY), x, w)
            if jax.typeof(y).sharding.mesh.explicit_axes:
                dy = jax.sharding.reshard(dy, jax.typeof(y).sharding)
            return y, *vjp(dy)

        expected = jax.jit(run)(x, w, dy, sizes)
        with jax.set_mesh(mesh):
            whole = [place(a, mesh, P()) for a in (x, dy, sizes)]
            y, dx, dw = jax.jit(run)(whole[0], place(w, mesh, spec), *whole[1:])
        for a, b in zip((y, dx, dw), expected, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2**-7, atol=2**-7 * float(jnp.abs(b).max()))
        if spec == P(None, None, "a") and name != "int4_qat":
            assert_same_bytes((y, dw), (expected[0], expected[2]))  # nothing is added up over devices

    def test_within_shard_map_each_device_has_its_experts(self):
        """Expert parallelism by hand: tokens travel, weights do not."""
        x, w, *_ = operands()
        mesh, recipe = mesh_of((2,)), RECIPES["nvfp4"]
        x, w, sizes = x[:128], w[:4], jnp.asarray([20, 44, 60, 4])

        def local(x, w, sizes):
            return jlp.grouped_matmul(x, w, sizes, recipe=recipe)

        mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("a"), out_specs=P("a")))
        assert_same_bytes(mapped(x, w, sizes), jax.jit(local)(x, w, sizes))


class TestErrors:
    @pytest.mark.parametrize(
        "change, error, message",
        [
            ({"lhs": jnp.ones((2, 3, K))}, ValueError, r"lhs \[T, K\]"),
            ({"rhs": jnp.ones((E, K + 1, N))}, ValueError, r"rhs \[E, K, N\]"),
            ({"group_sizes": jnp.ones(E - 1, jnp.int32)}, ValueError, r"group_sizes \[E\]"),
            ({"group_sizes": jnp.ones(E)}, TypeError, "needs integers"),
            ({"group_sizes": np.full(E, 100)}, ValueError, "sum up to 500, and there are 150 rows"),
            ({"lhs": jnp.ones((3, K), jnp.int32)}, TypeError, "bfloat16, float16 or float32"),
            ({"bias": jnp.ones(N)}, ValueError, r"bias has shape \(80,\); needs \(5, 80\)"),
            ({"recipe": jlp.DelayedScaling()}, ValueError, r"pass state=.*init_state\(recipe, num_experts=5\)"),
            (
                {"recipe": jlp.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)},
                ValueError,
                "square tiles",
            ),
            ({"recipe": "nvfp4"}, TypeError, "needs a recipe"),
            ({"recipe": jlp.Int4QAT(group_size=128)}, ValueError, "not a multiple of the group of 128"),
        ],
    )
    def test_say_what_is_needed(self, change, error, message):
        x, w, *_ = operands()
        given = {"lhs": x, "rhs": w, "group_sizes": jnp.asarray(SIZES["uneven"]), "recipe": None} | change
        with pytest.raises(error, match=message):
            jlp.grouped_matmul(**given)

    def test_a_rotation_that_groups_cannot_have(self):
        x, w, *_ = operands()
        rotated = jlp.QParams(random_hadamard_transform=True)
        recipe = jlp.Float8CurrentScaling(fp8_quant_fwd_inp=rotated, fp8_quant_bwd_grad=rotated)
        with pytest.raises(ValueError, match="rotation of size 16"):
            jlp.grouped_matmul(x, w, jnp.asarray(SIZES["uneven"]), recipe=recipe)

    def test_a_rotation_of_dgrad(self):
        x, w, *_ = operands()
        recipe = jlp.NVFP4Eden(scale_rule="six", eden="gradient", rotation=16, signs="fixed")
        with pytest.raises(
            ValueError, match=r"rotates the weight by Hadamard\(16\) in dgrad; layers of experts rotate"
        ):
            jlp.grouped_matmul(x, w, jnp.asarray(SIZES["uneven"]), recipe=recipe)

    @pytest.mark.parametrize(
        ("roles", "message"),
        [
            ({"weight": jlp.MXFP8()}, "there is no GEMM of formats scaled differently"),
            ({"grad_output": jlp.MXFP8()}, "there is no GEMM of formats scaled differently"),
        ],
    )
    def test_a_pair_without_a_gemm_raises_when_traced(self, roles, message):
        x, w, *_ = operands()
        recipe = jlp.Custom(lambda role: roles.get(role.tensor_type, jlp.NVFP4()))
        loss = lambda x, w: jlp.grouped_matmul(x, w, jnp.asarray(SIZES["uneven"]), recipe=recipe).sum()  # noqa: E731
        with pytest.raises((ValueError, NotImplementedError), match=f"grouped_matmul: .*{message}"):
            jax.eval_shape(jax.grad(loss, (0, 1)), x, w)
