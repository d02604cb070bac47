"""Rows in groups with a scale for each row, and for each column in each group: the bytes are those of a group alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowprec.ops.grouped_matmul import api
from tests.eager import evaluated, jlp
from tests.helpers import as_bytes, assert_same_bytes, format_name, often, random_array
from tests.ops.implementations import compiled
from tests.ops.matmul.groups import SIZES, WITH_ROWS, groups_of, words_of

pytestmark = pytest.mark.sampled(7)

quantize_groups = evaluated(api.quantize_groups)
multiply_groups, multiply_within_groups = evaluated(api.multiply_groups), evaluated(api.multiply_within_groups)

FORMATS = (
    jlp.Int8Rows(),
    jlp.Float8Rows(),
    jlp.Float8Rows("e5m2"),
    jlp.Int8Rows("bfloat16"),
    jlp.Float8Rows(scale_dtype="float16", least_scale=0.01),
)
WAYS = ["reference", "ffi", "portable"]
PAIRS = (  # of rows and weights
    (jlp.Int8Rows(), jlp.Int8Rows("bfloat16")),
    (jlp.Int8Rows(), jlp.Int8Rows("bfloat16", "compressed-tensors")),
    (jlp.Float8Rows(), jlp.Float8Rows(scale_dtype="bfloat16")),
    (jlp.Float8Rows("e5m2"), jlp.Float8Rows()),
    (jlp.Int8Rows(), jlp.MXFP4()),
    (jlp.Int8Rows(), jlp.Int4(32, pad=True)),
)
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
by_rounding = pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
by_implementation = pytest.mark.parametrize("implementation", WAYS)
by_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " by ".join(map(format_name, pair)))


def rows_of(case, dtype="bfloat16", seed=0):
    """An array with rows and columns of zeros and one that is not finite."""
    _, rows, columns = SIZES[case]
    if not rows:
        return jnp.zeros((0, columns), dtype)
    x = np.array(random_array((rows, columns), dtype, seed))
    x[1], x[:, 2], x[3, 5] = 0, 0, np.nan
    return jnp.asarray(x)


@functools.cache
def quantized(fmt, case, stochastic=False, implementation="ffi", dtype="bfloat16", seed=0):
    """Both ways."""
    sizes = SIZES[case][0]
    words = words_of(len(sizes)) if stochastic else None
    options = {"rowwise": True, "columnwise": True, "words": words, "implementation": implementation}
    x = rows_of(case, dtype, seed)
    return x, quantize_groups(x, jnp.asarray(sizes, jnp.int32), fmt, **options)


def alone(x, fmt, axis, stochastic=False, index=0, groups=7):
    """The rows of one group, quantised by themselves."""
    how = {"rounding": "stochastic", "key": words_of(groups)[index]} if stochastic else {}
    return jlp.quantize(x, fmt, axis=axis, **how)


class TestQuantizing:
    @by_format
    @pytest.mark.parametrize("case", SIZES)
    @by_rounding
    @pytest.mark.parametrize("dtype", often(["bfloat16"], ["bfloat16", "float32"]))
    @by_implementation
    def test_a_group_has_the_bytes_of_its_rows_alone(self, fmt, case, stochastic, dtype, implementation):
        sizes, rows, columns = SIZES[case]
        x, (row, column) = quantized(fmt, case, stochastic, implementation, dtype)
        assert row.scale.shape == (rows, 1) and column.scale.shape == (len(sizes), columns, 1)
        assert row.scale.dtype == column.scale.dtype == fmt.scale_dtype
        scales = np.array(np.broadcast_to(jlp.quantize(jnp.zeros((1, 1)), fmt).scale, column.scale.shape))
        for index, first, end in groups_of(sizes, rows):
            how = stochastic, index, len(sizes)
            across, along = (alone(x[first:end], fmt, axis, *how) for axis in (-1, -2))
            assert_same_bytes((row.data[first:end], row.scale[first:end]), (across.data, across.scale))
            assert_same_bytes(column.data[:, first:end], along.data)
            scales[index] = along.scale
        assert_same_bytes(column.scale, scales)  # those of zeros, where there are no rows

    @by_format
    @by_implementation
    def test_rows_in_no_group_are_zero_bytes(self, fmt, implementation):
        _, (row, column) = quantized(fmt, "rows in none", False, implementation)
        assert not as_bytes(row.data[25:]).any() and not as_bytes(row.scale[25:]).any()
        assert not as_bytes(column.data[:, 25:]).any()

    @by_implementation
    def test_scales_do_not_depend_on_other_groups(self, implementation):
        x, sizes = random_array((40, 32)), jnp.array([10, 10, 12], jnp.int32)
        options = {"rowwise": True, "columnwise": True, "implementation": implementation}
        before = quantize_groups(x, sizes, jlp.Int8Rows(), **options)
        changed = np.array(x)  # a copy: the first call may still read x
        changed[12], changed[33], changed[35, 1] = 1e4, 1e5, np.inf  # a row of the second group, and rows in none
        row, column = quantize_groups(changed, sizes, jlp.Int8Rows(), **options)
        others = np.r_[:12, 13:32]
        assert_same_bytes((row.data[others], row.scale[others]), (before[0].data[others], before[0].scale[others]))
        kept = jnp.array([0, 2])
        assert_same_bytes(column.scale[kept], before[1].scale[kept])
        assert (column.scale[1] > before[1].scale[1]).all()

    @by_format
    @pytest.mark.parametrize("directions", [(True, False), (False, True)], ids=["rowwise", "columnwise"])
    @by_rounding
    @by_implementation
    def test_one_way_has_the_bytes_of_both(self, fmt, directions, stochastic, implementation):
        x, both = quantized(fmt, "uneven", stochastic, implementation)
        words = words_of(7) if stochastic else None
        options = {"rowwise": directions[0], "columnwise": directions[1], "words": words}
        found = quantize_groups(x, both[0].sizes, fmt, **options, implementation=implementation)
        for wanted, one, expected in zip(directions, found, both, strict=True):
            assert_same_bytes(one, expected) if wanted else None
            assert (one is not None) == wanted


class TestProducts:
    @by_pair
    @pytest.mark.parametrize("case", WITH_ROWS)
    @by_implementation
    def test_a_group_has_the_bytes_of_its_product_alone(self, pair, case, implementation):
        sizes, rows, columns = SIZES[case]
        x, (row, _) = quantized(pair[0], case)
        w = jlp.quantize(random_array((len(sizes), columns, 24), seed=3), pair[1], axis=-2).mT
        bias = random_array((len(sizes), 24), "float32", 5)
        y = np.asarray(multiply_groups(row, w, bias, jnp.float32, implementation))
        expected = np.zeros_like(y)
        for index, first, end in groups_of(sizes, rows):
            a, b = alone(x[first:end], pair[0], -1), jax.tree.map(lambda leaf, i=index: leaf[i], w)
            options = {"preferred_element_type": jnp.float32, "implementation": implementation}
            expected[first:end] = jlp.scaled_matmul(a, b, bias[index], **options)
        if pair[1].element == "int8" or implementation == "ffi":
            assert_same_bytes(y, expected)
        else:
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt.element != "e5m2"], ids=format_name)
    @pytest.mark.parametrize("case", WITH_ROWS)
    @by_implementation
    def test_wgrad_has_the_bytes_of_each_group_alone(self, fmt, case, implementation):
        sizes, rows, columns = SIZES[case]
        x, (_, a) = quantized(fmt, case)
        dy, (_, b) = quantized(fmt, case, seed=4)
        y = multiply_within_groups(a, b, jnp.float32, implementation)
        expected = np.zeros((len(sizes), columns, columns), np.float32)
        for index, first, end in groups_of(sizes, rows):
            pair = [alone(v[first:end], fmt, -2).mT for v in (x, dy)]
            options = {"preferred_element_type": jnp.float32, "implementation": implementation}
            expected[index] = jlp.scaled_matmul(*pair, **options)
        if fmt.element == "int8" or implementation == "ffi":
            assert_same_bytes(y, expected)
        else:
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("implementation", WAYS)
    def test_sums_of_a_long_group_are_exact(self, implementation):
        """Beyond what float32 holds, chunk after chunk."""
        rows = 4100
        x = np.array(random_array((rows, 16), "float32", 1))
        x[:, 0] = 127
        sizes = jnp.array([3, rows - 3], jnp.int32)
        options = {"rowwise": False, "columnwise": True}
        _, a = quantize_groups(jnp.asarray(x), sizes, jlp.Int8Rows(), **options)
        y = np.asarray(multiply_within_groups(a, a, jnp.float32, implementation))
        codes, scales = np.asarray(a.data).astype(np.int64), np.asarray(a.scale)[..., 0]
        for index, part in enumerate((codes[:, :3], codes[:, 3:])):
            sums = (part @ part.T).astype(np.float32)
            assert_same_bytes(y[index], (sums * scales[index]) * scales[index][:, None])
        assert (codes[0, 3:] ** 2).sum() > 2**24

    @pytest.mark.parametrize("fmt", FORMATS[:2], ids=format_name)
    @by_implementation
    def test_wgrad_is_added_to_what_is_given(self, fmt, implementation):
        sizes, rows, columns = SIZES["uneven"]
        x, sizes = jnp.nan_to_num(rows_of("uneven")), jnp.asarray(sizes, jnp.int32)
        _, column = quantize_groups(x, sizes, fmt, rowwise=False, columnwise=True)
        before = random_array((7, columns, columns), "float32", 6)

        def added(before):
            options = {"implementation": implementation, "accumulate": before}
            return multiply_within_groups(column, column, jnp.float32, **options)

        y = multiply_within_groups(column, column, jnp.float32, implementation)
        expected = np.asarray(y) + np.asarray(before)
        expected[[1, 5]] = before[np.array([1, 5])]
        assert_same_bytes(compiled(implementation)(added)(before), expected)

    @by_implementation
    def test_batches_of_groups_are_as_one_after_the_other(self, implementation):
        sizes = jnp.array([[3, 0, 20], [30, 1, 1]], jnp.int32)
        x, fmt = random_array((2, 32, 48)), jlp.Int8Rows()
        w = jlp.quantize(random_array((2, 3, 48, 32), seed=1), fmt, axis=-2).mT

        def layer(x, sizes, w):
            options = {"rowwise": True, "columnwise": True, "implementation": implementation}
            row, column = api.quantize_groups(x, sizes, fmt, **options)
            y = api.multiply_groups(row, w, None, jnp.bfloat16, implementation)
            return y, api.multiply_within_groups(column, column, jnp.float32, implementation)

        each = [jax.jit(layer)(x[i], sizes[i], jax.tree.map(lambda leaf, i=i: leaf[i], w)) for i in range(2)]
        together = jax.tree.map(lambda *a: jnp.stack(a), *each)
        assert_same_bytes(jax.jit(jax.vmap(layer))(x, sizes, w), together)
        assert_same_bytes(jax.jit(layer)(x, sizes, w), together)

    @pytest.mark.parametrize("product", ["rows", "wgrad"])
    def test_sums_that_int32_may_not_hold_are_refused(self, product):
        n = 131_073
        sizes = jnp.array([1, 1], jnp.int32)
        shape = (4, n) if product == "rows" else (n, 4)

        def run(x):
            options = {"rowwise": True, "columnwise": True}
            row, column = api.quantize_groups(x, sizes, jlp.Int8Rows(), **options)
            if product == "wgrad":
                return api.multiply_within_groups(column, column, jnp.float32)
            w = jlp.quantize(jnp.zeros((2, n, 8)), jlp.Int8Rows(), axis=-2).mT
            return api.multiply_groups(row, w, None, jnp.float32)

        with pytest.raises(ValueError, match="131073 elements; int32 holds the sums of 131072"):
            jax.eval_shape(run, jax.ShapeDtypeStruct(shape, jnp.float32))
