"""One row of activations through 4-bit weights in turn, as in decoding: together they are larger than the caches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from baselines import fastest
from weight_only_matmul import repeated, weight

import jaxlowprec as jlp
from rivals import ggml_graph
from rivals.in_torch import as_floats, tensor
from rivals.sides import THREADS, Operation, Peer, Side

SIZE, WEIGHTS, DIFFERENT = 4096, 16, 4  # 4 weights four times over: 128 MiB of 4-bit codes or of bfloat16
BLOCKS = {"Int4 1x128": 128, "Int4 1x32": 32}
LIMIT = {"bfloat16": 0.05, "4 bits": 0.6}  # of WEIGHTS products in a chain


def operations(divide: int = 1) -> list[Operation]:
    """One: the same chain by all."""
    size = max(256, SIZE // divide)
    weights = [weight(i, size) for i in range(DIFFERENT)]
    x = jax.random.normal(jax.random.key(9), (1, size), jnp.bfloat16)
    inputs, every = (x, weights), tuple(BLOCKS)
    makers = [
        ("XLA's bfloat16 matvec", ("jax",), functools.partial(_xla, "bfloat16"), every),
        ("XLA's float32 matvec", ("jax",), functools.partial(_xla, "float32"), every),
        ("torch's bfloat16 matvec", ("torch",), _torch, every),
        ("torch._weight_int4pack_mm_for_cpu, 1x128", ("torch",), _torch_int4, every[:1]),
    ]
    for name, block in BLOCKS.items():
        for level, activations in ((0, "float32"), (4, "INT8")):
            label = f"onnxruntime MatMulNBits, 1x{block}, {activations} activations"
            makers.append((label, ("onnxruntime", "onnx"), functools.partial(_onnxruntime, block, level), (name,)))
    makers.append(("ggml Q4_0 (llama.cpp), 1x32, INT8 activations", ("ggml-python",), _ggml, every[1:]))
    truth = np.asarray(x, np.float64)
    for w in _chain(weights):
        truth = truth @ np.asarray(w, np.float64).T
    peers = tuple(Peer(name, packages, functools.partial(make, *inputs), ours) for name, packages, make, ours in makers)
    ours = {name: functools.partial(_ours, block, *inputs) for name, block in BLOCKS.items()}
    return [Operation(f"one row, {size}x{size}", truth.astype(np.float32), ours, peers, repeats=WEIGHTS)]


def _chain(weights: list) -> list:
    return weights * (WEIGHTS // DIFFERENT)


def _numbers(result: jax.Array) -> np.ndarray:
    return np.asarray(result, np.float32)


def _quantized(block: int, weights: Iterable[jax.Array]) -> list[jlp.QuantizedArray]:
    return [jlp.quantize(w.astype(jnp.bfloat16), jlp.Int4(block)) for w in weights]


def _ours(block: int, x: jax.Array, weights: list[jax.Array]) -> Side:
    chain = _quantized(block, _chain(weights))  # each in memory of its own
    return Side(
        repeated(lambda x, q: jlp.scaled_matmul(x, q, preferred_element_type=x.dtype), x, chain),
        _numbers,
        LIMIT["4 bits"],
    )


def _xla(dtype: str, x: jax.Array, weights: list[jax.Array]) -> Side:
    """In the faster of the weight's two layouts."""
    x, *rows = (a.astype(dtype) for a in (x, *weights))
    columns = [jnp.asarray(np.asarray(w).T.copy()) for w in rows]
    calls = {
        layout: repeated(lambda x, w, layout=layout: jnp.einsum(layout, x, w), x, _chain(chosen))
        for layout, chosen in {"mk,nk->mn": rows, "mk,kn->mn": columns}.items()
    }
    return Side(calls[fastest(calls, 5)], _numbers, LIMIT["bfloat16"])


def _through(product: Callable, x: jax.Array, chain: list) -> Callable:
    import torch

    t = tensor(x)

    @torch.no_grad()
    def call():
        return functools.reduce(product, chain, t)

    return call


def _torch(x: jax.Array, weights: list[jax.Array]) -> Side:
    import torch

    chain = _chain([tensor(w.astype(jnp.bfloat16)) for w in weights])
    return Side(_through(torch.nn.functional.linear, x, chain), as_floats, LIMIT["bfloat16"])


def _torch_int4(x: jax.Array, weights: list[jax.Array]) -> Side:
    """Our codes and scales, in its layout."""
    import torch

    block = BLOCKS["Int4 1x128"]

    def packed(q: jlp.QuantizedArray) -> tuple:
        data, scale = np.asarray(q.data), tensor(q.scale)
        codes = np.stack([data & 15, data >> 4], -1).reshape(q.shape).astype(np.int32)
        scales_and_zeros = torch.stack([scale.t(), torch.zeros_like(scale.t())], -1).contiguous()
        return torch._convert_weight_to_int4pack_for_cpu(torch.from_numpy(codes), 2), scales_and_zeros

    chain = [packed(q) for q in _quantized(block, _chain(weights))]
    call = _through(lambda x, w: torch._weight_int4pack_mm_for_cpu(x, w[0], block, w[1]), x, chain)
    return Side(call, as_floats, LIMIT["4 bits"])


def _onnxruntime(block: int, level: int, x: jax.Array, weights: list[jax.Array]) -> Side:
    """Our codes and scales. Its level 4 rounds activations to 8 bits."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    size, nodes, constants = x.shape[1], [], []
    for i, q in enumerate(_quantized(block, _chain(weights))):
        codes = np.asarray(q.data).reshape(size, size // block, block // 2)
        scales = np.asarray(q.scale, np.float32).reshape(-1)
        constants += [numpy_helper.from_array(codes, f"codes{i}"), numpy_helper.from_array(scales, f"scales{i}")]
        attributes = {"K": size, "N": size, "bits": 4, "block_size": block, "accuracy_level": level}
        inputs = [f"x{i}", f"codes{i}", f"scales{i}"]
        nodes.append(helper.make_node("MatMulNBits", inputs, [f"x{i + 1}"], domain="com.microsoft", **attributes))
    ends = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, [1, size]) for i in (0, WEIGHTS)]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(
        helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
    )
    feed = {"x0": np.asarray(x, np.float32)}
    return Side(lambda: session.run(None, feed)[0], _numbers, LIMIT["4 bits"])


def _ggml(x: jax.Array, weights: list[jax.Array]) -> Side:
    """Weights that it quantised itself."""
    call, read = ggml_graph.chain(np.asarray(x, np.float32), [np.asarray(w) for w in _chain(weights)], THREADS)
    return Side(call, lambda result: read(), LIMIT["4 bits"])
