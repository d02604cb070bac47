"""Formats: what they accept, say of themselves and are as values."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.arrays.formats import ELEMENTS
from tests.helpers import FORMATS, format_name

over_formats = pytest.mark.parametrize("fmt", FORMATS, ids=format_name)


class TestValidation:
    @pytest.mark.parametrize("make", [jlp.MXFP8, jlp.Float8Block, jlp.Float8Tensor])
    @pytest.mark.parametrize("element", ["e2m1", "E4M3", "float8_e4m3fn", None, 8])
    def test_elements(self, make, element):
        with pytest.raises(ValueError) as raised:
            make(element)
        assert f'{make.__name__}: element={element!r}; needs "e4m3" or "e5m2"' in str(raised.value)

    @pytest.mark.parametrize(
        ("make", "block", "needs"),
        [
            (make, block, needs)
            for make, needs in (
                (lambda block: jlp.NVFP4(block), "(1, 16) or (16, 16)"),
                (lambda block: jlp.MXFP4(block), "(1, 32) or (32, 32)"),
                (lambda block: jlp.MXFP8(block=block), "(1, 32) or (32, 32)"),
                (lambda block: jlp.Float8Block(block=block), "(1, 128) or (128, 128)"),
            )
            for block in ((1, 64), (128, 1), (32, 1), 32, (128,), None)
        ],
    )
    def test_blocks(self, make, block, needs):
        with pytest.raises(ValueError) as raised:
            make(block)
        assert f"block={block!r}; needs {needs}" in str(raised.value)

    @pytest.mark.parametrize("make", [jlp.MXFP8, jlp.MXFP4])
    @pytest.mark.parametrize("rule", ["ceil", "UP", "", None])
    def test_scale_rules(self, make, rule):
        with pytest.raises(ValueError) as raised:
            make(scale_rule=rule)
        assert f'{make.__name__}: scale_rule={rule!r}; needs "up", "floor" or "even"' in str(raised.value)

    @pytest.mark.parametrize("rule", ["up", "4over6", "SIX", "", None])
    def test_scale_rules_of_nvfp4(self, rule):
        with pytest.raises(ValueError) as raised:
            jlp.NVFP4(scale_rule=rule)
        needs = '"six", "four_over_six", "four_over_six_mse" or "search"'
        assert f"NVFP4: scale_rule={rule!r}; needs {needs}" in str(raised.value)
        assert jlp.NVFP4() == jlp.NVFP4(scale_rule="six") != jlp.NVFP4(scale_rule="search")
        assert (str(jlp.NVFP4()), str(jlp.NVFP4(scale_rule="search"))) == ("NVFP4 1x16", "NVFP4 1x16 search")

    @pytest.mark.parametrize("make", [jlp.Float8Block, jlp.Float8Tensor])
    def test_float32_scales(self, make):
        for power_of_two in (1, None, "yes"):
            with pytest.raises(TypeError, match=f"{make.__name__}: power_of_two=.*; needs True or False"):
                make(power_of_two=power_of_two)
        for epsilon in (-1.0, float("inf"), float("nan"), True, "0", None, 1e39, 1e-39):
            with pytest.raises(ValueError, match=f"{make.__name__}: amax_epsilon=.*; needs a finite number, 0 or more"):
                make(amax_epsilon=epsilon)
        assert make(amax_epsilon=1).amax_epsilon == 1


class TestValues:
    @over_formats
    def test_equal_by_their_fields_and_hashable(self, fmt):
        twin = dataclasses.replace(fmt)
        assert twin == fmt and hash(twin) == hash(fmt) and {fmt: 1}[twin] == 1
        assert all(other != fmt for other in FORMATS if other is not fmt)

    @over_formats
    def test_repr_makes_the_same_one_again(self, fmt):
        assert eval(repr(fmt), vars(jlp)) == fmt

    @over_formats
    def test_pickle(self, fmt):
        assert pickle.loads(pickle.dumps(fmt)) == fmt

    @over_formats
    def test_frozen(self, fmt):
        for name in ("element", "scale_dtype", "anything"):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(fmt, name, None)

    @over_formats
    def test_a_static_argument_that_jit_traces_once(self, fmt):
        traced = []
        f = jax.jit(lambda x, fmt: traced.append(fmt) or x, static_argnums=1)
        for one in (fmt, dataclasses.replace(fmt)):
            f(jnp.ones(3), one)
        assert traced == [fmt]

    @pytest.mark.parametrize(
        ("fmt", "text"),
        [
            (jlp.NVFP4(), "NVFP4 1x16"),
            (jlp.NVFP4((16, 16)), "NVFP4 16x16"),
            (jlp.MXFP8(), "MXFP8 E4M3 1x32"),
            (jlp.MXFP8("e5m2", (32, 32)), "MXFP8 E5M2 32x32"),
            (jlp.MXFP4(), "MXFP4 1x32"),
            (jlp.Float8Block(), "Float8Block E4M3 1x128"),
            (jlp.Float8Block("e5m2", (128, 128)), "Float8Block E5M2 128x128"),
            (jlp.Float8Tensor(), "Float8Tensor E4M3"),
        ],
    )
    def test_str(self, fmt, text):
        assert str(fmt) == text

    def test_defaults_are_transformer_engines(self):
        assert jlp.MXFP8() == jlp.MXFP8("e4m3", (1, 32), "up")
        assert jlp.MXFP4() == jlp.MXFP4((1, 32), "up")
        assert jlp.Float8Block() == jlp.Float8Block("e4m3", (1, 128), True, 0.0)
        assert jlp.Float8Tensor() == jlp.Float8Tensor("e4m3", False, 0.0)

    @over_formats
    def test_what_it_says_is_what_quantize_stores(self, fmt):
        q = jax.eval_shape(lambda: jlp.quantize(jnp.zeros((32, 256)), fmt))
        assert (q.data.dtype, q.scale.dtype) == (fmt.data_dtype, jnp.dtype(fmt.scale_dtype))
        assert (q.amax is None) == (fmt.scaling != "two_level")
        assert q.data.shape == (32, 128 if fmt.packed else 256)
        lines = -(-32 // fmt.length) if fmt.tiles else 32
        assert q.scale.shape == (() if fmt.scaling == "tensor" else (lines, fmt.blocks(256)))

    @pytest.mark.parametrize("fmt", [f for f in FORMATS if not f.packed], ids=format_name)
    def test_the_maximum_is_the_largest_finite_element(self, fmt):
        assert fmt.maximum == float(jnp.finfo(fmt.data_dtype).max)


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e5m2"])
class TestElements:
    def test_are_those_of_ml_dtypes(self, name):
        element = ELEMENTS[name]
        info = ml_dtypes.finfo(element.dtype)
        assert (element.maximum, element.mantissa_bits) == (float(info.max), info.nmant)
        assert (element.exponent_bias, element.largest_exponent) == (1 - info.minexp, info.maxexp - 1)
        assert element.packed == (info.bits == 4)

    def test_overflow_is_where_rounding_leaves_the_range(self, name):
        """Seen at the same numbers one binade lower, where the element has a next one."""
        element = ELEMENTS[name]
        middle, beyond = element.overflow
        middle, largest = np.float32(middle / 2), element.maximum / 2
        below, above = (np.nextafter(middle, np.float32(to)) for to in (0, np.inf))
        rounded = [float(np.asarray(x).astype(element.dtype)) for x in (below, middle, above)]
        assert rounded[0] == largest < rounded[2]
        assert rounded[1] == (rounded[2] if beyond else largest)
