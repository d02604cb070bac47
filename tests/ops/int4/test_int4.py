"""Int4: codes, scales, zero points and decoded values, native and reference, against an oracle written apart."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

from tests.cuda_without_gpu.claiming_cuda import claiming_cuda, custom_calls
from tests.eager import jlp
from tests.helpers import FLOATS, ONE_OF_EACH, as_bytes, assert_same_bytes, random_array
from tests.numpy_oracle import int4 as oracle
from tests.ops.implementations import ByKernels, ByReference, compiled, with_options
from tests.sharding.meshes import mesh_of, on_mesh

pytestmark = pytest.mark.sampled(7)

DTYPES = ("bfloat16", "float16")
SHAPES = [((3, 256), 128), ((64, 96), 32), ((5, 33), 7), ((9, 40), 5), ((4, 13), 32), ((4, 21), 1), ((40, 200), 96)]
SHAPES += [((512, 136), 256)]  # along columns: a whole tile of two cache lines a column, and a ragged one
over_symmetric = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
over_dtypes = pytest.mark.parametrize("dtype", DTYPES)


def weights(shape, dtype, seed=0):
    """Numbers of the size that weights have."""
    return (0.02 * np.asarray(random_array(shape, "float32", seed))).astype(jnp.dtype(dtype))


def awkward(shape, dtype, seed=0):
    """Ordinary weights; in more than four rows also a group of zeros, an outlier, numbers around the least scale, a NaN
    and an infinity."""
    x = np.array(weights(shape, "float32", seed))
    if shape[0] > 4:
        x[0, :2], x[1], x[2, -1] = [-0.0, 1e-6], 0, -5
        x[3, ::2] *= np.float32(1e-3)
        x[-1, -2], x[-2, 0] = np.nan, -np.inf
    return x.astype(jnp.dtype(dtype))


def quantized_by_oracle(x, fmt, axis=-1):
    rows = np.asarray(x) if axis == -1 else np.asarray(x).T
    data, scale, zero = oracle.quantize(rows, fmt.group_size, fmt.symmetric, fmt.scale_dtype)
    return data, scale, None if fmt.symmetric else zero


def dequantized_by_oracle(q, out, axis=-1):
    data, scale = np.asarray(q.data), np.asarray(q.scale)
    zero = np.full(scale.shape, 8) if q.zero_point is None else np.asarray(q.zero_point)
    length = q.matrix_shape[axis]
    values = oracle.dequantize(data, scale, zero, q.format.group_size, length, q.format.scale_dtype, out)
    return values if axis == -1 else values.T


@functools.cache
def expected(shape, of, fmt, axis):
    """An array, and the oracle's codes, scales, zero points and decoded values of it."""
    x = awkward(shape, of)
    data, scale, zero_point = quantized_by_oracle(x, fmt, axis)
    q = jlp.QuantizedArray(data, scale, None, zero_point, fmt, shape, jnp.dtype(of), axis, None)
    return x, q, dequantized_by_oracle(q, of, axis)


def there_and_back(arrays, *, ways, implementation):
    """Quantised, dequantised and, where that gives the same, fake-quantised in each of the ways, in one program."""
    found = []
    for x, (fmt, axis) in zip(arrays, ways, strict=True):
        q = jlp.quantize(x, fmt, axis=axis, implementation=implementation)
        out = [q, jlp.dequantize(q, implementation=implementation)]
        if x.dtype.name in ("float32", fmt.scale_dtype):
            out.append(jlp.fake_quantize(x, fmt, axis=axis, implementation=implementation))
        found.append(out)
    return found


@functools.cache
def any_codes(shapes, symmetric):
    """Random bytes for all fields, and the oracle's numbers in each dtype."""
    rng = np.random.default_rng(1)
    arrays = []
    for (shape, group), dtype in itertools.product(shapes, DTYPES):
        fmt = jlp.Int4(group, symmetric, dtype, pad=True)
        like = jax.eval_shape(lambda shape=shape, fmt=fmt: jlp.quantize(jnp.zeros(shape), fmt))
        scale = rng.integers(0, 1 << 16, like.scale.shape, dtype=np.uint16).view(oracle.DTYPES[dtype])
        zero = None if symmetric else rng.integers(0, 16, scale.shape, dtype=np.uint8)
        data = rng.integers(0, 256, like.data.shape, dtype=np.uint8)
        arrays.append(jlp.QuantizedArray(data, scale, None, zero, fmt, shape, like.dtype, -1, None))
    return arrays, [[dequantized_by_oracle(q, out) for out in FLOATS] for q in arrays]


