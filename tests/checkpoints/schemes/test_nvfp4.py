"""NVFP4's tensor scales: from an amax to what a file holds, and back."""

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.schemes.nvfp4 import amax_of, decode_scale, encode_scale
from tests.checkpoints.weights import assert_same_tensors, weight
from tests.eager import jlp
from tests.helpers import as_bytes

KINDS = {  # scheme, tensor, scale of an amax, a first guess at the amax of a scale
    "nvfp4": ("weight_global_scale", encode_scale, lambda s: np.float32(2688) / s),
    "nvfp4_w4a4": ("weight_global_scale", encode_scale, lambda s: np.float32(2688) / s),
    "modelopt_nvfp4": ("weight_scale_2", decode_scale, lambda s: np.float32(2688) * s),
}
over_kinds = pytest.mark.parametrize("name", KINDS)


def with_scale(name, value, shape=(4, 32)):
    """Tensors of a weight whose tensor scale is a given number."""
    scheme = schemes.by_name(name)
    tensors = scheme.compress(weight(shape))
    key = KINDS[name][0]
    return scheme, {**tensors, key: np.full_like(tensors[key], value)}


class TestAmax:
    @over_kinds
    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
    def test_the_amax_of_a_16_bit_weight_comes_back(self, name, dtype):
        _, scale_of, guess = KINDS[name]
        amaxes = np.arange(1, 0x7C00 if dtype == np.float16 else 0x7F80, dtype=np.uint16).view(dtype).astype(np.float32)
        amaxes = amaxes[(amaxes > 1e-34) & (amaxes < 1e37)][::7]
        for amax in amaxes:
            assert amax_of(scale_of(amax), scale_of, guess(scale_of(amax))) == amax

    @over_kinds
    def test_any_amax_comes_back_as_one_with_the_same_scale(self, name):
        _, scale_of, guess = KINDS[name]
        rng = np.random.default_rng(0)
        for amax in np.exp2(rng.uniform(-100, 100, 2000)).astype(np.float32):
            scale = scale_of(amax)
            found = amax_of(scale, scale_of, guess(scale))
            assert found is not None
            assert scale_of(found) == scale
            assert abs(found / amax - 1) <= 2.0**-23

    @over_kinds
    def test_a_scale_without_an_amax_needs_nearest(self, name):
        key, scale_of, guess = KINDS[name]
        candidates = np.float32(1.3) + np.arange(100, dtype=np.float32) * np.float32(2.0**-23)
        candidates = np.concatenate([candidates, candidates * np.float32(1.2)])
        none = [s for s in candidates if amax_of(s, scale_of, guess(s)) is None]
        assert 0 < len(none) < len(candidates)
        scheme, tensors = with_scale(name, none[0])
        with pytest.raises(ValueError, match=f"{key} is .*, which no float32 amax has.*nearest_amax=True"):
            scheme.load(tensors)
        loaded = schemes.by_name(name, nearest_amax=True).load(tensors)
        assert abs(float(loaded.amax) / float(guess(none[0])) - 1) <= 2.0**-23
        assert scheme.decompress(tensors).shape == (4, 32)

    def test_a_scale_that_another_range_was_used_for(self):
        scheme, tensors = with_scale("nvfp4", np.float32(1536) / np.float32(3))  # e4m3 up to 256: 6 * 256 / amax
        assert_same_tensors(scheme.store(scheme.load(tensors)), tensors)


class TestZeros:
    @over_kinds
    def test_zeros_are_written_with_a_scale_of_one(self, name):
        scheme = schemes.by_name(name)
        tensors = scheme.compress(np.zeros((4, 32), np.float32))
        assert tensors[KINDS[name][0]].reshape(()) == 1
        assert float(jlp.quantize(np.zeros((4, 32), np.float32), jlp.NVFP4()).amax) == 0

    @over_kinds
    def test_a_scale_of_zero_is_read_for_zeros(self, name):
        scheme = schemes.by_name(name)
        tensors = scheme.compress(np.zeros((4, 32), np.float32))
        tensors[KINDS[name][0]] = np.zeros_like(tensors[KINDS[name][0]])
        np.testing.assert_array_equal(as_bytes(scheme.decompress(tensors)), 0)
        np.testing.assert_array_equal(as_bytes(scheme.load(tensors).dequantize()), 0)

    @over_kinds
    @pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
    def test_no_other_scale_that_is_not_positive(self, name, value):
        scheme, tensors = with_scale(name, value)
        for verb in (scheme.load, scheme.decompress):
            with pytest.raises(ValueError, match=f"{KINDS[name][0]} is .*needs a positive number"):
                verb(tensors)

    def test_negative_zeros_keep_their_sign(self):
        scheme = schemes.by_name("nvfp4")
        tensors = scheme.compress(np.zeros((1, 16), np.float32))
        tensors["weight_packed"] = np.full_like(tensors["weight_packed"], 0x88)
        assert np.signbit(scheme.decompress(tensors, "float32")).all()


def test_ties_round_to_the_even_code():
    """The tie table of E2M1: with amax 6 * 448 and a block scale of 1 codes are the weights rounded."""
    table = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6, 0.26: 1, 0.74: 1, 5.1: 7, 6.0: 7, -0.25: 8}
    w = np.zeros((1, 32), np.float32)
    w[0, : len(table)] = list(table)
    w[0, 16] = 6 * 448
    tensors = schemes.by_name("nvfp4").compress(w)
    assert tensors["weight_global_scale"][0] == 1
    assert tensors["weight_scale"].astype(np.float32).tolist() == [[1, 448]]
    codes = [code for byte in tensors["weight_packed"][0] for code in (byte & 15, byte >> 4)]
    assert codes[: len(table)] == list(table.values())


@pytest.mark.parametrize(("name", "field"), [("modelopt_nvfp4", "input_scale"), ("nvfp4_w4a4", "input_global_scale")])
def test_the_activations_scale_is_written_and_not_held(name, field):
    scheme = schemes.by_name(name, **{field: 0.5})
    tensors = scheme.compress(weight((4, 32)))
    assert tensors[field] == 0.5
    assert schemes.by_name(name).store(scheme.load(tensors))[field] == 1
    without = {name: tensor for name, tensor in tensors.items() if name != field}
    assert float(scheme.load(without).amax) == float(scheme.load(tensors).amax)


def test_the_scale_of_the_largest_activation():
    made = {name: schemes.by_name(name).of_inputs(21.0) for name in ("nvfp4", "nvfp4_w4a4", "modelopt_nvfp4")}
    assert made["nvfp4"] == schemes.by_name("nvfp4")
    assert made["nvfp4_w4a4"].input_global_scale == 128
    assert made["modelopt_nvfp4"].input_scale == np.float32(21) / np.float32(2688)
    assert all(schemes.by_name(name).of_inputs(0.0) == schemes.by_name(name) for name in made)


def test_weights_and_codes_are_those_without_activations():
    both = schemes.by_name("nvfp4_w4a4").compress(weight((4, 32)))
    assert both.pop("input_global_scale") == 1
    assert_same_tensors(both, schemes.by_name("nvfp4").compress(weight((4, 32))))
