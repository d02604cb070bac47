"""What telemetry samples: the errors of a layer's GEMMs, and the codes of its weight that change."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.telemetry.sampling import CODES, changed, codes, places
from tests.helpers import random_array
from tests.sharding.meshes import mesh_of

RECIPES = [
    jlp.NVFP4BlockScaling(disable_stochastic_rounding=True),
    jlp.NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True, disable_2d_quantization=True),
    jlp.MXFP8BlockScaling(),
    jlp.Float8BlockScaling(),
    jlp.Float8CurrentScaling(),
    jlp.Int4QAT(32),
]
IDS = ["nvfp4", "nvfp4 plain", "mxfp8", "fp8_block", "fp8_current", "int4_qat"]
RESULTS = {"fprop": 0, "dgrad": 1, "wgrad": 2}


def relative(found, exact):
    found, exact = np.float64(found), np.float64(exact)
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def whole_errors(x, w, dy, recipe):
    """The relative errors of the whole results of a layer's three GEMMs."""

    @functools.partial(jax.jit, static_argnums=0)
    def results(recipe):
        y, backward = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=recipe), x, w)
        return y, *backward(dy)

    return [relative(*pair) for pair in zip(results(recipe), results(None), strict=True)]


@functools.cache
def sampled(recipe):
    """One program for all values of a shape."""

    def loss(w, x, dy):
        return (jlp.linear(x, w, recipe=recipe, name="up") * dy).sum()

    return jax.jit(jlp.telemetry.value_and_grad(loss))


def sampled_errors(x, w, dy, recipe):
    _, found = sampled(recipe)(w, x, dy)
    of_layer = jlp.telemetry.read(found)["up"]
    return {gemm: float(of_layer[gemm].relative_error) for gemm in RESULTS if gemm in of_layer}


@pytest.mark.parametrize(
    ("recipe", "rows"),
    # Blocks of more rows than a part has: parts are merged, and a sample is not everything.
    [(r, rows) for r in RECIPES for rows in ((16,), (2, 16)) if len(rows) == 1 or r not in RECIPES[2:4]],
    ids=lambda v: type(v).__name__ if isinstance(v, jlp.Recipe) else str(v),
)
def test_a_sample_of_everything_is_the_error_of_the_result(recipe, rows):
    k, n = (32, 16) if isinstance(recipe, jlp.Int4QAT) else (16, 16)
    x, w, dy = (random_array(s, "float32", i) for i, s in enumerate([(*rows, k), (k, n), (*rows, n)]))
    whole = whole_errors(x, w, dy, recipe)
    sampled = sampled_errors(x, w, dy, recipe)
    assert list(sampled) == (["fprop"] if isinstance(recipe, jlp.Int4QAT) else list(RESULTS))
    for gemm, error in sampled.items():
        assert error == pytest.approx(whole[RESULTS[gemm]], rel=1e-3) and 0.01 < error < 0.5, gemm


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES[:4], ids=IDS[:4])
def test_a_sample_is_near_the_error_of_the_result(recipe):
    shapes = [(256, 96), (96, 128), (256, 128)]
    x, w, dy = (np.random.default_rng(i).standard_normal(s, np.float32) for i, s in enumerate(shapes))
    whole = whole_errors(x, w, dy, recipe)
    for gemm, error in sampled_errors(x, w, dy, recipe).items():
        assert error == pytest.approx(whole[RESULTS[gemm]], rel=0.15), gemm


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_error_does_not_depend_on_the_scale(scale):
    recipe, shapes = jlp.MXFP8BlockScaling(), [(64, 32), (32, 64), (64, 64)]
    x, w, dy = (np.asarray(random_array(s, "float32", i)) for i, s in enumerate(shapes))
    expected, found = (
        sampled_errors(x, w, dy * np.float32(s), recipe)["dgrad"] for s in (1, 2.0 ** round(np.log2(scale)))
    )
    assert found == pytest.approx(expected, rel=1e-5)


