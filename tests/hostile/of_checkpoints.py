"""Hostile checkpoints: headers, indices, configs and weights."""

import json
import pathlib
import shutil
import tempfile

import ml_dtypes
import numpy as np

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, convert, dequantize
from jaxlowprec.checkpoints.conversion.inspect import inspect
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.config import with_quantization
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.files.safetensors_file import SafetensorsFile
from jaxlowprec.checkpoints.files.safetensors_header import LENGTH_BYTES
from jaxlowprec.cli.inspect import render
from tests.checkpoints.small_models import CONFIG, write_checkpoint
from tests.hostile.target import Target

MODULES = ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj")
SCHEMES = {
    "w4a16": {"group_size": 32},
    "nvfp4": {},
    "mxfp4": {},
    "mxfp8": {},
    "fp8_block": {},
    "fp8_channel": {},
    "fp8_tensor": {"activations": "static"},
    "int8_channel": {},
    "deepseek_fp8": {},
    "autofp8": {},
    "nvfp4_w4a4": {},
    "modelopt_nvfp4": {},
    "modelopt_fp8": {},
    "gptq": {"group_size": 32},
    "awq": {"group_size": 32},
}


def plain_tensors():
    """A small model in high precision, with one tensor of every odd kind."""
    random = np.random.default_rng(0)
    tensors = {f"{m}.weight": random.standard_normal((64, 64), np.float32).astype(ml_dtypes.bfloat16) for m in MODULES}
    return tensors | {"model.norm.weight": np.ones(64, np.float32), "step": np.asarray(7), "empty": np.zeros((0, 3))}


def quantised_tensors(scheme):
    """The same model under a scheme."""
    found = {name: array for name, array in plain_tensors().items() if not name.startswith(MODULES)}
    for module in MODULES:
        stored = scheme.compress(plain_tensors()[f"{module}.weight"])
        found |= {f"{module}.{suffix}": np.asarray(array) for suffix, array in stored.items()}
    return found


def by_name(name):
    return schemes.by_name(name, **SCHEMES[name])


def checkpoint(folder, tensors=None, config=CONFIG, shards=1):
    """A folder made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    return write_checkpoint(folder, plain_tensors() if tensors is None else tensors, shards=shards, config=config)


def file_of(tensors, folder):
    return (checkpoint(folder, tensors) / "model.safetensors").read_bytes()


def made_in(make):
    """A seed that needs a folder to be made."""
    with tempfile.TemporaryDirectory() as folder:
        return make(pathlib.Path(folder) / "made")


def change_file(mutator, data):
    """A safetensors file: its header's JSON under a right length, or any of its bytes."""
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if mutator.random.random() < 0.3 or LENGTH_BYTES + length > len(data):
        return mutator.bytes(data)
    text = mutator.json(data[LENGTH_BYTES : LENGTH_BYTES + length].rstrip(b" "))
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + data[LENGTH_BYTES + length :]


def change_weights(mutator, data):
    """A safetensors file whose tensors hold other bytes: infinities, NaN, the largest and smallest numbers."""
    length = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    if mutator.random.random() < 0.3 or length >= len(data):
        return change_file(mutator, data)
    pieces = (b"\x80\x7f", b"\x7f\x7f", b"\xff\xff", b"\x00\x80", b"\x01\x00", b"\x00\x00", b"\xff\x7b", b"\x80\xff")
    at = mutator.random.randrange(length, len(data)) & ~1
    piece = mutator.random.choice(pieces) * mutator.random.choice((1, 16, 32, 64, 2048))
    return (data[:at] + piece + data[at + len(piece) :])[: len(data)]


def read_file(data, folder):
    """Every tensor of a file."""
    path = folder / "model.safetensors"
    path.write_bytes(data)
    with SafetensorsFile(path) as file:
        for name in file.specs:
            file.raw(name)


