"""Rows of one tensor, split into parts: the codes are those of the merged matrix, and so are products of them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlowprec.ops.scaled_matmul.api import scaled_matmul_of_rows
from tests.eager import jlp
from tests.helpers import ONE_OF_EACH, assert_same_bytes, format_name, often, random_array
from tests.ops.matmul.test_scaled_matmul_formats import ONE_OF_EACH_KIND, pair_name
from tests.sharding.meshes import by_axis_type, mesh_of, on_mesh

pytestmark = pytest.mark.sampled(5)

S, R, C = 3, 256, 384
KEY = np.array([3, 5], np.uint32)
ROUNDINGS = {"nearest": {}, "stochastic": {"rounding": "stochastic", "key": KEY}}
OFTEN = [  # every scaling and shape of block, and random bits of each scaling
    *((jlp.NVFP4(), rounding) for rounding in ROUNDINGS),
    (jlp.NVFP4((16, 16)), "nearest"),
    (jlp.MXFP8(), "stochastic"),
    (jlp.MXFP4((32, 32)), "nearest"),
    (jlp.Float8Block(), "nearest"),
    (jlp.Float8Block("e5m2", (128, 128), False), "stochastic"),
    (jlp.Float8Tensor(), "stochastic"),
]
over_formats_and_roundings = pytest.mark.parametrize(
    ("fmt", "rounding"),
    often(OFTEN, list(itertools.product(ONE_OF_EACH, ROUNDINGS)), 2),
    ids=lambda value: value if isinstance(value, str) else format_name(value),
)


def split(q):
    """A matrix [S * R, C] in parts, as `quantize(rows_split=True)` gives it."""

    def cut(leaf, rowwise):
        if leaf.ndim == 0:
            return jnp.broadcast_to(leaf, (S,))
        if rowwise:
            return leaf.reshape(S, -1, leaf.shape[-1])
        if leaf.shape[1] == 1:  # all parts have the scale of their column
            return jnp.broadcast_to(leaf, (S, *leaf.shape))
        return jnp.moveaxis(leaf.reshape(leaf.shape[0], S, -1), 1, 0)

    return jax.tree.map(lambda leaf: cut(leaf, q.axis == -1), q)


@over_formats_and_roundings
class TestQuantize:
    def test_codes_are_those_of_the_merged_matrix(self, fmt, rounding):
        rounding = ROUNDINGS[rounding]
        x = random_array((S, R, C), seed=1)
        row, column = jlp.quantize_both(x, fmt, rows_split=True, **rounding)
        merged = jlp.quantize_both(x.reshape(-1, C), fmt, **rounding)
        assert_same_bytes((row, column), tuple(map(split, merged)))
        assert (row.shape, row.axis, column.shape, column.axis) == (x.shape, -1, x.shape, -2)
        assert_same_bytes(jlp.quantize(x, fmt, rows_split=True, **rounding), row)
        assert_same_bytes(jlp.quantize(x, fmt, axis=-2, rows_split=True, **rounding), column)
        assert_same_bytes(row.dequantize().reshape(-1, C), merged[0].dequantize())
        assert_same_bytes(column.dequantize().reshape(-1, C), merged[1].dequantize())

    def test_batch_axes_before_the_parts_have_amaxes_of_their_own(self, fmt, rounding):
        rounding = ROUNDINGS[rounding]
        x = random_array((2, S, R, C), seed=2) * jnp.asarray([1, 50], jnp.bfloat16)[:, None, None, None]
        each = [jlp.quantize_both(x[i], fmt, rows_split=True, **rounding) for i in range(2)]
        expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        assert_same_bytes(jlp.quantize_both(x, fmt, rows_split=True, **rounding), expected)
        mapped = jax.vmap(lambda x: jlp.quantize_both(x, fmt, rows_split=True, **rounding))(x)
        assert_same_bytes(mapped, expected)

    @by_axis_type
    def test_a_mesh_may_split_all_three_axes(self, fmt, rounding, axis_type):
        rounding = ROUNDINGS[rounding]
        x, mesh = random_array((2, 256, 256), seed=3), mesh_of((2, 2, 2), axis_type)

        def quantize(x):
            return jlp.quantize_both(x, fmt, rows_split=True, **rounding)

        result, found = on_mesh(quantize, [x], [P("a", "b", "c")], mesh)
        assert_same_bytes(result, quantize(x))
        assert {kind for kind, _ in found} <= {"all-reduce"}
        lines = 128 + 128 if fmt.scaling == "rows" else 0  # of a device: each has an amax, which others know in part
        assert sum(elements for _, elements in found) == int(fmt.has_tensor_scale) + lines


def test_a_rotation_and_given_amaxes():
    x, fmt = random_array((S, R, C), seed=4), jlp.NVFP4()
    for hadamard in (True, jlp.Hadamard(64)):
        expected = jlp.quantize_both(x.reshape(-1, C), fmt, hadamard_columnwise=hadamard)
        assert_same_bytes(
            jlp.quantize_both(x, fmt, hadamard_columnwise=hadamard, rows_split=True), tuple(map(split, expected))
        )
        amaxes = tuple(q.amax for q in expected)
        assert_same_bytes(
            jlp.quantize_both(x, fmt, hadamard_columnwise=hadamard, amax=amaxes, rows_split=True),
            tuple(map(split, expected)),
        )
    scale = jnp.float32(3)
    expected = jlp.quantize(x.reshape(-1, C), jlp.Float8Tensor(), encode_scale=scale)
    assert_same_bytes(jlp.quantize(x, jlp.Float8Tensor(), encode_scale=scale, rows_split=True), split(expected))


def test_an_offset_goes_on_from_slice_to_slice():
    x = random_array((2, 32, 64), seed=5)
    options = {"rounding": "stochastic", "key": KEY, "offset": (48, 32)}
    expected = jlp.quantize_both(x.reshape(-1, 64), jlp.NVFP4(), **options)
    row, column = jlp.quantize_both(x, jlp.NVFP4(), rows_split=True, **options)
    assert_same_bytes(row.data.reshape(64, -1), expected[0].data)
    assert_same_bytes(jnp.moveaxis(column.data, 0, 1).reshape(64, -1), expected[1].data)


@pytest.mark.parametrize("pair", [(jlp.NVFP4(), jlp.NVFP4((16, 16))), *ONE_OF_EACH_KIND], ids=pair_name)
class TestProducts:
    bias = 100 * random_array((512,), "float32", 7)

    def test_rows_in_parts(self, pair):
        x, w = random_array((S, R, C), seed=8), random_array((512, C), seed=6)
        b = jlp.quantize(w, pair[1])
        a = jlp.quantize(x, pair[0], rows_split=True)
        y = scaled_matmul_of_rows(
            a, b, self.bias, rows_split=True, preferred_element_type=jnp.float32, out_sharding=None
        )
        merged = jlp.scaled_matmul(
            jlp.quantize(x.reshape(-1, C), pair[0]), b, self.bias, preferred_element_type=jnp.float32
        )
        assert_same_bytes(y, merged.reshape(S, R, -1))

    def test_parts_that_are_summed_over(self, pair):
        values = random_array((S, R, C), seed=9), random_array((S, R, 128), seed=10)
        operands = [jlp.quantize(v, fmt, axis=-2, rows_split=True).mT for v, fmt in zip(values, pair, strict=True)]
        multiply = functools.partial(
            scaled_matmul_of_rows, rows_split=True, preferred_element_type=jnp.float32, out_sharding=None
        )
        if pair[0].scaling != pair[1].scaling:
            with pytest.raises(NotImplementedError, match=r"rows of .* are split; MXFP4 32x32 is for weights"):
                multiply(*operands, None)
            return
        y = multiply(*operands, None)
        merged = [jlp.quantize(v.reshape(-1, v.shape[-1]), f, axis=-2).mT for v, f in zip(values, pair, strict=True)]
        assert_same_bytes(y, jlp.scaled_matmul(*merged, preferred_element_type=jnp.float32))


class TestErrors:
    def test_parts_that_end_within_a_block(self):
        for options in ({"axis": -2}, {"fmt": jlp.NVFP4((16, 16))}):
            with pytest.raises(ValueError, match="rows_split=True and x has 40 rows in each part; .* of 16, or "):
                jlp.quantize(jnp.ones((2, 40, 64)), **{"fmt": jlp.NVFP4()} | options, rows_split=True)
        with pytest.raises(ValueError, match="needs a multiple of 64"):
            jlp.quantize_both(jnp.ones((2, 96, 64)), jlp.NVFP4(), hadamard_columnwise=jlp.Hadamard(64), rows_split=True)
        jlp.quantize(jnp.ones((2, 40, 64)), jlp.NVFP4(), rows_split=True)  # its rows have any number

    def test_a_matrix_has_no_parts(self):
        with pytest.raises(ValueError, match=r"x has shape \(32, 64\); needs three dimensions or more"):
            jlp.quantize(jnp.ones((32, 64)), jlp.NVFP4(), rows_split=True)
