"""Tiny models as folders, of the families that go to GGUF, and their tokenizers."""

import json

import ml_dtypes
import numpy as np

from tests.checkpoints.small_models import write_checkpoint

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY, EXPERTS = 64, 96, 2, 4, 2, 32, 300, 4
QWEN2 = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # heads as wide as the model, as llama.cpp needs them there
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
MOE = {
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": INNER,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(family="llama", **more):
    sizes = SIZES | (QWEN2 if family == "qwen2" else {})
    return {"architectures": [CLASSES[family]], "model_type": family, **sizes, **MOE.get(family, {}), **more}


def tensors(family="llama", dtype=ml_dtypes.bfloat16, seed=0, tied=False):
    """The tensors of a tiny model, as its folder has them."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes |= {} if tied else {"lm_head.weight": (VOCABULARY, HIDDEN)}
    q, kv = (HIDDEN, HEAD) if family == "qwen2" else (HEADS * HEAD, KV_HEADS * HEAD)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{p}_proj.weight": (q if p == "q" else kv, HIDDEN) for p in "qkv"}
        shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, q)
        if family == "qwen2":
            shapes |= {f"{at}.self_attn.{p}_proj.bias": (q if p == "q" else kv,) for p in "qkv"}
        if family.startswith("qwen3"):
            shapes |= {f"{at}.self_attn.{p}_norm.weight": (HEAD,) for p in "qk"}
        shapes |= {f"{at}.{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        parents = [f"{at}.mlp"]
        if family in MOE:
            block = f"{at}.block_sparse_moe" if family == "mixtral" else f"{at}.mlp"
            shapes[f"{block}.gate.weight"] = (EXPERTS, HIDDEN)
            parents = [f"{block}.experts.{expert}" for expert in range(EXPERTS)]
        for parent in parents:
            shapes |= {f"{parent}.{gate}.weight": (INNER, HIDDEN), f"{parent}.{up}.weight": (INNER, HIDDEN)}
            shapes[f"{parent}.{down}.weight"] = (HIDDEN, INNER)
    random = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes.items():
        spread = random.standard_normal(shape, np.float32) * np.float32(0.1)
        made[name] = (1 + spread if "norm" in name else spread).astype(dtype)
    return made


def folder(path, family="llama", *, held=None, shards=2, tokenizer=None, **more):
    """A folder of a tiny model. `held`: its tensors, if not those of `tensors`."""
    write_checkpoint(path, tensors(family) if held is None else held, shards=shards, config=config(family, **more))
    (path / "tokenizer.json").unlink()
    if tokenizer:
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def bytes_as_characters():
    """GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def byte_level(merges=(("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("1", "2")), **model):
    """A tokenizer.json as Llama 3's: 256 bytes, a few merges, two special tokens."""
    vocab = {character: i for i, character in enumerate(bytes_as_characters())}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    split = {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    bos = {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    specials = {"<|begin|>": {"id": "<|begin|>", "ids": [len(vocab)], "tokens": ["<|begin|>"]}}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": len(vocab) + i, "content": t, **flags} for i, t in enumerate(("<|begin|>", "<|end|>"))],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, sequence],
            "pair": [bos, sequence, sequence],
            "special_tokens": specials,
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocab,
            "merges": [list(merge) for merge in merges],
            **model,
        },
    }


WORDS = ("he", "ll", "▁he", "hell", "▁hell", "lo", "hello", "▁hello", "wo", "▁wo", "rl", "ld", "rld")


def from_sentencepiece():
    """A tokenizer.json as Llama 2's: special tokens, bytes, pieces by falling score, then letters."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    letters = ["▁", *"helowrd"]
    for piece in (*WORDS, *letters):
        vocab[piece] = len(vocab)
    ranked = {piece: i for i, piece in enumerate(WORDS)}
    merges = [
        [piece[:at], piece[at:]]
        for piece in sorted(WORDS, key=ranked.get)
        for at in range(1, len(piece))
        if piece[:at] in vocab and piece[at:] in vocab
    ]
    content = byte_level(())
    flags = content["added_tokens"][0] | {"special": True}
    content["added_tokens"] = [flags | {"id": i, "content": text} for i, text in enumerate(("<unk>", "<s>", "</s>"))]
    content["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    content["pre_tokenizer"] = None
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    content["post_processor"]["single"][0] = content["post_processor"]["pair"][0] = bos
    content["post_processor"]["special_tokens"] = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    content["model"] |= {
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    }
    return content
