"""What calibration is worth: the perplexity of a small model in bfloat16, converted plainly, and calibrated.

    python benchmarks/calibration.py [--steps 2000] [--schemes w4a16 w4a16_asym nvfp4]

A Llama-like model of bytes is trained on the pages of docs/, and calibrated by the same text. The last tenth of that
text is neither trained on nor calibrated by: perplexities are those of its bytes.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from recorded import ROOT
from timing import save

from jaxlowprec import checkpoints
from jaxlowprec.checkpoints.calibration import Calibration, Method
from jaxlowprec.checkpoints.conversion.convert import convert, scheme_for
from jaxlowprec.checkpoints.decoders import load, mapping_of
from jaxlowprec.decoder import Decoder, DecoderConfig, loss

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CONTEXT, BATCH, RATE = 128, 8, 3e-3
METHODS = {"search": Method(feedback=False), "feedback": Method(search=False), "search and feedback": Method()}


def corpus() -> str:
    """The pages of docs/, one after the other."""
    return "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))


def trained(text: str, steps: int, seed: int = 0) -> Decoder:
    """A decoder that was trained on all but the last tenth of a text's bytes."""
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    tokens = tokens[: -(len(tokens) // 10)]
    decoder = Decoder(DecoderConfig.of(MODEL), rngs=nnx.Rngs(seed))
    graph, state = nnx.split(decoder)
    transformation = optax.adam(optax.cosine_decay_schedule(RATE, steps))
    moments = transformation.init(state)

    @jax.jit(donate_argnums=(0, 1))
    def step(state: Any, moments: Any, rows: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(lambda state: loss(nnx.merge(graph, state), rows)[0])(state)
        updates, moments = transformation.update(gradients, moments)
        return optax.apply_updates(state, updates), moments, value

    random = np.random.default_rng(seed)
    for number in range(steps):
        begins = random.integers(0, len(tokens) - CONTEXT - 1, BATCH)
        state, moments, value = step(state, moments, np.stack([tokens[b : b + CONTEXT + 1] for b in begins]))
        if number % 50 == 0:
            print(f"step {number}: loss {float(value):.3f}", flush=True)
    nnx.update(decoder, state)
    return decoder


def held_out_perplexity(folder: pathlib.Path, text: str) -> tuple[float, int]:
    """The perplexity of a folder's decoder on the last tenth of a text, and the number of tokens."""
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    last = tokens[-(len(tokens) // 10) :]
    rows = np.stack([last[i : i + CONTEXT + 1] for i in range(0, len(last) - CONTEXT, CONTEXT)])
    graph, state = nnx.split(load(folder))
    value = jax.jit(lambda state, rows: loss(nnx.merge(graph, state), rows)[1])
    return float(np.exp(np.mean([value(state, row[None]) for row in rows]))), rows.size - len(rows)


def main() -> None:
    """Trains, converts, measures and writes benchmarks/results/calibration.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--schemes", nargs="+", default=["w4a16", "w4a16_asym", "nvfp4"])
    options = parser.parse_args()
    text = corpus()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        root = pathlib.Path(made)
        decoder = trained(text, options.steps)
        checkpoints.save(root / "bf16", decoder, mapping_of(decoder.config), MODEL, dtype=jnp.bfloat16)
        (root / "text").write_text(text)
        before, tokens = held_out_perplexity(root / "bf16", text)
        rows.append({"scheme": "bf16", "way": "", "perplexity": before})
        for name in options.schemes:
            scheme = scheme_for(root / "bf16", name)
            for way, method in {"plain": None, **METHODS}.items():
                to = root / f"{name} {way}"
                calibration = None if method is None else Calibration(root / "text", context=CONTEXT, method=method)
                report = convert(root / "bf16", to, scheme, calibration=calibration)
                errors = None if report.calibrated is None else float(np.mean(report.calibrated.layer_errors))
                found = held_out_perplexity(to, text)[0]
                rows.append({"scheme": name, "way": way, "perplexity": found, "layer_error": errors})
                print(json.dumps(rows[-1]), flush=True)
    settings = {"steps": options.steps, "batch": BATCH, "context": CONTEXT, "calibration_rows": Calibration.rows}
    save("calibration", {"model": MODEL, "settings": settings, "held_out_tokens": tokens, "rows": rows})


if __name__ == "__main__":
    main()
