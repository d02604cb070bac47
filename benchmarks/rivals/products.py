"""GEMMs of two operands that were quantised before, and of two in bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from baselines import fastest_dot

import jaxlowprec as jlp
from rivals.in_torch import as_floats, compiled, tensor
from rivals.sides import Operation, Peer, Side

SIZE, ROWS = 4096, (512, 2048, 4096)
OURS = {"NVFP4": (jlp.NVFP4(), 0.17), "MXFP8": (jlp.MXFP8(), 0.05), "Float8Tensor": (jlp.Float8Tensor(), 0.05)}
BFLOAT16 = 0.005  # the largest errors of normal operands: of bfloat16, as above, and of int8 with a scale per row
INT8 = 0.02
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def operations(divide: int = 1) -> list[Operation]:
    """One for each number of rows."""
    size = max(128, SIZE // divide)
    w = jax.random.normal(jax.random.key(2), (size, size), jnp.bfloat16)
    return [_operation(max(32, rows // divide), w) for rows in ROWS]


def _operation(rows: int, w: jax.Array) -> Operation:
    a = jax.random.normal(jax.random.key(rows), (rows, w.shape[1]), jnp.bfloat16)
    every = tuple(OURS)
    makers = [
        ("XLA's fastest bfloat16 dot", ("jax",), _xla, every),
        ("torch's bfloat16 matmul", ("torch",), _torch, every),
        ("jax.nn.scaled_matmul, MXFP8", ("jax",), _jax_scaled, ("MXFP8",)),
        ("torch._scaled_mm, FP8 per tensor", ("torch",), _torch_fp8, ("Float8Tensor",)),
        ("torch._int_mm, INT8 per row, compiled", ("torch",), _torch_int8, ("Float8Tensor",)),
    ]
    ways = {  # of qwix: name, arguments, least error, ours
        "NVFP4": ({"qtype": "nvfp4", "tiled_axes": {1: 16}}, OURS["NVFP4"][1], "NVFP4"),
        "MXFP8": ({"qtype": "mxfp8", "tiled_axes": {1: 32}}, OURS["MXFP8"][1], "MXFP8"),
        "FP8 per row": ({"qtype": jnp.float8_e4m3fn}, OURS["Float8Tensor"][1], "Float8Tensor"),
        "INT8 per row": ({"qtype": jnp.int8}, INT8, "Float8Tensor"),
    }
    makers += [
        (f"qwix.dot_general, {name}", ("qwix",), functools.partial(_qwix, options, limit), (ours,))
        for name, (options, limit, ours) in ways.items()
    ]
    truth = np.asarray(a, np.float32) @ np.asarray(w, np.float32).T
    peers = tuple(Peer(name, packages, functools.partial(make, a, w), ours) for name, packages, make, ours in makers)
    ours = {name: functools.partial(_ours, name, a, w) for name in OURS}
    return Operation(f"GEMM, {rows}x{w.shape[1]} by {w.shape[1]}x{w.shape[0]}", truth, ours, peers, slow=True)


def _in_jax(product: Callable, operands: tuple, limit: float) -> Side:
    jitted = jax.jit(product)
    return Side(lambda: jitted(*operands), lambda result: np.asarray(result, np.float32), limit)


def _ours(name: str, a: jax.Array, w: jax.Array) -> Side:
    fmt, limit = OURS[name]
    return _in_jax(jlp.scaled_matmul, (jlp.quantize(a, fmt), jlp.quantize(w, fmt)), limit)


def _xla(a: jax.Array, w: jax.Array) -> Side:
    _, dot = fastest_dot(a, w, 3)
    return Side(dot, lambda result: np.asarray(result, np.float32), BFLOAT16)


def _jax_scaled(a: jax.Array, w: jax.Array) -> Side:
    qa, qw = (jlp.quantize(x[None], OURS["MXFP8"][0]) for x in (a, w))
    product = functools.partial(jax.nn.scaled_matmul, preferred_element_type=jnp.bfloat16)
    return _in_jax(product, (qa.data, qw.data, qa.scale, qw.scale), OURS["MXFP8"][1])


def _qwix(options: dict[str, Any], limit: float, a: jax.Array, w: jax.Array) -> Side:
    import qwix

    quantize = jax.jit(functools.partial(qwix.quantize, channelwise_axes=[0], **options))
    return _in_jax(lambda a, w: qwix.dot_general(a, w, _CONTRACT_LAST), (quantize(a), quantize(w)), limit)


def _torch(a: jax.Array, w: jax.Array) -> Side:
    import torch

    ta, tw = tensor(a), tensor(w)
    with torch.no_grad():
        return Side(lambda: torch.nn.functional.linear(ta, tw), as_floats, BFLOAT16)


def _torch_fp8(a: jax.Array, w: jax.Array) -> Side:
    import torch

    def quantize(t):
        scale = t.abs().max().float() / 448
        return (t.float() / scale).to(torch.float8_e4m3fn), scale

    (fa, sa), (fw, sw) = quantize(tensor(a)), quantize(tensor(w))
    product = functools.partial(torch._scaled_mm, fa, fw.t(), scale_a=sa, scale_b=sw, out_dtype=torch.bfloat16)
    return Side(product, as_floats, OURS["Float8Tensor"][1])


def _torch_int8(a: jax.Array, w: jax.Array) -> Side:
    import torch

    def quantize(t):
        scale = t.abs().amax(1, keepdim=True).float() / 127
        return torch.round(t.float() / scale).to(torch.int8), scale

    operands = *quantize(tensor(a)), *quantize(tensor(w))
    product = compiled(lambda a, sa, w, sw: (torch._int_mm(a, w.t()).float() * sa * sw.t()).to(torch.bfloat16))
    return Side(lambda: product(*operands), as_floats, INT8)
