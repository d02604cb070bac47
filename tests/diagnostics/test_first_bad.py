"""`jaxlowprec.debug`: where an error enters."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx

import jaxlowprec as jlp
from jaxlowprec.telemetry.scopes import entered
from jaxlowprec.telemetry.taps import COUNTS, LENGTH, SKETCH, Taps, sketch
from tests.helpers import often, random_array

NVFP4, MXFP8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling()
FAULT = 2.0**-20


def loss(params, x, scale=1.0, middle=lambda h: h):
    """Four layers with a residual each; `scale` multiplies the weight of the third, `middle` is called before it."""
    h = x
    for i, w in enumerate(params):
        h = middle(h) if i == 2 else h
        h = h + jax.nn.gelu(jlp.linear(h, w * scale if i == 2 else w, recipe=NVFP4, name=f"blocks/{i}"))
    return jnp.square(h.astype(jnp.float32)).mean(), h


@pytest.fixture(scope="module")
def step():
    """The parameters and the batch of a step."""
    numbers = np.random.default_rng(0)
    params = [numbers.standard_normal((64, 64), np.float32) / 8 for _ in range(4)]
    return jax.device_put((params, numbers.standard_normal((128, 64)).astype(jnp.bfloat16)))


@pytest.fixture(scope="module")
def trace(step):
    """Of the step."""
    return jlp.debug.trace(loss, *step)


@jax.custom_vjp
def spoils_the_gradient(x):
    return x


spoils_the_gradient.defvjp(lambda x: (x, None), lambda _, dx: (dx.at[0, 0].set(jnp.nan),))


@pytest.mark.parametrize("size", [0, 1, 100, SKETCH, 100_000])
def test_sketches_are_as_far_apart_as_arrays(size):
    x = np.asarray(random_array((size,), "float32", 1))
    y = x * np.float32(0.75) + np.float32(0.1) * np.asarray(random_array((size,), "float32", 2))
    of_x, of_y = (np.asarray(jax.jit(sketch)(v)) for v in (x, y))
    assert np.linalg.norm(of_x[COUNTS:] - of_y[COUNTS:]) == pytest.approx(np.linalg.norm(x - y), rel=0.12)


def test_a_sketch_counts_what_is_not_finite_and_leaves_it_out():
    spoilt, without = np.arange(3000, dtype=np.float32), np.arange(3000, dtype=np.float32)
    spoilt[7:9], without[7:9] = (np.nan, np.inf), 0
    found, expected = (np.asarray(jax.jit(sketch)(x)) for x in (spoilt, without))
    assert found[:COUNTS].tolist() == [2, 1, 1] and expected[:COUNTS].tolist() == [0, 0, 1]
    assert np.all(found[COUNTS:] == expected[COUNTS:])


@pytest.mark.slow
def test_a_healthy_step_has_nothing_bad(step):
    assert jlp.debug.first_bad(loss, *step) is None


@pytest.mark.slow
def test_each_gemm_has_its_error(step, trace):
    found = jlp.debug.compare(trace, jlp.debug.trace(loss, *step, high_precision=True))
    assert [d.layer for d in found if d.tensor == "result"] == [f"blocks/{i}" for i in range(4)]
    assert [d.layer for d in found if d.tensor == "gradient of the weight"] == [f"blocks/{i}" for i in range(3, -1, -1)]
    by_tensor = {tensor: [d.error for d in found if d.tensor == tensor] for tensor in {d.tensor for d in found}}
    assert by_tensor["weight"] == [0, 0, 0, 0] and by_tensor["input"][0] == 0
    for tensor in ("result", "gradient of the input", "gradient of the weight"):
        assert all(0.05 < error < 0.4 for error in by_tensor[tensor]), by_tensor


def test_the_planted_fault_is_found_with_its_step(step):
    steps = ((number, (*step, jnp.float32(1 if number < 50 else FAULT))) for number in range(48, 54))
    bad = jlp.debug.first_bad_step(loss, steps, reference=lambda params, x, scale: loss(params, x))
    assert (bad.step, bad.layer, bad.tensor) == (50, "blocks/2", "weight")
    assert next(steps)[0] == 51  # no step behind it was computed
    assert str(bad).startswith("step 50: weight of blocks/2: the relative error is 1, beyond 0.7; it enters in the ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("middle", "layer", "tensor"),
    [
        (lambda h: h.at[3, 5].set(jnp.inf), "blocks/2", "input"),
        (lambda h: h * 1e30, "blocks/2", "result"),
        (spoils_the_gradient, "blocks/1", "gradient of the result"),
    ],
)
def test_what_is_not_finite_is_found_where_it_enters(step, middle, layer, tensor):
    params, x = step
    params = [*params[:2], params[2] * 1e9, params[3]]
    bad = jlp.debug.first_bad(lambda params, x: loss(params, x, middle=middle), params, x)
    assert (bad.layer, bad.tensor) == (layer, tensor)
    assert bad.difference.nonfinite >= 1 and "infinite or NaN (the reference has " in str(bad)


@pytest.mark.slow
def test_a_loss_that_is_not_finite(step):
    bad = jlp.debug.first_bad(lambda *step: loss(*step)[0] / 0, *step)
    assert (bad.layer, bad.tensor) == ("", "loss") and str(bad).startswith("loss: 1 elements are infinite or NaN")


@pytest.mark.slow
def test_tracing_changes_no_bit(step):
    def traced_too(params, x):
        return jax.value_and_grad(lambda params: loss(params, x)[0])(params)

    alone = jax.jit(traced_too)(*step)
    names = [f"blocks/{i}" for i in range(4)]
    with entered(Taps({name: jnp.zeros((3, 2, LENGTH)) for name in names})):
        within = jax.jit(traced_too)(*step)
    jax.tree.map(np.testing.assert_array_equal, alone, within)


def test_traces_are_compared_from_files(trace, tmp_path):
    found = trace
    found.save(tmp_path / "cpu.npz")
    loaded = jlp.debug.Trace.load(tmp_path / "cpu.npz")
    assert list(loaded.layers) == list(found.layers)
    assert all(d.error == 0 for d in jlp.debug.compare(found, loaded))
    (tmp_path / "other").write_text("none")
    with pytest.raises(ValueError, match=r"other is no trace .*Trace.save"):
        jlp.debug.Trace.load(tmp_path / "other")


def of_scan(params, x):
    def body(h, layer):
        index, w = layer
        with jlp.telemetry.stacked(index, of=len(params)):
            return h + jax.nn.gelu(jlp.linear(h, w, recipe=NVFP4, name="blocks")), None

    h, _ = jax.lax.scan(jax.checkpoint(body), x, (jnp.arange(len(params)), jnp.stack(params)))
    return jnp.square(h.astype(jnp.float32)).mean()


@pytest.mark.slow
def test_layers_of_a_scan_are_told_apart(step):
    params, x = step
    assert list(jlp.debug.trace(of_scan, params, x).layers) == [f"blocks[{i}]" for i in range(4)]
    spoilt = [*params[:3], np.array(params[3])]
    spoilt[3][0, 0] = np.nan
    bad = jlp.debug.first_bad(of_scan, spoilt, x)
    assert (bad.layer, bad.tensor) == ("blocks[3]", "weight")


class TestLoops:
    """Blocks of two layers in a scan: where something not finite enters."""

    params = {"up": random_array((3, 32, 64), "float32", 7) / 8, "down": random_array((3, 64, 32), "float32", 8) / 8}

    @staticmethod
    def loss(params, x, spoils=lambda i, h: h, stacked=True, halves=False):
        def block(x, layer):
            i, w = layer
            with jlp.telemetry.stacked(i, of=3) if stacked else contextlib.nullcontext():
                h = spoils(i, jlp.linear(x, w["up"], recipe=MXFP8, name="up"))
                if not halves:
                    return x + jlp.linear(h, w["down"], recipe=MXFP8, name="down"), None
            with jlp.telemetry.stacked(i, of=3):
                return x + jax.checkpoint(lambda h: jlp.linear(h, w["down"], recipe=MXFP8, name="down"))(h), None

        return jnp.square(jax.lax.scan(block, x, (jnp.arange(3), params))[0]).mean()

    @pytest.mark.parametrize("block", often([1], [0, 1, 2]))
    @pytest.mark.parametrize("name", often(["down"], ["up", "down"]))
    @pytest.mark.parametrize("how", often(["halves"], ["stacked", "halves", "unnumbered"]))
    def test_a_bad_weight(self, name, block, how):
        bad = {**self.params, name: self.params[name].at[block, 0, 0].set(jnp.inf)}
        loss = functools.partial(self.loss, stacked=how != "unnumbered", halves=how == "halves")
        found = jlp.debug.first_bad(loss, bad, jnp.ones((32, 32)))
        assert (found.layer, found.tensor) == (name if how == "unnumbered" else f"{name}[{block}]", "weight")

    @pytest.mark.parametrize("block", often([1], [0, 1, 2]))
    @pytest.mark.parametrize("stacked", often([False], [True, False]))
    def test_a_bad_activation(self, block, stacked):
        loss = functools.partial(self.loss, spoils=lambda i, h: jnp.where(i == block, h / 0, h), stacked=stacked)
        found = jlp.debug.first_bad(loss, self.params, jnp.ones((32, 32)))
        assert (found.layer, found.tensor) == (f"down[{block}]" if stacked else "down", "input")
        guessed = f"or at another layer of the same loop: the layer is called 3 times, {3 - block} of them bad"
        assert (guessed in str(found)) == (not stacked and block > 0)

    @pytest.mark.parametrize("block", often([1], [0, 1, 2]))
    @pytest.mark.parametrize("stacked", often([False], [True, False]))
    def test_a_bad_gradient(self, block, stacked):
        def spoils(i, h):
            return jax.lax.cond(i == block, spoils_the_gradient, lambda h: h, h)

        found = jlp.debug.first_bad(
            functools.partial(self.loss, spoils=spoils, stacked=stacked), self.params, jnp.ones((32, 32))
        )
        assert (found.layer, found.tensor) == (f"up[{block}]" if stacked else "up", "gradient of the result")

    def test_a_python_loop(self):
        def loss(params, x):
            for i in range(3):
                with jlp.telemetry.stacked(i, of=3):
                    for name in ("up", "down"):
                        x = jlp.linear(x, params[name][i], recipe=MXFP8, name=name)
            return jlp.linear(x, params["up"][0], recipe=MXFP8, name="head").mean()

        found = jlp.debug.trace(loss, self.params, jnp.ones((32, 32)))
        assert list(found.layers) == ["up[0]", "down[0]", "up[1]", "down[1]", "up[2]", "down[2]", "head"]


@pytest.mark.slow
def test_a_mesh_has_the_trace_of_one_device(step):
    params, x = step
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    spec = jax.sharding.PartitionSpec
    place = jax.sharding.NamedSharding
    split = [jax.device_put(w, place(mesh, spec(None, "tensor"))) for w in params]
    placed = jax.device_put(x, place(mesh, spec("data")))
    found = jlp.debug.compare(jlp.debug.trace(loss, split, placed), jlp.debug.trace(loss, *step))
    assert max(d.error for d in found) < 1e-3


@pytest.mark.slow
def test_under_vmap_the_calls_add_up(step):
    params, x = step

    def batched(params, x):
        return jax.vmap(lambda x: loss(params, x)[0])(x).mean()

    both = jlp.debug.trace(batched, params, jnp.stack([x, x]), high_precision=True)
    one = jlp.debug.trace(loss, params, x, high_precision=True)
    np.testing.assert_allclose(both.layers["blocks/0"][0, 0], 2 * one.layers["blocks/0"][0, 0], rtol=1e-3, atol=1e-2)
    bad = jlp.debug.first_bad(batched, params, jnp.stack([x, x.at[0, 0].set(jnp.nan)]))
    assert (bad.layer, bad.tensor, bad.difference.nonfinite) == ("blocks/0", "input", 1)


class TestLayersOfFrameworks:
    @pytest.mark.slow
    def test_nnx(self):
        model = jlp.nnx.Linear(64, 32, rngs=flax_nnx.Rngs(0))
        jlp.nnx.name_layers(model)
        model.name = "up"
        graph, state = flax_nnx.split(model)
        with jlp.autocast(NVFP4):
            found = jlp.debug.trace(lambda state, x: flax_nnx.merge(graph, state)(x).mean(), state, jnp.ones((32, 64)))
        assert list(found.layers) == ["up"]

    @pytest.mark.slow
    def test_linen(self):
        class Model(flax_linen.Module):
            @flax_linen.compact
            def __call__(self, x):
                return jlp.linen.Dense(32, name="up")(x)

        model, x = Model(), jnp.ones((32, 64))
        params = jax.jit(model.init)(jax.random.key(0), x)
        with jlp.autocast(NVFP4):
            found = jlp.debug.trace(lambda params, x: model.apply(params, x).mean(), params, x)
        assert list(found.layers) == ["up"]

    @pytest.mark.slow
    def test_any_function(self):
        def plain(params, x):
            return jnp.square(x @ params["up"]).mean()

        params, x = {"up": jnp.ones((64, 32)).at[3, 3].set(jnp.nan)}, jnp.ones((32, 64))
        bad = jlp.debug.first_bad(jlp.quantize_matmuls(plain, NVFP4), params, x)
        assert (bad.layer, bad.tensor) == ("up", "weight")


def test_bad_arguments_are_refused(step, trace):
    with pytest.raises(TypeError, match="needs a function"):
        jlp.debug.trace(3)
    with pytest.raises(ValueError, match="calls no layer of this library; transform it with quantize_matmuls"):
        jlp.debug.trace(lambda x: x.sum(), jnp.ones(3))
    for bound in (0, -1, float("nan"), "x", True):
        with pytest.raises(ValueError, match=r"debug.first_bad: bound=.*; needs a positive number"):
            jlp.debug.first_bad(loss, *step, bound=bound)
    with pytest.raises(ValueError, match="blocks/3 in one of the traces only"):
        jlp.debug.compare(trace, jlp.debug.trace(loss, step[0][:3], step[1]))
