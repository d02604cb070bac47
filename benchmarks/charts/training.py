"""What training loses: the gap of each recipe's loss over the steps."""

from __future__ import annotations

from recorded import load

from charts.lines import Axis, Curve, LineChart, Plot

_UNIT = 120  # of the drawing, for one per cent: the same in all panels
_MARK = 0.25
_NOISE = "bf16 perturbed"


def _styles(runs: list[str]) -> dict[str, str]:
    """A colour per run, the same in all panels."""
    others = [run for run in runs if run != _NOISE]
    return {run: f"line{i}" for i, run in enumerate(others)} | {_NOISE: "noise"}


def _plot(title: str, summaries: list[dict], styles: dict[str, str]) -> Plot:
    curves = tuple(
        Curve(
            s["run"],
            tuple((p["step"], p["gap"]) for p in s["gap_curve_percent"]),
            styles[s["run"]],
            "2 3" if s["run"] == _NOISE else "",
        )
        for s in summaries
    )
    steps = summaries[0]["steps"]
    gaps = [gap for curve in curves for _, gap in curve.points]
    low, high = _MARK * (min(gaps) // _MARK), -_MARK * (-max(gaps) // _MARK)
    places = [low + _MARK * i for i in range(round((high - low) / _MARK) + 1)]
    marks = tuple((place, f"{place:+.2f}" if place else "0") for place in places)
    return Plot(
        title,
        "% above bf16's training loss, by step",
        Axis(tuple((steps * i // 4, str(steps * i // 4)) for i in range(5)), 0, steps),
        Axis(marks, low, high),
        curves,
        _UNIT * (high - low),
    )


def _drawn(lengths: list[int], title: str) -> LineChart:
    result = load("training_study")
    summary = result["summary"]
    styles = _styles(list(dict.fromkeys(s["run"] for s in summary)))
    plots = []
    for steps in lengths:
        of_length = [s for s in summary if s["steps"] == steps]
        noise = [s for s in of_length if s["run"] == _NOISE]
        four = [s for s in of_length if "nvfp4" in s["run"]]
        eight = [s for s in of_length if s not in four + noise]
        plots += [
            _plot(f"{steps} steps, {bits} bits", runs + noise, styles) for bits, runs in ((4, four), (8, eight)) if runs
        ]
    return _chart(title, plots, result)


def _chart(title: str, plots: list[Plot], result: dict) -> LineChart:
    """Plots with what their study was made with."""
    settings = result["settings"]
    seeds = sorted({len(s["loss_gap_percent"]["by_seed"]) for s in result["summary"]})
    return LineChart(
        title,
        f"{settings['parameters']:,} parameters, real text, mean of {' or '.join(map(str, seeds))} seeds. "
        "Dotted: the noise floor, bf16 against bf16.",
        tuple(plots),
        f"jax {settings['jax']} on {settings['platform']}, commit {settings['commit']}.",
    )


def frontier() -> LineChart:
    """The default NVFP4 recipe and the best beyond it, each with and without a last fifth whose forward pass is in
    bf16, by the block that stays in bf16."""
    result = load("frontier_study")
    shortest = min(s["steps"] for s in result["summary"])
    summary = [s for s in result["summary"] if s["steps"] == shortest]
    blocks = {"last": "last block in bf16", "first": "first block in bf16", "none": "no block in bf16"}
    drawn = [s for s in summary if s["run"] in (_NOISE, "nvfp4", "nvfp4-eden") or "bf16-forward" in s["run"]]
    styles = _styles(list(dict.fromkeys(s["run"] for s in drawn)))
    of_blocks = {kept: [s for s in drawn if s["kept"] == kept] for kept in blocks}
    plots = [_plot(blocks[kept], found, styles) for kept, found in of_blocks.items() if found]
    return _chart("NVFP4: recipe and block in bf16", plots, {**result, "summary": summary})


def _lengths() -> list[int]:
    return sorted({s["steps"] for s in load("training_study")["summary"]})


def every_length() -> LineChart:
    """All runs: the mean gap of the seeds."""
    return _drawn(_lengths(), "What training loses")


def longest() -> LineChart:
    """The longest runs, for the README."""
    return _drawn(_lengths()[-1:], "What training loses")
