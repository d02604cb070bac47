"""GEMMs on a GPU: within their route's bound of the float64 product of what was quantised, and the epilogue."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.gpu.sides import assert_same_bytes_on, run_on
from tests.helpers import FLOATS, as_bytes, format_name, quantized_from_bytes, random_array
from tests.ops.matmul.test_scaled_matmul_formats import ONE_OF_EACH_KIND, PAIRS
from tests.products import assert_is_product, decoded, rebase_errors, sum_error

NVFP4 = list(itertools.product((jlp.NVFP4(), jlp.NVFP4((16, 16))), repeat=2))
SIZES = [(1, 1, 1), (7, 32, 3), (1, 1024, 300), (16, 256, 128), (33, 128, 65), (20, 300, 130), (130, 512, 264)]


def pair_name(pair):
    return " x ".join(map(format_name, pair))


def multiply(a, b, **options):
    return jlp.scaled_matmul(a, b, implementation="ffi", **options)


@pytest.mark.parametrize("formats", NVFP4 + PAIRS, ids=pair_name)
def test_error(gpu, formats):
    for m, k, n in SIZES:
        a = jlp.quantize(random_array((m, k), "float32", 1), formats[0])
        b = jlp.quantize(random_array((n, k), "float32", 2), formats[1])
        exact_operands = decoded(a), decoded(b).T
        for dtype in (jnp.bfloat16, jnp.float32):
            result = run_on(gpu, lambda a, b, d=dtype: multiply(a, b, preferred_element_type=d), a, b)
            assert_is_product(result, *exact_operands, sum_error(formats, (m, k, n)))


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
def test_products_of_integers_have_the_cpus_bytes(cpu, gpu, scale_dtype):
    """Exact sums and two roundings: few rows or many, accumulated onto, with and without an epilogue of XLA's."""
    for m, k, n in (*SIZES, (3, 131_072, 20)):
        a = jlp.quantize(random_array((m, k), "bfloat16", 1), jlp.Int8Rows())
        b = jlp.quantize(random_array((n, k), "bfloat16", 2), jlp.Int8Rows(scale_dtype))
        bias, accumulate = random_array((n,), "float32", 3), random_array((m, n), "bfloat16", 4)
        for given in ({}, {"accumulate": accumulate}, {"bias": bias}):
            for dtype in FLOATS:

                def product(a, b, given=given, dtype=dtype):
                    return multiply(a, b, preferred_element_type=dtype, **given)

                assert_same_bytes_on((cpu, gpu), product, a, b)


@pytest.mark.parametrize(
    "fmt",
    [
        jlp.MXFP4(),
        jlp.MXFP4((32, 32)),
        *(jlp.Int4(*of) for of in itertools.product((32, 64, 128, 256), (True,), FLOATS[:2])),
    ],
    ids=format_name,
)
def test_integers_by_4_bits_have_the_cpus_bytes(cpu, gpu, fmt):
    """Each kind of tile, one of them not whole; accumulated onto, with and without an epilogue of XLA's; batches."""
    sizes = [(1, 256, 3), (16, 1024, 300), (33, 768, 65), (130, 512, 264), (300, 1280, 8200), (3, 131_072, 20)]
    for (m, k, n), batch in (*((size, ()) for size in sizes), ((20, 512, 48), (3,))):
        a = jlp.quantize(random_array((*batch, m, k), "bfloat16", 1), jlp.Int8Rows())
        weight = random_array((*batch, n, k), "bfloat16", 2)
        b = jlp.quantize(weight.astype(fmt.scale_dtype) if fmt.element == "int4" else weight, fmt)
        bias, accumulate = random_array((*batch, n), "float32", 3), random_array((*batch, m, n), "bfloat16", 4)
        for given in ({}, {"accumulate": accumulate}, {"bias": bias}):
            for dtype in FLOATS:

                def product(a, b, given=given, dtype=dtype):
                    return multiply(a, b, preferred_element_type=dtype, **given)

                assert_same_bytes_on((cpu, gpu), product, a, b)


