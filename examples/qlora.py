"""QLoRA: teaches a model that train_lm.py trained another text, its kernels frozen in 4 bits, and serves the result.

    python examples/train_lm.py --recipe bf16 --steps 400 --out runs/base
    python examples/qlora.py --run runs/base

Only the low-rank adapters are trained. Then the model is served in three ways: in 4 bits with the adapters beside the
kernels, with the adapters merged into high-precision kernels, and with the merged kernels quantised again.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from lm.data import Batches, read_text
from lm.inference import generate, logits_of, restored_model
from lm.model import LanguageModel, loss
from tqdm import tqdm

import jaxlowprec as jlp

RUN = "bf16"
FORMATS = {"nvfp4": jlp.NVFP4(), "mxfp4": jlp.MXFP4(), "int4": jlp.Int4(32)}
VALIDATION = 16  # batches
ROUNDING = 0.02  # of the largest logit: activations are bfloat16


def arguments() -> argparse.Namespace:
    """Parses and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=pathlib.Path, required=True, help=f"--out of train_lm.py with --recipe {RUN}")
    english = pathlib.Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
    parser.add_argument("--text", default=str(english), help="file or folder to learn; default: Python's help texts")
    parser.add_argument("--format", choices=FORMATS, default="nvfp4", help="of the frozen kernels")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    parser.add_argument("--alpha", type=float, default=16, help="strength of the adapters, divided by the rank")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="windows of the context's length in a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--prompt", default="The ", help="text to continue")
    parser.add_argument("--tokens", type=int, default=64, help="bytes to generate")
    options = parser.parse_args()
    if not (options.run / "report.json").exists() or not (options.run / RUN / "checkpoints").exists():
        parser.error(f"--run {options.run}: no finished run of train_lm.py --recipe {RUN}")
    if min(options.rank, options.steps, options.batch, options.tokens, len(options.prompt)) < 1:
        parser.error("--rank, --steps, --batch and --tokens need 1 or more, --prompt a byte or more")
    if min(options.alpha, options.learning_rate) <= 0:
        parser.error("--alpha and --learning-rate need a positive number")
    return options


def train(model: LanguageModel, batches: Batches, steps: int, learning_rate: float) -> list[float]:
    """Trains the adapters alone; the losses."""
    rate = optax.cosine_decay_schedule(learning_rate, steps)
    optimizer = nnx.Optimizer(model, optax.adamw(rate, b2=0.95), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer, tokens):
        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, tokens)
        optimizer.update(model, gradients)
        return value

    losses = []
    for i in tqdm(range(steps), desc="adapters", disable=not sys.stderr.isatty()):
        losses.append(float(step(model, optimizer, batches.train(i))))
    return losses


@nnx.jit
def _validation_loss(model: LanguageModel, tokens: jax.Array) -> jax.Array:
    return loss(model, tokens)


def validation_loss(model: LanguageModel, batches: Batches) -> float:
    """The mean loss on text that is not trained on."""
    return float(np.mean([_validation_loss(model, tokens) for tokens in batches.validate(VALIDATION)]))


def mebibytes(model: LanguageModel) -> float:
    """The size of the model's arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))) / 2**20


def main() -> None:
    """Quantises the trained model, trains adapters, merges them, and compares."""
    options = arguments()
    recipe = jlp.WeightQAT(FORMATS[options.format])
    trained = jlp.nnx.convert(restored_model(options.run, RUN))
    batches = Batches(read_text(options.text), options.batch, trained.config.context, seed=0)

    base = jlp.quantize_params(trained, recipe)
    size, first_loss = mebibytes(base), validation_loss(base, batches)
    model = jlp.nnx.add_lora(base, rank=options.rank, alpha=options.alpha, rngs=nnx.Rngs(1))
    print(f"{jlp.explain(model, None)}\n")
    train(model, batches, options.steps, options.learning_rate)
    merged = jlp.nnx.merge_lora(model)
    served = {
        f"{options.format}, adapters applied": model,
        "adapters merged": merged,
        f"merged, {options.format} again": jlp.quantize_params(merged, recipe),
    }

    tokens = next(iter(batches.validate(1)))[:, :-1]
    expected = logits_of(model, tokens)
    print(f"{'':28}{'MiB':>8}{'loss':>8}{'logits differ by':>18}")
    print(f"{options.format + ', before':28}{size:8.2f}{first_loss:8.3f}")
    differences = []
    for name, one in served.items():
        differences.append(float(jnp.abs(logits_of(one, tokens) - expected).max() / jnp.abs(expected).max()))
        print(f"{name:28}{mebibytes(one):8.2f}{validation_loss(one, batches):8.3f}{differences[-1]:18.2%}")
    text, _, speed = generate(model, options.prompt.encode(), options.tokens)
    print(f"\n{text.decode(errors='replace')}\n\n{speed:,.0f} bytes/s with adapters applied")
    if differences[1] > ROUNDING:
        raise SystemExit(f"the merged model's logits differ by {differences[1]:.2%}; rounding explains {ROUNDING:.0%}")


if __name__ == "__main__":
    main()
