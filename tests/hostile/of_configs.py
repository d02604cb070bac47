"""Hostile configs: what config.json says of a decoder, and the regular expressions of its quantization_config."""

from __future__ import annotations

import functools
import json
import shutil

import numpy as np

from jaxlowprec.checkpoints import CheckpointError, decoders
from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, dequantize
from jaxlowprec.checkpoints.conversion.inspect import inspect
from jaxlowprec.cli.inspect import render
from jaxlowprec.models.decoder.config import DecoderConfig
from tests.checkpoints.small_models import CONFIG, write_checkpoint
from tests.hostile.mutation import NUMBERS
from tests.hostile.target import Target
from tests.models.decoder import tiny

TENSORS = {"model.norm.weight": np.ones(32, np.float32), "model.embed_tokens.weight": np.ones((40, 32), np.float32)}


def read_decoder(data, folder):
    """A config of any family: a decoder's, or refused; then a folder of two tensors, which holds no decoder."""
    source = folder / "model"
    if not source.exists():
        write_checkpoint(source, TENSORS, shards=1)
    (source / "config.json").write_bytes(data)
    found = DecoderConfig.of_folder(source)
    assert len(found.windows) == len(found.sparse) == found.layers
    hash(found)
    try:
        decoders.load(source)
    except ValueError:
        return
    raise AssertionError("two tensors are no decoder")


def change_config(mutator, data):
    """A size of the config that is another number; or any other change."""
    draw = mutator.random
    try:
        config = json.loads(data)
        sizes = [key for key, value in config.items() if type(value) is int]
    except (ValueError, AttributeError, RecursionError):
        return mutator.document(data)
    if not sizes or draw.random() < 0.5:
        return mutator.document(data)
    return json.dumps(config | {draw.choice(sizes): draw.choice((*NUMBERS, 1000, 16384))}).encode()


def decoder_seeds():
    return [json.dumps(tiny.config(family)).encode() for family in tiny.FAMILIES]


ATOMS = ("a", "!", ".", "a|a", "a|b", "[ab]", "[^b]", r"\w", r"\d", r"layers\.0", "mlp", r"\.", "", "(?=a)", r"(a)\1")
REPEATS = ("+", "*", "?", "+?", "*?", "{2,}", "{30}", "{1000}", "{99999999}", "{0,300}", "++")
ENDLESS = ("(a+)+$", "(a*)*$", "(a|a)*$", "(a+?)+c", "((a?)+)+$", "(a|aa)+$", "(.*.*)*c", r"(\w+a*)+$")
"""What takes an engine that tries all ways a time without end, on `LONG`."""

LONG = f"model.layers.0.mlp.{'a' * 64}!"
MODULES = (LONG, "model.layers.0.mlp.up", "model.layers.1.mlp.down", "lm_head")


def expression(draw):
    """A regular expression: atoms within repeated groups, as deep as those that take exponential time, or deeper."""
    if draw.random() < 0.4:
        return "re:" + draw.choice((r".*mlp\.", r"model\.layers\.0\.mlp\.")) + draw.choice(ENDLESS)
    text = draw.choice(ATOMS)
    for _ in range(draw.choice((0, 1, 2, 2, 3, 4, 60))):
        text = f"({text}{draw.choice(REPEATS)})" + draw.choice(("", draw.choice(REPEATS)))
        text += draw.choice(("", draw.choice(ATOMS)))
    before = draw.choice(("", "^", ".*", r"model\.layers\.0\.mlp\."))
    return "re:" + before + text * draw.choice((1, 1, 2, 20)) + draw.choice(("$", "c", ""))


def group(target, size):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": size, "strategy": "group"}
    return {"targets": [target], "weights": weights}


@functools.cache
def packed(size):
    """Each module's tensors in INT4 of a group size."""
    parts = {
        "weight_packed": np.zeros((8, 16), np.int32),
        "weight_scale": np.ones((8, 128 // size), np.float16),
        "weight_shape": np.array([8, 128]),
    }
    return {f"{module}.{name}": array for module in MODULES for name, array in parts.items()}


def read_patterns(data, folder):
    """A checkpoint of two schemes, whose modules are found by the expressions of its own config."""
    source = folder / "mixed"
    if not source.exists():
        write_checkpoint(source, packed(32), shards=1)
    (source / "config.json").write_bytes(data)
    try:
        render(inspect(source))
    finally:
        shutil.rmtree(folder / "high", ignore_errors=True)
        dequantize(source, folder / "high", options=ConvertOptions(workers=1))


def pattern_seeds():
    def seed(*targets, ignore=()):
        entry = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
        groups = {f"group_{i}": group(target, 32) for i, target in enumerate(targets)}
        return json.dumps({**CONFIG, "quantization_config": {**entry, "ignore": list(ignore), "config_groups": groups}})

    seeds = (
        seed(r"re:.*mlp\..*", "re:lm_head$"),
        seed(r"re:model\.layers\.\d+\.mlp\.[a!]+$", "Linear"),
        seed("Linear", ignore=("re:.*norm", "model.norm")),
    )
    return [text.encode() for text in seeds]


def change_patterns(mutator, data):
    """Other expressions as targets and in ignore; seldom any other change of the config."""
    draw = mutator.random
    try:
        config = json.loads(data)
        entry = config["quantization_config"]
        names = list(entry["config_groups"])
        if draw.random() < 0.2:
            return mutator.document(data)
        if draw.random() < 0.3:
            entry["ignore"] = [expression(draw) for _ in range(draw.choice((1, 2, 40)))]
        else:
            chosen = [expression(draw) for _ in range(draw.choice((1, 1, 2, 40)))]
            entry["config_groups"] = {"first": group("x", 64), **entry["config_groups"]}
            entry["config_groups"][draw.choice(("first", *names))]["targets"] = chosen
        return json.dumps(config).encode()
    except (ValueError, LookupError, TypeError, RecursionError, AttributeError):
        return mutator.document(data)


TARGETS = {
    "decoder_config": Target(read_decoder, decoder_seeds, (ValueError,), change_config),
    "patterns": Target(read_patterns, pattern_seeds, (CheckpointError,), change_patterns),
}
