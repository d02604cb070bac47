"""Charts of ratios: one row per case, one bar per series, 1x is what the panel compares with."""

from __future__ import annotations

from dataclasses import dataclass

from charts.svg import MARGIN, SMALL, TEXT, WIDTH, Card

_COLUMN = 62  # of one series' figures
_BAR = 7  # a bar's height
_COLOURS = {"AVX2": "bar0", "AVX-512": "bar1"}  # the same in all charts; other series have others
_STEPS = (0.25, 0.5, 1, 2, 5, 10, 20)


@dataclass(frozen=True)
class Bar:
    """A ratio, such as the baseline's time over ours, and what it has to be."""

    ratio: float
    target: float | None = None


@dataclass(frozen=True)
class Row:
    """One case; None where a series has no figure for it."""

    label: str
    bars: tuple[Bar | None, ...]


@dataclass(frozen=True)
class Panel:
    """Cases that are compared with the same thing."""

    against: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class BarChart:
    """A whole picture; one or two series."""

    title: str
    about: str
    series: tuple[str, ...]
    panels: tuple[Panel, ...]
    measured_on: str

    def drawn(self) -> str:
        """The SVG file's text."""
        card = Card(self.title, f"{self.about} {self.measured_on}")
        card.paragraph(self.about)
        _legend(card, self.series, any(b and b.target for p in self.panels for r in p.rows for b in r.bars))
        for panel in self.panels:
            _draw_panel(card, panel, self.series)
        card.y += 4
        card.paragraph(self.measured_on)
        return card.written()


def _legend(card: Card, series: tuple[str, ...], targets: bool) -> None:
    card.y += 24
    x = float(MARGIN)
    for i, name in enumerate(series):
        card.rectangle(x, card.y - 10, 12, 10, _colour(series, i))
        card.text(x + 17, card.y, name, SMALL)
        x += 17 + 0.6 * SMALL * len(name) + 14
    if targets:
        card.line([(x + 2, card.y - 13), (x + 2, card.y + 3)], "target", 2.5)
        card.text(x + 9, card.y, "target", SMALL)


def _colour(series: tuple[str, ...], i: int) -> str:
    return _COLOURS.get(series[i], f"bar{2 + i}")


def _draw_panel(card: Card, panel: Panel, series: tuple[str, ...]) -> None:
    card.y += 10
    card.paragraph(f"1x is {panel.against}", TEXT, "ink", bold=True)
    bars = [bar for row in panel.rows for bar in row.bars if bar]
    most = 1.04 * max(1.0, *(b.ratio for b in bars), *(b.target or 0 for b in bars))
    unit = (WIDTH - 2 * MARGIN) / most
    values = _marked(most, unit)
    card.y += 4
    for row in panel.rows:
        card.y += TEXT + 8
        for i, bar in enumerate(reversed(row.bars)):
            if bar:
                card.text(WIDTH - MARGIN - i * _COLUMN, card.y, f"{bar.ratio:.2f}x", end=True)
        card.text(MARGIN, card.y, row.label, room=WIDTH - 2 * MARGIN - len(series) * _COLUMN)
        card.y += 6
        _draw_bars(card, row.bars, series, unit, values)
    card.y += SMALL
    for value in values:
        card.mark(MARGIN + unit * value, f"{value:g}x")


def _draw_bars(
    card: Card, bars: tuple[Bar | None, ...], series: tuple[str, ...], unit: float, values: list[float]
) -> None:
    bottom = card.y + (_BAR + 2) * sum(bar is not None for bar in bars)
    for value in values:
        x = MARGIN + unit * value
        card.line([(x, card.y - 2), (x, bottom)], "one" if value == 1 else "grid", 1.5 if value == 1 else 1)
    for i, bar in enumerate(bars):
        if bar:
            card.rectangle(MARGIN, card.y, unit * bar.ratio, _BAR, _colour(series, i))
            if bar.target:
                x = MARGIN + unit * bar.target
                card.line([(x, card.y - 1.5), (x, card.y + _BAR + 1.5)], "target", 2.5)
            card.y += _BAR + 2


def _marked(most: float, unit: float) -> list[float]:
    """The ratios that get a line and a figure: 1x, and round ones that leave room for it."""
    step = next(step for step in _STEPS if most / step <= 6)
    round_ones = (i * step for i in range(1, int(most / step) + 1))
    return sorted({1.0, *(value for value in round_ones if abs(value - 1) * unit > 30)})