@pytest.mark.parametrize("formats", NVFP4[:1] + ONE_OF_EACH_KIND, ids=pair_name)
def test_error_of_float32_sums(gpu, formats):
    """With precision="highest" numerics.md 9 holds on every GPU; None: what has no such kernel is the reference's."""
    for m, k, n in SIZES:
        a = jlp.quantize(random_array((m, k), "float32", 1), formats[0])
        b = jlp.quantize(random_array((n, k), "float32", 2), formats[1])
        for dtype in (jnp.bfloat16, jnp.float32):
            result = run_on(
                gpu, lambda a, b, d=dtype: jlp.scaled_matmul(a, b, preferred_element_type=d, precision="highest"), a, b
            )
            assert_is_product(result, decoded(a), decoded(b).T)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, 16])
@pytest.mark.parametrize("fmt", [jlp.NVFP4(), jlp.NVFP4((16, 16))], ids=format_name)
def test_few_rows(gpu, rows, fmt):
    """Decoding weights in registers, where one token or a few are multiplied."""
    for k, n in ((1024, 512), (4096, 130), (1040, 72)):
        a = jlp.quantize(random_array((rows, k), "bfloat16", rows), jlp.NVFP4())
        b = jlp.quantize(random_array((n, k), "bfloat16", 2), fmt)
        assert_is_product(run_on(gpu, multiply, a, b), decoded(a), decoded(b).T)


@pytest.mark.slow
@pytest.mark.parametrize("formats", [NVFP4[1], *ONE_OF_EACH_KIND], ids=pair_name)
@pytest.mark.parametrize("sizes", [(8192, 8192, 8192), (4096, 1536, 24576), (1, 8192, 8192)], ids=str)
def test_large(gpu, formats, sizes):
    m, k, n = sizes
    a, b = (jlp.quantize(random_array((r, k), "bfloat16", r), f) for r, f in zip((m, n), formats, strict=True))
    result = run_on(gpu, lambda a, b: multiply(a, b, preferred_element_type=jnp.float32), a, b)
    some = np.random.default_rng(0).choice(n, 64, replace=False)  # columns: all of them take minutes in float64
    assert_is_product(result[:, some], decoded(a), decoded(b)[some].T, sum_error(formats, sizes))


@pytest.mark.parametrize("formats", [NVFP4[1], *ONE_OF_EACH_KIND], ids=pair_name)
class TestEpilogue:
    def operands(self, formats):
        a, b = (jlp.quantize(random_array((r, 256), "float32", r), f) for r, f in zip((48, 80), formats, strict=True))
        return a, b, random_array((80,), "float32", 3)

    @pytest.mark.parametrize("activation", [None, "gelu", "dgelu"])
    def test_near_the_cpus(self, cpu, gpu, formats, activation):
        a, b, bias = self.operands(formats)
        for dtype, out_dtype in itertools.product(FLOATS, FLOATS):
            accumulate, where = random_array((48, 80), dtype, 4), random_array((48, 80), dtype, 5)
            given = {"activation": activation} | ({"activation_input": where} if activation == "dgelu" else {})

            def product(a, b, bias, accumulate, o=out_dtype, given=given):
                return multiply(a, b, bias=bias, accumulate=accumulate, preferred_element_type=o, **given)

            results = [run_on(d, product, a, b, bias, accumulate).astype(np.float64) for d in (cpu, gpu)]
            size = np.abs(decoded(a)) @ np.abs(decoded(b)).T + np.abs(bias) + np.abs(np.asarray(accumulate, np.float64))
            tolerance = sum_error(formats, (48, 256, 80)) + 32 * 2.0**-24 + 2 * float(jnp.finfo(out_dtype).eps)
            np.testing.assert_array_less(np.abs(results[0] - results[1]), 2 * tolerance * size + 1e-30)

    def test_rows_do_not_depend_on_calls_before(self, gpu, formats):
        a, b, bias = self.operands(formats)
        first, second = (run_on(gpu, lambda a, b, c: multiply(a, b, bias=c), a, b, bias) for _ in range(2))
        np.testing.assert_array_equal(as_bytes(first), as_bytes(second))

    def test_what_is_not_finite_stays_so(self, gpu, formats):
        a, b, bias = self.operands(formats)
        result = run_on(gpu, lambda a, b, c: multiply(a, b, bias=c), a, b, bias.at[7].set(np.nan))
        assert np.isnan(result[:, 7].astype(np.float32)).all()
        assert np.isfinite(np.delete(result, 7, axis=1).astype(np.float32)).all()


