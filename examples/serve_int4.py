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
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
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
    config = Config(**report["settings"]["config"])
    if config.experts:
        raise SystemExit(
            f"{run} was trained with --experts, which the demo's checkpoint has no names for; train without"
        )
    graph, parameters = nnx.split(LanguageModel(config, nnx.Rngs(0)), nnx.Param)
    item = {"parameters": parameters}
    wanted = ocp.args.PyTreeRestore(
        item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    with ocp.CheckpointManager((run / RUN / "checkpoints").absolute()) as manager:
        restored = manager.restore(manager.latest_step(), args=wanted)
    return nnx.merge(graph, restored["parameters"])


def loaded_model(folder: pathlib.Path, config: Config) -> LanguageModel:
    """A model with the 4-bit kernels of a checkpoint, which needs no recipe."""
    model = nnx.eval_shape(lambda: LanguageModel(config, nnx.Rngs(0)))
    nnx.update(model, checkpoints.load(folder, model, DEMO))
    return model


@nnx.jit
def logits_of(model: LanguageModel, tokens: jax.Array) -> jax.Array:
    """The logits at every place."""
    return model(tokens)


def generate(model: LanguageModel, prompt: bytes, count: int) -> tuple[bytes, np.ndarray, float]:
    """The most likely continuation, the logits [count, 256] that it was chosen by, and bytes per second."""
    context = model.config.context
    text, chosen_by, started = list(prompt), [], 0.0
    for _ in range(count):
        window = text[-context:]
        tokens = np.zeros((1, context), np.int32)  # always one shape; attention is causal: zeros are not seen
        tokens[0, : len(window)] = window
        chosen_by.append(np.asarray(logits_of(model, tokens)[0, len(window) - 1]))
        text.append(int(chosen_by[-1].argmax()))
        started = started or time.perf_counter()  # after compiling
    return bytes(text), np.stack(chosen_by), (count - 1) / max(time.perf_counter() - started, 1e-9)


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
