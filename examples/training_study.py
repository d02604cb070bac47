"""Repeats the comparison of train_lm.py over seeds, lengths and ablations, and writes a summary.

    python examples/training_study.py --out runs/study    # an hour on 2 cores; resumes where it was stopped

Every run of a seed starts from the same parameters and sees the same data. Gaps are relative differences of the mean
training loss over the last 50 steps, and of the validation loss, from bf16's. The noise floor is the gap of a bf16 run
whose initial parameters are changed by 1e-4: smaller gaps say nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import shutil
import statistics
import subprocess
from typing import Any

import jax
import numpy as np
from lm.data import Batches, read_text
from lm.model import SIZES, Config
from lm.report import add_gaps, smooth
from lm.training import Run, Schedule, train
from train_lm import RECIPES

BASELINES = (Run("bf16"), Run("bf16 perturbed", perturbation=1e-4))
DEFAULT = "nvfp4"  # the whole recipe, trained at every length; all other recipes only at --ablation-steps
POINTS = 40  # points of a curve in the results


def study(options: argparse.Namespace, batches_of, config) -> list[dict]:
    """The results of all runs; runs that are already in `options.out` are read from there."""
    found = []
    for steps in options.steps:
        for seed in range(options.seeds):
            schedule = Schedule(steps, options.learning_rate, options.batch, seed, checkpoint_every=steps)
            results = []
            names = [n for n in options.recipe if n == DEFAULT or steps in options.ablation_steps]
            for run in (*BASELINES, *(Run(name, RECIPES[name]()) for name in names)):
                folder = options.out / f"{steps}-{seed}-{run.name.replace(' ', '-')}"
                if not (folder / "result.json").exists():
                    result = train(run, config, schedule, batches_of(seed), folder, resume=False)
                    shutil.rmtree(folder / "checkpoints")
                    (folder / "result.json").write_text(json.dumps(result))
                results.append(json.loads((folder / "result.json").read_text()))
            add_gaps(results)
            found += [{"steps": steps, "seed": seed, **r} for r in results]
    return found


def summarize(runs: list[dict]) -> list[dict]:
    """One entry for each length and recipe: gaps in percent by seed, their mean, and the mean curve of the gap."""
    summary = []
    for steps, name in dict.fromkeys((r["steps"], r["name"]) for r in runs if r["name"] != "bf16"):
        mine = [r for r in runs if (r["steps"], r["name"]) == (steps, name)]
        entry = {"steps": steps, "run": name, "finite": all(r["finite"] for r in mine)}
        for key in ("loss", "validation_loss"):
            gaps = [r[f"{key}_gap_percent"] for r in mine]
            entry[f"{key}_gap_percent"] = {
                "mean": statistics.mean(gaps),
                "mean_magnitude": statistics.mean(map(abs, gaps)),
                "by_seed": gaps,
            }
        curves = []
        for r in mine:
            base = next(b for b in runs if (b["steps"], b["seed"], b["name"]) == (steps, r["seed"], "bf16"))
            curves.append(100 * (smooth(r["losses"], steps // 20) / smooth(base["losses"], steps // 20) - 1))
        every = max(1, steps // POINTS)
        entry["gap_curve_percent"] = [
            {"step": step + 1, "gap": round(statistics.mean(c[step] for c in curves), 4)}
            for step in range(every - 1, steps, every)
        ]
        summary.append(entry)
    return summary


def settings_of(options: argparse.Namespace, config: Config, parameters: int, text: np.ndarray) -> dict[str, Any]:
    """What a study was made with, for its file."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "config": dataclasses.asdict(config),
        "parameters": parameters,
        "batch": options.batch,
        "learning_rate": options.learning_rate,
        "seeds": options.seeds,
        "text_bytes": int(text.size),
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "commit": commit.stdout.strip(),
    }


def main() -> None:
    """Trains the missing runs, and prints and writes the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=[n for n in RECIPES if n != "bf16"])
    parser.add_argument("--steps", nargs="+", type=int, default=[400, 1000])
    parser.add_argument("--ablation-steps", nargs="*", type=int, default=[400, 1000], help="lengths to ablate at")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--text", help="file or folder to learn from; default: Python's standard library")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/study"))
    parser.add_argument(
        "--save", type=pathlib.Path, help="file for the summary, such as benchmarks/results/training_study.json"
    )
    options = parser.parse_args()
    config, text = SIZES[options.size], read_text(options.text)
    options.out.mkdir(parents=True, exist_ok=True)

    runs = study(options, lambda seed: Batches(text, options.batch, config.context, seed), config)
    summary = summarize(runs)
    for entry in summary:
        gap, validation = entry["loss_gap_percent"], entry["validation_loss_gap_percent"]
        print(
            f"{entry['steps']:6} {entry['run']:16} loss {gap['mean']:+.2f} %  validation {validation['mean']:+.2f} %",
            gap["by_seed"],
        )
    if options.save:
        settings = settings_of(options, config, runs[0]["parameters"], text)
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps({"settings": settings, "summary": summary}, indent=1) + "\n")


if __name__ == "__main__":
    main()