def decoded(arrays, implementation):
    return [[jlp.dequantize(q, dtype=out, implementation=implementation) for out in FLOATS] for q in arrays]


@functools.partial(jax.jit, static_argnames=("fmt", "implementation"))
def fused(w, fmt, implementation):
    q = jlp.quantize(jnp.tanh(w) * 1.0, fmt, implementation=implementation)
    return q, jlp.dequantize(q, implementation=implementation) * 1.0


class Int4Cases:
    """What every implementation promises."""

    implementation: str
    CASES = dict.fromkeys(DTYPES, list(itertools.product(SHAPES, (-1, -2))))
    DECODED = tuple(SHAPES)

    @over_symmetric
    @over_dtypes
    @pytest.mark.parametrize("of", FLOATS)
    def test_codes_scales_and_values_are_the_oracles(self, of, dtype, symmetric):
        """And so are fake-quantised values."""
        ways = [(shape, jlp.Int4(group, symmetric, dtype, True), axis) for (shape, group), axis in self.CASES[dtype]]
        arrays, *wanted = zip(*(expected(shape, of, *way) for shape, *way in ways), strict=True)
        formats_and_axes = tuple((fmt, axis) for _, fmt, axis in ways)
        found = with_options(there_and_back, self.implementation, ways=formats_and_axes)(arrays)
        for (q, *values), codes, decoded in zip(found, *wanted, strict=True):
            assert_same_bytes(q, codes)
            for value in values:
                assert_same_bytes(value, decoded)

    @over_symmetric
    @over_dtypes
    def test_every_mantissa_meets_every_tie(self, dtype, symmetric):
        """The largest magnitude runs through all of a binade, the elements through the middles of its steps."""
        one, mantissas = {"bfloat16": (0x3F80, 128), "float16": (0x3C00, 1024)}[dtype]
        amax = np.arange(one, one + mantissas, dtype=np.uint16).view(oracle.DTYPES[dtype]).astype(np.float32)
        scale = (amax / np.float32(7 if symmetric else 15)).astype(oracle.DTYPES[dtype]).astype(np.float32)
        ties = (np.arange(-15, 16) + 0.5)[None] * scale[:, None]
        limit = amax[:, None] if symmetric else np.stack([-0 * amax, amax], 1).max(1, keepdims=True)
        x = np.where((np.abs(ties) < limit) & (symmetric | (ties > 0)), ties, 0)
        x = np.concatenate([amax[:, None], x], 1).astype(jnp.dtype(dtype))
        assert x.shape == (mantissas, 32)
        fmt = jlp.Int4(32, symmetric, dtype)
        q = jlp.quantize(x, fmt, implementation=self.implementation)
        assert_same_bytes((q.data, q.scale, q.zero_point), quantized_by_oracle(x, fmt))
        if symmetric:  # a converter that quantises the exported weight finds the same checkpoint
            w = jlp.fake_quantize(x, fmt, implementation=self.implementation)
            assert_same_bytes(jlp.quantize(w, fmt, implementation=self.implementation), q)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_least_scale(self, dtype):
        """Around amax 7e-5: float16's 1e-5 is subnormal, and must not be flushed to zero."""
        amax = np.geomspace(1e-8, 2e-3, 512, dtype=np.float32)[:, None]
        x = amax * np.linspace(-1, 1, 32, dtype=np.float32)
        for symmetric in (True, False):
            fmt = jlp.Int4(32, symmetric, dtype)
            q = jlp.quantize(x, fmt, implementation=self.implementation)
            assert_same_bytes((q.data, q.scale, q.zero_point), quantized_by_oracle(x, fmt))
            assert float(q.scale.astype(jnp.float32).min()) == np.float32(1e-5).astype(oracle.DTYPES[dtype])

    def test_jitted_in_a_larger_program_nothing_changes(self):
        """XLA divides by reciprocals and drops roundings where it can: in large arrays, fused with what is around."""
        for dtype, symmetric in itertools.product(DTYPES, (True, False)):
            fmt = jlp.Int4(6, symmetric, dtype)
            w = weights((300, 96), "float32", seed=3)
            q, values = fused(w, fmt, self.implementation)
            eager = jnp.tanh(w)
            assert_same_bytes((q.data, q.scale, q.zero_point), quantized_by_oracle(eager, fmt))
            assert_same_bytes(values, dequantized_by_oracle(q, "float32"))
            assert_same_bytes(jlp.fake_quantize(eager, fmt, implementation=self.implementation), values)

    @over_symmetric
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_makes_its_group_nan(self, symmetric, bad):
        x = np.ones((4, 64), np.float32)
        x[1, 40] = bad
        w = np.asarray(jlp.fake_quantize(x, jlp.Int4(32, symmetric), implementation=self.implementation))
        assert np.isnan(w[1, 32:]).all() and np.isnan(w).sum() == 32

    def test_vmap_scan_and_vectors(self):
        fmt, options = jlp.Int4(8, symmetric=False), {"implementation": self.implementation}

        def one(x):
            return jlp.quantize(x, fmt, **options)

        def back(q):
            return jlp.dequantize(q, **options)

        @jax.jit
        def in_several_ways(x):
            q = one(x)
            _, scanned = jax.lax.scan(lambda c, x: (c, jlp.fake_quantize(x, fmt, **options)), 0, x)
            vectors = jax.vmap(jax.vmap(one))(x)
            return [q, jax.vmap(one)(x), vectors], [back(q), jax.vmap(back)(q), scanned]

        codes, values = in_several_ways(weights((3, 4, 16), "bfloat16"))
        for found in codes[1:]:
            assert_same_bytes(found, codes[0])
        for found in values[1:]:
            assert_same_bytes(found, values[0])

    @pytest.mark.parametrize("axis", [-1, -2])
    def test_the_gradient_passes_unchanged(self, axis):
        x, g = (random_array((32, 64), "float32", seed=s) for s in (0, 1))
        formats = jlp.Int4(32), jlp.Int4(32, symmetric=False), jlp.NVFP4(), jlp.MXFP4(scale_rule="floor")

        @self.compiled
        def gradients(x, g):
            def weighted(x, fmt):
                return (jlp.fake_quantize(x, fmt, axis=axis, implementation=self.implementation) * g).sum()

            return [jax.grad(weighted)(x, fmt) for fmt in formats]

        for gradient in gradients(x, g):
            assert_same_bytes(gradient, g)

    @over_symmetric
    def test_any_codes_decode(self, symmetric):
        arrays, wanted = any_codes(self.DECODED, symmetric)
        assert_same_bytes(with_options(decoded, self.implementation)(arrays), wanted)


