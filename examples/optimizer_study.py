"""What it costs training that an optimizer keeps its states in 8 bits, and its weights as bfloat16 and a remainder.

    python examples/optimizer_study.py --out runs/optimizer    # resumes where it was stopped
    python examples/optimizer_study.py --out runs/optimizer --recipe mxfp8 --states 8-bit --b2 0.999    # only these

Gaps are those of training_study.py, but against float32 states of the same seed, optimizer and recipe. They may have
either sign: a second moment that stands still lowers the loss by steps that are too long, and is as much a fault as one
that raises it. So the bound is on the magnitude of the mean gap. Two faults are trained beside what the library offers,
and have to exceed it: rounding to nearest where second moments decay slowly, and integers of equal steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from lm.model import SIZES
from lm.optimizers import B2, FAULTS, OPTIMIZERS, STATES, Optimizer
from lm.preemption import Notice, Preempted
from lm.recipes import RECIPES
from lm.study import arguments, parsed, print_gaps, results_of, settings_of, summarize, write
from lm.training import Run

BASELINE, NOISE = "float32", "float32 perturbed"
BOUND = 0.06  # per cent of the loss; or three times the noise floor, where that is more
SOUND = tuple(name for name in STATES if name not in (BASELINE, *FAULTS))
FEW = ("8-bit", "8-bit-masters-24")


class Part(NamedTuple):
    """Runs that have a baseline in common."""

    optimizer: str
    b2: float
    recipe: str
    states: Sequence[str]

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.optimizer}-{self.b2}-{self.recipe}"

    def runs(self) -> list[Run]:
        """The baseline, its noise floor, and one run for each kind of states."""
        plain, recipe = Optimizer(self.optimizer, self.b2), RECIPES[self.recipe]()
        ends = [Run(BASELINE, recipe, optimizer=plain), Run(NOISE, recipe, 1e-4, plain)]
        others = [Run(name, recipe, optimizer=dataclasses.replace(plain, states=name)) for name in self.states]
        return ends + others


PARTS = (
    Part("adamw", B2, "bf16", (*SOUND, *FAULTS)),
    Part("adamw", B2, "nvfp4", FEW),
    Part("adamw", 0.999, "bf16", (*SOUND, *FAULTS)),
    Part("adamw", B2, "fp8_block", FEW),
    Part("muon", B2, "bf16", FEW),
)


def chosen(options: argparse.Namespace) -> Sequence[Part]:
    """The parts that the options ask for: PARTS, or those of their states; or all of an optimizer, b2 or recipe."""
    if not (options.optimizer or options.b2 or options.recipe):
        of = options.states or STATES
        parts = [part._replace(states=[name for name in part.states if name in of]) for part in PARTS]
        return [part for part in parts if part.states]
    groups = itertools.product(options.optimizer or ["adamw"], options.b2 or [B2], options.recipe or ["bf16"])
    return [Part(*group, tuple(options.states or SOUND)) for group in groups]


def judged(summary: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of a part with their bound, and whether the gap is within it."""
    noise = next(entry for entry in summary if entry["run"] == NOISE)
    bound = max(BOUND, 3 * noise["loss_gap_percent"]["mean_magnitude"])
    return [
        {**e, "bound_percent": bound, "within": e["finite"] and abs(e["loss_gap_percent"]["mean"]) <= bound}
        for e in summary
    ]


def main() -> None:
    """Trains the missing runs, and prints and writes the summary after each part."""
    parser = arguments(__doc__, "runs/optimizer")
    parser.set_defaults(size="tiny")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS)
    parser.add_argument("--b2", nargs="+", type=float, help="decay of second moments")
    parser.add_argument("--recipe", nargs="+", choices=RECIPES)
    parser.add_argument("--states", nargs="+", choices=[*SOUND, *FAULTS])
    parser.add_argument("--minutes", type=float, default=math.inf, help="then end; the same command goes on")
    options, text = parsed(parser)
    if "muon" in (options.optimizer or ()) and (faults := set(FAULTS) & set(options.states or ())):
        parser.error(f"--states {' '.join(sorted(faults))}: only --optimizer adamw has them")
    config = dataclasses.replace(SIZES[options.size], high_precision_last=0)
    notice = Notice(60 * options.minutes) if math.isfinite(options.minutes) else None
    summary: list[dict[str, Any]] = []
    for part in chosen(options):
        sides = [(run, config) for run in part.runs()]
        try:
            found = results_of(options, text, options.steps, sides, part.folder, notice=notice)
        except Preempted as error:
            sys.exit(f"{error} in {options.minutes} minutes: the same command goes on there")
        entries = judged(summarize(found, BASELINE))
        print(f"{part.optimizer}, b2 {part.b2}, {part.recipe}: bound {entries[0]['bound_percent']:.2f} %")
        print_gaps(entries)
        summary += [{"optimizer": part.optimizer, "b2": part.b2, "recipe": part.recipe, **entry} for entry in entries]
        settings = settings_of(options, config, found[0]["parameters"], text)
        write(options.save, {"settings": settings, "summary": summary})


if __name__ == "__main__":
    main()
