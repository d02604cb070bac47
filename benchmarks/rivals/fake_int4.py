"""To INT4 with a scale for 128 numbers, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxlowprec as jlp
from rivals.in_torch import as_floats, compiled, tensor
from rivals.sides import Operation, Peer, Side

FORMAT = jlp.Int4(128)
LIMIT = 0.15  # of normal numbers


def operation(x: jax.Array) -> Operation:
    """Of a weight."""
    w = (0.02 * x).astype(jnp.bfloat16)
    makers = (
        ("qwix, jitted", ("qwix",), _qwix),
        ("torchao, compiled", ("torchao", "torch"), _torchao),
        ("compressed-tensors, compiled", ("compressed-tensors", "torch"), _compressed_tensors),
    )
    ours = "fake_quantize"
    peers = tuple(Peer(name, packages, functools.partial(make, w), (ours,)) for name, packages, make in makers)
    name = f"INT4 1x{FORMAT.group_size} and back, {w.shape[0]}x{w.shape[1]}"
    return Operation(name, np.asarray(w, np.float32), {ours: functools.partial(_ours, w)}, peers)


def _side(call: Callable, numbers: Callable) -> Side:
    return Side(call, numbers, LIMIT, lambda result: {"numbers": numbers(result)})


def _in_jax(fake: Callable, w: jax.Array) -> Side:
    jitted = jax.jit(fake)
    return _side(lambda: jitted(w), lambda result: np.asarray(result, np.float32))


def _in_torch(fake: Callable, w: jax.Array) -> Side:
    t, call = tensor(w), compiled(fake)
    return _side(lambda: call(t), as_floats)


def _ours(w: jax.Array) -> Side:
    return _in_jax(lambda w: jlp.fake_quantize(w, FORMAT), w)


def _qwix(w: jax.Array) -> Side:
    import qwix

    quantize = functools.partial(qwix.quantize, qtype=jnp.int4, channelwise_axes=[0], tiled_axes={1: FORMAT.group_size})
    return _in_jax(lambda w: qwix.dequantize(quantize(w)), w)


def _torchao(w: jax.Array) -> Side:
    import torch
    from torchao.quantization.qat import IntxFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import IntxFakeQuantizer

    fake = IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int4, group_size=FORMAT.group_size, is_symmetric=True))
    return _in_torch(lambda t: fake(t), w)


def _compressed_tensors(w: jax.Array) -> Side:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=FORMAT.group_size)

    def fake(t):
        scale, zero = compute_dynamic_scales_and_zp(t, args, None)
        return fake_quantize(t, scale, zero, args)

    return _in_torch(fake, w)
