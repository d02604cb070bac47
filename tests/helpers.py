"""Comparisons and inputs that many tests share."""

import hashlib
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxlowprec as jlp

FLOATS = ("bfloat16", "float16", "float32")


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
    """Arrays agree in every byte, except that a NaN may be any NaN."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    a, e = np.asarray(actual).astype(np.float32), np.asarray(expected).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(a), np.isnan(e))
    keep = ~np.isnan(e)
    np.testing.assert_array_equal(as_bytes(actual)[keep], as_bytes(expected)[keep])


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
    return jnp.asarray(x).astype(dtype)


def quantized_from_bytes(shape, fmt, seed=0, *, amax=None, codes=None, scales=None, axis=-1, hadamard=None):
    """A QuantizedArray of bytes that need not come from quantising anything: repeated `codes` and E4M3 `scales`, random
    ones (never NaN) where not given."""
    rng = np.random.default_rng(seed)
    batch, (lines, length) = shape[:-2], shape[-2:] if axis == -1 else shape[:-3:-1]
    length += -length % (hadamard.size if hadamard else 16)
    scale_lines = -(-lines // 16) if fmt.tiles else lines

    def fill(given, limit, *dims):
        full = (*batch, *dims)
        return jnp.asarray(rng.integers(0, limit, full) if given is None else np.resize(given, full), jnp.uint8)

    scale = jax.lax.bitcast_convert_type(fill(scales, 0x7F, scale_lines, length // 16), jnp.float8_e4m3fn)
    amax = np.exp2(rng.uniform(-8, 8, batch)) if amax is None else np.broadcast_to(amax, batch)
    leaves = (fill(codes, 256, lines, length // 2), scale, jnp.asarray(amax, jnp.float32), None)
    return jlp.QuantizedArray(*leaves, fmt, tuple(shape[-2:]), jnp.dtype("bfloat16"), axis, hadamard)


def python_environment(**variables):
    """That of this process, with the jaxlowprec that it uses and no other, on the CPU."""
    path = str(pathlib.Path(jlp.__file__).parents[1])
    return os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | variables


def run_python(*arguments, timeout=300, **variables):
    """A Python process of its own; its output as text. Fails with that output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=python_environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
