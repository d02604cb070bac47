"""Which scheme a checkpoint is in."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import schemes
from tests.checkpoints.weights import ROW_GROUPS, ROW_SCALES, SCHEMES, weight

ALL = SCHEMES | {f"{name} of rows": scheme for name, scheme in ROW_GROUPS.items()} | ROW_SCALES
over_schemes = pytest.mark.parametrize("scheme", ALL.values(), ids=ALL)


CHANGED = (
    "w4a16",
    "w4a16_asym",
    "nvfp4",
    "gptq",
    "awq",
    "deepseek_fp8",
    "autofp8",
    "fp8_channel",
    "fp8_tensor",
    "int8_channel",
    "w4a8",
    "w4afp8",
    "mxfp4",
)
"""Schemes that a changed configuration may name."""


def as_config_says(scheme):
    """A scheme with the fields that no configuration holds at their defaults."""
    unsaid = {field.name: field.default for field in dataclasses.fields(scheme)}
    said = {
        name: getattr(scheme, name) for name in ("group_size", "symmetric", "version", "activations") if name in unsaid
    }
    if scheme.name == "deepseek_fp8":
        said["power_of_two"] = scheme.power_of_two
    return schemes.by_name(scheme.name, **(unsaid | said))


class TestFromConfig:
    @over_schemes
    def test_a_configuration_names_its_scheme(self, scheme):
        entry = scheme.quantization_config(["lm_head"])
        expected = as_config_says(scheme)
        assert schemes.from_config(entry) == expected
        assert schemes.from_config({"quantization_config": entry}) == expected
        assert schemes.from_config({"text_config": {"quantization_config": entry}}) == expected

    @over_schemes
    def test_ignored_modules_stand_in_the_configuration(self, scheme):
        assert "lm_head" in str(scheme.quantization_config(["lm_head"]))
        if scheme.regex_ignores:
            assert ".*self_attn.*" in str(scheme.quantization_config(["re:.*self_attn.*"]))
        else:
            with pytest.raises(ValueError, match=r"readers do not support regular expressions; .* re:\.\*self_attn"):
                scheme.quantization_config(["re:.*self_attn.*"])

    def test_modelopts_own_file(self):
        config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
        assert schemes.from_config(config) == schemes.by_name("modelopt_nvfp4")

    def test_groups_of_one_format(self):
        entry = schemes.by_name("w4a16").quantization_config([])
        entry["config_groups"]["group_1"] = entry["config_groups"]["group_0"]
        assert schemes.from_config(entry) == schemes.by_name("w4a16")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_bits": 8}, "num_bits is 8; supported is 4"),
            ({"strategy": "tensor"}, "strategy is 'tensor'; supported is 'group' or 'channel'"),
            ({"strategy": "channel"}, "group_size is 128; supported is None or -1"),
            ({"group_size": -1}, 'group_size is -1, but strategy is "group"'),
            ({"actorder": "columns"}, "actorder is 'columns'"),
        ],
    )
    def test_unsupported_weights(self, change, message):
        entry = schemes.by_name("w4a16").quantization_config([])
        entry["config_groups"]["group_0"]["weights"] |= change
        with pytest.raises(ValueError, match=message):
            schemes.from_config(entry)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({}, "no quantization_config"),
            ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported are compressed-tensors"),
            ({"quant_method": "fp8"}, "activation_scheme is None; supported is 'dynamic' or 'static'"),
            ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]"),
            ({"quant_method": "gptq", "bits": 8}, "bits is 8"),
            ({"quant_method": "gptq", "bits": 4, "group_size": -2}, "group_size is -2"),
            ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'"),
            ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo is 'W4A8'; supported is 'NVFP4' or 'FP8'"),
            ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups is {}"),
            (
                {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"a": {}}},
                "format is 'marlin-24'; supported are pack-quantized",
            ),
        ],
    )
    def test_unsupported(self, config, message):
        with pytest.raises(ValueError, match=message):
            schemes.from_config(config)

    @pytest.mark.parametrize(
        ("scheme", "key", "values"),
        [
            ("w4a16", "symmetric", ("false", "true", 0, 1, None, [], {})),
            ("gptq", "sym", ("false", 0, None, [True])),
            ("awq", "zero_point", ("false", 1, None, {})),
            ("w4a16", "group_size", ("128", 128.0, 64.5, True, 0, -2, 10**30, [128])),
            ("gptq", "group_size", ("128", None, 0, {})),
        ],
    )
    def test_values_of_other_types_are_no_values(self, scheme, key, values):
        for value in values:
            entry = schemes.by_name(scheme).quantization_config([])
            holder = entry["config_groups"]["group_0"]["weights"] if scheme == "w4a16" else entry
            holder[key] = value
            needed = "group_size is .*; needs a whole number" if key == "group_size" else "needs true or false"
            with pytest.raises(ValueError, match=needed):
                schemes.from_config(entry)

    @over_schemes
    def test_a_value_of_another_type_is_our_error_or_read(self, scheme):
        read = schemes.from_config(scheme.quantization_config([]))
        for value in (None, True, False, 0, -1, 0.5, "", "false", "x", [], [[]], [1, "a"], {}, {"a": 1}, 10**400):
            for entry in changed_everywhere(scheme.quantization_config([]), value):
                try:
                    found = schemes.from_config(entry)
                except ValueError as error:
                    assert str(error).startswith("schemes.")
                else:
                    assert found == read or found.name in CHANGED


def changed_everywhere(content, value):
    """A JSON value with each of its parts replaced, one at a time."""
    yield value
    if isinstance(content, dict | list):
        for key in content if isinstance(content, dict) else range(len(content)):
            for part in changed_everywhere(content[key], value):
                changed = content.copy()
                changed[key] = part
                yield changed


class TestDetect:
    @over_schemes
    def test_tensors_name_their_scheme(self, scheme):
        tensors = scheme.compress(weight((128, 384)))
        if scheme.name == "gptq":
            with pytest.raises(ValueError, match="stands in its configuration"):
                schemes.detect(tensors)
            return
        found = schemes.detect({**tensors, "bias": np.zeros(128, np.float32)})
        assert found is not None
        same_tensors = {"modelopt_fp8": "autofp8", "w4afp8": "w4a16", "mxfp4_fp8": "mxfp4"}
        assert found.name == same_tensors.get(scheme.name, scheme.name)
        if scheme.name in ("w4a16", "w4a16_asym") or getattr(scheme, "scale_dtype", None) == "float8_e8m0fnu":
            assert found == scheme.of_shape((128, 384))

    def test_specs_do_as_well(self):
        scheme = schemes.by_name("w4a16_asym", group_size=32)
        assert schemes.detect(scheme.output_specs((64, 256))) == scheme

    def test_columns_that_do_not_fill_words(self):
        scheme = schemes.by_name("w4a16", group_size=12)
        assert schemes.detect(scheme.compress(weight((5, 36)))) == scheme

    def test_scales_of_another_dtype(self):
        tensors = schemes.by_name("fp8_block").compress(weight((128, 256)))
        tensors["weight_scale"] = tensors["weight_scale"].astype(ml_dtypes.bfloat16)
        assert schemes.detect(tensors) == schemes.by_name("fp8_block", scale_dtype="bfloat16")

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_a_float_weight_is_in_no_scheme(self, dtype):
        assert schemes.detect({"weight": (dtype, (4, 4)), "bias": (dtype, (4,))}) is None

    @pytest.mark.parametrize(("codes", "shape"), [("float8_e4m3fn", (256,)), ("int8", (1,)), ("float8_e4m3fn", (3, 5))])
    def test_scales_of_another_shape_are_in_no_scheme(self, codes, shape):
        assert schemes.detect({"weight": (codes, (256, 256)), "weight_scale": ("float32", shape)}) is None