def read_index(data, folder):
    """A folder whose index is the case."""
    path = folder / "indexed"
    if not path.exists():
        checkpoint(path, shards=2)
    (path / "model.safetensors.index.json").write_bytes(data)
    with CheckpointFolder(path) as opened:
        for name in opened.shard_of:
            opened.spec(name)


def index_seed():
    return made_in(lambda path: (checkpoint(path, shards=2) / "model.safetensors.index.json").read_bytes())


def inspect_config(data, folder):
    """Each scheme's checkpoint under a config that is the case; the first byte chooses."""
    name = list(SCHEMES)[data[0] % len(SCHEMES)] if data else "w4a16"
    path = folder / name
    if not path.exists():
        checkpoint(path, quantised_tensors(by_name(name)))
    (path / "config.json").write_bytes(data[1:])
    render(inspect(path))


def config_seeds():
    configs = [with_quantization(CONFIG, by_name(name).quantization_config(["lm_head"])) for name in SCHEMES]
    return [bytes([i]) + json.dumps(config).encode() for i, config in enumerate(configs)]


def change_config(mutator, data):
    """The config's JSON; seldom the checkpoint that it is said of."""
    if mutator.random.random() < 0.1:
        return bytes([mutator.random.randrange(len(SCHEMES))]) + data[1:]
    return data[:1] + mutator.document(data[1:])


def decode_weights(data, folder):
    """A quantised checkpoint whose tensors are the case, in high precision again; the first byte chooses the scheme."""
    name = list(SCHEMES)[data[0] % len(SCHEMES)] if data else "w4a16"
    path = folder / f"decoded {name}"
    if not path.exists():
        config = with_quantization(CONFIG, by_name(name).quantization_config([]))
        checkpoint(path, quantised_tensors(by_name(name)), config)
    (path / "model.safetensors").write_bytes(data[1:])
    shutil.rmtree(folder / "high", ignore_errors=True)
    dequantize(path, folder / "high")


def weights_seeds():
    return [
        bytes([i]) + made_in(lambda path, name=name: file_of(quantised_tensors(by_name(name)), path))
        for i, name in enumerate(SCHEMES)
    ]


def quantise_weights(data, folder):
    """A checkpoint whose tensors are the case, quantised; the first byte chooses the scheme. Finite stays finite."""
    name = list(SCHEMES)[data[0] % len(SCHEMES)] if data else "w4a16"
    source, low, high = folder / "plain", folder / "low", folder / "again"
    if not source.exists():
        checkpoint(source)
    (source / "model.safetensors").write_bytes(data[1:])
    for path in (low, high):
        shutil.rmtree(path, ignore_errors=True)
    report = convert(source, low, by_name(name), options=ConvertOptions(verify=True))
    if not report.changed:
        return
    dequantize(low, high, dtype="float32")
    with CheckpointFolder(source) as plain, CheckpointFolder(high) as decoded:
        for module in report.changed:
            finite = np.isfinite(plain.read(f"{module}.weight").astype(np.float32)).all()
            assert finite <= np.isfinite(decoded.read(f"{module}.weight")).all(), f"{module} is finite no longer"


def plain_seeds():
    data = made_in(lambda path: file_of(None, path))
    return [bytes([i]) + data for i in range(len(SCHEMES))]


def after_choice(change):
    """A change of all but the first byte."""
    return lambda mutator, data: data[:1] + change(mutator, data[1:])


TARGETS = {
    "safetensors": Target(read_file, lambda: [made_in(lambda p: file_of(None, p))], (CheckpointError,), change_file),
    "index": Target(read_index, lambda: [index_seed()], (CheckpointError,)),
    "config": Target(inspect_config, config_seeds, (CheckpointError,), change_config),
    "dequantize": Target(decode_weights, weights_seeds, (CheckpointError,), after_choice(change_weights)),
    "convert": Target(quantise_weights, plain_seeds, (CheckpointError,), after_choice(change_weights)),
}
