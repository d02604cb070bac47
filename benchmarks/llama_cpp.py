"""llama.cpp as a rival in generation: a GGUF file of random Q4_0 weights, and a server in this process that reads it.

Needs the packages gguf and xllamacpp from PyPI.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

BLOCK = 32


def q4_0(shape: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """Random Q4_0 weights [N, K]: bytes [N, 18 K / 32], for each block a float16 scale and 32 codes."""
    n, k = shape
    blocks = random.integers(0, 256, (n, k // BLOCK, 18), np.uint8)
    scale = np.full((n, k // BLOCK, 1), 0.1 * k**-0.5, np.float16)
    blocks[..., :2] = scale.view(np.uint8).reshape(n, k // BLOCK, 2)
    return blocks.reshape(n, -1)


def write_gguf(file: pathlib.Path, config: Any) -> None:
    """Writes a Llama of a `DecoderConfig`, all matrices in Q4_0."""
    import gguf

    writer, random = gguf.GGUFWriter(str(file), "llama"), np.random.default_rng(0)
    writer.add_context_length(config.longest)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.hidden)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.key_heads)
    writer.add_layer_norm_rms_eps(config.epsilon)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head)
    writer.add_vocab_size(config.vocabulary)
    writer.add_tokenizer_model("llama")
    special = [b"<unk>", b"<s>", b"</s>", *(f"<0x{i:02X}>".encode() for i in range(256))]
    words = [f"w{i}".encode() for i in range(config.vocabulary - len(special))]
    writer.add_token_list([*special, *words])
    writer.add_token_scores([0.0] * config.vocabulary)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def matrix(name: str, n: int, k: int) -> None:
        writer.add_tensor(name, q4_0((n, k), random), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(config.width, np.float32))

    heads, keys = config.heads * config.head, config.key_heads * config.head
    matrix("token_embd.weight", config.vocabulary, config.width)
    norm("output_norm.weight")
    matrix("output.weight", config.vocabulary, config.width)
    for i in range(config.layers):
        for name, n, k in (
            ("attn_q", heads, config.width),
            ("attn_k", keys, config.width),
            ("attn_v", keys, config.width),
            ("attn_output", config.width, heads),
            ("ffn_gate", config.hidden, config.width),
            ("ffn_up", config.hidden, config.width),
            ("ffn_down", config.width, config.hidden),
        ):
            matrix(f"blk.{i}.{name}.weight", n, k)
        norm(f"blk.{i}.attn_norm.weight")
        norm(f"blk.{i}.ffn_norm.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
