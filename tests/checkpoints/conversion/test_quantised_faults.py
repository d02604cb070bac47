"""Quantised checkpoints whose tensors are not what their config says give errors, never wrong weights."""

import json

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints.conversion.convert import convert, dequantize
from jaxlowprec.checkpoints.conversion.inspect import inspect
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.config import with_quantization
from tests.checkpoints.conversion.test_convert import SCHEMES
from tests.checkpoints.small_models import CONFIG, read_config, read_tensors, write_checkpoint
from tests.checkpoints.weights import weight
from tests.helpers import assert_same_bytes

MODULE = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module", params=SCHEMES)
def stored(request):
    """A scheme, and the tensors of one module in it."""
    scheme = SCHEMES[request.param]
    return scheme, scheme.compress(weight((64, 128)))


def write(path, scheme, tensors):
    config = with_quantization(CONFIG, scheme.quantization_config([]))
    names = {f"{MODULE}.{suffix}": array for suffix, array in tensors.items()}
    return write_checkpoint(path, names, shards=1, config=config)


def harmed(array):
    """The same tensor with other dtypes and shapes."""
    yield array[:-1] if array.ndim else array[None]
    yield array[..., :-1] if array.ndim else array[None, None]
    yield np.concatenate([array, array]) if array.ndim else np.stack([array, array])
    yield array[None]
    yield array.view({1: np.int8, 2: np.int16, 4: np.uint32, 8: np.uint64}[array.dtype.itemsize])
    if array.ndim == 2 and array.shape[0] != array.shape[1]:
        yield np.ascontiguousarray(array.T)


def reads_as_well(scheme, suffix, array, changed):
    """Whether changed tensors fit the format too: one tile, row or tensor holds codes of other shapes."""
    if changed.dtype != array.dtype:
        return False
    if scheme.name in ("autofp8", "modelopt_fp8", "fp8_tensor") and suffix != "weight":
        return changed.shape in ((), (1,))
    if scheme.name.startswith(("fp8_channel", "int8_channel")):
        return changed.shape == array.shape or (suffix == "weight" and changed.shape[0] == len(array))
    if getattr(scheme, "group_size", 0) == -1:
        return suffix == "qweight" and changed.ndim == 2 and scheme.name == "awq" and changed.shape[1] == array.shape[1]
    return suffix == "weight" and scheme.format.length in (1, 128) and changed.ndim == 2


def refuses(path, message):
    with pytest.raises(CheckpointError, match=message):
        dequantize(path, path.parent / "high")
    assert not (path.parent / "high").exists()
    with pytest.raises(CheckpointError, match=message):
        inspect(path)


def test_the_unharmed_module_is_read(stored, tmp_path):
    scheme, tensors = stored
    dequantize(write(tmp_path / "low", scheme, tensors), tmp_path / "high")


def test_tensors_of_other_dtypes_and_shapes(stored, tmp_path):
    scheme, tensors = stored
    count = 0
    for suffix, array in tensors.items():
        for changed in harmed(np.asarray(array)):
            if reads_as_well(scheme, suffix, np.asarray(array), changed):
                continue
            count += 1
            refuses(
                write(tmp_path / str(count) / "low", scheme, {**tensors, suffix: np.ascontiguousarray(changed)}), MODULE
            )
    assert count > 6


def test_missing_tensors(stored, tmp_path):
    scheme, tensors = stored
    for suffix in scheme.required:
        if suffix != "weight" and len(tensors) > 1:
            rest = {s: a for s, a in tensors.items() if s != suffix}
            only_weight = set(rest) == {"weight"}  # which inspect may list: its dtype says what it is
            refused = f"module '{MODULE}' has weight.*and {suffix}" if only_weight else f"also needs.*{suffix}"
            path = write(tmp_path / suffix / "low", scheme, rest)
            with pytest.raises(CheckpointError, match=refused):
                dequantize(path, path.parent / "high")


NAMES = ("scale", "weight_scales", "weight.scale", "scale_inv", "scb", "absmax", "weight_packed_", "w")
"""Names that no scheme gives to a module's tensors."""


@pytest.mark.parametrize("joint", ["model.layers.1.mlp.down_proj.", "model.layers.1.mlp.experts.gate_up_proj", "up"])
def test_codes_never_pass_for_weights(stored, tmp_path, joint):
    """Beside a whole module, one whose tensors are called otherwise, all or some."""
    scheme, tensors = stored
    whole = {f"{MODULE}.{suffix}": array for suffix, array in tensors.items()}
    config = with_quantization(CONFIG, scheme.quantization_config([]))
    for n, suffix in enumerate(scheme.required):
        others = {part: name for part, name in zip(tensors, NAMES, strict=False) if part != suffix and n % 2}
        renamed = {**{part: part for part in tensors}, **others, suffix: NAMES[n + 1]}
        held = {f"{joint}{renamed[part]}".removesuffix("weight"): array for part, array in tensors.items()}
        path = write_checkpoint(tmp_path / str(n) / "low", {**whole, **held}, shards=1, config=config)
        with pytest.raises(CheckpointError, match=r"module '.*' (has|holds)|without a name"):
            dequantize(path, path.parent / "high")
        assert not (path.parent / "high").exists()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8"])