@pytest.mark.sanitize
@pytest.mark.parametrize("formats", [NVFP4[1], *ONE_OF_EACH_KIND], ids=pair_name)
def test_every_kernel_once(gpu, formats):
    for m, k, n in ((3, 160, 40), (67, 160, 40)):
        a, b = (quantized_from_bytes((r, k), f, seed=r) for r, f in zip((m, n), formats, strict=True))
        result = run_on(gpu, lambda a, b: multiply(a, b, preferred_element_type=jnp.float32), a, b)
        a_errors, b_errors = rebase_errors(a, b)
        assert_is_product(result, decoded(a), decoded(b).T, sum_error(formats, (m, k, n)), (a_errors, b_errors.T))


def test_batches(gpu):
    a, b = (jlp.quantize(random_array((3, r, 128), "bfloat16", r), jlp.NVFP4()) for r in (24, 40))
    result = run_on(gpu, multiply, a, b)
    for slice_, left, right in zip(result, decoded(a), decoded(b), strict=True):
        assert_is_product(jnp.asarray(slice_), left, right.T)


def test_gradients_of_a_linear_are_near_the_cpus(cpu, gpu):
    x, w = random_array((64, 128), "bfloat16", 0), random_array((128, 96), "float32", 1)
    for recipe in (
        jlp.NVFP4BlockScaling(),
        jlp.Float8BlockScaling(),
        jlp.MXFP8BlockScaling(),
        jlp.Float8CurrentScaling(),
    ):

        def loss(x, w, recipe=recipe):
            y = jlp.linear(x, w, recipe=recipe, key=np.array([1, 2], np.uint32))
            return jnp.sum(y.astype(jnp.float32) ** 2)

        sides = [run_on(device, jax.grad(loss, (0, 1)), x, w) for device in (cpu, gpu)]
        for ours, theirs in zip(*sides, strict=True):
            ours, theirs = (np.asarray(g).astype(np.float64) for g in (ours, theirs))
            # What differs in the last bit of y may round to another 4-bit code in the gradient.
            assert np.linalg.norm(ours - theirs) <= 0.02 * np.linalg.norm(theirs)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "fmt",
    [jlp.Int4(32), jlp.Int4(128, symmetric=False), jlp.NVFP4(), jlp.NVFP4((16, 16)), jlp.MXFP4(), jlp.MXFP8()],
    ids=str,
)
def test_weight_only_products_are_near_the_cpus(cpu, gpu, fmt, dtype):
    """Few rows by the library's kernel where it has one, more by XLA's GEMM."""
    q, bias = jlp.quantize(random_array((80, 256), "bfloat16", 1), fmt), random_array((80,), "float32", 2)
    for rows in (1, 7, 16, 40):
        x = random_array((rows, 256), dtype, rows)
        ours, theirs = (
            run_on(
                d,
                lambda x, q, b: jlp.scaled_matmul(x, q, b, activation="gelu", preferred_element_type=jnp.float32),
                x,
                q,
                bias,
            )
            for d in (gpu, cpu)
        )
        size = np.abs(np.asarray(x, np.float64)) @ np.abs(decoded(q)).T + np.abs(np.asarray(bias))
        np.testing.assert_array_less(np.abs(ours - theirs), 2 * (256 + 32) * 2.0**-24 * size + 1e-30)
