"""Repeats the comparison of train_lm.py over seeds, lengths and ablations, and writes a summary.

    python examples/training_study.py --out runs/study    # an hour on 2 cores; resumes where it was stopped
    python examples/training_study.py --out runs/frontier --frontier    # beyond the default NVFP4: three hours
    python examples/training_study.py --on-gpu --minutes 4    # 85 million parameters: again until all runs are there

Every run of a seed starts from the same parameters and sees the same data. Gaps are relative differences of the mean
training loss over the last 50 steps, and of the validation loss, from bf16's. The noise floor is the gap of a bf16 run
whose initial parameters are changed by 1e-4: smaller gaps say nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence

from lm.model import SIZES
from lm.preemption import Notice, Preempted
from lm.recipes import EDEN_TAIL, FRONTIER, NEEDS, TAIL, run_named
from lm.study import (
    BASELINES,
    DEFAULT,
    INSTALLED,
    arguments,
    parsed,
    print_gaps,
    results_of,
    settings_of,
    summarize,
    write,
)

ABLATED = (
    *(DEFAULT, "nvfp4-no-rht", "nvfp4-no-sr", "nvfp4-no-2d"),
    *("mxfp8", "fp8_block", "fp8_current", "fp8_delayed"),
)
KEPT = {"last": (0, 1), "first": (1, 0), "none": (0, 0)}  # how many of the first and of the last blocks stay in bf16
FEW = (DEFAULT, "nvfp4-eden", EDEN_TAIL)  # of the frontier: those with other blocks in bf16
NOISE = "bf16 perturbed"
ON_GPU = (DEFAULT, "nvfp4-eden", "mxfp8", "fp8_block")
LONG = FEW[:2]  # of the frontier: those with more steps
BEST = (*FEW, "nvfp4-eden-search", TAIL)  # of the frontier: those with more seeds


def parts(options: argparse.Namespace, kept: str) -> Iterator[tuple[Sequence[str], int, range]]:
    """The names, the steps and the seeds of the runs with this block in bf16."""
    seeds = range(options.seeds)
    if options.on_gpu:
        yield from (([NOISE, *(options.recipe or ON_GPU)], steps, seeds) for steps in options.steps)
        return
    lengths = options.steps or ([1000, 3000] if options.frontier else [400, 1000])
    ablated = lengths if options.ablation_steps is None else options.ablation_steps
    for steps in lengths:
        if options.recipe or not options.frontier:
            names = [name for name in options.recipe or ABLATED if name == DEFAULT or steps in ablated]
            yield [NOISE, *names], steps, seeds
        elif kept == "last" and steps == min(lengths):
            yield [NOISE, *FRONTIER], steps, seeds
            yield [NOISE, *BEST], steps, range(options.seeds, options.best_seeds)
        elif kept == "last":
            yield LONG, steps, seeds
            yield [NOISE], steps, range(1)
        elif steps == min(lengths):
            yield [NOISE, *FEW], steps, seeds


def main() -> None:
    """Trains the missing runs, and prints and writes the summary."""
    parser = arguments(__doc__, "runs/study")
    parser.add_argument("--frontier", action="store_true", help="the recipes beyond the default NVFP4 recipe")
    parser.add_argument("--recipe", nargs="+", help=f"each {NEEDS}")
    parser.add_argument("--steps", nargs="+", type=int, help="default: 400 1000; with --frontier 1000 3000")
    parser.add_argument("--ablation-steps", nargs="*", type=int, help=f"lengths of others than {DEFAULT}; default: all")
    parser.add_argument("--kept", nargs="+", choices=KEPT, help="block that stays in bf16; default: last, or every one")
    parser.add_argument(
        "--best-seeds", type=int, default=5, help="seeds of the best of the frontier, last block in bf16"
    )
    parser.add_argument(
        "--on-gpu",
        action="store_true",
        help="a decoder of 85 million parameters, 64 thousand bytes a step of the sources of all installed packages, "
        "the last or the first block in bf16",
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="then end; the same command goes on")
    if parser.parse_known_args()[0].on_gpu:
        parser.set_defaults(size="medium", batch=128, seeds=1, steps=[1000], kept=["last", "first"], text=INSTALLED)
        parser.set_defaults(out=pathlib.Path("runs/on_gpu"))
    options, text = parsed(parser)
    notice = Notice(60 * options.minutes) if options.on_gpu or math.isfinite(options.minutes) else None
    bf16, noise = BASELINES
    summary = []
    for kept in options.kept or (KEPT if options.frontier else ["last"]):
        first, last = KEPT[kept]
        config = dataclasses.replace(SIZES[options.size], high_precision_first=first, high_precision_last=last)
        runs = []
        for names, steps, seeds in parts(options, kept):
            try:
                named = [noise if name == NOISE else run_named(name, steps) for name in names]
            except ValueError as error:
                parser.error(f"--recipe {error}")
            sides = [(run, config) for run in (bf16, *named)]
            try:
                runs += results_of(options, text, steps, sides, kept, seeds, notice=notice)
            except Preempted as error:
                sys.exit(f"{error} in {options.minutes} minutes: the same command goes on there")
        found = summarize(runs)
        summary += [{"kept": kept, **entry} for entry in found]
        print(f"{kept} block in bf16" if kept != "none" else "no block in bf16")
        print_gaps(found)
    settings = settings_of(options, config, runs[0]["parameters"], text)
    write(options.save, {"settings": settings, "summary": summary})


if __name__ == "__main__":
    main()
