"""What holds for every scheme: loading and storing are inverse, compressing is quantising, bad tensors are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import schemes
from tests.checkpoints.weights import FLOATS, ROW_GROUPS, ROW_SCALES, SCHEMES, assert_same_tensors, weight
from tests.eager import jlp
from tests.helpers import as_bytes, assert_same_bytes

LOADABLE = SCHEMES | {f"{name} of rows": scheme for name, scheme in ROW_GROUPS.items()}
ALL = LOADABLE | ROW_SCALES

over_schemes = pytest.mark.parametrize("scheme", LOADABLE.values(), ids=LOADABLE)
over_all = pytest.mark.parametrize("scheme", ALL.values(), ids=ALL)
over_dtypes = pytest.mark.parametrize("dtype", FLOATS)
SHAPES = ((16, 256), (200, 384), (8, 128))


class TestEveryScheme:
    @over_all
    def test_has_a_name_that_makes_it(self, scheme):
        options = {field.name: getattr(scheme, field.name) for field in dataclasses.fields(scheme)}
        assert schemes.by_name(scheme.name, **options) == scheme
        assert hash(scheme) == hash(schemes.by_name(scheme.name, **options))

    def test_all_are_tested(self):
        of_arrays = {"gpt_oss_mxfp4"}  # see test_gpt_oss.py
        assert {scheme.name for scheme in ALL.values()} | of_arrays == set(schemes.NAMES)

    @over_schemes
    @over_dtypes
    def test_store_is_the_inverse_of_load(self, scheme, dtype):
        for shape in SHAPES:
            tensors = scheme.compress(weight(shape, dtype))
            loaded = scheme.load(tensors)
            assert loaded.shape == shape
            assert (loaded.axis, loaded.format) == (-1, scheme.of_shape(shape).format)
            assert_same_tensors(scheme.store(loaded), tensors)

    @over_schemes
    @over_dtypes
    def test_compressing_is_quantising(self, scheme, dtype):
        w = weight((200, 384), dtype)
        q = jlp.quantize(jax.device_put(w), scheme.of_shape(w.shape).format)
        tensors = scheme.compress(w)
        assert_same_tensors(tensors, scheme.store(q))
        loaded = scheme.load(tensors)
        assert_same_bytes((loaded.data, loaded.scale, loaded.zero_point), (q.data, q.scale, q.zero_point))
        if dtype != "float32":  # of a float32 weight the amax may be the next float32 with the same scale
            assert_same_bytes(loaded.amax, q.amax)

    @over_all
    @over_dtypes
    def test_output_specs_are_those_of_the_tensors(self, scheme, dtype):
        for shape in SHAPES:
            tensors = scheme.compress(weight(shape, dtype))
            specs = {name: (tensor.dtype.name, tensor.shape) for name, tensor in tensors.items()}
            assert scheme.output_specs(shape, dtype) == specs

    @over_schemes
    def test_decompress_is_dequantize(self, scheme):
        w = weight((200, 384))
        tensors = scheme.compress(w)
        decoded = scheme.decompress(tensors)
        assert decoded.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(as_bytes(decoded), as_bytes(scheme.load(tensors).dequantize()))
        error = abs(decoded.astype(np.float32) - w.astype(np.float32))[4:]
        assert 0 < error.max() < 0.02

    @over_schemes
    def test_a_weight_of_zeros_decodes_to_zeros_without_nan(self, scheme):
        w = np.zeros((128, 256), ml_dtypes.bfloat16)
        scheme = dataclasses.replace(scheme, version=2) if scheme.name == "gptq" else scheme
        tensors = scheme.compress(w)
        np.testing.assert_array_equal(as_bytes(scheme.decompress(tensors)), 0)
        assert all(np.isfinite(t.astype(np.float32)).all() for t in tensors.values() if t.dtype.kind in "fV")
        assert_same_tensors(scheme.store(scheme.load(tensors)), tensors)

    @over_all
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_a_weight_that_is_not_finite_is_refused(self, scheme, bad):
        w = weight((128, 256))
        w[5, 7] = bad
        with pytest.raises(ValueError, match="NaN or infinity"):
            scheme.compress(w)

    @over_all
    def test_what_cannot_be_held_is_said(self, scheme):
        assert scheme.check((128, 256)) is None
        assert "3 dimensions" in scheme.check((2, 128, 256))
        assert "empty" in scheme.check((0, 256))
        with pytest.raises(ValueError, match=r"compress: cannot hold a weight of shape \(2, 128, 256\)"):
            scheme.compress(np.zeros((2, 128, 256), np.float32))
        with pytest.raises(TypeError, match="weight has dtype float64; needs bfloat16 or float16 or float32"):
            scheme.compress(np.zeros((128, 256)))
        if (
            scheme.has_format
            and getattr(scheme, "group_size", 0) != -1
            and not scheme.format.tiles
            and scheme.format.length > 1
        ):
            k = 256 + scheme.format.length // 2
            reason = f"its {k} columns are not a multiple of the {scheme.format.length} that share a scale"
            assert scheme.check((128, k)) == reason

    @over_all
    def test_amax_is_for_tensor_scales(self, scheme):
        w = weight((16, 256))
        if not scheme.shares_global_scale:
            with pytest.raises(ValueError, match="amax"):
                scheme.compress(w, amax=8.0)
            return
        shared = scheme.compress(w, amax=8.0)
        room = 1.75 if scheme.format.chooses_scales else 1  # above scales that may be raised
        loaded = scheme.load(shared)
        assert float(loaded.scale * 448 if loaded.amax is None else loaded.amax) == 8.0 * room
        assert_same_tensors(shared, scheme.store(jlp.quantize(jax.device_put(w), scheme.format, amax=jnp.float32(8))))


class TestBadTensors:
    @over_all
    @pytest.mark.parametrize("verb", ["load", "decompress"])
    def test_missing(self, scheme, verb):
        tensors = scheme.compress(weight((16, 256)))
        for name in scheme.required:
            others = {other: tensor for other, tensor in tensors.items() if other != name}
            with pytest.raises(ValueError, match=f"{scheme.name}.{verb}: tensors {name} are missing"):
                getattr(scheme, verb)(others)

    @over_all
    def test_unexpected(self, scheme):
        tensors = scheme.compress(weight((16, 256)))
        with pytest.raises(ValueError, match="unexpected tensors weight_bias"):
            scheme.load({**tensors, "weight_bias": np.zeros(3)})

    @over_all
    def test_wrong_dtype(self, scheme):
        tensors = scheme.compress(weight((16, 256)))
        for name, tensor in tensors.items():
            wrong = tensor.astype(np.float64)
            with pytest.raises(ValueError, match=name):
                scheme.load({**tensors, name: wrong})

    @over_all
    def test_wrong_shape(self, scheme):
        tensors = scheme.compress(weight((16, 256)))
        for name, tensor in tensors.items():
            for wrong in (np.concatenate([tensor.reshape(-1)] * 2), np.stack([tensor, tensor])):
                with pytest.raises(ValueError, match="."):
                    scheme.load({**tensors, name: wrong})
        specs = scheme.output_specs((16, 256))
        name = next((n for n, (_, shape) in specs.items() if len(shape) == 2 and "scale" in n), None)
        if name is None:
            return  # its scales are scalars
        with pytest.raises(ValueError) as raised:
            scheme.load({**tensors, name: tensors[name].T.copy()[:, :1]})
        dtype, shape = specs[name]
        assert f"{name} is {dtype}" in str(raised.value)
        assert f"{list(shape)} for a weight of shape [16, 256]" in str(raised.value)

    @over_schemes
    def test_store_refuses_other_arrays(self, scheme):
        q = scheme.load(scheme.compress(weight((128, 256))))
        with pytest.raises(TypeError, match="q is a ndarray; needs a QuantizedArray"):
            scheme.store(np.zeros(3))
        with pytest.raises(ValueError, match=r"quantised along axis -2; pass q.mT, which is \[N, K\]"):
            scheme.store(q.mT)
        other = jlp.quantize(jnp.zeros((128, 256)), jlp.Float8Tensor("e5m2"))
        with pytest.raises(ValueError, match="q has format Float8Tensor"):
            scheme.store(other)
        with pytest.raises(ValueError, match="q is rotated"):
            scheme.store(dataclasses.replace(q, hadamard=jlp.Hadamard()))


class TestGroupsOfRows:
    @pytest.mark.parametrize("name", ROW_GROUPS)
    def test_they_are_groups_of_k(self, name):
        scheme, w = ROW_GROUPS[name], weight((16, 384))
        fixed = scheme.of_shape(w.shape)
        assert fixed == dataclasses.replace(scheme, group_size=384)
        assert_same_tensors(scheme.compress(w), fixed.compress(w))
        assert "-1" in str(scheme.quantization_config([])) or '"channel"' in str(
            scheme.quantization_config([])
        ).replace("'", '"')
        with pytest.raises(ValueError, match=r"one group per row, whose size is K; use scheme.of_shape"):
            _ = scheme.format

    def test_any_number_of_columns(self):
        scheme, w = ROW_GROUPS["w4a16_asym"], weight((13, 37))
        tensors = scheme.compress(w)
        assert tensors["weight_scale"].shape == (13, 1) and tensors["weight_zero_point"].shape == (2, 1)
        assert_same_tensors(scheme.store(scheme.load(tensors)), tensors)


class TestByName:
    def test_unknown_name(self):
        with pytest.raises(ValueError, match="no scheme 'int4'; there are w4a16, w4a16_asym, nvfp4"):
            schemes.by_name("int4")

    def test_unknown_option(self):
        with pytest.raises(ValueError, match="nvfp4 has no option symmetric; its options: nearest_amax, scale_rule$"):
            schemes.by_name("nvfp4", symmetric=True)
        with pytest.raises(ValueError, match="w4a16 has no option required; its options: group_size, scale_dtype$"):
            schemes.by_name("w4a16", required=())

    def test_group_size_of_formats_that_fix_it(self):
        assert schemes.by_name("nvfp4", group_size=16) == schemes.by_name("nvfp4")
        with pytest.raises(ValueError, match="group_size=32; nvfp4 has groups of 16"):
            schemes.by_name("nvfp4", group_size=32)

    def test_formats_without_groups(self):
        for name in ("fp8_channel", "fp8_tensor", "int8_channel"):
            with pytest.raises(ValueError, match=f"group_size=128; {name} has no groups: leave it out"):
                schemes.by_name(name, group_size=128)

    def test_group_size_of_int4(self):
        assert schemes.by_name("w4a16", group_size=32).format.group_size == 32
        assert schemes.by_name("w4a16").format.group_size == 128
