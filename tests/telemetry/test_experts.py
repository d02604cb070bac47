"""Experts within blocks that watch layers: telemetry, and `debug`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.ops.statistics.finish import SCALARS
from jaxlowprec.telemetry.taps import sketch
from tests.helpers import often, random_array
from tests.sharding.meshes import by_axis_type, mesh_of, place

NEAREST = jlp.NVFP4BlockScaling(disable_stochastic_rounding=True)
MXFP8 = jlp.MXFP8BlockScaling()
ROWS_OF_8_BITS = jlp.Int8RowScaling(disable_stochastic_rounding=True)
RECIPES = [NEAREST, MXFP8, jlp.Float8BlockScaling(), jlp.Float8CurrentScaling(), ROWS_OF_8_BITS, jlp.Float8RowScaling()]
ROWS, K, N = 150, 64, 96
X, DY = random_array((ROWS, K), "bfloat16", 1), random_array((ROWS, N), "bfloat16", 2)
W = random_array((4, K, N), "float32", 3)
SIZES = jnp.array([40, 0, 77, 20])
GEMMS = ["fprop", "dgrad", "wgrad"]
BLOCK_RANGE = SCALARS.index("block_range")
ALL = [*jlp.telemetry.TENSORS, *GEMMS]


def loss(w, x, sizes=SIZES, recipe=NEAREST, dy=DY):
    y = jlp.grouped_matmul(x, w, sizes, recipe=recipe, name="experts")
    return (y.astype(jnp.float32) * dy).sum()


@functools.cache
def loss_under(recipe):
    """One function for each recipe: what was compiled for it serves groups of any sizes, and later tests."""
    return functools.partial(loss, recipe=recipe)


@functools.cache
def compiled(function):
    """With telemetry, and without."""
    with_telemetry = jlp.telemetry.value_and_grad(function, (0, 1))
    return jax.jit(with_telemetry), jax.jit(jax.value_and_grad(function, (0, 1)))


def measured(function, *args):
    """What was found, read; also checks that it changes nothing else."""
    with_telemetry, without = compiled(function)
    actual, found = with_telemetry(*args)
    jax.tree.map(np.testing.assert_array_equal, actual, without(*args))
    return jlp.telemetry.read(found)


@pytest.mark.slow
def test_delayed_scaling_measures_by_the_scales_of_the_state():
    recipe = jlp.DelayedScaling()
    state = jlp.delayed_scaling.init_state(recipe, num_experts=4)

    def function(w, state, x):
        y, _ = jlp.grouped_matmul(x, w, SIZES, recipe=recipe, name="experts", state=state)
        return jnp.square(y.astype(jnp.float32)).mean()

    found = measured(function, W, state, 1000 * X)["experts"]
    assert found["input rowwise"].saturation > 0  # the first step's scale is 1
    assert list(found) == ALL


def forms_of(recipe):
    """The names of the quantised forms of rows, with their arrays, axes and roles."""
    roles = recipe.roles("grouped_linear")
    for tensor, rows in (("input", X), ("gradient", DY)):
        for direction, axis, role in zip(("rowwise", "columnwise"), (-1, -2), roles.forms(tensor), strict=True):
            yield f"{tensor} {direction}", rows, axis, role


@functools.partial(jax.jit, static_argnames=("axis", "role"))
def statistics_of(rows, axis, role):
    return jlp.telemetry.statistics(rows, quantized(rows, axis, role))


def quantized(rows, axis, role):
    rotation = (role.hadamard or False) if axis == -2 else False
    return jlp.quantize(rows, role.format, axis=axis, hadamard=rotation)


class TestTelemetry:
    @pytest.mark.parametrize(
        "recipe", often([MXFP8, RECIPES[3], ROWS_OF_8_BITS], RECIPES), ids=lambda r: type(r).__name__
    )
    @pytest.mark.parametrize("rows", [1, 37, 128, 150])
    def test_one_group_has_the_statistics_of_its_rows(self, recipe, rows):
        x = np.array(X)
        x[rows:] = np.nan  # rows in no group have no effect
        found = measured(loss_under(recipe), W, x, np.array([0, rows, 0, 0], np.int32))["experts"]
        assert list(found) == ALL
        for name, whole, axis, role in forms_of(recipe):
            expected = statistics_of(np.asarray(whole)[:rows], axis, role)
            actual, wanted = (np.array(s.values) for s in (found[name], expected))
            if axis == -2 and role.hadamard is None and rows % 128:
                actual[BLOCK_RANGE] = wanted[BLOCK_RANGE]  # with the zeros that fill a group's last block
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6, err_msg=name)

    @pytest.mark.slow
    @pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
    def test_groups_are_measured_as_one_tensor(self, recipe):
        found = measured(loss_under(recipe), W, X, SIZES)["experts"]
        ends = np.cumsum(SIZES)
        for name, whole, axis, role in forms_of(recipe):
            whole = np.asarray(whole)
            parts = [whole[end - size : end] for size, end in zip(np.asarray(SIZES), ends, strict=True) if size]
            each = [statistics_of(part, axis, role) for part in parts]
            elements = [-(-len(p) // 16) * 16 if role.hadamard and axis == -2 else len(p) for p in parts]
            share = np.array(elements) / sum(elements)
            for number in ("zeros", "underflow", "saturation", "nonfinite", "codes"):
                wanted = np.tensordot(share, np.stack([getattr(s, number) for s in each]), 1)
                np.testing.assert_allclose(getattr(found[name], number), wanted, rtol=1e-5, atol=1e-6, err_msg=number)
            assert found[name].smallest_scale == min(s.smallest_scale for s in each)
            assert found[name].largest_scale == max(s.largest_scale for s in each)
            energy = [float(np.square(np.float32(p)).sum()) for p in parts]
            error = np.dot(energy, [float(s.square_error) for s in each]) / sum(energy)
            np.testing.assert_allclose(found[name].square_error, error, rtol=1e-3)
            real = np.float32(whole[: ends[-1]])
            rms = float(np.sqrt(np.mean(real**2)))
            np.testing.assert_allclose(found[name].rms, rms, rtol=1e-5)
            np.testing.assert_allclose(found[name].outliers, (np.abs(real) > 6 * rms).mean(), rtol=1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize("recipe", [*RECIPES, jlp.Int4QAT(16)], ids=lambda r: type(r).__name__)
    def test_a_sample_of_everything_is_the_error_of_the_result(self, recipe):
        sizes = jnp.array([5, 0, 7, 4])
        x, w, dy = (random_array(s, "float32", i) for i, s in enumerate([(18, 16), (4, 16, 16), (18, 16)]))

        def results(recipe):
            y, backward = jax.vjp(lambda x, w: jlp.grouped_matmul(x, w, sizes, recipe=recipe), x, w)
            return y, *backward(dy)

        function = functools.partial(loss, sizes=sizes, recipe=recipe, dy=dy)
        found = measured(function, w, x)["experts"]
        gemms = ["fprop"] if isinstance(recipe, jlp.Int4QAT) else GEMMS
        assert [gemm for gemm in found if gemm in GEMMS] == gemms
        for gemm, actual, exact in zip(GEMMS, results(recipe), results(None), strict=True):
            if gemm in gemms:
                wanted = np.linalg.norm(np.float64(actual) - exact) / np.linalg.norm(exact)
                np.testing.assert_allclose(found[gemm].relative_error, wanted, rtol=1e-3, err_msg=gemm)
                assert (0.005 if recipe == ROWS_OF_8_BITS else 0.01) < wanted < 0.5  # integers are the most exact

    @pytest.mark.slow
    def test_a_sample_is_near_the_error_of_the_result(self):
        x, w = jax.random.normal(jax.random.key(0), (256, 128)), jax.random.normal(jax.random.key(1), (4, 128, 96))
        sizes, dy = jnp.array([90, 30, 0, 120]), jax.random.normal(jax.random.key(2), (256, 96))
        found = measured(functools.partial(loss, sizes=sizes, dy=dy), w, x)["experts"]
        actual, exact = (
            jax.vjp(lambda x, w, r=recipe: jlp.grouped_matmul(x, w, sizes, recipe=r), x, w)
            for recipe in (NEAREST, None)
        )
        pairs = zip((actual[0], *actual[1](dy)), (exact[0], *exact[1](dy)), strict=True)
        for gemm, (a, b) in zip(GEMMS, pairs, strict=True):
            assert found[gemm].relative_error == pytest.approx(
                float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)), rel=0.15
            ), gemm

    def test_without_rows_there_is_no_error(self):
        found = measured(loss_under(MXFP8), W, X, np.zeros(4, np.int32))["experts"]
        for name in ALL:
            assert np.isfinite(found[name].values[:10]).all() or name in GEMMS
            assert found[name].relative_error == 0 or name.startswith("weight")

    def test_what_if(self):
        found = jax.jit(jlp.telemetry.value_and_grad(loss, what_if={"mxfp8": MXFP8}))(W, X)[1]
        found = jlp.telemetry.read(found)["experts"]
        alone = measured(loss_under(MXFP8), W, X, SIZES)["experts"]
        for name in jlp.telemetry.TENSORS:
            np.testing.assert_allclose(found[f"{name}, mxfp8"].values, alone[name].values, rtol=1e-6, atol=1e-7)

    def test_what_if_of_something_that_groups_cannot_have(self):
        tiles = jlp.Custom(lambda role: jlp.NVFP4((16, 16)))
        with pytest.raises(ValueError, match="grouped_matmul: telemetry's what_if 'tiles': the recipe quantises"):
            jax.eval_shape(jlp.telemetry.value_and_grad(loss, what_if={"tiles": tiles}), W, X)

    @pytest.mark.slow
    def test_only_what_is_quantised_is_there(self):
        recipe = jlp.PerGemm(fprop=MXFP8, dgrad=None, wgrad=None)
        found = measured(functools.partial(loss, recipe=recipe), W, X)["experts"]
        assert list(found) == ["input rowwise", "weight columnwise", "fprop"]
        recipe = jlp.NVFP4BlockScaling(forward_override="high_precision")
        others = measured(functools.partial(loss, recipe=recipe), W, X)["experts"]
        assert list(others) == [name for name in ALL if name not in found]


class TestTransformations:
    @pytest.mark.slow
    @pytest.mark.parametrize("remat", [False, True])
    def test_a_scan_gives_each_layer_of_the_stack(self, remat):
        stack, sizes = jnp.stack([W, W / 2]), jnp.stack([SIZES, SIZES[::-1]])

        def block(total, layer):
            w, sizes, index = layer
            with jlp.telemetry.stacked(index, of=2):
                return total + loss(w, X, sizes), None

        def function(stack, x):
            del x
            layers = stack, sizes, jnp.arange(2)
            return jax.lax.scan(jax.checkpoint(block) if remat else block, jnp.float32(0), layers)[0]

        found = measured(function, stack, X)
        for i in range(2):
            alone = measured(loss_under(NEAREST), stack[i], X, sizes[i])["experts"]
            for name in ALL:
                np.testing.assert_allclose(
                    found[f"experts[{i}]"][name].values, alone[name].values, rtol=1e-5, atol=1e-6, err_msg=name
                )

    @pytest.mark.slow
    def test_vmap_is_the_mean(self):
        def function(w, xs):
            return jax.vmap(loss, (None, 0, 0))(w, xs, jnp.stack([SIZES, SIZES[::-1]])).sum()

        found = measured(function, W, jnp.stack([X, 3 * X]))["experts"]
        both = ((SIZES, X), (SIZES[::-1], 3 * X))
        alone = [measured(loss_under(NEAREST), W, x, sizes)["experts"] for sizes, x in both]
        for name in ALL:
            assert found[name].uses == 2
            wanted = np.mean([each[name].scalars()["relative_error"] ** 2 for each in alone])
            np.testing.assert_allclose(found[name].square_error, wanted, rtol=1e-5, err_msg=name)

    @pytest.mark.slow
    @by_axis_type
    @pytest.mark.parametrize("spec", [P(None, None, "a"), P(None, "a"), P("a")], ids=str)
    def test_are_those_of_one_device(self, spec, axis_type):
        mesh, expected = mesh_of((2,), axis_type), measured(loss_under(NEAREST), W, X, SIZES)["experts"]
        with jax.set_mesh(mesh):

            def function(w, x):
                y = jlp.grouped_matmul(x, w, SIZES, recipe=NEAREST, name="experts").astype(jnp.float32)
                same = jax.typeof(y).sharding.mesh.explicit_axes
                return (y * (jax.sharding.reshard(DY, jax.typeof(y).sharding) if same else DY)).sum()

            found = measured(function, place(W, mesh, spec), place(X, mesh, P()))["experts"]
        for name in ALL:
            np.testing.assert_allclose(found[name].values, expected[name].values, rtol=1e-4, atol=1e-5, err_msg=name)

    @pytest.mark.slow
    def test_within_shard_map_they_are_of_all_experts(self):
        mesh, sizes = mesh_of((2,)), jnp.array([20, 17, 60, 4])
        x, dy = X[:128], DY[:128]

        def local(w, x, sizes, dy):
            return jax.lax.psum(loss(w, x, sizes, MXFP8, dy), "a")

        def function(w, x):
            return jax.shard_map(local, mesh=mesh, in_specs=P("a"), out_specs=P())(w, x, sizes, dy)

        found = measured(function, W, x)["experts"]
        rows = jnp.concatenate([jnp.arange(37), 64 + jnp.arange(64)])  # those of groups, of both devices
        whole = functools.partial(loss, sizes=sizes, recipe=MXFP8, dy=dy[rows])
        expected = measured(whole, W, x[rows])["experts"]
        for name in jlp.telemetry.TENSORS:
            numbers = found[name].scalars()
            for number, value in expected[name].scalars().items():
                np.testing.assert_allclose(numbers[number], value, rtol=1e-4, atol=1e-6, err_msg=f"{name} {number}")
        for gemm in GEMMS:  # each device samples rows of its own
            np.testing.assert_allclose(found[gemm].relative_error, expected[gemm].relative_error, rtol=0.6)


@pytest.mark.slow
def test_a_layer_of_experts_is_measured_by_its_names():
    moe = jlp.nnx.MoE(4, 32, 64, top_k=2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    jlp.nnx.name_layers(moe)
    graph, params = nnx.split(moe)
    x = random_array((24, 32), "bfloat16", 4)

    def function(params, x):
        return jnp.square(nnx.merge(graph, params)(x)[0].astype(jnp.float32)).mean()

    with jlp.autocast(NEAREST):
        found = jlp.telemetry.read(jax.jit(jlp.telemetry.value_and_grad(function))(params, x)[1])
    assert sorted(found) == ["experts/down_proj", "experts/gate_proj", "experts/up_proj"]
    assert all(list(tensors) == ALL and tensors["fprop"].relative_error > 0.01 for tensors in found.values())


class TestDebug:
    SIZES = jnp.array([40, 0, 17])
    X = jax.random.normal(jax.random.key(0), (64, 64), jnp.bfloat16)
    W = jax.random.normal(jax.random.key(1), (3, 64, 32)) / 8

    def loss(self, w, x):
        y = jlp.grouped_matmul(x, w, self.SIZES, recipe=MXFP8, name="experts")
        return jnp.square(y.astype(jnp.float32)).mean()

    def test_a_trace_has_what_experts_read_and_their_gradients(self):
        found = jlp.debug.trace(self.loss, self.W, self.X).layers["experts"]
        real = jnp.where(jnp.arange(64)[:, None] < self.SIZES.sum(), self.X, 0)
        dw, dx = jax.jit(jax.grad(self.loss, argnums=(0, 1)))(self.W, self.X)
        for seen, expected in ((found[0, 0], real), (found[1, 0], self.W), (found[0, 1], dx), (found[1, 1], dw)):
            np.testing.assert_allclose(seen, sketch(expected), rtol=1e-4, atol=1e-5)

    def test_rows_after_the_last_group_are_not_bad(self):
        assert jlp.debug.trace(self.loss, self.W, self.X.at[60].set(jnp.nan)).layers["experts"][:, :, 0].sum() == 0

    def test_high_precision_differs_by_the_quantisation(self):
        trace = functools.partial(jlp.debug.trace, self.loss, self.W, self.X)
        errors = {d.tensor: d.error for d in jlp.debug.compare(trace(), trace(high_precision=True))}
        assert errors["input"] == errors["weight"] == 0
        assert 0 < errors["result"] < 0.1