class TestByReference(ByReference, Int4Cases):
    CASES = {"bfloat16": [(((64, 96), 32), -2)], "float16": [(((5, 33), 7), -1)]}  # each takes XLA a while to compile
    DECODED = (SHAPES[2],)


class TestByKernels(ByKernels, Int4Cases):
    pass


class TestValues:
    def test_an_int32_is_a_word_of_a_checkpoint(self):
        q = jlp.quantize(jnp.asarray([[7.0, -7, 0, 1, -1, 2, 3, -4]]), jlp.Int4(8))
        (word,) = np.asarray(q.data[0]).view("<i4")
        assert [(int(word) >> 4 * i & 15) - 8 for i in range(8)] == [7, -7, 0, 1, -1, 2, 3, -4]

    def test_codes_of_positive_groups_stay_in_a_nibble(self):
        """Both ends round up: 16 without the limit. Zero is a code of a group that is far from it, too."""
        x = 1 + 0.1 * jax.random.uniform(jax.random.key(0), (512, 32))
        fmt = jlp.Int4(32, symmetric=False)
        q = jlp.quantize(x, fmt)
        assert not np.asarray(q.zero_point).any()
        np.testing.assert_allclose(jlp.dequantize(q), x, atol=0.5 * 1.1 / 15 + 0.01)
        wide = weights((4096, 32), "float32", seed=5)
        codes = jlp.quantize(wide, fmt)
        scale = np.asarray(codes.scale).astype(np.float32)
        raw = np.rint(np.asarray(wide.astype(jnp.bfloat16)).astype(np.float32) / scale) + np.asarray(codes.zero_point)
        assert (raw == 16).any(), "no group would have had a code of 16: the data show nothing"
        assert_same_bytes((codes.data, codes.scale, codes.zero_point), quantized_by_oracle(wide, fmt))

    def test_a_master_weight_counts_as_rounded(self):
        x = weights((16, 64), "float32")
        for dtype in DTYPES:
            fmt = jlp.Int4(32, scale_dtype=dtype)
            exported = x.astype(dtype)
            assert_same_bytes(jlp.fake_quantize(x, fmt).astype(dtype), jlp.fake_quantize(exported, fmt))
            assert jlp.quantize(x, fmt).data.tobytes() == jlp.quantize(exported, fmt).data.tobytes()

    def test_arrays_and_their_sizes(self):
        q = jlp.quantize(jnp.ones((2, 6, 100), jnp.bfloat16), jlp.Int4(32, symmetric=False, pad=True))
        assert (q.data.shape, q.scale.shape, q.zero_point.shape) == ((2, 6, 64), (2, 6, 4), (2, 6, 4))
        assert (q.data.dtype, q.scale.dtype, q.zero_point.dtype) == (jnp.uint8, jnp.bfloat16, jnp.uint8)
        assert q.nbytes == 2 * 6 * (64 + 4 * 2 + 4) and q.amax is None
        assert "Int4 1x32 asymmetric" in repr(q)
        odd = jlp.quantize(jnp.ones((3, 5)), jlp.Int4(5))
        assert odd.data.shape == (3, 3) and (np.asarray(odd.data[:, -1]) >> 4 == 8).all()

    def test_columns_are_the_rows_of_the_transposed(self):
        for of, shape in (("bfloat16", (256, 136)), ("float32", (3, 70, 20))):
            x = weights(shape, of)
            fmt = jlp.Int4(32, pad=True)
            column, row = jlp.quantize(x, fmt, axis=-2), jlp.quantize(jnp.swapaxes(x, -1, -2), fmt)
            assert_same_bytes((column.data, column.scale), (row.data, row.scale))
            assert_same_bytes(column, row.mT)
            assert_same_bytes(jlp.dequantize(column), jlp.dequantize(row.mT))
            both = jlp.quantize_both(x, fmt)
            assert_same_bytes(both, (jlp.quantize(x, fmt), column))


