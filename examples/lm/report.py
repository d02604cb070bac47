"""The report of a comparison: gaps against bf16 beside the noise floor, as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import pathlib

import numpy as np


def add_gaps(results: list[dict], baseline: str = "bf16") -> None:
    """Adds the relative differences of each run's losses from the baseline's, in percent."""
    base = next((r for r in results if r["name"] == baseline), None)
    for r in results:
        for key in ("loss", "validation_loss"):
            r[f"{key}_gap_percent"] = None if base is None or r is base else 100 * (r[key] / base[key] - 1)


def table(results: list[dict]) -> str:
    """The results as a table with one row per run."""
    experts = any("expert_load" in r for r in results)
    heads = ("run", "loss", "gap", "val. loss", "gap", "step", "tokens/s", "compile", "saved for backward")
    rows = [(*heads, "largest load") if experts else heads]
    for r in results:
        gaps = ["" if (g := r[f"{k}_gap_percent"]) is None else f"{g:+.2f} %" for k in ("loss", "validation_loss")]
        step = "" if r["step_seconds"] is None else f"{1000 * r['step_seconds']:.0f} ms"
        speed = "" if r["tokens_per_second"] is None else f"{r['tokens_per_second']:,.0f}"
        saved = f"{r['saved_activation_bytes'] / 2**20:.1f} MiB"
        compiling = f"{r['compile_seconds']:.1f} s" if r["compile_seconds"] else ""
        losses = [f"{r['loss']:.4f}", gaps[0], f"{r['validation_loss']:.4f}", gaps[1]]
        load = [f"{r['expert_load']:.2f}"] if experts else []
        rows.append((r["name"], *losses, step, speed, compiling, saved, *load))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def smooth(values: list[float], width: int) -> np.ndarray:
    """A running mean; at both ends it averages fewer values."""
    kernel = np.ones(max(1, width))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def picture(results: list[dict], path: pathlib.Path) -> None:
    """Draws the loss curves, their gaps against bf16 if that was trained, and the experts' loads if there are any."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    styles = {"bf16": ("black", "-"), "bf16 perturbed": ("0.55", ":")}
    curves = {r["name"]: smooth(r["losses"], len(r["losses"]) // 20) for r in results}
    base = curves.get("bf16")
    gaps = {
        name: 100 * (losses / base - 1)
        for name, losses in curves.items()
        if base is not None and name != "bf16" and len(losses) == len(base)
    }
    loads = {r["name"]: smooth(r["expert_loads"], len(r["expert_loads"]) // 20) for r in results if "expert_loads" in r}
    below = bool(gaps) + bool(loads)
    figure, axes = plt.subplots(
        1 + below,
        1,
        figsize=(8, 4.5 + 2.5 * below),
        sharex=True,
        squeeze=False,
        height_ratios=(3, *[2] * below),
        layout="constrained",
    )
    top, middle, bottom = axes[0, 0], axes[min(1, below), 0], axes[-1, 0]
    for name, losses in curves.items():
        color, line = styles.get(name, (None, "-"))
        steps = np.arange(1, len(losses) + 1)
        (drawn,) = top.plot(steps, losses, line, color=color, label=name)
        if name in gaps:
            middle.plot(steps, gaps[name], line, color=drawn.get_color(), label=f"{name} against bf16")
    top.set_ylabel("training loss (nats per byte)")
    top.legend()
    if gaps:
        middle.axhline(0, color="black", linewidth=0.8)
        middle.set_ylabel("gap (%)")
        middle.legend()
    for name, values in loads.items():
        color, line = styles.get(name, (None, "-"))
        bottom.plot(np.arange(1, len(values) + 1), values, line, color=color, label=name)
    if loads:
        bottom.axhline(1, color="black", linewidth=0.8)
        bottom.set_ylabel("largest expert's load\n(1: all alike)")
        bottom.legend()
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write(results: list[dict], settings: dict, folder: pathlib.Path) -> None:
    """Writes report.json and loss.png."""
    floor = next((r for r in results if r["name"] == "bf16 perturbed"), None)
    report = {
        "settings": settings,
        "noise_floor_percent": None
        if floor is None
        else {"loss": abs(floor["loss_gap_percent"]), "validation_loss": abs(floor["validation_loss_gap_percent"])},
        "runs": results,
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    picture(results, folder / "loss.png")
