"""Words of packed codes."""

import numpy as np
import pytest

from jaxlowprec.checkpoints.schemes.codes import AWQ_ORDER, pack_words, unpack_bytes, unpack_words, words_across


@pytest.mark.parametrize("rows, columns", [(8, 1), (8, 7), (64, 128), (256, 1001)])
def test_words_across_rows_are_those_of_the_transposed_codes(rows, columns):
    data = np.random.default_rng(rows).integers(0, 256, (rows, -(-columns // 2)), np.uint8)
    codes = unpack_bytes(data, columns)
    words = words_across(data, columns, AWQ_ORDER)
    np.testing.assert_array_equal(words, pack_words(np.ascontiguousarray(codes.T), AWQ_ORDER))
    np.testing.assert_array_equal(unpack_words(words, rows, AWQ_ORDER), codes.T)
