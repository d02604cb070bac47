"""Small checkpoints as Hugging Face folders hold them, and what is in a folder."""

import json
import os
import pathlib

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxlowprec.checkpoints.files.dtypes import file_dtype
from jaxlowprec.checkpoints.files.folder import INDEX_FILE, CheckpointFolder, write_index
from jaxlowprec.checkpoints.files.safetensors_file import SafetensorsWriter
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec

HIDDEN, INNER, VOCABULARY = 128, 256, 40
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN}


def llama(layers=2, dtype=ml_dtypes.bfloat16, seed=0):
    """Tensors of a Llama-like model; each of another magnitude."""
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{p}_proj.weight": (HIDDEN if p in "qo" else HIDDEN // 2, HIDDEN) for p in "qkvo"}
        shapes |= {f"{at}.self_attn.q_proj.bias": (HIDDEN,)}
        shapes |= {f"{at}.mlp.{p}_proj.weight": (INNER, HIDDEN) for p in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (HIDDEN, INNER), f"{at}.input_layernorm.weight": (HIDDEN,)}
    random = np.random.default_rng(seed)
    return {
        name: (random.standard_normal(shape, np.float32) * np.float32(0.01 * (1 + i % 7))).astype(dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }


def write_checkpoint(path, tensors, shards=3, config=CONFIG):
    """A folder with an index (for several shards), a config, a tokenizer and a subfolder. Neighbours are apart."""
    path = pathlib.Path(path)
    path.mkdir(parents=True)
    names = (
        [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)] if shards > 1 else ["model.safetensors"]
    )
    shard_of = {name: names[i % shards] for i, name in enumerate(tensors)}
    for shard in names:
        held = {name: tensors[name] for name in tensors if shard_of[name] == shard}
        with SafetensorsWriter(
            path / shard, {n: TensorSpec(file_dtype(a.dtype), a.shape) for n, a in held.items()}
        ) as writer:
            for name, array in held.items():
                writer.write(name, array)
    if shards > 1:
        write_index(path, shard_of, sum(a.nbytes for a in tensors.values()))
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    (path / "extra").mkdir()
    (path / "extra" / "notes.txt").write_text("kept")
    return path


def read_tensors(path):
    """All tensors of a checkpoint."""
    with CheckpointFolder(path) as folder:
        return {name: folder.read(name) for name in folder.shard_of}


def read_config(path):
    return json.loads((pathlib.Path(path) / "config.json").read_text())


def read_index(path):
    return json.loads((pathlib.Path(path) / INDEX_FILE).read_text())


def contents(path):
    """Relative path to bytes of every file."""
    path = pathlib.Path(path)
    return {
        str(pathlib.Path(d, f).relative_to(path)): pathlib.Path(d, f).read_bytes()
        for d, _, fs in os.walk(path)
        for f in fs
    }


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def merged(folder, adapter, target):
    """The folder of a model in which the weights of another have taken up an adapter, in float32."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    said = json.loads((adapter / "adapter_config.json").read_text())
    weights = {name: np.float32(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    halves = load_file(adapter / "adapter_model.safetensors")
    for name, a in halves.items():
        module, found, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
        if found:
            b = halves[name.replace(".lora_A.", ".lora_B.")]
            weights[f"{module}.weight"] += said["lora_alpha"] / said["r"] * b @ a
    save_file(weights, target / "model.safetensors")
    return target
