"""Trains a small byte-level language model under one or more recipes and compares them with bf16.

    python examples/train_lm.py --recipe bf16,nvfp4 --steps 400 --out runs/demo
    python examples/train_lm.py --recipe bf16,nvfp4,nvfp4:0.8:nvfp4-bf16-forward    # bf16 forward passes from 80 % on
    python examples/train_lm.py --experts 8 --top-k 2               # a mixture of experts in each block
    python examples/train_lm.py --states 8-bit-masters-24          # AdamW's states in 8 bits, weights in 24
    python examples/train_lm.py --mesh data=2,fsdp=2,tensor=2      # over eight devices

SIGTERM saves a run after the step in progress and ends it; --resume continues it, on any mesh.

Every comparison with bf16 includes the noise floor: a second bf16 run whose initial parameters differ by 1e-4.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib

import jax
from lm import mesh, processes
from lm.data import Batches, read_text
from lm.model import SIZES
from lm.optimizers import FAULTS, STATES, Optimizer
from lm.preemption import Notice, Preempted
from lm.recipes import NEEDS, run_named
from lm.report import add_gaps, table, write
from lm.training import Schedule, train

PREEMPTED = "exit code of a run that SIGTERM has ended, for schedulers that take 0 for a run that is done"
KEPT = "how AdamW keeps its states, and masters the weights of matrices, in all runs"
TELEMETRY = "record what quantisation does every so many steps (default 10), for jaxlowprec report and watch"


def arguments() -> argparse.Namespace:
    """Parses and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="bf16,nvfp4", help=f"with commas, each {NEEDS}")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--batch", type=int, default=8, help="windows of the context's length in a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak of the schedule")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial parameters and the data's order")
    parser.add_argument(
        "--states", choices=[name for name in STATES if name not in FAULTS], default="float32", help=KEPT
    )
    parser.add_argument("--bf16-first", type=int, default=0, help="blocks kept in bf16 at the input's end")
    parser.add_argument("--bf16-last", type=int, default=1, help="blocks kept in bf16 at the output's end")
    parser.add_argument("--experts", type=int, default=0, help="experts in each block, instead of its MLP")
    parser.add_argument("--top-k", type=int, default=2, help="experts that each byte goes to")
    parser.add_argument("--text", help="file or folder to learn from; default: Python's standard library")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/train_lm"))
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints in --out")
    parser.add_argument("--checkpoint-every", type=int, default=200, help="steps")
    parser.add_argument("--preempted-exit-code", type=int, default=0, metavar="CODE", help=PREEMPTED)
    parser.add_argument("--telemetry", type=int, nargs="?", const=10, default=0, metavar="STEPS", help=TELEMETRY)
    parser.add_argument("--mesh", help="sizes such as data=2,fsdp=2,tensor=2; a CPU is divided into so many devices")
    parser.add_argument("--sequence-parallel", action="store_true", help="split activations along time over tensor too")
    parser.add_argument("--no-noise-floor", action="store_true", help="leave out the second bf16 run")
    processes.add_arguments(parser)
    options = parser.parse_args()
    names = options.recipe.split(",")
    if options.steps < 1 or options.batch < 1 or options.checkpoint_every < 1:
        parser.error("--steps, --batch and --checkpoint-every need 1 or more")
    if options.telemetry < 0:
        parser.error(f"--telemetry {options.telemetry}: needs 1 or more")
    if options.bf16_first < 0 or options.bf16_last < 0:
        parser.error("--bf16-first and --bf16-last need 0 or more")
    if options.experts < 0 or (options.experts and not 1 <= options.top_k <= options.experts):
        parser.error(f"--experts {options.experts} --top-k {options.top_k}: needs 1 <= top-k <= experts")
    if options.sequence_parallel and not options.mesh:
        parser.error("--sequence-parallel needs --mesh with tensor=N")
    if not options.resume and list(options.out.glob("*/checkpoints/[0-9]*")):
        parser.error(f"--out {options.out}: has checkpoints; --resume goes on from them, another --out starts anew")
    options.config = dataclasses.replace(
        SIZES[options.size],
        high_precision_first=options.bf16_first,
        high_precision_last=options.bf16_last,
        experts=options.experts,
        top_k=options.top_k,
    )
    try:
        runs = [run_named(name, options.steps) for name in names]
    except ValueError as error:
        parser.error(f"--recipe {error}")
    options.runs = [dataclasses.replace(run, optimizer=Optimizer(states=options.states)) for run in runs]
    try:
        processes.check(options)
        options.layout = layout(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def layout(options: argparse.Namespace) -> mesh.Layout:
    """Where arrays are placed, from --mesh; a CPU is divided into as many virtual devices. Joins other processes."""
    if not options.mesh:
        return mesh.ONE_DEVICE
    sizes = mesh.parse(options.mesh)
    mesh.check(sizes, options.config, options.batch, options.sequence_parallel)
    processes.start(options, math.prod(sizes.values()))
    return mesh.Layout(mesh.make_mesh(sizes), options.sequence_parallel)


def main() -> None:
    """Trains all runs, compares them and writes the report."""
    options = arguments()
    notice = Notice()
    notice.listen()
    config, where = options.config, options.layout
    schedule = Schedule(
        options.steps,
        options.learning_rate,
        options.batch,
        options.seed,
        options.checkpoint_every,
        telemetry_every=options.telemetry,
    )
    batches = Batches(read_text(options.text), options.batch, config.context, options.seed, where.rows(options.batch))
    runs, names = list(options.runs), [run.name for run in options.runs]
    if "bf16" in names and len(runs) > 1 and not options.no_noise_floor:
        bf16 = names.index("bf16")
        runs.insert(bf16 + 1, dataclasses.replace(runs[bf16], name="bf16 perturbed", perturbation=1e-4))
    first = jax.process_index() == 0
    if first:
        print(f"jaxlowprec on {jax.default_backend()}, jax {jax.__version__}: {config}")
    with processes.naming_the_dead(options):
        try:
            results = [
                train(run, config, schedule, batches, options.out / run.folder, options.resume, where, notice)
                for run in runs
            ]
        except Preempted as preempted:
            if first:
                print(f"\npreempted: {preempted}. The same command, with --resume, continues from there.")
            raise SystemExit(options.preempted_exit_code) from None
    if not first:
        return
    add_gaps(results)
    print("\n" + table(results))
    settings = {"config": dataclasses.asdict(config), "schedule": dataclasses.asdict(schedule), "jax": jax.__version__}
    settings["states"] = options.states
    write(results, settings, options.out)
    print(f"\nreport: {options.out / 'report.json'}   picture: {options.out / 'loss.png'}")
    if options.telemetry:
        named = [str(options.out / run.folder) for run in options.runs]
        floor = [f"--noise-floor {options.out / run.folder}" for run in runs if run.perturbation]
        print("telemetry: jaxlowprec report", *named, *floor)


if __name__ == "__main__":
    main()
