"""Repeats the comparison of train_lm.py over seeds, lengths and ablations, and writes a summary.

    python examples/training_study.py --out runs/study    # an hour on 2 cores; resumes where it was stopped

Every run of a seed starts from the same parameters and sees the same data. Gaps are relative differences of the mean
training loss over the last 50 steps, and of the validation loss, from bf16's. The noise floor is the gap of a bf16 run
whose initial parameters are changed by 1e-4: smaller gaps say nothing.
"""

from __future__ import annotations

from lm.model import SIZES
from lm.recipes import NEEDS, RECIPES, TAIL, run_named
from lm.study import BASELINES, arguments, parsed, print_gaps, results_of, settings_of, summarize, write

DEFAULT = "nvfp4"  # the whole recipe, trained at every length; all other recipes only at --ablation-steps


def main() -> None:
    """Trains the missing runs, and prints and writes the summary."""
    parser = arguments(__doc__, "runs/study")
    every = [*(name for name in RECIPES if name != "bf16"), TAIL]
    parser.add_argument("--recipe", nargs="+", default=every, help=f"each {NEEDS}")
    parser.add_argument("--steps", nargs="+", type=int, default=[400, 1000])
    parser.add_argument("--ablation-steps", nargs="*", type=int, default=[400, 1000], help="lengths to ablate at")
    options, text = parsed(parser)
    config, runs = SIZES[options.size], []
    try:
        sides = {
            steps: [
                run_named(name, steps) for name in options.recipe if name == DEFAULT or steps in options.ablation_steps
            ]
            for steps in options.steps
        }
    except ValueError as error:
        parser.error(f"--recipe {error}")
    for steps, named in sides.items():
        runs += results_of(options, text, steps, [(run, config) for run in (*BASELINES, *named)])
    summary = summarize(runs)
    print_gaps(summary)
    settings = settings_of(options, config, runs[0]["parameters"], text)
    write(options.save, {"settings": settings, "summary": summary})


if __name__ == "__main__":
    main()
