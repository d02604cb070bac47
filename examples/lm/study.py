"""What the studies have in common: runs of several seeds, their gaps to bf16, and the summary that is written."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from lm.data import Batches, installed_text, read_text
from lm.mesh import ONE_DEVICE, Layout
from lm.model import SIZES, Config
from lm.preemption import Notice
from lm.report import add_gaps, smooth
from lm.training import Run, Schedule, train

BASELINES = (Run("bf16"), Run("bf16 perturbed", perturbation=1e-4))
DEFAULT = "nvfp4"  # the recipe that others are compared with, beside bf16
INSTALLED = "installed"  # in a text's place: the sources of the installed packages
POINTS = 40  # points of a curve in the results


def arguments(description: str | None, out: str) -> argparse.ArgumentParser:
    """A parser of what every study takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--text", help="file or folder to learn from, or 'installed'; default: Python's standard library"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(out))
    parser.add_argument("--save", type=pathlib.Path, help="file for the results, in benchmarks/results")
    return parser


def parsed(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, np.ndarray]:
    """The options, whose folder exists then, and the text; `options.split`: where the text for validation begins."""
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.split = None
    if options.text == INSTALLED:
        text, options.split = installed_text()
        return options, text
    return options, read_text(options.text)


def results_of(
    options: argparse.Namespace,
    text: np.ndarray,
    steps: int,
    sides: Sequence[tuple[Run, Config]],
    part: str = "",
    seeds: Iterable[int] | None = None,
    layout: Layout = ONE_DEVICE,
    notice: Notice | None = None,
) -> list[dict[str, Any]]:
    """The results of all runs of all seeds, with their gaps to the first; those already in `options.out` are read.

    A run that a notice has ended goes on where it ended.

    Arguments:
        part: of a study that has several, the folder of one in `options.out`.
        seeds: default: as many as `options.seeds` says.
        layout: where arrays are placed.
        notice: to end, with `Preempted`.
    """
    found: list[dict[str, Any]] = []
    for seed in range(options.seeds) if seeds is None else seeds:
        schedule = Schedule(steps, options.learning_rate, options.batch, seed, checkpoint_every=steps)
        results = []
        for run, config in sides:
            folder = options.out / part / f"{steps}-{seed}-{run.folder}"
            if not (folder / "result.json").exists():
                batches = Batches(text, options.batch, config.context, seed, split=options.split)
                going_on = {"resume": notice is not None, "notice": notice}
                result = train(run, config, schedule, batches, folder, layout=layout, **going_on)
                shutil.rmtree(folder / "checkpoints")
                (folder / "result.json").write_text(json.dumps(result))
            results.append(json.loads((folder / "result.json").read_text()))
        add_gaps(results, sides[0][0].name)
        found += [{"steps": steps, "seed": seed, **result} for result in results]
    return found


def summarize(runs: list[dict], baseline: str = "bf16") -> list[dict]:
    """One entry for each length and run but the baseline's: gaps in percent by seed, their mean with its standard
    error, the same of their differences from the default NVFP4 recipe's, and the mean curve of the gap."""
    summary = []
    others = [r for r in runs if r["name"] != baseline]
    for steps, name in dict.fromkeys((r["steps"], r["name"]) for r in others):
        mine = [r for r in runs if (r["steps"], r["name"]) == (steps, name)]
        entry = {"steps": steps, "run": name, "finite": all(r["finite"] for r in mine)}
        for key in ("loss", "validation_loss"):
            gaps = {r["seed"]: r[f"{key}_gap_percent"] for r in mine}
            default = {r["seed"]: r[f"{key}_gap_percent"] for r in runs if (r["steps"], r["name"]) == (steps, DEFAULT)}
            entry[f"{key}_gap_percent"] = {
                **_mean(list(gaps.values())),
                "mean_magnitude": statistics.mean(map(abs, gaps.values())),
                "by_seed": list(gaps.values()),
                "less_than_default": _mean([default[seed] - gap for seed, gap in gaps.items() if seed in default]),
            }
        curves = []
        for r in mine:
            base = next(b for b in runs if (b["steps"], b["seed"], b["name"]) == (steps, r["seed"], baseline))
            curves.append(100 * (smooth(r["losses"], steps // 20) / smooth(base["losses"], steps // 20) - 1))
        every = max(1, steps // POINTS)
        entry["gap_curve_percent"] = [
            {"step": step + 1, "gap": round(statistics.mean(c[step] for c in curves), 4)}
            for step in range(every - 1, steps, every)
        ]
        summary.append(entry)
    return summary


def _mean(values: list[float]) -> dict[str, float | None]:
    """The mean and its standard error; None of one value, or of none."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": statistics.mean(values) if values else None, "standard_error": error}


def print_gaps(summary: list[dict]) -> None:
    """One line for each run."""
    for entry in summary:
        gap, validation = entry["loss_gap_percent"], entry["validation_loss_gap_percent"]
        print(
            f"{entry['steps']:6} {entry['run']:24} loss {gap['mean']:+.2f} %  validation {validation['mean']:+.2f} %",
            [round(of_seed, 2) for of_seed in gap["by_seed"]],
        )


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


def write(path: pathlib.Path | None, content: dict[str, Any]) -> None:
    """Writes results, if a file was asked for."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