def test_of_a_gemm_nothing_else_is_known():
    x, w = random_array((32, 32), "float32", 1), random_array((32, 32), "float32", 2)
    loss = lambda w: jlp.linear(x, w, recipe=RECIPES[2], name="up").sum()  # noqa: E731
    _, found = jax.jit(jlp.telemetry.value_and_grad(loss))(w)
    gemm = jlp.telemetry.read(found)["up"]["fprop"]
    assert gemm.scalars().keys() == {"relative_error", "sqnr"} and float(gemm.uses) == 1
    assert np.isnan(gemm.codes).all() and (gemm.outlier_channels == -1).all()


@pytest.mark.parametrize("fmt", [jlp.NVFP4(), jlp.NVFP4((16, 16)), jlp.MXFP8(), jlp.Int4(32)], ids=str)
def test_codes_that_changed_are_counted(fmt):
    w = np.random.default_rng(1).standard_normal((128, 256), np.float32)
    other = w.copy()
    other[:, ::4] *= -1
    before, now = (jlp.quantize(v, fmt, axis=-2) for v in (w, other))
    taken = jax.jit(codes)
    share = changed(*(np.asarray(taken(q)) for q in (before, now)))
    decoded = [np.asarray(q.dequantize()) for q in (before, now)]
    assert share == pytest.approx(np.mean(decoded[0] != decoded[1]), abs=0.04) and 0.15 < share < 0.3
    assert changed(np.asarray(taken(before)), np.asarray(taken(before))) == 0


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 4096, 10**9])
def test_places_are_all_or_one_of_each_part(size):
    taken = places(size, 32)
    assert len(taken) == min(size, 32)
    part = size / len(taken)
    assert all(int(i * part) <= place < (i + 1) * part for i, place in enumerate(taken))


def test_of_a_small_weight_all_codes_are_taken():
    q = jlp.quantize(random_array((16, 16), "float32", 1), jlp.MXFP8())
    taken = np.asarray(codes(q))
    assert (taken[:256] == np.asarray(q.data.view(jnp.uint8)).ravel()).all() and (taken[256:] == -1).all()


@pytest.mark.slow
def test_devices_of_shard_map_share_a_sample():
    mesh = mesh_of((4,), jax.sharding.AxisType.Auto)
    spec = jax.sharding.PartitionSpec("a")
    q = jlp.quantize(random_array((64, 128), "float32", 1), jlp.MXFP8())

    def of_shard(data, scale):
        part = dataclasses.replace(q, data=data, scale=scale, matrix_shape=(16, 128))
        return codes(part, ("a",))

    run = jax.shard_map(of_shard, mesh=mesh, in_specs=(spec, spec), out_specs=jax.sharding.PartitionSpec())
    taken = np.asarray(run(q.data, q.scale))
    data = np.asarray(q.data.view(jnp.uint8)).reshape(4, -1)
    assert (taken.reshape(4, -1) == data[:, places(data.shape[1], CODES // 4)]).all()


def test_a_recorder_writes_the_share_that_changed(tmp_path):
    x, w = random_array((32, 64), "float32", 1), random_array((64, 64), "float32", 2)

    @jax.jit
    def step(w):
        return jlp.telemetry.value_and_grad(lambda w: jlp.linear(x, w, recipe=RECIPES[2], name="up").sum())(w)[1]

    path = tmp_path / "telemetry.jsonl"
    with jlp.telemetry.Recorder(path) as recorder:
        turned = np.array(w)
        turned[:, :32] *= -1
        for number, weight in enumerate((w, w, turned)):
            recorder.record(number, step(weight))
    with jlp.telemetry.Recorder(path) as recorder:  # after a restart the record before is not known
        recorder.record(3, step(w))
    run = jlp.telemetry.load(path)
    np.testing.assert_allclose(run.series("up", "weight columnwise", "changed"), [np.nan, 0, 0.5, np.nan], atol=0.04)
    assert np.isnan(run.series("up", "input rowwise", "changed")).all()
    assert run.records[2].flat()["up/weight/changed"] == run.records[2].changed["up"]
    assert run.records[0].layers["up"]["fprop"].relative_error == pytest.approx(
        float(jlp.telemetry.read(step(w))["up"]["fprop"].relative_error), rel=1e-4
    )


def test_labels_of_telemetry_are_refused():
    with pytest.raises(ValueError, match="has the label 'errors of GEMMs', which telemetry uses"):
        jlp.telemetry.init(lambda x: x, jnp.ones(3), what_if={"errors of GEMMs": RECIPES[0]})
