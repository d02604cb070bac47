"""Weights and schemes that the tests of checkpoints share."""

import ml_dtypes
import numpy as np

from jaxlowprec.checkpoints import schemes

FLOATS = ("bfloat16", "float16", "float32")
INT4 = ("w4a16", "w4a16_asym", "gptq", "awq")

SCHEMES = {
    "w4a16": schemes.by_name("w4a16"),
    "w4a16 groups of 32 float16": schemes.by_name("w4a16", group_size=32, scale_dtype="float16"),
    "w4a16_asym": schemes.by_name("w4a16_asym"),
    "w4a16_asym groups of 32 float16": schemes.by_name("w4a16_asym", group_size=32, scale_dtype="float16"),
    "nvfp4": schemes.by_name("nvfp4"),
    "nvfp4_w4a4": schemes.by_name("nvfp4_w4a4", input_global_scale=8.0),
    "nvfp4 search": schemes.by_name("nvfp4", scale_rule="search"),
    "mxfp4": schemes.by_name("mxfp4"),
    "mxfp4 up": schemes.by_name("mxfp4", scale_rule="up"),
    "mxfp8": schemes.by_name("mxfp8"),
    "mxfp8 floor": schemes.by_name("mxfp8", scale_rule="floor"),
    "fp8_block": schemes.by_name("fp8_block"),
    "fp8_tensor": schemes.by_name("fp8_tensor"),
    "fp8_tensor static": schemes.by_name("fp8_tensor", activations="static", input_scale=0.5),
    "autofp8": schemes.by_name("autofp8"),
    "autofp8 static": schemes.by_name("autofp8", activations="static"),
    "modelopt_fp8": schemes.by_name("modelopt_fp8"),
    "deepseek_fp8": schemes.by_name("deepseek_fp8"),
    "deepseek_fp8 ue8m0": schemes.by_name("deepseek_fp8", power_of_two=True),
    "deepseek_fp8 in bytes": schemes.by_name("deepseek_fp8", power_of_two=True, scale_dtype="float8_e8m0fnu"),
    "fp8_block in bytes": schemes.by_name("fp8_block", power_of_two=True, scale_dtype="float8_e8m0fnu"),
    "modelopt_nvfp4": schemes.by_name("modelopt_nvfp4"),
    "miles_mxfp8": schemes.by_name("miles_mxfp8"),
    "gptq": schemes.by_name("gptq"),
    "gptq asymmetric": schemes.by_name("gptq", group_size=64, symmetric=False, version=2, scale_dtype="bfloat16"),
    "awq": schemes.by_name("awq"),
    "w4a8": schemes.by_name("w4a8", group_size=64),
    "w4afp8": schemes.by_name("w4afp8", group_size=64),
    "mxfp4_fp8": schemes.by_name("mxfp4_fp8"),
    "awq symmetric": schemes.by_name("awq", group_size=32, symmetric=True),
}
"""Every scheme whose format is the same for all matrices, and its options."""

ROW_GROUPS = {
    name: schemes.by_name(name, group_size=-1, scale_dtype=dtype)
    for name, dtype in (("w4a16", "bfloat16"), ("w4a16_asym", "float16"), ("gptq", "bfloat16"), ("awq", "float16"))
}
"""INT4 with one group per row."""

ROW_SCALES = {
    "fp8_channel": schemes.by_name("fp8_channel"),
    "fp8_channel static": schemes.by_name("fp8_channel", activations="static", input_scale=0.25),
    "int8_channel": schemes.by_name("int8_channel"),
    "int8_channel static": schemes.by_name("int8_channel", activations="static"),
}
"""Schemes with one scale per row, of the weight's dtype."""


def weight(shape, dtype="bfloat16", seed=0):
    """Normal numbers with a row of zeros, one of positive numbers, one outlier, one of tiny numbers."""
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal(shape) * 0.02).astype(np.float32)
    w[0] = 0
    w[1] = abs(w[1]) + 0.01
    w[2, 3] = -4
    w[3] *= 1e-5
    return w.astype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)


def assert_same_tensors(actual, expected):
    """Dicts of arrays agree in names, dtypes, shapes and bytes."""
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert actual[name].tobytes() == tensor.tobytes(), name
