"""Charts of curves: panels under each other, each with its legend."""

from __future__ import annotations

from dataclasses import dataclass

from charts.svg import MARGIN, SMALL, TEXT, WIDTH, Card

_LEFT = MARGIN + 46  # where the plot begins, right of the axis' figures
_RIGHT = WIDTH - MARGIN - 6
_LEGEND_ROW = SMALL + 7


@dataclass(frozen=True)
class Curve:
    """One line; style names a class of the card's theme."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: str
    dashes: str = ""


@dataclass(frozen=True)
class Axis:
    """Figures at an axis, each as its place and its words."""

    marks: tuple[tuple[float, str], ...]
    low: float
    high: float


@dataclass(frozen=True)
class Plot:
    """One panel of a picture; `axes` says what its axes are, `height` is in units of the drawing."""

    title: str
    axes: str
    x: Axis
    y: Axis
    curves: tuple[Curve, ...]
    height: float


@dataclass(frozen=True)
class LineChart:
    """A whole picture."""

    title: str
    about: str
    plots: tuple[Plot, ...]
    measured_on: str

    def drawn(self) -> str:
        """The SVG file's text."""
        card = Card(self.title, f"{self.about} {self.measured_on}")
        card.paragraph(self.about)
        for plot in self.plots:
            _draw_plot(card, plot)
        card.y += 6
        card.paragraph(self.measured_on)
        return card.written()


def _draw_plot(card: Card, plot: Plot) -> None:
    card.y += 12
    card.paragraph(plot.title, TEXT, "ink", bold=True)
    card.y += 6
    card.paragraph(plot.axes)
    card.y += 12
    top = card.y

    def across(value: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (value - plot.x.low) / (plot.x.high - plot.x.low)

    def down(value: float) -> float:
        return top + plot.height * (plot.y.high - value) / (plot.y.high - plot.y.low)

    for value, words in plot.y.marks:
        style = "axis" if value == 0 else "grid"
        card.line([(_LEFT, down(value)), (_RIGHT, down(value))], style)
        card.text(_LEFT - 6, down(value) + 4.5, words, SMALL, "soft", end=True)
    for curve in plot.curves:
        card.line([(across(x), down(y)) for x, y in curve.points], curve.style, 2, curve.dashes)
    card.y = top + plot.height + SMALL + 6
    for value, words in plot.x.marks:
        card.mark(across(value), words)
    _draw_legend(card, plot.curves)


def _draw_legend(card: Card, curves: tuple[Curve, ...]) -> None:
    """Two names per row, or one where a name is long."""
    columns = 2 if max(len(curve.name) for curve in curves) <= 20 else 1
    wide = (WIDTH - 2 * MARGIN) / columns
    card.y += 4
    for i, curve in enumerate(curves):
        if i % columns == 0:
            card.y += _LEGEND_ROW
        x = MARGIN + wide * (i % columns)
        card.line([(x, card.y - 4.5), (x + 22, card.y - 4.5)], curve.style, 2.5, curve.dashes)
        card.text(x + 28, card.y, curve.name, SMALL, room=wide - 28)
