"""What surrounds the GEMM's custom call on NVIDIA GPUs, with the call itself done by the reference.

Padding, the tensors' scales, accumulation, the epilogue and slicing give what the rules give.
"""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowprec.ops.epilogue import Epilogue
from jaxlowprec.ops.scaled_matmul import cuda, reference
from jaxlowprec.ops.scaled_matmul.op import MatmulSpec
from jaxlowprec.wiring import native
from tests.against_oracle import product
from tests.eager import jlp
from tests.helpers import random_array
from tests.package.test_readme import ROOT

FORMATS = {
    ("two_level", "e2m1"): lambda block: jlp.NVFP4(block),
    ("e8m0", "e2m1"): lambda block: jlp.MXFP4(block),
    ("e8m0", "e4m3"): lambda block: jlp.MXFP8("e4m3", block),
    ("float32", "e4m3"): lambda block: jlp.Float8Block("e4m3", block),
    ("tensor", "e4m3"): lambda block: jlp.Float8Tensor("e4m3"),
}


def format_of(attributes):
    length = int(attributes["block"])
    block = (length if attributes["tiles"] else 1, length)
    return FORMATS[attributes["scaling"], attributes["element"]](block)


products = jax.jit(reference.products, static_argnums=(2, 5))


def called_by_the_reference(target, results, *, input_layouts):
    """As xla_ffi/bindings/scaled_matmul_cuda.cc documents the call."""
    assert target == "jaxlowprec_scaled_matmul"

    def call(a_data, a_scale, b_data, b_scale, *rest, a_format, b_format, accumulate, float32_sums):
        a, b = format_of(a_format), format_of(b_format)
        by_columns = [fmt.get("column_major", False) for fmt in (a_format, b_format)]
        assert [layout is not None for layout in input_layouts[1:4:2]] == by_columns
        assert a.scaling != "e8m0" or a_format["element"] == "e2m1" or not float32_sums  # FP8 blocks are not made MX
        alpha, beta = jnp.float32(1), jnp.float32(accumulate)
        if a.has_tensor_scale:
            (alpha, beta), rest = jnp.moveaxis(rest[0], -1, 0), rest[1:]
            alpha, beta = alpha[..., None, None], beta[..., None, None]
        if a.scaling == "tensor":
            a_scale, b_scale = jnp.ones_like(a_scale), jnp.ones_like(b_scale)
        y = products(a_data, a_scale, a, b_data, b_scale, b) * alpha
        y = y + beta * rest[0].astype(jnp.float32) if accumulate else y
        y = y if accumulate else jnp.where(beta == 0, y, jnp.nan)  # cuBLASLt reads no addend then
        assert y.shape == results[0].shape
        return y.astype(results[0].dtype), jnp.zeros(results[1].shape, results[1].dtype)

    return call


PAIRS = [
    ((jlp.NVFP4(), jlp.NVFP4((16, 16))), 9.0),
    ((jlp.MXFP4((32, 32)), jlp.MXFP8()), 9.0),
    ((jlp.MXFP4(), jlp.MXFP4((32, 32))), 9.0),
    ((jlp.Float8Block(), jlp.Float8Block(block=(128, 128))), 9.0),
    ((jlp.Float8Block(), jlp.Float8Block(block=(128, 128))), 10.0),
    ((jlp.Float8Block(), jlp.MXFP4((32, 32))), 9.0),
    ((jlp.Float8Block(), jlp.MXFP4()), 10.0),
    ((jlp.Float8Tensor(), jlp.Float8Tensor()), 9.0),
]


@functools.cache
def operands(formats, sizes):
    m, k, n = sizes
    a = jlp.quantize(random_array((2, m, k), "float32", 1), formats[0])
    return a, jlp.quantize(random_array((2, n, k), "float32", 2) * 3, formats[1])


@pytest.mark.sampled(7)
@pytest.mark.parametrize("sizes", [(8, 160, 16), (5, 100, 33)], ids=str)
@pytest.mark.parametrize(("formats", "capability"), PAIRS, ids=str)
@pytest.mark.parametrize("names", ["", "accumulate", "bias", "bias gelu accumulate", "dgelu", "float32 sums"])
def test_around_the_reference_the_result_is_the_oracles(names, formats, sizes, capability):
    m, _, n = sizes
    a, b = operands(formats, sizes)
    words = names.split()
    activation = next((word for word in words if word in ("gelu", "dgelu")), None)
    extras = {}
    if "bias" in words:
        extras["bias"] = random_array((2, n), "float32", 3)
    if "accumulate" in words:
        extras["accumulate"] = random_array((2, m, n), "float32", 4)
    if activation == "dgelu":
        extras["activation_input"] = random_array((2, m, n), "float32", 5)
    expected, _ = product(a, b, activation=activation, preferred_element_type=jnp.float32, **extras)

    epilogue = Epilogue("bias" in words, "accumulate" in words, activation, False, jnp.dtype("float32"))
    spec = MatmulSpec(a.format, b.format, False, False, False, epilogue, None, names == "float32 sums")
    amaxes = (a.amax, b.amax) if spec.two_level else ()
    gpu = mock.patch.object(native, "compute_capability", lambda: capability)
    with gpu, mock.patch.object(jax.ffi, "ffi_call", called_by_the_reference):
        multiply = jax.jit(functools.partial(cuda.matmul, spec))
        (y,) = multiply(a.data, a.scale, b.data, b.scale, *amaxes, *extras.values())
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


def test_rows_are_padded_as_the_plan_expects():
    header = (ROOT / "xla_ffi/cuda/matmul/matmul_plan.h").read_text()
    rows, least = re.search(r"kScaledRows = (\d+), kLeastScaledRows = (\d+);", header).groups()
    assert (int(rows), int(least)) == (cuda._SCALED_ROWS, cuda._LEAST_SCALED_ROWS)
