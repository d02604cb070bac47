"""To NVFP4 and MXFP8, rowwise and both ways."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from baselines import fastest

import jaxlowprec as jlp
from rivals import fake_int4
from rivals.in_torch import as_bytes, as_floats, compiled, tensor
from rivals.sides import Operation, Peer, Side

SIZE = 4096
FORMATS = {"NVFP4": (jlp.NVFP4(), 0.12), "MXFP8": (jlp.MXFP8(), 0.04)}  # and the largest error of normal numbers


def operations(divide: int = 1) -> list[Operation]:
    """One for each format and way."""
    size = max(128, SIZE // divide)
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    return [*(_operation(x, name, both) for name in FORMATS for both in (False, True)), fake_int4.operation(x)]


def _operation(x: jax.Array, format_name: str, both: bool) -> Operation:
    ours, way = ("quantize_both", "both ways") if both else ("quantize", "rowwise")
    limit = FORMATS[format_name][1]

    def made(parts: Callable) -> Callable[[], Side]:
        return lambda: _side(*parts(format_name, x, both), limit)

    in_torch = {
        "torchao, compiled": (("torchao", "torch"), {"NVFP4": _torchao_nvfp4, "MXFP8": _torchao_mxfp8}),
        "compressed-tensors, compiled": (
            ("compressed-tensors", "torch"),
            {"NVFP4": _compressed_tensors_nvfp4, "MXFP8": _compressed_tensors_mxfp8},
        ),
    }
    peers = [Peer("qwix, jitted", ("qwix",), made(_qwix), (ours,))]
    peers += [
        Peer(name, packages, made(functools.partial(_in_torch, functions[format_name])), (ours,))
        for name, (packages, functions) in in_torch.items()
    ]
    truth = np.stack([np.asarray(x, np.float32)] * (1 + both))
    name = f"{format_name}, {way}, {x.shape[0]}x{x.shape[1]}"
    return Operation(name, truth, {ours: made(_ours)}, tuple(peers))


def _side(call: Callable, decode: Callable, codes: Callable, limit: float) -> Side:
    """Of functions of a part of what the call returns: rowwise, and K-major columnwise."""

    def numbers(parts: tuple) -> np.ndarray:
        rowwise, *columnwise = map(decode, parts)
        return np.stack([rowwise, *(part.T for part in columnwise)])

    return Side(call, numbers, limit, lambda parts: codes(parts[0]))


def _ours(format_name: str, x: jax.Array, both: bool) -> tuple:
    fmt, _ = FORMATS[format_name]
    quantize = jax.jit(lambda x: jlp.quantize_both(x, fmt) if both else (jlp.quantize(x, fmt),))

    def decode(part):
        numbers = np.asarray(part.dequantize(), np.float32)
        return numbers if part.axis == -1 else numbers.T

    def codes(part):
        return {k: np.asarray(a).view(np.uint8) for k, a in {"codes": part.data, "scales": part.scale}.items()}

    return lambda: quantize(x), decode, codes


def _qwix(format_name: str, x: jax.Array, both: bool) -> tuple:
    import qwix

    block = FORMATS[format_name][0].block[1]
    one = functools.partial(qwix.quantize, qtype=format_name.lower(), channelwise_axes=[0], tiled_axes={1: block})
    jitted, transposed = jax.jit(one), jax.jit(lambda x: x.T)
    fused = jax.jit(lambda x: (one(x), one(x.T)))
    call = _called(lambda: jitted(x), lambda: fused(x), lambda: (jitted(x), jitted(transposed(x))), both)
    nothing: dict = {}  # it has a byte per code, and bfloat16 scales
    return call, lambda part: np.asarray(qwix.dequantize(part), np.float32), lambda part: nothing


def _in_torch(functions: Callable, format_name: str, x: jax.Array, both: bool) -> tuple:
    """Compiled functions of one tensor, or of it and its transpose."""
    quantize, decode, codes = functions()
    t, one = tensor(x), compiled(quantize)
    fused = compiled(lambda t: (quantize(t), quantize(t.t().contiguous())))
    call = _called(lambda: one(t), lambda: fused(t), lambda: (one(t), one(t.t().contiguous())), both)
    return call, decode, lambda part: dict(zip(("codes", "scales"), map(as_bytes, codes(part)), strict=True))


def _called(one: Callable, fused: Callable, apart: Callable, both: bool) -> Callable[[], tuple]:
    """A call with a part per way; both ways the faster of one program, and of a transpose and two programs."""
    if not both:
        return lambda: (one(),)
    calls = {"fused": fused, "apart": apart}
    return calls[fastest(calls, 3)]


def _torchao_nvfp4() -> tuple:
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def quantize(t):
        q = NVFP4Tensor.to_nvfp4(t, per_tensor_scale=per_tensor_amax_to_scale(t.abs().max().float()))
        return q.qdata, q.scale, q.per_tensor_scale

    def decode(part):
        data, scale, whole = part
        return as_floats(NVFP4Tensor(data, scale, 16, torch.bfloat16, whole).dequantize(torch.float32))

    return quantize, decode, lambda part: part[:2]


def _torchao_mxfp8() -> tuple:
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    def quantize(t):
        scale, data = to_mx(t, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
        return data, scale

    def decode(part):
        return as_floats(to_dtype(*part, torch.float8_e4m3fn, 32, torch.float32))

    return quantize, decode, lambda part: part


def _compressed_tensors_nvfp4() -> tuple:
    import torch
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4, unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

    options: dict[str, Any] = {"type": "float", "strategy": "tensor_group", "scale_dtype": torch.float8_e4m3fn}
    args = QuantizationArgs(num_bits=4, group_size=16, **options)

    def quantize(t):
        whole = generate_gparam(*torch.aminmax(t))
        scale, _ = compute_dynamic_scales_and_zp(t, args, None, whole)
        return quantize_and_pack_fp4(t, scale, global_scale=whole), scale.to(args.scale_dtype), whole

    def decode(part):
        data, scale, whole = part
        values = unpack_fp4_from_uint8(data, data.shape[0], 2 * data.shape[1], dtype=torch.float32)
        return as_floats(values * scale.float().repeat_interleave(16, -1) / whole)

    return quantize, decode, lambda part: part[:2]


def _compressed_tensors_mxfp8() -> tuple:
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize as to_codes
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    options: dict[str, Any] = {"type": "float", "strategy": "group", "scale_dtype": torch.uint8}
    args = QuantizationArgs(num_bits=8, group_size=32, **options)

    def quantize(t):
        scale, zero = compute_dynamic_scales_and_zp(t, args, None)
        return to_codes(t, scale, zero, args, dtype=torch.float8_e4m3fn), scale

    def decode(part):
        data, scale = part
        return as_floats(data.float() * scale.float().repeat_interleave(32, -1))

    def codes(part):
        data, scale = part  # powers of two; a file has their exponents
        return data, (torch.log2(scale.float()).round() + 127).to(torch.uint8)

    return quantize, decode, codes
