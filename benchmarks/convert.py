"""`jaxlowprec convert` against a plain copy of the same checkpoint: conversion should cost what its files cost.

    python benchmarks/convert.py [--mebibytes 1024] [--folder DIR] [--scheme w4a16 nvfp4]

The checkpoint is a Llama-like one of random bfloat16 weights. It is read once before anything is measured, so that both
sides read it from the page cache; both write to the same file system, into a new folder each time. The copy is `cp -r`,
once as it is and once followed by `sync` of its files, since a conversion puts its files on the disk before it gives
them their names. The conversion is measured in this process: starting Python and JAX is not part of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
from timing import save

from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, convert
from jaxlowprec.checkpoints.files.dtypes import file_dtype
from jaxlowprec.checkpoints.files.folder import CONFIG_FILE, CheckpointFolder, write_index
from jaxlowprec.checkpoints.files.safetensors_file import SafetensorsWriter
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.checkpoints.schemes import by_name

TARGET = 0.5


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model.

    Attributes:
        hidden, inner, vocabulary: features of the residual stream and of the MLP; tokens.
        key_heads: the features of keys and of values, as a share of `hidden`.
        head: whether it has a head of its own.
    """

    hidden: int
    inner: int
    vocabulary: int
    key_heads: float
    head: bool

    def tensors(self, layers: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors, by their Hugging Face names."""
        hidden, keys = self.hidden, round(self.key_heads * self.hidden)
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, hidden)}
        for layer in range(layers):
            at = f"model.layers.{layer}"
            found |= {f"{at}.self_attn.{p}_proj.weight": (hidden, hidden) for p in "qo"}
            found |= {f"{at}.self_attn.{p}_proj.weight": (keys, hidden) for p in "kv"}
            found |= {f"{at}.mlp.{p}_proj.weight": (self.inner, hidden) for p in ("gate", "up")}
            found |= {f"{at}.mlp.down_proj.weight": (hidden, self.inner)}
            found |= {f"{at}.{p}_layernorm.weight": (hidden,) for p in ("input", "post_attention")}
        found["model.norm.weight"] = (hidden,)
        return found | ({"lm_head.weight": (self.vocabulary, hidden)} if self.head else {})


SMALL = Shape(hidden=2048, inner=8192, vocabulary=8192, key_heads=0.25, head=False)
_SHARD_BYTES = 256 << 20


def layers_of(shape: Shape, mebibytes: int) -> int:
    """How many layers have about a size."""
    each = sum(2 * math.prod(s) for name, s in shape.tensors(1).items() if ".layers." in name)
    return max(1, (mebibytes << 20) // each)


def make_checkpoint(folder: pathlib.Path, shape: Shape, layers: int, shard_bytes: int = _SHARD_BYTES) -> None:
    """Writes one, in files of up to so many bytes."""
    shards: list[dict[str, TensorSpec]] = [{}]
    for name, size in shape.tensors(layers).items():
        spec = TensorSpec(file_dtype(ml_dtypes.bfloat16), size)
        if sum(s.nbytes for s in shards[-1].values()) + spec.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = spec
    random = np.random.default_rng(0)
    folder.mkdir()
    shard_of = {}
    for number, specs in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with SafetensorsWriter(folder / file, specs) as writer:
            for name, spec in specs.items():
                values = random.standard_normal(spec.shape, np.float32) * np.float32(0.02)
                writer.write(name, values.astype(ml_dtypes.bfloat16))
                shard_of[name] = file
    write_index(folder, shard_of, sum(spec.nbytes for specs in shards for spec in specs.values()))
    (folder / CONFIG_FILE).write_text(json.dumps({"model_type": "llama"}))


def seconds(action: Callable[[], object], made: pathlib.Path) -> float:
    """What it takes to make a folder, which is removed again."""
    os.sync()  # what earlier rounds have left to write is not this one's
    started = time.perf_counter()
    action()
    taken = time.perf_counter() - started
    shutil.rmtree(made)
    return taken


def measure(source: pathlib.Path, work: pathlib.Path, scheme: str, rounds: int, workers: int) -> dict[str, float]:
    """Medians of the sides, in turn, and of the ratios of each turn."""

    def copy() -> None:
        subprocess.run(["cp", "-r", source, work / "copy"], check=True)

    def copy_to_disk() -> None:
        copy()
        subprocess.run(["sync", *(work / "copy").iterdir(), work / "copy"], check=True)

    def ours() -> None:
        convert(source, work / "ours", by_name(scheme), options=ConvertOptions(workers=workers))

    seconds(ours, work / "ours")  # compiles, once a shape
    taken: dict[str, list[float]] = {"copy": [], "copy_to_disk": [], "ours": []}
    for _ in range(rounds):
        taken["copy"].append(seconds(copy, work / "copy"))
        taken["copy_to_disk"].append(seconds(copy_to_disk, work / "copy"))
        taken["ours"].append(seconds(ours, work / "ours"))
    found = {name: statistics.median(values) for name, values in taken.items()}
    for side in ("copy", "copy_to_disk"):
        ratios = [theirs / mine for theirs, mine in zip(taken[side], taken["ours"], strict=True)]
        found[f"ratio_to_{side}"] = statistics.median(ratios)
    return found


def main() -> None:
    """Measures and prints; writes benchmarks/results with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--folder", help="where to work (default: the folder for temporary files)")
    parser.add_argument("--scheme", nargs="+", default=["w4a16", "nvfp4", "mxfp4", "mxfp8", "fp8_block"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        work = pathlib.Path(folder)
        source = work / "source"
        make_checkpoint(source, SMALL, layers_of(SMALL, options.mebibytes))
        with CheckpointFolder(source) as opened:
            nbytes = opened.nbytes
        cases = []
        for scheme in options.scheme:
            found = measure(source, work, scheme, options.rounds, options.workers)
            cases.append({"scheme": scheme, "source_bytes": nbytes, "target": TARGET, **found})
            print(
                f"{scheme:10} {nbytes / 2**20:.0f} MiB  ours {found['ours']:.2f} s, cp {found['copy']:.2f} s "
                f"({found['ratio_to_copy']:.2f}x, target {TARGET}), cp to the disk {found['copy_to_disk']:.2f} s "
                f"({found['ratio_to_copy_to_disk']:.2f}x)",
                flush=True,
            )
        if options.save:
            save("convert", {"cases": cases})


if __name__ == "__main__":
    main()
