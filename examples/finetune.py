"""Fine-tunes a Hugging Face model on a text file in low precision, and exports it for servers.

    python examples/finetune.py --model DIR --recipe int4_qat --text FILE --out runs/int4
    python examples/finetune.py --model DIR --recipe qlora --text FILE --out runs/qlora --steps 500
    python examples/finetune.py --model DIR --recipe nvfp4 --export nvfp4 --text FILE --out runs/nvfp4

The model is a folder with config.json, safetensors files and tokenizer.json, of a family that docs/how-to/finetune.md
lists. The same command goes on from the latest checkpoint in --out. At the end there are

    OUT/export     a folder for vLLM, SGLang and transformers: INT4 (int4_qat), bfloat16 or NVFP4 (nvfp4), or bfloat16
                   with the adapters merged (qlora)
    OUT/adapters   the adapters in the form of the package peft (qlora)

and a text that is generated from OUT/export, loaded again.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib

import jax.numpy as jnp
from flax import nnx
from lm import finetuning
from lm.data import Batches
from lm.training import Schedule

import jaxlowprec as jlp
from jaxlowprec import checkpoints
from jaxlowprec.checkpoints import decoders
from jaxlowprec.checkpoints.tokens import encoded_file, tokens_of
from jaxlowprec.decoder import Decoder, DecoderConfig, Generator

RECIPES = ("int4_qat", "nvfp4", "qlora")
BASES = {"nvfp4": jlp.NVFP4(), "mxfp4": jlp.MXFP4(), "int4": jlp.Int4(32)}
LEARNING_RATES = {"int4_qat": 2e-5, "nvfp4": 2e-5, "qlora": 2e-4}
SETTINGS = "settings.json"
SHARE = 20  # the last 1 / SHARE of the text is for validation


def arguments() -> argparse.Namespace:
    """Parses and checks the command line; nothing is written before all of it is right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", type=pathlib.Path, required=True, metavar="DIR", help="a Hugging Face model folder")
    parser.add_argument("--recipe", choices=RECIPES, required=True)
    parser.add_argument("--text", type=pathlib.Path, required=True, metavar="FILE", help="what to learn, in UTF-8")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="windows in a step")
    parser.add_argument("--context", type=int, default=256, help="tokens in a window")
    parser.add_argument("--learning-rate", type=float, help=f"peak of the schedule; default: {LEARNING_RATES}")
    parser.add_argument("--seed", type=int, default=0, help="of the windows, and of new adapters")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of activations")
    parser.add_argument("--group-size", type=int, default=128, help="int4_qat: weights that share a scale")
    parser.add_argument("--export", choices=("bf16", "nvfp4"), default="bf16", help="nvfp4: the format of the export")
    parser.add_argument("--base", choices=BASES, default="nvfp4", help="qlora: format of the frozen kernels")
    parser.add_argument("--rank", type=int, default=16, help="qlora: rank of the adapters")
    parser.add_argument("--alpha", type=float, default=32.0, help="qlora: strength of the adapters, times the rank")
    parser.add_argument("--prompt", default="The ", help="beginning of the generated text")
    parser.add_argument("--tokens", type=int, default=32, help="length of the generated text")
    options = parser.parse_args()
    if min(options.steps, options.batch, options.context, options.checkpoint_every, options.rank, options.tokens) < 1:
        parser.error("--steps, --batch, --context, --checkpoint-every, --rank and --tokens need 1 or more")
    options.learning_rate = LEARNING_RATES[options.recipe] if options.learning_rate is None else options.learning_rate
    if min(options.alpha, options.learning_rate) <= 0:
        parser.error("--alpha and --learning-rate need a positive number")
    if not options.text.is_file():
        parser.error(f"--text {options.text}: no such file")
    try:
        check(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def check(options: argparse.Namespace) -> None:
    """Reads the model's config, the tokenizer and the text. Raises ValueError if they do not fit the options."""
    config = options.config = DecoderConfig.of_folder(options.model)
    if options.context > config.longest:
        raise ValueError(f"--context {options.context}: the model was made for {config.longest} tokens or fewer")
    options.quantized = bool(json.loads((options.model / "config.json").read_text()).get("quantization_config"))
    if options.quantized and options.recipe != "qlora":
        raise ValueError(
            f"--model {options.model}: its weights are quantised, and --recipe {options.recipe} trains weights; use "
            "--recipe qlora, or decode them first: jaxlowprec dequantize"
        )
    if options.recipe == "int4_qat" and config.family == "gpt_oss":
        raise ValueError(
            f"--recipe int4_qat: no format has INT4 experts of {config.family}, whose files hold them in whole arrays; "
            "use --recipe nvfp4 or qlora"
        )
    group, widths = {"int4_qat": options.group_size}.get(options.recipe, 1), config.widths
    if group < 1 or (unfit := [width for width in sorted(widths) if width % group]):
        raise ValueError(f"--group-size {group}: needs a divisor of the model's widths {sorted(widths)}, not {unfit}")
    options.vocabulary = tokens_of(options.model, config.vocabulary)
    prompt = options.vocabulary.encode(options.prompt)
    if not prompt or len(prompt) + options.tokens > config.longest:
        raise ValueError(
            f"--prompt and --tokens: need 1 to {config.longest} tokens together, and one or more of --prompt"
        )
    least = SHARE * (options.context + 2)
    options.encoded = encoded_file(options.text, options.vocabulary, config.vocabulary, least)
    for name in ("export", "adapters", "bf16"):
        if (options.out / name).exists():
            raise ValueError(f"--out {options.out}: has a finished {name}; choose another --out")
    said, file = settings(options), options.out / SETTINGS
    if file.exists() and (before := json.loads(file.read_text())) != said:
        changed = [key for key in said if before.get(key) != said[key]]
        raise ValueError(
            f"--out {options.out}: was begun with other settings ({', '.join(changed)}); use those, or another --out"
        )
    place = next(path for path in (options.out, *options.out.absolute().parents) if path.exists())
    if not place.is_dir():
        raise ValueError(f"--out {options.out}: {place} is not a folder; choose another --out")
    if not file.exists() and options.out.exists() and any(options.out.iterdir()):
        raise ValueError(f"--out {options.out}: holds something that is not a run of finetune.py; choose another --out")


def settings(options: argparse.Namespace) -> dict[str, str]:
    """What a resumed run must have in common with the one before."""
    names = ["recipe", "steps", "batch", "context", "learning_rate", "seed", "dtype"]
    names += {"int4_qat": ["group_size"], "nvfp4": [], "qlora": ["base", "rank", "alpha"]}[options.recipe]
    paths = {name: str(getattr(options, name).resolve()) for name in ("model", "text")}
    return paths | {name: str(getattr(options, name)) for name in names}


def main() -> None:
    """Loads, trains, exports, loads the export, and generates."""
    options = arguments()
    recipe, wanted = recipe_of(options), nnx.Param
    decoder = loaded(options)
    if options.recipe == "qlora":
        wanted = nnx.LoRAParam
        decoder = decoder if options.quantized else jlp.quantize_params(decoder, jlp.WeightQAT(BASES[options.base]))
        decoder = jlp.nnx.add_lora(decoder, rank=options.rank, alpha=options.alpha, rngs=nnx.Rngs(options.seed))
    print(f"{jlp.explain(decoder, recipe)}\n")
    schedule = Schedule(options.steps, options.learning_rate, options.batch, options.seed, options.checkpoint_every)
    batches = Batches(options.encoded, options.batch, options.context, options.seed)
    before = finetuning.validation_loss(decoder, recipe, batches)
    if not math.isfinite(before):
        raise SystemExit(
            f"finetune.py: error: --model {options.model}: its loss on the text is {before} before training; needs "
            "weights without NaN and infinity, and, if they have none, --dtype float32"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / SETTINGS).write_text(json.dumps(settings(options), indent=2) + "\n")
    finetuning.train(decoder, wanted, recipe, batches, schedule, options.out)
    after = finetuning.validation_loss(decoder, recipe, batches)
    print(f"loss on text that was not trained on: {before:.3f} before, {after:.3f} after")
    write(options, decoder, recipe)
    print(f"\nexport: {options.out / 'export'}\n\n{sample(options)}")


def loaded(options: argparse.Namespace) -> Decoder:
    """The model. Ends the program if its files are missing or wrong: nothing has been written yet."""
    try:
        return decoders.load(options.model, dtype=options.dtype)
    except ValueError as error:
        raise SystemExit(f"finetune.py: error: {error}") from None


def recipe_of(options: argparse.Namespace) -> jlp.Recipe | None:
    """The recipe of the products that are trained."""
    if options.recipe == "int4_qat":
        return jlp.Int4QAT(group_size=options.group_size, symmetric=True, scale_dtype="bfloat16", ste="identity")
    return jlp.NVFP4BlockScaling() if options.recipe == "nvfp4" else None


def write(options: argparse.Namespace, decoder: Decoder, recipe: jlp.Recipe | None) -> None:
    """Writes the folders that the recipe ends with."""
    out = options.out
    if options.recipe == "int4_qat":
        scheme = checkpoints.schemes.by_name("w4a16", group_size=options.group_size)
        decoders.export(options.model, out / "export", jlp.quantize_params(decoder, recipe), scheme)
    elif options.recipe == "qlora":
        decoders.export_adapters(options.model, out / "adapters", decoder, options.rank, options.alpha)
        decoders.export(options.model, out / "export", jlp.nnx.merge_lora(decoder))
    elif options.export == "bf16":
        decoders.export(options.model, out / "export", decoder)
    else:
        decoders.export(options.model, out / "bf16", decoder)
        checkpoints.convert(out / "bf16", out / "export", checkpoints.schemes.by_name("nvfp4"))


def sample(options: argparse.Namespace) -> str:
    """A text that the exported model continues."""
    decoder = decoders.load(options.out / "export", dtype=options.dtype, param_dtype=jnp.bfloat16)
    prompt = options.vocabulary.encode(options.prompt)
    written = Generator(decoder, len(prompt) + options.tokens)([prompt], options.tokens)
    return options.prompt + options.vocabulary.decode(written.tokens[0])


if __name__ == "__main__":
    main()
