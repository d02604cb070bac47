"""Comparisons and inputs that many tests share."""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp


def often(chosen, values, arguments=1):
    """Parameters of which the chosen ones always run, and the others with --slow.

    Arguments:
        arguments: how many arguments of a test a value has; if several, values are tuples of as many.
    """
    return [
        pytest.param(*(value if arguments > 1 else [value]), marks=[] if value in chosen else pytest.mark.slow)
        for value in values
    ]


FLOATS = ("bfloat16", "float16", "float32")
FLOAT8 = ("e4m3", "e5m2")
SCALE_RULES = ("up", "floor", "even")

NVFP4S = (jlp.NVFP4(), jlp.NVFP4((16, 16)))
CHOSEN_SCALES = tuple(
    jlp.NVFP4(block, rule) for block in ((1, 16), (16, 16)) for rule in ("four_over_six", "four_over_six_mse", "search")
)
MXS = tuple(
    make(block, rule)
    for make in (lambda *a: jlp.MXFP8("e4m3", *a), lambda *a: jlp.MXFP8("e5m2", *a), jlp.MXFP4)
    for block in ((1, 32), (32, 32))
    for rule in SCALE_RULES
)
FLOAT8_BLOCKS = (
    *itertools.starmap(jlp.Float8Block, itertools.product(FLOAT8, ((1, 128), (128, 128)), (True, False))),
    jlp.Float8Block(amax_epsilon=1.5),
    jlp.Float8Block("e5m2", (128, 128), False, 1.5),
)
FLOAT8_TENSORS = (
    *itertools.starmap(jlp.Float8Tensor, itertools.product(FLOAT8, (False, True))),
    jlp.Float8Tensor(amax_epsilon=100.0),
)
FORMATS = (*NVFP4S, *MXS, *FLOAT8_BLOCKS, *FLOAT8_TENSORS)
ONE_OF_EACH = (  # every element, scaling and shape of block
    *NVFP4S,
    jlp.MXFP8(),
    jlp.MXFP8("e5m2", (32, 32)),
    jlp.MXFP4(),
    jlp.MXFP4((32, 32)),
    jlp.Float8Block(),
    jlp.Float8Block("e5m2", (128, 128), False),
    jlp.Float8Tensor(),
    jlp.Float8Rows(),
    jlp.Int8Rows(),
)
COUNTED = tuple(fmt for fmt in ONE_OF_EACH if fmt.scaling != "rows")  # those whose statistics have kernels
OF_CACHES = (jlp.Float8Rows(rule="cache"), jlp.Int8Rows(rule="cache"))  # quantised by the reference, without kernels
BY_WEIGHTS_RULE = jlp.Float8Rows(rule="w4afp8")  # without kernels, too


def format_name(fmt):
    """The id of a test parameter: what str() says and the fields that are not as by default."""
    fields = [f for f in dataclasses.fields(fmt) if f.name not in ("element", "block")]
    values = [(f.name, getattr(fmt, f.name), f.default) for f in fields]
    return "-".join([*str(fmt).split(), *(f"{name}={value}" for name, value, default in values if value != default)])


def as_bytes(x):
    """An array's elements as unsigned integers of their width."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def assert_same_bytes(actual, expected):
    """Trees of arrays agree in shape, dtype and every byte."""
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        np.testing.assert_array_equal(as_bytes(a), as_bytes(e))


def assert_same_numbers(actual, expected):
    """Trees of arrays agree in every byte, except that a NaN may be any NaN."""
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        nan = np.isnan(np.asarray(e).astype(np.float32))
        np.testing.assert_array_equal(np.isnan(np.asarray(a).astype(np.float32)), nan)
        np.testing.assert_array_equal(as_bytes(a)[~nan], as_bytes(e)[~nan])


@contextlib.contextmanager
def compilations():
    """A list that gets an element for each trace and each compilation in the context."""
    found = []

    def listener(event, *_, **__):
        if event.startswith("/jax/core/compile"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def digest(x):
    """The first 32 hex digits of SHA-256 over the C-contiguous bytes."""
    return hashlib.sha256(np.ascontiguousarray(np.asarray(x)).tobytes()).hexdigest()[:32]


def golden_input(shape, seed, outliers=True):
    """Deterministic float32 numbers from integer arithmetic alone; one in 64 is 16 times larger."""
    n = int(np.prod(shape))
    with np.errstate(over="ignore"):
        z = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.uint64(0x2545F4914F6CDD1D)
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    total = sum(((z >> np.uint64(16 * i)) & np.uint64(0xFFFF)).astype(np.int64) for i in range(4)) - 2 * 65535
    x = (total / 65536.0).astype(np.float32)
    if outliers:
        x = np.where((z >> np.uint64(58)) == 0, x * np.float32(16), x)
    return x.reshape(shape)


def random_array(shape, dtype="bfloat16", seed=0):
    """Normal numbers with zeros of both signs, ties, underflowing blocks and outliers among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    kind = rng.integers(0, 64, shape)
    x = np.where(kind == 0, np.float32(-0.0), x)
    x = np.where(kind == 1, np.float32(0.0), x)
    x = np.where(kind == 2, x * np.float32(16), x)
    x = np.where(kind == 3, np.round(x * 4) / np.float32(4), x)
    x = np.where(kind == 4, x * np.float32(1e-6), x)
    if x.ndim > 1 and x.shape[-2] > 2:
        x[..., 1, :] *= np.float32(1e-7)  # block scales that underflow
    return jax.device_put(x.astype(jnp.dtype(dtype)))  # NumPy's cast: an eager one of JAX is a program for each shape


