"""What a Llama block keeps for its backward pass: one bar per side, in parts by the size of their elements."""

from __future__ import annotations

from recorded import load, recorded_on

from charts.svg import MARGIN, SMALL, TEXT, WIDTH, Card

_BAR = 12  # a bar's height
_FIGURES = 50  # the room of a bar's sum
_NAMES = {
    "Flax": "Flax, bf16",
    "nvfp4, separate layers": "NVFP4, separate layers",
    "nvfp4, quantized": 'NVFP4, saved="quantized"',
    "nvfp4, 8bit": 'NVFP4, saved="8bit"',
    "nvfp4, recompute": 'NVFP4, saved="recompute"',
    "mxfp8, separate layers": "MXFP8, separate layers",
    "mxfp8, quantized": 'MXFP8, saved="quantized"',
    "mxfp8, 8bit": 'MXFP8, saved="8bit"',
    "mxfp8, recompute": 'MXFP8, saved="recompute"',
}


class Kept:
    """A whole picture of one result."""

    def __init__(self, name: str):
        self.name = name

    def drawn(self) -> str:
        """The SVG file's text."""
        result = load(self.name)
        about = "A Llama block's arrays of tokens. The unit is an activation of the block's width in bfloat16."
        card = Card("Kept for the backward pass", about)
        card.paragraph(about)
        cases = {case["side"]: case["kept"] for case in result["cases"]}
        card.y += 24
        x = float(MARGIN)
        kinds = list(cases["Flax"])
        for i, kind in enumerate(kinds):
            card.rectangle(x, card.y - 10, 12, 10, f"bar{i}")
            card.text(x + 17, card.y, kind, SMALL)
            x += 17 + 0.6 * SMALL * len(kind) + 14
        unit = (WIDTH - 2 * MARGIN - _FIGURES) / max(sum(parts.values()) for parts in cases.values())
        for side, name in _NAMES.items():
            card.y += TEXT + 8
            card.text(MARGIN, card.y, name)
            card.y += 6
            x = float(MARGIN)
            for i, kind in enumerate(kinds):
                card.rectangle(x, card.y, unit * cases[side][kind], _BAR, f"bar{i}")
                x += unit * cases[side][kind]
            card.text(x + 6, card.y + _BAR, f"{sum(cases[side].values()):.1f}", SMALL)
            card.y += _BAR
        card.y += 8
        e = result["environment"]
        card.paragraph(f"Counted in traced programs of jax {e['versions']['jax']}, commit {e['commit']}.")
        return card.written()


def kept() -> Kept:
    """From `benchmarks/block.py`, whose counts are the same with every instruction set."""
    return Kept(recorded_on("block")[-1])
