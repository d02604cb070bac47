"""The table that compares recipes: what each costs, and what training loses under it."""

from __future__ import annotations

from cells import markdown, milliseconds
from recorded import load, where

# The class, and its name in the training study and in the other results.
RECIPES = (
    ("NVFP4BlockScaling", "nvfp4", "NVFP4"),
    ("MXFP8BlockScaling", "mxfp8", "MXFP8"),
    ("Float8BlockScaling", "fp8_block", "FP8 block"),
    ("Float8CurrentScaling", "fp8_current", "FP8 current"),
    ("DelayedScaling", "fp8_delayed", "FP8 delayed"),
)


def recipes() -> str:
    """Gap of the loss, time of a step, and bytes gathered, per recipe."""
    study, steps, traffic = load("training_study"), load("train_step"), load("traffic")
    longest = max(s["steps"] for s in study["summary"])
    gaps = {s["run"]: s["loss_gap_percent"] for s in study["summary"] if s["steps"] == longest}
    speeds = {(c["size"], c["recipe"]): c for c in steps["cases"] if c["against"] == "plain Flax, bfloat16"}
    gathered = {r["recipe"]: r["operands"] for r in traffic["results"] if r["placement"] == "FSDP"}

    def gap(run: str) -> tuple[str, str]:
        return f"{gaps[run]['mean']:+.2f} %", f"{min(gaps[run]['by_seed']):+.2f} to {max(gaps[run]['by_seed']):+.2f} %"

    plain = [milliseconds(speeds[size, "NVFP4"]["theirs"]["median"]) for size in ("demo", "small")]
    rows = [("recipe", "loss gap, mean", "over the seeds", "step, demo", "step, small", "gathered, FSDP")]
    rows.append(("none: bfloat16, perturbed", *gap("bf16 perturbed"), f"{plain[0]} ms", f"{plain[1]} ms", "1.00"))
    for name, run, recipe in RECIPES:
        times = (milliseconds(speeds[size, recipe]["ours"]["median"]) for size in ("demo", "small"))
        share = f"{gathered[recipe] / gathered['bfloat16']:.2f}" if recipe in gathered else "not measured"
        rows.append((f"`{name}`", *gap(run), *(f"{time} ms" for time in times), share))
    seeds = study["settings"]["seeds"]
    return f"{markdown(rows)}\n\nLosses after {longest} steps, {seeds} seeds. Steps on {where(steps)}"
