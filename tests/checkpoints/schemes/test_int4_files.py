"""INT4's files: compressed-tensors' words, slime's zero points, GPTQ and AWQ, by their published formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import schemes
from tests.checkpoints.weights import assert_same_tensors, weight
from tests.eager import jlp
from tests.helpers import as_bytes

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def nibble(words, index):
    """The index-th nibble of each word."""
    return words.view(np.uint32) >> np.uint32(4 * index) & np.uint32(15)


def codes_of(q):
    """Codes [N, K] and zero points [N, K/g] of a QuantizedArray."""
    data = np.asarray(q.data)
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(data.shape[0], -1)[:, : q.shape[1]]
    return codes, None if q.zero_point is None else np.asarray(q.zero_point)


def quantized(name, shape, dtype="bfloat16", **options):
    scheme = schemes.by_name(name, **options)
    return scheme, jlp.quantize(jax.device_put(weight(shape, dtype)), scheme.format)


class TestCompressedTensors:
    @pytest.mark.parametrize("name", ["w4a16", "w4a16_asym"])
    @pytest.mark.parametrize(("shape", "group_size"), [((16, 256), 128), ((13, 36), 12), ((5, 39), 13), ((8, 32), 32)])
    def test_layout(self, name, shape, group_size):
        scheme, q = quantized(name, shape, group_size=group_size)
        tensors = scheme.store(q)
        codes, zeros = codes_of(q)
        for k in range(shape[1]):
            np.testing.assert_array_equal(nibble(tensors["weight_packed"][:, k // 8], k % 8), codes[:, k])
        for k in range(shape[1], 8 * tensors["weight_packed"].shape[1]):
            assert not nibble(tensors["weight_packed"][:, k // 8], k % 8).any()
        assert tensors["weight_shape"].tolist() == list(shape)
        assert tensors["weight_shape"].dtype == np.int64
        if zeros is not None:
            for n in range(shape[0]):
                np.testing.assert_array_equal(nibble(tensors["weight_zero_point"][n // 8], n % 8), zeros[n])
        assert_same_tensors(scheme.store(scheme.load(tensors)), tensors)
        assert as_bytes(scheme.load(tensors).data).tobytes() == as_bytes(q.data).tobytes()

    def test_words_are_bytes_seen_as_words(self):
        scheme, q = quantized("w4a16", (16, 256))
        np.testing.assert_array_equal(scheme.store(q)["weight_packed"], np.asarray(q.data).view("<i4"))

    def test_a_shape_of_int32_is_read(self):
        scheme, q = quantized("w4a16", (16, 256))
        tensors = scheme.store(q)
        short = {**tensors, "weight_shape": tensors["weight_shape"].astype(np.int32)}
        assert_same_tensors(scheme.store(scheme.load(short)), tensors)

    def test_a_shape_that_the_words_do_not_have(self):
        scheme, q = quantized("w4a16", (16, 256))
        tensors = {**scheme.store(q), "weight_shape": np.array([16, 384])}
        with pytest.raises(ValueError, match=r"weight_packed is int32 \[16, 32\]; needs int32 \[16, 48\] for a weight"):
            scheme.load(tensors)

    def test_scales_of_another_dtype(self):
        tensors = schemes.by_name("w4a16", scale_dtype="float16").compress(weight((16, 256)))
        with pytest.raises(ValueError, match=r"weight_scale is float16 \[16, 2\]; needs bfloat16 \[16, 2\]"):
            schemes.by_name("w4a16").load(tensors)

    def test_the_trained_weight_is_the_stored_weight(self):
        for name in ("w4a16", "w4a16_asym"):
            scheme = schemes.by_name(name, group_size=32)
            w = weight((64, 256), "float32")
            trained = jlp.fake_quantize(jax.device_put(w), scheme.format)
            stored = scheme.decompress(scheme.compress(w))
            np.testing.assert_array_equal(as_bytes(np.asarray(trained.astype(jnp.bfloat16))), as_bytes(stored))
            again = scheme.compress(w.astype(ml_dtypes.bfloat16))  # the master, exported and converted later
            assert_same_tensors(again, scheme.compress(w))

    def test_symmetric_groups_quantise_decoded_weights_to_themselves(self):
        scheme = schemes.by_name("w4a16", group_size=32)
        stored = scheme.decompress(scheme.compress(weight((64, 256), "float32")))
        np.testing.assert_array_equal(as_bytes(scheme.decompress(scheme.compress(stored))), as_bytes(stored))


class TestSlime:
    def test_zero_points_become_compressed_tensors_own(self):
        ours, q = quantized("w4a16_asym", (24, 256), group_size=64)
        tensors = ours.store(q)
        zeros = np.asarray(q.zero_point)
        words = np.zeros((4, 3), np.uint32)
        for n in range(24):
            words[:, n // 8] |= zeros[n].astype(np.uint32) << np.uint32(4 * AWQ_NIBBLES[n % 8])
        slimes = {**tensors, "weight_zero_point": words.view(np.int32), "weight_shape": np.array([24, 256], np.int32)}
        slime = schemes.by_name("w4a16_asym", group_size=64, zero_point_order="slime")
        assert_same_tensors(ours.store(slime.load(slimes)), tensors)
        np.testing.assert_array_equal(as_bytes(slime.decompress(slimes)), as_bytes(ours.decompress(tensors)))

    def test_its_order_is_not_written(self):
        slime = schemes.by_name("w4a16_asym", zero_point_order="slime")
        with pytest.raises(ValueError, match="slime's order of zero points is only read"):
            slime.compress(weight((16, 256)))
        assert "not a multiple of 8" in slime.check((12, 256))
        with pytest.raises(ValueError, match="zero_point_order='awq'"):
            schemes.by_name("w4a16_asym", zero_point_order="awq")


class TestGPTQ:
    @pytest.mark.parametrize("options", [{}, {"symmetric": False, "version": 2}], ids=str)
    def test_layout(self, options):
        scheme, q = quantized("gptq", (24, 256), "float16", group_size=64, **options)
        tensors = scheme.store(q)
        codes, zeros = codes_of(q)
        for k in range(256):
            np.testing.assert_array_equal(nibble(tensors["qweight"][k // 8], k % 8), codes[:, k])
        for n in range(24):
            stored = nibble(tensors["qzeros"][:, n // 8], n % 8)
            np.testing.assert_array_equal(stored, 7 if zeros is None else zeros[n])
        np.testing.assert_array_equal(tensors["scales"], np.asarray(q.scale).T)
        assert tensors["g_idx"].tolist() == [k // 64 for k in range(256)]

    def test_words_are_compressed_tensors_transposed(self):
        w = weight((24, 256))
        gptq = schemes.by_name("gptq", scale_dtype="bfloat16").compress(w)
        np.testing.assert_array_equal(gptq["qweight"], schemes.by_name("w4a16").compress(w)["weight_packed"].T)

    def test_version_one_stores_zero_points_minus_one(self):
        second, q = quantized("gptq", (16, 128), "float16", symmetric=False, version=2)
        q = dataclasses.replace(q, zero_point=jnp.maximum(q.zero_point, 1))
        first = dataclasses.replace(second, version=1)
        np.testing.assert_array_equal(
            second.store(q)["qzeros"].view(np.uint32) - np.uint32(0x11111111), first.store(q)["qzeros"].view(np.uint32)
        )
        assert_same_tensors(first.store(first.load(first.store(q))), first.store(q))

    def test_version_one_has_no_zero_point_of_zero(self):
        scheme, q = quantized("gptq", (16, 128), "float16", symmetric=False)
        assert (np.asarray(q.zero_point) == 0).any()  # of the row of positive numbers
        with pytest.raises(ValueError, match=r"no code for a zero point of 0; use by_name\('gptq', version=2\)"):
            scheme.store(q)
        stored = dataclasses.replace(scheme, version=2).store(q)
        stored["qzeros"] = np.full_like(stored["qzeros"], -1)
        with pytest.raises(ValueError, match="qzeros holds 15, which stands for 16 in version 1"):
            scheme.load(stored)

    def test_other_zero_points_are_not_symmetric(self):
        scheme, q = quantized("gptq", (16, 128), "float16")
        tensors = scheme.store(q)
        with pytest.raises(ValueError, match="zero points other than 8"):
            dataclasses.replace(scheme, version=2).load(tensors)

    def test_act_order_decompresses_and_does_not_load(self):
        scheme, q = quantized("gptq", (16, 256), "float16", group_size=64)
        tensors = scheme.store(q)
        order = np.random.default_rng(0).permutation(256)
        shuffled = {**tensors, "g_idx": tensors["g_idx"][order]}
        with pytest.raises(ValueError, match="g_idx is not k // group_size.*run `jaxlowprec dequantize`"):
            scheme.load(shuffled)
        codes, _ = codes_of(q)
        scale = np.asarray(q.scale, np.float32)[:, shuffled["g_idx"]]
        expected = ((codes.astype(np.float32) - 8) * scale).astype(np.float16)
        np.testing.assert_array_equal(scheme.decompress(shuffled, "float16"), expected)
        with pytest.raises(ValueError, match="g_idx names group 9; there are 4"):
            scheme.decompress({**tensors, "g_idx": np.full(256, 9, np.int32)})

    def test_act_order_of_a_group_of_rows_is_no_order(self):
        scheme, w = schemes.by_name("gptq", group_size=-1), weight((16, 256))
        tensors = scheme.compress(w)
        assert not tensors["g_idx"].any() and tensors["scales"].shape == (1, 16) and tensors["qzeros"].shape == (1, 2)
        scheme.load(tensors)

    def test_sizes_fill_words(self):
        assert "multiples of 8" in schemes.by_name("gptq").check((12, 128))
        assert "multiples of 8" in schemes.by_name("gptq", group_size=12).check((16, 36))

    def test_versions(self):
        with pytest.raises(ValueError, match="version=3; needs 1 or 2"):
            schemes.by_name("gptq", version=3)


class TestActOrderOfCompressedTensors:
    """`"actorder": "group"`, which compressed-tensors wrote before 0.20."""

    @pytest.mark.parametrize("name", ["w4a16", "w4a16_asym"])
    def test_decompresses_and_does_not_load(self, name):
        scheme, w = schemes.by_name(name, group_size=64), weight((16, 256))
        order = np.random.default_rng(0).permutation(256)
        tensors = scheme.compress(np.ascontiguousarray(w[:, order]))  # groups are consecutive in this order
        words = schemes.int4.unpack_words(tensors["weight_packed"], 256)[:, np.argsort(order)]
        tensors["weight_packed"] = schemes.int4.pack_words(np.ascontiguousarray(words))
        g_idx = (np.argsort(order) // 64).astype(np.int32)
        ordered = {**tensors, "weight_g_idx": g_idx}
        expected = scheme.decompress(scheme.compress(np.ascontiguousarray(w[:, order])))[:, np.argsort(order)]
        np.testing.assert_array_equal(scheme.decompress(ordered), expected)
        with pytest.raises(ValueError, match="weight_g_idx is not k // group_size.*run `jaxlowprec dequantize`"):
            scheme.load(ordered)

    def test_an_order_that_is_none_loads(self):
        scheme = schemes.by_name("w4a16", group_size=64)
        tensors = scheme.compress(weight((16, 256)))
        for g_idx in (np.arange(256, dtype=np.int32) // 64, np.full(256, -1, np.int32)):
            loaded = scheme.load({**tensors, "weight_g_idx": g_idx})
            assert_same_tensors(scheme.store(loaded), tensors)

    @pytest.mark.parametrize(
        ("g_idx", "message"),
        [
            (np.full(256, 4, np.int32), "weight_g_idx names group 4; there are 4"),
            (np.r_[np.full(255, 1), -1].astype(np.int32), "weight_g_idx names group -1"),
            (np.zeros(255, np.int32), r"weight_g_idx is int32 \[255\]; needs int32 or int64 \[256\]"),
            (np.zeros(256, np.float32), "weight_g_idx is float32"),
        ],
    )
    def test_groups_that_are_none(self, g_idx, message):
        scheme = schemes.by_name("w4a16", group_size=64)
        with pytest.raises(ValueError, match=message):
            scheme.decompress({**scheme.compress(weight((16, 256))), "weight_g_idx": g_idx})

    @pytest.mark.parametrize("order", ["group", "weight", True, False, None])
    def test_the_configuration_says_it(self, order):
        entry = schemes.by_name("w4a16").quantization_config([])
        entry["config_groups"]["group_0"]["weights"]["actorder"] = order
        assert schemes.from_config(entry) == schemes.by_name("w4a16")


class TestAWQ:
    @pytest.mark.parametrize("symmetric", [False, True])
    @pytest.mark.parametrize(("shape", "group_size"), [((24, 256), 64), ((8, 39), 13)])
    def test_layout(self, symmetric, shape, group_size):
        scheme, q = quantized("awq", shape, "float16", group_size=group_size, symmetric=symmetric)
        tensors = scheme.store(q)
        codes, zeros = codes_of(q)
        for n in range(shape[0]):
            position = AWQ_NIBBLES[n % 8]
            np.testing.assert_array_equal(nibble(tensors["qweight"][:, n // 8], position), codes[n])
            expected = 8 if zeros is None else zeros[n]
            np.testing.assert_array_equal(nibble(tensors["qzeros"][:, n // 8], position), expected)
        loaded = scheme.load(tensors)
        assert as_bytes(loaded.data).tobytes() == as_bytes(q.data).tobytes()
        assert_same_tensors(scheme.store(loaded), tensors)
        np.testing.assert_array_equal(scheme.decompress(tensors, "float16"), np.asarray(q.dequantize()))

    def test_other_zero_points_are_not_symmetric(self):
        scheme, q = quantized("awq", (8, 128), "float16")
        with pytest.raises(ValueError, match="zero points other than 8"):
            dataclasses.replace(scheme, symmetric=True).load(scheme.store(q))

    def test_rows_fill_words(self):
        assert "12 rows are not a multiple of 8" in schemes.by_name("awq").check((12, 128))


class TestTies:
    """All 128 mantissas of a bfloat16 amax, each with weights at ties of the rounded scale."""

    def weights(self, dtype):
        amax = (np.arange(128, 256) / 128).astype(np.float32)
        scale = (amax / np.float32(7)).astype(dtype).astype(np.float32)
        ties = scale[:, None] * (np.arange(7) + np.float32(0.5))
        w = np.zeros((128, 16), np.float32)
        w[:, 0], w[:, 1:8], w[:, 8:15] = -amax, ties, -ties
        return w, scale

    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
    def test_codes_are_those_of_the_rule(self, dtype):
        w, scale = self.weights(dtype)
        rounded = w.astype(dtype)
        exact = rounded.astype(np.float64) / scale[:, None].astype(np.float64)
        expected = np.clip(np.rint(exact), -7, 7)
        assert (abs(exact % 1) == 0.5).any()
        scheme = schemes.by_name("w4a16", group_size=16, scale_dtype=np.dtype(dtype).name)
        tensors = scheme.compress(w)
        np.testing.assert_array_equal(tensors["weight_scale"][:, 0].astype(np.float32), scale)
        codes, _ = codes_of(scheme.load(tensors))
        np.testing.assert_array_equal(codes.astype(int) - 8, expected)
        again = scheme.compress(scheme.decompress(tensors, "float32"))
        assert_same_tensors(again, tensors)  # quantising the decoded weight changes nothing