def quantized_from_bytes(shape, fmt, seed=0, *, amax=None, codes=None, scales=None, axis=-1, hadamard=None):
    """A QuantizedArray of bytes that need not come from quantising anything: repeated `codes` and `scales` (bytes, or
    numbers where they are float32), random ones that decode to numbers where not given."""
    rng = np.random.default_rng(seed)
    batch, (lines, length) = shape[:-2], shape[-2:] if axis == -1 else shape[:-3:-1]
    length += -length % (hadamard.size if hadamard else 1)
    block = (1, 1) if fmt.scaling == "tensor" else fmt.block
    blocks = (-(-lines // block[0]), fmt.blocks(length))

    def fill(given, random, *dims):
        full = (*batch, *dims)
        return random(full) if given is None else np.resize(given, full)

    def number(full):
        exponents = rng.uniform(-8, 8, full)
        return np.exp2(np.round(exponents) if fmt.power_of_two else exponents)

    def code(full):
        raw = rng.integers(0, 256, full)
        if fmt.element == "int8":
            return np.where(raw == 0x80, 0x81, raw)  # -127 at least
        largest = {"e2m1": 0x7F, "e4m3": 0x7E, "e5m2": 0x7B}[fmt.element]
        return np.where(raw & 0x7F > largest, largest, raw)

    width = blocks[1] * block[1] // 2 if fmt.packed else length
    data = fill(codes, code, lines, width).astype(np.uint8).view(np.uint8 if fmt.packed else fmt.data_dtype)
    if fmt.scaling in ("two_level", "e8m0"):
        low, high = (0, 0x7F) if fmt.scaling == "two_level" else (107, 148)
        scale = fill(scales, lambda full: rng.integers(low, high, full), *blocks).astype(np.uint8).view(fmt.scale_dtype)
    else:
        scale = np.asarray(fill(scales, number, *(() if fmt.scaling == "tensor" else blocks)), np.float32)
    if fmt.scaling == "two_level":
        amax = np.exp2(rng.uniform(-8, 8, batch)) if amax is None else np.broadcast_to(amax, batch)
        amax = jax.device_put(np.asarray(amax, np.float32))
    data, scale = jax.device_put((data, scale))
    return jlp.QuantizedArray(data, scale, amax, None, fmt, tuple(shape[-2:]), jnp.dtype("bfloat16"), axis, hadamard)


# XLA's flags for programs whose speed does not matter: what surrounds the kernels is not optimised, is compiled in one
# piece, and does not pass through MLIR, which from 0.11 on everything does.
FAST_COMPILATION = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    *(["--xla_cpu_use_fusion_emitters=false"] if jax.__version_info__ < (0, 11) else []),
)


def python_environment(**variables):
    """That of this process, with the jaxlowprec that it uses and no other, on the CPU."""
    path = str(pathlib.Path(jlp.__file__).parents[1])
    return os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | variables


def _python(*arguments, timeout=1200, **variables):
    return subprocess.run(
        [sys.executable, *arguments],
        env=python_environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_python(*arguments, **options):
    """A Python process of its own; its output as text. Fails with that output."""
    done = _python(*arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def refused(*arguments, **options):
    """What a Python process says that has to end with an error in the user's terms."""
    done = _python(*arguments, **options)
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.stderr
