"""Bytes that Transformer Engine's own references produced (its Python, commit d0067d0da) on inputs anyone can make.

Entries with `nvfp4_use_4over6` are for a recipe option that this library does not have, kind float8_block for a format
that it does not have.
"""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.helpers import digest, golden_input

ENTRIES = [
    entry
    for entry in json.loads((pathlib.Path(__file__).parent / "transformer_engine.json").read_text())
    if entry["kind"] == "nvfp4" and not entry.get("nvfp4_use_4over6")
]
SIZE_FOR_REFERENCE = 1 << 18  # larger ones run natively only: the reference takes seconds each


def name(entry):
    rows, columns = entry["shape"]
    rotation = ("rht" if entry["signs"] else "plain-h") if entry["rht"] else "unrotated"
    return f"{rows}x{columns}-{entry['dtype']}-{entry['block'][0]}x16-{rotation}"


def found(entry, implementation):
    x = jnp.asarray(golden_input(tuple(entry["shape"]), entry["seed"])).astype(entry["dtype"])
    fmt = jlp.NVFP4(tuple(entry["block"]))
    hadamard = entry["rht"] and jlp.Hadamard(signs=jlp.DEFAULT_SIGNS if entry["signs"] else None)
    row, column = jlp.quantize_both(x, fmt, hadamard_columnwise=hadamard, implementation=implementation)
    separate = (
        jlp.quantize(x, fmt, implementation=implementation),
        jlp.quantize(x, fmt, axis=-2, hadamard=hadamard, implementation=implementation),
    )

    def summary(q):
        scale = np.asarray(q.scale).view(np.uint8)
        return digest(q.data), digest(np.repeat(scale, 16, axis=0) if fmt.tiles else scale), float(q.amax)

    return (*summary(row), *summary(column)), tuple(part for q in separate for part in summary(q))


def expected(entry):
    return tuple(entry[f"{side}_{part}"] for side in ("row", "col") for part in ("data", "scale", "amax"))


def test_the_digests_cover_the_matrix_of_shapes_rotations_and_signs():
    assert len(ENTRIES) == 88
    assert len({tuple(entry["shape"]) for entry in ENTRIES if entry["rht"]}) == 16


@pytest.mark.parametrize("entry", ENTRIES, ids=name)
def test_native_bytes_are_transformer_engines(entry):
    both, separate = found(entry, "ffi")
    assert both == expected(entry)
    assert separate == expected(entry)


@pytest.mark.parametrize("entry", [e for e in ENTRIES if np.prod(e["shape"]) <= SIZE_FOR_REFERENCE], ids=name)
def test_reference_bytes_are_transformer_engines(entry):
    both, separate = found(entry, "reference")
    assert both == expected(entry)
    assert separate == expected(entry)
