"""`jaxlowprec` for tests: outside of JAX's transformations its ops run by NumPy and the kernels, and compile nothing.

    from tests.eager import jlp

Called with arrays, an op is traced as `jax.jit` would trace it, and evaluated by tests/interpreted.py. With tracers,
with NumPy's doubles, for the reference and on a GPU the ops are the library's own.
"""

import functools
import inspect
import os

import jax
import numpy as np

import jaxlowprec
from jaxlowprec.arrays.quantized_array import check_quantized
from jaxlowprec.wiring import native
from tests.interpreted import interpreted

OPS = ("quantize", "quantize_both", "dequantize", "fake_quantize", "hadamard_transform", "scaled_matmul")
OPS += ("rms_norm", "layer_norm", "gelu", "silu", "relu_squared", "geglu", "swiglu")
ON_GPU = os.environ.get("JAXLOWPREC_TESTS_ON") == "cuda"


def evaluated(function):
    """The function of arrays and of other arguments, which can be hashed."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        leaves, structure = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves]
        by_reference = any(isinstance(leaf, str) and leaf == "reference" for leaf in leaves)
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        wide = any(isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.itemsize == 8 for leaf in leaves)
        if by_reference or traced or wide or not any(is_array) or ON_GPU or not native.platforms():
            return function(*args, **kwargs)
        _check_arrays(function, args, kwargs)
        static = tuple(None if array else leaf for leaf, array in zip(leaves, is_array, strict=True))
        arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
        return interpreted(_of_arrays(function, structure, static, tuple(is_array)))(*arrays)

    return call


def _check_arrays(function, args, kwargs):
    """As the function does: those that were made by hand, which they are no more when they are put together again."""
    given = [*zip(_parameters(function), args, strict=False), *kwargs.items()]
    for name, value in given:
        if isinstance(value, jaxlowprec.QuantizedArray):
            check_quantized(function.__name__, name, value)


@functools.cache
def _parameters(function):
    return list(inspect.signature(function).parameters)


@functools.lru_cache(maxsize=4096)
def _of_arrays(function, structure, static, is_array):
    """The jitted function of the arrays among the leaves of its arguments."""

    def call(*arrays):
        given = iter(arrays)
        leaves = [next(given) if array else leaf for leaf, array in zip(static, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, leaves)
        return function(*args, **kwargs)

    return jax.jit(call)


class _Evaluated:
    """The package's names."""

    def __getattr__(self, name):
        found = getattr(jaxlowprec, name)
        return evaluated(found) if name in OPS else found


jlp = _Evaluated()
