"""What it costs training that an MLP keeps its hidden layer in 8 bits, `saved="8bit"`, instead of "quantized".

    python examples/saved_study.py --out runs/saved    # half an hour on 2 cores; resumes where it was stopped

All blocks of the demo model are quantised. "recompute" has the bits of "quantized", so it is not trained. Gaps are
those of training_study.py.
"""

from __future__ import annotations

import dataclasses

from lm.model import SIZES
from lm.recipes import RECIPES
from lm.study import BASELINES, arguments, parsed, print_gaps, results_of, settings_of, summarize, write
from lm.training import Run


def main() -> None:
    """Trains the missing runs, and prints and writes the summary."""
    parser = arguments(__doc__, "runs/saved")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=["nvfp4", "mxfp8"])
    options, text = parsed(parser)
    config = dataclasses.replace(SIZES[options.size], high_precision_last=0)
    sides = [(run, config) for run in BASELINES]
    for name in options.recipe:
        for saved in ("quantized", "8bit"):
            sides.append((Run(f"{name}, {saved}", RECIPES[name]()), dataclasses.replace(config, saved=saved)))
    found = results_of(options, text, options.steps, sides)
    summary = summarize(found)
    print_gaps(summary)
    settings = settings_of(options, config, found[0]["parameters"], text)
    write(options.save, {"settings": settings, "summary": summary})


if __name__ == "__main__":
    main()
