"""llama.cpp as a rival in generation: a GGUF file of random Q4_0 weights, and a server in this process that reads it.

Needs the package xllamacpp from PyPI.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from jaxlowprec.checkpoints import gguf

BLOCK = 32


def q4_0(shape: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """Random Q4_0 weights [N, K]: bytes [N, 18 K / 32], for each block a float16 scale and 32 codes."""
    n, k = shape
    blocks = random.integers(0, 256, (n, k // BLOCK, 18), np.uint8)
    scale = np.full((n, k // BLOCK, 1), 0.1 * k**-0.5, np.float16)
    blocks[..., :2] = scale.view(np.uint8).reshape(n, k // BLOCK, 2)
    return blocks.reshape(n, -1)


def metadata(config: Any) -> dict[str, Any]:
    """What llama.cpp needs to know of a Llama of a `DecoderConfig`, with a made-up vocabulary."""
    sizes = {
        "context_length": config.longest,
        "embedding_length": config.width,
        "block_count": config.layers,
        "feed_forward_length": config.hidden,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.key_heads,
        "rope.dimension_count": config.head,
        "vocab_size": config.vocabulary,
    }
    numbers = {"attention.layer_norm_rms_epsilon": config.epsilon, "rope.freq_base": config.rope.theta}
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words = [f"w{i}" for i in range(config.vocabulary - len(special))]
    return {
        "general.architecture": "llama",
        **{f"llama.{key}": np.uint32(size) for key, size in sizes.items()},
        **{f"llama.{key}": np.float32(number) for key, number in numbers.items()},
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*special, *words],
        "tokenizer.ggml.scores": np.zeros(config.vocabulary, np.float32),
        "tokenizer.ggml.token_type": np.asarray([2, 3, 3, *[6] * 256, *[1] * len(words)], np.int32),
        "tokenizer.ggml.bos_token_id": np.uint32(1),
        "tokenizer.ggml.eos_token_id": np.uint32(2),
    }


def tensors(config: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors: those with two axes are matrices, the others norms."""
    heads, keys = config.heads * config.head, config.key_heads * config.head
    layer = {
        "attn_norm": (config.width,),
        "attn_q": (heads, config.width),
        "attn_k": (keys, config.width),
        "attn_v": (keys, config.width),
        "attn_output": (config.width, heads),
        "ffn_norm": (config.width,),
        "ffn_gate": (config.hidden, config.width),
        "ffn_up": (config.hidden, config.width),
        "ffn_down": (config.width, config.hidden),
    }
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocabulary, config.width)}
    for i in range(config.layers):
        found |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    return found | {"output_norm.weight": (config.width,), "output.weight": (config.vocabulary, config.width)}


def write_gguf(file: pathlib.Path, config: Any) -> None:
    """Writes a Llama of a `DecoderConfig`, all matrices in Q4_0."""
    shapes, random = tensors(config), np.random.default_rng(0)
    types = {1: gguf.TYPES["F32"], 2: gguf.TYPES["Q4_0"]}
    specs = {name: gguf.TensorSpec(types[len(shape)], shape) for name, shape in shapes.items()}
    with gguf.GGUFWriter(file, specs, metadata(config)) as writer:
        for name, shape in shapes.items():
            writer.write(name, np.ones(shape, np.float32) if len(shape) == 1 else q4_0(shape, random))


class LlamaCpp:
    """llama.cpp serving a GGUF file."""

    def __init__(self, file: pathlib.Path, threads: int, places: int):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel = places, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.warmup, params.n_gpu_layers = True, 0
        self._server = xllamacpp.Server(params)
        self.system = str(xllamacpp.get_system_info())

    def generate(self, prompt: int, count: int) -> float:
        """Generates tokens after a prompt of so many; the seconds that they took, as llama.cpp says."""
        request = {"prompt": [5] * prompt, "max_tokens": count, "temperature": 0.0, "ignore_eos": True}
        said = self._server.handle_completions(request | {"cache_prompt": False, "timings_per_token": True})
        return said["timings"]["predicted_ms"] / 1e3
