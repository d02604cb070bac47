"""What quantisation does to a tensor, against numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.ops.statistics import reference
from jaxlowprec.telemetry.measures import statistics
from tests.docs.pages import differs, pieces, printed_by
from tests.helpers import random_array
from tests.package.test_readme import ROOT
from tests.sharding.meshes import by_axis_type, mesh_of, place

pytestmark = pytest.mark.sampled(3)
ROWS, COLUMNS = 48, 96
FORMATS = {
    "nvfp4": jlp.NVFP4(),
    "nvfp4 16x16": jlp.NVFP4((16, 16)),
    "mxfp4": jlp.MXFP4(),
    "mxfp8": jlp.MXFP8("e5m2", scale_rule="floor"),
    "mxfp8 32x32": jlp.MXFP8("e4m3", (32, 32)),
    "float8 block": jlp.Float8Block(),
    "float8 tensor": jlp.Float8Tensor(),
    "int4": jlp.Int4(32),
    "int4 asymmetric": jlp.Int4(32, symmetric=False),
}
FLOORS = {"two_level": 2.0**-9, "e8m0": 2.0**-127}


def tensors():
    """Hostile ones, and plain ones."""
    x = np.asarray(random_array((ROWS, COLUMNS), "float32"))
    one = np.zeros_like(x)
    one[5, 7] = 3.0
    spoilt = x.copy()
    spoilt[3, 4], spoilt[20, 50], spoilt[40, 90] = np.nan, np.inf, -np.inf
    outlier = x / 100
    outlier[:, 11] *= 1e4
    wide = x * 2.0 ** np.random.default_rng(0).integers(-30, 30, x.shape)
    return {
        "normal": x,
        "zeros": np.zeros_like(x),
        "one number": one,
        "not finite": spoilt,
        "a channel of outliers": outlier,
        "many magnitudes": wide,
        "subnormal": np.full_like(x, 1e-40),
        "tiny": x * np.float32(1e-37),
        "huge": np.float32(np.clip(np.float64(x) * 1e37, -3e38, 3e38)),
        "ties": np.round(x * 2) / 2 + np.float32(0.25),
    }


TENSORS = tensors()


def block_shape(fmt):
    return (ROWS, COLUMNS) if fmt.scaling == "tensor" else ((fmt.length, fmt.length) if fmt.tiles else (1, fmt.length))


def expected(x, q):
    """The statistics by numpy, in float64, from the definitions."""
    fmt = q.format
    x = np.where(np.abs(x) < 2.0**-126, 0, x).astype(np.float64)
    decoded = np.float64(jlp.dequantize(q, dtype=jnp.float32))
    finite = np.isfinite(x)
    known = finite & np.isfinite(decoded)
    kept, error = np.where(known, x, 0), np.where(known, decoded, 0) - np.where(known, x, 0)
    energy, errors, total = np.sum(kept**2), np.sum(error**2), np.abs(kept).sum()
    height, length = block_shape(fmt)
    scale = q.scale
    if fmt.scaling == "e8m0":
        code = np.asarray(scale).view(np.uint8).astype(np.float64)
        scale = np.where(code < 255, 2.0 ** (code - 127), np.nan)
    scale = np.float64(scale).reshape(-1, 1) if fmt.scaling == "tensor" else np.float64(scale)
    magnitude = np.where(finite, np.abs(x), 0)
    used = []
    for i in range(0, ROWS, height):
        for j in range(0, COLUMNS, length):
            of_block = scale[i // height, j // length] if fmt.scaling != "tensor" else scale[0, 0]
            if magnitude[i : i + height, j : j + length].max() and np.isfinite(of_block):
                used.append(of_block)
    run = 128 if fmt.scaling == "tensor" else fmt.length
    runs = magnitude[::16, : COLUMNS // run * run].reshape(-1, run)
    ranges = [r.max() / np.median(r) for r in runs if np.median(r)]
    if fmt.scaling not in FLOORS:  # wider scales are known to the power of two
        used = [2.0 ** (np.frexp(s)[1] - 1) for s in used]
    finite_x = np.where(finite, np.abs(x), 0.0)
    beyond = finite_x > 6 * np.sqrt(np.mean(finite_x**2))
    counts = beyond.sum(axis=0)
    return {
        "zeros": np.mean(x == 0),
        "underflow": np.mean((x != 0) & (decoded == 0)),
        "nonfinite": np.mean(~finite),
        "poisoned": np.mean(finite & ~np.isfinite(decoded)),
        "sqnr": 10 * np.log10(energy / errors) if errors else np.inf,
        "relative_error": np.sqrt(errors / energy) if energy else 0,
        "bias": error.sum() / total if energy else 0,
        "amax": magnitude.max(),
        "rms": np.sqrt(np.mean(magnitude**2)),
        "smallest_scale": min(used, default=0),
        "largest_scale": max(used, default=0),
        "floor": np.mean([s <= FLOORS[fmt.scaling] for s in used]) if used and fmt.scaling in FLOORS else 0,
        "block_range": np.mean(ranges) if ranges else 0,
        "outliers": np.mean(beyond),
        "scales": np.bincount(
            [min(int(np.frexp(max(used))[1] - np.frexp(s)[1]), 31) if s else 31 for s in used] if used else [],
            minlength=32,
        )
        / max(len(used), 1),
        "outlier_channels": [*np.flatnonzero(counts)[np.argsort(-counts[counts > 0], kind="stable")][:4]],
    }


measured = jax.jit(statistics)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_every_statistic_is_numpys(fmt, name):
    x = np.float32(TENSORS[name])
    q = jlp.quantize(x, fmt)
    actual, wanted = measured(x, q), expected(TENSORS[name], q)
    channels = [c for c in np.asarray(actual.outlier_channels).tolist() if c >= 0]
    assert channels == wanted.pop("outlier_channels")
    for statistic, value in wanted.items():
        tolerance = {"bias": 1e-5, "sqnr": 0.05}.get(statistic, 1e-30)
        np.testing.assert_allclose(getattr(actual, statistic), value, rtol=2e-3, atol=tolerance, err_msg=statistic)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_saturation_counts_what_lies_beyond_the_largest_code(fmt):
    x = TENSORS["normal"]
    q = jlp.quantize(x, fmt)
    if fmt.element == "int4":
        steps = np.float64(q.scale).repeat(fmt.length, axis=1)
        zero = 8 if q.zero_point is None else np.float64(q.zero_point).repeat(fmt.length, axis=1)
        highest, lowest = (15 - zero) * steps, (0 - zero) * steps
    else:
        element = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
        codes = np.float64(jlp.dequantize(q, dtype=jnp.float32))
        largest = float(ml_dtypes.finfo(element[fmt.element]).max)
        scale = np.ones((1, 1)) * np.float64(np.asarray(q.scale).astype(np.float32))
        height, length = block_shape(fmt)
        highest = largest * scale.repeat(height, 0).repeat(length, 1)[:ROWS, :COLUMNS]
        highest = highest * (1 if q.amax is None else float(q.amax) / 2688)
        lowest = -highest
        assert np.all(np.abs(codes) <= highest * (1 + 1e-6))
    beyond = (np.float64(x) > highest * (1 + 1e-6)) | (np.float64(x) < lowest * (1 + 1e-6))
    beyond &= np.float64(jlp.dequantize(q, dtype=jnp.float32)) != 0  # what becomes zero underflows
    assert abs(float(measured(x, q).saturation) - beyond.mean()) <= 2 / x.size
    assert fmt.scaling != "e8m0" or fmt.scale_rule == "floor" or not beyond.any()


def test_with_a_scale_of_zero_elements_underflow():
    x = np.full((16, 32), 1e-9, jnp.bfloat16)
    x[0, 0] = 1
    found = measured(x, jlp.quantize(x, jlp.NVFP4()))
    assert (float(found.saturation), float(found.underflow)) == (0, 1 - 1 / x.size)


class TestWhatWasRounded:
    def test_the_other_axis_is_the_transposed_array(self):
        x = np.asarray(random_array((ROWS, COLUMNS), "float32", 1))
        one, other = (
            measured(x, jlp.quantize(x, jlp.NVFP4(), axis=-2)),
            measured(x.T, jlp.quantize(x.T, jlp.NVFP4())),
        )
        assert one.scalars() == other.scalars()

    @pytest.mark.parametrize("columns", [96, 90])
    @pytest.mark.parametrize("size", [16, 32])
    def test_a_rotated_array_is_measured_rotated(self, size, columns):
        x = random_array((ROWS, columns), "float32", 2)
        rotation = jlp.Hadamard(size)
        rotated = jlp.hadamard_transform(
            np.pad(x, ((0, 0), (0, -columns % size))), axis=-1, size=size, signs=rotation.signs
        )
        actual = measured(x, jlp.quantize(x, jlp.MXFP4(), hadamard=rotation)).scalars()
        wanted = measured(rotated, jlp.quantize(rotated, jlp.MXFP4())).scalars()
        for name in ("outliers", "rms"):  # those of the array before its rotation
            del actual[name], wanted[name]
        assert actual == wanted

    def test_stochastic_rounding_has_no_bias(self):
        x = np.abs(random_array((256, 256), "float32", 3)) + np.float32(0.1)
        found = [
            abs(float(measured(x, jlp.quantize(x, jlp.MXFP4(), rounding=rounding, key=key)).bias))
            for rounding, key in (("stochastic", jax.random.key(0)), ("nearest", None))
        ]
        assert found[0] < 1e-3

    def test_a_vector_and_a_batch(self):
        x = random_array((3, ROWS, COLUMNS), "float32", 4)
        x = np.asarray(x)
        vector = x[0, 0]
        as_row = measured(vector[None], jlp.quantize(vector[None], jlp.MXFP8()))
        assert measured(vector, jlp.quantize(vector, jlp.MXFP8())).scalars() == as_row.scalars()
        whole = measured(x, jlp.quantize(x, jlp.MXFP8()))
        each = jax.device_get(jax.jit(jax.vmap(lambda x: statistics(x, jlp.quantize(x, jlp.MXFP8()))))(x))
        np.testing.assert_allclose(whole.underflow, each.underflow.mean(), rtol=1e-6)
        assert whole.amax == each.amax.max()


class TestMeshes:
    @by_axis_type
    @pytest.mark.parametrize("sizes", [(2,), (4, 2)], ids=str)
    def test_are_those_of_the_whole_array(self, sizes, axis_type):
        x = random_array((64, 128), "float32", 5)
        run = jax.jit(lambda x: statistics(x, jlp.quantize(x, jlp.NVFP4())))
        expected, mesh = run(x), mesh_of(sizes, axis_type)
        with jax.set_mesh(mesh):
            actual = run(place(x, mesh, jax.sharding.PartitionSpec(*"ab"[: len(sizes)])))
        np.testing.assert_allclose(actual.values, expected.values, rtol=1e-5, atol=1e-7)


def test_bad_arguments():
    x = random_array((ROWS, COLUMNS))
    q = jlp.quantize(x, jlp.NVFP4())
    with pytest.raises(ValueError, match=r"telemetry.statistics: x has shape \(96, 48\), q \(48, 96\)"):
        statistics(x.T, q)
    with pytest.raises(TypeError, match="telemetry.statistics: q"):
        statistics(x, x)
    with pytest.raises(TypeError, match="telemetry.statistics: x has dtype int32"):
        statistics(jnp.ones((ROWS, COLUMNS), jnp.int32), q)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_the_page_prints_what_it_shows(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/reference/telemetry.md"
    piece = pieces(page)[place]
    printed = printed_by(piece, page, {"__name__": "example"})
    assert not differs(printed, piece.shown), printed


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32), (32, 0)])
@pytest.mark.parametrize("fmt", [jlp.NVFP4(), jlp.MXFP8(), jlp.Float8Tensor()], ids=repr)
def test_nothing_has_sums_of_zero(fmt, shape):
    """Such as the rows of a rank that has no tokens."""
    q = jlp.quantize(jnp.zeros(shape), fmt)
    found = reference.sums(jnp.zeros(shape), jnp.ones(shape[:-2]), q.data, q.scale, q.amax, fmt)
    assert found.shape == (*shape[:-2], reference.LENGTH) and not np.asarray(found).any()
