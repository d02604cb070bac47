"""Lowering for NVIDIA GPUs on a machine that has none: the library claims that it serves them, and nothing runs."""

import contextlib
import dataclasses
import re
from unittest import mock

import jax

from jaxlowprec.ops.activations.op import activation_gradient_op, activation_op
from jaxlowprec.ops.activations.quantized import activation_gradient_quantize_op, activation_quantize_op
from jaxlowprec.ops.amax import amax_op
from jaxlowprec.ops.dequantize import dequantize_op
from jaxlowprec.ops.grouped_matmul.op import grouped_matmul_op, grouped_wgrad_op
from jaxlowprec.ops.grouped_matmul.quantize_op import grouped_amax_op, grouped_quantize_op
from jaxlowprec.ops.grouped_matmul.weight_only import grouped_weight_only_op
from jaxlowprec.ops.hadamard import hadamard_op
from jaxlowprec.ops.int4 import op as int4
from jaxlowprec.ops.norms.op import norm_gradient_op, norm_op
from jaxlowprec.ops.norms.quantized import norm_quantize_op
from jaxlowprec.ops.quantize import random_bits
from jaxlowprec.ops.quantize.op import quantize_op
from jaxlowprec.ops.quantize.row_scaled import row_scaled_quantize_op
from jaxlowprec.ops.scaled_matmul.op import matmul_op
from jaxlowprec.ops.statistics.op import moments_op, outliers_op, statistics_op, sums_op
from jaxlowprec.ops.weight_only_matmul.op import weight_only_op
from jaxlowprec.wiring import native

OPS = (amax_op, dequantize_op, hadamard_op, quantize_op, row_scaled_quantize_op, matmul_op, weight_only_op)
GROUPED_OPS = (grouped_amax_op, grouped_quantize_op, grouped_matmul_op, grouped_wgrad_op, grouped_weight_only_op)
ACTIVATION_OPS = (activation_op, activation_gradient_op, activation_quantize_op, activation_gradient_quantize_op)
PRODUCER_OPS = (*ACTIVATION_OPS, norm_op, norm_gradient_op, norm_quantize_op)
STATISTICS_OPS = (moments_op, outliers_op, sums_op, statistics_op)
INT4_OPS = (int4.fake_quantize_op, int4.quantize_op, int4.dequantize_op)


def forget_ops():
    """Each op asks once which kernels there are, and for the implementation by default."""
    for op in (*OPS, *GROUPED_OPS, *INT4_OPS, *PRODUCER_OPS, *STATISTICS_OPS, random_bits._words_op):
        op.cache_clear()
    jax.clear_caches()


@contextlib.contextmanager
def claiming_cuda(capability=None):
    """As with CUDA kernels built in and GPUs of that compute capability; None: as with kernels, but no GPU."""
    library = dataclasses.replace(native.library(), platforms=("cpu", "cuda"), missing={})
    forget_ops()
    try:
        with mock.patch.multiple(native, library=lambda: library, compute_capability=lambda: capability):
            yield
    finally:
        forget_ops()


@dataclasses.dataclass(frozen=True)
class CustomCall:
    """One of the library's custom calls in lowered code."""

    target: str
    attributes: str
    operands: list[str]
    results: list[str]


_CALL = re.compile(r"stablehlo\.custom_call @(jaxlowprec_\w+)\([^)]*\) \{(.*)\} : \(([^)]*)\) -> (.*)")


def custom_calls(function, *args):
    """The library's custom calls that a function lowers to for NVIDIA GPUs, in order."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

    def types(part):
        return re.findall(r"tensor<([^>]*)>", part)

    return [CustomCall(found[1], found[2], types(found[3]), types(found[4])) for found in _CALL.finditer(text)]
