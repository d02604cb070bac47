"""The bytes that other implementations produced come out of a GPU's kernels too."""

import jax
import pytest

from tests.golden.test_transformer_engine import ENTRIES, expected, in_one_pass, name, separately


@pytest.mark.parametrize("entry", ENTRIES, ids=name)
def test_bytes_are_transformer_engines(gpu, entry):
    with jax.default_device(gpu):
        assert in_one_pass(entry, "ffi") == expected(entry)
        assert separately(entry, "ffi") == expected(entry)