def test_no_tensor_of_eight_bits_is_left(stored, tmp_path, dtype):
    scheme, tensors = stored
    named = {f"{MODULE}.{suffix}": array for suffix, array in tensors.items()}
    config = with_quantization(CONFIG, scheme.quantization_config([]))
    codes = np.ones((2, 8, 8), np.uint8).view(getattr(ml_dtypes, dtype, dtype))
    for n, name in enumerate(("layers.1.experts.gate_up_proj", "layers.1.up.weight", "layers.1.scale", "layers.1.x")):
        path = write_checkpoint(tmp_path / str(n) / "low", {**named, name: codes}, shards=1, config=config)
        refused = rf"module 'layers\.1.*' has .*\[2, 8, 8\].* in {scheme.name} consists"
        with pytest.raises(CheckpointError, match=refused):
            dequantize(path, path.parent / "high")
        plain = {name: codes, "a.weight": weight((64, 128))}
        with pytest.raises(CheckpointError, match="is quantised already: it holds"):
            convert(write_checkpoint(path.parent / "plain", plain, shards=1), path.parent / "twice", scheme)


def test_masks_are_no_codes(stored, tmp_path):
    scheme, tensors = stored
    masks = {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.uint8), "h.0.attn.mask": np.ones((8, 8), np.bool_)}
    named = {f"{MODULE}.{suffix}": array for suffix, array in tensors.items()}
    config = with_quantization(CONFIG, scheme.quantization_config([]))
    dequantize(write_checkpoint(tmp_path / "low", {**named, **masks}, shards=1, config=config), tmp_path / "high")
    assert set(read_tensors(tmp_path / "high")) == {f"{MODULE}.weight", *masks}


@pytest.mark.parametrize("shape", [(0, 0), (64, 129), (128, 64), (1 << 40, 1 << 40), (-64, -128), (-1, 128)])
@pytest.mark.parametrize("name", ["w4a16", "w4a16_asym"])
def test_a_false_weight_shape(tmp_path, name, shape):
    scheme = SCHEMES[name]
    tensors = {**scheme.compress(weight((64, 128))), "weight_shape": np.int64(shape)}
    refuses(write(tmp_path / "low", scheme, tensors), MODULE)


@pytest.mark.parametrize("value", [0, -1, np.nan, np.inf])
def test_a_tensor_scale_that_no_weight_has(tmp_path, value):
    scheme = SCHEMES["nvfp4"]
    tensors = {**scheme.compress(weight((64, 128))), "weight_global_scale": np.float32([value])}
    with pytest.raises(CheckpointError, match=f"module '{MODULE}': .*needs a positive number"):
        dequantize(write(tmp_path / "low", scheme, tensors), tmp_path / "high")
    assert not (tmp_path / "high" / "model.safetensors").exists()


def test_a_weight_beside_its_codes(tmp_path):
    scheme = SCHEMES["w4a16"]
    tensors = {**scheme.compress(weight((64, 128))), "weight": weight((64, 128))}
    with pytest.raises(CheckpointError, match="has a weight, and quantised tensors as well"):
        dequantize(write(tmp_path / "low", scheme, tensors), tmp_path / "high")


def test_settings_of_the_cache_only_have_a_way_out(tmp_path):
    """`convert` must not point to `dequantize`, which has nothing to decode."""
    entry = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}
    config = {**CONFIG, "quantization_config": entry}
    path = write_checkpoint(tmp_path / "x", {f"{MODULE}.weight": weight((64, 128))}, shards=1, config=config)
    remedy = "take quantization_config out of config.json"
    refuses(path, f"no weights are quantised, so there is nothing to decode; {remedy}")
    with pytest.raises(CheckpointError, match=f"though none of its weights are; {remedy}$"):
        convert(path, tmp_path / "low", SCHEMES["mxfp4"])


def test_gptqs_own_file_of_settings_is_read(tmp_path):
    """Older tools leave config.json as it was."""
    scheme = SCHEMES["gptq"]
    both = [write(tmp_path / name, scheme, scheme.compress(weight((64, 128)))) for name in ("a", "b")]
    entry = read_config(both[1]).pop("quantization_config")
    (both[1] / "config.json").write_text(json.dumps(CONFIG))
    del entry["quant_method"]
    (both[1] / "quantize_config.json").write_text(json.dumps(entry))
    with pytest.raises(CheckpointError, match="is quantised already: it has quantize_config.json; .*dequantize"):
        convert(both[1], tmp_path / "low", SCHEMES["mxfp4"])
    assert inspect(both[1]).scheme == inspect(both[0]).scheme
    made = [dequantize(path, tmp_path / f"high {path.name}") and tmp_path / f"high {path.name}" for path in both]
    assert_same_bytes(read_tensors(made[1]), read_tensors(made[0]))
    assert not (made[1] / "quantize_config.json").exists()
