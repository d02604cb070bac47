"""Matrix-vector products by ggml's CPU backend, as llama.cpp runs them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np


def chain(x: np.ndarray, weights: list[np.ndarray], threads: int) -> tuple[Callable[[], int], Callable[[], np.ndarray]]:
    """A call that multiplies a row by the weights in turn, in Q4_0, and one that reads its result.

    Weights are stored as llama.cpp stores them: in the buffer that interleaves their rows for this processor.

    Raises:
        RuntimeError: ggml refuses.
    """
    import ggml

    ggml.ggml_log_set(_silent, None)
    backend = ggml.ggml_backend_cpu_init()
    ggml.ggml_backend_cpu_set_n_threads(backend, threads)
    constants, variables = _context(len(weights)), _context(len(weights) + 1)
    tensors = [ggml.ggml_new_tensor_2d(constants, ggml.GGML_TYPE_Q4_0, w.shape[1], w.shape[0]) for w in weights]
    if not ggml.ggml_backend_alloc_ctx_tensors_from_buft(constants, _interleaving()):
        raise RuntimeError("no memory for the weights")
    for tensor, w in zip(tensors, weights, strict=True):
        codes = _quantized(w)
        ggml.ggml_backend_tensor_set(tensor, codes.ctypes.data, 0, codes.nbytes)
    first = last = ggml.ggml_new_tensor_2d(variables, ggml.GGML_TYPE_F32, x.shape[1], x.shape[0])
    for tensor in tensors:
        last = ggml.ggml_mul_mat(variables, tensor, last)
    graph = ggml.ggml_new_graph(variables)
    ggml.ggml_build_forward_expand(graph, last)
    if not ggml.ggml_backend_alloc_ctx_tensors(variables, backend):
        raise RuntimeError("no memory for the activations")
    row = np.ascontiguousarray(x, np.float32)
    ggml.ggml_backend_tensor_set(first, row.ctypes.data, 0, row.nbytes)

    def call() -> int:
        if status := ggml.ggml_backend_graph_compute(backend, graph):
            raise RuntimeError(f"status {status}")
        return 0

    def read() -> np.ndarray:
        out = np.empty((x.shape[0], weights[-1].shape[0]), np.float32)
        ggml.ggml_backend_tensor_get(last, out.ctypes.data, 0, out.nbytes)
        return out

    return call, read


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _silent(level: int, text: bytes, data: object) -> None:
    """It has a line for each weight."""


def _context(tensors: int) -> int:
    """Room for the descriptions of so many tensors and of a graph."""
    import ggml

    size = (tensors + 1) * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead()
    return ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=True))


def _interleaving() -> int:
    """The first buffer type that the CPU has beside the plain one."""
    import ggml

    registered = ggml.ggml_backend_cpu_reg()
    address = ggml.ggml_backend_reg_get_proc_address(registered, b"ggml_backend_dev_get_extra_bufts")
    kinds = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
    found = kinds(ggml.ggml_backend_reg_dev_get(registered, 0))
    if not found or not found[0]:
        raise RuntimeError("this build interleaves no weights")
    return found[0]


def _quantized(w: np.ndarray) -> np.ndarray:
    import ggml

    w = np.ascontiguousarray(w, np.float32)
    rows, columns = w.shape
    codes = np.empty(ggml.ggml_row_size(ggml.GGML_TYPE_Q4_0, columns) * rows, np.uint8)
    source = w.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    ggml.ggml_quantize_chunk(ggml.GGML_TYPE_Q4_0, source, codes.ctypes.data, 0, rows, columns, None)
    return codes
