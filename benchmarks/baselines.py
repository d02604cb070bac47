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
    """XLA's bf16 dot with a float32 result, in the faster of the weight's two layouts: its name and a call.

    A bfloat16 result takes XLA's CPU backend twice as long.

    Arguments:
        a: [M, K].
        w: [N, K].
    """
    operands = {"mk,nk->mn": w, "mk,kn->mn": jnp.asarray(np.asarray(w).T.copy())}

    def call(layout):
        dot = jax.jit(lambda a, w: jnp.einsum(layout, a, w, preferred_element_type=jnp.float32))
        return functools.partial(dot, a, operands[layout])

    calls = {layout: call(layout) for layout in operands}
    speed = alternate(calls, rounds)
    layout = min(speed, key=lambda layout: speed[layout]["median"])
    name = {"mk,nk->mn": "w[N,K]", "mk,kn->mn": "w[K,N]"}[layout]
    return f"XLA's fastest bf16 dot ({name}, f32 out)", calls[layout]
