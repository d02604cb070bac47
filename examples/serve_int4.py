"""Serves a model that train_lm.py trained with --recipe int4_qat in 4 bits; its logits are those of training.

    python examples/train_lm.py --recipe int4_qat --steps 200 --out runs/int4
    python examples/serve_int4.py --run runs/int4 --out runs/int4/served

The trained parameters are exported, written as a compressed-tensors checkpoint, whose weights vLLM, SGLang and
transformers can read, read back, and used for generation.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import jax
from flax import nnx
from lm.inference import generate, restored_model
from lm.model import Config, LanguageModel
from lm.names import DEMO

import jaxlowprec as jlp
from jaxlowprec import checkpoints

RUN = "int4_qat"


def arguments() -> argparse.Namespace:
    """Parses and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=pathlib.Path, required=True, help=f"--out of train_lm.py with --recipe {RUN}")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="new or empty folder for the 4-bit checkpoint")
    parser.add_argument("--prompt", default="def ", help="text to continue")
    parser.add_argument("--tokens", type=int, default=64, help="bytes to generate")
    options = parser.parse_args()
    if not (options.run / "report.json").exists() or not (options.run / RUN / "checkpoints").exists():
        parser.error(f"--run {options.run}: no finished run of train_lm.py --recipe {RUN}")
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out {options.out}: holds something already")
    if not options.prompt or options.tokens < 1:
        parser.error("--prompt needs a byte or more, --tokens 1 or more")
    return options


def trained_model(run: pathlib.Path, recipe: jlp.Int4QAT) -> LanguageModel:
    """The model of a run with its latest parameters, if this recipe trained it."""
    report = json.loads((run / "report.json").read_text())
    trained_with = next(r["recipe"] for r in report["runs"] if r["name"] == RUN)
    if trained_with != repr(recipe):
        raise SystemExit(f"{run} was trained with {trained_with}, the environment now says {recipe}")
    return restored_model(run, RUN)


def loaded_model(folder: pathlib.Path, config: Config) -> LanguageModel:
    """A model with the 4-bit kernels of a checkpoint, which needs no recipe."""
    model = nnx.eval_shape(lambda: LanguageModel(config, nnx.Rngs(0)))
    nnx.update(model, checkpoints.load(folder, model, DEMO))
    return model


def main() -> None:
    """Exports the model, saves it, loads it, generates with it, and compares the logits."""
    options = arguments()
    recipe = jlp.Int4QAT()
    trained = trained_model(options.run, recipe)
    print(f"{jlp.explain(trained, recipe)}\n")

    exported = jlp.quantize_params(trained, recipe)
    name = "w4a16" if recipe.symmetric else "w4a16_asym"
    scheme = checkpoints.schemes.by_name(name, group_size=recipe.group_size, scale_dtype=recipe.scale_dtype)
    checkpoints.save(
        options.out, exported, DEMO, {"model_type": "jaxlowprec-demo", "dtype": recipe.scale_dtype}, scheme=scheme
    )
    loaded = loaded_model(options.out, trained.config)

    prompt = options.prompt.encode()
    with jlp.autocast(recipe):
        _, expected, _ = generate(trained, prompt, options.tokens)
    text, actual, speed = generate(loaded, prompt, options.tokens)
    print(text.decode(errors="replace"))

    same = expected.tobytes() == actual.tobytes()
    before, after = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(state)) for state in (nnx.state(m) for m in (trained, exported))
    )
    print(f"\n{speed:,.0f} bytes/s; parameters {before / 2**20:.2f} MiB trained, {after / 2**20:.2f} MiB served")
    print(f"checkpoint: {options.out}")
    print(
        f"logits of {options.tokens} steps, trained with fake quantisation and loaded in 4 bits: "
        + ("identical bits" if same else "DIFFERENT")
    )
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
