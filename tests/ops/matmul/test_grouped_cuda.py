"""What rows in groups become on NVIDIA GPUs, run on the CPU: the same XLA code around the CPU's kernels."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.grouped_matmul import chunks, quantize_op
from jaxlowprec.ops.grouped_matmul.op import GroupedMatmulSpec
from jaxlowprec.ops.grouped_matmul.plain import plain_rows, plain_wgrad, rows_by_chunks, wgrad_by_chunks
from jaxlowprec.ops.grouped_matmul.quantize_op import GroupedQuantizeSpec, grouped_quantize_op, over_batches
from jaxlowprec.ops.grouped_matmul.weight_only import GroupedWeightOnlySpec
from tests.eager import evaluated, jlp
from tests.helpers import FLOATS, assert_same_bytes, format_name, often, random_array
from tests.ops.matmul.test_grouped_matmul import (
    FORMATS,
    PAIRS,
    SIZES,
    group_amaxes,
    grouped_weight_only,
    multiply_groups,
    multiply_within_groups,
    quantize_groups,
    rotation_of,
    weights,
    words_of,
)

pytestmark = pytest.mark.sampled(7)

CASES = {  # more rows than a tile has, and groups that begin within one
    "tiles": ([130, 0, 257, 3, 128, 1], 600, 48),
    "odd tiles": ([200, 90], 300, 33),
    "fewer rows than groups": ([0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 0], 5, 32),
} | {name: case for name, case in SIZES.items() if case[1]}
LINE_FORMATS = (jlp.Int8Rows(), jlp.Int8Rows("bfloat16", "compressed-tensors"), jlp.Float8Rows("e5m2"))
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
by_case = pytest.mark.parametrize("case", often(["tiles", "uneven"], CASES))
OF_ONE_SHAPE = [name for name, case in CASES.items() if case[1:] == (140, 160)]


def by_case_and(name, values):
    """Each of the values with groups that begin within tiles and with all sizes of one shape, which share a program;
    the first and the last with the other shapes, too."""
    every = list(itertools.product(["tiles", *OF_ONE_SHAPE], values))
    others = itertools.product([case for case in CASES if (case, values[0]) not in every], (values[0], values[-1]))
    chosen = list(itertools.product(["tiles", "uneven"], values))
    return pytest.mark.parametrize(("case", name), often(chosen, [*every, *others], 2), ids=_text)


def _text(value):
    if isinstance(value, tuple):
        return " by ".join(map(format_name, value))
    return value if isinstance(value, str) else format_name(value)


DIRECTIONS = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}


def rows_of(case):
    sizes, rows, columns = CASES[case]
    return random_array((rows, columns), seed=rows), jnp.asarray(sizes, jnp.int32)


@functools.cache
def tiled_quantize(spec):
    return jax.jit(functools.partial(quantize_op.quantize, spec))


def on_cuda(function, *static):
    """A function of `cuda`, compiled once for the sizes of chunks that it takes."""
    return _compiled(function, chunks.chunk_rows, *static)


@functools.cache
def _compiled(function, chunk_rows, *static):
    del chunk_rows
    return jax.jit(functools.partial(function, *static))


def operands_of(spec, x, sizes):
    """Of `grouped_quantize_op`, with indices that are not their own places."""
    rows, columns = x.shape
    tensors = []
    if spec.format.has_tensor_scale:
        tensors = [group_amaxes(x, sizes, True, None)[0] * (1 + i) for i in range(spec.directions)]
    if not spec.stochastic:
        return tensors
    lines = [(rows, columns)] * spec.rowwise + [(columns, rows)] * spec.columnwise
    ids = [1000 + 7 * np.arange(n, dtype=np.uint32) for line, length in lines for n in (line, -(-length // 16))]
    return [*tensors, words_of(len(sizes)), *ids]


class TestQuantizing:
    """By the kernels that take matrices, a matrix for each 128 rows of a group."""

    @by_format
    @pytest.mark.parametrize(
        ("case", "directions"),
        often(
            [("tiles", "both"), ("uneven", "rowwise"), ("uneven", "columnwise")],
            list(itertools.product(CASES, DIRECTIONS)),
            2,
        ),
    )
    def test_the_bytes_are_those_of_the_cpus_kernel(self, fmt, case, directions):
        x, sizes = rows_of(case)
        for stochastic in (False, True):
            rotation = rotation_of(fmt) if DIRECTIONS[directions][1] else None
            spec = GroupedQuantizeSpec(fmt, *DIRECTIONS[directions], rotation, stochastic, True)
            operands = operands_of(spec, x, sizes)
            found = tiled_quantize(spec)(x, sizes, *operands)
            assert_same_bytes(found, evaluated(grouped_quantize_op(spec, "ffi"))(x, sizes, *operands))

    @pytest.mark.parametrize("fmt", LINE_FORMATS, ids=format_name)
    @pytest.mark.parametrize(
        ("case", "directions"),
        often(
            [("tiles", "both"), ("fewer rows than groups", "columnwise"), ("odd tiles", "rowwise")],
            list(itertools.product(CASES, DIRECTIONS)),
            2,
        ),
    )
    def test_scales_of_lines(self, fmt, case, directions):
        """Those of columns are by the amaxes of all of a group's tiles; rows may go on elsewhere."""
        x, sizes = rows_of(case)
        x = x.at[x.shape[0] // 2, 1].set(jnp.nan)
        rowwise, columnwise = DIRECTIONS[directions]
        for stochastic, given in itertools.product((False, True), {False, rowwise}):
            spec = GroupedQuantizeSpec(fmt, rowwise, columnwise, None, stochastic, True, amaxes_given=given)
            amaxes = [jnp.abs(x).max(1).astype(jnp.float32) * 3] * given
            operands = [*amaxes, *operands_of(spec, x, sizes)]
            expected = evaluated(grouped_quantize_op(spec, "ffi"))(x, sizes, *operands)
            assert_same_bytes(tiled_quantize(spec)(x, sizes, *operands), expected)

    @by_case
    @pytest.mark.parametrize("directions", DIRECTIONS)
    def test_by_given_scales(self, case, directions):
        x, sizes = rows_of(case)
        spec = GroupedQuantizeSpec(
            *(jlp.Float8Tensor(), *DIRECTIONS[directions], None, False, True), encode_scale_given=True
        )
        scales = [jnp.asarray(np.linspace(0, 9, len(sizes), dtype=np.float32))] * spec.directions
        expected = evaluated(grouped_quantize_op(spec, "ffi"))(x, sizes, *scales)
        assert_same_bytes(tiled_quantize(spec)(x, sizes, *scales), expected)

    @pytest.mark.parametrize("fmt", [jlp.NVFP4(), jlp.Float8Tensor(), jlp.Int8Rows()], ids=format_name)
    def test_batches_share_lines_of_features_and_nothing_else(self, fmt):
        x, sizes = random_array((2, 3, 150, 32)), jnp.asarray(np.random.default_rng(0).integers(0, 80, (2, 3, 4)))
        sizes = sizes.astype(jnp.int32)
        spec = GroupedQuantizeSpec(fmt, True, True, rotation_of(fmt), True, False)
        tensors = [group_amaxes(x, sizes, True, None)[0]] * spec.tensors
        words = jnp.asarray(np.random.default_rng(1).integers(0, 2**32, (2, 3, 4, 2), dtype=np.uint32))
        ids = [jnp.arange(n, dtype=jnp.uint32) for n in (150, 2, 32, 10)]
        shared = range(spec.tensors + 1, spec.tensors + 5)
        run = functools.partial(over_batches(functools.partial(quantize_op.quantize, spec)), shared=shared)
        found = jax.jit(run)(x, sizes, *tensors, words, *ids)
        assert_same_bytes(found, evaluated(grouped_quantize_op(spec, "ffi"))(x, sizes, *tensors, words, *ids))

    @by_case
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize("bad", [None, np.nan, np.inf])
    def test_amaxes(self, case, dtype, bad):
        x, sizes = rows_of(case)
        x = x.astype(dtype) if bad is None else x.astype(dtype).at[x.shape[0] // 2, 1].set(bad)
        expected, both, plain, rotated = amaxes(x, sizes)
        assert_same_bytes(both, expected)
        assert_same_bytes(plain, expected[:1])
        assert_same_bytes(rotated, expected[1:])


@jax.jit
def amaxes(x, sizes):
    """Those of the CPU's kernel, then the tiled ones: both, and each alone."""
    tiled_ones = [
        quantize_op.amax(*which, x, sizes) for which in ((True, Hadamard()), (True, None), (False, Hadamard()))
    ]
    return group_amaxes(x, sizes, True, Hadamard()), *tiled_ones


def quantized(fmt, case, rowwise=True, seed=0):
    x, sizes = rows_of(case)
    x = x if not seed else random_array((x.shape[0], 40), seed=seed)
    row, column = quantize_groups(
        x, sizes, fmt, rowwise=rowwise, columnwise=not rowwise, hadamard=None if rowwise else rotation_of(fmt)
    )
    return row if rowwise else column


WEIGHTS = (jlp.Int4(16), jlp.Int4(16, symmetric=False), jlp.NVFP4((16, 16)), jlp.MXFP8(), jlp.Float8Tensor())


class TestProducts:
    """Of chunks, by the kernels that multiply matrices."""

    def product(self, row, w, bias):
        spec = GroupedMatmulSpec(row.format, w.format, True, True, True, jnp.dtype("float32"))
        amaxes = [row.amax, w.amax] if spec.two_level else []
        arrays = row.data, row.sizes, row.scale, w.data, w.scale, *amaxes, bias
        return np.asarray(on_cuda(chunks.matmul, spec, None)(*arrays))

    @pytest.mark.slow
    @by_case_and("pair", PAIRS)
    def test_rows_by_weights(self, case, pair):
        row = quantized(pair[0], case)
        w, bias = weights(pair[1], row.sizes.size, row.columns), random_array((row.sizes.size, 24), "float32", 5)
        y, expected = self.product(row, w, bias), multiply_groups(row, w, bias, jnp.float32)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)
        assert not y[int(np.clip(row.sizes, 0, None).sum()) :].any()

    @by_case_and("fmt", FORMATS)
    def test_wgrad(self, case, fmt):
        a = quantized(fmt, case, False)
        other = jlp.Float8Block(power_of_two=False) if fmt.element == "e5m2" else fmt
        b = quantized(other, case, False, seed=4)
        spec = GroupedMatmulSpec(fmt, other, False, False, False, jnp.dtype("float32"))
        amaxes = [a.amax, b.amax] if spec.two_level else []
        arrays = a.data, a.sizes, a.scale, b.data, b.scale, *amaxes
        y = np.asarray(on_cuda(chunks.wgrad, spec, None, a.rows)(*arrays))
        np.testing.assert_allclose(y, multiply_within_groups(a, b, jnp.float32), rtol=1e-5, atol=1e-4)
        assert not y[np.asarray(a.sizes) <= 0].any()
        before = random_array(y.shape, "float32", 6)
        added = dataclasses.replace(spec, accumulate=True)
        total = on_cuda(chunks.wgrad, added, None, a.rows)(*arrays, before)
        np.testing.assert_allclose(total, before + y, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("fmt", [jlp.NVFP4(), jlp.MXFP8(), jlp.Float8Tensor()], ids=format_name)
    def test_chunks_of_more_rows_than_most_groups(self, fmt, monkeypatch):
        monkeypatch.setattr(chunks, "chunk_rows", lambda *_: 256)
        self.test_rows_by_weights("tiles", (fmt, fmt))
        self.test_wgrad("tiles", fmt)

    @pytest.mark.parametrize(
        ("fmt", "dtype"),
        often(
            [(fmt, "bfloat16") for fmt in WEIGHTS] + [(WEIGHTS[0], dtype) for dtype in FLOATS],
            list(itertools.product(WEIGHTS, FLOATS)),
            2,
        ),
        ids=lambda value: value if isinstance(value, str) else format_name(value),
    )
    def test_weight_only(self, fmt, dtype):
        x, sizes = rows_of("tiles")
        w, bias = weights(fmt, sizes.size, x.shape[1]), random_array((sizes.size, 24), "float32", 5)
        spec = GroupedWeightOnlySpec(fmt, True, True, True, jnp.dtype("float32"))
        leaves = [leaf for leaf in (w.data, w.scale, w.amax, w.zero_point) if leaf is not None]
        x = np.asarray(x).astype(jnp.dtype(dtype))
        y = on_cuda(chunks.weight_only, spec, None)(x, sizes, *leaves, bias)
        expected = grouped_weight_only(x, w, sizes, bias, jnp.float32)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)

    def test_what_is_not_finite_spoils_its_own_group_alone(self):
        x, sizes = random_array((40, 32)), jnp.array([10, 10, 20], jnp.int32)
        w = random_array((3, 32, 24), seed=3)
        bias = jnp.zeros((3, 24))
        clean = self.product(*self.both(x, sizes, w), bias)
        for spoilt_x, spoilt_w in ((x.at[12, 3].set(jnp.nan), w), (x, w.at[1, 3, 5].set(jnp.nan))):
            y = np.asarray(self.product(*self.both(spoilt_x, sizes, spoilt_w), bias))
            assert np.isnan(y[10:20]).any(axis=1).all()
            assert_same_bytes((y[:10], y[20:]), (clean[:10], clean[20:]))

    def both(self, x, sizes, w):
        row, _ = quantize_groups(x, sizes, jlp.NVFP4(), rowwise=True, columnwise=False)
        return row, jlp.quantize(w, jlp.NVFP4(), axis=-2).mT


@functools.partial(jax.jit, static_argnames="chunk")
def by_chunks_and_plain(x, w, dy, sizes, chunk):
    f32 = jnp.dtype("float32")
    expected = plain_rows(x, w, sizes, f32), plain_wgrad(x, dy, sizes, f32)
    return (rows_by_chunks(f32, None, chunk, x, sizes, w), wgrad_by_chunks(f32, None, chunk, x, sizes, dy)), expected


class TestHighPrecision:
    """Chunks of more rows than the CPU's."""

    @by_case
    @pytest.mark.parametrize("chunk", [16, 512])
    def test_the_sums_are_the_cpus(self, case, chunk):
        x, sizes = rows_of(case)
        x, w = np.asarray(x, np.float32), random_array((sizes.size, x.shape[1], 24), "float32", 3)
        found, expected = by_chunks_and_plain(x, w, random_array((x.shape[0], 24), "float32", 4), sizes, chunk=chunk)
        for y, e in zip(found, expected, strict=True):
            np.testing.assert_allclose(y, e, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_what_is_not_finite_spoils_its_own_group_alone(self, bad):
        x, w, sizes = random_array((40, 32)), random_array((3, 32, 24)), jnp.array([10, 10, 20], jnp.int32)
        how = jnp.dtype("float32"), None, 16
        rows, wgrad = (jax.jit(functools.partial(f, *how)) for f in (rows_by_chunks, wgrad_by_chunks))
        clean = rows(x, sizes, w)
        for spoilt_x, spoilt_w in ((x.at[12, 3].set(bad), w), (x, w.at[1, 3, 5].set(bad))):
            y = np.asarray(rows(spoilt_x, sizes, spoilt_w))
            assert not np.isfinite(y[10:20]).all()
            assert_same_bytes((y[:10], y[20:]), (clean[:10], clean[20:]))
        dw, clean = wgrad(x.at[12, 3].set(bad), sizes, x), wgrad(x, sizes, x)
        assert not np.isfinite(np.asarray(dw[1])).all()
        assert_same_bytes((dw[0], dw[2]), (clean[0], clean[2]))


@pytest.mark.parametrize("rows, experts, chunk", [(600, 6, 128), (8192, 16, 512), (8200, 16, 1024), (10**6, 2, 1024)])
def test_chunks_are_as_large_as_the_average_group(rows, experts, chunk):
    assert chunks.chunk_rows(rows, experts) == chunk
    assert chunks.chunk_rows(64, 128, 16) == 16
