"""Other libraries beside this one: one panel per library."""

from __future__ import annotations

from recorded import RESULTS, load

from charts.bars import Bar, BarChart, Panel, Row
from charts.chosen import ABOUT, ISAS, ONLY_AVX512, measured_on

_CAST = "4096x4096"
_ROW = "one row, 4096x4096"
_CASTS = {  # the operation, the side of ours -> its label
    (f"NVFP4, rowwise, {_CAST}", "quantize"): "quantise to NVFP4",
    (f"NVFP4, both ways, {_CAST}", "quantize_both"): "NVFP4, both ways",
    (f"MXFP8, rowwise, {_CAST}", "quantize"): "quantise to MXFP8",
    (f"MXFP8, both ways, {_CAST}", "quantize_both"): "MXFP8, both ways",
    (f"INT4 1x128 and back, {_CAST}", "fake_quantize"): "INT4 and back",
}
_PRODUCT = f"GEMM, 2048x4096 by {_CAST}"
_PRODUCTS = {(_PRODUCT, name): f"GEMM in {name}" for name in ("NVFP4", "MXFP8", "Float8Tensor")}
_INT4 = {(_ROW, "Int4 1x128"): "one row by Int4"}
_INT4_32 = {(_ROW, "Int4 1x32"): "one row by Int4 1x32"}
_ORT = "onnxruntime MatMulNBits"
_PANELS = (  # what 1x is, the peer's name or the names of several labels, its rows
    ("qwix, jitted", "qwix, jitted", _CASTS),
    ("torchao, torch.compile", "torchao, compiled", _CASTS),
    ("compressed-tensors, torch.compile", "compressed-tensors, compiled", _CASTS),
    ("torch's bfloat16 matmul, 2048 rows", "torch's bfloat16 matmul", _PRODUCTS),
    (f"{_ORT}, float32 activations", f"{_ORT}, 1x128, float32 activations", _INT4),
    (f"{_ORT}, INT8 activations", f"{_ORT}, 1x128, INT8 activations", _INT4),
    ("llama.cpp's Q4_0, INT8 activations", "ggml Q4_0 (llama.cpp), 1x32, INT8 activations", _INT4_32),
)


def _bar(cases: list[dict], operation: str, side: str, against: str) -> Bar | None:
    """None where the peer failed.

    Raises:
        ValueError: the results do not have the case, or several times.
    """
    found = [c for c in cases if (c["case"], c["side"], c["against"]) == (operation, side, against)]
    if len(found) != 1:
        name = f"{operation!r} of {side!r} against {against!r}"
        raise ValueError(f"the results have {len(found)} cases {name}; a chart needs one")
    return Bar(found[0]["ratio"]["median"]) if "ratio" in found[0] else None


def peers() -> BarChart:
    """What the README shows: every cast, GEMMs of one size, one row."""
    names = {name: f"peers_{isa}" for name, isa in ISAS.items() if (RESULTS / f"peers_{isa}.json").exists()}
    series = [load(file)["cases"][ISAS[name]] for name, file in names.items()]
    panels = tuple(
        Panel(title, tuple(Row(label, tuple(_bar(s, *case, against) for s in series)) for case, label in rows.items()))
        for title, against, rows in _PANELS
    )
    one = f" {ONLY_AVX512}" if set(names) == {"AVX-512"} else ""
    about = f"Same inputs, 2 cores, each library in its best form for this CPU. {ABOUT}{one}"
    return BarChart("Beside other libraries", about, tuple(names), panels, measured_on(*names.values()))
