"""Values that nobody should pass as an argument, and values that fit somewhere, by name."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import PartitionSpec

import jaxlowprec as jlp
from jaxlowprec import moe
from tests.helpers import ONE_OF_EACH


class Asked(Exception):
    """An argument's own error, which is not the library's to catch."""


class _Refuses:
    """Neither shown, compared, hashed nor asked whether it is true."""

    def _refuse(self, *_):
        raise Asked

    __repr__ = __eq__ = __hash__ = __bool__ = _refuse


class _LooksLikeAnArray:
    shape, dtype, ndim = (16, 32), jnp.dtype("float32"), 2


class _OwnInt(int):
    pass


class _OwnText(str):
    pass


SCALARS = {
    **{
        repr(v): v
        for v in (None, True, False, ..., jlp.FROM_CONTEXT, 0, 1, -1, 2, 3, 16, 32, 127, 128, 2**31, 2**32, 2**63)
    },
    **{repr(v): v for v in (-(10**30), 10**30, 0.0, -0.0, 0.5, 1.0, 1e-40, 1e300, 1j)},
    **{repr(v): v for v in (float("nan"), float("inf"), -float("inf"), b"bytes", "", " ", "nearest", "stochastic")},
    **{
        repr(v): v
        for v in ("bfloat16", "float16", "int8", "E5M2", "clipped", "sigmoid", "e5m2", "a\nb", "\x1b[31m", "x", "ab,bc")
    },
    "10**5000": 10**5000,
    '"x" * 10000': "x" * 10000,
    "own int": _OwnInt(16),
    "own text": _OwnText("nearest"),
    "np.float32(nan)": np.float32("nan"),
    "np.int64(16)": np.int64(16),
    "np.bool_(True)": np.bool_(True),
}
OBJECTS = {
    "object()": object(),
    "a class": dict,
    "a function": lambda *_: None,
    "a function that refuses": lambda *_: {}["missing"],
    "refuses": _Refuses(),
    "looks like an array": _LooksLikeAnArray(),
    "a dtype": jnp.dtype("bfloat16"),
    "a scalar type": jnp.float16,
    "Precision": jax.lax.Precision.HIGHEST,
    "PartitionSpec": PartitionSpec("x"),
    "ShapeDtypeStruct": jax.ShapeDtypeStruct((16, 32), jnp.float32),
}
CONTAINERS = {
    **{
        repr(v): v for v in ((), [], {}, set(), (16, 32), (1, 2), [1, 2, 3], (1, (2, 3)), ((), ()), (None,), ("a", "b"))
    },
    **{
        repr(v): v
        for v in ([[1, 2], [3]], {"a": 1}, (1, 16), (16, 16), ((1,), (0,)), (((1,), (0,)), ((), ())), (-1, 1))
    },
    "range(3)": range(3),
    "nested": functools.reduce(lambda inner, _: [inner], range(200), []),
    "(1,) * 100000": (1,) * 100000,
}
NUMPY = {
    "np.array(1)": np.array(1),
    "np.float32(-1)": np.array(-1, np.float32),
    "np.zeros(0)": np.zeros(0, np.float32),
    "np.ones((2, 3))": np.ones((2, 3)),
    "np.ones((0, 4))": np.ones((0, 4), np.float32),
    "np.ones([1] * 40)": np.ones([1] * 40, np.float32),
    "text array": np.array(["a"]),
    "object array": np.array([None, 3], object),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "fields": np.zeros(3, [("a", "i4")]),
    "group sizes": np.array([8, 4, 4]),
    "huge group sizes": np.array([2**62, 2**62]),
}


@functools.cache
def arrays():
    """JAX arrays, and what is made of them."""
    x = jnp.linspace(-3, 3, 512, dtype=jnp.float32).reshape(16, 32)
    found = {f"x as {dtype}": x.astype(dtype) for dtype in ("bfloat16", "int32", "bool", "complex64", "float8_e4m3fn")}
    found |= {
        "x": x,
        "x as int4": x.astype("int4"),
        "x.T": x.T,
        "vector": x[0],
        "cube": jnp.stack([x] * 2),
        "cube.mT": jnp.stack([x.T] * 2),
    }
    found |= {"empty": x[:0], "scalar": jnp.float32(2), "negative": jnp.float32(-1), "nan": jnp.float32("nan")}
    found |= {"words": jax.device_put(np.uint32([1, 2])), "int32": jax.device_put(np.int32([8, 8]))}
    found |= {
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0)),
        "rbg": jax.random.key(0, impl="rbg"),
    }
    for fmt in ONE_OF_EACH:
        found[f"in {fmt}"] = jlp.quantize(x, fmt)
    found |= {
        "vector in NVFP4": jlp.quantize(x[0], jlp.NVFP4()),
        "columns in NVFP4": jlp.quantize(x, jlp.NVFP4(), axis=-2),
    }
    found["columns in MXFP8"] = jlp.quantize(x, jlp.MXFP8(), axis=-2)
    found |= {"in Int4": jlp.quantize(x, jlp.Int4(32)), "columns in Int4": jlp.quantize(x, jlp.Int4(16), axis=-2)}
    found |= {"cube in Int4": jlp.quantize(found["cube"], jlp.Int4(16), axis=-2)}
    q = found["in NVFP4 1x16"]
    found |= {
        "without scale": dataclasses.replace(q, scale=None),
        "other matrix": dataclasses.replace(q, matrix_shape=(16, 99)),
    }
    found |= {"as MXFP8": dataclasses.replace(q, format=jlp.MXFP8()), "without data": dataclasses.replace(q, data=3)}
    found |= {"codes": found["in MXFP8 E4M3 1x32"].data, "scales": found["in MXFP8 E4M3 1x32"].scale}
    found["swizzled scales"] = jlp.layouts.gemm_scales(found["in MXFP8 E4M3 1x32"])
    found["parameters"] = {"up": x}
    found |= {
        "gamma": x[0],
        "two kernels": (x.T, x.T),
        "kernels": (x.T, x.T, x),
        "expert kernels": (found["cube.mT"],) * 2 + (found["cube"],),
    }
    found["log-probabilities"] = -jnp.abs(x)
    found["adapters"] = jlp.lora.init(jax.random.key(0), {"up": x}, rank=4)
    found["8-bit adamw"] = jlp.optim.quantized_state(ADAMW, smallest=0)
    found["its state"] = found["8-bit adamw"].init({"up": x})
    found["state of adamw"] = ADAMW.init({"up": x})
    found["model"] = jlp.nnx.Linear(32, 8, rngs=nnx.Rngs(0))
    found["kernel"] = jlp.quantize_kernel(x.T, jlp.NVFP4BlockScaling())
    found["dispatch"] = moe.dispatch(jnp.zeros((16, 2), jnp.int32), 4)
    found["tape of one layer"] = jnp.zeros((16, 2), jnp.int32)
    found["tape"] = moe.RoutingTape(jnp.zeros((2, 16, 2), jnp.int32))
    found["state"] = jlp.delayed_scaling.init_state(jlp.DelayedScaling())
    return found


ADAMW = optax.adamw(1e-3)
RECIPES = (
    *(jlp.NVFP4BlockScaling, jlp.Float8BlockScaling, jlp.MXFP8BlockScaling, jlp.Float8CurrentScaling),
    *(jlp.NVFP4Eden, jlp.DelayedScaling, jlp.Int4QAT, jlp.WeightQAT),
)
STATIC = {
    **{f"{type(fmt).__name__}()": fmt for fmt in ONE_OF_EACH[::-1]},
    **{f"{recipe.__name__}()": recipe() for recipe in RECIPES if recipe is not jlp.WeightQAT},
    "Int4(16)": jlp.Int4(16),
    "Int4(16, False)": jlp.Int4(16, False),
    "NVFP4((16, 16))": jlp.NVFP4((16, 16)),
    "Hadamard()": jlp.Hadamard(),
    "Hadamard(64, None)": jlp.Hadamard(64, None),
    "Role": jlp.Role(jlp.NVFP4()),
    "adamw": ADAMW,
    "rules": (("up", jlp.MXFP8BlockScaling()),),
    "Linen module": linen.Dense(4),
    "Roles": jlp.Roles(None, jlp.Role(jlp.MXFP8()), None),
    "Custom": jlp.Custom(lambda role: jlp.MXFP8()),
    "phases": {0: jlp.NVFP4BlockScaling(), 16: None},
    "PerGemm": jlp.PerGemm(jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling()),
}
FRESH = {"count()": itertools.count, "a generator": lambda: (n for n in (1, 16)), "an iterator": lambda: iter((1, -1))}
"""What is used up by being looked at, made for each case."""


@functools.cache
def values():
    """All values but the fresh ones, by name."""
    with jax.ensure_compile_time_eval():  # the first call may be a traced one
        return SCALARS | OBJECTS | CONTAINERS | NUMPY | STATIC | arrays()


@functools.cache
def names():
    """The names of all values."""
    return (*values(), *FRESH)


def value(name):
    """The value of that name."""
    return FRESH[name]() if name in FRESH else values()[name]
