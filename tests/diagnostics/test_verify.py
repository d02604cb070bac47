"""The digests that `jaxlowprec verify` ships are those of tests/numpy_oracle, which shares no code with the library."""

import functools

import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.diagnostics.verify import inputs, quantisers
from tests import against_oracle
from tests.helpers import as_bytes, often
from tests.numpy_oracle import int4, rows

PLAIN = [fmt for fmt in quantisers.FORMATS if not (fmt.row_scaled or fmt.weight_only)]
DRAWN = [fmt for fmt in PLAIN if not fmt.chooses_scales]
OFTEN = (jlp.NVFP4(), jlp.Float8Block())


def unpacked(fmt, data):
    data = as_bytes(data)
    return np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1) if fmt.packed else data


def assert_expected(item, name, fmt, found):
    """Codes, scales and amaxes (zero points) have the digests of the item."""
    digests = quantisers.expected()[item]
    codes, scales, last = found
    scales = np.asarray(scales).astype(fmt.scale_dtype) if fmt.scaling == "rows" else scales
    arrays = {"codes": unpacked(fmt, codes), "scales": scales}
    if last is not None:
        arrays["zero points" if fmt.has_zero_point else "amaxes"] = last
    for field, array in arrays.items():
        comparable = quantisers.comparable(field, np.asarray(array))[field]
        assert quantisers.digest(comparable) == digests[f"{name} {field}"], (item, name, field)


@pytest.mark.parametrize("fmt", often(OFTEN, PLAIN), ids=quantisers.name_of)
def test_nearest_is_the_oracles(fmt):
    item = f"quantize {quantisers.name_of(fmt)}, nearest"
    for name, x, axis in (
        ("bfloat16 rowwise", inputs.bfloat16_numbers(), -1),
        ("bfloat16 columnwise", inputs.bfloat16_numbers(), -2),
        ("float32 rowwise", inputs.float32_numbers(), -1),
    ):
        assert_expected(item, name, fmt, against_oracle.quantized(x, fmt, axis))


@pytest.mark.parametrize("fmt", often(OFTEN[:1], DRAWN), ids=quantisers.name_of)
def test_stochastic_is_the_oracles(fmt):
    item = f"quantize {quantisers.name_of(fmt)}, stochastic"
    options = {"rounding": "stochastic", "key": inputs.KEY}
    x, y = inputs.bfloat16_numbers(), inputs.float32_numbers()
    assert_expected(item, "bfloat16 rowwise", fmt, against_oracle.quantized(x, fmt, -1, **options))
    assert_expected(item, "bfloat16 columnwise", fmt, against_oracle.quantized(x, fmt, -2, **options))
    assert_expected(item, "float32 columnwise", fmt, against_oracle.quantized(y, fmt, -2, **options))


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "eden"])
def test_rotated_is_the_oracles(rounding):
    item, fmt, x = f"quantize NVFP4 1x16 rotated, {rounding}", jlp.NVFP4(), inputs.bfloat16_numbers()
    options = {} if rounding == "nearest" else {"rounding": rounding, "key": inputs.KEY}
    axis = -1 if rounding == "eden" else -2
    found = against_oracle.quantized(x, fmt, axis, hadamard=jlp.Hadamard(), **options)
    assert_expected(item, "bfloat16 rowwise" if rounding == "eden" else "bfloat16 columnwise", fmt, found)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [fmt for fmt in quantisers.FORMATS if fmt.weight_only], ids=quantisers.name_of)
def test_int4_is_the_oracles(fmt):
    item = f"quantize {quantisers.name_of(fmt)}, nearest"
    matrices = inputs.bfloat16_numbers()
    one = functools.partial(int4.quantize, group=fmt.group_size, symmetric=fmt.symmetric, dtype=fmt.scale_dtype)
    found = [np.stack(part) for part in zip(*map(one, matrices), strict=True)]
    assert_expected(item, "bfloat16 rowwise", fmt, (*found[:2], None if fmt.symmetric else found[2]))


def test_products_of_integers_are_the_oracles():
    x, w = inputs.bfloat16_numbers()[1], inputs.bfloat16_numbers()[0]
    formats = jlp.Int8Rows(), jlp.Int8Rows(scale_dtype="bfloat16")
    y = rows.multiply(*(rows.quantize(v, fmt) for v, fmt in zip((x, w), formats, strict=True)))
    assert quantisers.digest(y) == quantisers.expected()["scaled_matmul Int8Rows x Int8Rows"]["float32"]


def test_inputs_hold_what_they_say():
    x, (wide, ties, tiny, large, odd, many) = inputs.bfloat16_numbers(), inputs.float32_numbers()
    assert x.size + inputs.float32_numbers().size > 1_000_000
    assert np.isfinite(x.astype(np.float32)).all() and np.ptp(np.frexp(wide)[1]) == 48
    assert np.abs(ties).max() == 2688 and np.abs(large).max() > 1e38
    subnormal = (np.abs(tiny) < np.finfo(np.float32).tiny) & (tiny != 0)
    assert subnormal.any() and (np.signbit(tiny) & (tiny == 0)).any()
    assert np.isnan(odd).any() and np.isposinf(odd).any() and np.isneginf(odd).any()
    assert abs(float(many[:, 4].std()) - (2 / 3) ** 0.5) < 0.1
    a, b = inputs.pairs()
    for found in (a * b, a + b, a - b):
        assert ((np.abs(found) >= np.finfo(np.float32).tiny) | (found == 0)).all() and np.isfinite(found).all()
    assert (a == b).any() and (a < b).any()


def test_every_item_has_digests_and_no_other():
    names = [item.name for item in quantisers.items()]
    assert len(set(names)) == len(names) and set(names) == set(quantisers.expected())
