"""What the kernels are measured against: plain copies, and XLA's own GEMM."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import subprocess
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from timing import alternate


class Copies:
    """benchmarks/copy.cc, compiled for this machine."""

    def __init__(self, threads: int):
        source = pathlib.Path(__file__).with_name("copy.cc")
        library = pathlib.Path(tempfile.mkdtemp()) / "copy.so"
        subprocess.run(
            ["c++", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", source, "-o", library], check=True
        )
        self.library, self.threads = ctypes.CDLL(str(library)), threads

    def read_and_write(self, x: np.ndarray, out: np.ndarray, times: int) -> Callable[[], None]:
        """A call that takes what reading x that many times and writing `out` takes."""
        arguments = (_address(x), ctypes.c_int64(x.nbytes), _address(out), ctypes.c_int64(out.nbytes))
        return lambda: self.library.read_and_write(*arguments, times, self.threads)

    def copy(self, x: np.ndarray, out: np.ndarray) -> Callable[[], None]:
        """A call that copies x."""
        return lambda: self.library.copy(_address(x), _address(out), ctypes.c_int64(x.nbytes), self.threads)


def _address(x: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.ctypes.data)


def fastest_dot(a: jax.Array, w: jax.Array, rounds: int) -> tuple[str, Callable[[], jax.Array]]:
    """XLA's bf16 dot in the fastest of the weight's two layouts and of two result types: its name and a call.

    Which is fastest depends on JAX's version and on the processor, by a factor of two.

    Arguments:
        a: [M, K].
        w: [N, K].
    """
    operands = {"mk,nk->mn": ("w[N,K]", w), "mk,kn->mn": ("w[K,N]", jnp.asarray(np.asarray(w).T.copy()))}

    def call(layout, dtype):
        dot = jax.jit(lambda a, w: jnp.einsum(layout, a, w, preferred_element_type=dtype))
        return functools.partial(dot, a, operands[layout][1])

    variants = [(layout, dtype) for layout in operands for dtype in (jnp.bfloat16, jnp.float32)]
    calls = {f"{operands[layout][0]}, {jnp.dtype(dtype).name} out": call(layout, dtype) for layout, dtype in variants}
    name = fastest(calls, rounds)
    return f"XLA's fastest bf16 dot ({name})", calls[name]


def fastest(calls: dict[str, Callable[[], object]], rounds: int) -> str:
    """The name of the call that takes the least time."""
    speed = alternate(calls, rounds)
    return min(speed, key=lambda name: speed[name]["median"])
