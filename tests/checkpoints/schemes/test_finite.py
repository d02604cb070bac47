"""Finite weights stay finite through every format, or are refused by name: codes and scales may be rounded up."""

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, convert, dequantize
from jaxlowprec.checkpoints.conversion.inspect import WeightError, error_of, inspect
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.config import with_quantization
from jaxlowprec.checkpoints.files.dtypes import all_finite, limit
from jaxlowprec.checkpoints.trees import trees
from jaxlowprec.checkpoints.trees.mapping import Rule, TreeMapping
from tests.checkpoints.small_models import CONFIG, read_tensors, write_checkpoint
from tests.checkpoints.weights import ROW_SCALES, SCHEMES

MODULE = "model.layers.0.mlp.down_proj"
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def large(dtype, share, seed=0):
    """A weight whose largest magnitudes, of either sign, are a share of what its dtype holds."""
    random = np.random.default_rng(seed)
    w = random.standard_normal((128, 128)).astype(np.float32)
    top = np.float32(limit(np.dtype(dtype)) * share)
    w[::5, ::7] = top * random.choice(np.float32([-1, 1]), w[::5, ::7].shape)
    return np.clip(w, -top, top).astype(dtype)


@pytest.mark.parametrize("name", SCHEMES | ROW_SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_near_its_dtypes_end_decodes_or_is_refused(name, dtype):
    scheme, refused = (SCHEMES | ROW_SCALES)[name], 0
    for share in (0.25, 0.5, 0.9, 0.97, 1):
        weight = large(DTYPES[dtype], share)
        try:
            made = scheme.compress(weight)
        except ValueError as error:
            assert "infin" in str(error) or "not finite" in str(error)
            refused += 1
            continue
        assert all_finite(scheme.decompress(made, scheme.compute_dtype(weight.dtype)))
    assert refused < 5 or getattr(scheme, "scale_dtype", "") == "float16"  # numbers of float32, all beyond it


@pytest.mark.parametrize(
    ("name", "dtype", "value"),
    [
        ("gptq", np.float32, 65504),
        ("awq", np.float32, 65504),
        ("awq", np.float16, 65504),
        ("mxfp4", np.float32, 3.4e38),
        ("mxfp8", np.float32, 3.4e38),
        ("mxfp4", np.float16, 65504),
    ],
)
def test_conversion_names_the_module_that_would_become_infinite(tmp_path, name, dtype, value):
    weight = np.full((128, 128), 1, dtype)
    weight[3, 5], weight[5, 7] = -value, value
    source = write_checkpoint(tmp_path / "source", {f"{MODULE}.weight": weight}, shards=1)
    with pytest.raises(CheckpointError, match=f"module '{MODULE}': .*is rounded to infinity in .*leave it in high"):
        convert(source, tmp_path / "low", schemes.by_name(name))


@pytest.fixture
def unchecked(monkeypatch):
    """Conversion as if it did not look: for what looks afterwards."""
    monkeypatch.setattr("jaxlowprec.checkpoints.schemes.base.Scheme._require_finite", lambda *_: None)


def infinite(path, name="mxfp4"):
    """A plain checkpoint, and the same in a format that it is rounded to infinity in."""
    weight = np.full((128, 128), 3.4e38, np.float32)
    write_checkpoint(path / "source", {f"{MODULE}.weight": weight}, shards=1)
    convert(path / "source", path / "low", schemes.by_name(name))
    return path / "source", path / "low"


def test_verification_compares_whether_weights_are_finite(tmp_path, unchecked):
    source, _ = infinite(tmp_path)
    with pytest.raises(CheckpointError, match=f"module '{MODULE}' is infinite or NaN there, but finite in the source"):
        convert(source, tmp_path / "again", schemes.by_name("mxfp4"), options=ConvertOptions(verify=True))


def test_infinite_weights_are_compared_and_said(tmp_path, unchecked):
    source, low = infinite(tmp_path)
    (module,) = inspect(low, source).modules
    assert module.error == WeightError(-np.inf, np.inf)


@pytest.mark.parametrize(
    ("decoded", "reference", "sqnr", "largest"),
    [
        ([np.inf, 1], [1, 1], -np.inf, np.inf),
        ([np.nan, 1], [1, 1], np.nan, np.nan),
        ([1, 1], [np.inf, 1], np.nan, np.inf),
        ([np.inf, 1], [np.inf, 1], np.nan, np.nan),
        ([3e38, 1], [1e-45, 0], -1675.0, 3e38),
        ([1, 1], [0, 0], -np.inf, 1),
    ],
)
def test_errors_that_are_not_finite_stay_so(decoded, reference, sqnr, largest):
    found = error_of(np.float32(decoded), np.float32(reference))
    np.testing.assert_allclose(found.sqnr_db, sqnr, rtol=1e-2)
    np.testing.assert_allclose(found.max_abs, largest, rtol=1e-6)


def test_a_nan_in_an_earlier_piece_is_not_forgotten(monkeypatch):
    monkeypatch.setattr("jaxlowprec.checkpoints.conversion.inspect._CHUNK", 1)
    assert np.isnan(error_of(np.float32([np.nan, 2]), np.float32([1, 1])).max_abs)


@pytest.mark.parametrize("name", ["w4a16", "fp8_block", "mxfp8", "nvfp4"])
def test_dequantizing_to_a_dtype_that_ends_before_is_refused(tmp_path, name):
    weight = np.full((128, 128), 1e6, np.float32)
    source = write_checkpoint(tmp_path / "source", {f"{MODULE}.weight": weight}, shards=1)
    convert(source, tmp_path / "low", schemes.by_name(name))
    with pytest.raises(CheckpointError, match=f"module '{MODULE}': its numbers reach .*, but float16 ends at 65504"):
        dequantize(tmp_path / "low", tmp_path / "high", dtype="float16")
    assert not (tmp_path / "high" / "model.safetensors").exists()
    dequantize(tmp_path / "low", tmp_path / "wide", dtype="float32", options=ConvertOptions(verify=True))
    assert all_finite(read_tensors(tmp_path / "wide")[f"{MODULE}.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scales_that_decode_to_infinity_are_not_written(tmp_path, dtype):
    scheme = schemes.by_name("gptq")
    tensors = scheme.compress(np.ones((128, 128), np.float32))
    tensors["scales"] = np.full_like(tensors["scales"], 60000)  # 7 times that is infinite in float16
    config = with_quantization(CONFIG, scheme.quantization_config([]))
    names = {f"{MODULE}.{suffix}": array for suffix, array in tensors.items()}
    low = write_checkpoint(tmp_path / "low", names, shards=1, config=config)
    with pytest.raises(CheckpointError, match=f"module '{MODULE}': its codes and scales stand for infinity"):
        dequantize(low, tmp_path / "high", dtype=dtype)


def test_saving_in_a_narrower_dtype_makes_no_infinities(tmp_path):
    mapping = TreeMapping((Rule("up.kernel", "up.weight"),))
    tree = {"up": {"kernel": np.full((2, 3), 1e5, np.float32)}}
    with pytest.raises(ValueError, match="up.kernel: its numbers reach 100000, but float16 ends at 65504"):
        trees.save(tmp_path / "x", tree, mapping, {}, dtype="float16")
    tree["up"]["kernel"][:] = [1, np.inf, np.nan]  # what is not finite stays so
    saved = mapping.to_tensors(tree, dtype="float16")["up.weight"]
    np.testing.assert_array_equal(saved, np.float16([[1, 1], [np.inf, np.inf], [np.nan, np.nan]]))
