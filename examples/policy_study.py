"""Finds which GEMMs of the demo model to keep in bf16, and trains by that beside "the last block in bf16".

    python examples/policy_study.py --out runs/policy    # half an hour on 2 cores; resumes where it was stopped

Both keep the same share of the multiply-adds in bf16. The policy is found on a model that was trained in bf16 for a
while, with other initial parameters and other data than the runs. Gaps are those of training_study.py.
"""

from __future__ import annotations

import argparse
import dataclasses

from flax import nnx
from lm.data import Batches
from lm.model import SIZES, loss
from lm.recipes import RECIPES
from lm.study import BASELINES, arguments, parsed, print_gaps, results_of, settings_of, summarize, write
from lm.training import ONE_DEVICE, Run, Schedule, initial_parameters, make_steps, optimizer

import jaxlowprec as jlp

SEED = 1000  # of the model that the policy is found on
BATCHES = 4


def found_policy(config, text, options: argparse.Namespace) -> jlp.Policy:
    """The policy, by measurements on a model that was trained for some steps."""
    schedule = Schedule(options.steps, options.learning_rate, options.batch, SEED, checkpoint_every=options.steps)
    batches = Batches(text, options.batch, config.context, SEED)
    transformation = optimizer(schedule)
    graph, parameters = initial_parameters(config, Run("bf16"), SEED, ONE_DEVICE)
    state = transformation.init(parameters)
    step, _ = make_steps(graph, transformation)
    for number in range(options.warm_up):
        parameters, state, _ = step(parameters, state, batches.train(number))
    held_out = [batches.train(options.warm_up + i) for i in range(BATCHES)]
    return jlp.find_policy(
        lambda parameters, tokens: loss(nnx.merge(graph, parameters), tokens),
        parameters,
        held_out,
        RECIPES["nvfp4"](),
        budget=options.budget,
        path=options.out / "policy.jsonl",
    )


def main() -> None:
    """Finds the policy, trains the missing runs, and prints and writes the summary."""
    parser = arguments(__doc__, "runs/policy")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warm-up", type=int, default=200, help="steps in bf16 before the policy is found")
    options, text = parsed(parser)
    last_block = SIZES[options.size]
    everywhere = dataclasses.replace(last_block, high_precision_last=0)
    options.budget = last_block.high_precision_last / last_block.layers

    policy = found_policy(everywhere, text, options)
    print(policy, policy.recipe, sep="\n\n")
    nvfp4 = RECIPES["nvfp4"]()
    sides = [*((run, everywhere) for run in BASELINES), (Run("nvfp4, last block bf16", nvfp4), last_block)]
    sides += [(Run("nvfp4, found policy", policy.recipe), everywhere), (Run("nvfp4", nvfp4), everywhere)]
    found = results_of(options, text, options.steps, sides)
    summary = summarize(found)
    print_gaps(summary)
    effects = {"nvfp4": policy.quantized, "found": policy.found}
    content = {
        "settings": settings_of(options, everywhere, found[0]["parameters"], text),
        "rules": str(policy.recipe),
        "cost": policy.cost,
        "effects": {name: dataclasses.asdict(effect) for name, effect in effects.items()},
        "table": [dataclasses.asdict(row) for row in policy.table],
        "summary": summary,
    }
    write(options.save, content)


if __name__ == "__main__":
    main()
