"""A card of text and shapes, written as SVG: what every chart is drawn on.

A chart has its own background, so it can be read on any page, and follows the reader's light or dark theme. Its letters
have 13 units or more: at least 11 pixels where a phone shows the chart 360 pixels wide.
"""

from __future__ import annotations

import textwrap
from html import escape

WIDTH = 420
MARGIN = 16
TITLE, TEXT, SMALL = 17, 14, 13  # sizes of letters, in units of the drawing
_LETTER = 0.6  # an average letter's width by its size, for the widest of the usual fonts

_LIGHT = {
    "card": "fill:#fcfcfb;stroke:#d5d4cf",
    "ink": "fill:#0b0b0b",
    "soft": "fill:#52514e",
    "grid": "stroke:#dddcd6",
    "axis": "stroke:#8a8983",
    "one": "stroke:#a3a29b",
    "target": "stroke:#0b0b0b",
    "bar0": "fill:#2a78d6",
    "bar1": "fill:#eb6834",
    "bar2": "fill:#008300",
    "bar3": "fill:#7a68d8",
    "line0": "stroke:#2a78d6",
    "line1": "stroke:#eb6834",
    "line2": "stroke:#008300",
    "line3": "stroke:#4a3aa7",
    "line4": "stroke:#b03a7a",
    "line5": "stroke:#1a8f86",
    "line6": "stroke:#9a6a00",
    "line7": "stroke:#e34948",
    "noise": "stroke:#8a8983",
}
_DARK = {
    "card": "fill:#1a1a19;stroke:#3d3d3a",
    "ink": "fill:#ffffff",
    "soft": "fill:#c3c2b7",
    "grid": "stroke:#343431",
    "axis": "stroke:#8a8983",
    "one": "stroke:#7d7c76",
    "target": "stroke:#ffffff",
    "bar0": "fill:#3987e5",
    "bar1": "fill:#d95926",
    "bar2": "fill:#37a537",
    "bar3": "fill:#9085e9",
    "line0": "stroke:#4b95ee",
    "line1": "stroke:#e8703c",
    "line2": "stroke:#37a537",
    "line3": "stroke:#9085e9",
    "line4": "stroke:#e079ac",
    "line5": "stroke:#35b8ad",
    "line6": "stroke:#d9a021",
    "line7": "stroke:#f0706e",
    "noise": "stroke:#8f8e86",
}


def _rules(theme: dict[str, str]) -> str:
    return "".join(f".{name}{{{rule}}}" for name, rule in theme.items())


class Card:
    """Collects shapes from the top down; `y` is where the next one goes."""

    def __init__(self, title: str, description: str) -> None:
        self._title, self._description = title, description
        self._shapes: list[str] = []
        self.y = MARGIN + TITLE
        self.text(MARGIN, self.y, title, size=TITLE, bold=True)
        self.y += 6

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = TEXT,
        style: str = "ink",
        *,
        end: bool = False,
        bold: bool = False,
        room: float = 0,
    ) -> None:
        """Writes one line from x, or up to x; `room` is how wide it may be at most (default: to the edge).

        Raises:
            ValueError: the words are wider than their room.
        """
        room = room or (x - MARGIN if end else WIDTH - MARGIN - x)
        if len(words) * size * _LETTER > room:
            raise ValueError(f"a chart's text needs {len(words) * size * _LETTER:.0f} of {room:.0f} units: {words!r}")
        anchor = ' text-anchor="end"' if end else ""
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text class="{style}" x="{x:g}" y="{y:g}" font-size="{size}"{anchor}{weight}>{escape(words)}</text>'
        )

    def mark(self, x: float, words: str) -> None:
        """Writes a figure under an axis, its middle at x or as near as the edge allows."""
        wide = len(words) * SMALL * _LETTER
        self.text(min(x - wide / 2, WIDTH - MARGIN / 2 - wide), self.y, words, SMALL, "soft", room=wide + 1)

    def paragraph(self, words: str, size: int = SMALL, style: str = "soft", bold: bool = False) -> None:
        """Writes lines of at most the card's width, and moves down."""
        for line in textwrap.wrap(words, int((WIDTH - 2 * MARGIN) / (size * _LETTER))):
            self.y += size + 4
            self.text(MARGIN, self.y, line, size, style, bold=bold)

    def rectangle(self, x: float, y: float, width: float, height: float, style: str) -> None:
        """A filled bar."""
        self._shapes.append(
            f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}" rx="1.5"/>'
        )

    def line(self, points: list[tuple[float, float]], style: str, width: float = 1, dashes: str = "") -> None:
        """A line through points."""
        through = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._shapes.append(
            f'<polyline class="{style}" points="{through}" fill="none" stroke-width="{width:g}"{dashed}/>'
        )

    def written(self) -> str:
        """The whole file."""
        height = self.y + MARGIN
        style = f"text{{font-family:system-ui,sans-serif}}{_rules(_LIGHT)}"
        dark = f"@media (prefers-color-scheme:dark){{{_rules(_DARK)}}}"
        card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8"/>'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
            f'height="{height:g}" role="img" aria-labelledby="title description">'
        )
        title = f'<title id="title">{escape(self._title)}</title>'
        description = f'<desc id="description">{escape(self._description)}</desc>'
        about = ["<!-- drawn by benchmarks/tables.py -->", title, description, f"<style>{style}{dark}</style>"]
        return "\n".join([head, *about, card, *self._shapes, "</svg>"]) + "\n"
