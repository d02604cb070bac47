"""A training step of the example's model: under each recipe against the same model in plain Flax, bf16 and f32.

python benchmarks/train_step.py
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import pathlib
import sys

import jax
import optax
from flax import nnx
from timing import alternate, save

import jaxlowprec as jlp

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from lm.data import Batches, read_text  # noqa: E402
from lm.model import SIZES, LanguageModel  # noqa: E402
from lm.training import Schedule, make_steps, optimizer  # noqa: E402

RECIPES = {
    "NVFP4": jlp.NVFP4BlockScaling(),
    "MXFP8": jlp.MXFP8BlockScaling(),
    "FP8 block": jlp.Float8BlockScaling(),
    "FP8 current": jlp.Float8CurrentScaling(),
    "FP8 delayed": jlp.DelayedScaling(),
    "FP8 rows": jlp.Float8RowScaling(),
    "INT8 rows": jlp.Int8RowScaling(),
    "NVFP4Eden 16x16": jlp.NVFP4Eden("16x16"),
    "NVFP4Eden": jlp.NVFP4Eden(),
}
PLAIN = ("bfloat16", "float32")  # the types of the model in plain Flax
AGAINST_BFLOAT16 = {"INT8 rows": 1.5}  # the target for processors with AVX-512
AGAINST_NVFP4 = {"NVFP4Eden 16x16": 0.91, "NVFP4Eden": None}  # these against the default recipe, with their targets


class Stepper:
    """A model in training: each call is one step."""

    def __init__(self, config, linear, batches: Batches):
        schedule = Schedule(steps=10_000, learning_rate=1e-3, batch=batches.batch, seed=0, checkpoint_every=10_000)
        graph, self.parameters = nnx.split(LanguageModel(config, nnx.Rngs(0), linear), nnx.Param)
        transformation: optax.GradientTransformation = optimizer(schedule)
        self.state = transformation.init(self.parameters)
        self.step, _ = make_steps(graph, transformation)
        self.tokens = batches.train(0)

    def __call__(self) -> jax.Array:
        self.parameters, self.state, loss = self.step(self.parameters, self.state, self.tokens)
        return loss


def main() -> None:
    """Measures all in turn and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, nargs="+", default=["demo", "small"])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    text, found = read_text(None), []
    for size in options.size:
        config = SIZES[size]
        batches = Batches(text, 8, config.context, 0)
        plain = {dtype: Stepper(dataclasses.replace(config, dtype=dtype), nnx.Linear, batches) for dtype in PLAIN}
        sides = dict(plain)
        for name, recipe in RECIPES.items():
            with jlp.autocast(recipe):
                sides[name] = Stepper(config, jlp.nnx.Linear, batches)

        def under(name, sides=sides):
            with jlp.autocast(RECIPES[name]) if name in RECIPES else contextlib.nullcontext():
                return sides[name]()

        seconds = alternate({name: functools.partial(under, name) for name in sides}, options.rounds)
        targets = {"bfloat16": AGAINST_BFLOAT16, "float32": {}}
        pairs = [(name, other, f"plain Flax, {other}", targets[other].get(name)) for name in RECIPES for other in PLAIN]
        pairs += [(name, "NVFP4", "NVFP4", target) for name, target in AGAINST_NVFP4.items()]
        for name, other, against, target in pairs:
            ratio = {k: seconds[other][k] / seconds[name][k] for k in ("median", "min")}
            case = {"size": size, "recipe": name, "against": against, "target": target, "ratio": ratio}
            found.append(case | {"ours": seconds[name], "theirs": seconds[other]})
            ours, theirs = (1e3 * seconds[side]["median"] for side in (name, other))
            print(
                f"{size:8} {name:16} {ours:.0f} ms, {against} {theirs:.0f} ms: "
                f"{ratio['median']:.2f}x (min {ratio['min']:.2f}x{f', target {target}x' if target else ''})",
                flush=True,
            )
    if options.save:
        print(save("train_step", {"cases": found}))


if __name__ == "__main__":
    main()
