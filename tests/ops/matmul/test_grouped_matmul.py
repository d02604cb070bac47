"""Rows in groups: the bytes of each group are those that its rows alone would have, however the rows are divided."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.grouped_matmul import api
from jaxlowprec.ops.grouped_matmul.groups import Groups, Slots
from jaxlowprec.ops.grouped_matmul.plain import plain_rows, plain_wgrad
from jaxlowprec.ops.grouped_matmul.weight_only import grouped_weight_only as weight_only
from tests.against_oracle import product, weight_only_product
from tests.against_oracle import quantized as quantized_by_oracle
from tests.eager import evaluated, jlp
from tests.helpers import CHOSEN_SCALES, as_bytes, assert_same_bytes, format_name, often, random_array
from tests.ops.implementations import compiled
from tests.ops.matmul.groups import SIZES, WITH_ROWS, groups_of, words_of

pytestmark = pytest.mark.sampled(7)

group_amaxes, quantize_groups = evaluated(api.group_amaxes), evaluated(api.quantize_groups)
multiply_groups, multiply_within_groups = evaluated(api.multiply_groups), evaluated(api.multiply_within_groups)
grouped_weight_only = evaluated(weight_only)

FORMATS = (
    jlp.NVFP4(),
    jlp.MXFP8(),
    jlp.MXFP4(),
    jlp.Float8Block(),
    jlp.Float8Block("e5m2", power_of_two=False),
    jlp.Float8Tensor(),
)
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
by_sizes = pytest.mark.parametrize("case", SIZES)
ROUNDINGS = ["nearest", "stochastic"]
by_rounding = pytest.mark.parametrize("stochastic", [False, True], ids=ROUNDINGS)
by_implementation = pytest.mark.parametrize("implementation", ["reference", "ffi"])


def rotation_of(fmt):
    return Hadamard() if isinstance(fmt, jlp.NVFP4) else None


@functools.cache
def quantized(fmt, case, stochastic, implementation):
    """Both ways."""
    sizes, rows, columns = SIZES[case]
    x = random_array((rows, columns)) if rows else jnp.zeros((0, columns), jnp.bfloat16)
    words = words_of(len(sizes)) if stochastic else None
    return x, quantize_groups(
        x,
        jnp.asarray(sizes, jnp.int32),
        fmt,
        rowwise=True,
        columnwise=True,
        hadamard=rotation_of(fmt),
        words=words,
        implementation=implementation,
    )


class TestQuantizing:
    @pytest.mark.parametrize("case", often(["uneven", "more than there are"], SIZES))
    @pytest.mark.parametrize(  # random bits take XLA long to compile
        ("fmt", "stochastic"),
        often(
            [*((fmt, False) for fmt in FORMATS), (FORMATS[0], True)], list(itertools.product(FORMATS, (False, True))), 2
        ),
        ids=lambda value: ROUNDINGS[value] if isinstance(value, bool) else format_name(value),
    )
    def test_both_implementations_give_the_same_bytes(self, fmt, case, stochastic):
        assert_same_bytes(quantized(fmt, case, stochastic, "ffi")[1], quantized(fmt, case, stochastic, "reference")[1])

    @pytest.mark.parametrize("case", often(["uneven", "more than there are"], SIZES))
    @pytest.mark.parametrize("fmt", [jlp.Float8Tensor(), jlp.Float8Tensor("e5m2")], ids=format_name)
    def test_by_given_scales(self, fmt, case):
        """The bytes are those of the group's rows alone, which a scale that is none makes NaN."""
        sizes, rows, columns = SIZES[case]
        x = random_array((rows, columns)) if rows else jnp.zeros((0, columns), jnp.bfloat16)
        scales = jnp.asarray(np.resize([2.0, 448.0, 0.0, np.nan, 1e30, -1.0, 3.0], len(sizes)), jnp.float32)
        options = {"rowwise": True, "columnwise": True, "encode_scale": scales}
        (row, column), reference = (
            quantize_groups(x, jnp.asarray(sizes, jnp.int32), fmt, **options, implementation=implementation)
            for implementation in ("ffi", "reference")
        )
        assert_same_bytes((row, column), reference)
        used = dict.fromkeys(range(len(sizes)), 1.0)
        for index, first, end in groups_of(sizes, rows):
            alone = jlp.quantize_both(x[first:end], fmt, encode_scale=scales[index])
            if first < end:
                assert_same_bytes((row.data[first:end], column.data[:, first:end]), [a.data for a in alone])
                used[index] = alone[0].scale
        for both in (row, column):
            np.testing.assert_array_equal(both.scale, np.asarray(list(used.values())))

    @by_format
    @by_sizes
    @by_rounding
    def test_a_group_has_the_bytes_of_its_rows_alone(self, fmt, case, stochastic):
        sizes, rows, _ = SIZES[case]
        x, both = quantized(fmt, case, stochastic, "ffi")
        x, words = np.asarray(x), np.asarray(words_of(len(sizes)))
        row, column = jax.tree.map(np.asarray, both)
        for index, first, end in groups_of(sizes, rows):
            how = ("stochastic", words[index]) if stochastic else ("nearest", None)
            data, scale, _ = quantized_by_oracle(x[first:end], fmt, -1, None, *how)
            data_column, scale_column, _ = quantized_by_oracle(x[first:end], fmt, -2, rotation_of(fmt), *how)
            slot = first // fmt.length + index
            slots = slice(slot, slot - (first - end) // fmt.length + 1)
            bytes_ = slice(slots.start * fmt.length // 2, slots.stop * fmt.length // 2)
            codes = column.data[:, bytes_ if fmt.packed else slice(first, end)]
            assert_same_bytes(as_bytes(row.data[first:end]), data)
            assert_same_bytes(as_bytes(codes[:, : data_column.shape[1]]), data_column)
            if fmt.scaling == "tensor":
                assert_same_bytes((row.scale[index], column.scale[index]), (scale, scale_column))
                continue
            assert_same_bytes(as_bytes(row.scale[first:end]), as_bytes(scale))
            assert_same_bytes(as_bytes(column.scale[:, slots][:, : scale_column.shape[1]]), as_bytes(scale_column))

    @pytest.mark.parametrize("fmt", [fmt for fmt in CHOSEN_SCALES if not fmt.tiles], ids=format_name)
    @by_implementation
    def test_chosen_scales(self, fmt, implementation):
        """Each group is a tensor: its codes, scales and amax are those of its rows alone."""
        sizes, rows, _ = SIZES["uneven"]
        x, (row, column) = quantized(fmt, "uneven", False, implementation)
        for index, first, end in groups_of(sizes, rows):
            data, scale, amax = quantized_by_oracle(np.asarray(x)[first:end], fmt)
            assert_same_bytes(as_bytes(row.data[first:end]), data)
            assert_same_bytes(as_bytes(row.scale[first:end]), as_bytes(scale))
            assert row.amax[index] == amax
            along = quantized_by_oracle(np.asarray(x)[first:end], fmt, -2, rotation_of(fmt))
            slot = first // 16 + index
            assert_same_bytes(as_bytes(column.scale[:, slot : slot + along[1].shape[1]]), as_bytes(along[1]))
            assert_same_bytes(as_bytes(column.data[:, 8 * slot : 8 * slot + along[0].shape[1]]), along[0])
            assert column.amax[index] == along[2]

    @by_format
    def test_what_is_in_no_group_is_zero_bytes(self, fmt):
        _, (row, column) = quantized(fmt, "rows in none", False, "ffi")
        assert not as_bytes(row.data[25:]).any()
        if not fmt.packed:
            assert not as_bytes(column.data[:, 25:]).any()
        if fmt.scaling != "tensor":
            assert not as_bytes(row.scale[25:]).any()

    @by_implementation
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_a_number_that_is_not_finite_spoils_its_own_group_alone(self, implementation, bad):
        x = np.array(random_array((40, 32)))
        x[12, 3] = bad
        sizes = jnp.array([10, 10, 20], jnp.int32)
        plain, rotated = group_amaxes(x, sizes, True, Hadamard(), implementation)
        for amax in (plain, rotated):
            assert [bool(b) for b in jnp.isfinite(amax)] == [True, False, True]
        row, _ = quantize_groups(x, sizes, jlp.NVFP4(), rowwise=True, columnwise=False, implementation=implementation)
        x = x.copy()  # the calls before may still read it
        x[12, 3] = 0
        clean, _ = quantize_groups(x, sizes, jlp.NVFP4(), rowwise=True, columnwise=False)
        spoilt = (as_bytes(row.scale) == 0x7F).all(axis=1)
        assert spoilt.tolist() == [10 <= i < 20 for i in range(40)]
        assert_same_bytes((row.data[:10], row.data[20:]), (clean.data[:10], clean.data[20:]))

    @by_implementation
    def test_amaxes_are_those_of_the_groups(self, implementation):
        sizes, rows, columns = SIZES["uneven"]
        x = random_array((rows, columns), "float32")
        found = group_amaxes(x, jnp.asarray(sizes, jnp.int32), True, Hadamard(), implementation)
        for index, first, end in groups_of(sizes, rows):
            row, column = jlp.quantize_both(x[first:end], jlp.NVFP4(), hadamard_columnwise=True)
            assert_same_bytes((found[0][index], found[1][index]), (row.amax, column.amax))
        assert float(found[0][1]) == float(found[1][1]) == 0  # an empty group


@functools.partial(jax.jit, static_argnames=("rows", "block"))
def slots_of(sizes, rows, block):
    slots = Slots.of(Groups.of(sizes, rows), block)
    return slots.group, slots.row, slots.valid


@functools.partial(jax.jit, static_argnames="rows")
def ends_and_counts(sizes, rows):
    groups = Groups.of(sizes, rows)
    return groups.ends, groups.count


class TestSlots:
    @pytest.mark.parametrize("block", [1, 16, 128])
    @by_sizes
    def test_every_row_has_one_place_and_every_slot_one_group(self, case, block):
        sizes, rows, _ = SIZES[case]
        slots = [np.asarray(a) for a in slots_of(np.asarray(sizes, np.int32), rows, block)]
        owners = {}
        for group, row, valid in zip(*slots, strict=True):
            owners |= {r: int(group) for r in range(row, row + valid)}
        expected = {r: index for index, first, end in groups_of(sizes, rows) for r in range(first, end)}
        assert owners == expected
        assert int(slots[-1].sum()) == len(expected)


def weights(fmt, groups, columns, features=24):
    return jlp.quantize(random_array((groups, columns, features), seed=3), fmt, axis=-2).mT


PAIRS = (  # of rows and weights
    (jlp.NVFP4(), jlp.NVFP4((16, 16))),
    (jlp.NVFP4(), jlp.NVFP4()),
    (jlp.MXFP8(), jlp.MXFP8()),
    (jlp.MXFP4(), jlp.MXFP4()),
    (jlp.MXFP8(), jlp.MXFP4()),
    (jlp.Float8Block(), jlp.Float8Block(block=(128, 128))),
    (jlp.Float8Block(power_of_two=False), jlp.MXFP4()),
    (jlp.Float8Tensor(), jlp.Float8Tensor("e5m2")),
)
by_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " by ".join(map(format_name, pair)))


def test_sizes_whose_sum_is_no_int32_end_with_the_rows():
    rows = 2**30
    for sizes, ends in (
        ([rows] * 4, [rows] * 4),
        ([1, rows, rows, rows, rows], [1, rows, rows, rows, rows]),
        ([rows - 1, -5, 2**31 - 1, 7], [rows - 1, rows - 1, rows, rows]),
    ):
        found, counts = ends_and_counts(np.asarray(sizes, np.int32), rows)
        assert found.tolist() == ends
        assert counts.tolist() == np.diff([0, *ends]).tolist()


def rows_alone(x, fmt, axis=-1, hadamard=None):
    """The rows of one group quantised by the oracle, along their rows or (transposed) their columns."""
    data, scale, amax = quantized_by_oracle(x, fmt, axis, hadamard)
    shape = x.shape if axis == -1 else x.shape[::-1]
    return jlp.QuantizedArray(data, scale, amax, None, fmt, shape, jnp.dtype("bfloat16"), -1, None)


def of_group(w, index):
    """A group's weight."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], w)


@jax.jit
def high_precision(x, w, dy, counts):
    return plain_rows(x, w, counts, jnp.float32), plain_wgrad(x, dy, counts, jnp.float32)


class TestProducts:
    @by_pair
    @pytest.mark.parametrize("case", WITH_ROWS)
    def test_a_group_has_the_bytes_of_its_product_alone(self, pair, case):
        sizes, rows, columns = SIZES[case]
        x, (row, _) = quantized(pair[0], case, False, "ffi")
        w = weights(pair[1], len(sizes), columns)
        bias = random_array((len(sizes), 24), "float32", 5)
        y = np.asarray(multiply_groups(row, w, bias, jnp.float32))
        expected, x = np.zeros_like(y), np.asarray(x)
        for index, first, end in groups_of(sizes, rows):
            a, b = rows_alone(x[first:end], pair[0]), of_group(w, index)
            expected[first:end] = product(a, b, np.asarray(bias)[index], preferred_element_type=y.dtype)[0]
        assert_same_bytes(y, expected)

    @by_pair
    @pytest.mark.parametrize("case", ["uneven", "more than there are", "odd columns"])
    def test_both_implementations_agree(self, pair, case):
        """Byte for byte where bytes are defined: of 4-bit operands (numerics.md 9)."""
        sizes, _, columns = SIZES[case]
        _, (row, _) = quantized(pair[0], case, False, "ffi")
        w = weights(pair[1], len(sizes), columns)
        ours, theirs = (multiply_groups(row, w, None, jnp.float32, i) for i in ("ffi", "reference"))
        if pair[0].packed and pair[1].packed:
            assert_same_bytes(ours, theirs)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
    @pytest.mark.parametrize("case", often(["uneven", "more than there are"], WITH_ROWS))
    def test_wgrad_has_the_bytes_of_each_group_alone(self, fmt, case):
        sizes, rows, _ = SIZES[case]
        x, (_, column) = quantized(fmt, case, False, "ffi")
        dy = random_array((rows, 40), seed=4)
        options = {"rowwise": False, "columnwise": True, "hadamard": rotation_of(fmt)}
        _, dy_column = quantize_groups(dy, column.sizes, fmt, **options)
        if fmt.element == "e5m2":
            dy_column = quantize_groups(dy, column.sizes, jlp.Float8Block(power_of_two=False), **options)[1]
        y = multiply_within_groups(column, dy_column, jnp.float32)
        by_reference = multiply_within_groups(column, dy_column, jnp.float32, "reference")
        expected = np.zeros_like(y)
        operands = (np.asarray(x), fmt), (np.asarray(dy), dy_column.format)
        for index, first, end in groups_of(sizes, rows):
            pair = [rows_alone(v[first:end], f, -2, rotation_of(fmt)) for v, f in operands]
            expected[index] = product(*pair, preferred_element_type=jnp.float32)[0]
        assert_same_bytes(y, expected)
        if fmt.packed:
            assert_same_bytes(by_reference, expected)
        np.testing.assert_allclose(by_reference, expected, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt.element != "e5m2"], ids=format_name)
    @pytest.mark.parametrize("case", often(["uneven"], WITH_ROWS))
    @by_implementation
    def test_wgrad_is_added_to_what_is_given(self, fmt, case, implementation):
        """A group without rows leaves it as it is, a zero's sign included."""
        sizes, rows, columns = SIZES[case]
        _, (_, column) = quantized(fmt, case, False, implementation)
        shape = len(sizes), columns, columns
        for dtype in ("float32", "bfloat16"):
            before = random_array(shape, dtype, 6)  # zeros of both signs among them

            def added(before, dtype=dtype):
                options = {"implementation": implementation, "accumulate": before}
                return multiply_within_groups(column, column, dtype, **options)

            y = multiply_within_groups(column, column, jnp.float32, implementation)
            expected = (np.asarray(y) + np.asarray(before, np.float32)).astype(jnp.dtype(dtype))
            empty = np.setdiff1d(np.arange(len(sizes)), [index for index, _, _ in groups_of(sizes, rows)])
            expected[empty] = np.asarray(before)[empty]
            assert_same_bytes(compiled(implementation)(added)(before), expected)
            assert_same_bytes(jax.jit(added, donate_argnums=0)(jnp.array(before)), expected)

    def test_what_wgrad_is_added_to_gives_its_memory(self):
        _, (_, column) = quantized(jlp.NVFP4(), "uneven", False, "ffi")
        before = jnp.zeros((7, 160, 160))
        compiled = jax.jit(
            lambda before: multiply_within_groups(column, column, jnp.float32, accumulate=before), donate_argnums=0
        )
        assert "copy(" not in compiled.lower(before).compile().as_text()

    @pytest.mark.parametrize(
        "fmt",
        [jlp.Int4(16), jlp.Int4(16, symmetric=False), jlp.NVFP4((16, 16)), jlp.MXFP8(), jlp.Float8Tensor()],
        ids=format_name,
    )
    @pytest.mark.parametrize("case", ["uneven", "rows in none"])
    @by_implementation
    def test_weight_only_products_have_the_bytes_of_each_group_alone(self, fmt, case, implementation):
        sizes, rows, columns = SIZES[case]
        x, w = random_array((rows, columns)), weights(fmt, len(sizes), columns)
        bias = random_array((len(sizes), 24), "float32", 5)
        y = np.asarray(grouped_weight_only(x, w, jnp.asarray(sizes, jnp.int32), bias, jnp.bfloat16, implementation))
        expected, x = np.zeros_like(y), np.asarray(x)
        for index, first, end in groups_of(sizes, rows):
            alone, _ = weight_only_product(x[first:end], of_group(w, index), np.asarray(bias)[index])
            expected[first:end] = alone
        assert_same_bytes(y, expected)

    @pytest.mark.parametrize("case", WITH_ROWS)
    def test_high_precision_agrees_with_a_loop(self, case):
        sizes, rows, columns = SIZES[case]
        x, w = random_array((rows, columns), "float32"), random_array((len(sizes), columns, 24), "float32", 3)
        dy = random_array((rows, 24), "float32", 4)
        y, dw = np.zeros((rows, 24)), np.zeros(w.shape)
        for index, first, end in groups_of(sizes, rows):
            y[first:end] = np.float64(x[first:end]) @ np.float64(w[index])
            dw[index] = np.float64(x[first:end]).T @ np.float64(dy[first:end])
        counts = jnp.asarray(sizes, jnp.int32)
        for found, expected in zip(high_precision(x, w, dy, counts), (y, dw), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)

    @pytest.mark.slow
    @by_implementation
    def test_batches_of_groups_are_as_one_after_the_other(self, implementation):
        sizes = jnp.array([[3, 0, 20], [30, 1, 1]], jnp.int32)
        x = random_array((2, 32, 48))
        w = jlp.quantize(random_array((2, 3, 48, 32), seed=1), jlp.NVFP4(), axis=-2).mT

        def layer(x, sizes, w):
            row, column = quantize_groups(
                x, sizes, jlp.NVFP4(), rowwise=True, columnwise=True, implementation=implementation
            )
            y = multiply_groups(row, w, None, jnp.bfloat16, implementation)
            dw = multiply_within_groups(column, column, jnp.float32, implementation)
            return y, dw, multiply_within_groups(column, column, jnp.float32, implementation, accumulate=dw)

        one_by_one = [layer(x[i], sizes[i], jax.tree.map(lambda leaf, i=i: leaf[i], w)) for i in range(2)]
        assert_same_bytes(jax.vmap(layer)(x, sizes, w), jax.tree.map(lambda *a: jnp.stack(a), *one_by_one))
