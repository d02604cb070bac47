"""The GEMM that a product of quantised operands becomes on NVIDIA GPUs, read off the lowered code."""

import re

import jax
import jax.numpy as jnp

import jaxlowprec as jlp
from tests.cuda_without_gpu.claiming_cuda import claiming_cuda, custom_calls

GEMM_WORKSPACE = (32 << 20) + 256  # cuBLASLt's own, and room to align it


def matmul_call(a_format, b_format, m, k, n, capability, batch=(), **options):
    """The one GEMM that a product lowers to."""
    a, b = (
        jax.eval_shape(lambda f=f, r=r: jlp.quantize(jnp.zeros((*batch, r, k)), f))
        for r, f in ((m, a_format), (n, b_format))
    )
    with claiming_cuda(capability):
        (call,) = custom_calls(lambda a, b: jlp.scaled_matmul(a, b, **options), a, b)
    assert call.target == "jaxlowprec_scaled_matmul"
    return call


def workspace_of(call):
    return int(re.fullmatch(r"(\d+)xui8", call.results[1])[1]) - GEMM_WORKSPACE
