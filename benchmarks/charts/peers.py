"""Other libraries beside this one: one panel per library."""

from __future__ import annotations

from recorded import RESULTS, load

from charts.bars import Bar, BarChart, Panel, Row
from charts.chosen import ABOUT, ISAS, ONLY_AVX512, measured_on

_SIZE = "4096x4096"
_CASTS = (  # label, operation, side of ours
    ("quantise to NVFP4", f"NVFP4, rowwise, {_SIZE}", "quantize"),
    ("quantise to MXFP8", f"MXFP8, rowwise, {_SIZE}", "quantize"),
    ("to INT4 and back", f"INT4 1x128 and back, {_SIZE}", "fake_quantize"),
)
_LIBRARIES = {
    "qwix, jitted": "qwix",
    "torchao, compiled": "torchao",
    "compressed-tensors, compiled": "compressed-tensors",
}
_PRODUCT = f"GEMM, 2048x4096 by {_SIZE}"
_PRODUCTS = tuple((f"{name}, 2048 rows", _PRODUCT, name) for name in ("NVFP4", "MXFP8", "Float8Tensor"))
_ONE_ROW = {  # the peer -> its label, side of ours
    "torch._weight_int4pack_mm_for_cpu, 1x128": ("torch, int4pack", "Int4 1x128"),
    "onnxruntime MatMulNBits, 1x128, float32 activations": ("onnxruntime, float32 activations", "Int4 1x128"),
    "onnxruntime MatMulNBits, 1x128, INT8 activations": ("onnxruntime, INT8 activations", "Int4 1x128"),
    "ggml Q4_0 (llama.cpp), 1x32, INT8 activations": ("llama.cpp, Q4_0, INT8 activations", "Int4 1x32"),
}
Case = tuple[str, str, str, str]  # label, operation, side of ours, peer
PANELS: dict[str, list[Case]] = {  # what 1x is -> its rows
    **{peer.partition(",")[0]: [(*cast, peer) for cast in _CASTS] for peer in _LIBRARIES},
    "torch's bfloat16 matmul": [(*product, "torch's bfloat16 matmul") for product in _PRODUCTS],
    "torch's INT8 matmul": [(*_PRODUCTS[-1], "torch._int_mm, INT8 per row, compiled")],
    "another library's 4-bit weights by one row": [
        (label, f"one row, {_SIZE}", side, peer) for peer, (label, side) in _ONE_ROW.items()
    ],
}


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
    """What the README shows: casts, GEMMs of one size, one row."""
    names = {name: f"peers_{isa}" for name, isa in ISAS.items() if (RESULTS / f"peers_{isa}.json").exists()}
    series = [load(file)["cases"][ISAS[name]] for name, file in names.items()]
    panels = tuple(
        Panel(against, tuple(Row(label, tuple(_bar(s, *case) for s in series)) for label, *case in rows))
        for against, rows in PANELS.items()
    )
    one = f" {ONLY_AVX512}" if set(names) == {"AVX-512"} else ""
    about = f"Same inputs, 2 cores, each library in its best form for this CPU. {ABOUT}{one}"
    return BarChart("Beside other libraries", about, tuple(names), panels, measured_on(*names.values()))
