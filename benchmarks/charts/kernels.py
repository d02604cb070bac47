"""Charts of the primitives: quantisers and GEMMs."""

from __future__ import annotations

from recorded import load

from charts.bars import Bar, BarChart, Panel, Row
from charts.chosen import ABOUT, ISAS, ONLY_AVX512, Labels, bar, measured_on, measured_on_both, rows

_REFERENCE = "the same function in pure JAX, jitted"
_MEMORY = "reading the input and writing the result"
XLA_DOT = "XLA's fastest bfloat16 dot"
FORMATS = {
    "MXFP8 E4M3 1x32": "MXFP8",
    "MXFP4 1x32": "MXFP4",
    "Float8Block E4M3 1x128": "Float8Block 1x128",
    "Float8Tensor E4M3": "Float8Tensor",
}


def _quantized(*layouts: str) -> Labels:
    return {f"quantize {f}, {way}": f"{label}, {way}" for f, label in FORMATS.items() for way in layouts}


def quantizers() -> BarChart:
    """Casts of every format."""
    ways = _quantized("rowwise", "both")
    nvfp4 = {"quantize rowwise, nearest": "NVFP4, rowwise"}
    both = {"quantize_both, RHT columnwise": "NVFP4, both, RHT columnwise"}
    int4 = "Int4 1x128 of bfloat16, axis -1"
    against_reference = (
        *rows("cpu_kernels", "jitted reference", nvfp4 | both),
        *rows("formats", "jitted reference", ways),
        *rows("int4", "jitted reference", {f"fake_quantize {int4}": "Int4, fake_quantize"}),
    )
    against_memory = (
        *rows("cpu_kernels", "reading", nvfp4),
        *rows("cpu_kernels", "copying", {"hadamard_transform": "Hadamard transform"}),
        *rows("formats", "reading", ways),
        *rows("int4", "reading", {f"quantize {int4}": "Int4, rowwise", f"dequantize {int4}": "Int4, dequantize"}),
    )
    return BarChart(
        "Quantisers",
        f"4096x4096 bfloat16; rowwise, and both ways in one pass. {ABOUT}",
        tuple(ISAS),
        (Panel(_REFERENCE, against_reference), Panel(_MEMORY, against_memory)),
        measured_on_both("cpu_kernels", "formats", "int4"),
    )


NVFP4_PRODUCT = {"scaled_matmul 1024x4096x4096, 1x16 by 16x16": "NVFP4, weight in 16x16 blocks"}


def product(a: str, b: str) -> str:
    return f"scaled_matmul 1024x4096x4096, {a} by {b}"


def matmuls() -> BarChart:
    """GEMMs of two quantised operands."""
    mxfp8, mxfp4, float8_block, tensor = FORMATS
    others = {
        product(mxfp4, mxfp4): "MXFP4",
        product(mxfp8, mxfp8): "MXFP8",
        product(float8_block, "Float8Block E4M3 128x128"): "Float8Block, 128x128 weight",
        product(float8_block, float8_block): "Float8Block, 1x128 weight",
        product(tensor, tensor): "Float8Tensor",
        product(mxfp8, mxfp4): "MXFP8 by MXFP4",
    }
    nvfp4 = NVFP4_PRODUCT | {product("1x16", "1x16"): "NVFP4, weight in 1x16 blocks"}
    shown = (*rows("cpu_kernels", "XLA's fastest", nvfp4), *rows("formats", "XLA's fastest", others))
    return BarChart(
        "Block-scaled GEMMs",
        f"1024x4096 by 4096x4096, both operands quantised before. {ABOUT} XLA's dot is six times faster on the AVX-512 "
        "machine, which has an instruction for it.",
        tuple(ISAS),
        (Panel(XLA_DOT, shown),),
        measured_on_both("cpu_kernels", "formats"),
    )


def weight_only() -> BarChart:
    """GEMMs of a plain and a quantised operand."""
    formats = {
        "bfloat16 by Int4 1x128": "Int4 1x128",
        "bfloat16 by Int4 1x128 asymmetric": "Int4 1x128, zero points",
        "bfloat16 by Int4 1x32": "Int4 1x32",
        "float16 by Int4 1x128 float16": "Int4 1x128, all float16",
        "bfloat16 by NVFP4 1x16": "NVFP4",
        "bfloat16 by MXFP4 1x32": "MXFP4",
    }
    one = {f"scaled_matmul 1x4096x4096, {case}": label for case, label in formats.items()}
    many = {
        f"scaled_matmul 1024x4096x4096, bfloat16 by {case}": f"{label}, 1024 rows"
        for case, label in {
            "Int4 1x128": "Int4 1x128",
            "NVFP4 1x16": "NVFP4",
            "MXFP4 1x32": "MXFP4",
            "MXFP8 E4M3 1x32": "MXFP8",
        }.items()
    }

    def panel(against: str, begins: str, labels: Labels) -> Panel:
        return Panel(against, rows("weight_only_matmul", begins, labels))

    return BarChart(
        "Weight-only GEMMs",
        f"16-bit activations by a quantised 4096x4096 weight. {ABOUT}",
        tuple(ISAS),
        (
            panel("XLA's float32 matvec, of one row", "XLA's float32 matvec", one),
            panel("reading the codes, of one row", "reading the codes", one),
            panel(XLA_DOT, "XLA's fastest", many),
        ),
        measured_on_both("weight_only_matmul"),
    )


def experts() -> BarChart:
    """Rows in groups; equal and unequal groups are the two series."""
    cases = load("grouped_matmul_avx512_bf16")["cases"]["avx512_bf16"]
    products = {
        "NVFP4 1x16 by NVFP4 16x16": "NVFP4",
        "MXFP8 E4M3 1x32 by MXFP8 E4M3 1x32": "MXFP8",
        "MXFP4 1x32 by MXFP4 1x32": "MXFP4",
        "Float8Block E4M3 1x128 by Float8Block E4M3 128x128": "Float8Block",
        "Float8Tensor E4M3 by Float8Tensor E4M3": "Float8Tensor",
    }

    def against_dense(name: str) -> Bar:
        return bar(cases, name, "one dense product")

    panels = []
    for groups, each in ((32, 64), (16, 256)):
        size = f"{groups} groups, {each} rows each"
        shown = [
            Row(label, tuple(against_dense(f"{size} ({how}), 2048x2048, {case}") for how in ("even", "uneven")))
            for case, label in products.items()
        ]
        shown.append(
            Row("bfloat16 by Int4", (against_dense(f"{size} (even), 2048x2048, bfloat16 by Int4 1x128"), None))
        )
        for case, label in {"NVFP4 1x16": "NVFP4", "MXFP8 E4M3 1x32": "MXFP8"}.items():
            shown.append(Row(f"{label}, weight gradient", (against_dense(f"{size}, wgrad 2048x2048, {case}"), None)))
        panels.append(Panel(f"one dense product; {groups} groups of {each} rows", tuple(shown)))
    return BarChart(
        "Experts: grouped GEMMs",
        f"Each group of rows by its own 2048x2048 weight. {ABOUT} {ONLY_AVX512}",
        ("equal groups", "unequal groups"),
        tuple(panels),
        measured_on("grouped_matmul_avx512_bf16"),
    )
