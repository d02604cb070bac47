"""A run's report: a line per iteration, JSON, and a picture of reward, differences and routing."""

from __future__ import annotations

import io
import json
import pathlib
import sys
from typing import Any

import numpy as np
from tqdm import tqdm

import jaxlowprec as jlp
from rl import mismatch_picture

AVERAGED = 10


class Progress:
    """Shows a bar with the latest figures on a terminal, otherwise a line per iteration. A context manager."""

    def __init__(self, iterations: int):
        self._iterations = iterations
        self._bar = tqdm(total=iterations, unit="iteration", disable=not sys.stderr.isatty())

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def show(self, record: dict[str, Any]) -> None:
        """Shows a finished iteration."""
        figures = line(record)
        self._bar.set_postfix_str(figures, refresh=False)
        self._bar.update(record["version"] - self._bar.n)
        if self._bar.disable:
            print(f"iteration {record['version']}/{self._iterations}: {figures}", flush=True)


def line(record: dict[str, Any]) -> str:
    """The figures of an iteration as a line of text."""
    return (
        f"reward {record['reward']:.3f}, log-prob difference {record['train_rollout_logprob_abs_diff']:g}, "
        f"loss {record['loss']:+.4f}, "
        f"routing kept {100 * record['routing_same']:.1f} %, "
        f"after learning {100 * record['routing_same_after']:.1f} %, "
        f"synced {record['sync_bytes'] / 1024:.0f} KiB in {record['sync_ms']:.0f} ms, "
        f"generated in {record['generate_ms']:.0f} ms"
    )


def running_mean(values: list[float], width: int = AVERAGED) -> np.ndarray:
    """The mean of each value and those before it, over at most `width` values.

    >>> running_mean([1.0, 3.0, 5.0], width=2).tolist()
    [1.0, 2.0, 4.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)


def picture(records: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws the reward, below it the differences of log-probabilities, and below them the routing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    columns = {name: [record[name] for record in records] for name in records[0]}
    steps = columns["version"]
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(8, 7.5), sharex=True, height_ratios=(3, 2.2, 1.6), layout="constrained"
    )
    top.plot(steps, columns["reward"], color="0.7", label="of an iteration")
    top.plot(steps, running_mean(columns["reward"]), color="C0", linewidth=2, label=f"mean of the last {AVERAGED}")
    top.plot(steps, columns["right"], color="C2", linewidth=1, label="answers right in every place")
    top.set_ylim(0, 1)
    top.set_ylabel("reward")
    top.legend(loc="lower right")

    middle.plot(steps, columns["unquantised_logprob_abs_diff"], color="C1", label="had the trainer not quantised")
    passes = columns["gradient_pass_logprob_abs_diff"]
    middle.plot(steps, passes, color="0.6", label="the trainer's passes without and with gradients")
    middle.plot(steps, columns["train_rollout_logprob_abs_diff"], ".", color="C3", label="trainer and rollout")
    middle.set_yscale("symlog", linthresh=1e-8, linscale=0.5)
    middle.set_ylim(-5e-9, None)
    middle.set_yticks([0, 1e-8, 1e-6, 1e-4, 1e-2, 1])
    middle.set_ylabel("largest difference of\na log-probability")
    middle.legend(loc="center right")

    bottom.plot(steps, 100 * np.asarray(columns["routing_same"]), color="C3", label="before learning")
    bottom.plot(steps, 100 * np.asarray(columns["routing_same_after"]), color="C1", label="after it")
    bottom.set_ylabel("tokens that would choose\nthe rollout's experts (%)")
    bottom.legend(loc="lower right")
    bottom.set_xlabel("iteration: one sync of the weights each")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(32).save(path, optimize=True)  # few colours: a fifth of the bytes


def write(records: list[dict[str, Any]], settings: dict[str, Any], folder: pathlib.Path) -> None:
    """Writes report.json and reward.png, and mismatch.png if a log-probability differs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps({"settings": settings, "iterations": records}, indent=1) + "\n")
    picture(records, folder / "reward.png")
    if any(record["differing"] for record in records):
        found = [jlp.rl.Mismatch.from_json(record["mismatch"]) for record in records]
        mismatch_picture.plot(found, folder / "mismatch.png", title="Rollout and trainer")
