"""Finds which GEMMs of the demo model to keep in bf16, and trains by that beside "the last block in bf16".

    python examples/policy_study.py --out runs/policy    # half an hour on 2 cores; resumes where it was stopped

Both keep the same share of the multiply-adds in bf16. The policy is found on a model that was trained in bf16 for a
while, with other initial parameters and other data than the runs. Gaps are those of training_study.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib

from flax import nnx
from lm.data import Batches, read_text
from lm.model import SIZES, loss
from lm.report import add_gaps
from lm.training import ONE_DEVICE, Run, Schedule, initial_parameters, make_steps, optimizer, train
from train_lm import RECIPES
from training_study import BASELINES, settings_of, summarize

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
        options.budget,
        path=options.out / "policy.jsonl",
    )


def main() -> None:
    """Finds the policy, trains the missing runs, and prints and writes the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=200, help="steps in bf16 before the policy is found")
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--text", help="file or folder to learn from; default: Python's standard library")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/policy"))
    parser.add_argument("--save", type=pathlib.Path, help="file for the results")
    options = parser.parse_args()
    last_block = SIZES[options.size]
    everywhere, text = dataclasses.replace(last_block, high_precision_last=0), read_text(options.text)
    options.budget = last_block.high_precision_last / last_block.layers
    options.out.mkdir(parents=True, exist_ok=True)

    policy = found_policy(everywhere, text, options)
    print(policy, policy.recipe, sep="\n\n")
    nvfp4 = RECIPES["nvfp4"]()
    trained = [*((run, everywhere) for run in BASELINES), (Run("nvfp4, last block bf16", nvfp4), last_block)]
    trained += [(Run("nvfp4, found policy", policy.recipe), everywhere), (Run("nvfp4", nvfp4), everywhere)]
    found = []
    for seed in range(options.seeds):
        schedule = Schedule(options.steps, options.learning_rate, options.batch, seed, checkpoint_every=options.steps)
        results = []
        for run, config in trained:
            path = options.out / f"{options.steps}-{seed}-{run.name.replace(', ', '-').replace(' ', '-')}"
            if not (path / "result.json").exists():
                batches = Batches(text, options.batch, config.context, seed)
                result = train(run, config, schedule, batches, path, resume=False)
                (path / "result.json").write_text(json.dumps(result))
            results.append(json.loads((path / "result.json").read_text()))
        add_gaps(results)
        found += [{"steps": options.steps, "seed": seed, **result} for result in results]
    summary = summarize(found)
    for entry in summary:
        gap, validation = entry["loss_gap_percent"], entry["validation_loss_gap_percent"]
        print(f"{entry['run']:24} loss {gap['mean']:+.3f} %  validation {validation['mean']:+.3f} %", gap["by_seed"])
    if options.save:
        content = {
            "settings": settings_of(options, everywhere, found[0]["parameters"], text),
            "rules": str(policy.recipe),
            "cost": policy.cost,
            "effects": {"nvfp4": dataclasses.asdict(policy.quantized), "found": dataclasses.asdict(policy.found)},
            "table": [dataclasses.asdict(row) for row in policy.table],
            "summary": summary,
        }
        options.save.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
