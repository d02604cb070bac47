"""Bytes that Transformer Engine's own references produced (its Python, commit d0067d0da) on inputs anyone can make.

Entries whose `nvfp4_e4m3_max` is 448 are of a four-over-six without room above the scale of the largest block. This
library does not have it; the oracle of its scale rules, which other tests compare it with, meets them.
"""

import itertools
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from tests.eager import jlp
from tests.helpers import digest, golden_input, often
from tests.numpy_oracle.codes import encode_e2m1
from tests.numpy_oracle.scale_rules import best_scale

ALL = json.loads((pathlib.Path(__file__).parent / "transformer_engine.json").read_text())
FOUR_OVER_SIX = [entry for entry in ALL if entry.get("nvfp4_use_4over6")]
ENTRIES = [entry for entry in ALL if entry not in FOUR_OVER_SIX or entry["nvfp4_e4m3_max"] == 256]
SCALE_RULES = {None: "six", "MAE": "four_over_six", "MSE": "four_over_six_mse"}
FOR_REFERENCE = [  # the reference takes seconds for larger ones, and each shape is compiled for every format
    e for e in ENTRIES if (np.prod(e["shape"]) <= 1 << 18 if e["kind"] == "nvfp4" else e["shape"] == [303, 300])
]


def of_kind(kind):
    return [entry for entry in ENTRIES if entry["kind"] == kind]


def name(entry):
    rows, columns = entry["shape"]
    if entry["kind"] == "nvfp4":
        rotation = ("rht" if entry["signs"] else "plain-h") if entry["rht"] else "unrotated"
        rule = [f"{scale_rule(entry)}-{entry['nvfp4_e4m3_max']}"] if entry in FOUR_OVER_SIX else []
        return "-".join([f"{rows}x{columns}", entry["dtype"], f"{entry['block'][0]}x16", rotation, *rule])
    words = entry["format"].split("_")[1], f"{entry['block'][0]}x128", "power-of-two" if entry["pow2"] else "float32"
    return "-".join([f"{rows}x{columns}", entry["dtype"], *words])


def scale_rule(entry):
    return SCALE_RULES[entry.get("nvfp4_4over6_err_mode") if entry in FOUR_OVER_SIX else None]


def given(entry):
    """Array, format and rotation."""
    x = golden_input(tuple(entry["shape"]), entry["seed"]).astype(jnp.dtype(entry["dtype"]))
    if entry["kind"] == "nvfp4":
        hadamard = entry["rht"] and jlp.Hadamard(signs=jlp.DEFAULT_SIGNS if entry["signs"] else None)
        return x, jlp.NVFP4(tuple(entry["block"]), scale_rule(entry)), hadamard
    return x, jlp.Float8Block(entry["format"][7:11], tuple(entry["block"]), entry["pow2"], entry["amax_epsilon"]), False


def in_one_pass(entry, implementation):
    x, fmt, hadamard = given(entry)
    row, column = jlp.quantize_both(x, fmt, hadamard_columnwise=hadamard, implementation=implementation)
    return (*summary(row), *summary(column))


def separately(entry, implementation):
    x, fmt, hadamard = given(entry)
    row = jlp.quantize(x, fmt, implementation=implementation)
    column = jlp.quantize(x, fmt, axis=-2, hadamard=hadamard, implementation=implementation)
    return (*summary(row), *summary(column))


def summary(q):
    if isinstance(q.format, jlp.NVFP4):
        scale = np.asarray(q.scale).view(np.uint8)
        amax = float(q.amax) / (1.75 if q.format.chooses_scales else 1)
        return digest(q.data), digest(np.repeat(scale, 16, axis=0) if q.format.tiles else scale), amax
    return digest(q.data), digest(q.scale), list(q.scale.shape)


def expected(entry):
    parts = ("data", "scale", "amax" if entry["kind"] == "nvfp4" else "scale_shape")
    return tuple(entry[f"{side}_{part}"] for side in ("row", "col") for part in parts)


def test_the_digests_cover_shapes_rotations_and_signs():
    assert len(of_kind("nvfp4")) == 88 + 16
    assert len({tuple(entry["shape"]) for entry in of_kind("nvfp4") if entry["rht"]}) == 16


def test_the_digests_cover_every_float8_block_format():
    entries = of_kind("float8_block")
    fields = ("shape", "dtype", "block", "format", "pow2")
    assert {tuple(map(str, (entry[field] for field in fields))) for entry in entries} >= {
        tuple(map(str, combination))
        for combination in itertools.product(
            ([128, 128], [256, 128], [320, 336], [303, 300], [305, 256], [2000, 2000], [1, 128], [129, 1]),
            ("bfloat16", "float32"),
            ([1, 128], [128, 128]),
            ("float8_e4m3fn", "float8_e5m2"),
            (True, False),
        )
    }
    assert len(entries) == 144


def of(dtype, entries):
    """Entries of a dtype, and the others as slow tests."""
    return often([entry for entry in entries if entry["dtype"] == dtype], entries)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("entry", of("bfloat16", ENTRIES), ids=name)
def test_native_bytes_are_transformer_engines(entry):
    assert in_one_pass(entry, "ffi") == expected(entry)
    assert separately(entry, "ffi") == expected(entry)


@pytest.mark.parametrize("entry", of("float32", FOR_REFERENCE), ids=name)
def test_reference_bytes_are_transformer_engines(entry):
    """One direction at a time: tests/ops/quantize/test_quantize.py."""
    assert in_one_pass(entry, "reference") == expected(entry)


@pytest.mark.parametrize("entry", FOUR_OVER_SIX, ids=name)
def test_the_oracle_of_scale_rules_has_transformer_engines_bytes(entry):
    """Both bounds of the scale of the largest block: 256 and 448."""
    x, fmt, _ = given(entry)
    for side, matrix in (("row", np.asarray(x).astype(np.float32)), ("col", np.asarray(x).astype(np.float32).T)):
        height = fmt.block[0]
        blocks = matrix.reshape(matrix.shape[0] // height, height, matrix.shape[1] // 16, 16)
        amax = np.abs(blocks).max(axis=(1, 3))
        largest = entry["nvfp4_e4m3_max"]
        scale, codes = best_scale(blocks, amax, amax.max(), fmt.scale_rule, encode_e2m1, largest)
        codes = codes.reshape(matrix.shape)
        assert digest(codes[:, 0::2] | codes[:, 1::2] << 4) == entry[f"{side}_data"]
        assert digest(np.repeat(scale, height, axis=0)) == entry[f"{side}_scale"]
