"""Statistics leave a training step as the gradient of a state, whatever the step is made of."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.telemetry import measures
from tests.helpers import random_array
from tests.sharding.meshes import by_axis_type, mesh_of, place

pytestmark = pytest.mark.sampled(3)
NVFP4, MXFP8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling()
X = random_array((64, 32), "bfloat16", 1)
PARAMS = {"up": random_array((32, 64), "float32", 2), "down": random_array((64, 32), "float32", 3)}
OTHERS = [jlp.Float8BlockScaling(), jlp.Float8CurrentScaling(), jlp.Int4QAT(32)]
TENSORS, GEMMS = list(jlp.telemetry.TENSORS), ["fprop", "dgrad", "wgrad"]
ALL = [*TENSORS, *GEMMS]


def model(params, x, recipe=NVFP4):
    hidden = jax.nn.gelu(jlp.linear(x, params["up"], recipe=recipe, name="up"))
    return jlp.linear(hidden, params["down"], recipe=recipe, name="down")


def loss(params, x, recipe=NVFP4):
    return jnp.square(model(params, x, recipe).astype(jnp.float32)).mean()


@functools.cache
def compiled(function, on):
    """With telemetry, and without; what was compiled for a function serves later tests."""
    return jax.jit(jlp.telemetry.value_and_grad(function, on=on)), jax.jit(jax.value_and_grad(function))


def measured(function, *args, on=True):
    """What jlp.telemetry.value_and_grad finds, read; also checks that it changes nothing else."""
    with_telemetry, without = compiled(function, on)
    actual, found = with_telemetry(*args)
    jax.tree.map(np.testing.assert_array_equal, actual, without(*args))
    return jlp.telemetry.read(found)


def assert_same(actual, expected, **tolerance):
    """Statistics by layer and tensor are equal."""
    assert {k: list(v) for k, v in actual.items()} == {k: list(v) for k, v in expected.items()}
    for layer, tensors in expected.items():
        for tensor, found in tensors.items():
            options = {"rtol": 1e-5, "atol": 1e-6, "err_msg": f"{layer} {tensor}"} | tolerance
            np.testing.assert_allclose(actual[layer][tensor].values, found.values, **options)


class TestLayers:
    @pytest.mark.slow
    def test_every_operand_of_every_gemm_is_measured(self):
        found = measured(loss, PARAMS, X)
        assert {layer: list(tensors) for layer, tensors in found.items()} == {"up": ALL, "down": ALL}
        fmt, tiles = jlp.NVFP4(), jlp.NVFP4((16, 16))
        expected = {
            "input rowwise": measures.statistics(X, jlp.quantize(X, fmt)),
            "input columnwise": measures.statistics(X, jlp.quantize(X, fmt, axis=-2, hadamard=True)),
            "weight columnwise": measures.statistics(PARAMS["up"], jlp.quantize(PARAMS["up"], tiles, axis=-2)),
        }
        for tensor, statistics in expected.items():
            np.testing.assert_allclose(found["up"][tensor].values, statistics.values, rtol=1e-6, atol=1e-7)

    @pytest.mark.slow
    def test_the_gradient_is_that_of_the_result(self):
        def function(params, x):
            return (model(params, x, MXFP8) * weights).sum()

        weights = random_array((64, 32), "bfloat16", 5)
        found = measured(function, PARAMS, X)["down"]["gradient rowwise"]
        expected = measures.statistics(weights, jlp.quantize(weights, jlp.MXFP8()))
        np.testing.assert_allclose(found.values, expected.values, rtol=1e-6)

    def test_a_tensor_that_is_not_quantised_is_not_there(self):
        recipe = jlp.PerGemm(fprop=NVFP4, dgrad=None, wgrad=None)
        found = measured(functools.partial(loss, recipe=recipe), PARAMS, X)
        assert list(found["up"]) == ["input rowwise", "weight columnwise", "fprop"]

    def test_of_fprop_in_high_precision_the_other_gemms_are_there(self):
        recipe = jlp.NVFP4BlockScaling(forward_override="high_precision")
        found = measured(functools.partial(loss, recipe=recipe), PARAMS, X)["up"]
        assert list(found) == [name for name in ALL if name not in ("input rowwise", "weight columnwise", "fprop")]
        with_fprop = measured(loss, PARAMS, X)["up"]
        for name in ("input columnwise", "weight rowwise"):
            np.testing.assert_allclose(found[name].values, with_fprop[name].values, rtol=1e-6, atol=1e-7)

    def test_layers_without_a_recipe_are_not_there(self):
        recipe = jlp.PerLayer([("up", NVFP4)], None)
        assert list(measured(functools.partial(loss, recipe=recipe), PARAMS, X)) == ["up"]

    @pytest.mark.slow
    def test_nothing_is_measured_on_other_steps(self):
        assert measured(loss, PARAMS, X, on=False) == {}

        @jax.jit
        def step(params, number):
            _, found = jlp.telemetry.value_and_grad(loss, on=number % 10 == 0)(params, X)
            return found

        assert [bool(jlp.telemetry.read(step(PARAMS, number))) for number in (10, 11, 20)] == [True, False, True]

    def test_what_is_not_differentiated_is_not_there(self):
        def function(params, x):
            return model(jax.lax.stop_gradient(params), x).sum() * 0 + params["up"].sum()

        assert measured(lambda params, x: jax.lax.stop_gradient(function(params, x)), PARAMS, X) == {}

    @pytest.mark.parametrize("recipe", OTHERS, ids=lambda r: type(r).__name__)
    def test_other_recipes(self, recipe):
        found = measured(functools.partial(loss, recipe=recipe), PARAMS, X)
        assert set(found) == {"up", "down"}
        if isinstance(recipe, jlp.Int4QAT):
            expected = measures.statistics(
                PARAMS["up"], jlp.quantize(PARAMS["up"].astype(jnp.bfloat16), jlp.Int4(32), axis=-2)
            )
            assert list(found["up"]) == ["weight columnwise", "fprop"]
            np.testing.assert_allclose(found["up"]["weight columnwise"].sqnr, expected.sqnr, rtol=1e-2)

    @pytest.mark.slow
    def test_what_if(self):
        what_if = {
            "mxfp8": MXFP8,
            "plain": jlp.NVFP4BlockScaling(disable_rht=True),
            "up alone": jlp.PerLayer([("up", MXFP8)], None),
        }
        value_and_grad = jlp.telemetry.value_and_grad(loss, what_if=what_if)
        found = jlp.telemetry.read(jax.jit(value_and_grad)(PARAMS, X)[1])
        labelled = [f"{tensor}, {label}" for label in what_if for tensor in TENSORS]
        assert set(found["up"]) == {*ALL, *labelled}
        assert set(found["down"]) == {*ALL, *labelled[: 2 * len(TENSORS)]}
        assert list(found["up"])[: len(ALL)] == ALL
        for label, q in {
            "mxfp8": jlp.quantize(X, jlp.MXFP8(), axis=-2),
            "plain": jlp.quantize(X, jlp.NVFP4(), axis=-2),
        }.items():
            expected = measures.statistics(X, q)
            np.testing.assert_allclose(found["up"][f"input columnwise, {label}"].values, expected.values, rtol=1e-6)


class TestTransformations:
    STACK = jax.tree.map(lambda w: jnp.stack([w, 2 * w, w / 3]), PARAMS)

    def scanned(self, stack, x, place=False, remat=False):
        def block(x, params_and_index):
            params, index = params_and_index
            if not place:
                return x + model(params, x), None
            with jlp.telemetry.stacked(index, of=3):
                return x + model(params, x), None

        x, _ = jax.lax.scan(jax.checkpoint(block) if remat else block, x, (stack, jnp.arange(3)))
        return jnp.square(x.astype(jnp.float32)).mean()

    def unrolled(self, stack, x):
        for i in range(3):
            params = jax.tree.map(lambda w: w[i], stack)
            hidden = jax.nn.gelu(jlp.linear(x, params["up"], recipe=NVFP4, name=f"up[{i}]"))
            x += jlp.linear(hidden, params["down"], recipe=NVFP4, name=f"down[{i}]")
        return jnp.square(x.astype(jnp.float32)).mean()

    @pytest.mark.slow
    @pytest.mark.parametrize("remat", [False, True])
    def test_a_scan_gives_each_layer_of_the_stack(self, remat):
        deterministic = jlp.NVFP4BlockScaling(disable_stochastic_rounding=True)
        with pytest.MonkeyPatch.context() as patch:  # without keys random bits depend on the name
            patch.setitem(globals(), "NVFP4", deterministic)
            patch.setattr(model, "__defaults__", (deterministic,))
            found = measured(functools.partial(self.scanned, place=True, remat=remat), self.STACK, X)
            expected = measured(self.unrolled, self.STACK, X)
        found, expected = (dict(sorted(by_layer.items())) for by_layer in (found, expected))
        assert_same(found, expected, rtol=2e-2, atol=2e-3)

    @pytest.mark.slow
    @pytest.mark.parametrize("remat", [False, True])
    def test_without_places_it_is_the_mean(self, remat):
        found = measured(functools.partial(self.scanned, remat=remat), self.STACK, X)
        each = measured(functools.partial(self.scanned, place=True), self.STACK, X)
        for tensor in ALL:
            assert found["up"][tensor].uses == 3
            wanted = sum(each[f"up[{i}]"][tensor].values for i in range(3))
            np.testing.assert_allclose(found["up"][tensor].values, wanted, rtol=1e-4, atol=1e-5)
            assert np.all(found["up"][tensor].outlier_channels == -1)

    @pytest.mark.slow
    def test_remat_twice_counts_once(self):
        found = measured(lambda params, x: jax.checkpoint(jax.checkpoint(loss))(params, x), PARAMS, X)
        assert_same(found, measured(loss, PARAMS, X))

    @pytest.mark.slow
    def test_vmap_over_examples_is_their_mean(self):
        xs = jnp.stack([X, 3 * X])
        found = measured(lambda params, xs: jax.vmap(loss, (None, 0))(params, xs).sum(), PARAMS, xs)
        each = [measured(loss, PARAMS, x) for x in xs]
        tensor = "input rowwise"
        assert found["up"][tensor].uses == 2
        wanted = np.mean([e["up"][tensor].amax for e in each])
        np.testing.assert_allclose(found["up"][tensor].amax, wanted, rtol=1e-6)

    @pytest.mark.slow
    def test_microbatches_add_up(self):
        def step(params, xs):
            def one(total, x):
                _, found = jlp.telemetry.value_and_grad(loss)(params, x)
                return jax.tree.map(jnp.add, total, found), None

            return jax.lax.scan(one, jlp.telemetry.init(loss, params, xs[0]), xs)[0]

        found = jlp.telemetry.read(jax.jit(step)(PARAMS, jnp.stack([X, 3 * X])))
        assert found["up"]["gradient columnwise"].uses == 2

    @pytest.mark.slow
    def test_inner_jit_and_cond(self):
        inner = jax.jit(loss)

        def function(params, x):
            return jax.lax.cond(x.sum() < 1e9, inner, lambda params, x: 0.0, params, x) + inner(params, x)

        found = measured(function, PARAMS, X)
        assert found["up"]["input rowwise"].uses == 2
        assert_same(measured(inner, PARAMS, X), measured(loss, PARAMS, X))


class TestMeshes:
    @pytest.mark.slow
    @by_axis_type
    @pytest.mark.parametrize("sizes", [(2,), (4, 2), (8,)], ids=str)
    def test_are_those_of_one_device(self, sizes, axis_type):
        x = random_array((128, 64), "bfloat16", 4)
        params = {"up": random_array((64, 128), "float32", 5), "down": random_array((128, 64), "float32", 6)}
        expected = measured(loss, params, x)
        mesh = mesh_of(sizes, axis_type)
        with jax.set_mesh(mesh):
            second = "b" if len(sizes) > 1 else None
            specs = {"up": P(None, second), "down": P(second, None)}
            placed = {name: place(w, mesh, specs[name]) for name, w in params.items()}
            assert_same(measured(loss, placed, place(x, mesh, P("a", None))), expected, rtol=2e-2, atol=2e-3)

    def test_within_shard_map_they_are_of_all_shards(self):
        mesh = mesh_of((4,), jax.sharding.AxisType.Auto)
        x, w = random_array((128, 64), "bfloat16", 4), random_array((64, 32), "float32", 5)

        def function(w, x):
            y = jlp.linear(x, w, recipe=MXFP8, name="up")
            return jnp.square(y.astype(jnp.float32)).mean()

        def in_shards(w, x):
            shard = jax.shard_map(
                lambda w, x: jax.lax.pmean(function(w, x), "a"), mesh=mesh, in_specs=(P(), P("a")), out_specs=P()
            )
            return shard(w, x)

        found, expected = measured(in_shards, w, x)["up"], measured(function, w, x)["up"]
        assert list(found) == list(expected)
        for tensor, statistics in expected.items():
            assert found[tensor].uses == 1
            for name, value in statistics.scalars().items():
                actual = found[tensor].scalars()[name]
                rtol = 0.5 if tensor in GEMMS else 1e-2  # each device samples results of its own
                np.testing.assert_allclose(actual, value, rtol=rtol, atol=1e-5, err_msg=f"{tensor} {name}")


class TestModels:
    def test_any_function(self):
        def plain(params, x):
            hidden = jax.nn.gelu(x @ params["up"].astype(x.dtype))
            return jnp.square((hidden @ params["down"].astype(x.dtype)).astype(jnp.float32)).mean()

        assert_same(measured(jlp.quantize_matmuls(plain, NVFP4), PARAMS, X), measured(loss, PARAMS, X))

    @pytest.mark.slow
    def test_linen(self):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return jlp.linen.Dense(32, name="down")(nn.gelu(jlp.linen.Dense(64, name="up")(x)))

        variables = Model().init(jax.random.key(0), X)
        with jlp.autocast(NVFP4):
            found = measured(lambda v: jnp.square(Model().apply(v, X).astype(jnp.float32)).mean(), variables)
        assert {name.split("/")[-1] for name in found} == {"up", "down"}

    @pytest.mark.slow
    def test_nnx_with_an_optimizer(self):
        model = nnx.Sequential(jlp.nnx.Linear(32, 64, rngs=nnx.Rngs(0)), jlp.nnx.Linear(64, 32, rngs=nnx.Rngs(1)))
        jlp.nnx.name_layers(model)
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        def loss(model, state, x):
            with jlp.telemetry.collecting(state):
                return jnp.square(model(x).astype(jnp.float32)).mean()

        @nnx.jit
        def step(model, optimizer, x):
            state = jlp.telemetry.init(loss, model, {}, x)
            gradients, found = nnx.grad(loss, argnums=(0, 1))(model, state, x)
            optimizer.update(model, gradients)
            return found

        with jlp.autocast(NVFP4):
            found = jlp.telemetry.read(step(model, optimizer, X))
        assert len(found) == 2 and all(list(tensors) == ALL for tensors in found.values())

    def test_delayed_scaling(self):
        recipe = jlp.DelayedScaling()
        state = jlp.delayed_scaling.init_state(recipe)

        def function(w, state, x):
            y, _ = jlp.linear(x, w, recipe=recipe, name="up", state=state)
            return jnp.square(y.astype(jnp.float32)).mean()

        found = measured(function, PARAMS["up"], state, 1000 * X)
        assert found["up"]["input rowwise"].saturation > 0  # the first step's scale is 1


class TestErrors:
    def test_a_layer_that_is_not_in_the_state(self):
        state = jlp.telemetry.init(loss, PARAMS, X)
        del state["down"]
        needs = r"linear: layer 'down' needs telemetry of shapes .*the state has \['up'\]"
        with pytest.raises(ValueError, match=needs), jlp.telemetry.collecting(state):
            loss(PARAMS, X)

    def test_a_state_for_other_what_ifs(self):
        state = jlp.telemetry.init(loss, PARAMS, X)
        with (
            pytest.raises(ValueError, match="the same what_if="),
            jlp.telemetry.collecting(state, what_if={"a": MXFP8}),
        ):
            loss(PARAMS, X)

    def test_a_name_within_and_without_a_stack(self):
        def function(params, x):
            with jlp.telemetry.stacked(0, of=2):
                y = model(params, x)
            return y + model(params, x)

        with pytest.raises(ValueError, match="layers named 'up' are called within stacks of different sizes"):
            jlp.telemetry.init(function, PARAMS, X)

    def test_what_is_no_state(self):
        needs = r"telemetry.collecting: state=3; needs what jaxlowprec.telemetry.init makes"
        with pytest.raises(TypeError, match=needs), jlp.telemetry.collecting(3):
            pass
        needs = "telemetry.stacked: of=0; needs the number of layers"
        with pytest.raises(ValueError, match=needs), jlp.telemetry.stacked(0, of=0):
            pass
        with (
            pytest.raises(ValueError, match="layer 'up' needs telemetry of shapes"),
            jlp.telemetry.collecting({"up": 3}),
        ):
            loss(PARAMS, X)
        with pytest.raises(TypeError, match=r"telemetry.read: found=3"):
            jlp.telemetry.read(3)
        with pytest.raises(TypeError, match=r"telemetry.init: function=3"):
            jlp.telemetry.init(3)
        with pytest.raises(TypeError, match=r"telemetry.init: what_if='nvfp4'; needs recipes by label"):
            jlp.telemetry.init(loss, PARAMS, X, what_if="nvfp4")
