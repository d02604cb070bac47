"""The README's picture: one panel per baseline that people know."""

from __future__ import annotations

from charts.bars import BarChart, Panel, Row
from charts.chosen import ABOUT, ISAS, rows
from charts.kernels import FORMATS, XLA_DOT, product
from charts.programs import step


def overview() -> BarChart:
    """What the README shows: one panel per thing that people compare with."""
    mxfp8, mxfp4, *_ = FORMATS
    casts = {"quantize rowwise, nearest": "quantize", "quantize_both, RHT columnwise": "quantize_both with RHT"}
    trained = tuple(
        Row(f"{recipe}, small model", (None, step("small", recipe, "bfloat16")))
        for recipe in ("NVFP4", "MXFP8", "FP8 block")
    )
    products = (
        *rows("cpu_kernels", "XLA's fastest", {product("1x16", "16x16"): "NVFP4"}),
        *rows("formats", "XLA's fastest", {product(mxfp4, mxfp4): "MXFP4", product(mxfp8, mxfp8): "MXFP8"}),
    )
    row = {"scaled_matmul 1x4096x4096, bfloat16 by Int4 1x128": "one row by Int4"}
    return BarChart(
        "Speed on a CPU with 2 cores",
        f"4096x4096 weights. {ABOUT}",
        tuple(ISAS),
        (
            Panel("NVFP4 in pure JAX, jitted", rows("cpu_kernels", "jitted reference", casts)),
            Panel(f"{XLA_DOT}, 1024 rows", products),
            Panel("XLA's float32 matvec", rows("weight_only_matmul", "XLA's float32 matvec", row)),
            Panel("a training step in bfloat16", trained),
        ),
        "Two machines with 2 cores, Zen 3 for AVX2 and Zen 5 for AVX-512.",
    )