class TestTransformations:
    def test_the_clipped_gradient_of_int4(self):
        x = weights((4096, 32), "float32", seed=5)

        def gradient(fmt, axis=-1):
            run = compiled(None)(jax.grad(lambda x: jlp.fake_quantize(x, fmt, axis=axis, ste="clipped").sum()))
            return np.asarray(run(x))

        assert (gradient(jlp.Int4(32)) == 1).all()  # the largest magnitude has a code
        fmt = jlp.Int4(32, symmetric=False)
        q = jlp.quantize(x, fmt)
        deployed = np.asarray(x.astype(jnp.bfloat16)).astype(np.float32)
        raw = np.rint(deployed / np.asarray(q.scale).astype(np.float32)) + np.asarray(q.zero_point)
        assert_same_bytes(gradient(fmt), (raw < 16).astype(np.float32))
        assert (raw == 16).any()
        top = np.asarray(jlp.fake_quantize(x, jlp.Int4(32, rule="compressed-tensors")))
        cut = gradient(jlp.Int4(32, rule="compressed-tensors")) == 0
        assert cut.any() and (np.abs(deployed[cut]) > np.abs(top[cut])).all() and (deployed[cut] > 0).all()

    def test_the_clipped_gradient_of_mx_formats(self):
        """In units of the block's scale the largest element is 6, the next would be 8: 7 and beyond leave the range."""
        x = np.tile(np.float32([7.5, 7.0, 6.9, -7.25, 1.0, 0.0]), 8)[None, :32]
        for fmt, zeros in ((jlp.MXFP4(scale_rule="floor"), [1, 1, 0, 1, 0, 0]), (jlp.MXFP4(), [0] * 6)):
            for axis, turned in ((-1, x), (-2, x.T)):
                clipped = functools.partial(jlp.fake_quantize, fmt=fmt, axis=axis, ste="clipped")
                got = jax.jit(jax.grad(lambda x, f=clipped: f(x).sum()))(turned)
                np.testing.assert_array_equal(got.ravel()[:6], 1 - np.array(zeros))

    @pytest.mark.parametrize("fmt", ONE_OF_EACH, ids=str)
    def test_other_formats_are_quantised_and_dequantised(self, fmt):
        for dtype, axis in (("bfloat16", -1), ("float32", -2)):
            x = random_array((2, 40, 72), dtype)
            assert_same_bytes(jlp.fake_quantize(x, fmt, axis=axis), jlp.quantize(x, fmt, axis=axis).dequantize())

    @pytest.mark.parametrize("spec", [P("a", "b"), P("b", "a"), P(None, ("a", "b"))], ids=str)
    @over_symmetric
    def test_groups_stay_whole_on_a_mesh(self, symmetric, spec):
        """Parts of whole groups stay where they are; a group that a mesh would cut is gathered, not cut."""
        for columns, group, travels in ((512, 64, False), (512, 128, spec != P("a", "b")), (96, 6, True)):
            x, fmt = weights((128, columns), "bfloat16"), jlp.Int4(group, symmetric)

            def run(x, fmt=fmt):
                q = jlp.quantize(x, fmt)
                return q, jlp.dequantize(q), jlp.fake_quantize(x, fmt)

            result, found = on_mesh(run, [x], [spec], mesh_of((2, 4)))
            assert_same_bytes(result, run(x))
            assert travels or not found

    def test_kernels_quantised_along_their_rows_stay_whole_too(self):
        x, fmt = weights((512, 64), "float32"), jlp.Int4(64)

        def run(x):
            q = jlp.quantize(x, fmt, axis=-2)
            return q, jlp.dequantize(q), jlp.fake_quantize(x, fmt, axis=-2)

        result, found = on_mesh(run, [x], [P("b", "a")], mesh_of((2, 4)))
        assert_same_bytes(result, run(x))
        assert not found

    def test_exported_code_runs_elsewhere(self):
        fmt, x = jlp.Int4(32, symmetric=False), random_array((8, 64), "bfloat16")

        def run(x):
            q = jlp.quantize(x, fmt)
            return q.data, q.scale, q.zero_point, jlp.dequantize(q), jlp.fake_quantize(x, fmt, axis=-1)

        checks = [
            export.DisabledSafetyCheck.custom_call(f"jaxlowprec_int4_{name}")
            for name in ("quantize", "dequantize", "fake_quantize")
        ]
        exported = export.export(jax.jit(run), disabled_checks=checks)(x)
        assert_same_bytes(export.deserialize(exported.serialize()).call(x), run(x))

    @over_symmetric
    def test_on_nvidia_gpus_each_is_one_call(self, symmetric):
        fmt = jlp.Int4(32, symmetric, "float16")

        def run(x):
            q = jlp.quantize(x, fmt, axis=-2)
            return jlp.dequantize(q), jlp.fake_quantize(x, fmt)

        with claiming_cuda():
            calls = custom_calls(run, jnp.ones((64, 96), jnp.float16))
        assert [c.target for c in calls] == [
            f"jaxlowprec_int4_{n}" for n in ("quantize", "dequantize", "fake_quantize")
        ]
        assert len(calls[0].results) == 2 + (not symmetric)
        assert calls[0].results[:2] == ["96x32xui8", "96x2xf16"] and calls[1].results == ["64x96xf16"]
        for call, columnwise in zip(calls, ("true", "true", "false"), strict=True):
            assert f"columnwise = {columnwise}" in call.attributes and "group = 32 : i64" in call.attributes


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            (
                {"fmt": jlp.Int4()},
                ValueError,
                "x has 24 elements along axis -1; Int4(group_size=128) needs a multiple of",
            ),
            ({"fmt": jlp.Int4(5), "axis": -2}, ValueError, "x has 16 elements along axis -2"),
            ({"hadamard": True}, ValueError, "weights are not rotated"),
            ({"rounding": "stochastic", "key": jax.random.key(0)}, ValueError, "only rounds to nearest"),
            ({"rounding": "up"}, ValueError, "rounding='up'"),
            ({"key": jax.random.key(0)}, ValueError, 'a key was given but rounding is "nearest"'),
            ({"amax": jnp.float32(1)}, ValueError, "scales each block by its own amax"),
            ({"encode_scale": jnp.float32(1)}, ValueError, "scales each block by its own amax"),
            ({"fmt": jlp.Int4(8, rule="slime"), "implementation": "ffi"}, NotImplementedError, 'Int4(rule="slime")'),
        ],
    )
    def test_quantize(self, options, error, message):
        with pytest.raises(error) as raised:
            jax.eval_shape(lambda x: jlp.quantize(x, **({"fmt": jlp.Int4(8)} | options)), jnp.ones((16, 24)))
        assert str(raised.value).startswith("quantize: ") and message in str(raised.value)

    def test_quantize_both(self):
        with pytest.raises(ValueError, match="weights are not rotated"):
            jlp.quantize_both(jnp.ones((16, 24)), jlp.Int4(8), hadamard_columnwise=True)

    @pytest.mark.parametrize(
        ("options", "dtype", "error", "message"),
        [
            ({}, "float16", TypeError, "cannot hold the bfloat16 numbers"),
            ({"ste": "soft"}, "float32", ValueError, 'ste=\'soft\'; needs "identity" or "clipped"'),
            ({"fmt": "int4"}, "float32", TypeError, "fmt='int4'; needs a format"),
            ({"fmt": jlp.Int4(7)}, "float32", ValueError, "needs a multiple of 7, or pad=True"),
            ({"axis": 0}, "float32", ValueError, "is a batch axis"),
            ({}, "int32", TypeError, "x has dtype int32"),
        ],
    )
    def test_fake_quantize(self, options, dtype, error, message):
        x = jnp.ones((2, 16, 24), dtype)
        with pytest.raises(error) as raised:
            jax.eval_shape(lambda x: jlp.fake_quantize(x, **({"fmt": jlp.Int4(8)} | options)), x)
        assert str(raised.value).startswith("fake_quantize: ") and message in str(raised.value)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"group_size": 0}, ValueError, "group_size=0; needs a whole number, 1 or more"),
            (
                {"group_size": 2**31},
                ValueError,
                "group_size=2147483648; needs a whole number, 1 or more and below 2^31",
            ),
            ({"group_size": True}, ValueError, "group_size=True"),
            ({"group_size": 32.0}, ValueError, "group_size=32.0"),
            ({"symmetric": 1}, TypeError, "symmetric=1; needs True or False"),
            ({"pad": "yes"}, TypeError, "pad='yes'; needs True or False"),
            ({"scale_dtype": "float32"}, ValueError, 'scale_dtype=\'float32\'; needs "bfloat16" or "float16"'),
            ({"scale_dtype": "half-ish"}, ValueError, "scale_dtype='half-ish'"),
            ({"rule": "gptq"}, ValueError, 'rule=\'gptq\'; needs "deploy", "slime" or "compressed-tensors"'),
        ],
    )
    def test_formats_that_are_none(self, options, error, message):
        with pytest.raises(error) as raised:
            jlp.Int4(**options)
        assert message in str(raised.value)

    def test_a_dtype_stands_for_its_name(self):
        assert jlp.Int4(scale_dtype=jnp.float16) == jlp.Int4(scale_dtype="float16")
        assert hash(jlp.Int4(np.int64(32))) == hash(jlp.Int4(32)) and jlp.Int4(32).block == (1, 32)


def test_the_published_rules_serve_other_weights_than_they_train():
    """What the default rule is for (int4_qat.md 1.3): a few per cent differ, of slime's. Of this rule's none."""
    x = (0.02 * jax.random.normal(jax.random.key(7), (512, 1024))).astype(jnp.bfloat16)
    for symmetric in (True, False):
        trained = {rule: jlp.fake_quantize(x, jlp.Int4(128, symmetric, rule=rule)) for rule in ("deploy", "slime")}
        served = {rule: jlp.quantize(x, jlp.Int4(128, symmetric, rule=rule)).dequantize() for rule in trained}
        assert (as_bytes(trained["deploy"]) == as_bytes(served["deploy"])).all()
        assert 0.03 < (as_bytes(trained["slime"]) != as_bytes(served["slime"])).mean() < 0.12
